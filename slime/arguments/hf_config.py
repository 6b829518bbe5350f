"""The Hugging Face config as source of the model's flags and as check on them. It reads `config.json` without transformers.

`slime.models` knows what the config of each family says, and what of it can be trained. Here the file is found and opened, and
`args` are filled and compared.

Invariant: after `apply_hf_config` every flag that the config knows agrees with it, or the run has not started.
"""

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.arguments.flag import flag_of
from slime.arguments.violations import Kind, Violation, about
from slime.estimates.shape import expert_layers
from slime.models import fsdp
from slime.models.config_entries import text_config_of
from slime.models.families import SUPPORTED_MODEL_TYPES, family_of, misnomer, model_args_from_hf, training_limits
from slime.models.layer_pattern import written_pattern
from slime.models.shape_of_flags import SHAPE_FLAGS
from slime.utils.checkpoint_directory import why_no_directory
from slime.utils.errors import UserError
from slime.utils.misc import without_repetition

Config = dict[str, Any]
ModelArgs = dict[str, Any]


def apply_hf_config(args: argparse.Namespace, config: Config) -> list[Violation]:
    """Fill the model's flags that were not typed (with `--model-args-from-hf`: all of them) and compare all others.

    Returns:
        What the training of the model lacks, which is not built; one table that starts with `hf_validate_args failed` when
        flags and config differ.
    """
    place = f"{args.hf_checkpoint}/config.json"
    try:
        family_of(config)
    except UserError as error:
        message = f"{place}: {error}"
        if not all(vars(args)[name] for name in SHAPE_FLAGS):
            return [*about([message], "--hf-checkpoint")]
        return [*about([f"{message} (planned from the typed flags alone)"], "--hf-checkpoint", kind=Kind.NOT_BUILT)]
    try:
        derived = model_args_from_hf(config)
    except UserError as error:
        return [*about([f"{place}: {error}"], "--hf-checkpoint")]
    for name, value in derived.items():
        if name not in args.typed_flags and (takes_shape_of_config(args) or name in SUPPLEMENTS):
            setattr(args, name, value)
    limits = [*training_limits(config, derived), *(fsdp.unknown_models(config) if args.train_backend == "fsdp" else ())]
    names = about(misnomer(args.model_name or "", config), "--model-name", "--hf-checkpoint")
    return [*about(limits, "--hf-checkpoint", kind=Kind.NOT_BUILT), *names, *_differences(args, derived)]


def takes_shape_of_config(args: argparse.Namespace) -> bool:
    """Whether flags of the model's shape that are not typed are those of the config: FSDP builds the model of the config."""
    return args.model_args_from_hf or args.train_backend == "fsdp"


def differing_flags(args: argparse.Namespace, derived: ModelArgs) -> list[tuple[str, str, str]]:
    """(flag, its value in `args`, its value in `derived`) of the flags of the model in which the two differ."""
    return [
        (spelling(name), shown(name, vars(args)[name]), shown(name, value))
        for name, value in derived.items()
        if name not in CHOICES and hasattr(args, name) and not _agree(args, derived, name)
    ]


