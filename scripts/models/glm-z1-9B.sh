#!/usr/bin/env bash
# The same shape as glm4-9B.
source "$(dirname "${BASH_SOURCE[0]}")/glm4-9B.sh"
