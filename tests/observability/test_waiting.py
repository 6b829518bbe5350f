"""Waits of the driver, on a real Ray."""

import os
from types import SimpleNamespace

import pytest

from slime.utils.errors import RunError, UserError
from tests.support.processes.local_ray import start_ray


@pytest.fixture(scope="module")
def ray():
    import ray

    start_ray(num_cpus=4)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def worker(ray):
    @ray.remote(num_cpus=0)
    class Worker:
        def answer(self, value):
            return value

        def raise_error(self, error):
            raise error

        def hang(self):
            import threading

            threading.Event().wait(600)

        def die(self):
            os._exit(7)

    return Worker


@pytest.fixture(scope="module")
def actor(worker):
    """One that any number of calls may hang in: a process of its own costs a second, and only who dies needs it."""
    return worker.options(max_concurrency=32).remote()


def test_results_come_in_order(actor):
    from slime.observability.waiting import wait_for, wait_for_all

    polls = []
    assert wait_for_all([actor.answer.remote(i) for i in range(3)], "three answers", 60) == [0, 1, 2]
    assert wait_for(actor.answer.remote("x"), "an answer", 60, on_poll=lambda: polls.append(1)) == "x"
    assert polls


def test_the_first_error_ends_the_wait_although_others_hang(actor):
    from slime.observability.waiting import wait_for_all

    with pytest.raises(UserError, match="^--flag 3: wrong$"):
        wait_for_all([actor.hang.remote(), actor.raise_error.remote(UserError("--flag 3: wrong"))], "a step", 60)


def test_who_fails_does_not_end_the_wait_for_each(ray, actor, worker):
    from slime.observability.waiting import wait_for_each

    refs = [
        actor.raise_error.remote(RunError("broken")),
        worker.remote().die.remote(),
        actor.hang.remote(),
        actor.answer.remote(4),
    ]
    # Ray hears of a death when it does; the deadline is for who says nothing at all.
    assert len(ray.wait(refs, num_returns=3, timeout=60)[0]) == 3
    broken, dead, late, answer = wait_for_each(refs, "an order", 2)
    assert answer == 4 and str(broken) == "broken"
    assert str(dead).startswith("an order: a process of the run died. ")
    assert str(late) == "an order: no answer within 2 s from 1 process(es)"
    assert all(isinstance(error, RunError) for error in (broken, dead, late))


def test_a_wait_asks_ray_no_oftener_for_many_results_than_for_few(monkeypatch):
    """Each question is about all that are missing: one for each result would take time by the square of their number."""
    from slime.observability import waiting

    asked = []

    def wait(refs, num_returns, timeout):
        asked.append(len(refs))
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(waiting, "ray", SimpleNamespace(wait=wait, get=lambda ref, timeout: ref))
    assert waiting.wait_for_all(list(range(512)), "answers", 60) == list(range(512))
    assert asked == [512, 512]


def test_who_waits_for_each_hears_who_is_missing(ray, actor):
    from slime.observability.waiting import wait_for_each

    pending = "engine {}".format
    (late,) = wait_for_each([actor.hang.remote()], "an order", 0.5, pending=pending)
    assert str(late) == "an order: no answer within 0 s from engine [0]"
    (late,) = wait_for_each([actor.hang.remote()], "an order", 0.5, pending=pending, flag="--its-limit")
    assert str(late) == "an order: no answer within 0 s (--its-limit) from engine [0]"


def test_a_watched_death_ends_the_wait_for_each(actor):
    from slime.observability.waiting import unwatch, wait_for_each, watch

    watched = [actor.raise_error.remote(RunError("the router died"))]
    watch(watched)
    try:
        with pytest.raises(RunError, match="^the router died$"):
            wait_for_each([actor.hang.remote()], "an order", 60)
    finally:
        unwatch(watched)


def test_a_watched_death_behind_an_error_is_not_blamed_on_who_told_the_error(ray, actor, monkeypatch):
    from slime.observability.waiting import wait_for_each, watch

    failed = actor.raise_error.remote(RunError("engine 3 answered 500"))
    death = actor.raise_error.remote(RunError("the router died"))
    wait = ray.wait
    assert len(wait([failed, death], num_returns=2, timeout=60)[0]) == 2
    watch([death])
    # Ray hands out what is ready in any order: here the error comes first.
    monkeypatch.setattr(
        ray, "wait", lambda refs, **options: ([failed], []) if failed in refs else wait(refs, **options)
    )
    with pytest.raises(RunError, match="^the router died$"):
        wait_for_each([failed], "push", 60)
    (told,) = wait_for_each([failed], "push", 60)
    assert str(told) == "engine 3 answered 500"


