"""The memory probe of a rank: before the first real step, the passes and the step of the longest micro-batches that may come.

The samples are made up. The passes are those of a rollout, and all ranks take part. The step goes as far as the question
whether it is accepted; it is not, so that afterwards everything is as if it had never been. Meanwhile an empty tensor holds
the memory that the optimizer will take in its first update, so that the peak is that of later steps. Users' functions are not
called, since they may remember that they were; the objective is the shipped one of the same flags.

A rank whose memory runs out says so itself and alone: the others wait for it in a collective, and the caller of them all hears
of the first error. So nothing is exchanged here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slime.arguments.config_files.role_config import CRITIC
from slime.arguments.hf_config import read_hf_config
from slime.plan.batch import kept_tokens
from slime.plan.longest_batch import Lengths, ProbedMemory, out_of_memory
from slime.plan.structure import GIB
from slime.training.backend import Backend
from slime.training.keep_set import OFFSETS, TOKEN_IDS
from slime.training.loss_guard import LossGuard
from slime.training.metric_reduction import step_denominator
from slime.training.rollout_data import RolloutData
from slime.training.step_statistics import needs_log_prob_pass
from slime.training.train_step import (
    forward_log_probs,
    forward_values,
    micro_batches,
    micro_batches_of_step,
    step_loss,
)
from slime.utils.device import Accelerator, clear_memory, get_accelerator
from slime.utils.errors import UserError

# So many different tokens are enough to spread over experts. Marks for images are not among the first ones of a vocabulary.
_MOST_TOKENS = 1024
# A prime, so that its multiples go through all tokens of any smaller vocabulary.
_STRIDE = 7919
# Users' functions, none of which is called.
_OWN_FUNCTIONS = dict.fromkeys(
    ("custom_tis_function_path", "custom_pg_loss_reducer_function_path", "custom_loss_function_path",
     "rollout_data_postprocess_path", "custom_advantage_function_path")
)  # fmt: skip
# What messages contain when memory ran out: those of the allocator, of a library of kernels, and of one of collectives.
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def probe_memory(
    args: argparse.Namespace, backend: Backend, rank: int, batches: Sequence[Lengths], beside: int
) -> ProbedMemory:
    """Run the passes and the step of `batches`, and leave no trace. Collective over all ranks of the model.

    Args:
        args: those of the model's role.
        batches: the samples of each micro-batch of a data-parallel rank.
        beside: bytes that another model will still take on the same device.

    Raises:
        UserError: memory ran out on this rank. It cannot go on then, and others may wait for it in a collective.
    """
    accelerator, peaks = get_accelerator(), {}
    clear_memory()
    before, to_come = accelerator.memory_allocated(), backend.optimizer_bytes_to_come() + beside
    # Host memory is only taken when it is written to, so an empty tensor would hold nothing there.
    held_bytes = 0 if accelerator.shares_host_memory else to_come
    of_probe = _without_functions_of_user(args)
    under_way = "making room for the optimizer's state"
    try:
        with backend.leaving_no_trace():
            held = torch.empty(held_bytes, dtype=torch.uint8, device=accelerator.current_device())
            data = _data(of_probe, backend, batches)
            for under_way, work in _passes(args, of_probe, backend, data):
                with _peak(accelerator, peaks, under_way):
                    work()
            free, device = accelerator.memory_of_device()
            del held, data, work
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        free, device = accelerator.memory_of_device()
        numbers = (
            f"{before / GIB:.2f} GiB of tensors before it, {to_come / GIB:.2f} GiB held for optimizer state to come, "
            f"{(accelerator.peak_memory_allocated() or accelerator.memory_allocated()) / GIB:.2f} GiB at the peak; of the "
            f"device's {device / GIB:.2f} GiB {free / GIB:.2f} GiB are free"
        )
        raise UserError(
            out_of_memory(args, f"{args.role} rank {rank} in {under_way}", batches, numbers, error)
        ) from error
    clear_memory()
    counts = accelerator.peak_memory_allocated() is not None
    return ProbedMemory(before, to_come, peaks if counts else None, free, device)


def _passes(
    args: argparse.Namespace, of_probe: argparse.Namespace, backend: Backend, data: RolloutData
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a rank does in a rollout, in its order: (name, work).

    Args:
        args: tell which passes there are; `of_probe`: the same without users' functions, for the passes themselves.
    """
    if args.role == CRITIC:
        yield "values", lambda: forward_values(of_probe, backend, data)
    elif _has_log_prob_pass(args):
        yield "log-probs", lambda: forward_log_probs(of_probe, backend, data, with_entropy=args.use_rollout_entropy)
    yield "a step", lambda: _step(of_probe, backend, data)


