"""Answers to words that are no flags here: those of other systems, earlier versions, Megatron-LM, and servers' own settings.

The names of other systems are those of trainers in common use: flags (`--actor_learning_rate`), flags with dots (`--actor.lr`)
and overrides (`actor_rollout_ref.actor.optim.lr=1e-6`). A row stands for one thing; capitals, `_` and `-` are alike, and of a
dotted name the longest ending that a row has counts. Every other such flag is an error that says what to write instead; none is
ignored.
"""

import argparse
import re
from collections.abc import Collection

from slime.arguments.violations import Kind, Violation, broken

# Names that no user would give to a value of their own, so that files are answered too -> the flags that are meant.
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

_LORA = "LoRA is not here yet: every parameter is trained; {--only-train-params-name-list} trains some of them"
_REWARD_MODEL = (
    "reward models are not here yet: serve yours and ask it in a function of your own ({--custom-rm-path}, {--rm-url})"
)
_QUANTISED = "training on quantised weights is not here yet; engines serve what {--hf-checkpoint} holds"
_ENGINE = "the engines are SGLang servers: set them up with --sglang-*"
_ZERO = "training is Megatron-Core: shard the optimizer with {--use-distributed-optimizer}"
_CRITIC = "values of the critic alone stand in {--megatron-config-path}; {--advantage-estimator} ppo switches it on"
_EPOCHS = "one rollout is trained once, in {--num-steps-per-rollout} steps; drop it"
_STEPS = "count rollouts: {--num-rollout}"


def _by_name(*rows: tuple[str, str]) -> dict[str, str]:
    """Rows of names, separated by spaces, and their answer."""
    return {name: answer for names, answer in rows for name in names.split()}


# Name -> the answer: flags alone ("did you mean"), or a sentence with its flags in braces.
ANSWERS: dict[str, str] = _by_name(
    # model and checkpoints
    ("model-name-or-path model-path pretrain actor-pretrain base-model model.path policy.model-name", "--hf-checkpoint"),
    ("ref-model ref-pretrain ref-model-path reference-model ref.model.path", "--ref-load"),
    ("critic-pretrain critic.model.path critic.optim.lr critic-learning-rate critic.*", _CRITIC),
    ("reward-pretrain reward-model reward-model-path reward-model.path reward-model.enable reward-model.*", _REWARD_MODEL),
    ("output-dir save-path default-local-dir checkpoint-dir save-dir", "--save"),
    ("ckpt-path resume-from-checkpoint resume-from resume-from-path load-checkpoint resume-mode resume",
     "a run resumes from the checkpoint in {--load}; give {--load} and {--save} the same directory"),
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
    ("packing-samples sequence-packing use-remove-padding sequence-packing.enabled", "sequences are always packed; drop it"),
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
     "gradients are accumulated over all micro-batches of {--global-batch-size}; drop it"),
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
    ("fsdp fsdp-config fsdp2 dtensor-cfg.* actor.strategy", "--train-backend"),
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
    ("async-engine async-train async-grpo", "train_async.py is the asynchronous loop"),
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
    ("kl-target kl-horizon target-kl", "an adaptive weight of the KL is not here yet; {--kl-coef} is constant"),
    ("entropy-coeff entropy-loss-coef ent-coef", "--entropy-coef"),
    ("loss-agg-mode token-level-loss dr-grpo-loss", "{--calculate-per-token-loss} averages over tokens; else over rollouts"),
    ("scale-rewards norm-adv-by-std-in-grpo normalize-reward",
     "rewards of a group are centred and divided by their deviation; {--disable-grpo-std-normalization} only centres them"),
    ("whiten-rewards whiten-advantages normalize-advantage advantage-whitening", "--normalize-advantages"),
    ("freezing-actor-steps critic-warmup", "--num-critic-only-steps"),
    ("reward-funcs reward-fn reward-function custom-reward-function.path compute-score", "--custom-rm-path"),
    ("remote-rm-url reward-url", "--rm-url"),
    ("filter-groups filter-groups.enable dynamic-filtering dynamic-sampling use-dynamic-sampling",
     "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"),
    ("overlong-buffer overlong-buffer.enable overlong-buffer.len overlong-buffer.penalty-factor",
     "a penalty for long answers is not here yet; give one in a reward function of your own ({--custom-rm-path})"),
    ("dpo simpo orpo kto", "preference losses are not here yet; a loss of your own is {--custom-loss-function-path}"),
    ("tool-config-path multi-turn.enable multi-turn max-assistant-turns max-user-turns",
     "dialogues are a generate function of your own: {--custom-generate-function-path}, {--max-turns}"),
    ("tis-imp-ratio-cap truncated-importance-sampling rollout-is-threshold", "--use-tis with --tis-clip"),
    # optimizer
    ("grad-clip gradient-clipping max-norm", "--clip-grad"),
    ("l2", "--weight-decay"),
    ("beta1 adam.beta1 adam-betas betas beta2", "--adam-beta1 and --adam-beta2"),
    ("lr-scheduler lr-scheduler-type warmup-style", "--lr-decay-style"),
    ("lr-warmup-ratio lr-warmup-steps-ratio num-warmup-steps lr-warmup-steps", "--lr-warmup-fraction or --lr-warmup-iters"),
    ("mixed-precision torch-dtype dtype precision", "--bf16 or --fp16"),
    # evaluation, logging
    ("eval-steps test-freq eval-freq val-period eval-every", "--eval-interval"),
    ("val-before-train val-at-start eval-on-start", "evaluation before training is on; {--skip-eval-before-train}"),
    ("eval-n-samples-per-prompt val-kwargs.n", "--n-samples-per-eval-prompt"),
    ("logging-steps log-freq", "every rollout is logged; drop it"),
    ("report-to logger trainer.logger logger.wandb-enabled", "--use-wandb or --use-tensorboard"),
    ("wandb-run-name experiment-name run-name exp-name", "--wandb-group or --tb-experiment-name"),
    ("project-name wandb-project-name logger.wandb.project", "--wandb-project or --tb-project-name"),
    ("wandb-org", "--wandb-team"),
)  # fmt: skip

