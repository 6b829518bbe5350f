#!/usr/bin/env bash
# The same shape as kimi-k2.
source "$(dirname "${BASH_SOURCE[0]}")/kimi-k2.sh"
