"""Rules about losses, KL, estimators, importance weights, replay and distillation."""

import argparse
import logging
from collections.abc import Iterator

from slime.arguments.rules import Rule

logger = logging.getLogger(__name__)


def losses(args: argparse.Namespace) -> Iterator[str]:
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path, such as my_losses.py:my_loss"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c}: it must be above 1 (3.0 is usual)"
    if args.advantage_estimator == "cispo" and args.eps_clip < 1:
        logger.warning(
            "--advantage-estimator cispo with --eps-clip %s: its lower bound is normally off (--eps-clip 1.0)",
            args.eps_clip,
        )
    if args.n_samples_per_prompt == 1 and args.rewards_normalization and args.loss_type == "policy_loss":
        logger.warning(
            "--n-samples-per-prompt 1 with rewards normalisation: every group has one member, so all advantages are zero"
        )


def reference_model(args: argparse.Namespace) -> Iterator[str]:
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        yield (
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} count the KL twice, in the reward and in the "
            "loss; set one of them to 0"
        )
    if args.ref_load is not None or not args.has_trainer:
        return
    for flag, used in ((f"--kl-coef {args.kl_coef}", args.kl_coef != 0), ("--use-kl-loss", args.use_kl_loss)):
        if used:
            yield f"{flag} needs --ref-load, the reference checkpoint; --hf-checkpoint's directory would do"
    if args.ref_update_interval is not None:
        yield f"--ref-update-interval {args.ref_update_interval} needs --ref-load, the reference checkpoint"


def estimators(args: argparse.Namespace) -> Iterator[str]:
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages"
    if args.num_critic_only_steps and not args.use_critic:
        yield (
            f"--num-critic-only-steps {args.num_critic_only_steps}: --advantage-estimator {args.advantage_estimator} has no "
            "critic; give --advantage-estimator ppo, or 0"
        )
    if args.enable_mtp_training and not args.mtp_num_layers:
        yield "--enable-mtp-training needs --mtp-num-layers, the number of those layers in the model (1 is usual)"


def importance_weights(args: argparse.Namespace) -> Iterator[str]:
    if args.use_rollout_logprobs and args.use_tis:
        yield (
            "--use-rollout-logprobs and --use-tis exclude each other: with the engine's log-probs as old ones there is no "
            "difference left to correct; keep one"
        )
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}; 0 is usual"


def distillation(args: argparse.Namespace) -> Iterator[str]:
    teacher = args.opd_teacher_load
    if not args.use_opd:
        if teacher is not None:
            yield f"--opd-teacher-load {teacher} has no effect without --use-opd; add --use-opd --opd-type megatron, or drop it"
        return
    if args.opd_type is None:
        yield "--use-opd needs --opd-type: sglang (teacher behind --rm-url) or megatron (teacher in the trainer)"
    if args.opd_type == "megatron" and teacher is None:
        yield "--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint; or give --opd-type sglang"
    if args.opd_type == "sglang" and teacher is not None:
        yield (
            f"--opd-type sglang: the teacher is behind --rm-url; drop --opd-teacher-load {teacher}, or give --opd-type megatron"
        )


OBJECTIVE_RULES: tuple[Rule, ...] = (losses, reference_model, estimators, importance_weights, distillation)
