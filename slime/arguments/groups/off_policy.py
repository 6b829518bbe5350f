"""Flags for what separates engine and trainer: importance weights, routing replay, masks, and the on-policy proof."""

import argparse

TITLE = "off-policy corrections"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_importance_sampling(group)
    _add_replay(group)
    _add_masks(group)


def _add_importance_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-rollout-logprobs",
        action="store_true",
        help="the engine's log-probs act as old log-probs; not with --use-tis",
    )
    group.add_argument(
        "--get-mismatch-metrics",
        action="store_true",
        help="compare the log-probs of engine and trainer without changing the loss",
    )
    group.add_argument(
        "--use-tis",
        action="store_true",
        help="weight tokens by their trainer-to-engine probability ratio, truncated by --tis-clip and --tis-clip-low",
    )
    group.add_argument("--tis-clip", type=float, default=2.0, help="upper bound of those weights")
    group.add_argument("--tis-clip-low", type=float, default=0.0, help="lower bound of those weights")
    group.add_argument("--tis-threshold", type=float, default=None, help="another name of --tis-clip")
    group.add_argument(
        "--custom-tis-function-path", default=None, help="plug-in path: replaces the weighting of --use-tis"
    )


def _add_replay(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-routing-replay",
        action="store_true",
        help="training sends tokens to the experts that the log-prob pass chose (arXiv 2507.18071)",
    )
    group.add_argument(
        "--use-rollout-routing-replay",
        action="store_true",
        help="training sends tokens to the experts that the engine chose (arXiv 2510.11370); implies "
        "--use-routing-replay",
    )


def _add_masks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-opsm",
        action="store_true",
        help="mask sequences with negative advantage that drifted off-policy by more than --opsm-delta",
    )
    group.add_argument("--opsm-delta", type=float, default=1e-4, help="that threshold, a mean log-ratio per token")
    group.add_argument(
        "--true-on-policy-mode",
        action="store_true",
        help="demand bitwise equal log-probs of engine and trainer: deterministic kernels on both sides, one optimizer "
        "step per rollout, a weight push after each; a difference above "
        "--ci-train-rollout-logprob-abs-diff-threshold (then 0) stops the run",
    )
