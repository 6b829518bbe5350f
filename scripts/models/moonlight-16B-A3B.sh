#!/usr/bin/env bash
# The same shape as moonlight.
source "$(dirname "${BASH_SOURCE[0]}")/moonlight.sh"
