import argparse

import pytest
import torch

from tests.support.processes.distributed import run_distributed
from tools.bench.gpu import kernels

OPTIONS = argparse.Namespace(device="cpu", tiny=True, tokens=8192, repeats=20)


@pytest.fixture
def one_stream(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.setattr(kernels, "_SAMPLES", (4,))
    monkeypatch.setattr(kernels, "OTHERS", {})
    monkeypatch.setattr(kernels, "_log_probs", lambda *_: [
        {"contender": "fused_log_probs_and_entropy", "ratio": 0.5, "remark": None, "ms": 1.0}
    ])  # fmt: skip
    monkeypatch.setattr(kernels, "ours", lambda lengths, heads: kernels.per_sample(lengths))


def attention_of(report):
    return {row["contender"]: row for row in report.rows if "kernel" in row}


def test_results_that_are_far_apart_fail(one_stream, monkeypatch):
    assert not kernels.measure(OPTIONS).failed

    def sees_the_neighbour(lengths, heads):
        # As if the samples of the stream were one.
        return kernels.per_sample([sum(lengths)])

    monkeypatch.setattr(kernels, "ours", sees_the_neighbour)
    report = kernels.measure(OPTIONS)
    assert (
        report.failed and attention_of(report)["PackedAttention"]["remark"] == "its results are far apart from torch's"
    )


def test_a_kernel_that_does_not_run_leaves_the_others_alone(one_stream, monkeypatch):
    def refuses(lengths, heads):
        def attend(query, key, value):
            raise TypeError("varlen_attn() got an unexpected keyword argument 'window_size'")

        return attend

    monkeypatch.setattr(kernels, "ours", refuses)
    report = kernels.measure(OPTIONS)
    rows = attention_of(report)
    assert report.failed and rows["PackedAttention"]["ms"] is None
    assert rows["PackedAttention"]["remark"].startswith("TypeError: varlen_attn() got an unexpected")
    assert rows["scaled_dot_product_attention"]["ms"] > 0


def test_the_reference_sees_a_key_for_every_head():
    query, key = torch.randn(6, 16, 128), torch.randn(6, 8, 128)
    grouped = kernels.per_sample([2, 4])(query, key, key)
    torch.testing.assert_close(kernels.with_all_heads(kernels.per_sample([2, 4]))(query, key, key), grouped)
    assert grouped.shape == (6, 2048)


def test_distance():
    expected = [torch.tensor([4.0, -8.0]), torch.tensor([1.0])]
    assert kernels.furthest([torch.tensor([5.0, -8.0]), torch.tensor([1.0])], expected) == 0.125


def test_a_sink_takes_its_share_of_the_softmax():
    query, key, value = torch.randn(3, 2, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 4)
    sinks = torch.tensor([0.5, -1.0])
    found = kernels.per_sample([1, 2])(query, key, value, sinks).view(3, 2, 4)
    for head, sink in enumerate(sinks):
        # The last token sees the one before it, and no other sample.
        scores = torch.cat([sink[None], (key[1:, 0] @ query[2, head]) / 2])
        torch.testing.assert_close(found[2, head], scores.softmax(0)[1:] @ value[1:, 0])


def attends_as_torch_does():
    torch.manual_seed(0)
    inputs = kernels._inputs([1, 5, 3], torch.float32, heads := kernels.Heads(4, 2, 16, 8, sinks=True))
    return kernels.furthest(
        kernels._results(kernels.ours([1, 5, 3], heads), inputs),
        kernels._results(kernels.per_sample([1, 5, 3]), inputs),
    )


def test_our_attention_is_described_as_the_trainer_does_it():
    assert run_distributed(attends_as_torch_does, 1)[0] < 1e-5
