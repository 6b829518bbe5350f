"""Rules about features that are not built: of flags, of values of a flag, and of combinations of flags.

A run refuses them and names the flag; `--dry-run` plans with them and adds a note. Nothing is accepted and ignored. Whoever
builds a feature deletes its rows.
"""

import argparse
import fnmatch
from collections.abc import Collection, Iterator

from slime.arguments import server_flags
from slime.arguments.flag import NotYet, flag_of
from slime.arguments.megatron import effects
from slime.arguments.origins import Origin
from slime.arguments.rules.serving import has_roles, of_groups
from slime.arguments.violations import Rule, Violation, broken, refused, where
from slime.models import fsdp
from slime.models.families import FAMILIES_BY_NAME, TRAINED_MODEL_TYPES, family_name


def not_yet_violations(args: argparse.Namespace) -> Iterator[Violation]:
    """Yields one violation for every flag that asks for a feature which is not built.

    A run that only trains ignores the flags of engines and router, so that one script serves both kinds of run.
    """
    # If the value follows from another flag, that flag has a row of its own.
    asked = [name for name in vars(args) if args.origins.get(name) not in (Origin.DEFAULT, Origin.DERIVED)]
    for row in rows():
        if args.debug_train_only and row in server_flags.NOT_YET:
            continue
        for name in names_of(row, asked):
            value = vars(args)[name]
            if value is None or value is False or value in row.works:
                continue
            template = "{0=}: {feature} is not built yet; drop the flag ({--dry-run} plans with it)"
            if args.origins.get(name) is Origin.HF_CONFIG:
                # The user did not type it, so there is no flag to drop.
                template = (
                    "config.json of {--hf-checkpoint} asks for {0=}: {feature} is not built yet; take another model "
                    "({--dry-run} plans with this one)"
                )
            yield broken(args, template, flag_of(name), feature=row.feature)


def names_of(row: NotYet, names: Collection[str]) -> Collection[str]:
    """Those of the attributes `names` to which `row` applies."""
    return fnmatch.filter(names, row.name) if "*" in row.name else {row.name}.intersection(names)


def rows() -> tuple[NotYet, ...]:
    """All rows, for the flags of Megatron, the engines and the router."""
    return (*effects.NOT_YET, *server_flags.NOT_YET)


def layers(args: argparse.Namespace) -> Iterator[Violation]:
    if not args.has_trainer or args.num_layers is None:
        return
    built = {
        "{--swiglu}": args.swiglu,
        "{--disable-bias-linear}": not args.add_bias_linear,
        "{--normalization} RMSNorm": args.normalization == "RMSNorm",
    }
    lacking = [flag for flag, given in built.items() if not given]
    if lacking:
        template = f"only models with gated SiLU, RMSNorm and no linear biases are built: give {' '.join(lacking)}, or "
        yield broken(args, template + "{--model-args-from-hf} with {--hf-checkpoint}")


def built_family(args: argparse.Namespace) -> Iterator[Violation]:
    if args.model_name is None or not args.has_trainer:
        return
    name = family_name(args.model_name)
    if name is not None and not FAMILIES_BY_NAME[name].is_trained:
        template = "{--model-name=}: the conversion of {name} is not built yet; {built} can be trained"
        template += " ({--dry-run} plans with it)"
        yield broken(args, template, name=name, built=" or ".join(TRAINED_MODEL_TYPES))


NOT_BUILT_RULES: tuple[Rule, ...] = (
    layers, built_family, not_yet_violations,
    refused(lambda args: bool(args.multimodal_keys) and args.has_trainer and args.custom_model_provider_path is None,
        "{--multimodal-keys}: this model is trained on text; for Qwen3.5 give {--custom-model-provider-path} slime_plugins."
        "models.qwen3_5_vl.get_qwen3_5_vl_model_provider, for Qwen3-VL slime_plugins.models.qwen3_vl."
        "get_qwen3_vl_model_provider, else {--debug-rollout-only}, or images in sets of {--eval-config}"),
    refused(lambda args: (args.rollout_top_p < 1 or args.rollout_top_k > 0) and args.has_engines
            and (has_roles(args) or args.sglang_speculative_algorithm is not None),
        "{--rollout-top-p=}, {--rollout-top-k=}: engines that only prefill or decode, or that draft, do not report the kept "
        "tokens; give 1 and -1"),
    *where(lambda args: args.sglang_config is not None, of_groups(not_yet_violations)),
    *where(lambda args: args.train_backend == "fsdp" and args.has_trainer, lambda args: (broken(args,
        "{0=} is not built for {--train-backend=}; drop it, or give {--train-backend} megatron", flag_of(name))
        for name in fsdp.other_values(vars(args)))),
)  # fmt: skip
MODEL_NAME_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.model_name is not None and args.has_trainer and family_name(args.model_name) is None,
        f"{{--model-name=}}: no such family; give one of {', '.join(sorted(FAMILIES_BY_NAME))}, or drop the flag"),
)  # fmt: skip