def test_a_full_disk_is_one_message(actor):
    from slime.observability.waiting import wait_for

    error = OSError(28, "No space left on device", "/data/x")
    with pytest.raises(RunError, match=r"^save: \[Errno 28\] No space left on device: '/data/x'$"):
        wait_for(actor.raise_error.remote(error), "save", 60)


def test_the_deadline_names_what_is_missing(ray, actor):
    from slime.observability.waiting import wait_for_all

    with pytest.raises(RunError, match="^a step: no answer within 1 s from rank 0$"):
        wait_for_all([actor.hang.remote()], "a step", 1, pending=lambda ranks: f"rank {ranks[0]}")
    with pytest.raises(RunError, match=r"^a step: no answer within 1 s \(--step-timeout\) from 1 process\(es\)$"):
        wait_for_all([actor.hang.remote()], "a step", 1, flag="--step-timeout")
    late = {"flag": lambda positions: f"--timeout-of-{positions}"}
    with pytest.raises(
        RunError, match=r"^a step: no answer within 1 s \(--timeout-of-\[1, 2\]\) from 2 process\(es\)$"
    ):
        wait_for_all([ray.put(1), actor.hang.remote(), actor.hang.remote()], "a step", 1, **late)


def test_the_death_behind_a_lost_connection_is_named(actor, worker, monkeypatch):
    from slime.observability import waiting
    from slime.observability.waiting import wait_for, wait_for_all

    # Its process starts first, which takes long where the machine is busy; the other one has, and fails at once.
    monkeypatch.setattr(waiting, "_DEATH_SECONDS", 60.0)
    assert wait_for(actor.answer.remote(1), "an answer", 60) == 1
    refs = [actor.raise_error.remote(RuntimeError("Connection closed by peer")), worker.remote().die.remote()]
    with pytest.raises(RunError, match="a process of the run died"):
        wait_for_all(refs, "a step", 60)


def test_a_watched_death_ends_every_wait(actor):
    from slime.observability.waiting import unwatch, wait_for, watch

    end = actor.hang.remote()
    watch([end])
    try:
        assert wait_for(actor.answer.remote(1), "an answer", 60) == 1  # who lives disturbs nobody
        watch([actor.raise_error.remote(RunError("engine 3 died: ended by SIGKILL"))])
        with pytest.raises(RunError, match="^engine 3 died: ended by SIGKILL$"):
            wait_for(actor.hang.remote(), "training", 60)
    finally:
        unwatch([end])


def test_a_watched_death_is_told_instead_of_the_errors_that_it_causes(ray, actor, monkeypatch):
    from slime.observability.waiting import wait_for, watch

    failed = actor.raise_error.remote(RunError("engine 3 answered 500"))
    death = actor.raise_error.remote(RunError("engine 3 died"))
    wait = ray.wait
    assert len(wait([failed, death], num_returns=2, timeout=60)[0]) == 2
    watch([death])
    # Ray hands out what is ready in any order: here the error comes first.
    monkeypatch.setattr(
        ray, "wait", lambda refs, **options: ([failed], []) if failed in refs else wait(refs, **options)
    )
    with pytest.raises(RunError, match="^engine 3 died$"):
        wait_for(failed, "push", 60)
    with pytest.raises(RunError, match="^engine 3 answered 500$"):
        wait_for(failed, "push", 60)  # each death is told once


def test_what_is_watched_may_end_in_order(actor):
    from slime.observability.waiting import wait_for, watch

    watch([actor.answer.remote(None)])
    assert wait_for(actor.answer.remote(2), "an answer", 60) == 2
    with pytest.raises(RunError, match="no answer within 1 s"):
        wait_for(actor.hang.remote(), "a step", 1)


def test_what_is_watched_no_longer_ends_nothing(actor):
    from slime.observability.waiting import unwatch, wait_for, watch

    end = actor.raise_error.remote(RunError("engine 3 died"))
    watch([end])
    unwatch([end])
    assert wait_for(actor.answer.remote(2), "an answer", 60) == 2


def test_the_death_of_a_watched_actor_ends_a_wait_that_has_nothing_to_do_with_it(actor, worker):
    from slime.observability.waiting import unwatch_actors, wait_for, watch_actors

    watched, busy = worker.remote(), worker.remote()
    busy.hang.remote()
    watch_actors([watched, busy])
    try:
        with pytest.raises(RunError, match=r"^an answer: no answer within 3 s"):
            wait_for(actor.hang.remote(), "an answer", 3)
        watched.die.remote()
        with pytest.raises(RunError, match=r"^an answer: a process of the run died\."):
            wait_for(actor.hang.remote(), "an answer", 60)
    finally:
        unwatch_actors([watched, busy])
    assert wait_for(actor.answer.remote(1), "an answer", 60) == 1


