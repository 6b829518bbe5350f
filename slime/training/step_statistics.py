"""What a custom importance-sampling function may ask about a whole optimizer step.

The function of `--custom-tis-function-path` sees one micro-batch of one rank. What it needs of the whole step (a mean weight,
say) must not depend on how the step was cut, so the trainer computes it once before the step, from the stored log-probs.
A function asks by two attributes:

    def my_function(*, args, pg_loss, …, step_statistics=None, **kwargs): …
    my_function.step_statistics = my_statistics            # what to add up
    my_function.needs_step_statistics = lambda args: …     # whether, under these arguments; without it: always

`my_statistics(*, args, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, cp)` gets what the
function itself gets, but for all samples of the step that this rank has (perhaps none) and without a loss: log-probs are this
context-parallel rank's part of each response, 0 at masked tokens; masks are whole. It returns a dict from names to tensors of
any shape: this rank's share, with the same names and shapes on every rank. It may talk to the other ranks of `cp.group`, which
have the same samples, and to nobody else. The trainer adds the shares of all data- and context-parallel ranks, and hands the
sums to every call of the function as `step_statistics`: float64 tensors on the CPU. As they need stored log-probs, asking makes
the trainer run the pass that computes them.

What is known about an optimizer step before its first micro-batch, from stored log-probs of all ranks.

`--get-mismatch-metrics`: the engine's log-probs against the trainer's, in numbers per step and in the ten worst tokens.

Both come from stored log-probs, before training, and change nothing. Collective over data- and context-parallel ranks.

Whether the actor's log-probs are computed in a pass of their own before training.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.estimators import estimator
from slime.algorithms.mismatch import WorstToken, merge_worst_tokens, mismatch_metrics, mismatch_sums, worst_tokens
from slime.algorithms.reduction import zero_masked_tokens
from slime.training.context_parallel import ContextParallel, slice_responses
from slime.training.metric_reduction import all_reduce_max, all_reduce_sum
from slime.utils.errors import RunError, UserError
from slime.utils.plugin_loader import load_function, user_function_error

FLAG = "--custom-tis-function-path"
# Columns of the rank's data under the names that the function knows them by.
_COLUMNS = {
    "train_log_probs": "log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "loss_masks": "loss_masks",
    "total_lengths": "total_lengths",
    "response_lengths": "response_lengths",
}


def wants_step_statistics(function: Callable, args: argparse.Namespace) -> bool:
    """Whether `function` asks for statistics of the step under `args`."""
    if getattr(function, "step_statistics", None) is None:
        return False
    needs = getattr(function, "needs_step_statistics", None)
    return needs is None or bool(needs(args))


def compute_step_statistics(
    function: Callable,
    args: argparse.Namespace,
    rollout_data: dict[str, Any],
    positions: Sequence[int],
    cp: ContextParallel,
    data_group: dist.ProcessGroup,
) -> dict[str, torch.Tensor]:
    """The sums that `function` asks for over one optimizer step, float64 on the CPU, equal on all ranks.

    Collective over `data_group`: all ranks with data of the step, those of data and context parallelism together.

    Args:
        rollout_data: the rank's data with its stored log-probs; `positions` are those of the step.

    Raises:
        UserError, RunError: the user's code failed on some rank, or the ranks returned different names or shapes; the same
            on every rank.
    """
    path = args.custom_tis_function_path
    columns = {name: [rollout_data[column][i] for i in positions] for name, column in _COLUMNS.items()}
    masks = slice_responses(columns["loss_masks"], columns["total_lengths"], columns["response_lengths"], cp)
    columns |= zero_masked_tokens({name: columns[name] for name in ("train_log_probs", "rollout_log_probs")}, masks)
    shares: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        shares = _checked(path, function.step_statistics(args=args, cp=cp, **columns))
    except Exception as error:
        failure = user_function_error(FLAG, path, "the statistics of a step", error)
    _agree(path, shares, failure, data_group)
    return _added_up(shares, data_group)


def _checked(path: str, shares: Any) -> dict[str, torch.Tensor]:
    if not isinstance(shares, dict) or not all(torch.is_tensor(share) for share in shares.values()):
        raise UserError(f"{FLAG} {path}: its step_statistics returned {shares!r}; expected {{name: tensor}}")
    return {name: shares[name].detach() for name in sorted(shares)}


def _agree(
    path: str, shares: dict[str, torch.Tensor], failure: Exception | None, data_group: dist.ProcessGroup
) -> None:
    """Raise on every rank what is wrong on any: one that raised alone would leave the others waiting."""
    told = (None if failure is None else str(failure), {name: tuple(share.shape) for name, share in shares.items()})
    gathered: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(gathered, told, group=data_group)
    if failure is not None:
        raise failure
    for rank, (message, layout) in enumerate(gathered):
        if message is not None:
            raise RunError(f"data rank {rank}: {message}")
        if layout != gathered[0][1]:
            raise UserError(
                f"{FLAG} {path}: its step_statistics must return the same names and shapes on every rank; "
                f"rank 0 returned {gathered[0][1]}, rank {rank} returned {layout}"
            )


def _added_up(shares: dict[str, torch.Tensor], data_group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    if not shares:
        return {}
    flat = torch.cat([share.double().cpu().flatten() for share in shares.values()])
    parts = all_reduce_sum(flat, data_group).split([math.prod(share.shape) for share in shares.values()])
    return {name: part.view(share.shape) for (name, share), part in zip(shares.items(), parts, strict=True)}


@dataclass(frozen=True)
class StepFacts:
    """`statistics`: what the correction of the loss asked for, to be handed to it; `metrics`: equal on all ranks."""

    statistics: dict[str, torch.Tensor] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def facts_of_step(
    args: argparse.Namespace,
    rollout_data: dict[str, Any],
    positions: Sequence[int],
    cp: ContextParallel,
    data_group: dist.ProcessGroup,
) -> StepFacts:
    """Collective over `data_group`, the data- and context-parallel ranks, if the arguments ask for anything.

    Args:
        positions: the step's samples in this rank's data.
    """
    if args.loss_type == "sft_loss":
        return StepFacts()
    statistics, path = None, args.custom_tis_function_path
    if args.use_tis and path is not None:
        correction = load_function(path, flag=FLAG)
        if wants_step_statistics(correction, args):
            statistics = compute_step_statistics(correction, args, rollout_data, positions, cp, data_group)
    metrics = mismatch_of_step(rollout_data, positions, cp, data_group) if args.get_mismatch_metrics else {}
    return StepFacts(statistics, metrics)


WORST_TOKENS = 10


def mismatch_of_step(
    rollout_data: dict[str, Any], positions: Sequence[int], cp: ContextParallel, data_group: dist.ProcessGroup
) -> dict[str, float]:
    """`mismatch_*` over the trained tokens of an optimizer step, those of all ranks.

    Args:
        positions: the step's samples in this rank's data.

    Raises:
        UserError: the samples have no log-probs of the engine.
    """
    train, rollout, masks = (_flat(column, positions) for column in _columns(rollout_data, cp))
    sums, largest = mismatch_sums(train, rollout, masks)
    return mismatch_metrics(all_reduce_sum(sums, data_group), all_reduce_max(largest, data_group))


def worst_token_lines(
    rollout_data: dict[str, Any],
    decode: Callable[[list[int]], str],
    cp: ContextParallel,
    data_group: dist.ProcessGroup,
) -> list[str]:
    """A line about each of the ten trained tokens, over all ranks, whose two log-probs differ most; worst first.

    Args:
        decode: text of token ids.
    """
    train, rollout, masks = _columns(rollout_data, cp)
    lengths = (rollout_data["total_lengths"], rollout_data["response_lengths"])
    owned = slice_responses([torch.arange(response) for response in lengths[1]], *lengths, cp)
    rows = worst_tokens(train, rollout, masks, range(len(train)), WORST_TOKENS, owned)
    found = [(_renamed(row, rollout_data), _text(row, rollout_data, decode)) for row in rows]
    shards: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(shards, found, group=data_group)
    texts = {token: text for shard in shards for token, text in shard}
    return [_line(token, texts[token]) for token in merge_worst_tokens([texts], WORST_TOKENS)]


def _columns(rollout_data: dict[str, Any], cp: ContextParallel) -> tuple[list[torch.Tensor], ...]:
    """Log-probs of trainer and engine, and masks, of the tokens that this rank owns."""
    if "rollout_log_probs" not in rollout_data:
        raise UserError("--get-mismatch-metrics needs `rollout_log_probs`, and the samples of this rollout have none")
    masks = slice_responses(
        rollout_data["loss_masks"], rollout_data["total_lengths"], rollout_data["response_lengths"], cp
    )
    return rollout_data["log_probs"], rollout_data["rollout_log_probs"], masks


def _flat(column: Sequence[torch.Tensor], positions: Sequence[int]) -> torch.Tensor:
    return torch.cat([column[position] for position in positions]) if len(positions) else torch.zeros(0)


def _renamed(token: WorstToken, rollout_data: dict[str, Any]) -> WorstToken:
    """With the sample's own number in place of its row."""
    sample = int(rollout_data["sample_indices"][token.sample])
    return WorstToken(sample, token.position, token.train_log_prob, token.rollout_log_prob)


