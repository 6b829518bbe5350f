"""A table with a tiny model of every family that trains. A new family is a row, and all tests of the others run for it.

`tests/backends/megatron_utils/test_every_family.py` derives the flags of each row from its config, compares logits and
gradients with transformers, and exports the same tensors again, on one rank and in every layout of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.models.tiny_checkpoint import KNOWN_AS
from tests.support.models.tiny_model import (
    write_biased_mixture,
    write_stacked_mixture,
    write_tiny_delta_net,
    write_tiny_latent,
    write_tiny_mimo,
    write_tiny_mixture,
    write_tiny_model,
)

VOCABULARY = 131
# Name of a layout -> the flags that make it.
LAYOUTS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2 whole sequence": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "cp2 gathered": {"context_parallel_size": 2, "allgather_cp": True},
    "ep2": {"expert_model_parallel_size": 2, "data_parallel_size": 2},
    "tp2 ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "tp2 ep2 etp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "data_parallel_size": 2,
    },
    "tp2 up recomputed": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj"],
    },
    "attention recomputed": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "tp4": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "tp2 pp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
}
DENSE = ("recomputed", "tp2", "tp2 whole sequence", "pp2", "cp2", "tp2 pp2")

EXPERTS = ("recomputed", "tp2", "pp2", "cp2", "ep2")
# Where ranks of a tensor-parallel group have experts of their own, and where they share each.
CUT_EXPERTS = (*EXPERTS, "tp2 ep2", "tp2 ep2 etp2")
# The layouts of families with layers of two kinds.
MIXED = (*CUT_EXPERTS, "cp2 gathered", "tp2 pp2")


def ranks_of(layout: Mapping[str, Any]) -> int:
    """The number of ranks of a layout."""
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "data_parallel_size",
    )
    count = 1
    for name in names:
        count *= layout.get(name, 1)
    return count


@dataclass(frozen=True)
class TinyFamily:
    """A tiny model of a family.

    model_type: the model type of its config.
    entries: sizes and other entries of its config beside the default ones, as arguments of `write`.
    write: writes a random model to a directory and returns its reference: the same model in transformers, or an independent
        computation of it. Called with token ids [1, length] it returns `.logits`; `save_pretrained` saves its parameters.
    layouts: names of `LAYOUTS`.
    reference: the model type of the reference's class in transformers; None: the family has a class of its own.
    """

    model_type: str
    entries: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[..., Any] = write_tiny_model
    layouts: tuple[str, ...] = DENSE
    reference: str | None = None

    def save(self, directory: Path) -> Any:
        """Write the model to `directory`, and return its reference."""
        return self.write(directory, model_type=self.model_type, vocab_size=VOCABULARY, **self.entries)


# As in GLM-4.5, half of each head is rotated, heads have norms, and projections have biases.
_GLM4_MOE: dict[str, Any] = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
# The projections up from the latent vectors can be recomputed alone.
LATENT = (*CUT_EXPERTS, "cp2 gathered", "tp2 pp2", "tp2 up recomputed")
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "rms_norm_eps": 1e-5}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Three layers with linear attention, two values per key, and one with softmax attention.
_DELTA_NET: dict[str, Any] = {
    "layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_TWO_KINDS: dict[str, Any] = {**_DELTA_NET, "layers": 2, "layer_types": ["linear_attention", "full_attention"]}
_VISION: dict[str, Any] = {
    "vision": {
        "depth": 1, "hidden_size": 8, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
        "num_position_embeddings": 4, "temporal_patch_size": 1,
    },
}  # fmt: skip
# The tower also gives features to the first decoder layer.
_SEEING_EARLY: dict[str, Any] = {
    "vision": {**_VISION["vision"], "depth": 2, "deepstack_visual_indexes": [0]},
}
_GATED_MOE: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_MINIMAX_M2 = {
    "num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 16, "rope_parameters": _HALF_ROPE,
    # As engines want to be told.
    "rotary_dim": 8, "use_qk_norm": True, "use_routing_bias": True,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
# Every row attends to five keys. Every second layer uses the keys that the layer before it chose.
_INDEXER = {
    "layers": 4, "index_topk": 5, "index_n_heads": 8, "index_head_dim": 16,
    "indexer_types": ["full", "shared", "full", "shared"],
}  # fmt: skip
_SPARSE_LAYOUTS = (*CUT_EXPERTS, "cp2 gathered", "tp2 pp2", "attention recomputed")
TINY_FAMILIES: dict[str, TinyFamily] = {
    "qwen2": TinyFamily("qwen2", {"head_dim": 8}, layouts=(*DENSE, "tp4")),
    "qwen2 tied": TinyFamily("qwen2", {"head_dim": 8, "tied": True}),
    "qwen3": TinyFamily("qwen3"),
    # Two tensor-parallel ranks share a key and value head.
    "qwen3 with one group": TinyFamily("qwen3", {"groups": 1}),
    "qwen3 tied": TinyFamily("qwen3", {"tied": True}),
    "mimo": TinyFamily("mimo", {"head_dim": 8}, write=write_tiny_mimo, reference="qwen2"),
    "llama": TinyFamily("llama", {"head_dim": 8}),
    # A head has 16 frequencies: one lies in the band of the scaling, and some on either side.
    "llama3": TinyFamily("llama", {"head_dim": 32, "tied": True, "rope_parameters": {**_LLAMA3_ROPE, "factor": 8.0}}),
    "glm4": TinyFamily("glm4", {"head_dim": 16, "attention_bias": True, "rope_parameters": _HALF_ROPE}),
    "glm4 without bias": TinyFamily("glm4", {"head_dim": 16, "attention_bias": False, "rope_parameters": _HALF_ROPE}),
    "qwen3_vl": TinyFamily("qwen3_vl", _SEEING_EARLY),
    "qwen3_vl tied": TinyFamily("qwen3_vl", {**_SEEING_EARLY, "tied": True}, layouts=("pp2",)),
    "qwen3_vl_moe": TinyFamily("qwen3_vl_moe", _SEEING_EARLY, write=write_stacked_mixture, layouts=EXPERTS),
    "qwen2_moe": TinyFamily("qwen2_moe", write=write_tiny_mixture, layouts=EXPERTS),
    "qwen3_moe": TinyFamily("qwen3_moe", write=write_tiny_mixture, layouts=EXPERTS),
    "qwen3_next": TinyFamily("qwen3_next", {**_DELTA_NET, **_GATED_MOE}, write=write_tiny_delta_net, layouts=MIXED),
    # Two tensor-parallel ranks share a key and value head of softmax attention.
    "qwen3_next with one group": TinyFamily(
        "qwen3_next",
        {**_DELTA_NET, **_GATED_MOE, "groups": 1, "mlp_only_layers": [1]},
        write=write_tiny_delta_net,
        layouts=("recomputed", "tp2", "pp2"),
    ),
    "qwen3_5": TinyFamily("qwen3_5", {**_TWO_KINDS, **_VISION}, write=write_tiny_delta_net, layouts=DENSE),
    "qwen3_5 tied": TinyFamily(
        "qwen3_5", {**_TWO_KINDS, **_VISION, "tied": True}, write=write_tiny_delta_net, layouts=DENSE
    ),
    "qwen3_5_text": TinyFamily(
        "qwen3_5_text", {**_TWO_KINDS, "tied": True}, write=write_tiny_delta_net, layouts=("recomputed", "pp2")
    ),
    "qwen3_5_moe": TinyFamily(
        "qwen3_5_moe", {**_TWO_KINDS, **_GATED_MOE, **_VISION}, write=write_tiny_delta_net, layouts=CUT_EXPERTS
    ),
    "qwen3_5_moe_text": TinyFamily(
        "qwen3_5_moe_text", {**_TWO_KINDS, **_GATED_MOE}, write=write_tiny_delta_net, layouts=("recomputed", "pp2")
    ),
    "glm4_moe": TinyFamily("glm4_moe", _GLM4_MOE, write=write_biased_mixture, layouts=CUT_EXPERTS),
    "glm4_moe without norms": TinyFamily(
        "glm4_moe", {**_GLM4_MOE, "use_qk_norm": False}, write=write_biased_mixture, layouts=CUT_EXPERTS
    ),
    # Half of each head is rotated.
    "minimax_m2": TinyFamily(
        "minimax_m2", _MINIMAX_M2, write=write_biased_mixture, layouts=(*CUT_EXPERTS, "cp2 gathered", "tp2 pp2")
    ),
    # Two tensor-parallel ranks share a key and value head, and its norm.
    "minimax_m2 with one group": TinyFamily(
        "minimax_m2", {**_MINIMAX_M2, "groups": 1}, write=write_biased_mixture, layouts=("recomputed", "tp2", "pp2")
    ),
    "deepseek_v3": TinyFamily("deepseek_v3", write=write_tiny_latent, layouts=LATENT),
    "deepseek_v3 dense": TinyFamily(
        "deepseek_v3",
        {"first_k_dense_replace": 2},
        write=write_tiny_latent,
        layouts=("recomputed", "tp2 whole sequence", "pp2"),
    ),
    "moonlight": TinyFamily(
        "deepseek_v3", {**_ONE_GROUP, **_PLAIN, "q_lora_rank": None}, write=write_tiny_latent, layouts=LATENT
    ),
    "kimi_k2": TinyFamily(
        "kimi_k2", _ONE_GROUP, write=write_tiny_latent, layouts=EXPERTS, reference=KNOWN_AS["kimi_k2"]
    ),
    "glm4_moe_lite": TinyFamily("glm4_moe_lite", _ONE_GROUP | _PLAIN, write=write_tiny_latent, layouts=EXPERTS),
    "deepseek_v32": TinyFamily(
        "deepseek_v32",
        {
            **_INDEXER,
            "indexer_types": None,
            "num_experts": 8,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
        write=write_tiny_latent,
        layouts=_SPARSE_LAYOUTS,
    ),
    "glm_moe_dsa": TinyFamily(
        "glm_moe_dsa",
        {**_ONE_GROUP, **_INDEXER, "rope_parameters": _YARN},
        write=write_tiny_latent,
        layouts=_SPARSE_LAYOUTS,
    ),
}
