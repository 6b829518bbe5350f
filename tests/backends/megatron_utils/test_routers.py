"""Balancing losses of each sample and of a step by hand, and which samples the rows of a stream are of. Layouts are in
`test_experts`."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from slime.training.packed_stream import pack_stream
from slime.utils.errors import UserError


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts, group: None)


def test_the_loss_of_two_samples_and_padding_by_hand():
    """Two experts, of which each token has one. Of the first sample f = (4/3, 2/3) and P = (0.6, 0.4), so it has
    0.8 + 0.8/3; of the second f = (2, 0) and P = (0.9, 0.1), so it has 1.8. Each counts half."""
    from slime.backends.megatron_utils.routers import SampleRows, balancing_loss

    stream = pack_stream([torch.arange(3), torch.arange(1)], [1, 0], pad_multiple=8)
    rows = SampleRows.of_stream(stream, torch.tensor(0.5), False)
    assert rows.numbers.tolist() == [0, 0, 0, 1, 2, 2, 2, 2] and rows.lengths.tolist() == [3, 1]
    first = [[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.9, 0.1]]
    scores = torch.tensor([*first, *[[1.0, 0.0]] * 4], requires_grad=True)
    chosen = torch.tensor([[1, 0], [1, 0], [0, 1], [1, 0], *[[1, 0]] * 4]).bool()
    loss = balancing_loss(scores, chosen, rows, 1, None)
    torch.testing.assert_close(loss, torch.tensor((0.8 + 0.8 / 3 + 1.8) / 2))
    loss.backward()
    # f_i / T of the sample of each row, times a half.
    expected = torch.tensor([[2 / 9, 1 / 9]] * 3 + [[1.0, 0.0]] + [[0.0, 0.0]] * 4)
    torch.testing.assert_close(scores.grad, expected)


def test_more_experts_for_each_token_share_its_load():
    """Of four experts two for each of two tokens: even loads and even scores give 1, whatever the sizes."""
    from slime.backends.megatron_utils.routers import SampleRows, balancing_loss

    rows = SampleRows(torch.zeros(2, dtype=torch.int64), torch.tensor([2.0]), torch.tensor(1.0))
    chosen = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    torch.testing.assert_close(balancing_loss(torch.full((2, 4), 0.25), chosen, rows, 2, None), torch.tensor(1.0))


def test_what_scores_weigh_in_a_step_by_hand(monkeypatch):
    """Two experts and four tokens, three of them for the first: f = (3/2, 1/2), over T. Megatron divides by three micro-batches
    and two ranks."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.routers import Router

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    router = SimpleNamespace(num_experts=2, topk=1, tp_dp_cp_group=None)
    weights = Router.weights_in_step(router, torch.tensor([3.0, 1.0]), 3)
    torch.testing.assert_close(weights, torch.tensor([1.5, 0.5]) / 4 * 6)
    # Where no rank has a token.
    assert Router.weights_in_step(router, torch.zeros(2), 3).tolist() == [0, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_step_has_counted_is_of_no_other_step(monkeypatch, fails):
    """The next one may have a single micro-batch, and count nothing before it."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.routers import Router, loads_of_step

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 1)
    router = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.routing_type, router.topk, router.num_experts, router.tp_dp_cp_group = "global_aux_loss", 1, 2, None
    router.config = SimpleNamespace(moe_aux_loss_coeff=0.1, moe_router_load_balancing_type="global_aux_loss")
    router.counts = router.step_weights = None
    chunk = torch.nn.ModuleList([router])
    chunk.config = router.config

    def count():
        router.counts += torch.tensor([3.0, 1.0])

    with contextlib.suppress(ZeroDivisionError), loads_of_step([chunk], 3, count):
        torch.testing.assert_close(router.step_weights, torch.tensor([1.5, 0.5]) / 4 * 3)
        assert router.counts is None
        if fails:
            raise ZeroDivisionError
    assert router.step_weights is router.counts is None


def test_a_router_that_takes_a_stream_for_one_sequence_is_refused():
    from megatron.core.transformer.moe.router import TopKRouter

    from slime.backends.megatron_utils.routers import SampleBalance, loads_of_step

    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.routing_type, router.config = "seq_aux_loss", SimpleNamespace(moe_aux_loss_coeff=0.0)
    chunk, batches = torch.nn.ModuleList([router]), SimpleNamespace(indices=[[0]])
    SampleBalance([chunk], batches)
    router.config.moe_aux_loss_coeff = 0.1
    with pytest.raises(
        UserError, match="--moe-router-load-balancing-type seq_aux_loss: .*--custom-model-provider-path"
    ):
        SampleBalance([chunk], batches)
    router.routing_type = "global_aux_loss"
    with (
        pytest.raises(UserError, match="-type global_aux_loss: .*--custom-model-provider-path"),
        loads_of_step([chunk], 2, lambda: None),
    ):
        pass
