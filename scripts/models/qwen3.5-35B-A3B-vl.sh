#!/usr/bin/env bash
# Qwen/Qwen3.5-35B-A3B with its vision tower.
source "$(dirname "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"

MODEL_ARGS+=(
  --custom-model-provider-path slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider
)