def test_an_actor_that_answers_beside_its_work_counts_as_dead_when_it_says_nothing(monkeypatch):
    """One without a limit may be busy for any time; on a clock of its own."""
    from slime.observability import waiting

    now, answered = [0.0], {"manager"}

    def wait(refs, num_returns=1, timeout=None):
        now[0] += timeout
        return [ref for ref in refs if ref in answered], []

    class Actor:
        def __init__(self, name):
            self.__ray_ready__ = SimpleNamespace(remote=lambda: name)

    for name in ("_asked", "_names"):
        monkeypatch.setattr(waiting, name, {})
    monkeypatch.setattr(waiting, "ray", SimpleNamespace(wait=wait, get=lambda ref, timeout: ref))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    manager = Actor("manager")
    waiting.watch_actors([Actor("busy rank")])
    waiting.watch_actors([manager], 60.0)
    waiting.name_actors({manager: "the manager"})
    for _ in range(2):
        with pytest.raises(RunError, match="^a push: no answer within 300 s"):
            waiting.wait_for("push", "a push", 300.0)
        now[0] += 100.0  # the process does something else, and sees an answer late
    answered.clear()
    for wait_once in (waiting.wait_for_all, waiting.wait_for_each):
        began = now[0]
        with pytest.raises(RunError, match="^a push: the manager has answered nothing for 60 s"):
            wait_once(["push"], "a push", 300.0)
        assert 60.0 < now[0] - began < 62.0
        with pytest.raises(RunError, match="^a save: no answer within 300 s"):
            waiting.wait_for("save", "a save", 300.0)
        waiting.watch_actors([manager], 60.0)
        waiting.name_actors({manager: "the manager"})


@pytest.mark.parametrize("first", ["call", "death", "question"])
def test_a_death_that_shows_in_several_ways_is_told_once(monkeypatch, first):
    """What is awaited next, of processes that live, may save work."""
    from ray.exceptions import ActorDiedError

    from slime.observability import waiting

    now, died = [10.0], ActorDiedError()
    died.actor_id = "id of the manager"

    class Actor:
        __ray_ready__ = SimpleNamespace(remote=lambda: f"question at {now[0]}")

    def wait(refs, num_returns=1, timeout=None):
        now[0] += timeout
        return [ref for ref in refs if not ref.startswith("no answer")], []

    def get(ref, timeout):
        if ref.startswith(("call", "death", "question")):
            raise died
        return ref

    for name, empty in (("_asked", {}), ("_names", {}), ("_told", set()), ("_watched", [])):
        monkeypatch.setattr(waiting, name, empty, raising=False)
    monkeypatch.setattr(waiting, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    if first != "question":
        waiting.watch(["death"])
    waiting.watch_actors([Actor()], 60.0)
    with pytest.raises(RunError, match="^a rollout: a process of the run died"):
        waiting.wait_for("call" if first == "call" else "no answer", "a rollout", 60.0)
    waiting.watch(["death"])
    assert waiting.wait_for_all(["rank 0", "rank 1"], "ends of a save", 10.0) == ["rank 0", "rank 1"]
    with pytest.raises(RunError, match="^a publication: no answer within 10 s"):
        waiting.wait_for("no answer", "a publication", 10.0)
    with pytest.raises(RunError, match="^data: a process of the run died"):
        waiting.wait_for("call 2", "data", 10.0)


def test_the_death_of_an_actor_that_has_a_name_says_which_one_it_was_and_where(actor, worker):
    from slime.observability.waiting import name_actors, unwatch_actors, wait_for, wait_for_all, watch_actors

    ranks = [worker.remote() for _ in range(3)]
    name_actors({rank: f"training rank {number}" for number, rank in enumerate(ranks)})
    assert wait_for_all([rank.answer.remote(1) for rank in ranks], "answers", 120) == [1, 1, 1]
    watch_actors(ranks[:2])
    who = r"^{}: a process of the run died\. It was training rank {}\. (?s:.*)\n\tpid: \d+\n(?s:.*)\n\tip: \d+\.\d+"
    try:
        with pytest.raises(RunError, match=who.format("a step", 2)):
            wait_for_all([ranks[0].answer.remote(1), ranks[2].die.remote()], "a step", 60)
        ranks[1].die.remote()
        with pytest.raises(RunError, match=who.format("an answer", 1)):
            wait_for(actor.hang.remote(), "an answer", 60)
    finally:
        unwatch_actors(ranks)
    with pytest.raises(RunError, match=r"^a step: a process of the run died\. The actor died"):
        wait_for(ranks[2].answer.remote(1), "a step", 60)
