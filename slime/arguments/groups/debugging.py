"""Flags for looking into a run: half runs, dumps, proofs, memory and time."""

import argparse

TITLE = "debugging"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_modes(group)
    _add_dumps(group)
    _add_memory_and_time(group)
    _add_assertions(group)


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--debug-rollout-only", action="store_true", help="engines only, no training ranks; not with --debug-train-only"
    )
    group.add_argument(
        "--debug-train-only", action="store_true", help="training ranks only: no engines, no evaluation, no weight push"
    )
    group.add_argument(
        "--check-weight-update-equal",
        action="store_true",
        help="prove that engine weights equal trainer weights: by checksums at start, by a log-prob probe after "
        "every sync",
    )


def _add_dumps(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save-debug-rollout-data", default=None, help="dump rollouts; `{rollout_id}` is filled in")
    group.add_argument(
        "--load-debug-rollout-data", default=None, help="train on dumped rollouts; implies --debug-train-only"
    )
    group.add_argument(
        "--load-debug-rollout-data-subsample",
        type=float,
        default=None,
        help="take this share of such a dump, above 0 and at most 1: its first and last halves",
    )
    group.add_argument(
        "--load-forge-rollout-data",
        default=None,
        help="dump that slime.rollout.forge_load.generate_rollout replays while the engines live",
    )
    group.add_argument(
        "--save-debug-train-data", default=None, help="dump train batches; `{rollout_id}` and `{rank}` are filled in"
    )
    group.add_argument(
        "--dump-details",
        default=None,
        help="directory for both dumps: rollout_data/{rollout_id}.pt and train_data/{rollout_id}.pt",
    )


def _add_memory_and_time(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--memory-probe",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="before the first step, run one micro-batch of the longest allowed length; unset: on GPUs",
    )
    group.add_argument(
        "--record-memory-history", action="store_true", help="record allocations, for snapshots of the memory"
    )
    group.add_argument(
        "--memory-recorder", choices=["torch", "memray"], default="torch", help="what records them: GPU or host memory"
    )
    group.add_argument("--memory-snapshot-dir", default=".", help="directory of the snapshots")
    group.add_argument(
        "--memory-snapshot-num-steps", type=int, default=None, help="stop recording after that many rollouts"
    )
    group.add_argument(
        "--profile-target",
        nargs="+",
        choices=["train_overall", "train_actor", "train_log_probs"],
        default=["train_overall"],
        help="what --use-pytorch-profiler traces",
    )


def _add_assertions(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ci-test", action="store_true", help="stop when a number leaves the range that a healthy test run has"
    )
    group.add_argument("--ci-disable-kl-checker", action="store_true", help="leave out --ci-test's checks of the KL")
    group.add_argument(
        "--ci-train-rollout-logprob-abs-diff-threshold",
        type=float,
        default=0.1,
        help="largest mean difference between log-probs of engine and trainer that --ci-test allows",
    )
    where = "template with `{role}`, `{rollout_id}` and `{step_id}`"
    group.add_argument("--ci-save-grad-norm", default=None, help=f"file for the gradient norm of every step: {where}")
    group.add_argument(
        "--ci-load-grad-norm",
        default=None,
        help=f"files of an earlier run to compare with, within 1 %% or 0.01: {where}",
    )
