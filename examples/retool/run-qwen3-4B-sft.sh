#!/usr/bin/env bash
# What goes before run-qwen3-4B.sh: supervised fine-tuning on dialogues with programs, messages of the role `tool` masked.
#
#   SFT_DATA=dialogues.parquet SAVE=checkpoints/retool-sft bash examples/retool/run-qwen3-4B-sft.sh
#   REF_LOAD=checkpoints/retool-sft bash examples/retool/run-qwen3-4B.sh
set -euo pipefail

export RUN_NAME="${RUN_NAME:-retool-sft-qwen3-4B}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../../scripts/run-qwen3-4B-base-sft.sh" "$@"
