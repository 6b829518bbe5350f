"""Flags of checkpoints, objective and optimizer steps."""

import argparse

TITLE = "algorithm and checkpoints"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_checkpoints(group)
    _add_objective(group)
    _add_kl_and_entropy(group)


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ref-load",
        default=None,
        help="reference checkpoint, Megatron or Hugging Face directory; also the initial one when --load gives nothing",
    )
    group.add_argument("--ref-ckpt-step", type=int, default=None, help="iteration to take from --ref-load")
    group.add_argument(
        "--load",
        default=None,
        help="actor checkpoint: Megatron directory = resume, Hugging Face directory = direct load",
    )
    group.add_argument("--ckpt-step", type=int, default=None, help="iteration to take from --load")
    group.add_argument(
        "--save", default=None, help="checkpoint directory; the data state goes to its `rollout/` folder"
    )
    group.add_argument(
        "--save-interval", type=int, default=None, help="save every N rollouts, at epoch ends and after the last"
    )
    group.add_argument("--keep-last", type=int, default=None, help="keep only the newest N checkpoints")
    group.add_argument(
        "--no-save-optim", action="store_true", help="leave the optimizer state out; such a checkpoint cannot resume"
    )
    group.add_argument(
        "--no-load-optim", action="store_true", help="load weights only; optimizer and scheduler start fresh"
    )
    group.add_argument("--no-load-rng", action="store_true", help="do not restore random generator states")
    group.add_argument(
        "--finetune", action="store_true", help="load weights only and start at rollout 0 with fresh data and scheduler"
    )
    group.add_argument(
        "--save-hf",
        default=None,
        help="with every save, also export to this Hugging Face directory; `{rollout_id}` is filled in",
    )
    group.add_argument(
        "--seed", type=int, default=1234, help="training seed; engine seed = seed + rank x GPUs per node"
    )


def _add_objective(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loss-type", choices=["policy_loss", "sft_loss", "custom_loss"], default="policy_loss", help="objective"
    )
    group.add_argument("--custom-loss-function-path", default=None, help="plug-in path: loss of `custom_loss`")
    group.add_argument("--advantage-estimator", choices=["grpo"], default="grpo", help="advantage method")
    group.add_argument(
        "--disable-compute-advantages-and-returns",
        dest="compute_advantages_and_returns",
        action="store_false",
        help="skip advantages (supervised fine-tuning, own losses)",
    )
    group.add_argument(
        "--custom-advantage-function-path", default=None, help="plug-in path: replaces the advantage estimator"
    )
    group.add_argument("--eps-clip", type=float, default=0.2, help="the ratio may fall by this")
    group.add_argument(
        "--eps-clip-high", type=float, default=None, help="the ratio may rise by this; unset: --eps-clip"
    )
    group.add_argument("--eps-clip-c", type=float, default=None, help="dual-clip bound, above 1 (arXiv 1912.09729)")
    group.add_argument(
        "--calculate-per-token-loss",
        action="store_true",
        help="average over the tokens of the step instead of over rollouts",
    )
    group.add_argument(
        "--disable-grpo-std-normalization",
        dest="grpo_std_normalization",
        action="store_false",
        help="centre group rewards only (arXiv 2503.20783)",
    )
    group.add_argument(
        "--disable-rewards-normalization",
        dest="rewards_normalization",
        action="store_false",
        help="use rewards as they are",
    )
    group.add_argument("--use-rollout-logprobs", action="store_true", help="engine log-probs act as old log-probs")
    group.add_argument(
        "--custom-pg-loss-reducer-function-path",
        default=None,
        help="plug-in path: own reduction of the policy-gradient term",
    )


def _add_kl_and_entropy(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--use-kl-loss", action="store_true", help="KL against the reference as a loss term")
    group.add_argument("--kl-loss-coef", type=float, default=0.0, help="its weight")
    group.add_argument("--kl-loss-type", choices=["k1", "k2", "k3", "low_var_kl"], default="k1", help="KL estimator")
    group.add_argument("--use-unbiased-kl", action="store_true", help="weight the estimator by the importance ratio")
    group.add_argument("--entropy-coef", type=float, default=0.0, help="entropy bonus")
    group.add_argument("--use-rollout-entropy", action="store_true", help="store per-token entropy with the log-probs")
