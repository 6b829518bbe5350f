#!/usr/bin/env bash
# The same shape as deepseek-v3.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
