"""What users of other systems type, and what it is called here: answers to words that are no flags of ours.

The names are those of trainers in common use: flags (`--actor_learning_rate`), flags with dots (`--actor.lr`) and overrides
(`actor_rollout_ref.actor.optim.lr=1e-6`). A row stands for one thing; capitals, `_` and `-` are alike, and of a dotted name
the longest ending that a row has counts.
"""

import re
from collections.abc import Collection

# Names that nobody would give to a value of their own, so that they are answered in files too -> the flags that are meant.
SAME: dict[str, tuple[str, ...]] = {
    "--learning-rate": ("--lr",),
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel-size"), ("--tensor-model-parallel-size",)),
    **dict.fromkeys(("--pp", "--pp-size", "--pipeline-parallel-size"), ("--pipeline-model-parallel-size",)),
    **dict.fromkeys(("--cp", "--cp-size"), ("--context-parallel-size",)),
    **dict.fromkeys(("--ep", "--ep-size", "--expert-parallel-size"), ("--expert-model-parallel-size",)),
    "--batch-size": ("--rollout-batch-size", "--global-batch-size", "--micro-batch-size"),
    "--max-grad-norm": ("--clip-grad",),
    "--warmup-steps": ("--lr-warmup-iters",),
}

_LORA = "LoRA is not here yet: every parameter is trained; --only-train-params-name-list trains some of them"
_REWARD_MODEL = (
    "reward models are not here yet: serve yours and ask it in a function of your own (--custom-rm-path, --rm-url)"
)
_QUANTISED = "training on quantised weights is not here yet; engines serve what --hf-checkpoint holds"
_ENGINE = "the engines are SGLang servers: set them up with --sglang-*"
_ZERO = "training is Megatron-Core: shard the optimizer with --use-distributed-optimizer"
_SHARDED = "FSDP is not here yet (--train-backend fsdp plans it): training is Megatron-Core"
_CRITIC = "values of the critic alone stand in --megatron-config-path; --advantage-estimator ppo switches it on"
_EPOCHS = "one rollout is trained once, in --num-steps-per-rollout steps; drop it"
_STEPS = "count rollouts: --num-rollout"

