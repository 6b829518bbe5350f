"""The waits of a weight push, without engines."""

from types import SimpleNamespace

import pytest

from slime.utils.errors import RunError
from slime.weights import process_group
from slime.weights.process_group import ProcessGroupWeightUpdater


class Collective(process_group._Background):
    """One that ends after `seconds` of the clock, if ever."""

    def __init__(self, now, seconds):
        self.now, self.end = now, now[0] + seconds

    def ended_within(self, timeout):
        self.now[0] = min(self.now[0] + timeout, max(self.end, self.now[0]))
        return self.now[0] >= self.end

    def raise_error(self):
        pass


@pytest.mark.parametrize("seconds, in_time", [(10.0, True), (59.0, True), (61.0, False), (float("inf"), False)])
def test_answers_and_collective_have_one_time_limit(monkeypatch, seconds, in_time):
    """Engines answer after 40 s of a minute: 20 s are left for the collective."""
    now = [1000.0]

    def answer(answers, name, timeout_s, **options):
        assert timeout_s == 60.0
        now[0] += 40.0

    monkeypatch.setattr("slime.observability.waiting.wait_for_all", answer)
    monkeypatch.setattr(process_group.time, "monotonic", lambda: now[0])
    args = SimpleNamespace(distributed_timeout_minutes=1, http_control_timeout=60.0, engine_load_timeout=60.0)
    updater = ProcessGroupWeightUpdater(args, lambda: iter([]), True)
    collective = Collective(now, seconds)
    if in_time:
        updater._finish([], collective, "sending weights")
        assert now[0] == 1000.0 + max(40.0, seconds)
        return
    message = r"^sending weights: the collective did not end within 60 s \(--distributed-timeout-minutes\)$"
    with pytest.raises(RunError, match=message):
        updater._finish([], collective, "sending weights")
    assert now[0] == 1060.0


@pytest.mark.parametrize("control, load", [(60.0, 5000.0), (5000.0, 60.0)])
def test_engines_that_put_weights_in_place_have_the_longer_of_their_limits(monkeypatch, control, load):
    """How long that takes follows from the size of the model."""
    limits = []
    monkeypatch.setattr(
        "slime.observability.waiting.wait_for_all", lambda answers, name, limit, **options: limits.append(limit)
    )
    args = SimpleNamespace(distributed_timeout_minutes=1, http_control_timeout=control, engine_load_timeout=load)
    ProcessGroupWeightUpdater(args, lambda: iter([]), True)._call_all("end_weight_update")
    assert limits == [5000.0 + process_group._ANSWER_SECONDS]
