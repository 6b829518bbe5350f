"""Tiny models with random weights: a Hugging Face directory and the `args` that fit it.

`write_tiny_model` needs transformers, so call it in the test's process; `tiny_args` only reads config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.arguments.hf_config import read_hf_config
from slime.models.families import model_args_from_hf
from tests.support.models.args import default_args
from tests.support.models.tiny_checkpoint import KNOWN_AS, transpose_stacked_experts


def write_tiny_model(
    directory: Path,
    *,
    model_type: str = "qwen3",
    tied: bool = False,
    vocab_size: int = 131,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    groups: int = 2,
    head_dim: int = 16,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    whole: Mapping[str, Any] | None = None,
    **config_entries: Any,
):
    """Save a random float32 model of the family to `directory` (config.json, model.safetensors) and return it.

    `config_entries` are added to its config or replace entries. With `vision`, the config of a vision tower, they belong to the
    language model, and `whole` has the entries of the model around both.
    """
    import torch
    import transformers

    entries = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "sdpa",
        # The default ids of some classes lie behind the end of so small a vocabulary.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    entries |= config_entries
    kind = transformers.AutoModelForCausalLM
    if vision is not None:
        entries = {"text_config": entries, "vision_config": vision, "tie_word_embeddings": tied, **(whole or {})}
        kind = transformers.AutoModelForImageTextToText
    config = transformers.CONFIG_MAPPING[model_type](**entries)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Mistakes only show with norms away from 1, biases away from 0, and logits that differ.
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif "norm" not in name:
                    parameter.mul_(3.0)
    model.save_pretrained(directory)
    return model.eval()


# Model type -> config entries of a tiny mixture of experts.
TINY_EXPERTS: dict[str, dict[str, Any]] = {
    # The first layer is dense, experts are chosen by the scores of all experts, and shared experts see every token.
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0], "head_dim": 8,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
}  # fmt: skip


def write_tiny_mixture(directory: Path, model_type: str, **options: Any):
    """`write_tiny_model` of a family with experts."""
    return write_tiny_model(directory, **{"model_type": model_type, **TINY_EXPERTS[model_type], **options})


def write_tiny_mixtures(root: Path) -> Path:
    """`write_tiny_mixture` of every family in `TINY_EXPERTS`, in `root` by its name; returns `root`."""
    for name in TINY_EXPERTS:
        write_tiny_mixture(root / name, name, vocab_size=128)
    return root


def write_stacked_mixture(directory: Path, **options: Any):
    """`write_tiny_model` of a family whose published checkpoints have transposed matrices in tensors of all experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    model = write_tiny_model(directory, **{**experts, **options})
    transpose_stacked_experts(directory)
    return model


# The model also has latent vectors of queries, YaRN, one dense layer, and experts in groups, of which half are chosen.
_TINY_LATENT: dict[str, Any] = {
    "groups": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip


def write_tiny_latent(directory: Path, model_type: str, **options: Any):
    """`write_biased_mixture` of a family with multi-head latent attention."""
    known = KNOWN_AS.get(model_type, model_type)
    model = write_biased_mixture(directory, **{"model_type": known, **_TINY_LATENT, **options})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    for name, module in model.named_modules():
        if name.endswith("a_layernorm"):
            # Here transformers takes 1e-6. Engines take the epsilon of the config, as for all norms.
            module.variance_epsilon = config["rms_norm_eps"]
    return model


def write_biased_mixture(directory: Path, **options: Any):
    """`write_tiny_model` of a family whose routers have biases."""
    import torch

    model = write_tiny_model(directory, **options)
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.05 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory)
    return model


def write_tiny_delta_net(directory: Path, **options: Any):
    """`write_tiny_model` of a family with linear attention, whose states reach over many tokens."""
    import torch

    model = write_tiny_model(directory, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(0.02, 0.5, len(parameter)).log())
    model.save_pretrained(directory)
    return model


