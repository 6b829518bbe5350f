"""Flags of generation."""

import argparse

TITLE = "rollout"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_model(group)
    _add_sampling(group)
    _add_scheduling(group)
    _add_staleness(group)
    _add_plug_ins(group)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hf-checkpoint",
        default=None,
        help="Hugging Face directory: tokenizer, config, initial engine weights; also the initial training weights "
        "when --load and --ref-load give none. Engines get the trainer's weights before they are first used",
    )
    group.add_argument(
        "--model-name",
        default=None,
        help="name of the model family for the conversion of weights; unset: from the config of --hf-checkpoint",
    )
    group.add_argument(
        "--rollout-external-engine-addrs",
        nargs="+",
        metavar="HOST:PORT",
        default=None,
        help="engines that this run did not start and will not stop; not with --prefill-num-servers or --sglang-config",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rollout-temperature",
        type=float,
        default=1.0,
        help="sampling temperature, above 0; the trainer divides its logits by it too, but not in sft_loss",
    )
    group.add_argument(
        "--rollout-top-p",
        type=float,
        default=1.0,
        help="nucleus mass; below 1 the trainer's log-probs cover the same kept set of tokens as the engine's",
    )
    group.add_argument("--rollout-top-k", type=int, default=-1, help="sample among this many tokens only; -1: off")
    group.add_argument(
        "--rollout-max-context-len",
        type=int,
        default=None,
        help="limit of prompt plus response, in tokens; keep it within the model's position limit; unset: that limit",
    )
    group.add_argument(
        "--rollout-max-prompt-len",
        type=int,
        default=None,
        help="longer prompts are dropped when the data set loads; unset: --rollout-max-context-len minus 1, if given",
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
        help="prompts of the first draw of a step, at least --rollout-batch-size; what a filter drops is replaced one for "
        "one; unset: --rollout-batch-size",
    )
    group.add_argument(
        "--keep-surplus-groups",
        action="store_true",
        help="use finished groups beyond the target in the next step, one weight version older, instead of returning "
        "their prompts",
    )
    group.add_argument(
        "--partial-rollout", action="store_true", help="aborted responses go back to the buffer and continue later"
    )
    group.add_argument(
        "--mask-offpolicy-in-partial-rollout",
        action="store_true",
        help="with --partial-rollout, train only the tokens written after the resumption",
    )
    group.add_argument(
        "--max-turns", type=int, default=None, help="turns of a dialogue; custom generate functions read args.max_turns"
    )
    group.add_argument(
        "--rollout-data-transport",
        choices=["object-store", "nixl"],
        default="object-store",
        help="how batches travel from the rollout manager to the training ranks",
    )


def _add_staleness(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--keep-old-actor",
        action="store_true",
        help="keep a lagging copy of the actor that supplies the old log-probs",
    )
    group.add_argument(
        "--async-buffer-size",
        type=int,
        default=1,
        help="rollouts that train_async.py may generate or queue beyond the one being trained, at least 1",
    )
    group.add_argument(
        "--max-weight-staleness",
        type=int,
        default=None,
        help="largest allowed age of a trained sample, in weight versions; older ones are generated again; unset: any",
    )


def _add_plug_ins(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rollout-function-path",
        default="slime.rollout.sglang_rollout.generate_rollout",
        help="plug-in path: function that produces one rollout step",
    )
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
        help="plug-in path, repeatable and applied in order: hook on every generated sample before its reward",
    )
