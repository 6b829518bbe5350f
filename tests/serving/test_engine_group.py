"""How long a group of engines is waited for, without engines; with real ones: `test_engines.py`."""

from types import SimpleNamespace

import pytest

from slime.serving import engine_group
from slime.serving.engine_group import EngineGroup


@pytest.fixture
def limits(monkeypatch):
    """The limits of all waits, in order."""
    found = []
    monkeypatch.setattr(
        "slime.observability.waiting.wait_for_all", lambda refs, name, limit, **options: found.append(limit) or []
    )
    return found


def group_of(tmp_path, **limits_of_flags) -> EngineGroup:
    flags = {"engine_start_timeout": 1.0, "engine_load_timeout": 1.0, "http_control_timeout": 1.0, **limits_of_flags}
    return EngineGroup(SimpleNamespace(rollout_num_gpus_per_engine=1, **flags), None, [], tmp_path)


def test_a_start_has_the_time_that_its_flag_gives_and_a_moment_more(tmp_path, limits):
    group_of(tmp_path, engine_start_timeout=8000.0).wait_ready()
    assert limits == [8000.0 + engine_group._ANSWER_SECONDS]


@pytest.mark.parametrize("longer", ["engine_load_timeout", "http_control_timeout"])
def test_a_call_has_the_longer_of_the_limits_of_requests(tmp_path, limits, longer):
    group_of(tmp_path, **{longer: 5000.0}).call_all("health")
    assert limits == [5000.0 + engine_group._ANSWER_SECONDS]
