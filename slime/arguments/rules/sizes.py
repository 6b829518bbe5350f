"""Numbers that must not be too small. Asked before anything is derived: nothing follows from a size of 0."""

import argparse
from collections.abc import Iterator

from slime.arguments.plug_ins import flag_of

_AT_LEAST_ONE = (
    "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine", "num_gpus_per_node",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "distributed_timeout_minutes", "rollout_batch_size", "n_samples_per_prompt",
    "global_batch_size", "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier",
    "over_sampling_batch_size", "num_epoch", "rollout_max_response_len", "rollout_max_prompt_len",
    "rollout_max_context_len", "eval_max_response_len", "eval_max_prompt_len", "eval_max_context_len",
    "n_samples_per_eval_prompt", "max_turns", "async_buffer_size", "save_interval", "eval_interval", "keep_last",
    "ref_update_interval", "update_weights_interval", "update_weight_buffer_size", "sglang_server_concurrency",
    "rm_concurrency", "http_max_retries", "padded_vocab_size", "memory_snapshot_num_steps",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "num_rollout", "start_rollout_id", "rollout_num_gpus", "max_restarts", "num_data_workers", "num_critic_only_steps",
    "max_weight_staleness", "ckpt_step", "ref_ckpt_step", "opd_teacher_ckpt_step", "eval_min_new_tokens", "lr",
    "clip_grad", "kl_coef", "kl_loss_coef", "eps_clip", "eps_clip_high", "value_clip", "opsm_delta", "tis_clip_low",
    "opd_kl_coef", "rollout_health_check_first_wait", "ci_train_rollout_logprob_abs_diff_threshold",
    "mtp_loss_scaling_factor",
)  # fmt: skip
_ABOVE_ZERO = (
    "rollout_health_check_interval", "rollout_health_check_timeout", "http_request_timeout", "http_control_timeout",
    "abort_timeout", "rm_timeout", "dry_run_gpu_memory_gib", "dry_run_link_gbps", "tis_clip",
)  # fmt: skip


def too_small(args: argparse.Namespace) -> Iterator[str]:
    """A message for every number below its least value, and for the one size that has no default."""
    if args.rollout_batch_size is None:
        yield "--rollout-batch-size is needed: the number of prompts per rollout step, for example 32"
    for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
        for name in names:
            value = getattr(args, name, None)
            if value is not None and value < least:
                yield f"{flag_of(name)} {value}: it must be at least {least}"
    for name in _ABOVE_ZERO:
        value = getattr(args, name)
        if value is not None and value <= 0:
            yield f"{flag_of(name)} {value}: it must be above 0"
