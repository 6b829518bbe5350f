"""Flags of the objective: loss, advantages, KL and optimizer steps."""

import argparse

TITLE = "algorithm"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_training(group)
    _add_objective(group)
    _add_clipping(group)
    _add_kl_and_entropy(group)
    _add_advantages(group)
    _add_critic(group)
    _add_mtp(group)


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed",
        type=int,
        default=1234,
        help="training seed; the seed of an engine is this + its rank x GPUs per node",
    )
    group.add_argument("--lr", type=float, default=1e-6, help="learning rate, the highest one of the schedule")
    group.add_argument("--clip-grad", type=float, default=1.0, help="gradient norm limit; 0: no clipping")
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="average the loss over the tokens of the step instead of over its rollouts",
    )
    group.add_argument(
        "--reset-optimizer-states",
        action="store_true",
        help="clear the optimizer's moments and step after each rollout",
    )
    group.add_argument(
        "--use-stateless-adam",
        action="store_true",
        help="Adam that keeps no moments between steps; needs --optimizer adam and --no-save-optim",
    )


def _add_objective(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loss-type",
        choices=["policy_loss", "sft_loss", "custom_loss"],
        default="policy_loss",
        help="training objective; custom_loss needs --custom-loss-function-path",
    )
    group.add_argument("--custom-loss-function-path", default=None, help="plug-in path: the loss of custom_loss")
    group.add_argument(
        "--advantage-estimator",
        choices=["grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"],
        default="grpo",
        help="advantage method; ppo trains a critic on the actor's GPUs, reinforce_plus_plus* need "
        "--normalize-advantages",
    )
    group.add_argument(
        "--disable-compute-advantages-and-returns",
        dest="compute_advantages_and_returns",
        action="store_false",
        help="skip advantages (supervised fine-tuning, own losses)",
    )
    group.add_argument(
        "--custom-advantage-function-path", default=None, help="plug-in path: replaces the advantage estimator"
    )
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        default=None,
        help="plug-in path: own reduction of the policy-gradient term, and of no other",
    )


def _add_clipping(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--eps-clip", type=float, default=0.2, help="the probability ratio may fall by this")
    group.add_argument(
        "--eps-clip-high", type=float, default=None, help="the ratio may rise by this; unset: --eps-clip"
    )
    group.add_argument(
        "--eps-clip-c", type=float, default=None, help="dual-clip bound, above 1 (arXiv 1912.09729); unset: off"
    )
    group.add_argument(
        "--value-clip", type=float, default=0.2, help="the critic's value may move this far from its old value"
    )


def _add_kl_and_entropy(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kl-coef",
        type=float,
        default=0.0,
        help="weight of the KL against --ref-load inside the reward; not together with --kl-loss-coef",
    )
    group.add_argument(
        "--use-kl-loss", action="store_true", help="KL against the reference model (--ref-load) as a loss term"
    )
    group.add_argument("--kl-loss-coef", type=float, default=0.0, help="weight of that term; 0: only logged")
    group.add_argument(
        "--kl-loss-type",
        choices=["k1", "k2", "k3", "low_var_kl"],
        default="k1",
        help="estimator of the KL, in reward and loss",
    )
    group.add_argument("--use-unbiased-kl", action="store_true", help="weight the estimator by the importance ratio")
    group.add_argument(
        "--ref-update-interval",
        type=int,
        default=None,
        help="copy the actor into the reference model every N rollouts; unset: the reference never changes",
    )
    group.add_argument("--entropy-coef", type=float, default=0.0, help="weight of the entropy bonus")
    group.add_argument("--use-rollout-entropy", action="store_true", help="store per-token entropy with the log-probs")


def _add_advantages(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gamma", type=float, default=1.0, help="discount of later rewards, per token")
    group.add_argument("--lambd", type=float, default=1.0, help="decay of generalised advantage estimation, per token")
    group.add_argument(
        "--discount-masked-tokens",
        action="store_true",
        help="count masked tokens (tool output, say) as time steps in discounting and advantage estimation",
    )
    group.add_argument(
        "--normalize-advantages",
        action="store_true",
        help="whiten advantages over the tokens of all data- and context-parallel ranks",
    )
    group.add_argument(
        "--disable-grpo-std-normalization",
        dest="grpo_std_normalization",
        action="store_false",
        help="centre group rewards only, without division by their deviation (arXiv 2503.20783)",
    )
    group.add_argument(
        "--disable-rewards-normalization",
        dest="rewards_normalization",
        action="store_false",
        help="use rewards as they are",
    )


def _add_critic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-critic-only-steps",
        type=int,
        default=0,
        help="leading rollouts that train only the critic (--advantage-estimator ppo)",
    )
    group.add_argument(
        "--megatron-config-path",
        default=None,
        help="YAML file with values that hold for the actor or the critic alone",
    )


def _add_mtp(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mtp-num-layers", type=int, default=None, help="multi-token-prediction layers of the model")
    group.add_argument("--enable-mtp-training", action="store_true", help="train those layers; needs --mtp-num-layers")
    group.add_argument("--mtp-loss-scaling-factor", type=float, default=0.2, help="weight of their loss")
