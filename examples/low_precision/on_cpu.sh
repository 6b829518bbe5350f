#!/usr/bin/env bash
# Low precision without a GPU: a toy model in FP8 and in INT4, two training steps for engines that would serve each, and exports in
# the same formats.
#
#   bash examples/low_precision/on_cpu.sh [DIRECTORY]      outputs/low_precision, unless given
set -euo pipefail
CALLER_DIR="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/lib/programs.sh
export SLIME_ACCELERATOR=cpu
PYTHON_BIN="${PYTHON_BIN:-.venv/bin/python}"
case "${1:-}" in
  "") OUT="outputs/low_precision" ;;
  /*) OUT="$1" ;;
  *) OUT="$CALLER_DIR/$1" ;;
esac
GROUP_SIZE=32

if [[ ! -f "$OUT/task.json" ]]; then
  "$PYTHON_BIN" tools/make_toy_task.py "$OUT" --train-size 8 --eval-size 8 --sft-size 64
fi
"$PYTHON_BIN" tools/convert_hf_to_fp8.py --model-dir "$OUT/model" --save-dir "$OUT/model-fp8" --block-size 32 32 --force
"$PYTHON_BIN" tools/convert_hf_to_int4_direct.py --model-dir "$OUT/model" --save-dir "$OUT/model-int4" \
  --group-size "$GROUP_SIZE" --force

# Demonstrations need no engines, which do not serve such weights without a GPU.
train() {
  local format="$1"
  shift
  run env TENSORBOARD_DIR="$OUT/$format/tensorboard" "$@" "$PYTHON_BIN" train.py \
    --hf-checkpoint "$OUT/model-$format" \
    --ref-load "$OUT/model" \
    --model-args-from-hf \
    --debug-train-only \
    --loss-type sft_loss \
    --disable-compute-advantages-and-returns \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
    --prompt-data "$OUT/sft.jsonl" \
    --input-key messages \
    --num-rollout 2 \
    --rollout-batch-size 32 \
    --actor-num-gpus-per-node 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 4096 \
    --lr 1e-4 \
    --lr-decay-style constant \
    --save "$OUT/$format/checkpoints" \
    --save-interval 2 \
    --save-hf "$OUT/$format/hf"
  "$PYTHON_BIN" tools/inspect_checkpoint.py "$OUT/$format/hf"
}

train fp8
train int4 OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 OPEN_TRAINING_INT4_GROUP_SIZE="$GROUP_SIZE"
"$PYTHON_BIN" tools/fp8_cast_bf16.py --input-fp8-hf-path "$OUT/fp8/hf" --output-bf16-hf-path "$OUT/fp8/hf-bf16" --force
echo "exports, as engines would be sent them: $OUT/fp8/hf and $OUT/int4/hf; the first in 16 bits again: $OUT/fp8/hf-bf16"
