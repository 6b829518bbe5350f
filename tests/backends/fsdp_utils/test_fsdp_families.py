"""Every dense family over FSDP on two ranks: logits and gradients of transformers' class, and its checkpoint given back."""

from types import SimpleNamespace

import pytest

from slime.arguments.checkpoints import WeightSource
from slime.models.fsdp import MODEL_TYPES
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args
from tests.support.processes.distributed import run_distributed
from tests.support.processes.family_checks import (
    assert_gives_checkpoint_back,
    assert_like_reference,
    reference,
    sequences,
)

NAMES = [name for name, family in TINY_FAMILIES.items() if family.model_type in MODEL_TYPES]
RANKS = 2


def worker(directories):
    return {name: run_family(directory) for name, directory in directories.items()}


def run_family(directory):
    """What `family_checks` compares; every rank has all sequences in one stream."""
    import torch
    import torch.nn.functional as F

    from slime.training.backend import make_backend
    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import micro_batches

    sizes = {"num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 1, "global_batch_size": 1}
    # Losses of users see the logits of all rows.
    args = tiny_args(directory, train_backend="fsdp", loss_type="custom_loss", **sizes)
    backend = make_backend(args)
    backend.place()
    backend.load(WeightSource("hf", directory))
    tokens = sequences()
    lengths = [len(sequence) for sequence in tokens]
    data = RolloutData({
        "tokens": [torch.tensor(sequence) for sequence in tokens], "total_lengths": lengths,
        "response_lengths": [length - 1 for length in lengths],
    })  # fmt: skip
    batches = micro_batches(args, data, [list(range(len(tokens)))])

    def loss(batch, logits, own_term=None):
        rows = logits[: sum(lengths)].split(lengths)
        losses = [
            F.cross_entropy(of_one[:-1], torch.tensor(sequence[1:]), reduction="sum")
            for of_one, sequence in zip(rows, tokens, strict=True)
        ]
        return sum(losses), {}

    asked = {"denominator": RANKS, "accepts": lambda norm, overflowed: False, "rollouts": 0, "place": (0, 0)}
    assert not backend.step(batches, loss, **asked).update.taken
    (collected,) = backend.forward(batches, lambda batch, logits: {"logits": [logits[: sum(lengths)]]})
    return SimpleNamespace(
        logits=collected["logits"][0],
        chosen=[],
        gradients={name: parameter.grad.full_tensor() for name, parameter in backend.model.named_parameters()},
        exported={name: tensor.clone() for name, tensor in backend.stage_tensors()()},
        expected=backend.expected_names(),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: (root / name, TINY_FAMILIES[name].save(root / name)) for name in NAMES}


@pytest.fixture(scope="module")
def found(models):
    return run_distributed(worker, RANKS, ({name: str(path) for name, (path, _) in models.items()},), timeout=600)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_transformers(models, found, tmp_path, name):
    expected = reference(models[name][1], tmp_path / "gradients")
    for rank in found:
        assert_like_reference(rank[name], expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_push_gives_the_checkpoint_back(models, found, name):
    for rank in found:
        assert_gives_checkpoint_back([rank[name]], models[name][0])
        assert rank[name].exported.keys() == rank[name].expected
