"""Cutting responses over context-parallel ranks and putting them together, with gradients, in real process groups."""

import pytest
import torch
import torch.distributed as dist

from slime.training.context_parallel import (
    NO_CONTEXT_PARALLEL,
    ContextParallel,
    gather_response,
    gather_responses,
    gather_rows,
    slice_response,
    slice_responses,
    slice_with_cp,
)
from tests.support.processes.distributed import run_distributed

LENGTHS = [(10, 4), (16, 10), (8, 6), (2, 1), (9, 0), (3, 2)]


def test_sequences_are_padded_to_whole_chunks():
    tokens = torch.arange(1, 11)
    parts = [slice_with_cp(tokens, 0, ContextParallel(2, rank, None)) for rank in range(2)]
    assert [part.tolist() for part in parts] == [[1, 2, 3, 10, 0, 0], [4, 5, 6, 7, 8, 9]]
    assert slice_with_cp(tokens, 0, NO_CONTEXT_PARALLEL) is tokens
    matrix = torch.arange(10).view(5, 2)
    assert slice_with_cp(matrix, -1, ContextParallel(2, 0, None)).tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1]]


def test_parts_of_a_response():
    response = torch.arange(13, 17)  # positions 6 … 9 of 10
    assert slice_response(response, 10, 4, ContextParallel(2, 0, None)).tolist() == []
    assert slice_response(response, 10, 4, ContextParallel(2, 1, None)).tolist() == [13, 14, 15, 16]
    assert slice_response([1, 2, 3, 4, 5, 6], 8, 6, ContextParallel(2, 0, None)) == [1, 6]
    assert slice_response(response, 10, 4, NO_CONTEXT_PARALLEL) is response
    with pytest.raises(ValueError, match="3 values for a response of 4 tokens"):
        slice_response(response[:3], 10, 4, ContextParallel(2, 0, None))


def test_without_context_parallelism_nothing_is_gathered():
    values = torch.ones(4)
    assert gather_response(values, 10, 4, NO_CONTEXT_PARALLEL) is values


def test_every_collective_is_one_of_the_group(monkeypatch):
    """Forward and backward; the world may hold other ranks."""
    calls = []
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, lambda *tensors, group=None, name=name: calls.append((name, group)))
    monkeypatch.setattr(dist, "get_world_size", lambda group: {"the group": 2}[group])
    cp = ContextParallel(2, 0, "the group")
    gather_responses([torch.zeros(2, requires_grad=True)], [8], [6], cp)[0].sum().backward()
    gather_rows(torch.zeros(3, 1, requires_grad=True), cp).sum().backward()
    names = ("all_reduce", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    assert calls == [(name, "the group") for name in names]


def gather_worker():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cp = ContextParallel(size, rank, dist.group.WORLD)
    totals, responses = zip(*LENGTHS, strict=True)
    full = [100.0 * i + torch.arange(float(response)) for i, response in enumerate(responses)]
    local = [part.requires_grad_() for part in slice_responses(full, totals, responses, cp)]
    gathered = gather_responses(local, totals, responses, cp)
    # Rank r weighs token t of a response by t + r: its gradient then sums over the ranks.
    sum(((torch.arange(len(part)) + rank) * part).sum() for part in gathered).backward()
    positions = slice_responses([torch.arange(float(response)) for response in responses], totals, responses, cp)
    expected = [size * position + sum(range(size)) for position in positions]
    gradients_right = all(torch.equal(part.grad, want) for part, want in zip(local, expected, strict=True))

    rows = torch.arange(3.0).add(10 * rank)[:, None].to(torch.bfloat16).requires_grad_()
    order = torch.arange(3 * size).flip(0)
    reversed_rows = gather_rows(rows, cp, order)
    (reversed_rows * (1 + rank) * torch.arange(3 * size)[:, None]).sum().backward()
    try:
        gather_response(torch.zeros(9), 10, 4, cp)
        message = None
    except ValueError as error:
        message = str(error)
    everything = [part.detach().tolist() for part in gathered]
    return everything, gradients_right, reversed_rows.flatten().tolist(), rows.grad.flatten().tolist(), message


def test_gathers_and_their_gradients():
    results = run_distributed(gather_worker, 2)
    full = [[100.0 * i + t for t in range(response)] for i, (_, response) in enumerate(LENGTHS)]
    for rank, (gathered, gradients_right, rows, row_gradients, message) in enumerate(results):
        assert gathered == full
        assert gradients_right
        assert rows == [12, 11, 10, 2, 1, 0]
        # Row j of the reversed stream has weight j on rank 0 and 2·j on rank 1.
        assert row_gradients == ([15, 12, 9] if rank == 0 else [6, 3, 0])
        assert f"context-parallel rank {rank} of 2 owns {4 * rank} of the 4 response tokens" in message
