"""Flags that look known and are not: of earlier versions, of Megatron-LM, and of servers where the run decides.

Each is an error that says what to write instead; none is ignored.
"""

from slime.arguments.megatron.not_for_this import NOT_FOR_THIS

# Name (a final `*` stands for any ending) -> what replaces it.
RETIRED: dict[str, str] = {
    "--rollout-external": "give --rollout-external-engine-addrs; it switches external engines on",
    "--use-slime-router": "there is one router; drop it and set it up with --router-*",
    "--slime-router-*": "there is one router; set it up with --router-*",
    "--qkv-format": "sequences are always packed; drop it",
    "--critic-load": "write `load` in the overrides of the critic in --megatron-config-path",
    "--critic-save": "write `save` in the overrides of the critic in --megatron-config-path",
    "--critic-lr": "write `lr` in the overrides of the critic in --megatron-config-path",
    "--critic-lr-warmup-iters": "write `lr_warmup_iters` in the overrides of the critic in --megatron-config-path",
    "--critic-config-path": "describe the critic in --megatron-config-path",
    "--critic-num-nodes": "the critic shares the GPUs of the actor; drop it (critic first: --num-critic-only-steps)",
    "--critic-num-gpus-per-node": "the critic shares the GPUs of the actor; drop it (critic first: --num-critic-only-steps)",
    "--critic-train-only": "give --num-critic-only-steps, the number of leading rollouts that train only the critic",
    "--megatron-to-hf-mode": "the conversion is built in; drop it (model flags from the config: --model-args-from-hf)",
    "--use-hf-config-for-megatron": "give --model-args-from-hf",
    "--use-dynamic-global-batch-size": "the schedule handles steps of varying size; drop it",
    "--disable-rollout-trim-samples": "the schedule handles any number of samples; drop it",
    "--train-memory-margin-bytes": "it has no effect; drop it",
    "--disable-weights-backuper": "it has no effect; drop it",
    "--offload-train-mode": "it has no effect; drop it",
    "--use-http2": "it has no effect; drop it",
    "--use-token-output": "it has no effect; drop it",
    "--enable-off-policy-correction": "it has no effect; drop it",
    "--http-proxy": "it has no effect; drop it",
    "--min-batch-collection-ratio": "it has no effect; drop it",
    "--log-probs-max-tokens-per-gpu": "the log-prob pass uses --max-tokens-per-gpu; drop it",
    "--ci-metric-checker-*": "check metrics in a function of your own: --custom-rollout-log-function-path",
    "--update-weight-delta-dir": "give --update-weight-disk-dir",
    "--update-weight-delta-keep-files": "give --update-weight-disk-keep-files",
    "--update-weight-encoding": "give --update-weight-delta-encoding",
    "--custom-delta-pre-push-path": "give --custom-update-weight-post-write-path",
    "--custom-delta-pre-read-path": "prepare the files in a hook of the engine before it reads them; drop it",
    "--update-rollout-weights-interval": "give --update-weights-interval",
    "--over-sampling-filter-*": "give --dynamic-sampling-filter-path",
    "--partial-rollout-min-tokens": "give --partial-rollout and choose groups with --buffer-filter-path",
    "--partial-rollout-min-response-length": "give --partial-rollout and choose groups with --buffer-filter-path",
    "--partial-rollout-mix-ratio": "give --partial-rollout and choose groups with --buffer-filter-path",
    "--partial-rollout-filter-path": "give --partial-rollout and choose groups with --buffer-filter-path",
    "--agent-rollout-buffer-url": "give --rollout-buffer-url",
    "--int4-params-rollout": "the quantisation is that of --hf-checkpoint; drop it",
    "--config": "give --custom-config-path",
    "--warmup-ratio": "give --lr-warmup-fraction",
    "--fsdp-state-dict-cpu-offload": "give --fsdp-cpu-offload",
    "--fsdp-cpu-backend": "give --fsdp-cpu-offload",
}

# Settings of a server that follow from the run, so that a value could only contradict it -> what they follow from.
DERIVED: dict[str, str] = {
    "--sglang-model-path": "it follows from --hf-checkpoint",
    "--sglang-trust-remote-code": "it follows from --trust-remote-code",
    "--sglang-random-seed": "it follows from --seed",
    "--sglang-port": "every engine takes a free port of its node",
    "--sglang-nccl-port": "every engine takes a free port of its node",
    "--sglang-dist-init-addr": "every engine announces an address of its own",
    "--sglang-nnodes": "it follows from --rollout-num-gpus-per-engine",
    "--sglang-node-rank": "it follows from where the engine was placed",
    "--sglang-base-gpu-id": "it follows from where the engine was placed",
    "--sglang-gpu-id-step": "it follows from where the engine was placed",
    "--sglang-enable-memory-saver": "it follows from --offload-rollout",
    "--sglang-enable-return-routed-experts": "it follows from --use-rollout-routing-replay",
    "--sglang-skip-server-warmup": "the run decides how its engines start",
}


def why_unknown(flag: str) -> str | None:
    """A sentence about a flag that is not known and that somebody may well expect; None for all others."""
    replacement = replacement_of(flag)
    if replacement is not None:
        return f"does not exist any more: {replacement}"
    advice = advice_on_foreign(flag)
    if advice is not None:
        return f"of Megatron-LM has no meaning here: {advice}"
    source = DERIVED.get(flag)
    return None if source is None else f"is set by the run: {source}; drop it"


def replacement_of(flag: str) -> str | None:
    """What to do instead of `flag`; None when no version knew it."""
    return _look_up(RETIRED, flag)


def advice_on_foreign(flag: str) -> str | None:
    """What to do instead of a flag of Megatron-LM that has no meaning here; None for all others."""
    return _look_up(NOT_FOR_THIS, flag)


def _look_up(table: dict[str, str], flag: str) -> str | None:
    if flag in table:
        return table[flag]
    families = (name for name in table if name.endswith("*") and flag.startswith(name[:-1]))
    return next((table[name] for name in families), None)
