from slime.observability import console as startup
from slime.observability.console import StartupClock
from slime.utils.misc import SingletonMeta


def test_stretches_add_up_from_the_start_of_the_process(monkeypatch):
    SingletonMeta.clear_instances()
    monkeypatch.setattr(startup, "_process_start", lambda: 100.0)
    now = iter([102.5, 110.0])
    monkeypatch.setattr(startup.time, "time", lambda: next(now))
    clock = StartupClock()
    clock.mark("parse")
    assert clock.close("push") == "first sample 10.0 s after the start (seconds: parse 2.5, push 7.5)"
    assert clock.close("again") is None
    SingletonMeta.clear_instances()


def test_the_start_of_the_process_lies_before_now_and_after_that_of_its_parent():
    import psutil

    # The kernel counts the start of a process in hundredths of a second.
    assert abs(startup._process_start() - psutil.Process().create_time()) < 1.0