def _differences(args: argparse.Namespace, derived: ModelArgs) -> list[Violation]:
    rows = differing_flags(args, derived)
    if not rows:
        return []
    hint = "drop the typed flags" if takes_shape_of_config(args) else "correct them, or give --model-args-from-hf"
    title = f"hf_validate_args failed: the flags and {args.hf_checkpoint}/config.json differ ({hint})"
    rows.insert(0, ("flag", "typed or default", "config.json"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  " + "  ".join(row).rstrip() for row in padded]
    flags = ("--hf-checkpoint", "--model-args-from-hf", *(flag for flag, _, _ in rows[1:]))
    return [Violation(flags, "\n".join([title, *lines]))]


def _agree(args: argparse.Namespace, derived: ModelArgs, name: str) -> bool:
    """Whether flag and config mean the same; an unset flag means Megatron's default."""
    meaning = _MEANINGS.get(name)
    return vars(args)[name] == derived[name] or (meaning is not None and meaning(args, derived))


def _same_head_width(args: argparse.Namespace, derived: ModelArgs) -> bool:
    if derived["multi_latent_attention"]:
        return True  # the widths of latent attention have flags of their own
    width = args.kv_channels or (args.hidden_size or 0) // (args.num_attention_heads or 1)
    return width == derived["kv_channels"]


def _same_grouping(args: argparse.Namespace, derived: ModelArgs) -> bool:
    heads = args.num_attention_heads
    groups = (args.num_query_groups or heads) if args.group_query_attention else heads
    return groups == derived["num_query_groups"]


def _same_expert_layers(args: argparse.Namespace, derived: ModelArgs) -> bool:
    try:
        mine = expert_layers(args.moe_layer_freq, args.num_layers or 0)
        return mine == expert_layers(derived["moe_layer_freq"], derived["num_layers"])
    except UserError:
        return False


_NEUTRAL = {
    "moe_shared_expert_intermediate_size": 0, "moe_router_num_groups": 1, "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 1.0, "num_experts": 0,
}  # fmt: skip
_MEANINGS: dict[str, Callable[[argparse.Namespace, ModelArgs], bool]] = {
    "kv_channels": _same_head_width,
    "group_query_attention": _same_grouping,
    "num_query_groups": _same_grouping,
    # A width that no layer has may differ.
    "ffn_hidden_size": lambda args, derived: bool(derived["num_experts"]) and derived["moe_layer_freq"] == 1,
    "moe_layer_freq": _same_expert_layers,
    "moe_ffn_hidden_size": lambda args, derived: (
        (args.moe_ffn_hidden_size or args.ffn_hidden_size) == derived["moe_ffn_hidden_size"]
    ),
    "add_qkv_bias": lambda args, derived: derived["multi_latent_attention"],
    # Any typed value is accepted; Megatron's default would change biases that the family keeps.
    "moe_router_bias_update_rate": lambda args, derived: True,
    # A user who names a layer spec or a model provider answers for it.
    "spec": lambda args, derived: "spec" in args.typed_flags or args.custom_model_provider_path is not None,
    # Unset means the neutral value.
    **{
        name: lambda args, derived, name=name, neutral=neutral: (
            (vars(args)[name] or neutral) == (derived[name] or neutral)
        )
        for name, neutral in _NEUTRAL.items()
    },
}


# Filled in when `--model-args-from-hf` is given and nothing was typed, never compared: how to compute, not what.
CHOICES = frozenset({
    "max_position_embeddings", "mtp_num_layers", "make_vocab_size_divisible_by", "add_position_embedding",
    "attention_softmax_in_fp32", "apply_rope_fusion", "masked_softmax_fusion", "enable_experimental", "allgather_cp",
    "moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
    "moe_token_dispatcher_type", "moe_token_drop_policy",
})  # fmt: skip

# Details that scripts with explicit flags usually leave out: filled in from the config unless typed, compared if typed.
SUPPLEMENTS = frozenset({
    "moe_router_bias_update_rate", "rope_type", "rope_scaling_factor", "rotary_scaling_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "linear_attention_freq",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk", "dsa_indexer_layers",
    "dsa_indexer_rope_interleave", "experimental_attention_variant",
})  # fmt: skip

# Attributes whose usual flag has another name.
_SPELLINGS = {"layernorm_zero_centered_gamma": "--apply-layernorm-1p", "add_bias_linear": "--disable-bias-linear"}


def spelling(name: str) -> str:
    """The flag that sets `args.{name}`."""
    return _SPELLINGS.get(name) or flag_of(name)


def shown(name: str, value: object) -> str:
    """The value of `args.{name}` as one would type it: switches are given or not, lists are written as patterns."""
    if isinstance(value, bool):
        # The switch of `add_bias_linear` sets it to False.
        return "given" if value is (name != "add_bias_linear") else "not given"
    if value is None:
        return "unset"
    if isinstance(value, list) and value and all(entry in (0, 1) for entry in value):
        return written_pattern(value)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def read_hf_config(checkpoint: str | Path, flag: str = "--hf-checkpoint") -> Config:
    """The `config.json` of a Hugging Face directory, the entries of `text_config` taken out when there is one.

    Raises:
        UserError: no such directory, no config in it, or broken JSON; a name stands twice in it.
    """
    path = Path(checkpoint) / "config.json"
    if not Path(checkpoint).is_dir():
        raise UserError(no_directory(flag, checkpoint))
    if not path.is_file():
        raise UserError(f"{flag} {checkpoint}: it holds no config.json; give a Hugging Face checkpoint directory")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repetition)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: it holds no JSON object; give a Hugging Face checkpoint directory")
    return text_config_of(config)


def readable_config(args: argparse.Namespace) -> Config:
    """The config of `--hf-checkpoint`; empty without one, and if it cannot be read, which is reported elsewhere."""
    with contextlib.suppress(UserError):
        return read_hf_config(args.hf_checkpoint) if args.hf_checkpoint is not None else {}
    return {}


def no_directory(flag: str, path: str | Path) -> str:
    """The message about what is no directory; `OWNER/MODEL`, typed as on the hub, is no path and deserves a hint."""
    message = f"{flag} {path}: {why_no_directory(path)}; give a Hugging Face checkpoint directory"
    owner = Path(path).absolute().parent
    if owner.parent == Path.cwd() and not owner.exists():
        message += (
            f" (models are not downloaded here: `hf download {owner.name}/{Path(path).name} --local-dir {path}` does)"
        )
    return message


def is_hf_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a Hugging Face directory of a supported family."""
    config = Path(path) / "config.json"
    return config.is_file() and read_hf_config(path).get("model_type") in SUPPORTED_MODEL_TYPES