# A stray word of this form is an override: `trainer.nnodes=2`, `+actor.lr=1e-6`, `lr=1e-6`.
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)=")


def answer_to(name: str, known: Collection[str]) -> Violation | None:
    """The answer to `name`, a flag or the name in an override; None for a name that no known system uses.

    Args:
        known: all flags, such as `--lr`.
    """
    parts = name.lstrip("+~-").replace("_", "-").lower().split(".")
    for start in range(len(parts)):
        ending = ".".join(parts[start:])
        if f"--{ending}" in known and f"--{ending}" != name:
            return unknown("did you mean {0}?", f"--{ending}")
        answer = looked_up(ANSWERS, ending) or " or ".join(SAME.get(f"--{ending}", ()))
        if answer.startswith("--"):
            return unknown(f"did you mean {answer}?", *(word for word in answer.split() if word.startswith("--")))
        if answer:
            return unknown(answer)
    return None


def unknown(template: str, *flags: str) -> Violation:
    """The message about an unknown name; `flags`, and those in the template, may be meant."""
    return broken(argparse.Namespace(), template, *flags, kind=Kind.UNKNOWN)


def overridden(word: str) -> str | None:
    """The name that an override such as `trainer.nnodes=2` sets; None for other words."""
    match = _OVERRIDE.match(word)
    return match[1] if match else None


