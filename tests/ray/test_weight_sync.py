"""What the driver does around a weight push, without trainer and engines."""

from types import SimpleNamespace

import pytest

from slime.ray import weight_sync
from slime.ray.weight_sync import WeightSync, mean_difference, probe_sequences


def test_probe_is_fixed_and_inside_the_vocabulary():
    assert probe_sequences(50) == probe_sequences(50)
    assert all(0 <= token < 50 for sequence in probe_sequences(50) for token in sequence)


def test_mean_difference():
    assert mean_difference([[1.0, 2.0], [3.0]], [[1.5, 2.0], [2.0]]) == pytest.approx(0.5)


def test_lost_tokens_are_an_error():
    with pytest.raises(ValueError):
        mean_difference([[1.0, 2.0]], [[1.0]])


def test_engines_have_the_time_to_load_that_their_flag_gives_and_a_moment_more(monkeypatch):
    limits = []
    monkeypatch.setattr(
        weight_sync, "wait_for_all", lambda refs, name, limit, flag, **options: limits.append((flag, limit))
    )
    engine = SimpleNamespace(update_weights_from_disk=SimpleNamespace(remote=lambda directory: "its answer"))
    group = SimpleNamespace(connect_rollout_engines=lambda *arguments: None)
    serving = SimpleNamespace(engines=[engine], gpu_counts=[1], gpu_offsets=[0])
    sync = WeightSync(SimpleNamespace(engine_load_timeout=5000.0), group, serving)
    sync._call_engines("update_weights_from_disk", "directory")
    assert limits == [("--engine-load-timeout", 5000.0 + weight_sync._ANSWER_SECONDS)]
