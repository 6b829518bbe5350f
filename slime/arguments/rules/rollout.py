"""Rules about sampling, lengths, staleness and rewards."""

import argparse
import logging
import math
from collections.abc import Iterator

from slime.arguments.config_files.eval_file import places_in
from slime.arguments.flag import flag_of
from slime.arguments.rules import Rule
from slime.arguments.sizes import positions_of_model
from slime.utils.reward_types import is_planned_reward_type, is_reward_type, known_reward_types

logger = logging.getLogger(__name__)

_LENGTHS = tuple(f"{kind}_max_{part}_len" for kind in ("rollout", "eval") for part in ("context", "prompt", "response"))


def sampling(args: argparse.Namespace) -> Iterator[str]:
    if not args.rollout_temperature > 0:
        yield (
            f"--rollout-temperature {args.rollout_temperature}: training needs a value above 0 (1.0 is usual); "
            "--eval-temperature may be 0"
        )
    if args.eval_temperature is not None and args.eval_temperature < 0:
        yield f"--eval-temperature {args.eval_temperature}: it must not be negative; 0 is greedy"
    for flag, mass in (("--rollout-top-p", args.rollout_top_p), ("--eval-top-p", args.eval_top_p)):
        if mass is not None and not 0 < mass <= 1:
            yield f"{flag} {mass}: it is a share of the probability, above 0 and at most 1"
    for flag, count in (("--rollout-top-k", args.rollout_top_k), ("--eval-top-k", args.eval_top_k)):
        if count is not None and count != -1 and count < 1:
            yield f"{flag} {count}: give -1 for no cut, or at least 1"
    if "" in (args.rollout_stop or []):
        yield "--rollout-stop: an empty stop string would end every response at once; give text, or drop the flag"


def lengths(args: argparse.Namespace) -> Iterator[str]:
    """Prompt and response must fit into the context, and the context into the positions of the model."""
    for kind in ("rollout", "eval"):
        context = getattr(args, f"{kind}_max_context_len")
        for part in ("prompt", "response"):
            name = f"{kind}_max_{part}_len"
            length = getattr(args, name)
            if context is not None and length is not None and length >= context:
                yield f"{flag_of(name)} {length} must be below --{kind}-max-context-len {context}, at most {context - 1}"
    limit = positions_of_model(args)
    for name in _LENGTHS if limit is not None else ():
        length = getattr(args, name)
        # What follows from the context is too long only together with it.
        if name in args.typed_flags and length is not None and length > limit:
            yield f"{flag_of(name)} {length} is above the model's --max-position-embeddings {limit}; give at most that"


def lengths_of_sets(args: argparse.Namespace) -> Iterator[str]:
    """The same for lengths that stand in `--eval-config`."""
    limit, context = positions_of_model(args), args.eval_max_context_len
    place = places_in(args.eval_config if args.eval_datasets else None)
    for dataset in args.eval_datasets:
        where, length = place(dataset.name, "max_response_len"), dataset.max_response_len
        if where is None:
            continue
        if context is not None and length >= context:
            yield f"{where}: max_response_len {length} must be below --eval-max-context-len {context}, at most {context - 1}"
        elif limit is not None and length > limit:
            yield (
                f"{where}: max_response_len {length} is above the model's --max-position-embeddings {limit}; give at most that"
            )


def summed_lengths(args: argparse.Namespace) -> Iterator[str]:
    """Warns of prompts and responses that fit alone and not together; yields nothing. Engines refuse such requests."""
    for kind, response in (
        ("rollout", args.rollout_max_response_len),
        ("eval", args.eval_max_response_len or args.rollout_max_response_len),
    ):
        prompt = getattr(args, f"{kind}_max_prompt_len")
        if getattr(args, f"{kind}_max_context_len") is not None or prompt is None or response is None:
            continue
        limits = {"--max-position-embeddings": positions_of_model(args)}
        limits["--sglang-context-length"] = getattr(args, "sglang_context_length", None)
        flag, limit = min(((flag, n) for flag, n in limits.items() if n), key=lambda pair: pair[1], default=("", 0))
        if limit and prompt + response > limit:
            logger.warning(
                "--%s-max-prompt-len %d and a response of %d tokens are together above %s %d, and engines refuse such "
                "requests; --%s-max-context-len %d shortens the responses", kind, prompt, response, flag, limit, kind, limit,
            )  # fmt: skip
    yield from ()


def asynchronous_loop(args: argparse.Namespace) -> Iterator[str]:
    if args.asynchronous and args.colocate:
        yield "--colocate: train_async.py generates while it trains, so both need GPUs of their own; use train.py, or drop it"
    least = unavoidable_staleness(args)
    if args.max_weight_staleness is not None and args.max_weight_staleness < least:
        yield (
            f"--max-weight-staleness {args.max_weight_staleness}: with --async-buffer-size {args.async_buffer_size} and "
            f"--update-weights-interval {args.update_weights_interval} samples are up to {least} versions old when they are "
            f"trained; give at least {least}, or a smaller buffer"
        )


def unavoidable_staleness(args: argparse.Namespace) -> int:
    """Weight versions that the trainer is ahead of the oldest sample that the loop hands it.

    The synchronous loop pushes before it generates. In the asynchronous one a rollout may wait while
    `async_buffer_size` others are trained, with a push after every `update_weights_interval` of those.
    """
    return math.ceil(args.async_buffer_size / args.update_weights_interval) if args.asynchronous else 0


def on_policy_proof(args: argparse.Namespace) -> Iterator[str]:
    if not args.true_on_policy_mode:
        return
    reason = "with --true-on-policy-mode samples must come from the weights that train on them"
    if args.asynchronous:
        yield f"train_async.py trains on older samples: {reason}; use train.py"
    if args.num_steps_per_rollout != 1:
        yield f"{args.num_steps_per_rollout} optimizer steps per rollout: {reason}; give --num-steps-per-rollout 1"
    if args.update_weights_interval != 1:
        yield f"--update-weights-interval {args.update_weights_interval}: {reason}; give 1"
    if args.keep_old_actor:
        yield f"--keep-old-actor: {reason}; drop it"
    if args.partial_rollout and not args.mask_offpolicy_in_partial_rollout:
        yield f"--partial-rollout: {reason}; add --mask-offpolicy-in-partial-rollout"


def reward_types(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(where it stands, name) of every built-in reward that is asked for."""
    # An own reward function may give names of its own a meaning.
    if args.custom_rm_path is not None:
        return
    if args.rm_type:
        yield "--rm-type", args.rm_type
    place = places_in(args.eval_config if args.eval_datasets else None)
    for dataset in args.eval_datasets:
        if dataset.rm_type and dataset.custom_rm_path is None:
            yield f"{place(dataset.name, 'rm_type')}: rm_type", dataset.rm_type


def rewards(args: argparse.Namespace) -> Iterator[str]:
    for where, name in reward_types(args):
        if not is_reward_type(name) and not is_planned_reward_type(name):
            yield f"{where} {name} is no built-in reward; known types: {known_reward_types()}, or give --custom-rm-path"
    for flag, url in (("--rm-url", args.rm_url), ("--rollout-buffer-url", args.rollout_buffer_url)):
        if url is not None and not url.startswith(("http://", "https://")):
            yield f"{flag} {url}: it must start with http:// or https://"


ROLLOUT_RULES: tuple[Rule, ...] = (
    sampling, lengths, lengths_of_sets, summed_lengths, asynchronous_loop, on_policy_proof, rewards,
)  # fmt: skip