# Name (a final `*` stands for any ending) -> what replaces it.
RETIRED: dict[str, str] = _by_name(
    ("--rollout-external", "give {--rollout-external-engine-addrs}; it switches external engines on"),
    ("--use-slime-router --slime-router-*", "there is one router; drop it, and set the router up with --router-*"),
    ("--qkv-format", "sequences are always packed; drop it"),
    *((f"--critic-{name.replace('_', '-')}", f"write `{name}` in the overrides of the critic in {{--megatron-config-path}}")
      for name in ("load", "save", "lr", "lr_warmup_iters")),
    ("--critic-config-path", "describe the critic in {--megatron-config-path}"),
    ("--critic-num-nodes --critic-num-gpus-per-node",
     "the critic shares the GPUs of the actor; drop it (critic first: {--num-critic-only-steps})"),
    ("--critic-train-only", "give {--num-critic-only-steps}, the number of leading rollouts that train only the critic"),
    ("--megatron-to-hf-mode", "the conversion is built in; drop it (model flags from the config: {--model-args-from-hf})"),
    ("--use-hf-config-for-megatron", "give {--model-args-from-hf}"),
    ("--use-dynamic-global-batch-size --disable-rollout-trim-samples", "the schedule handles steps of any size; drop it"),
    ("--train-memory-margin-bytes --disable-weights-backuper --offload-train-mode --use-http2 "
     "--use-token-output --enable-off-policy-correction --http-proxy --min-batch-collection-ratio",
     "it has no effect; drop it"),
    ("--log-probs-max-tokens-per-gpu", "the log-prob pass uses {--max-tokens-per-gpu}; drop it"),
    ("--ci-metric-checker-*", "check metrics in a function of your own: {--custom-rollout-log-function-path}"),
    ("--update-weight-delta-dir", "give {--update-weight-disk-dir}"),
    ("--update-weight-delta-keep-files", "give {--update-weight-disk-keep-files}"),
    ("--update-weight-encoding", "give {--update-weight-delta-encoding}"),
    ("--custom-delta-pre-push-path", "give {--custom-update-weight-post-write-path}"),
    ("--custom-delta-pre-read-path", "give {--sglang-custom-pull-weights-pre-read-hook}"),
    ("--update-rollout-weights-interval", "give {--update-weights-interval}"),
    ("--over-sampling-filter-*", "give {--dynamic-sampling-filter-path}"),
    ("--partial-rollout-min-tokens --partial-rollout-min-response-length --partial-rollout-mix-ratio "
     "--partial-rollout-filter-path",
     "give {--partial-rollout} and choose groups with {--buffer-filter-path}"),
    ("--agent-rollout-buffer-url", "give {--rollout-buffer-url}"),
    ("--int4-params-rollout", "the quantisation is that of {--hf-checkpoint}; drop it"),
    ("--config", "give {--custom-config-path}"),
    ("--warmup-ratio", "give {--lr-warmup-fraction}"),
    ("--fsdp-state-dict-cpu-offload --fsdp-cpu-backend", "give {--fsdp-cpu-offload}"),
)  # fmt: skip

# Settings of a server that follow from the run, so that a value could only contradict it -> what they follow from.
DERIVED: dict[str, str] = _by_name(
    ("--sglang-model-path", "it follows from {--hf-checkpoint}"),
    ("--sglang-trust-remote-code", "it follows from {--trust-remote-code}"),
    ("--sglang-random-seed", "it follows from {--seed}"),
    ("--sglang-port --sglang-nccl-port", "every engine takes a free port of its node"),
    ("--sglang-dist-init-addr", "every engine announces an address of its own"),
    ("--sglang-nnodes", "it follows from {--rollout-num-gpus-per-engine}"),
    ("--sglang-node-rank --sglang-base-gpu-id --sglang-gpu-id-step", "it follows from where the engine was placed"),
    ("--sglang-enable-memory-saver", "it follows from {--offload-rollout}"),
    ("--sglang-enable-return-routed-experts", "it follows from {--use-rollout-routing-replay}"),
    ("--sglang-skip-server-warmup", "the run decides how its engines start"),
)  # fmt: skip


def why_unknown(flag: str) -> Violation | None:
    """A sentence about a flag that is not known and that somebody may well expect; None for all others."""
    replacement = looked_up(RETIRED, flag)
    if replacement:
        return unknown(f"does not exist any more: {replacement}")
    advice = looked_up(NOT_FOR_THIS, flag)
    if advice:
        return unknown(f"of Megatron-LM has no meaning here: {advice}")
    return unknown(f"is set by the run: {DERIVED[flag]}; drop it") if flag in DERIVED else None


def looked_up(table: dict[str, str], name: str) -> str:
    """The entry of `name`, or of a family to which it belongs; empty if there is none."""
    families = (entry for entry in table if entry.endswith("*") and name.startswith(entry[:-1]))
    return table.get(name) or next((table[family] for family in families), "")


