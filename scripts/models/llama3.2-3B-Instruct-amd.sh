#!/usr/bin/env bash
# The shape of llama3.2-3B-Instruct, under the name that launch scripts for AMD GPUs use.
source "$(dirname "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
