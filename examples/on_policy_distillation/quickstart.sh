#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example on_policy_distillation` has of its own: a teacher, trained once and served by SGLang.
TASK_ARGS=(--data examples/on_policy_distillation/toy_task.py:write_data)
TEACHER_DIR="$SEED_DIR/teacher"
SERVER_PORT="$(source scripts/lib/ray_node.sh && free_port 30100)"
SERVER=("$PYTHON_BIN" tools/serve_on_cpu.py --model-path "$TEACHER_DIR/hf" --port "$SERVER_PORT")

EXAMPLE_ARGS=(
  --use-opd
  --opd-type sglang
  --opd-kl-coef 1.0
  --rm-url "http://127.0.0.1:$SERVER_PORT/generate"
  --custom-rm-path examples/on_policy_distillation/distill.py:reward
  --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
)

# The teacher learns as the student did, from demonstrations without mistakes.
prepare() {
  step "the teacher: $TEACHER_DIR"
  if [[ -d "$TEACHER_DIR/hf" ]]; then
    echo "reused"
  else
    TENSORBOARD_DIR="$TEACHER_DIR/tensorboard" run "$PYTHON_BIN" train.py "${SFT_RUN_ARGS[@]}" \
      --prompt-data "$TASK_DIR/teacher.jsonl" --load "$TEACHER_DIR" --save "$TEACHER_DIR" --save-hf "$TEACHER_DIR/hf"
  fi
}
