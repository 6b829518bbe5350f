"""Waits of the driver, on a real Ray."""

import os

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


def test_results_come_in_order(worker):
    from slime.observability.waiting import wait_for, wait_for_all

    actor, polls = worker.remote(), []
    assert wait_for_all([actor.answer.remote(i) for i in range(3)], "three answers", 60) == [0, 1, 2]
    assert wait_for(actor.answer.remote("x"), "an answer", 60, on_poll=lambda: polls.append(1)) == "x"
    assert polls


def test_the_first_error_ends_the_wait_although_others_hang(worker):
    from slime.observability.waiting import wait_for_all

    hanging, failing = worker.remote(), worker.remote()
    with pytest.raises(UserError, match="^--flag 3: wrong$"):
        wait_for_all([hanging.hang.remote(), failing.raise_error.remote(UserError("--flag 3: wrong"))], "a step", 60)


def test_who_fails_does_not_end_the_wait_for_each(worker):
    from slime.observability.waiting import wait_for_all, wait_for_each

    one, other, dying, hanging = actors = [worker.remote() for _ in range(4)]
    wait_for_all([actor.answer.remote(0) for actor in actors], "actors", 60)
    refs = [
        one.raise_error.remote(RunError("broken")),
        dying.die.remote(),
        hanging.hang.remote(),
        other.answer.remote(4),
    ]
    broken, dead, late, answer = wait_for_each(refs, "an order", 10)
    assert answer == 4 and str(broken) == "broken"
    assert str(dead).startswith("an order: a process of the run died. ")
    assert str(late) == "an order: no answer within 10 s from 1 process(es)"
    assert all(isinstance(error, RunError) for error in (broken, dead, late))


def test_a_watched_death_ends_the_wait_for_each(worker):
    from slime.observability.waiting import unwatch, wait_for_each, watch

    watched = [worker.remote().raise_error.remote(RunError("the router died"))]
    watch(watched)
    try:
        with pytest.raises(RunError, match="^the router died$"):
            wait_for_each([worker.remote().hang.remote()], "an order", 60)
    finally:
        unwatch(watched)


def test_a_watched_death_behind_an_error_is_not_blamed_on_who_told_the_error(ray, worker, monkeypatch):
    from slime.observability.waiting import wait_for_each, watch

    rank, engine = worker.remote(), worker.remote()
    failed = rank.raise_error.remote(RunError("engine 3 answered 500"))
    death = engine.raise_error.remote(RunError("the router died"))
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


def test_a_full_disk_is_one_message(worker):
    from slime.observability.waiting import wait_for

    error = OSError(28, "No space left on device", "/data/x")
    with pytest.raises(RunError, match=r"^save: \[Errno 28\] No space left on device: '/data/x'$"):
        wait_for(worker.remote().raise_error.remote(error), "save", 60)


def test_the_deadline_names_what_is_missing(ray, worker):
    from slime.observability.waiting import wait_for_all

    actor = worker.remote()
    with pytest.raises(RunError, match="^a step: no answer within 1 s from rank 0$"):
        wait_for_all([actor.hang.remote()], "a step", 1, pending=lambda ranks: f"rank {ranks[0]}")
    with pytest.raises(RunError, match=r"^a step: no answer within 1 s \(--step-timeout\) from 1 process\(es\)$"):
        wait_for_all([actor.hang.remote()], "a step", 1, flag="--step-timeout")
    late = {"flag": lambda positions: f"--timeout-of-{positions}"}
    with pytest.raises(
        RunError, match=r"^a step: no answer within 1 s \(--timeout-of-\[1, 2\]\) from 2 process\(es\)$"
    ):
        wait_for_all([ray.put(1), actor.hang.remote(), actor.hang.remote()], "a step", 1, **late)


def test_the_death_behind_a_lost_connection_is_named(worker):
    from slime.observability.waiting import wait_for_all

    peer, victim = worker.remote(), worker.remote()
    refs = [peer.raise_error.remote(RuntimeError("Connection closed by peer")), victim.die.remote()]
    with pytest.raises(RunError, match="a process of the run died"):
        wait_for_all(refs, "a step", 60)


def test_a_watched_death_ends_every_wait(worker):
    from slime.observability.waiting import unwatch, wait_for, watch

    engine, rank = worker.remote(), worker.remote()
    end = engine.hang.remote()
    watch([end])
    try:
        assert wait_for(rank.answer.remote(1), "an answer", 60) == 1  # who lives disturbs nobody
        engine_that_dies = worker.remote()
        watch([engine_that_dies.raise_error.remote(RunError("engine 3 died: ended by SIGKILL"))])
        with pytest.raises(RunError, match="^engine 3 died: ended by SIGKILL$"):
            wait_for(rank.hang.remote(), "training", 60)
    finally:
        unwatch([end])


def test_a_watched_death_is_told_instead_of_the_errors_that_it_causes(ray, worker, monkeypatch):
    from slime.observability.waiting import wait_for, watch

    rank, engine = worker.remote(), worker.remote()
    failed = rank.raise_error.remote(RunError("engine 3 answered 500"))
    death = engine.raise_error.remote(RunError("engine 3 died"))
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


def test_what_is_watched_may_end_in_order(worker):
    from slime.observability.waiting import wait_for, watch

    actor = worker.remote()
    watch([actor.answer.remote(None)])
    assert wait_for(actor.answer.remote(2), "an answer", 60) == 2
    with pytest.raises(RunError, match="no answer within 1 s"):
        wait_for(actor.hang.remote(), "a step", 1)


def test_what_is_watched_no_longer_ends_nothing(worker):
    from slime.observability.waiting import unwatch, wait_for, watch

    actor = worker.remote()
    end = actor.raise_error.remote(RunError("engine 3 died"))
    watch([end])
    unwatch([end])
    assert wait_for(actor.answer.remote(2), "an answer", 60) == 2


def test_the_death_of_a_watched_actor_ends_a_wait_that_has_nothing_to_do_with_it(worker):
    from slime.observability.waiting import unwatch_actors, wait_for, watch_actors

    watched, busy, hanging = worker.remote(), worker.remote(), worker.remote()
    busy.hang.remote()
    watch_actors([watched, busy])
    try:
        with pytest.raises(RunError, match=r"^an answer: no answer within 3 s"):
            wait_for(hanging.hang.remote(), "an answer", 3)
        watched.die.remote()
        with pytest.raises(RunError, match=r"^an answer: a process of the run died\."):
            wait_for(hanging.answer.remote(1), "an answer", 60)
    finally:
        unwatch_actors([watched, busy])
    free = worker.remote()
    assert wait_for(free.answer.remote(1), "an answer", 60) == 1