# Tensors of a layer for multi-token prediction whose names in a checkpoint do not follow the decoder's, and the layer inside.
PREDICTS_BESIDE = {
    "eh_proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm", "inside": "mtp.layers.0",
}  # fmt: skip
_OF_MIMO = "model.mtp_layers.0"
PREDICTS_LIKE_MIMO = {
    "eh_proj": f"{_OF_MIMO}.input_proj", "enorm": f"{_OF_MIMO}.token_layernorm", "hnorm": f"{_OF_MIMO}.hidden_layernorm",
    "shared_head.norm": f"{_OF_MIMO}.final_layernorm", "inside": _OF_MIMO,
}  # fmt: skip


def write_predicting(
    directory: Path, write: Callable[..., Any], own_names: Mapping[str, str] | None = None, **options: Any
):
    """Write a model by `write` and turn its last layer into one for multi-token prediction. Returns the model of transformers,
    in which it is an ordinary layer, and by name the tensors of the layer that this model lacks.

    Args:
        own_names: `PREDICTS_BESIDE` or `PREDICTS_LIKE_MIMO`; None: the layer has the number after the last layer, and copies
            of embedding and head.
    """
    import torch
    from safetensors.torch import load_file, save_file

    model = write(directory, **{**options, "layers": 3})
    config = json.loads((directory / "config.json").read_text())
    changed = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    changed |= {
        name: config[name][:2] for name in ("layer_types", "mlp_layer_types", "indexer_types") if config.get(name)
    }
    (directory / "config.json").write_text(json.dumps({**config, **changed}))
    hidden = config["hidden_size"]
    shapes = {"eh_proj": (hidden, 2 * hidden), **dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))}
    generator = torch.Generator().manual_seed(1)
    own = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    own = {name: tensor if tensor.ndim == 2 else 1 + tensor for name, tensor in own.items()}
    tensors = load_file(directory / "model.safetensors")
    if own_names is None:
        copies = {
            "embed_tokens": tensors["model.embed_tokens.weight"].clone(),
            "shared_head.head": tensors["lm_head.weight"],
        }
        tensors |= {f"model.layers.2.{name}.weight": tensor.clone() for name, tensor in (own | copies).items()}
    else:
        inside = f"{own_names['inside']}."
        tensors = {name.replace("model.layers.2.", inside): tensor for name, tensor in tensors.items()}
        tensors |= {f"{own_names[name]}.weight": tensor.clone() for name, tensor in own.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model, own


def write_tiny_mimo(directory: Path, **options: Any):
    """Save a random model of the MiMo family: a Qwen2 with a layer for multi-token prediction. Returns the Qwen2."""
    import torch
    from safetensors.torch import load_file, save_file

    model = write_tiny_model(directory, **{**options, "model_type": "qwen2"})
    config = json.loads((directory / "config.json").read_text())
    hidden = config["hidden_size"]
    (directory / "config.json").write_text(
        json.dumps(
            {**config, "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
        )
    )
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    layer = {
        name.replace("model.layers.0.", "model.mtp_layers.0."): torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        if name.startswith("model.layers.0.")
    }
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        layer[f"model.mtp_layers.0.{norm}.weight"] = torch.randn(hidden, generator=generator)
    layer["model.mtp_layers.0.input_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator)
    save_file({**tensors, **layer}, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def tiny_args(hf_dir: str | Path, **overrides: Any) -> SimpleNamespace:
    """The parser's defaults with the shape of the model in `hf_dir`, neither derived nor checked."""
    config = read_hf_config(hf_dir)
    divisor = 8 * overrides.get("tensor_model_parallel_size", 1)
    values: dict[str, Any] = {
        **model_args_from_hf(config),
        "hf_checkpoint": str(hf_dir),
        "seq_length": config["max_position_embeddings"],
        "padded_vocab_size": -(-config["vocab_size"] // divisor) * divisor,
        "accumulate_allreduce_grads_in_fp32": True,
        "distributed_timeout_minutes": 1,
        "checkpoint_write_timeout": 60.0,
    }
    return default_args(**{**values, **overrides})
