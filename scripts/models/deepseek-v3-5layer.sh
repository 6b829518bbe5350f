#!/usr/bin/env bash
# DeepSeek-V3 cut to its first 5 layers, for trials.
MODEL_ARGS_NUM_LAYERS="${MODEL_ARGS_NUM_LAYERS:-5}" source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"