def _text(token: WorstToken, rollout_data: dict[str, Any], decode: Callable[[list[int]], str]) -> str:
    prompt = rollout_data["total_lengths"][token.sample] - rollout_data["response_lengths"][token.sample]
    return decode([int(rollout_data["tokens"][token.sample][prompt + token.position])])


def _line(token: WorstToken, text: str) -> str:
    return (
        f"sample {token.sample}, response token {token.position}, {text!r}: trainer {token.train_log_prob:.4f}, "
        f"engine {token.rollout_log_prob:.4f}, difference {abs(token.train_log_prob - token.rollout_log_prob):.1e}"
    )


def needs_log_prob_pass(args: argparse.Namespace, steps: int) -> bool:
    """Whether the data needs `log_probs` (or `entropy`) before training in `steps` optimizer steps.

    With one optimizer step per rollout the policy that trains still is the policy that is asked for, so the training forward
    gives the old log-probs too. Several steps, other weights (`--keep-old-actor`), or anything that reads the log-probs before
    or beside the loss need the pass. Whether a function of the user's reads them cannot be known: all that may, count.
    Supervised fine-tuning has no old policy. The steps are those of the data: an own rollout function or a dump may bring more
    rollouts than the flags announce.
    """
    if args.use_rollout_entropy:
        return True
    if args.loss_type == "sft_loss":
        return False
    return (
        args.loss_type != "policy_loss"
        or steps > 1
        or args.keep_old_actor
        or _advantages_read_them(args)
        or _loss_compares_them(args)
        or args.rollout_data_postprocess_path is not None
    )


def _advantages_read_them(args: argparse.Namespace) -> bool:
    return args.kl_coef != 0 or args.use_critic or args.use_opd or args.custom_advantage_function_path is not None


def _loss_compares_them(args: argparse.Namespace) -> bool:
    """With the engine's log-probs, with those of whole sequences, or over whole steps; or the pass records routing."""
    return (
        args.use_rollout_logprobs
        or args.get_mismatch_metrics
        or estimator(args.advantage_estimator).ratio_of_sequence
        or (args.use_routing_replay and not args.use_rollout_routing_replay)
        or _correction_asks_for_the_step(args)
    )


def _correction_asks_for_the_step(args: argparse.Namespace) -> bool:
    path = args.custom_tis_function_path
    if not args.use_tis or path is None:
        return False
    return wants_step_statistics(load_function(path, flag="--custom-tis-function-path"), args)
