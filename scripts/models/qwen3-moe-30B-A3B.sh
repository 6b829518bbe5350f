#!/usr/bin/env bash
# The same shape as qwen3-30B-A3B.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3-30B-A3B.sh"
