"""Numbers and worst tokens of the mismatch, the same however samples and tokens are dealt to ranks."""

import math

import pytest
import torch

from slime.utils.errors import UserError
from tests.support.distributed import run_distributed

# (tokens, prompt length, trainer, engine, mask, sample index)
SAMPLES = (
    ([5, 6, 7, 8, 9], 2, [-1.0, -1.2, -0.3], [-2.0, -1.0, -0.3], [1, 1, 1], 40),
    ([1, 2, 3, 4], 1, [-1.0, -9.0, -0.5], [-1.5, -0.1, -0.5], [1, 0, 1], 41),
    ([3, 3, 3], 1, [-2.0, -2.0], [-2.25, -2.125], [1, 1], 42),
)


def data_of(positions, cp):
    from slime.training.context_parallel import slice_responses

    rows = [SAMPLES[i] for i in positions]
    totals, responses = [len(row[0]) for row in rows], [len(row[2]) for row in rows]
    columns = {
        name: slice_responses([torch.tensor(row[place]) for row in rows], totals, responses, cp)
        for name, place in (("log_probs", 2), ("rollout_log_probs", 3))
    }
    return {
        "tokens": [torch.tensor(row[0]) for row in rows], "total_lengths": totals, "response_lengths": responses,
        "loss_masks": [torch.tensor(row[4]) for row in rows], "sample_indices": [row[5] for row in rows], **columns,
    }  # fmt: skip


def report():
    """(metrics, lines) of this rank: two data-parallel ranks with two context-parallel ones each."""
    import torch.distributed as dist

    from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
    from slime.training.step_statistics import mismatch_of_step, worst_token_lines

    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    cp, positions = NO_CONTEXT_PARALLEL, [0, 1, 2]
    if world > 1:
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        cp, positions = ContextParallel(2, rank % 2, groups[rank // 2]), [[1], [2, 0]][rank // 2]
    data = data_of(positions, cp)
    metrics = mismatch_of_step(data, range(len(positions)), cp, dist.group.WORLD)
    nothing = mismatch_of_step(data, [], cp, dist.group.WORLD)
    lines = worst_token_lines(data, lambda ids: "".join(f"<{i}>" for i in ids), cp, dist.group.WORLD)
    return metrics, nothing, lines


def test_mismatch_of_all_layouts():
    alone = run_distributed(report, 1)[0]
    for metrics, nothing, lines in run_distributed(report, 4):
        assert metrics == pytest.approx(alone[0]) and nothing == alone[1] and lines == alone[2]
    metrics, nothing, lines = alone
    pairs = [(t, r) for _, _, train, roll, mask, _ in SAMPLES for t, r, m in zip(train, roll, mask, strict=True) if m]
    weights = [math.exp(t - r) for t, r in pairs]
    assert metrics == pytest.approx(
        {
            "mismatch_k1": sum(r - t for t, r in pairs) / len(pairs),
            "mismatch_k3": sum(w - 1 - math.log(w) for w in weights) / len(pairs),
            "mismatch_abs": sum(abs(t - r) for t, r in pairs) / len(pairs),
            "mismatch_ess": sum(weights) ** 2 / (len(pairs) * sum(w * w for w in weights)),
            "mismatch_max_abs": 1.0,
        }
    )
    assert nothing["mismatch_ess"] == 1
    assert lines[:4] == [
        "sample 40, response token 0, '<7>': trainer -1.0000, engine -2.0000, difference 1.0e+00",
        "sample 41, response token 0, '<2>': trainer -1.0000, engine -1.5000, difference 5.0e-01",
        "sample 42, response token 0, '<3>': trainer -2.0000, engine -2.2500, difference 2.5e-01",
        "sample 40, response token 1, '<8>': trainer -1.2000, engine -1.0000, difference 2.0e-01",
    ]
    assert len(lines) == 7, "masked tokens have no part in it"


def test_the_engines_log_probs_must_be_there():
    from slime.training.context_parallel import NO_CONTEXT_PARALLEL
    from slime.training.step_statistics import mismatch_of_step

    data = data_of([0], NO_CONTEXT_PARALLEL)
    del data["rollout_log_probs"]
    with pytest.raises(UserError, match="--get-mismatch-metrics needs `rollout_log_probs`"):
        mismatch_of_step(data, [0], NO_CONTEXT_PARALLEL, None)
