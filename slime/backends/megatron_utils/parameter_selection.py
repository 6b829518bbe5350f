"""Which parameters are trained: `--only-train-params-name-list`, `--freeze-params-name-list`, `--freeze-indexer`.

The regular expressions are searched in global names, so a list means the same in every parallel layout. Megatron's wrappers
give a frozen parameter no gradient buffer and no optimizer state, so parameters are frozen before the model is wrapped. They
stay in checkpoints and weight pushes. The biases by which routers choose experts have no gradients, and steps move them all: a
step puts back those that are frozen. Two parts are frozen where nothing trains them: without `--dsa-indexer-loss-coeff` the
indexer of sparse attention, and without `--enable-mtp-training` the layers for multi-token prediction.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from slime.arguments.flag import flag_of
from slime.backends.megatron_utils.parameter_names import global_named_parameters, global_named_weights
from slime.backends.megatron_utils.prediction_layers import has_prediction_layers, trains_prediction_layers
from slime.backends.megatron_utils.value_head import is_value_head
from slime.training.metric_reduction import all_reduce_sum
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# The part of sparse attention that chooses the keys.
INDEXER = r"(^|\.)indexer\."
PREDICTION_LAYERS = r"^mtp\."
_LISTS = ("only_train_params_name_list", "freeze_params_name_list")
_EXAMPLES = 3


def select_trained_parameters(args: argparse.Namespace, model: Sequence[torch.nn.Module]) -> None:
    """Freeze the parameters that the flags name, in the bare model chunks of this rank. Collective over all ranks.

    Raises:
        UserError: an expression matches no parameter of the whole model, or nothing is left to train.
    """
    patterns = _patterns(args)
    if not patterns:
        return
    parameters = [pair for chunk in model for pair in global_named_parameters(chunk)]
    for name, parameter in parameters:
        # A value head is always trained: a new one has learnt nothing yet, and a critic is useless without it.
        parameter.requires_grad_(is_value_head(parameter) or is_trained(args, name))
    trained = sum(parameter.requires_grad for _, parameter in parameters)
    names = [name for chunk in model for name, _ in global_named_weights(chunk)]
    matched = [sum(re.search(pattern, name) is not None for name in names) for _, pattern in patterns]
    *matched, trained, total = of_all_ranks([*matched, trained, len(parameters)])
    _require_matches(patterns, matched, names)
    if not trained:
        raise UserError(
            f"{', '.join(sorted({flag for flag, _ in patterns}))}: all parameters are frozen; free some of them"
        )
    if args.recompute_granularity or args.overlap_moe_expert_parallel_comm:
        for chunk in model:
            _let_gradients_reach_layers(chunk)
    if dist.get_rank() == 0:
        logger.info("%.1f%% of the ranks' parameter tensors are trained, the others frozen", 100 * trained / total)


def of_all_ranks(counts: Sequence[int]) -> list[int]:
    """The sums of all ranks' counts. Collective."""
    return all_reduce_sum(torch.tensor(counts), dist.group.WORLD).tolist()


def _let_gradients_reach_layers(chunk: torch.nn.Module) -> None:
    """Make the output of frozen embeddings require a gradient.

    For autograd a recomputed part of the model is one operation, whose only argument is its input. If the input requires no
    gradient, nothing in the part gets one, trained or not. And where passes are made in parts, each has a backward pass.
    """

    def ask(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    embedding = getattr(chunk, "embedding", None)
    if embedding is not None:
        embedding.register_forward_hook(ask)


def selection_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """The regular expressions of the flags that are given, by attribute; empty if everything is trained."""
    given = {name: getattr(args, name) for name in _LISTS}
    selection = {name: list(expressions) for name, expressions in given.items() if expressions}
    # Weight decay must not move an indexer that nothing trains.
    if args.freeze_indexer or (args.dsa_indexer_topk is not None and not args.dsa_indexer_loss_coeff):
        selection["freeze_indexer"] = [INDEXER]
    if has_prediction_layers(args) and not trains_prediction_layers(args):
        selection["mtp_num_layers"] = [PREDICTION_LAYERS]
    return selection


def as_flags(selection: Mapping[str, Sequence[str]]) -> str:
    """A selection as it is typed, for messages."""
    without_value = {
        "freeze_indexer": flag_of("freeze_indexer"),
        "mtp_num_layers": f"{flag_of('mtp_num_layers')} without {flag_of('enable_mtp_training')}",
    }
    words = [
        without_value.get(name, f"{flag_of(name)} {' '.join(expressions)}") for name, expressions in selection.items()
    ]
    return " ".join(words) or "no frozen parameters"


def is_trained(args: argparse.Namespace, name: str) -> bool:
    """Whether the flags let steps change the parameter, or the bias of a router, with this global name."""
    patterns, only = _patterns(args), flag_of("only_train_params_name_list")
    matching = [flag for flag, pattern in patterns if re.search(pattern, name)]
    if any(flag != only for flag in matching):
        return False
    return only in matching or all(flag != only for flag, _ in patterns)


def _patterns(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(flag, regular expression) of all that is asked for."""
    selection = selection_of(args)
    return [(flag_of(name), expression) for name, expressions in selection.items() for expression in expressions]


def _require_matches(patterns: Sequence[tuple[str, str]], matched: Sequence[int], names: Sequence[str]) -> None:
    wrong = []
    for (flag, pattern), count in zip(patterns, matched, strict=True):
        if count:
            continue
        if pattern == INDEXER:
            wrong.append(f"{flag}: the model has no indexer, which only sparse attention has; drop the flag")
        else:
            wrong.append(f"{flag} {pattern}: no parameter has a name that matches; names are such as {_some(names)}")
    if wrong:
        raise UserError("\n".join(wrong))


def _some(names: Sequence[str]) -> str:
    """A few names from all over the model."""
    stride = max(len(names) // _EXAMPLES, 1)
    return ", ".join(list(names)[::stride][:_EXAMPLES])
