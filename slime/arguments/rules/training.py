"""Rules about the objective, replay, distillation, trained parameters, the transport of weights, and trackers."""

import argparse
import importlib.util
import logging
import re
from collections.abc import Iterator

from slime.algorithms.estimators import estimator, names_of_estimators
from slime.arguments.flag import flag_of
from slime.arguments.rules import Rule

logger = logging.getLogger(__name__)

_SERVED_TEACHER = "slime.rollout.on_policy_distillation.reward_func"
# Functions that can set `teacher_log_probs` of a sample, or of the train batch.
_SETS_TEACHER_LOG_PROBS = (
    "custom_rm_path", "custom_generate_function_path", "rollout_function_path", "rollout_sample_hook_path",
    "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path",
)  # fmt: skip


def losses(args: argparse.Namespace) -> Iterator[str]:
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path, such as my_losses.py:my_loss"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c}: it must be above 1 (3.0 is usual)"
    row = estimator(args.advantage_estimator)
    if row.clips_one_side and args.eps_clip < 1:
        logger.warning(
            "--advantage-estimator %s with --eps-clip %s: its lower bound is normally off (--eps-clip 1.0)",
            row.name, args.eps_clip,
        )  # fmt: skip
    if args.loss_type == "policy_loss" and not row.clips_one_side:
        yield from _clip_range(args)
    centered = args.rewards_normalization and row.centers
    if args.n_samples_per_prompt == 1 and centered and args.loss_type == "policy_loss":
        logger.warning(
            "--n-samples-per-prompt 1 with rewards normalisation: every group has one member, so all advantages are zero"
        )


def _clip_range(args: argparse.Namespace) -> Iterator[str]:
    """The range of the probability ratio."""
    if args.eps_clip > 1:
        yield (
            f"--eps-clip {args.eps_clip}: the probability ratio may fall to 1 - {args.eps_clip}, and it is never below 0; give "
            "at most 1, which switches the lower bound off (0.2 is usual)"
        )
    elif args.eps_clip_high < args.eps_clip:
        logger.warning(
            "--eps-clip-high %s is below --eps-clip %s: probabilities may rise by less than they may fall; the other way round "
            "is usual (0.28 and 0.2)", args.eps_clip_high, args.eps_clip,
        )  # fmt: skip


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
    if estimator(args.advantage_estimator).needs_whitening and not args.normalize_advantages:
        yield f"--advantage-estimator {args.advantage_estimator} needs --normalize-advantages"
    if args.num_critic_only_steps and not args.use_critic:
        yield (
            f"--num-critic-only-steps {args.num_critic_only_steps}: --advantage-estimator {args.advantage_estimator} has no "
            f"critic; give --advantage-estimator {names_of_estimators('needs_critic')}, or 0"
        )
    if args.use_critic and args.num_rollout and args.num_critic_only_steps >= args.num_rollout:
        logger.warning(
            "--num-critic-only-steps %d of --num-rollout %d: the critic alone is trained, the actor never",
            args.num_critic_only_steps, args.num_rollout,
        )  # fmt: skip
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
    elif args.use_tis and not args.tis_clip_low <= 1 <= args.tis_clip:
        logger.warning(
            "--tis-clip-low %s and --tis-clip %s leave 1 out: tokens on which engine and trainer agree are weighted too (0 and "
            "2 are usual)", args.tis_clip_low, args.tis_clip,
        )  # fmt: skip


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
    if args.opd_type == "sglang":
        yield from _served_teacher(args)


def _served_teacher(args: argparse.Namespace) -> Iterator[str]:
    """A teacher behind HTTP, which a function of the run asks for the log-probs of every sample."""
    if args.opd_teacher_load is not None:
        yield (
            f"--opd-type sglang: the teacher is behind --rm-url; drop --opd-teacher-load {args.opd_teacher_load}, or give "
            "--opd-type megatron"
        )
    if not args.has_engines:
        return
    asks = f"--custom-rm-path {_SERVED_TEACHER}"
    if args.typed_flags.isdisjoint(_SETS_TEACHER_LOG_PROBS):
        yield f"--opd-type sglang needs a function that asks the teacher: {asks}, or one of yours that sets teacher_log_probs"
    elif args.custom_rm_path == _SERVED_TEACHER and args.rm_url is None:
        yield f"{asks} needs --rm-url, the teacher's address, such as http://10.0.0.1:30000"
    if args.rollout_temperature != 1:
        logger.warning(
            "--opd-type sglang with --rollout-temperature %s: the teacher is asked for log-probs at that temperature, but many "
            "engines give those of a prompt at 1.0 whatever they are asked; make sure that the teacher's does not, or give 1.0",
            args.rollout_temperature,
        )


