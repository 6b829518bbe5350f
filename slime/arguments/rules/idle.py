"""Flags that are accepted and change nothing beside the others: one warning for each.

Not errors: launch scripts switch one flag off and leave those that belong to it in place.
"""

import argparse
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.arguments.plug_ins import flag_of
from slime.arguments.rules import Rule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Idle:
    """`names` have no effect where `when` holds, for the `reason` that the warning ends with.

    off: the value that asks for nothing, beside None and False.
    """

    names: tuple[str, ...]
    when: Callable[[argparse.Namespace], bool]
    reason: str
    off: Any = None


def _no_kl(args: argparse.Namespace) -> bool:
    return not args.use_kl_loss and args.kl_coef == 0


def _no_kl_by_oversight(args: argparse.Namespace) -> bool:
    # A script that types a weight of 0 has switched the KL off and means to keep the rest of it.
    return _no_kl(args) and not ("kl_loss_coef" in args.typed_flags and args.kl_loss_coef == 0)


_TABLE = (
    _Idle(("kl_loss_coef",), lambda args: not args.use_kl_loss, "without --use-kl-loss", off=0.0),
    _Idle(("use_unbiased_kl",), _no_kl, "without --use-kl-loss or --kl-coef"),
    _Idle(("kl_loss_type",), _no_kl_by_oversight, "without --use-kl-loss or --kl-coef", off="k1"),
    _Idle(
        ("mask_offpolicy_in_partial_rollout",), lambda args: not args.partial_rollout, "without --partial-rollout"
    ),
    _Idle(("micro_batch_size",), lambda args: args.use_dynamic_batch_size, "with --use-dynamic-batch-size", off=1),
    _Idle(("max_tokens_per_gpu",), lambda args: not args.use_dynamic_batch_size, "without --use-dynamic-batch-size"),
    _Idle(("no_save_optim",), lambda args: args.save is None, "without --save"),
    _Idle(
        ("custom_loss_function_path",), lambda args: args.loss_type != "custom_loss", "without --loss-type custom_loss"
    ),
    _Idle(
        ("tb_project_name", "tb_experiment_name"), lambda args: not args.use_tensorboard, "without --use-tensorboard"
    ),
    _Idle(("eval_prompt_data", "eval_config"), lambda args: args.eval_interval is None, "without --eval-interval"),
)  # fmt: skip


def idle_flags(args: argparse.Namespace) -> Iterator[str]:
    """Warns; yields nothing."""
    for row in _TABLE:
        for name in row.names:
            value = getattr(args, name)
            asked = name in args.typed_flags and value not in (None, False, row.off)
            if asked and row.when(args):
                logger.warning("%s: no effect %s", flag_of(name), row.reason)
    yield from ()


IDLE_RULES: tuple[Rule, ...] = (idle_flags,)
