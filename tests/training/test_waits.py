"""What a step waits for does not grow with samples, micro-batches or metrics; within a micro-batch nothing is waited for."""

import numpy as np
import pytest
import torch

from slime.algorithms.advantages import ppo_advantages
from slime.algorithms.mismatch import worst_tokens
from slime.rehearsal.fake_device import lift_segments
from slime.training import column_exchange
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.keep_set import OFFSETS, TOKEN_IDS, KeepSet, kept_tokens
from slime.training.loss import loss_function
from slime.training.metric_reduction import reduce_metrics
from slime.training.packed_stream import pack_stream
from slime.training.rollout_data import RolloutData
from tests.support.models.objective_step import VOCABULARY, case_args, make_samples, rollout_data
from tests.support.oracles.device_waits import Waiting, counted_waits
from tests.support.processes.objective_grid import CRITIC_OBJECTIVES, OBJECTIVES

# The functions of the user take their sums on the device; masked importance sampling by an operation that has no "meta" form.
IN_A_MICRO_BATCH = [name for name, changes in OBJECTIVES.items() if "tis_batch_normalize" not in changes]


def on_meta(data):
    """The columns with tensors in the place of those on a GPU."""

    def moved(rows):
        return [row.to("meta") if torch.is_tensor(row) else row for row in rows]

    columns = {name: moved(rows) if isinstance(rows, list) else rows for name, rows in data.items()}
    columns["advantages"] = columns["returns"] = columns["log_probs"]
    columns["opd_reverse_kl"] = columns["log_probs"]
    return RolloutData(columns)


def keep_two_tokens_each(data):
    """The columns of top-p sets, which are on the host."""
    lengths = data["response_lengths"]
    data[TOKEN_IDS] = [torch.arange(2 * length, dtype=torch.int32) % 2 for length in lengths]
    data[OFFSETS] = [2 * torch.arange(length + 1, dtype=torch.int32) for length in lengths]


@pytest.mark.parametrize("role, objective", [
    *(("actor", name) for name in IN_A_MICRO_BATCH), *(("critic", name) for name in CRITIC_OBJECTIVES),
])  # fmt: skip
def test_the_loss_of_a_micro_batch_waits_for_nothing(role, objective):
    changes = OBJECTIVES[objective] if role == "actor" else CRITIC_OBJECTIVES[objective]
    args, data = case_args(**changes), on_meta(rollout_data(make_samples()))
    if objective == "top-p":
        keep_two_tokens_each(data)
    logits = torch.randn(64, VOCABULARY if role == "actor" else 1, device="meta", requires_grad=True)
    with torch.library._scoped_library("aten", "IMPL") as library, Waiting() as waiting:
        lift_segments(library)
        batch = data.micro_batch(range(len(data["tokens"])), pad_multiple=64)
        loss, _ = loss_function(args, batch, logits, None, role=role)
        loss.backward()
    assert logits.grad.shape == logits.shape
    # Of a tensor on the device no number can be read; the offsets of top-p sets are on the host.
    assert set(waiting.operations) <= {"aten._local_scalar_dense.default"}


@pytest.mark.parametrize("cp", [NO_CONTEXT_PARALLEL, ContextParallel(2, 1, None), ContextParallel(2, 1, None, True)])
def test_a_stream_is_packed_without_waiting(cp):
    with Waiting() as waiting:
        stream = pack_stream([torch.zeros(9, dtype=torch.int64, device="meta")] * 3, [4, 0, 7], 8, cp=cp)
        made = (stream.response_rows, stream.segment_keys, stream.query_boundaries, stream.key_boundaries)
        assert {tensor.device.type for tensor in (stream.position_ids, stream.cu_seqlens, *made)} == {"meta"}
        assert cp.all_gather or cp.size == 1 or stream.gather_order.device.type == "meta"
    assert waiting.operations == []


def test_kept_sets_come_to_their_rows_without_waiting():
    data = on_meta(rollout_data(make_samples()))
    keep_two_tokens_each(data)
    lengths = data["response_lengths"]
    with Waiting() as waiting:
        batch = data.micro_batch(range(len(lengths)), pad_multiple=32)
        rows = batch.stream.predicting_rows.index
        kept = KeepSet(kept_tokens(batch), batch.stream.next_tokens[rows], 0, VOCABULARY)
    assert list(kept.blocks()) == [(0, sum(lengths))]
    # The sets are taken apart on the host, where they are.
    assert [name for name in waiting.operations if "copy" in name] == []


def test_metrics_of_all_micro_batches_are_waited_for_together(alone):
    def waits(batches, names):
        sums = [{f"m{name}": torch.tensor(float(name)) for name in range(names)} for _ in range(batches)]
        with counted_waits() as counted:
            found = reduce_metrics(sums, 2.0, None)
        assert found == {f"m{name}": name * batches / 2 for name in range(names)}
        return counted

    assert waits(1, 2) == waits(8, 30)


def test_advantages_of_all_samples_wait_once():
    def waits(samples):
        rows = [torch.ones(length % 5 + 1) for length in range(samples)]
        masks = [torch.arange(len(row)) % 2 for row in rows]
        with counted_waits() as counted, Waiting() as waiting:
            ppo_advantages([1.0] * samples, rows, rows, masks, kl_coef=0.1, gamma=0.9, lambd=0.9)
        return counted, waiting.operations

    assert waits(4) == waits(40) == ({"tolist": 1}, [])


def test_the_worst_tokens_of_all_samples_wait_once():
    def waits(samples):
        rows = [torch.arange(5.0) + sample for sample in range(samples)]
        with counted_waits() as counted, Waiting() as waiting:
            worst_tokens(rows, [torch.zeros(5)] * samples, [torch.ones(5)] * samples, range(samples), 3)
        return counted, waiting.operations

    assert waits(2) == waits(40) == ({"tolist": 1}, [])


def test_a_column_goes_to_the_host_in_one_piece():
    def waits(samples):
        column = [torch.arange(float(length)) for length in range(samples)]
        with counted_waits() as counted:
            sent = column_exchange._rows(column)
        assert [row.tolist() for row in sent] == [np.arange(length).tolist() for length in range(samples)]
        return counted

    assert waits(3) == waits(40) == {"cpu": 1, "numpy": 1}
