"""Flags of the objective: losses, advantages, KL, corrections of what separates engine and trainer, distillation."""

import argparse

from slime.algorithms.estimators import ESTIMATORS, estimator, names_of_estimators
from slime.arguments.flag import (
    ABOVE_ZERO,
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    SEED,
    Caller,
    Group,
    Idle,
    PathKind,
    flag,
    off,
    plug_in,
    share,
    switch,
    weight,
)
from slime.arguments.groups.training_flags import not_from_megatron

RANKS = Caller.RANKS


def _no_kl(args: argparse.Namespace) -> bool:
    return not args.use_kl_loss and args.kl_coef == 0


def _no_kl_by_oversight(args: argparse.Namespace) -> bool:
    # A script that types a weight of 0 has switched the KL off and means to keep the rest of it.
    return _no_kl(args) and not ("kl_loss_coef" in args.typed_flags and args.kl_loss_coef == 0)


def _discounts_nothing(args: argparse.Namespace) -> bool:
    # A function of the user's in the place of the estimator may read any flag.
    return not estimator(args.advantage_estimator).discounts and args.custom_advantage_function_path is None


def _rewards_of_groups(args: argparse.Namespace) -> bool:
    return not estimator(args.advantage_estimator).counts_kl and args.custom_advantage_function_path is None


_NO_KL_LOSS = Idle(lambda args: not args.use_kl_loss, "without --use-kl-loss")
_NO_KL = Idle(_no_kl, "without --use-kl-loss or --kl-coef")
_NO_KL_BY_OVERSIGHT = Idle(_no_kl_by_oversight, "without --use-kl-loss or --kl-coef")
_KL_ONLY_LOGGED = Idle(
    _rewards_of_groups,
    f"on the advantages of {names_of_estimators('counts_kl', without=True, joined_by='and')}: the KL is only logged",
)
_IMITATION = Idle(lambda args: args.loss_type == "sft_loss", "on the loss of --loss-type sft_loss")
_DISCOUNTS_NOTHING = Idle(
    _discounts_nothing,
    f"with an estimator that discounts nothing ({names_of_estimators('discounts', joined_by='and')} do)",
)
_COUNTS_NO_STEPS = Idle(_discounts_nothing, "with an estimator that counts no time steps")
_NO_CRITIC = Idle(
    lambda args: not estimator(args.advantage_estimator).needs_critic,
    f"without --advantage-estimator {names_of_estimators('needs_critic')}",
)
_NO_CUSTOM_LOSS = Idle(lambda args: args.loss_type != "custom_loss", "without --loss-type custom_loss")
_NO_MTP = Idle(lambda args: not args.enable_mtp_training, "without --enable-mtp-training")
_NO_TIS = Idle(lambda args: not args.use_tis, "without --use-tis", tells_default=True)
_NO_OPSM = Idle(lambda args: not args.use_opsm, "without --use-opsm", tells_default=True)
_NO_OPD = Idle(lambda args: not args.use_opd, "without --use-opd")

