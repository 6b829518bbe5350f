"""Flags of evaluation."""

import argparse

TITLE = "evaluation"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--eval-function-path", default=None, help="plug-in path; unset: the rollout function")
    group.add_argument(
        "--eval-interval",
        type=int,
        default=None,
        help="evaluate every N rollouts, at epoch ends and after the last; needs --eval-prompt-data or --eval-config",
    )
    group.add_argument(
        "--eval-prompt-data",
        nargs="+",
        action="extend",
        default=None,
        help="pairs `name path`; repeated flags add up; one lone path is named `aime`",
    )
    group.add_argument(
        "--eval-config",
        default=None,
        help="YAML or JSON file of evaluation sets, each with own sampling and reward; replaces --eval-prompt-data",
    )
    group.add_argument("--skip-eval-before-train", action="store_true", help="no evaluation before the first rollout")
    for key in ("input", "label", "tool"):
        group.add_argument(f"--eval-{key}-key", default=None, help=f"unset: --{key}-key")
    group.add_argument("--n-samples-per-eval-prompt", type=int, default=1, help="responses per eval prompt")
    group.add_argument("--eval-temperature", type=float, default=None, help="unset: the rollout's; 0 is greedy")
    group.add_argument("--eval-top-p", type=float, default=None, help="unset: the rollout's")
    group.add_argument("--eval-top-k", type=int, default=None, help="unset: the rollout's")
    group.add_argument("--eval-max-response-len", type=int, default=None, help="unset: the rollout's")
    group.add_argument("--eval-max-prompt-len", type=int, default=None, help="prompt length filter of eval sets")
    group.add_argument("--eval-min-new-tokens", type=int, default=None, help="lower bound of generated tokens")
    group.add_argument("--eval-max-context-len", type=int, default=None, help="unset: --rollout-max-context-len")
