#!/usr/bin/env bash
# What goes before run-qwen3-4B.sh: supervised fine-tuning on dialogues with programs, messages of the role `tool` masked.
#
#   bash examples/retool/run-qwen3-4B-sft.sh --dry-run
#   SFT_DATA=dialogues.parquet SAVE=checkpoints/retool-sft bash examples/retool/run-qwen3-4B-sft.sh
#   REF_LOAD=checkpoints/retool-sft bash examples/retool/run-qwen3-4B.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-retool-sft-qwen3-4B}"
exec bash "$HERE/../../scripts/run-qwen3-4B-base-sft.sh" "$@"
