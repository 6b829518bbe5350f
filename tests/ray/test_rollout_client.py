"""The driver's side of the rollout manager, without Ray: what it waits for, and how long."""

from types import SimpleNamespace

import pytest

from slime.observability import waiting
from slime.ray import rollout_client
from slime.utils.errors import RunError

STARTING = "the manager's start"


@pytest.fixture
def make_client(monkeypatch):
    """A client whose manager is no process: its start is a reference that never has a result."""
    manager = SimpleNamespace(start=SimpleNamespace(remote=lambda *arguments: STARTING))
    actor_class = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda args: manager))
    monkeypatch.setattr(rollout_client.ray, "remote", lambda **options: lambda of: actor_class)
    monkeypatch.setattr(waiting.ray, "wait", lambda refs, **options: ([], refs))

    def make(**flags):
        args = SimpleNamespace(**{"engine_start_timeout": 600.0, "http_request_timeout": 60.0, **flags})
        return rollout_client.RolloutClient(args, None, [])

    return make


def test_a_start_that_takes_too_long_ends_the_wait(make_client, monkeypatch):
    """Engines have the time that their flag gives them, and data theirs."""
    now = [1000.0]

    def quarter_of_a_minute(refs, **options):
        now[0] += 15.0
        return [], refs

    monkeypatch.setattr(waiting.ray, "wait", quarter_of_a_minute)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    client = make_client(engine_start_timeout=300.0)
    limit = 300.0 + rollout_client._DATA_SECONDS
    with pytest.raises(RunError, match=f"^start of engines, router and data: no answer within {limit:.0f} s "):
        client.wait_ready()
    assert limit < now[0] - 1000.0 <= limit + 15.0
    assert client.serving is None and client.start_deadline == limit


def test_what_is_ready_is_awaited_once(make_client, monkeypatch):
    asked, watched = [], []
    engine = SimpleNamespace(wait_for_end=SimpleNamespace(remote=lambda: "its end"))
    serving = SimpleNamespace(engines=[engine], rollouts_per_epoch=3)
    monkeypatch.setattr(rollout_client, "wait_for", lambda *arguments: asked.append(arguments) or serving)
    monkeypatch.setattr(rollout_client, "watch", watched.extend)
    client = make_client(num_rollout=None, num_epoch=2)
    client.wait_ready()
    client.wait_ready()
    assert asked == [(STARTING, "start of engines, router and data", client.start_deadline)]
    assert watched == ["its end"] and client._args.num_rollout == 6