# Megatron-LM's flags that a script may bring along although they mean nothing here -> what to do instead. A final `*`
# stands for any ending.
NOT_FOR_THIS: dict[str, str] = _by_name(
    ("--data-path --train-data-path --data-args-path --data-cache-path", "prompts come from {--prompt-data}; drop it"),
    ("--valid-data-path --test-data-path", "evaluation sets are given with {--eval-prompt-data}; drop it"),
    ("--split", "training and evaluation sets are files of their own: {--prompt-data}, {--eval-prompt-data}"),
    ("--mock-data", "--disable-rollout-global-dataset with a rollout function of your own makes up data"),
    ("--dataloader-type", "the data source is {--data-source-path}; drop it"),
    ("--num-workers", "give {--num-data-workers}"),
    ("--reset-position-ids --reset-attention-mask", "packed samples have positions of their own and never meet; drop it"),
    ("--eod-mask-loss", "the loss mask comes from the rollout; drop it"),
    ("--no-create-attention-mask-in-dataloader", "no attention mask is ever built; drop it"),
    ("--train-samples", "give {--num-rollout} x {--rollout-batch-size} x {--n-samples-per-prompt}"),
    ("--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-samples",
     "give {--lr-decay-iters}, {--lr-warmup-iters} or {--lr-wsd-decay-iters}"),
    ("--rampup-batch-size", "the batch is {--rollout-batch-size} x {--n-samples-per-prompt} in every step; drop it"),
    ("--decrease-batch-size-if-needed", "batch sizes never change by themselves; drop it"),
    ("--eval-iters --full-validation", "every evaluation runs over its whole sets ({--eval-prompt-data}); drop it"),
    ("--skip-train", "give {--debug-rollout-only}, or {--num-rollout} 0 with evaluation"),
    ("--exit-interval", "give {--num-rollout}"),
    ("--exit-duration-in-mins", "end the job from outside; {--save-interval} bounds what is lost"),
    ("--exit-signal-handler", "the run ends cleanly on a signal; drop it"),
    ("--tokenizer-model --vocab-file --merge-file --tiktoken-*", "the tokenizer is that of {--hf-checkpoint}; drop it"),
    ("--vocab-extra-ids", "the vocabulary is {--vocab-size}; drop it"),
    ("--use-mcore-models --use-legacy-models", "there are no others than those of Megatron-Core; drop it"),
    ("--use-flash-attn", "give {--attention-backend} flash, or drop it: attention never builds its score matrix"),
    ("--attention-dropout-prob", "give {--attention-dropout}"),
    ("--checkpoint-activations", "give {--recompute-granularity} full {--recompute-method} uniform {--recompute-num-layers} 1"),
    ("--use-checkpoint-args", "give {--model-args-from-hf}"),
    ("--use-mp-args-from-checkpoint-args", "a checkpoint loads into any layout; give the sizes that this run has"),
    ("--pretrained-checkpoint", "give {--ref-load}, the initial weights when {--load} holds no checkpoint"),
    ("--ckpt-convert-format --ckpt-convert-save --use-dist-ckpt", "checkpoints are always torch_dist; drop it"),
    ("--dist-ckpt-format", "give {--ckpt-format}"),
    ("--save-retain-interval", "give {--keep-last}"),
    ("--non-persistent-* --replication*", "checkpoints are written to {--save} every {--save-interval} rollouts; drop it"),
    ("--model-parallel-size", "give {--tensor-model-parallel-size}"),
    ("--warmup", "give {--lr-warmup-fraction}"),
    ("--local-rank --lazy-mpu-init", "ranks are started by the run itself; drop it"),
    ("--use-torch-fsdp2", "give {--train-backend} fsdp"),
    ("--wandb-exp-name", "give {--wandb-group}"),
    ("--wandb-save-dir", "give {--wandb-dir}"),
    ("--wandb-entity", "give {--wandb-team}"),
    ("--yaml-cfg", "give {--custom-config-path}"),
    ("--rerun-mode", "no step is run twice; drop it"),
    ("--no-one-logger --one-logger-*", "trackers are {--use-tensorboard} and {--use-wandb}; drop it"),
    ("--log-straggler", "phase times of all ranks are logged anyway; drop it"),
    ("--rl-* --perform-rl-step", "rollouts are described by --rollout-*; drop it"),
    ("--grpo-*", "give {--advantage-estimator} grpo and its flags: {--eps-clip}, {--kl-loss-coef}, {--n-samples-per-prompt}"),
    ("--sft", "give {--loss-type} sft_loss"),
    ("--inference-dynamic-* --inference-max-*", "the engines generate; set them up with --sglang-*"),
)  # fmt: skip
