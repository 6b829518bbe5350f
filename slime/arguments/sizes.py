"""Numbers within their bounds. Asked before anything is derived: nothing follows from a size of 0.

A number out of its bounds is replaced by a harmless one, so that the other rules can be asked too; what they say about
that flag is left out (`without_consequences`).
"""

import argparse
import logging
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from slime.arguments.plug_ins import flag_of

logger = logging.getLogger(__name__)

_AT_LEAST_ONE = (
    "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine", "num_gpus_per_node",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "distributed_timeout_minutes", "rollout_batch_size", "n_samples_per_prompt",
    "global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier",
    "over_sampling_batch_size", "num_epoch", "rollout_max_response_len", "rollout_max_prompt_len",
    "rollout_max_context_len", "eval_max_response_len", "eval_max_prompt_len", "eval_max_context_len",
    "n_samples_per_eval_prompt", "max_turns", "async_buffer_size", "save_interval", "eval_interval", "keep_last",
    "ref_update_interval", "update_weights_interval", "update_weight_buffer_size", "sglang_server_concurrency",
    "rm_concurrency", "http_max_retries", "padded_vocab_size", "memory_snapshot_num_steps", "num_layers", "hidden_size",
    "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size", "seq_length",
    "max_position_embeddings", "train_iters",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "lr_decay_iters", "lr_wsd_decay_iters",
    "sglang_router_request_timeout_secs", "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "recompute_num_layers",
    "make_vocab_size_divisible_by", "loss_scale_window", "hysteresis",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "num_rollout", "start_rollout_id", "rollout_num_gpus", "max_restarts", "num_data_workers", "num_critic_only_steps",
    "max_weight_staleness", "ckpt_step", "ref_ckpt_step", "opd_teacher_ckpt_step", "eval_min_new_tokens", "lr",
    "clip_grad", "kl_coef", "kl_loss_coef", "eps_clip", "eps_clip_high", "value_clip", "opsm_delta", "tis_clip_low",
    "opd_kl_coef", "rollout_health_check_first_wait", "ci_train_rollout_logprob_abs_diff_threshold",
    "mtp_loss_scaling_factor", "weight_decay", "adam_eps", "min_lr", "seed", "rollout_seed", "lr_warmup_iters",
    "lr_warmup_init", "start_weight_decay", "end_weight_decay", "rollout_stop_token_ids", "mtp_num_layers",
    "log_samples_interval",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "decoupled_lr", "decoupled_min_lr",
)  # fmt: skip
_ABOVE_ZERO = (
    "rollout_health_check_interval", "rollout_health_check_timeout", "http_request_timeout", "http_control_timeout",
    "abort_timeout", "rm_timeout", "engine_start_timeout", "engine_load_timeout", "train_start_timeout",
    "checkpoint_publish_timeout", "dry_run_gpu_memory_gib", "dry_run_link_gbps", "tis_clip", "norm_epsilon", "rotary_base",
    "init_method_std", "loss_scale", "initial_loss_scale", "min_loss_scale",
)  # fmt: skip
# From 0, below 1 -> what is usual.
_BELOW_ONE = {
    "adam_beta1": 0.9, "adam_beta2": 0.98, "attention_dropout": 0, "hidden_dropout": 0, "sgd_momentum": 0.9,
    "muon_momentum": 0.95,
}  # fmt: skip
# From 0 to 1 -> what is usual.
_SHARES = {"gamma": 1, "lambd": 0.95, "optimizer_offload_fraction": 1, "rotary_percent": 1}
# Weights, rates and the time limits of HTTP requests, in contrast to bounds, mean nothing when they are infinite; 1.0 is
# harmless for all of them.
_FINITE = (
    "lr", "min_lr", "weight_decay", "adam_eps", "kl_coef", "kl_loss_coef", "entropy_coef", "opd_kl_coef",
    "mtp_loss_scaling_factor", "rollout_temperature", "eval_temperature", "lr_warmup_init", "start_weight_decay",
    "end_weight_decay", "engine_start_timeout", "engine_load_timeout", "train_start_timeout", "checkpoint_publish_timeout",
)  # fmt: skip
# Values above these are possible and nearly always a slip -> what is usual.
_UNUSUAL = {
    "lr": (0.1, "1e-7 to 1e-3"), "rollout_temperature": (2, "0.6 to 1.2"), "eval_temperature": (2, "0 to 1"),
    "kl_coef": (1, "0 to 0.1"), "kl_loss_coef": (1, "0 to 0.1"), "entropy_coef": (1, "0 to 0.01"),
    "weight_decay": (1, "0 to 0.1"),
}  # fmt: skip
# NumPy and the engines take seeds of 32 bits, and every engine adds its rank.
_SEEDS = ("seed", "rollout_seed")
_LARGEST_SEED = 2**31 - 1
# What the number of data-parallel ranks follows from, which messages tell without these flags.
_OF_THE_LAYOUT = {
    "actor_num_nodes", "actor_num_gpus_per_node", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size",
}  # fmt: skip
# What an unset --global-batch-size follows from.
_OF_THE_BATCH = {"rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"}


