"""A rank in bfloat16 with dropout: what its passes see, what its optimizer starts from, and where its generators resume."""

import math

import pytest

from slime.arguments.checkpoints import WeightSource
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args

DROPOUT = {"hidden_dropout": 0.3}
SEQUENCES = [[5, 9, 77, 100, 31, 8], [90, 3, 14]]


def worker(hf_dir, directory):
    return {**passes(hf_dir), **generators(hf_dir, directory)}


def passes(hf_dir):
    args = layout_args(
        hf_dir,
        bf16=True,
        **DROPOUT,
        initial_weights=WeightSource("hf", str(hf_dir)),
        rollout_temperature=0.5,
        log_level="ERROR",
    )
    rank = loaded_rank(args)
    import torch

    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import forward_log_probs, forward_per_sample
    from tests.support.processes.megatron_worker import packed_forward

    masters = [p.detach().clone() for group in rank.backend.optimizer.param_groups for p in group["params"]]
    rank.backend.optimizer.reload_model_params()
    reloaded = [p for group in rank.backend.optimizer.param_groups for p in group["params"]]

    data = RolloutData({
        "tokens": [torch.tensor(sequence) for sequence in SEQUENCES], "micro_batch_indices": [[0], [1]],
        "total_lengths": [len(s) for s in SEQUENCES], "response_lengths": [len(s) - 1 for s in SEQUENCES],
    })  # fmt: skip
    dtypes, made = [], []

    def collect(batch, logits):
        dtypes.append(str(logits.dtype))
        made.append(len(logits))
        return {"nothing": [torch.zeros(0)] * len(batch["tokens"])}

    forward_per_sample(args, rank.backend, data, collect)
    together = RolloutData({**data, "micro_batch_indices": [[0, 1]], "response_lengths": [2, 1]})
    for responses in ([2, 1], [0, 0]):
        forward_per_sample(args, rank.backend, RolloutData({**together, "response_lengths": responses}), collect)
    rank.backend.args.loss_type = "custom_loss"
    forward_per_sample(args, rank.backend, together, collect)
    rank.backend.args.loss_type = "policy_loss"
    with pytest.raises(ValueError, match="longer"):
        forward_per_sample(args, rank.backend, data, lambda *_: {"rows": [torch.zeros(0)] * 2})
    twice = [forward_log_probs(args, rank.backend, data, with_entropy=False)["log_probs"] for _ in range(2)]
    is_training = [chunk.training for chunk in rank.backend.model]
    probed = rank.probe_log_probs(SEQUENCES)
    for chunk in rank.backend.model:
        chunk.eval()
    plain = []
    for sequence in SEQUENCES:
        rows = packed_forward(rank.backend.model[0], [sequence]).float().log_softmax(-1)
        plain.append([rows[i, token].item() for i, token in enumerate(sequence[1:])])
    return {
        "masters": (len(masters), all(map(torch.equal, masters, reloaded))),
        "dtypes": dtypes,
        "made": made,
        "twice": all(map(torch.equal, *twice)),
        "is_training": is_training,
        "probed": (probed, plain),
    }


def loaded_rank(args):
    """A rank of the actor after its own `_load_model`."""
    import torch

    from slime.training.actor_rank import ActorRank

    rank = ActorRank(args, 0, 1, 0)
    rank.device = torch.device("cpu")
    rank.backend.place()
    rank._load_model()
    return rank


def generators(hf_dir, directory):
    """Draws after a save and after the load of it, outside and inside of Megatron's tracker."""
    from tests.support.processes import megatron_worker

    megatron_worker.start(layout_args(hf_dir))
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from slime.backends.megatron_utils.generator_states import load_generators, save_generators

    def draw():
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(()).item()
        return torch.rand(()).item(), inside

    first = draw()
    save_generators(directory)
    saved = draw()
    draw()
    load_generators(directory)
    return {"draws": (first, saved, draw())}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rank")
    write_tiny_model(directory / "model")
    return run_distributed(worker, 1, (directory / "model", directory), timeout=180)[0]


def test_the_optimizer_starts_from_the_loaded_weights(seen):
    """Its float32 copies are those of the weights: an optimizer that was built before them would train back what it copied."""
    count, are_equal = seen["masters"]
    assert count > 0 and are_equal


def test_passes_without_gradient_have_no_dropout_and_leave_the_model_training(seen):
    assert seen["twice"] and seen["is_training"] == [True]


def test_logits_of_16_bits_are_not_copied_to_float32(seen):
    assert seen["dtypes"] == ["torch.bfloat16"] * (len(SEQUENCES) + 3)


def test_logits_are_made_of_rows_that_predict_a_response_alone(seen):
    """5 and 2, in streams of their own; 2 and 1 in one stream; none, then one row; a loss of the user's: all of the stream."""
    *some, of_own_loss = seen["made"]
    assert some == [5, 2, 3, 1]
    assert of_own_loss >= sum(map(len, SEQUENCES))


def test_the_probe_is_at_temperature_1_whatever_the_rollouts_is(seen):
    probed, plain = seen["probed"]
    assert [len(row) for row in probed] == [len(sequence) - 1 for sequence in SEQUENCES]
    for row, expected in zip(probed, plain, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert all(math.isfinite(value) for row in probed for value in row)


def test_generators_resume_inside_and_outside_of_tensor_parallel_regions(seen):
    first, saved, resumed = seen["draws"]
    assert resumed == saved
    assert len({*first, *saved}) == 4
