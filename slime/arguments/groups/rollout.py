"""Flags of generation."""

import argparse

TITLE = "rollout"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hf-checkpoint",
        help="Hugging Face directory: tokenizer, config, initial engine weights; also the initial training weights "
        "when --load and --ref-load give none",
    )
    group.add_argument(
        "--rollout-function-path",
        default="slime.rollout.sglang_rollout.generate_rollout",
        help="function that produces one rollout step",
    )
    _add_sampling(group)
    _add_scheduling(group)
    _add_plug_ins(group)


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rollout-temperature", type=float, default=1.0, help="sampling temperature; above 0")
    group.add_argument("--rollout-top-p", type=float, default=1.0, help="nucleus mass")
    group.add_argument("--rollout-top-k", type=int, default=-1, help="top-k cut; -1: off")
    group.add_argument("--rollout-max-context-len", type=int, default=None, help="limit of prompt plus response tokens")
    group.add_argument(
        "--rollout-max-prompt-len", type=int, default=None, help="longer prompts are dropped when the data set loads"
    )
    group.add_argument(
        "--rollout-max-response-len",
        type=int,
        default=None,
        help="token budget of one response; unset: what the context limit leaves",
    )
    group.add_argument(
        "--rollout-skip-special-tokens", action="store_true", help="drop special tokens from the response text"
    )
    group.add_argument("--rollout-stop", nargs="+", default=None, help="stop strings")
    group.add_argument("--rollout-stop-token-ids", nargs="+", type=int, default=None, help="stop token ids")


def _add_scheduling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rollout-shuffle", action="store_true", help="permute the data set every epoch")
    group.add_argument(
        "--rollout-seed", type=int, default=42, help="seed of that permutation and of deterministic sampling"
    )
    group.add_argument(
        "--over-sampling-batch-size",
        type=int,
        default=None,
        help="prompts fetched whenever fewer than needed remain; unset: --rollout-batch-size",
    )
    group.add_argument(
        "--keep-surplus-groups",
        action="store_true",
        help="use finished groups beyond the target in the next step instead of returning their prompts",
    )
    group.add_argument(
        "--partial-rollout", action="store_true", help="aborted responses go back to the buffer and continue later"
    )
    group.add_argument(
        "--mask-offpolicy-in-partial-rollout",
        action="store_true",
        help="with --partial-rollout, train only tokens written after the resumption",
    )
    group.add_argument("--max-turns", type=int, default=None, help="for custom generate functions, as args.max_turns")


def _add_plug_ins(group: argparse._ArgumentGroup) -> None:
    plug_ins = {
        "--dynamic-sampling-filter-path": "decides per group whether it is kept",
        "--custom-generate-function-path": "replaces the generation of one sample inside the default loop",
        "--custom-rollout-log-function-path": "custom rollout logging; a true result suppresses the default",
        "--custom-eval-rollout-log-function-path": "the same for evaluation",
        "--buffer-filter-path": "picks groups out of the buffer",
        "--rollout-sample-filter-path": "marks samples whose loss is masked",
        "--rollout-all-samples-process-path": "sees every finished group, filtered ones included",
        "--rollout-data-postprocess-path": "runs on each train rank after advantages, before training",
    }
    for flag, help_text in plug_ins.items():
        group.add_argument(flag, default=None, help=f"plug-in path: {help_text}")
    group.add_argument(
        "--rollout-sample-hook-path",
        action="append",
        default=[],
        help="plug-in path, repeatable: hook on every generated sample before its reward",
    )
