#!/usr/bin/env bash
# The same shape as qwen3-235B-A22B.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-235B-A22B.sh"
