"""The limits of the FSDP2 backend: which types of models it trains, and which flags have only one value there.

The model is the one that transformers makes of its config. A row here is deleted when the backend learns the feature.
"""

from collections.abc import Iterator
from typing import Any

from slime.models.families import FAMILIES
from slime.models.family import Config

MODEL_TYPES = tuple(name for name, family in FAMILIES.items() if family.fsdp)

# Flash attention by its value of --attn-implementation, the fastest first: the module and the package that it comes with.
FLASH_ATTENTION = {
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
    "flash_attention_2": ("flash_attn", "flash-attn"),
}

# Flag -> the only value that it can have there. None, 0 and False all mean that the feature is off.
ONLY_VALUES: dict[str, Any] = {
    "linear_attention_freq": None, "mtp_num_layers": None, "softmax_scale": None, "rotary_seq_len_interpolation_factor": None,
    "init_method_std": 0.02, "embedding_init_method_std": None, "attention_backend": "auto", "hidden_dropout": 0.0,
    "fp16": False, "fp8": None, "fp32_residual_connection": False, "disable_bf16_reduced_precision_matmul": False,
    "deterministic_mode": False, "true_on_policy_mode": False, "recompute_granularity": None,
    "optimizer": "adam", "decoupled_weight_decay": True, "apply_wd_to_qk_layernorm": False, "use_stateless_adam": False,
    "use_precision_aware_optimizer": False, "decoupled_lr": None, "optimizer_offload_fraction": 1.0,
    "overlap_cpu_optimizer_d2h_h2d": False, "use_torch_optimizer_for_cpu_offload": False, "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "only_train_params_name_list": None, "freeze_params_name_list": None, "freeze_indexer": False,
    "log_num_zeros_in_grad": False, "log_params_norm": False, "manual_gc": False, "train_sync_interval": None,
    "timing_log_level": 0,
    "grad_reduce_in_bf16": False, "check_for_large_grads": False, "distributed_backend": "nccl",
    "num_distributed_optimizer_instances": 1, "nccl_communicator_config_path": None, "high_priority_stream_groups": None,
    "data_parallel_random_init": False,
    "empty_unused_memory_level": 0, "distributed_timeout_seconds_after_init": None,
    "check_weight_hash_across_dp_replicas_interval": None, "async_save": False,
    "custom_model_provider_path": None, "custom_megatron_init_path": None,
    "megatron_deepgemm_forward_layers": None, "megatron_deepgemm_moe_forward_layers": None,
    "custom_megatron_before_log_prob_hook_path": None, "custom_megatron_before_train_step_hook_path": None,
}  # fmt: skip


def other_values(values: dict[str, Any]) -> Iterator[str]:
    """The flags out of `values`, which has all flags, whose value is not the only one that they can have."""
    for name, only in ONLY_VALUES.items():
        if values[name] != only and (values[name] or only):
            yield name


def unknown_models(config: Config) -> Iterator[str]:
    """A sentence for each reason why the backend cannot train a model as the engines serve it.

    Args:
        config: config of a known `model_type`.
    """
    if config["model_type"] not in MODEL_TYPES:
        yield (
            f"model_type {config['model_type']!r} of --hf-checkpoint is not built for --train-backend fsdp, which trains "
            f"models of type {' or '.join(MODEL_TYPES)}; give --train-backend megatron"
        )
    if config.get("quantization_config"):
        yield (
            "config.json of --hf-checkpoint: quantization_config is not built for --train-backend fsdp; give a checkpoint in "
            "bfloat16 or float32, or --train-backend megatron"
        )
