"""Flags that are accepted and change nothing beside the others: one warning for each.

Not errors: launch scripts switch one flag off and leave those that belong to it in place.
"""

import argparse
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.algorithms.estimators import DISCOUNTING_ESTIMATORS, SAMPLE_REWARD_ESTIMATORS
from slime.arguments.checkpoints import is_megatron_checkpoint
from slime.arguments.hf_config import is_hf_checkpoint
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


def _has_own_advantages(args: argparse.Namespace) -> bool:
    """Whether a function of the user's stands in for the estimator; it may read any flag."""
    return args.custom_advantage_function_path is not None


def _discounts_nothing(args: argparse.Namespace) -> bool:
    return args.advantage_estimator not in DISCOUNTING_ESTIMATORS and not _has_own_advantages(args)


def _rewards_of_groups(args: argparse.Namespace) -> bool:
    return args.advantage_estimator in SAMPLE_REWARD_ESTIMATORS and not _has_own_advantages(args)


def _imitates(args: argparse.Namespace) -> bool:
    return args.loss_type == "sft_loss"


def _not_from_megatron(name: str) -> Callable[[argparse.Namespace], bool]:
    """Whether the path in `name` is no Megatron checkpoint, whose iterations alone can be chosen from."""
    return lambda args: getattr(args, name) is None or not is_megatron_checkpoint(getattr(args, name))


def _starts_elsewhere(args: argparse.Namespace) -> bool:
    # A script that started from random weights resumes from its own checkpoint without a change.
    resumes = args.load is not None and is_megatron_checkpoint(args.load)
    hf_load = args.load is not None and is_hf_checkpoint(args.load)
    return not resumes and (hf_load or args.initial_megatron_checkpoint is not None or args.ref_load is not None)


_TABLE = (
    _Idle(("kl_loss_coef",), lambda args: not args.use_kl_loss, "without --use-kl-loss", off=0.0),
    _Idle(("ref_update_interval",), _no_kl, "without --use-kl-loss or --kl-coef"),
    _Idle(("keep_old_actor",), _imitates, "with --loss-type sft_loss"),
    _Idle(
        ("use_kl_loss", "use_tis", "use_opsm", "use_opd", "use_rollout_logprobs"), _imitates,
        "on the loss of --loss-type sft_loss",
    ),
    _Idle(("entropy_coef",), _imitates, "on the loss of --loss-type sft_loss", off=0.0),
    _Idle(("advantage_estimator",), _imitates, "on the loss of --loss-type sft_loss", off="grpo"),
    _Idle(
        ("keep_old_actor",), lambda args: args.use_rollout_logprobs and args.loss_type == "policy_loss",
        "on the policy loss beside --use-rollout-logprobs, whose old log-probs are the engine's",
    ),
    _Idle(("gamma",), _discounts_nothing, "with an estimator that discounts nothing (ppo and reinforce_plus_plus do)", off=1.0),
    _Idle(("discount_masked_tokens",), _discounts_nothing, "with an estimator that counts no time steps"),
    _Idle(("lambd",), lambda args: args.advantage_estimator != "ppo", "without --advantage-estimator ppo", off=1.0),
    _Idle(("value_clip",), lambda args: args.advantage_estimator != "ppo", "without --advantage-estimator ppo", off=0.2),
    _Idle(("kl_coef",), _rewards_of_groups, "on the advantages of grpo, gspo and cispo: the KL is only logged", off=0.0),
    _Idle(
        ("tis_clip", "tis_clip_low", "custom_tis_function_path"), lambda args: not args.use_tis, "without --use-tis"
    ),
    _Idle(("opsm_delta",), lambda args: not args.use_opsm, "without --use-opsm"),
    _Idle(("opd_type", "opd_kl_coef"), lambda args: not args.use_opd, "without --use-opd", off=1.0),
    _Idle(
        ("mtp_loss_scaling_factor",), lambda args: not args.enable_mtp_training, "without --enable-mtp-training", off=0.2
    ),
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
    _Idle(("ckpt_step",), _not_from_megatron("load"), "without a Megatron checkpoint in --load"),
    _Idle(("ref_ckpt_step",), _not_from_megatron("ref_load"), "without a Megatron checkpoint in --ref-load"),
    _Idle(
        ("opd_teacher_ckpt_step",),
        _not_from_megatron("opd_teacher_load"),
        "without a Megatron checkpoint in --opd-teacher-load",
    ),
    _Idle(("random_init",), _starts_elsewhere, "beside --load, --initial-megatron-checkpoint or --ref-load"),
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
