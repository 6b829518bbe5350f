"""How a rank's process gets its environment."""

import argparse
import multiprocessing.util
import os
import tempfile
from pathlib import Path

import pytest
import ray

from slime.ray.train_group import RankProcess, TrainGroup
from slime.utils.env import READ_AT_PROCESS_START

SECRET = "value-that-nobody-may-read"


class _SeenWhenUnpickled:
    """Stands for what imports torch: notes the environment at the moment in which it is unpickled."""

    def __init__(self, found: str | None = None):
        self.found = found

    def __reduce__(self):
        return _look, ()


def _look() -> _SeenWhenUnpickled:
    return _SeenWhenUnpickled(os.environ.get("RANK_TEST_TOKEN"))


class _Rank:
    def __init__(self, args, rank, world_size, device):
        self.seen = (args.model.found, rank, world_size, device)

    def what_was_seen(self):
        return self.seen

    def dispose(self):
        self.seen = None


@pytest.fixture(autouse=True)
def own_temporary_directory(monkeypatch, tmp_path):
    """As a rank's process has one: what it sets for multiprocessing holds for this test only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)


def test_variables_are_set_before_anything_of_the_rank_is_unpickled(monkeypatch):
    monkeypatch.delenv("RANK_TEST_TOKEN", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    args = argparse.Namespace(model=_SeenWhenUnpickled())
    process = RankProcess({"RANK_TEST_TOKEN": SECRET}, ray.cloudpickle.dumps((_Rank, args, 2, 4, 1)))
    assert process.call("what_was_seen") == (SECRET, 2, 4, 1)
    assert repr(process) == "rank 2"


def test_what_multiprocessing_makes_goes_with_the_rank(tmp_path):
    args = argparse.Namespace(model=_SeenWhenUnpickled())
    process = RankProcess({}, ray.cloudpickle.dumps((_Rank, args, 0, 1, 0)))
    made = Path(multiprocessing.util.get_temp_dir())
    assert made.is_dir() and tmp_path in made.parents
    process.leave()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "PYTHONHASHSEED", "TCMALLOC_RELEASE_RATE", "NUMEXPR_MAX_THREADS", "RAY_BACKEND_LOG_LEVEL",
     "RAY_AUTH_TOKEN_PATH", *(f"{prefix}ANYTHING" for prefix in READ_AT_PROCESS_START)],
)  # fmt: skip
def test_what_a_process_reads_when_it_starts_is_there_when_it_starts(name):
    at_start, inside = environments({name: 7})
    assert at_start[name] == inside[name] == "7"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHON_KEYRING_TOKEN", "RAY_AUTH_TOKEN", "RAY_REDIS_PASSWORD"],
)
def test_everything_else_is_kept_from_ray(name):
    at_start, inside = environments({name: SECRET})
    assert name not in at_start and inside == {name: SECRET}


def test_a_typed_variable_wins_over_ours_of_the_same_name():
    assert environments({"NCCL_CUMEM_ENABLE": 1})[1] == {"NCCL_CUMEM_ENABLE": "1"}


def environments(typed: dict):
    args = argparse.Namespace(actor_num_gpus_per_node=1, train_env_vars=typed)
    return TrainGroup(args, None, [(0, 0)])._environments()