def routing_replay(args: argparse.Namespace) -> Iterator[str]:
    if not args.use_routing_replay or not args.has_trainer or args.num_layers is None:
        return
    flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
    if not args.num_experts:
        yield f"{flag}: the model has no experts (--num-experts), so there is no routing to replay; drop the flag"
        return
    if args.loss_type == "sft_loss":
        yield f"{flag} with --loss-type sft_loss: nobody has chosen experts for these samples before; drop the flag"
    if args.moe_router_fusion:
        yield f"{flag}: the kernel of --moe-router-fusion chooses experts by itself; drop one of them"
    types = args.moe_router_load_balancing_type
    if "sinkhorn" in ([types] if isinstance(types, str) else types or ()):
        yield (
            f"{flag}: --moe-router-load-balancing-type sinkhorn assigns experts over all tokens at once, which cannot be "
            "replayed; give none or aux_loss"
        )


def parameter_names(args: argparse.Namespace) -> Iterator[str]:
    names = ("only_train_params_name_list", "freeze_params_name_list")
    if all(getattr(args, name) for name in names):
        yield (
            "--only-train-params-name-list and --freeze-params-name-list exclude each other: each says which parameters are "
            "trained; keep one"
        )
    for name in names:
        for pattern in getattr(args, name) or []:
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{flag_of(name)} {pattern}: it is no regular expression ({error}); write one such as 'layers\\.0\\.'"


def transport(args: argparse.Namespace) -> Iterator[str]:
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        yield "--update-weight-transport disk needs --update-weight-disk-dir, a directory that trainer and engines share"
    if args.update_weight_mode != "delta":
        return
    if args.colocate:
        yield (
            "--update-weight-mode delta with --colocate: weights are handed over in memory there; give "
            "--update-weight-mode full"
        )
        return
    if args.update_weight_transport != "disk":
        yield (
            f"--update-weight-mode delta with --update-weight-transport {args.update_weight_transport}: deltas travel as "
            "files; give --update-weight-transport disk"
        )
    if args.update_weight_local_checkpoint_dir is None:
        yield (
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, a directory on every engine host to which "
            "the deltas are applied"
        )


def released_trainer(args: argparse.Namespace) -> Iterator[str]:
    if not args.release_train:
        return
    reason = "--release-train recreates the trainer from a checkpoint for each step"
    if args.train_backend != "megatron":
        yield f"--release-train with --train-backend {args.train_backend}: only megatron can; drop it"
    if args.use_critic:
        yield f"--release-train with --advantage-estimator {args.advantage_estimator}: the critic would be lost; drop it"
    if args.keep_old_actor:
        yield "--release-train with --keep-old-actor: the copy would be lost; drop one"
    if args.save is None:
        yield f"{reason}; give --save"
    if args.save_interval not in (None, 1):
        yield f"{reason}, so --save-interval {args.save_interval} must be 1"
    if (args.update_weight_mode, args.update_weight_transport) != ("full", "disk"):
        yield (
            f"{reason} and hands weights over as files: give --update-weight-mode full --update-weight-transport disk instead "
            f"of {args.update_weight_mode} over {args.update_weight_transport}"
        )


def stateless_adam(args: argparse.Namespace) -> Iterator[str]:
    if not args.use_stateless_adam:
        return
    if args.optimizer != "adam":
        yield f"--use-stateless-adam with --optimizer {args.optimizer}: give --optimizer adam"
    if not args.decoupled_weight_decay:
        yield "--use-stateless-adam with --no-decoupled-weight-decay: its decay is decoupled; drop one of them"
    if not args.no_save_optim:
        yield "--use-stateless-adam has no optimizer state to save: add --no-save-optim"


def old_actor(args: argparse.Namespace) -> Iterator[str]:
    """Warns; yields nothing."""
    is_read = args.loss_type == "policy_loss" and not args.use_rollout_logprobs
    if args.keep_old_actor and is_read and not args.asynchronous and not args.debug_train_only:
        logger.warning(
            "--keep-old-actor without train_async.py: a rollout trains on the weights that generated it, and the old log-probs "
            "come from those before"
        )
    yield from ()


def tracker_violations(args: argparse.Namespace) -> Iterator[str]:
    """One message for every tracker whose package is missing or whose flags contradict each other."""
    if args.use_wandb and importlib.util.find_spec("wandb") is None:
        yield "--use-wandb needs the package wandb: pip install wandb"
    if args.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "--use-tensorboard needs the package tensorboard: pip install tensorboard"
    host = args.wandb_host
    if host is not None and not host.startswith(("http://", "https://")):
        yield f"--wandb-host {host}: it must start with http:// or https://, as in https://wandb.example.com"
    idle = sorted(name for name in args.typed_flags if name.startswith("wandb_") and not args.use_wandb)
    if idle:
        logger.warning("%s: no effect without --use-wandb", ", ".join(flag_of(name) for name in idle))


OBJECTIVE_RULES: tuple[Rule, ...] = (losses, reference_model, estimators, importance_weights, distillation)
REPLAY_RULES: tuple[Rule, ...] = (routing_replay,)
WEIGHT_RULES: tuple[Rule, ...] = (parameter_names, transport, released_trainer, stateless_adam, old_actor)
