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
    init_tracking(SimpleNamespace(use_tensorboard=True))
    metrics = {"a/x": 0.5, "a/text": "no", "a/nan": float("nan"), "a/step": 7}
    write_to_trackers([(metrics, "a/step")])
    finish_tracking()
    assert read_events(tmp_path) == {"a/x": [(7, pytest.approx(0.5))]}


def test_default_directory(monkeypatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    args = SimpleNamespace(tb_project_name=None, tb_experiment_name="first")
    assert str(tracking_directory(args)) == "outputs/slime/first"