ALGORITHM = Group("algorithm", (
    # Training
    flag("--seed", int, 1234, "training seed; the seed of an engine is this + its rank x GPUs per node", bounds=SEED),
    flag("--lr", float, 1e-06, "learning rate, the highest one of the schedule", bounds=weight(0.1, "1e-7 to 1e-3")),
    flag("--clip-grad", float, 1.0, "gradient norm limit; 0: no clipping", bounds=AT_LEAST_ZERO),
    switch("--calculate-per-token-loss", "average the loss over the tokens of the step instead of over its rollouts"),
    switch("--reset-optimizer-states", "clear the optimizer's moments and step after each rollout"),
    switch("--use-stateless-adam", "Adam that keeps no moments between steps; needs --optimizer adam and --no-save-optim"),
    # Objective
    flag("--loss-type", str, "policy_loss", "training objective; custom_loss needs --custom-loss-function-path",
        "policy_loss", "sft_loss", "custom_loss"),
    plug_in("--custom-loss-function-path", RANKS, "the loss of custom_loss", idle=_NO_CUSTOM_LOSS),
    flag("--advantage-estimator", str, "grpo", "advantage method; ppo trains a critic on the actor's GPUs, "
        "reinforce_plus_plus* need --normalize-advantages", *ESTIMATORS, idle=_IMITATION),
    off("--disable-compute-advantages-and-returns", "compute_advantages_and_returns",
        "skip advantages (supervised fine-tuning, own losses)"),
    plug_in("--custom-advantage-function-path", RANKS, "replaces the advantage estimator"),
    plug_in("--custom-pg-loss-reducer-function-path", RANKS, "own reduction of the policy-gradient term, and of no other"),
    # Clipping
    flag("--eps-clip", float, 0.2, "the probability ratio may fall by this", bounds=AT_LEAST_ZERO),
    flag("--eps-clip-high", float, None, "the ratio may rise by this; unset: --eps-clip", bounds=AT_LEAST_ZERO),
    flag("--eps-clip-c", float, None, "dual-clip bound, above 1 (arXiv 1912.09729); unset: off"),
    flag("--value-clip", float, 0.2, "the critic's value may move this far from its old value", bounds=AT_LEAST_ZERO,
        idle=_NO_CRITIC),
    # KL and entropy
    flag("--kl-coef", float, 0.0, "weight of the KL against --ref-load inside the reward; not together with --kl-loss-coef",
        bounds=weight(1, "0 to 0.1"), idle=_KL_ONLY_LOGGED),
    switch("--use-kl-loss", "KL against the reference model (--ref-load) as a loss term", idle=_IMITATION),
    flag("--kl-loss-coef", float, 0.0, "weight of that term; 0: only logged", bounds=weight(1, "0 to 0.1"), idle=_NO_KL_LOSS),
    flag("--kl-loss-type", str, "k1", "estimator of the KL, in reward and loss", "k1", "k2", "k3", "low_var_kl",
        idle=_NO_KL_BY_OVERSIGHT),
    switch("--use-unbiased-kl", "weight the estimator by the importance ratio", idle=_NO_KL),
    flag("--ref-update-interval", int, None, "copy the actor into the reference model every N rollouts; unset: the reference "
        "never changes", bounds=AT_LEAST_ONE, idle=_NO_KL),
    flag("--entropy-coef", float, 0.0, "weight of the entropy bonus", bounds=weight(1, "0 to 0.01", low=None),
        idle=_IMITATION),
    switch("--use-rollout-entropy", "store per-token entropy with the log-probs"),
    # Advantages
    flag("--gamma", float, 1.0, "discount of later rewards, per token", bounds=share(1), idle=_DISCOUNTS_NOTHING),
    flag("--lambd", float, 1.0, "decay of generalised advantage estimation, per token", bounds=share(0.95), idle=_NO_CRITIC),
    switch("--discount-masked-tokens", "count masked tokens (tool output, say) as time steps in discounting and advantage "
        "estimation", idle=_COUNTS_NO_STEPS),
    switch("--normalize-advantages", "whiten advantages over the tokens of all data- and context-parallel ranks"),
    off("--disable-grpo-std-normalization", "grpo_std_normalization", "centre group rewards only, without division by their "
        "deviation (arXiv 2503.20783)"),
    off("--disable-rewards-normalization", "rewards_normalization", "use rewards as they are"),
    # Critic
    flag("--num-critic-only-steps", int, 0, "leading rollouts that train only the critic (--advantage-estimator ppo)",
        bounds=AT_LEAST_ZERO),
    flag("--megatron-config-path", str, None, "YAML file with values that hold for the actor or the critic alone"),
    # Multi-token prediction
    flag("--mtp-num-layers", int, None, "multi-token-prediction layers of the model", bounds=AT_LEAST_ZERO),
    switch("--enable-mtp-training", "train those layers; needs --mtp-num-layers"),
    flag("--mtp-loss-scaling-factor", float, 0.2, "weight of their loss", bounds=weight(), idle=_NO_MTP),
))  # fmt: skip

OFF_POLICY = Group("off-policy corrections", (
    # Importance sampling
    switch("--use-rollout-logprobs", "the engine's log-probs act as old log-probs; not with --use-tis", idle=_IMITATION),
    switch("--get-mismatch-metrics", "compare the log-probs of engine and trainer without changing the loss"),
    switch("--use-tis", "weight tokens by their trainer-to-engine probability ratio, truncated by --tis-clip and "
        "--tis-clip-low", idle=_IMITATION),
    flag("--tis-clip", float, 2.0, "upper bound of those weights", bounds=ABOVE_ZERO, idle=_NO_TIS),
    flag("--tis-clip-low", float, 0.0, "lower bound of those weights", bounds=AT_LEAST_ZERO, idle=_NO_TIS),
    flag("--tis-threshold", float, None, "another name of --tis-clip"),
    plug_in("--custom-tis-function-path", RANKS, "replaces the weighting of --use-tis", idle=_NO_TIS),
    # Replay
    switch("--use-routing-replay", "training sends tokens to the experts that the log-prob pass chose (arXiv 2507.18071)"),
    switch("--use-rollout-routing-replay", "training sends tokens to the experts that the engine chose (arXiv 2510.11370); "
        "implies --use-routing-replay", not_yet="asking the engines for the experts that they chose"),
    # Masks
    switch("--use-opsm", "mask sequences with negative advantage that drifted off-policy by more than --opsm-delta",
        idle=_IMITATION),
    flag("--opsm-delta", float, 0.0001, "that threshold, a mean log-ratio per token", bounds=AT_LEAST_ZERO, idle=_NO_OPSM),
    switch("--true-on-policy-mode", "demand bitwise equal log-probs of engine and trainer: deterministic kernels on both "
        "sides, one optimizer step per rollout, a weight push after each; a difference above "
        "--ci-train-rollout-logprob-abs-diff-threshold (then 0) stops the run",
        not_yet="the proof of bitwise equal log-probs"),
))  # fmt: skip

DISTILLATION = Group("on-policy distillation", (
    switch("--use-opd", "distil from a teacher, on top of any estimator; needs --opd-type", idle=_IMITATION),
    flag("--opd-type", str, None, "where the teacher is: behind HTTP (--rm-url), or as further weights in the trainer "
        "(--opd-teacher-load)", "sglang", "megatron", idle=_NO_OPD),
    flag("--opd-kl-coef", float, 1.0, "weight of the distillation term", bounds=weight(), idle=_NO_OPD),
    flag("--opd-teacher-load", str, None, "checkpoint of a teacher of the same architecture; --opd-type megatron only",
        path=PathKind.READ),
    flag("--opd-teacher-ckpt-step", int, None, "iteration to take from --opd-teacher-load", bounds=AT_LEAST_ZERO,
        idle=not_from_megatron("opd_teacher_load")),
))  # fmt: skip