# Names, separated by spaces -> the answer: flags alone ("did you mean"), or a sentence.
_ROWS: tuple[tuple[str, str], ...] = (
    # model and checkpoints
    ("model-name-or-path model-path pretrain actor-pretrain base-model model.path policy.model-name", "--hf-checkpoint"),
    ("ref-model ref-pretrain ref-model-path reference-model ref.model.path", "--ref-load"),
    ("critic-pretrain critic.model.path critic.optim.lr critic-learning-rate critic.*", _CRITIC),
    ("reward-pretrain reward-model reward-model-path reward-model.path reward-model.enable reward-model.*", _REWARD_MODEL),
    ("output-dir save-path default-local-dir checkpoint-dir save-dir", "--save"),
    ("ckpt-path resume-from-checkpoint resume-from resume-from-path load-checkpoint resume-mode resume",
     "a run resumes from the checkpoint in --load; give --load and --save the same directory"),
    ("save-steps save-freq save-period save-every", "--save-interval"),
    ("save-total-limit max-ckpt-num max-actor-ckpt-to-keep keep-top-k", "--keep-last"),
    ("save-hf-ckpt save-hf-model", "--save-hf"),
    # LoRA and the like
    ("lora lora-rank lora-r lora-alpha lora-dropout lora-target-modules target-modules lora-path use-lora use-peft peft "
     "peft-config lora-adapter-path lora-cfg.* lora.*", _LORA),
    ("load-in-4bit load-in-8bit qlora use-qlora bnb-4bit-compute-dtype quantization-config", _QUANTISED),
    # data
    ("dataset dataset-name dataset-path train-file train-files train-data prompt-dataset", "--prompt-data"),
    ("eval-dataset eval-data val-file val-files eval-prompt-dataset", "--eval-prompt-data name path"),
    ("prompt-key prompt-field dataset-text-field", "--input-key"),
    ("answer-key response-key reward-fn-key ground-truth-key", "--label-key"),
    ("prompt-max-len max-prompt-length max-prompt-len max-input-seq-length", "--rollout-max-prompt-len"),
    ("generate-max-len max-response-length max-completion-length max-new-tokens max-tokens response-length",
     "--rollout-max-response-len"),
    ("max-len max-length max-model-len max-seq-len max-seq-length max-total-sequence-length", "--rollout-max-context-len"),
    ("shuffle data.shuffle", "--rollout-shuffle"),
    ("packing-samples sequence-packing use-remove-padding sequence-packing.enabled",
     "sequences are always packed; drop it"),
    # sizes and lengths of the run
    ("train-batch-size data.train-batch-size num-prompts-per-step gen-batch-size", "--rollout-batch-size"),
    ("ppo-mini-batch-size mini-batch-size train-global-batch-size num-mini-batches", "--global-batch-size"),
    ("per-device-train-batch-size micro-train-batch-size ppo-micro-batch-size ppo-micro-batch-size-per-gpu "
     "train-micro-batch-size micro-batch-size-per-gpu micro-rollout-batch-size log-prob-micro-batch-size "
     "log-prob-micro-batch-size-per-gpu logprob-batch-size forward-micro-batch-size",
     "--micro-batch-size or --max-tokens-per-gpu"),
    ("use-dynamic-bsz dynamic-batching dynamic-batching.enabled", "--use-dynamic-batch-size"),
    ("ppo-max-token-len-per-gpu log-prob-max-token-len-per-gpu max-token-len-per-gpu", "--max-tokens-per-gpu"),
    ("gradient-accumulation-steps grad-accum-steps",
     "gradients are accumulated over all micro-batches of --global-batch-size; drop it"),
    ("num-generations num-generations-per-prompt rollout.n n-samples group-size num-samples-per-prompt",
     "--n-samples-per-prompt"),
    ("max-steps total-training-steps max-num-steps num-iterations-total train-steps num-steps", _STEPS),
    ("num-episodes num-train-epochs total-epochs epochs", "--num-epoch"),
    ("ppo-epochs max-epochs num-ppo-epochs num-iterations", _EPOCHS),
    # nodes and GPUs
    ("n-gpus-per-node gpus-per-node num-gpus actor-num-gpus cluster.gpus-per-node", "--actor-num-gpus-per-node"),
    ("nnodes num-nodes cluster.num-nodes", "--actor-num-nodes"),
    ("colocate-all-models colocate-actor-ref colocated.enabled hybrid-engine", "--colocate"),
    ("ref-num-nodes ref-num-gpus-per-node", "the reference model shares the GPUs of the actor; drop it"),
    ("reward-num-nodes reward-num-gpus-per-node", _REWARD_MODEL),
    ("vllm-num-engines num-engines num-inference-engines", "--rollout-num-gpus and --rollout-num-gpus-per-engine"),
    ("vllm-tensor-parallel-size rollout.tensor-model-parallel-size vllm-cfg.tensor-parallel-size infer-tp",
     "--rollout-num-gpus-per-engine"),
    ("ulysses-sequence-parallel-size ring-attn-size ring-attn sp-size", "--context-parallel-size"),
    ("param-offload optimizer-offload fsdp-config.param-offload offload-policy", "--offload-train"),
    ("adam-offload cpu-offload", "--optimizer-cpu-offload"),
    ("zero-stage deepspeed deepspeed-config zpg", _ZERO),
    ("fsdp fsdp-config fsdp2 dtensor-cfg.* actor.strategy", _SHARDED),
    ("gradient-checkpointing-enable enable-gradient-checkpointing activation-checkpointing", "--gradient-checkpointing"),
    ("flash-attn use-flash-attention attn-impl", "--attention-backend"),
    ("use-liger use-liger-kernel liger-kernel", "fused kernels are those of Megatron-Core and Transformer Engine; drop it"),
    # engines
    ("use-vllm vllm-mode vllm-server-host vllm-server-port rollout.name vllm-enable-sleep vllm-sync-backend enforce-eager "
     "vllm-* vllm-cfg.*", _ENGINE),
    ("gpu-memory-utilization vllm-gpu-memory-utilization", "--sglang-mem-fraction-static"),
    ("max-num-seqs max-running-requests", "--sglang-max-running-requests"),
    ("temperature rollout.temperature generation.temperature", "--rollout-temperature"),
    ("top-p rollout.top-p generation.top-p", "--rollout-top-p"),
    ("top-k rollout.top-k generation.top-k", "--rollout-top-k"),
    ("stop-strings stop-token-ids", "--rollout-stop or --rollout-stop-token-ids"),
    ("async-engine async-train async-grpo", "train_async.py is the asynchronous loop (not here yet)"),
    ("enable-prefix-caching", "the engines keep prefixes anyway; drop it"),
    # objective
    ("adv-estimator algo algorithm estimator", "--advantage-estimator"),
    ("actor-learning-rate actor-lr actor.lr optim.lr optimizer.lr optimizer.kwargs.lr", "--lr"),
    ("lam lambda gae-lambda", "--lambd"),
    ("epsilon clip-ratio clip-ratio-low clip-range ratio-clip-min clip-eps eps-clip-low", "--eps-clip"),
    ("epsilon-high clip-ratio-high ratio-clip-max eps-clip-low-high", "--eps-clip-high"),
    ("clip-ratio-c ratio-clip-c dual-clip", "--eps-clip-c"),
    ("value-clip-range cliprange-value", "--value-clip"),
    ("init-kl-coef kl-ctrl.kl-coef use-kl-in-reward kl-penalty-in-reward", "--kl-coef"),
    ("beta kl-beta reference-policy-kl-penalty", "--kl-loss-coef with --use-kl-loss"),
    ("kl-penalty kl-estimator", "--kl-loss-type"),
    ("kl-target kl-horizon target-kl", "an adaptive weight of the KL is not here yet; --kl-coef is constant"),
    ("entropy-coeff entropy-loss-coef ent-coef", "--entropy-coef"),
    ("loss-agg-mode token-level-loss dr-grpo-loss", "--calculate-per-token-loss averages over tokens; else over rollouts"),
    ("scale-rewards norm-adv-by-std-in-grpo normalize-reward",
     "rewards of a group are centred and divided by their deviation; --disable-grpo-std-normalization only centres them"),
    ("whiten-rewards whiten-advantages normalize-advantage advantage-whitening", "--normalize-advantages"),
    ("freezing-actor-steps critic-warmup", "--num-critic-only-steps"),
    ("reward-funcs reward-fn reward-function custom-reward-function.path compute-score", "--custom-rm-path"),
    ("remote-rm-url reward-url", "--rm-url"),
    ("filter-groups filter-groups.enable dynamic-filtering dynamic-sampling use-dynamic-sampling",
     "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
    ("overlong-buffer overlong-buffer.enable overlong-buffer.len overlong-buffer.penalty-factor",
     "a penalty for long answers is not here yet; give one in a reward function of your own (--custom-rm-path)"),
    ("dpo simpo orpo kto", "preference losses are not here yet; a loss of your own is --custom-loss-function-path"),
    ("tool-config-path multi-turn.enable multi-turn max-assistant-turns max-user-turns",
     "dialogues are a generate function of your own: --custom-generate-function-path, --max-turns"),
    ("tis-imp-ratio-cap truncated-importance-sampling rollout-is-threshold", "--use-tis with --tis-clip"),
    # optimizer
    ("grad-clip gradient-clipping max-norm", "--clip-grad"),
    ("l2", "--weight-decay"),
    ("beta1 adam.beta1 adam-betas betas beta2", "--adam-beta1 and --adam-beta2"),
    ("lr-scheduler lr-scheduler-type warmup-style", "--lr-decay-style"),
    ("lr-warmup-ratio lr-warmup-steps-ratio num-warmup-steps lr-warmup-steps",
     "--lr-warmup-fraction or --lr-warmup-iters"),
    ("mixed-precision torch-dtype dtype precision", "--bf16 or --fp16"),
    # evaluation, logging
    ("eval-steps test-freq eval-freq val-period eval-every", "--eval-interval"),
    ("val-before-train val-at-start eval-on-start", "evaluation before training is on; --skip-eval-before-train"),
    ("eval-n-samples-per-prompt val-kwargs.n", "--n-samples-per-eval-prompt"),
    ("logging-steps log-freq", "every rollout is logged; drop it"),
    ("report-to logger trainer.logger logger.wandb-enabled", "--use-wandb or --use-tensorboard"),
    ("wandb-run-name experiment-name run-name exp-name", "--wandb-group or --tb-experiment-name"),
    ("project-name wandb-project-name logger.wandb.project", "--wandb-project or --tb-project-name"),
    ("wandb-org", "--wandb-team"),
)  # fmt: skip
ANSWERS: dict[str, str] = {name: answer for names, answer in _ROWS for name in names.split()}

# A stray word of this form is an override: `trainer.nnodes=2`, `+actor.lr=1e-6`, `lr=1e-6`.
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)=")


