"""Which actors an engine has, without processes: one on each of its nodes, or one beside the router for an engine of others."""

import copy
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils import sglang_engine
from slime.backends.sglang_utils.server_arguments import EnginePart
from slime.scheduling.served_models import ServerGroup
from slime.serving import engines as engines_module
from slime.serving import fleet
from slime.serving.engines import EngineActor, Engines
from slime.serving.fleet import EngineName, EngineRecord, EngineState
from slime.serving.router import Worker
from slime.serving.topology import Device, EngineGroup, EngineSpec, ServedModel, Topology
from slime.utils.errors import RunError

NODES = ((Device(3, 0), Device(4, 1)), (Device(8, 6), Device(9, 7)))


class Actors:
    """Stands for Ray: remembers the actors that are made, and what each is asked."""

    def __init__(self):
        self.made, self.asked, self.given = [], [], []

    def remote(self, cls):
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda *words: self._make(cls, options, words))
        )

    def _make(self, cls, options, words):
        number = len(self.made)
        self.given.append(words)
        self.made.append((cls.__name__, options))

        class Handle:
            def __getattr__(handle, method):
                return SimpleNamespace(
                    remote=lambda *words, **named: self.asked.append((number, method, words, named)) or (number, method)
                )

        return Handle()


@pytest.fixture
def actors(monkeypatch):
    found = Actors()
    killed = []
    context = SimpleNamespace(get_node_id=lambda: "a" * 56)
    monkeypatch.setattr(engines_module.ray, "remote", found.remote)
    monkeypatch.setattr(engines_module.ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(engines_module.ray, "kill", lambda handle, **options: killed.append(handle))
    monkeypatch.setattr(engines_module.ray, "get_runtime_context", lambda: context)
    found.killed = killed
    return found


def make_engines(tmp_path, placement_group=None, **spec):
    engine = EngineSpec(0, **{"nodes": NODES, "gpu_offset": 0, **spec})
    topology = Topology((ServedModel("default", True, (EngineGroup("regular", (engine,)),)),))
    return Engines(SimpleNamespace(), placement_group, topology, tmp_path, {})


def test_an_engine_on_one_node_is_one_actor(actors, tmp_path):
    engines = make_engines(tmp_path, nodes=NODES[1:])
    assert engines.start(EngineName(0)) == (0, "init")
    ((kind, options),) = actors.made
    assert kind == "EngineActor" and options["scheduling_strategy"].placement_group_bundle_index == 8
    assert actors.asked == [(0, "init", (), {"base_gpu_id": 6})]


def test_an_engine_that_is_to_crash_tells_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr(engines_module, "configure_logger", lambda level: None)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as server:
        monkeypatch.setattr(EngineActor, "server_pid", lambda self: server.pid)
        engine = EngineActor(SimpleNamespace(log_level="INFO"), 0, tmp_path)
        engine.crash()
        assert server.wait(60) == -signal.SIGKILL and not engine._ending.is_set()


@pytest.mark.parametrize(("variable", "threads"), [("3", 3), ("", None)])
def test_engines_have_as_many_threads_as_the_user_of_the_driver_says(actors, tmp_path, monkeypatch, variable, threads):
    """Also one that the manager starts later, in whose process Ray has set the variable."""
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    engines = make_engines(tmp_path, nodes=NODES[1:])
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engines.start(EngineName(0))
    (words,) = actors.given
    assert words[-1] == threads


def test_engines_that_were_told_to_start_are_not_told_by_who_goes_on_with_them(actors, tmp_path):
    """As the driver starts those of a run, and the owner in the manager has them."""
    engines = make_engines(tmp_path, nodes=NODES[1:])
    engines.start_all()
    handed_over = copy.copy(engines)
    handed_over.start_all()
    assert handed_over.starting == {EngineName(0): (0, "init")} and len(actors.made) == 1


def test_an_engine_over_nodes_is_an_actor_on_each_and_all_of_them_end(actors, tmp_path):
    engines = make_engines(tmp_path)
    assert engines.start(EngineName(0)) == (0, "init_over_nodes")
    assert [options["scheduling_strategy"].placement_group_bundle_index for _, options in actors.made] == [3, 8]
    ((_, _, (first_gpus, helpers), _),) = actors.asked
    assert first_gpus == [0, 6] and len(helpers) == 1
    # A push and requests go to the first.
    assert engines.end_of(EngineName(0)) == (0, "wait_for_end")
    engines.stop()
    assert [(number, method) for number, method, _, _ in actors.asked[-2:]] == [(0, "shutdown"), (1, "shutdown")]
    assert len(actors.killed) == 2
    assert engines.check(EngineName(0), 1.0) is None, "the watch may be about to ask one that another thread ends"
    engines.stop()
    assert len(actors.killed) == 2


@pytest.mark.parametrize("nodes", [NODES, NODES[1:]], ids=["over two nodes", "on one node"])
def test_a_later_life_looks_where_its_bundles_are_by_then_if_a_node_of_theirs_was_lost(
    actors, tmp_path, monkeypatch, nodes
):
    """Whoever looks needs a part of their devices, all of which ranks and the engine may have."""
    places = {index: "a" if index < 8 else "b" for index in range(12)}
    monkeypatch.setattr(engines_module, "nodes_of_bundles", lambda group: dict(places))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    engines = make_engines(tmp_path, nodes=nodes, placement_group="group")
    # As in the manager, whose process has other variables.
    monkeypatch.delenv("RAY_ADDRESS")
    first = "init_over_nodes" if len(nodes) == 2 else "init"
    assert engines.start(EngineName(0))[1] == first
    assert engines.start(EngineName(0, 1))[1] == first
    # Ray has a place for one bundle, and none for the other yet.
    places[8] = "c"
    del places[9]
    assert engines.start(EngineName(0, 2))[1] == "init_where_it_is"
    (_, _, (group, bundles, helpers), _) = actors.asked[-1]
    assert group == "group" and bundles == [[3, 4], [8, 9]][-len(nodes) :] and len(helpers) == len(nodes) - 1
    engines.stop()
    assert len(actors.killed) == len(nodes), "and every part of it ends"
    of_its_own = make_engines(tmp_path, nodes=nodes, placement_group="group")
    places[8] = "d"
    assert of_its_own.start(EngineName(0, 1))[1] == first


def test_an_engine_is_started_while_another_is_stopped(actors, tmp_path):
    """By two threads: each engine that died is cleared away by one of its own."""
    engines = make_engines(tmp_path, nodes=NODES[1:])

    class Other:
        @property
        def engine_id(self):
            engines.stop([EngineName(2)])
            return 1

    other, dead = Other(), actors.remote(EngineActor).options().remote()
    engines._handles = {other: dead, EngineName(2): dead, EngineName(0): dead}
    engines.start(EngineName(0, 1))
    assert actors.killed == [dead] and engines._handles.keys() == {other, EngineName(0, 1)}


def test_an_engine_is_started_with_the_settings_of_its_group(actors, tmp_path):
    """Also in the place of one that died."""
    settings = ServerGroup("regular", 4, 2, {"mem_fraction_static": 0.5})
    small = ServerGroup("regular", 1, 1, {}, model_path="/judge", update_weights=False)
    actor = EngineGroup("regular", (EngineSpec(0, NODES[:1], 0),), settings)
    judge = EngineGroup("regular", (EngineSpec(1, NODES[1:], 2, sleeps=False),), small)
    models = (ServedModel("actor", True, (actor,)), ServedModel("judge", False, (judge,)))
    args = SimpleNamespace(
        sglang_config="/serving.yaml", rollout_num_gpus_per_engine=8, sglang_mem_fraction_static=0.8, hf_checkpoint="/actor",
        offload_rollout=True, use_rollout_routing_replay=False,
    )  # fmt: skip
    engines = Engines(args, None, Topology(models), tmp_path, {})
    for name in (EngineName(0), EngineName(1), EngineName(0, 1)):
        engines.start(name)
    given = [words[0] for words in actors.given]
    assert [(of.rollout_num_gpus_per_engine, of.sglang_mem_fraction_static) for of in given] == [
        (2, 0.5), (1, 0.8), (2, 0.5),
    ]  # fmt: skip
    # A frozen model's engines load their own checkpoint, and those beside the trainer keep their memory.
    told = [(of.hf_checkpoint, of.offload_rollout) for of in given]
    assert told == [("/actor", True), ("/judge", False), ("/actor", True)]
    assert all(of.sglang_config is None for of in given) and args.sglang_config == "/serving.yaml"


def test_a_snapshot_tells_which_engines_are_started_alike(actors, tmp_path):
    groups = (
        EngineGroup("regular", (EngineSpec(0, NODES[:1], 0), EngineSpec(1, NODES[1:], 2))),
        EngineGroup("regular", (EngineSpec(2, NODES[:1], 4), EngineSpec(3, NODES[1:], 6))),
    )
    external = SimpleNamespace(num_gpus=2, url="http://a:1")
    outside = EngineGroup("regular", (EngineSpec(4, (), 8, external), EngineSpec(5, (), 10, external)))
    args = SimpleNamespace()
    engines = Engines(args, None, Topology((ServedModel("actor", True, (*groups, outside)),)), tmp_path, {})
    records = [EngineRecord(EngineName(id), EngineState.SERVING, 3) for id in range(6)]
    for record in records:
        engines.start(record.name)
    found = engines.snapshot(3, records).engines
    assert [engine.alike for engine in found] == [0, 0, 2, 2, 4, 5]
    assert [(engine.num_gpus, engine.gpu_offset) for engine in found] == [(2, 2 * id) for id in range(6)]


def test_an_engine_of_others_is_an_actor_beside_the_router(actors, tmp_path):
    engines = make_engines(tmp_path, nodes=(), external=SimpleNamespace(num_gpus=4, url="http://a:1"))
    assert engines.start(EngineName(0)) == (0, "init")
    ((kind, options),) = actors.made
    assert kind == "ExternalEngineActor" and options["num_cpus"] == 0 and "num_gpus" not in options
    assert options["scheduling_strategy"].node_id == "a" * 56 and not options["scheduling_strategy"].soft
    assert engines.why_none_follows(EngineName(0)) == "this run did not start http://a:1, and starts none in its place"


def test_engines_that_prefill_are_all_asked_for_their_ports_at_once(actors, tmp_path, monkeypatch):
    prefill = EngineGroup("prefill", tuple(EngineSpec(number, NODES[:1], number) for number in range(3)))
    decode = EngineGroup("decode", (EngineSpec(3, NODES[1:], 3),))
    engines = Engines(
        SimpleNamespace(), None, Topology((ServedModel("default", True, (prefill, decode)),)), tmp_path, {}
    )
    names = [EngineName(number) for number in range(4)]
    for name in (names[0], names[1], names[3]):
        engines.start(name)
    asked = []
    silent = RunError("no answer within 10 s")
    monkeypatch.setattr(
        engines_module, "wait_for_each", lambda refs, *words, **options: asked.append(refs) or [15002, silent]
    )
    found = engines.workers({name: f"http://{name.engine_id}" for name in names})
    assert asked == [[(0, "bootstrap_port"), (1, "bootstrap_port")]]
    assert (found[names[0]], found[names[3]]) == (Worker("http://0", "prefill", 15002), Worker("http://3", "decode"))
    assert found[names[1]] is silent and str(found[names[2]]) == "engine 2 was ended"


class Helper:
    """A part on another node, whose start and end the test decides."""

    def __init__(self):
        self.parts = []
        self.init = SimpleNamespace(remote=lambda **words: self.parts.append(words) or "helper started")
        self.wait_for_end = SimpleNamespace(remote=lambda: "helper ended")


@pytest.fixture
def first_part(monkeypatch, tmp_path):
    """The first part of an engine over two nodes; `outcomes`: what is there of others, by reference."""
    args = SimpleNamespace(
        log_level="INFO",
        engine_start_timeout=5.0,
        router_api_key=None,
        sglang_dp_size=4,
        sglang_enable_dp_attention=None,
    )
    engine = EngineActor(args, 2, tmp_path)
    engine.outcomes, engine.started = {}, []

    def wait_for(reference, *words, **named):
        if engine.outcomes[reference]:
            raise engine.outcomes[reference]

    monkeypatch.setattr(engines_module.ray, "wait", lambda refs, **o: ([r for r in refs if r in engine.outcomes], []))
    monkeypatch.setattr(engines_module, "wait_for", wait_for)
    monkeypatch.setattr(engines_module, "wait_for_all", lambda refs, *words, **named: [wait_for(ref) for ref in refs])
    monkeypatch.setattr(engine, "init", lambda **words: engine.started.append(words) or "http://first")
    yield engine
    engine._store = None


def test_all_parts_meet_at_a_store_that_the_first_one_opens(first_part):
    helper = Helper()
    first_part.outcomes["helper started"] = None
    assert first_part.init_over_nodes([0, 6], [helper]) == "http://first"
    point = f"127.0.0.1:{first_part._store.port}"
    assert first_part.started == [{"base_gpu_id": 0, "part": EnginePart(2, 0, point)}]
    assert helper.parts == [{"base_gpu_id": 6, "part": EnginePart(2, 1, point)}]
    first_part.raise_if_dead()
    first_part.outcomes["helper ended"] = RunError("engine 2 died: its scheduler")
    with pytest.raises(RunError, match="engine 2 died: its scheduler"):
        first_part.raise_if_dead()


@pytest.mark.parametrize(
    ("places", "started"),
    [
        ({3: ("b", 4), 4: ("b", 5), 8: ("c", 0), 9: ("c", 1)}, [4, 0]),
        ({3: ("b", 4), 4: ("b", 6), 8: ("c", 0), 9: ("c", 1)}, "b GPU 4, b GPU 6"),
        ({3: ("b", 4), 4: ("b", 5), 8: ("c", 3), 9: ("d", 4)}, "c GPU 3, d GPU 4"),
    ],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_an_engine_whose_node_was_lost_starts_on_the_devices_that_it_has_then(
    first_part, monkeypatch, places, started, parts
):
    """With the ids of its old ones it would take those of somebody else."""
    asked, over_nodes = [], []
    nodes = [[3, 4], [8, 9]][:parts]

    def locate_bundles(group, indices, seconds):
        asked.append((group, seconds))
        return [places[index] for index in indices]

    monkeypatch.setattr(engines_module, "locate_bundles", locate_bundles)
    monkeypatch.setattr(first_part, "init_over_nodes", lambda *words: over_nodes.append(words) or "http://first")
    helpers = ["helper"] * (parts - 1)
    if isinstance(started, str) and (parts == 2 or "b" in started):
        with pytest.raises(RunError, match=f"engine 2: a node was lost, .* to the devices {started}; it needs consec"):
            first_part.init_where_it_is("group", nodes, helpers)
        assert first_part.started == over_nodes == []
    else:
        assert first_part.init_where_it_is("group", nodes, helpers) == "http://first"
        expected = ([{"base_gpu_id": 4}], []) if parts == 1 else ([], [(started, helpers)])
        assert (first_part.started, over_nodes) == expected
    assert asked == [("group", 5.0)]


def test_all_parts_of_an_engine_with_groups_of_attention_know_the_ports_of_the_first(first_part):
    first_part._args.sglang_enable_dp_attention = True
    first_part.outcomes["helper started"], helper = None, Helper()
    first_part.init_over_nodes([0, 6], [helper])
    told = {words["part"].first_port for words in (*first_part.started, *helper.parts)}
    assert told == {f"127.0.0.1:{first_part._row[0].port}"} and len(first_part._row) == 34
    for reservation in first_part._row:
        reservation.release()


def test_a_part_that_does_not_start_ends_the_start(first_part):
    first_part.outcomes["helper started"] = RunError("engine 2 failed to start: exit code 3")
    with pytest.raises(RunError, match="engine 2 failed to start: exit code 3"):
        first_part.init_over_nodes([0, 6], [Helper()])


@pytest.mark.parametrize("lacking", [None, "the base is another"])
def test_every_host_of_an_engine_fetches_published_weights(first_part, monkeypatch, lacking):
    """Each server reads its own directory: where one host has to have all of them again, all are written again."""
    fetched = []
    monkeypatch.setattr(sglang_engine.SGLangEngine, "fetch_weights", lambda part, path: fetched.append(path))
    monkeypatch.setattr(engines_module, "wait_for_all", lambda refs, *words, **named: [ref() for ref in refs])
    first_part._args.engine_load_timeout = 5.0
    helper = SimpleNamespace(fetch_weights=SimpleNamespace(remote=lambda path: lambda: fetched.append(path) or lacking))
    first_part._helpers = [helper]
    assert first_part.fetch_weights("/published") == lacking
    assert fetched == ["/published"] * 2


@pytest.mark.parametrize(
    ("first", "other", "progress"),
    [
        ((5.0, 5.0), (3.0, 9.0), False), ((5.0, 9.0), (3.0, 3.0), False), ((5.0, 5.0), (3.0, 3.0), None),
        # What stopped has 0: the other one may wait for it with all its might.
        ((5.0, 9.0), (3.0, 0.0), None),
    ],
    ids=["the other part compiles", "the first part compiles", "both hang", "the other part has stopped"],
)  # fmt: skip
def test_an_engine_over_nodes_makes_progress_where_any_part_computes(first_part, monkeypatch, first, other, progress):
    seconds, of_helper = iter(first), iter(other)
    monkeypatch.setattr(sglang_engine, "computing_seconds", lambda pid: next(seconds))
    monkeypatch.setattr(first_part, "_answers", lambda path, timeout: path == "/health")
    first_part._process = SimpleNamespace(pid=1, poll=lambda: None, describe_log=lambda lines: "log")
    first_part._helpers = [SimpleNamespace(computing_seconds=SimpleNamespace(remote=lambda: next(of_helper)))]
    monkeypatch.setattr(engines_module, "wait_for_each", lambda refs, *words, **named: refs)
    if progress is None:
        with pytest.raises(RunError, match="engine 2 hangs: it gave no token within 0.2 s"):
            first_part.makes_progress(0.2)
    else:
        assert first_part.makes_progress(0.2) is progress


@pytest.mark.parametrize(
    ("paths", "ended", "outcome"),
    [
        (["/health_generate", "/health"], None, True),
        (["/health"], None, False),
        ([], None, "engine 2 hangs: .* in which its parts did not say what they computed; log"),
        ([], RunError("engine 2 died: its scheduler"), "engine 2 died: its scheduler"),
    ],
    ids=["the engine answers", "the engine is silent", "its front end hangs", "the other part has died"],
)
def test_a_part_that_does_not_say_what_it_computes_ends_no_engine(first_part, monkeypatch, paths, ended, outcome):
    """It is on a busy machine, perhaps."""
    asked = []
    late = SimpleNamespace(computing_seconds=SimpleNamespace(remote=lambda: asked.append("late") or "late"))
    monkeypatch.setattr(engines_module, "wait_for_each", lambda refs, *words: [RunError("no answer within 5 s")])
    monkeypatch.setattr(sglang_engine, "computing_seconds", lambda pid: 5.0)
    monkeypatch.setattr(first_part, "_answers", lambda path, timeout: path in paths)
    first_part._process = SimpleNamespace(pid=1, poll=lambda: None, describe_log=lambda lines: "log")
    first_part._helpers, first_part._of_helpers = [late], ["helper ended"]
    if ended is not None:
        first_part.outcomes["helper ended"] = ended
    if isinstance(outcome, bool):
        assert first_part.makes_progress(0.2) is outcome
        # Nobody needs to know what an engine computes that answers.
        assert bool(asked) is not outcome
    else:
        with pytest.raises(RunError, match=outcome):
            first_part.makes_progress(0.2)


def test_a_check_that_ends_is_not_overdue():
    beside_its_limit = (
        sglang_engine._IDLE_TOKEN_SECONDS + 2 * engines_module._MEASURE_SECONDS + sglang_engine._HEALTH_SECONDS
    )
    assert beside_its_limit < fleet._ANSWER_SECONDS


def test_what_went_wrong_with_an_order_is_told_of_the_engine_that_it_went_wrong_with(actors, tmp_path, monkeypatch):
    group = EngineGroup("regular", tuple(EngineSpec(number, NODES[:1], number) for number in range(4)))
    topology = Topology((ServedModel("default", True, (group,)),))
    engines = Engines(SimpleNamespace(http_control_timeout=20.0), None, topology, tmp_path, {})
    names = [EngineName(number) for number in (3, 1, 0, 2)]
    for name in names[:3]:
        engines.start(name)
    actors.asked.clear()
    waited, silent = [], RunError("no answer")

    def wait_for_each(refs, what, limit, *, pending):
        waited.append((what, limit, pending([1])))
        # Of three: the one of engine 1 says nothing. What an order returns else is no error.
        return ["done", silent, None]

    monkeypatch.setattr(engines_module, "wait_for_each", wait_for_each)
    found = engines.order(names, "sleep")
    assert [(number, method) for number, method, _, _ in actors.asked] == [(0, "sleep"), (1, "sleep"), (2, "sleep")]
    assert found[names[1]] is silent and found[names[0]] is found[names[2]] is None
    assert str(found[names[3]]) == "engine 2 was ended" and [*found] == names
    assert waited == [("sleep of the engines", 4 * 20.0 + engines_module._ORDER_SECONDS, "engine 1")]


def test_engines_that_hang_are_killed_when_they_have_had_their_time_to_end(actors, tmp_path, monkeypatch):
    engines, waited = make_engines(tmp_path), []
    engines.start(EngineName(0))
    monkeypatch.setattr(engines_module.ray, "wait", lambda refs, **options: waited.append(options) or ([], refs))
    engines.stop([EngineName(0)])
    assert waited == [{"num_returns": 2, "timeout": engines_module._SHUTDOWN_SECONDS}] and len(actors.killed) == 2
