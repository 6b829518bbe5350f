"""An owner with fake engines and a fake router, which record its calls as events."""

import time
from types import SimpleNamespace

import pytest
import ray

from slime.serving import model_routers
from slime.serving import owner as owner_module
from slime.serving.engines import engines_of_run
from slime.serving.owner import ServingOwner
from slime.serving.router import RouterHandle, Worker
from slime.utils.errors import RunError
from tests.support.processes.waiting import wait_until

KILLED = "engine 0 died: ended by SIGKILL"


class RayTaskError(ray.exceptions.RayTaskError):
    """The error of a remote call; the owner only reads its cause."""

    def __init__(self, cause):
        self.cause = cause


def died(words=KILLED):
    return RayTaskError(RunError(words))


class Router:
    """A fake router that records all calls in order."""

    ip, port, url = "127.0.0.1", 1, "http://127.0.0.1:1"
    found = frozenset()
    trouble, _fault, _late, _gave_up = RouterHandle.trouble, RouterHandle._fault, 0, None

    def __init__(self, events, *, process=None, error=None, number=0):
        self.events, self.process, self.error = events, process, error
        self.suffix = f" {number}" if number else ""

    def wait_ready(self):
        self.events.append(f"router{self.suffix} is ready")

    def wait_for_workers(self, timeout):
        self.events.append(("engines of others", timeout))
        return 2

    def other_workers(self, urls):
        self.events.append((f"only{self.suffix}", urls))
        return {}

    def add_workers(self, workers, timeout, key):
        self.events.append((f"add{self.suffix}", [worker.url for worker in workers]))

    def remove_workers(self, urls, timeout):
        self.events.append((f"remove{self.suffix}", urls))
        if self.error:
            raise self.error

    def shutdown(self):
        self.events.append(f"router{self.suffix}")


class Process:
    """The fake process of a router. While `status` is None it runs."""

    status = None

    def poll(self):
        return self.status

    def describe_end(self):
        return "exit code 3; log router.log ends with: out of sockets"


@pytest.fixture
def make_owner(monkeypatch, tmp_path):
    """Makes an owner with fake engines. A call of an engine is a pair (method, engine), and the test decides its outcome.

    `owner.events` lists the calls in order. `owner.outcomes` has the results and errors of calls that have ended; one in a list
    counts once. Servers start at once. Events of the router of a second model end in its number.
    """
    made = []

    def make(*, engines=2, process=None, error=None, **flags):
        events, outcomes = [], {}

        def start_router(args, log_dir, ours, number, roles):
            return Router(events, process=process, error=error, number=number)

        monkeypatch.setattr(model_routers, "start_router", start_router)
        values = {
            "rollout_num_gpus": engines, "rollout_external": False, "rollout_num_gpus_per_engine": 1, "num_gpus_per_node": 8,
            "sglang_config": None, "prefill_num_servers": None, "hf_checkpoint": "/actor", "router_api_key": None,
            "sglang_router_ip": None, "rollout_external_engine_infos": None, "has_trainer": True, "engine_start_timeout": 600.0,
            "sglang_server_concurrency": 512, "has_engines": True, "world_size": 1,
            "use_fault_tolerance": False, "colocate": False,
            "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
            "rollout_health_check_interval": 0.05, "rollout_health_check_timeout": 600.0,
            "rollout_health_check_first_wait": 0.0,
        }  # fmt: skip
        args = SimpleNamespace(**{**values, **flags})
        owner = ServingOwner(args, engines_of_run(args, None, [(i, i) for i in range(engines)], tmp_path, {}), tmp_path)

        def start(name):
            outcomes.setdefault(("start", name), f"http://{name.engine_id}.{name.generation}")
            return ("start", name)

        def stop(names=None):
            events.append("engines" if names is None else ("stop", *names))

        monkeypatch.setattr(owner._engines, "start", start)
        monkeypatch.setattr(owner._engines, "stop", stop)
        monkeypatch.setattr(owner._engines, "end_of", lambda name: ("end", name))
        monkeypatch.setattr(owner._engines, "check", lambda name, timeout: ("check", name))

        def order(names, method):
            events.append((method, *names))
            return {name: outcomes.get((method, name)) for name in names}

        def workers(urls):
            roles = {name: owner._topology.find(name.engine_id)[1].role for name in urls}
            return {
                name: Worker(url, roles[name], 8998 if roles[name] == "prefill" else None) for name, url in urls.items()
            }

        monkeypatch.setattr(owner._engines, "order", order)
        monkeypatch.setattr(owner._engines, "workers", workers)
        monkeypatch.setattr(owner._engines, "snapshot", lambda version, records: (version, [r.name for r in records]))
        owner.events, owner.outcomes, owner.turns = events, outcomes, 0
        made.append(owner)
        return owner

    def wait(refs, **options):
        # Ray would wait here. Without a pause the watch would spin.
        time.sleep(0.005)
        made[-1].turns += 1
        return [ref for ref in refs if ref in made[-1].outcomes], []

    def get(ref, **options):
        outcome = made[-1].outcomes[ref]
        if isinstance(outcome, list):
            made[-1].outcomes.pop(ref)
            (outcome,) = outcome
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(owner_module, "_WATCH_POLL_SECONDS", 0.005)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(owner_module, "wait_for_all", lambda refs, *arguments, **options: [get(ref) for ref in refs])
    yield make
    for owner in made:
        owner.shutdown()


def ready(owner):
    owner.start()
    owner.wait_ready()
    return owner


def serving(owner):
    """An owner whose engines have received the first push."""
    _, names = ready(owner).begin_push()
    owner.end_push(names, 1, {})
    owner.events.clear()
    return owner


def states(owner):
    return [record.state for record in owner._fleet.records()]


def let_the_watch_turn(owner):
    """Return when the watch has looked several times more at what it waits for."""
    seen = owner.turns
    wait_until(lambda: owner.turns >= seen + 10)