def replace_wrong_sizes(args: argparse.Namespace) -> dict[str, str]:
    """A message for every number out of its bounds, by attribute, and for the one size that has no default.

    Afterwards each of these attributes holds a number that nothing fails on.
    """
    wrong = {name: (message, value) for name, message, value in _wrong_sizes(args)}
    for name, (_, value) in wrong.items():
        setattr(args, name, value)
        args.typed_flags.discard(name)
    return {name: message for name, (message, _) in wrong.items()}


def without_consequences(messages: list[str], wrong: dict[str, str]) -> list[str]:
    """`messages` of the rules without those about the attributes in `wrong`: the rules saw another value."""
    silenced = [flag_of(name) for name in wrong]
    if not _OF_THE_LAYOUT.isdisjoint(wrong):
        silenced += ["data-parallel", "training ranks"]
    if not _OF_THE_BATCH.isdisjoint(wrong):
        silenced.append("--global-batch-size")
    return without_mention(messages, silenced)


def without_mention(messages: list[str], words: Iterable[str]) -> list[str]:
    """`messages` without those in which one of `words` stands; a flag does not stand in a longer one."""
    parts = "|".join(re.escape(word) for word in words)
    pattern = re.compile(rf"(?<![\w-])(?:{parts})(?![\w-])") if parts else None
    return [message for message in messages if pattern is None or not pattern.search(message)]


def _wrong_sizes(args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """(attribute, message, harmless value)."""
    if args.rollout_batch_size is None:
        message = "--rollout-batch-size is needed: the number of prompts per rollout step, for example 32"
        yield "rollout_batch_size", message, 1
    for name, value in _given(args, _AT_LEAST_ONE):
        if not value >= 1:
            yield name, f"{flag_of(name)} {value}: it must be at least 1", 1
    for name, value in _given(args, _AT_LEAST_ZERO):
        if not value >= 0:
            yield name, f"{flag_of(name)} {value}: it must be at least 0", 0
    for name, value in _given(args, _ABOVE_ZERO):
        if not value > 0:
            yield name, f"{flag_of(name)} {value}: it must be above 0", 1.0
    for name, value in _given(args, tuple(_BELOW_ONE)):
        if not 0 <= value < 1:
            usual = _BELOW_ONE[name]
            yield name, f"{flag_of(name)} {value}: it must be at least 0 and below 1 ({usual} is usual)", usual
    for name, value in _given(args, tuple(_SHARES)):
        if not 0 <= value <= 1:
            usual = _SHARES[name]
            yield name, f"{flag_of(name)} {value}: it must be at least 0 and at most 1 ({usual} is usual)", usual
    for name, value in _given(args, _FINITE):
        if not math.isfinite(value):
            yield name, f"{flag_of(name)} {value}: it must be a finite number", 1.0
    for name, value in _given(args, _SEEDS):
        if value > _LARGEST_SEED:
            yield name, f"{flag_of(name)} {value}: a seed is at most {_LARGEST_SEED}", 0


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in names:
        value = getattr(args, name, None)
        # Some flags take several numbers, of which each has the bounds.
        for number in value if isinstance(value, list) else [value]:
            if number is not None:
                yield name, number


def warn_of_unusual_values(args: argparse.Namespace) -> Iterator[str]:
    """Warns of numbers that can be meant and rarely are; yields nothing."""
    for name, value in _given(args, tuple(_UNUSUAL)):
        most, usual = _UNUSUAL[name]
        if value > most and name in args.typed_flags:
            logger.warning("%s %s: that is far above what is usual, %s", flag_of(name), value, usual)
    yield from ()