def made_up_columns(
    batches: Sequence[Lengths], device: torch.device, data_parallel_size: int
) -> tuple[dict[str, Any], list[int]]:
    """Whole columns of samples of these lengths, for one step, with zeros for tokens and numbers; and the lengths of their
    responses.

    Args:
        batches: of each micro-batch its samples.
    """
    totals, responses = ([lengths[side] for batch in batches for lengths in batch] for side in (0, 1))
    count, places = len(totals), iter(range(len(totals)))
    columns = {
        "tokens": zeros(totals, torch.int64, device),
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": zeros(responses, torch.int32, device),
        "rollout_log_probs": zeros(responses, torch.float32, device),
        "rewards": [0.0] * count,
        "raw_reward": [0.0] * count,
        "local_raw_reward": [0.0] * count,
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "rollout_mask_sums": [float(length) for length in responses],
        "partition": list(range(count)),
        "micro_batch_indices": [[next(places) for _ in batch] for batch in batches],
        "num_microbatches": [len(batches)],
        "global_batch_sizes": [count * data_parallel_size],
    }
    return columns, responses


def zeros(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """A row of zeros of each length."""
    return list(torch.zeros(sum(lengths), dtype=dtype, device=device).split(list(lengths)))


def _data(args: argparse.Namespace, backend: Backend, batches: Sequence[Lengths]) -> RolloutData:
    device = get_accelerator().current_device()
    columns, responses = made_up_columns(batches, device, args.data_parallel_size)
    vocabulary = args.vocab_size or read_hf_config(args.hf_checkpoint).get("vocab_size", _MOST_TOKENS)
    tokens = torch.arange(sum(columns["total_lengths"]), device=device) * _STRIDE
    columns["tokens"] = list((tokens % min(vocabulary, _MOST_TOKENS)).split(columns["total_lengths"]))
    columns["loss_masks"] = [mask + 1 for mask in columns["loss_masks"]]
    if args.role != CRITIC and kept_tokens(args):
        # Each token is of its own set, whatever else is in it.
        columns[OFFSETS] = [torch.arange(length + 1, dtype=torch.int32) for length in responses]
        rows = zip(columns["tokens"], responses, strict=True)
        columns[TOKEN_IDS] = [row[len(row) - length :].int().cpu() for row, length in rows]
    if backend.groups.is_last_stage:
        columns |= {name: zeros(responses, torch.float32, device) for name in _columns_of_loss(args)}
    return RolloutData.of_rank(columns, backend.groups.cp)


def _columns_of_loss(args: argparse.Namespace) -> Iterator[str]:
    """What the loss reads beside what every rollout brings."""
    if args.role == CRITIC:
        yield from ("values", "returns")
        return
    yield "advantages"
    if needs_log_prob_pass(args, steps=args.num_steps_per_rollout):
        yield "log_probs"
    if args.use_kl_loss:
        yield "ref_log_probs"
    if args.use_opd:
        yield "opd_reverse_kl"


def _has_log_prob_pass(args: argparse.Namespace) -> bool:
    others = args.use_kl_loss or args.kl_coef != 0 or args.use_opd and args.opd_type == "megatron"
    return others or needs_log_prob_pass(args, steps=args.num_steps_per_rollout)


def _without_functions_of_user(args: argparse.Namespace) -> argparse.Namespace:
    loss_type = "policy_loss" if args.loss_type == "custom_loss" else args.loss_type
    return argparse.Namespace(**{**vars(args), **_OWN_FUNCTIONS, "loss_type": loss_type})


def _step(args: argparse.Namespace, backend: Backend, data: RolloutData) -> None:
    """One step as `train_one_step` takes it, which does not count, whatever its loss."""
    groups, batches = backend.groups, micro_batches(args, data, micro_batches_of_step(data, 0))
    rollouts = data["global_batch_sizes"][0]
    denominator = step_denominator(
        batches.samples.local_masks, rollouts, args.calculate_per_token_loss, groups.token_group
    )
    guard = LossGuard("the memory probe", False)
    backend.step(
        batches,
        step_loss(args, args.role, None, groups.tensor_group, guard),
        denominator=denominator,
        accepts=lambda norm, overflowed: False,
        rollouts=rollouts,
        place=(0, 0),
    )


@contextmanager
def _peak(accelerator: Accelerator, peaks: dict[str, int], name: str) -> Iterator[None]:
    """The most bytes of tensors in the block, under its name. The device's counter begins anew."""
    accelerator.reset_peak_memory()
    yield
    accelerator.synchronize()
    peaks[name] = accelerator.peak_memory_allocated() or 0


def _is_out_of_memory(error: Exception) -> bool:
    is_told = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or is_told
