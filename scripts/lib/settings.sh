#!/usr/bin/env bash
# Settings that the launch scripts share. A script puts these arrays into its own where they apply; a flag that is given
# again later on the command line wins.

# --- where things are ---------------------------------------------------------------------------------------------------
# On a cluster: directories that all nodes see under the same path.
BASE_DIR="${BASE_DIR:-$HOME/slime}"
MODELS_DIR="${MODELS_DIR:-$BASE_DIR/models}"
DATA_DIR="${DATA_DIR:-$BASE_DIR/data}"
CHECKPOINTS_DIR="${CHECKPOINTS_DIR:-$BASE_DIR/checkpoints}"

if [[ "${MODEL:-}" == toy ]]; then toy_paths; fi

# The Hugging Face directory $1 under $MODELS_DIR gives tokenizer, config and what engines load; directory $2, or the same,
# gives initial weights and reference; checkpoints go to a directory named after the script. HF_CHECKPOINT, REF_LOAD, LOAD
# and SAVE say otherwise where they are set.
checkpoint_paths() {
  HF_CHECKPOINT="${HF_CHECKPOINT:-$MODELS_DIR/$1}"
  REF_LOAD="${REF_LOAD:-${2:+$MODELS_DIR/$2}}"
  REF_LOAD="${REF_LOAD:-$HF_CHECKPOINT}"
  SAVE="${SAVE:-$CHECKPOINTS_DIR/$RUN_NAME}"
  LOAD="${LOAD:-$SAVE}"
}

SAVE_ARGS=(--save-interval 20)

# --- data ---------------------------------------------------------------------------------------------------------------

PROMPT_DATA="${PROMPT_DATA:-$DATA_DIR/dapo-math-17k/dapo-math-17k.jsonl}"
EVAL_DATA="${EVAL_DATA:-$DATA_DIR/aime-2024/aime-2024.jsonl}"
SFT_DATA="${SFT_DATA:-$DATA_DIR/openhermes2_5/openhermes2_5.parquet}"

MATH_DATA_ARGS=(
  --prompt-data "$PROMPT_DATA"
  --input-key prompt
  --rollout-shuffle
  --balance-data
  --num-rollout 3000
)
# KEEP_MESSAGES=1: functions of the user get prompts as messages, and have them rendered themselves.
if [[ "${KEEP_MESSAGES:-0}" != 1 ]]; then MATH_DATA_ARGS+=(--apply-chat-template); fi

MATH_EVAL_ARGS=(
  --eval-interval 20
  --eval-prompt-data aime "$EVAL_DATA"
  --n-samples-per-eval-prompt 16
  --eval-max-response-len 16384
  --eval-top-p 1
)
# A file of evaluation sets takes their place.
if [[ -n "${EVAL_CONFIG:-}" ]]; then MATH_EVAL_ARGS=(--eval-interval 20 --eval-config "$EVAL_CONFIG"); fi

# Drops prompts whose answers all got the same reward: they would teach nothing.
NONZERO_STD_FILTER_ARGS=(
  --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)

# --- training -----------------------------------------------------------------------------------------------------------

RECOMPUTE_ARGS=(
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
)

ADAM_ARGS=(
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)

# The optimizer's state and step in host memory.
CPU_OPTIMIZER_ARGS=(
  --optimizer-cpu-offload
  --overlap-cpu-optimizer-d2h-h2d
  --use-precision-aware-optimizer
)

# A weight of zero for the KL terms. With --use-kl-loss the distance to the reference is computed and logged all the same.
NO_KL_ARGS=(
  --kl-loss-coef 0.00
  --kl-loss-type low_var_kl
  --entropy-coef 0.00
)

CLIPPED_GRPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  "${NO_KL_ARGS[@]}"
)

SFT_LOSS_ARGS=(
  --loss-type sft_loss
  --calculate-per-token-loss
  --disable-compute-advantages-and-returns
  --debug-train-only
)

SFT_DATA_ARGS=(
  --rollout-function-path slime.rollout.sft_rollout.generate_rollout
  --prompt-data "$SFT_DATA"
  --input-key messages
  --rollout-shuffle
  --num-epoch 3
  --rollout-batch-size 128
  --global-batch-size 128
)

SFT_OPTIMIZER_ARGS=(
  --optimizer adam
  --lr 1e-5
  --lr-decay-style cosine
  --min-lr 1e-6
  --lr-warmup-fraction 0.1
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)

PRECISION_ARGS=(
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend auto
)

# --- engines ------------------------------------------------------------------------------------------------------------

# Three drafted tokens per step, from the model's own multi-token-prediction layer.
EAGLE_ARGS=(
  --sglang-speculative-algorithm EAGLE
  --sglang-speculative-num-steps 3
  --sglang-speculative-eagle-topk 1
  --sglang-speculative-num-draft-tokens 4
)

# Trains that layer with the rest, so that its drafts keep being accepted.
MTP_TRAINING_ARGS=(
  --mtp-num-layers 1
  --enable-mtp-training
  --mtp-loss-scaling-factor 0.2
)

# --- tracking -----------------------------------------------------------------------------------------------------------

# Weights & Biases, when the environment holds a key. The key itself never becomes an argument.
WANDB_ARGS=()
if [[ -n "${WANDB_API_KEY:-}" ]]; then
  WANDB_ARGS=(
    --use-wandb
    --wandb-project "${WANDB_PROJECT:-slime}"
    --wandb-group "${WANDB_GROUP:-$RUN_NAME}"
  )
fi
