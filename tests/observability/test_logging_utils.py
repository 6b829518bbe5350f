import importlib
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slime.observability.logging_utils import (
    drain_outbox,
    finish_tracking,
    init_tracking,
    log,
    tracking_directory,
    write_to_trackers,
)


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {
        tag: [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]
    }


def test_outbox_hands_metrics_over_once():
    log(None, {"rollout/x": 1, "rollout/step": 4}, "rollout/step")
    assert drain_outbox() == [({"rollout/x": 1, "rollout/step": 4}, "rollout/step")]
    assert drain_outbox() == []


def test_numbers_reach_the_event_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    init_tracking(SimpleNamespace(use_tensorboard=True, use_wandb=False, wandb_always_use_train_step=False))
    metrics = {"a/x": 0.5, "a/text": "no", "a/nan": float("nan"), "a/step": 7}
    write_to_trackers([(metrics, "a/step")])
    finish_tracking()
    assert read_events(tmp_path) == {"a/x": [(7, pytest.approx(0.5))]}


def test_default_directory(monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    args = SimpleNamespace(tb_project_name=None, tb_experiment_name="first")
    assert str(tracking_directory(args)) == "outputs/slime/first"


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("slime.ray.rollout_manager", "RolloutManager", ()),
        ("slime.serving.engine_group", "EngineActor", (0, "logs")),
        ("slime.backends.megatron_utils.train_rank", "MegatronRank", (0, 1, 0)),
    ],
)
def test_every_process_of_a_run_logs_at_its_level(monkeypatch, module, name, arguments):
    levels = []
    process = importlib.import_module(module)
    monkeypatch.setattr(process, "configure_logger", levels.append)
    getattr(process, name)(SimpleNamespace(log_level="DEBUG"), *arguments)
    assert levels == ["DEBUG"]


@pytest.mark.parametrize(
    ("level", "debug", "own", "library"),
    [("INFO", "0", logging.INFO, logging.ERROR), ("WARNING", "0", logging.WARNING, logging.ERROR),
     ("INFO", "1", logging.DEBUG, logging.DEBUG)],
)  # fmt: skip
def test_levels(level, debug, own, library):
    code = (
        "import logging; from slime.observability.logging_utils import configure_logger; "
        f"configure_logger({level!r}); "
        "print(logging.getLogger('slime').getEffectiveLevel(), logging.getLogger('ray').getEffectiveLevel())"
    )
    environment = {**os.environ, "SLIME_DEBUG": debug}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == [str(own), str(library)], result.stderr