def meant_by(flag: str) -> tuple[str, ...]:
    """The flags that somebody who comes from another program means, where the name leaves no doubt."""
    return SAME.get(flag, ())


def answer_to(name: str, known: Collection[str]) -> str | None:
    """What to tell somebody who typed `name`, a flag or the name in an override; None for a name that nobody uses.

    Args:
        known: all flags, such as `--lr`.
    """
    parts = name.lstrip("+~-").replace("_", "-").lower().split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        if f"--{ending}" in known and f"--{ending}" != name:
            return f"did you mean --{ending}?"
        same = SAME.get(f"--{ending}")
        answer = ANSWERS.get(ending) or (" or ".join(same) if same else None) or _answer_of_family(ending)
        if answer is not None:
            only_flags = answer.startswith("--") and " is " not in answer and " averages " not in answer
            return f"did you mean {answer}?" if only_flags else answer
    return None


def _answer_of_family(name: str) -> str | None:
    """The answer of a row whose name ends with `*`."""
    families = (family for family in ANSWERS if family.endswith("*") and name.startswith(family[:-1]))
    return next((ANSWERS[family] for family in families), None)


def overridden(word: str) -> str | None:
    """The name that an override such as `trainer.nnodes=2` sets; None for other words."""
    match = _OVERRIDE.match(word)
    return match[1] if match else None
