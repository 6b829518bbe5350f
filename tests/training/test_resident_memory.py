"""Memory that is given back and taken again: which storages move, what comes back, and that it really leaves the process."""

import contextlib
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding

from slime.scheduling.device_turns import Holds
from slime.training import resident_memory
from slime.training.actor_rank import ActorRank
from slime.training.resident_memory import ResidentMemory, Residents, _PinnedCopy
from slime.training.train_rank import CriticRank
from slime.utils.errors import RunError
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.actor_run import Rank, command_line
from tests.support.processes.distributed import run_distributed


class Model:
    """Weights in one buffer, of which the optimizer updates a part in place; a main copy, a moment, and gradients."""

    def __init__(self) -> None:
        self.buffer = torch.arange(12, dtype=torch.float32)
        self.first, self.second = self.buffer[:4].view(2, 2), self.buffer[4:]
        self.main, self.moment = torch.tensor([1.5, 2.5]), torch.tensor([0.1, float("nan")])
        self.gradient = torch.ones(3)
        self.empty = torch.empty(0)
        self.cached = [torch.ones(5)]

    def residents(self) -> Residents:
        return Residents(
            weights=iter([self.first, self.second, self.empty]),
            optimizer=[self.second[2:4], self.main, self.moment],
            gradients=[self.gradient, self.gradient[1:]],
            caches=[self.cached.clear],
        )

    def sizes(self) -> list[int]:
        """Bytes of weights, main copy, moment and gradient."""
        return [t.untyped_storage().nbytes() for t in (self.buffer, self.main, self.moment, self.gradient)]


@pytest.fixture(params=["file", "host memory"])
def place(request, monkeypatch):
    if request.param == "host memory":
        monkeypatch.setattr(resident_memory, "_FileCopy", _PinnedCopy)


@pytest.mark.parametrize("rounds", [1, 3])
def test_everything_leaves_and_comes_back_bit_for_bit(place, rounds):
    model = Model()
    memory = ResidentMemory(model.residents)
    for _ in range(rounds):
        memory.hold(Holds.WEIGHTS)
        assert model.sizes() == [48, 0, 0, 0] and model.buffer.tolist() == list(range(12)) and not model.cached
        memory.hold(Holds.NOTHING)
        memory.hold(Holds.NOTHING)
        assert model.sizes() == [0] * 4
        memory.hold(Holds.WEIGHTS)
        memory.hold(Holds.WEIGHTS)
        assert model.sizes() == [48, 0, 0, 0] and model.second.tolist() == list(range(4, 12))
        memory.hold(Holds.ALL)
        memory.hold(Holds.ALL)
        assert model.sizes() == [48, 8, 8, 12]
        assert model.first.tolist() == [[0, 1], [2, 3]] and model.main.tolist() == [1.5, 2.5]
        assert model.moment[0] == torch.tensor(0.1) and model.moment[1].isnan()
        assert model.gradient.tolist() == [0, 0, 0]
        # The views are views still.
        model.second[0] = 4 + 1
        assert model.buffer[4] == 5
        model.second[0] = 4


def test_from_all_to_nothing_and_back_in_one_call(place):
    model = Model()
    memory = ResidentMemory(model.residents)
    memory.hold(Holds.NOTHING)
    assert model.sizes() == [0] * 4
    memory.hold(Holds.ALL)
    assert model.buffer.tolist() == list(range(12)) and model.main.tolist() == [1.5, 2.5]


def test_a_process_that_ends_keeps_nothing_of_its_optimizer_and_does_not_train_without(place, monkeypatch):
    model = Model()
    memory = ResidentMemory(model.residents, ends=True)
    monkeypatch.setattr(resident_memory._PutAway, "put_away", lambda put_away, storages: pytest.fail("it was put away"))
    memory.hold(Holds.WEIGHTS)
    assert model.sizes() == [48, 0, 0, 0] and model.buffer.tolist() == list(range(12))
    with pytest.raises(RunError, match="given its optimizer up"):
        memory.hold(Holds.ALL)


def test_an_optimizer_that_has_grown_leaves_whole(place):
    model = Model()
    memory = ResidentMemory(model.residents)
    memory.hold(Holds.NOTHING)
    memory.hold(Holds.ALL)
    model.moment = torch.arange(100.0)
    memory.hold(Holds.NOTHING)
    assert model.sizes() == [0] * 4
    memory.hold(Holds.ALL)
    assert model.moment.tolist() == list(range(100)) and model.main.tolist() == [1.5, 2.5]


