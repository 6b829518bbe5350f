#!/usr/bin/env bash
# The same shape as glm4.5-355B-A32B.
source "$(dirname "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"
