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

`needs_log_prob_pass` tells for which arguments the actor's log-probs are computed in a pass of their own before training.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.estimators import estimator
from slime.algorithms.reduction import zero_masked_tokens
from slime.training.custom_functions import copied_masks
from slime.training.metric_reduction import all_reduce_sum, joined
from slime.training.rollout_data import RolloutData
from slime.utils.errors import RunError, UserError
from slime.utils.plugin_loader import containing_endings, load_function, user_function_error

FLAG = "--custom-tis-function-path"


def wants_step_statistics(function: Callable, args: argparse.Namespace) -> bool:
    """Whether `function` asks for statistics of the step under `args`."""
    if getattr(function, "step_statistics", None) is None:
        return False
    needs = getattr(function, "needs_step_statistics", None)
    return needs is None or bool(needs(args))


def statistics_for_correction(
    args: argparse.Namespace, step_data: RolloutData, data_group: dist.ProcessGroup
) -> dict[str, torch.Tensor] | None:
    """`compute_step_statistics` for the correction of the loss; None where it asks for nothing."""
    path = args.custom_tis_function_path
    if path is None:
        return None
    correction = load_function(path, flag=FLAG)
    if not wants_step_statistics(correction, args):
        return None
    return compute_step_statistics(correction, args, step_data, data_group)


def compute_step_statistics(
    function: Callable, args: argparse.Namespace, step_data: RolloutData, data_group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """The sums that `function` asks for over one optimizer step, float64 on the CPU, equal on all ranks.

    Collective over `data_group`: all ranks with data of the step, those of data and context parallelism together.

    Args:
        step_data: the step's samples that this rank has, with their stored log-probs.

    Raises:
        UserError, RunError: the user's code failed on some rank, or the ranks returned different names or shapes; the same
            on every rank.
    """
    path = args.custom_tis_function_path
    sides = {
        "train_log_probs": step_data["log_probs"],
        "rollout_log_probs": step_data.column("rollout_log_probs", FLAG),
    }
    columns = zero_masked_tokens(sides, step_data.local_masks)
    columns |= {name: step_data[name] for name in ("total_lengths", "response_lengths")}
    columns["loss_masks"] = copied_masks(step_data["loss_masks"])
    shares: dict[str, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        with containing_endings():
            shares = _checked(path, function.step_statistics(args=args, cp=step_data.cp, **columns))
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
    parts = all_reduce_sum(joined(list(shares.values())), data_group).split(
        [math.prod(share.shape) for share in shares.values()]
    )
    return {name: part.view(share.shape) for (name, share), part in zip(shares.items(), parts, strict=True)}


def needs_log_prob_pass(args: argparse.Namespace, steps: int) -> bool:
    """Whether the data needs `log_probs` (or `entropy`) before training in `steps` optimizer steps.

    With one optimizer step per rollout, the policy that trains is still the one whose log-probs are needed, so the training
    forward gives these too. The pass is needed for several steps, for other weights (`--keep-old-actor`), and for anything that
    reads log-probs before or beside the loss. Users' functions that may read them count, since nobody knows whether they do.
    Supervised fine-tuning has no old policy, and has advantages only if a critic learns beside it.

    Args:
        steps: those of the data; a user's rollout function or a dump may bring more rollouts than the flags announce.
    """
    if args.use_rollout_entropy or args.rollout_data_postprocess_path is not None:
        return True
    if args.loss_type == "sft_loss":
        return args.use_critic
    path = args.custom_tis_function_path
    return (
        args.loss_type != "policy_loss"
        or steps > 1
        or args.keep_old_actor
        # Advantages are computed from the log-probs.
        or (args.kl_coef != 0 or args.use_critic or args.use_opd or args.custom_advantage_function_path is not None)
        # The loss compares them: with the engine's, with those of whole sequences, or over whole steps.
        or (args.use_rollout_logprobs or args.get_mismatch_metrics)
        or estimator(args.advantage_estimator).ratio_of_sequence
        or (path is not None and wants_step_statistics(load_function(path, flag=FLAG), args))
        # The log-prob pass is the one that records the routing.
        or (args.use_routing_replay and not args.use_rollout_routing_replay)
    )