def open_below(directory: Path) -> list[str]:
    """The files there that this process holds open, with a name or without; others in it may open and close what they have."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(path for path in found if path.startswith(str(directory)))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_names_the_way_out_and_moves_nothing(monkeypatch, tmp_path, call):
    model = Model()
    memory = ResidentMemory(model.residents)
    monkeypatch.setattr(resident_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    memory.hold(Holds.WEIGHTS)
    before = open_below(tmp_path)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(resident_memory.os, call, full)
        with pytest.raises(RunError, match=f"0 MiB aside while engines work: {tmp_path}: No space left .* TMPDIR"):
            memory.hold(Holds.NOTHING)
    assert memory.holds is Holds.WEIGHTS and model.buffer.tolist() == list(range(12))
    assert open_below(tmp_path) == before
    memory.hold(Holds.NOTHING)
    memory.hold(Holds.ALL)
    assert model.buffer.tolist() == list(range(12)) and model.main.tolist() == [1.5, 2.5]


def test_what_lies_on_the_disk_has_no_name(monkeypatch, tmp_path):
    monkeypatch.setattr(resident_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    model = Model()
    memory = ResidentMemory(model.residents)
    memory.hold(Holds.NOTHING)
    assert list(tmp_path.iterdir()) == []
    memory.hold(Holds.ALL)
    assert model.buffer.tolist() == list(range(12))


@pytest.mark.parametrize("holds", [Holds.NOTHING, Holds.WEIGHTS])
@pytest.mark.parametrize("kind", [ActorRank, CriticRank])
def test_o4_a_rank_that_has_given_memory_back_writes_no_checkpoint(kind, holds):
    rank = object.__new__(kind)
    rank.role, rank.rank, rank.memory = "training", 3, SimpleNamespace(holds=holds)
    with pytest.raises(RunError, match="training rank 3 has given its memory back: it must wake up before a save"):
        rank.save(1)


# -- real ranks ----------------------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def learn(run: Rank, sleeps: bool) -> dict[str, list]:
    """Two rollouts, between which the rank `sleeps`; the bytes that were resident before, meanwhile and after."""
    run.train(0)
    before = resident()
    found = {"resident": [before], "refused": [], "weights": list(run.weights().values())}
    if sleeps:
        state = torch.get_rng_state()
        buffer = parallel_state.get_global_memory_buffer()
        buffer.get_tensor([4], torch.float32, "mpu")
        run.actor.hold(Holds.WEIGHTS)
        assert not buffer.buffer and RotaryEmbedding.forward.cache_info().currsize == 0
        found["resident"].append(resident())
        found["same to push"] = all(map(torch.equal, found["weights"], run.weights().values()))
        run.actor.hold(Holds.NOTHING)
        found["resident"].append(resident())
        for work in (lambda: run.train(1), lambda: run.actor.send_weights(0, 1), lambda: run.actor.save(1),
                     lambda: run.actor.export_hf("/nowhere"), lambda: run.actor.probe_log_probs([[1, 2]])):  # fmt: skip
            with pytest.raises(RunError, match="must wake up before") as refusal:
                work()
            found["refused"].append(str(refusal.value))
        run.actor.hold(Holds.ALL)
        found["resident"].append(resident())
        assert torch.equal(torch.get_rng_state(), state)
    run.train(1)
    found["end"] = [*run.weights().values(), *run.optimizer_tensors(), *run.data["ref_log_probs"]]
    return found


def ranks_that_sleep(directory: Path, kinds: dict[str, list[str]]) -> dict[str, list]:
    results = {}
    for name, words in kinds.items():
        kl = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3", "--ref-load", str(directory / "actor")]
        run = Rank(command_line(directory, *kl, *words))
        awake = learn(run, sleeps=False)
        run.end()
        del run
        run = Rank(command_line(directory, *kl, *words))
        asleep = learn(run, sleeps=True)
        residents = run.actor.residents()
        held = sum(tensor.nbytes for tensor in residents.weights)
        # In float32 the optimizer's parameters are the model's.
        own = {tensor.untyped_storage().data_ptr() for tensor in residents.weights}
        rest = sum(
            tensor.nbytes for tensor in (*residents.optimizer, *residents.gradients)
            if tensor.untyped_storage().data_ptr() not in own
        )  # fmt: skip
        run.end()
        equal = {
            key: all(a.equal(b) for a, b in zip(awake[key], asleep[key], strict=True)) for key in ("weights", "end")
        }
        results[name] = [
            {**equal, "to push": asleep["same to push"]},
            asleep["resident"],
            asleep["refused"],
            held,
            rest,
            len(asleep["end"]),
        ]
        del run, awake, asleep
    return results


@pytest.mark.slow
def test_ranks_sleep_and_go_on_bit_for_bit(tmp_path):
    """Float32 with the model's own parameters in the optimizer, and bfloat16 with the distributed optimizer's copies."""
    write_tiny_model(tmp_path / "actor", vocab_size=8192, hidden=256)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    kinds = {
        "float32": [],
        "bfloat16": ["--bf16", "--use-distributed-optimizer"],
    }
    for results in run_distributed(ranks_that_sleep, 2, (tmp_path, kinds), timeout=600):
        for name, (equal, (before, weights_only, asleep, awake), refused, held, rest, tensors) in results.items():
            assert equal == {"weights": True, "end": True, "to push": True}, name
            # Most of it: the process takes some megabytes for other things meanwhile.
            # Weights, with the reference and what it puts aside; gradients, and the optimizer's state.
            assert weights_only - asleep > 0.6 * held, name
            assert before - weights_only > 0.6 * rest, name
            assert awake - asleep > 0.6 * (held + rest), name
            assert len(refused) == 5 and tensors > 20
