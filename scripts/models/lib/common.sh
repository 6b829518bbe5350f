#!/usr/bin/env bash
# What every model script needs: CKPT_ARGS, and the two overrides that a user may set before sourcing one.
#
#   HF_CHECKPOINT, REF_LOAD, LOAD, SAVE   become CKPT_ARGS where they are set
#   MODEL_ARGS_NUM_LAYERS                 another number of layers
#   MODEL_ARGS_ROTARY_BASE                another base of the rotary embedding

CKPT_ARGS=()
if [[ -n "${HF_CHECKPOINT:-}" ]]; then CKPT_ARGS+=(--hf-checkpoint "$HF_CHECKPOINT"); fi
if [[ -n "${REF_LOAD:-}" ]]; then CKPT_ARGS+=(--ref-load "$REF_LOAD"); fi
if [[ -n "${LOAD:-}" ]]; then CKPT_ARGS+=(--load "$LOAD"); fi
if [[ -n "${SAVE:-}" ]]; then CKPT_ARGS+=(--save "$SAVE"); fi

# The number of layers: the override, else the model's own, $1.
num_layers() { printf '%s' "${MODEL_ARGS_NUM_LAYERS:-$1}"; }

# The base of the rotary embedding: the override, else the model's own, $1.
rotary_base() { printf '%s' "${MODEL_ARGS_ROTARY_BASE:-$1}"; }

# The pattern of a mixture of experts of $1 layers (or the override), the first $2 of them dense: [0]*3+[1]*58
moe_layer_freq() {
  local layers dense="$2"
  layers="$(num_layers "$1")"
  if ((dense > layers)); then dense="$layers"; fi
  if ((dense == 0)); then
    printf '[1]*%d' "$layers"
  elif ((dense == layers)); then
    printf '[0]*%d' "$layers"
  else
    printf '[0]*%d+[1]*%d' "$dense" "$((layers - dense))"
  fi
}
