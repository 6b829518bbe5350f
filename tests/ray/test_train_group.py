"""How a rank's process gets its environment, and what the driver hears of ranks that fail."""

import argparse
import gc
import multiprocessing.util
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from slime.arguments.checkpoints import WeightSource
from slime.observability import logging_utils
from slime.observability.waiting import wait_for
from slime.ray import train_group
from slime.ray.driver import RolloutResult, RunLength, RunProgress, StartedRun, StepReport
from slime.ray.train_group import EndingTrainGroup, RankProcess, TrainGroup
from slime.scheduling.device_turns import Holds
from slime.utils.env import READ_AT_PROCESS_START
from slime.utils.errors import RunError, UserError
from tests.support.processes.local_ray import start_ray
from tests.support.processes.waiting import wait_until

SECRET = "value-that-nobody-may-read"


class _SeenWhenUnpickled:
    """Stands for what imports torch: notes the environment at the moment in which it is unpickled, and whether garbage is
    collected then."""

    def __init__(self, found: str | None = None):
        self.found, self.collects = found, gc.isenabled()

    def __reduce__(self):
        return _look, ()


def _look() -> _SeenWhenUnpickled:
    return _SeenWhenUnpickled(os.environ.get("RANK_TEST_TOKEN"))


class _Rank:
    def __init__(self, args, rank, world_size, device):
        # As its functions of the user's, which are given arguments alone, find the first number.
        assert args.rank == rank
        self.seen = (args.model.found, rank, world_size, device)
        self.collects = [args.model.collects, gc.isenabled()]

    def what_was_seen(self):
        return self.seen

    def dispose(self):
        self.seen = None


@pytest.fixture(autouse=True)
def own_temporary_directory(monkeypatch, tmp_path):
    """As a rank's process has one: what it sets for multiprocessing holds for this test only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)


def test_variables_are_set_before_anything_of_the_rank_is_unpickled(monkeypatch):
    monkeypatch.delenv("RANK_TEST_TOKEN", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    args = argparse.Namespace(model=_SeenWhenUnpickled(), role="actor")
    process = RankProcess({"RANK_TEST_TOKEN": SECRET}, ray.cloudpickle.dumps((_Rank, args, 2, 4, 1)))
    assert process.call("what_was_seen") == (SECRET, 2, 4, 1)
    assert repr(process) == "rank 2"
    assert process._rank.collects == [False, False] and gc.isenabled(), "what is imported is looked through meanwhile"


def test_a_rank_whose_class_does_not_load_has_a_name_for_the_error():
    """Ray asks for it when it reports why the actor did not start."""
    process = RankProcess.__new__(RankProcess)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        process.__init__({}, b"\x80\x04cno_such_module\nRank\n.")
    assert repr(process) == "a rank"


def test_what_multiprocessing_makes_goes_with_the_rank(tmp_path):
    args = argparse.Namespace(model=_SeenWhenUnpickled(), role="actor")
    process = RankProcess({}, ray.cloudpickle.dumps((_Rank, args, 0, 1, 0)))
    made = Path(multiprocessing.util.get_temp_dir())
    assert made.is_dir() and tmp_path in made.parents
    process.leave()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["LD_PRELOAD", "PYTHONHASHSEED", "TCMALLOC_RELEASE_RATE", "NUMEXPR_MAX_THREADS", "RAY_BACKEND_LOG_LEVEL",
     "RAY_AUTH_TOKEN_PATH", *(f"{prefix}ANYTHING" for prefix in READ_AT_PROCESS_START)],
)  # fmt: skip
def test_what_a_process_reads_when_it_starts_is_there_when_it_starts(name):
    at_start, inside = environments({name: 7})
    assert at_start[name] == inside[name] == "7"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "PYTHON_KEYRING_TOKEN", "RAY_AUTH_TOKEN", "RAY_REDIS_PASSWORD"],
)
def test_everything_else_is_kept_from_ray(name):
    at_start, inside = environments({name: SECRET})
    assert name not in at_start and inside == {name: SECRET}


def test_a_typed_variable_wins_over_ours_of_the_same_name():
    assert environments({"NCCL_CUMEM_ENABLE": 1})[1] == {"NCCL_CUMEM_ENABLE": "1"}


def test_what_travels_beside_computation_does_not_queue_up_with_it():
    name, overlaps = "CUDA_DEVICE_MAX_CONNECTIONS", {"overlap_moe_expert_parallel_comm": True}
    assert environments({})[0][name] == "1"
    assert environments({}, **overlaps)[0][name] == environments({}, train_backend="fsdp")[0][name] == "32"


def test_ranks_on_all_nodes_get_what_the_libraries_find_in_our_environment(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    at_start, _ = environments({})
    assert at_start["NCCL_SOCKET_IFNAME"] == "eth7" and at_start["NCCL_CUMEM_ENABLE"] == "0"


def test_scales_of_fp8_blocks_are_those_of_engines_unless_another_is_asked_for(monkeypatch):
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    monkeypatch.delenv(name, raising=False)
    assert environments({})[0][name] == "1"
    monkeypatch.setenv(name, "0")
    assert environments({})[0][name] == "0"
    at_start, inside = environments({name: "1"})
    assert {**at_start, **inside}[name] == "1"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "0"}, {}),
        ({"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"},
         {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}),
    ],
)  # fmt: skip
def test_the_allocator_of_ranks_grows_its_segments_on_request(monkeypatch, variables, expected):
    names = ("SLIME_ENABLE_EXPANDABLE_SEGMENTS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(name, raising=False)
    at_start, _ = environments({})
    assert {name: at_start[name] for name in names if name in at_start} == expected


def test_transformer_engine_is_told_of_the_deterministic_mode_before_it_is_imported(monkeypatch):
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    monkeypatch.setenv(name, "1")
    assert environments({}, deterministic_mode=True)[0][name] == "0"
    monkeypatch.delenv(name)
    assert name not in environments({})[0]


def test_collectives_add_in_one_order_in_the_deterministic_mode_unless_another_is_asked_for(monkeypatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    assert "NCCL_ALGO" not in environments({})[0]
    assert environments({}, deterministic_mode=True)[0]["NCCL_ALGO"] == "Ring"
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert environments({}, deterministic_mode=True)[0]["NCCL_ALGO"] == "Tree"
    at_start, inside = environments({"NCCL_ALGO": "CollnetChain"}, deterministic_mode=True)
    assert {**at_start, **inside}["NCCL_ALGO"] == "CollnetChain"


@pytest.mark.parametrize(
    ("address", "said", "threads"),
    [
        # Four ranks a node, of a run that has six: on nodes of 32 cores and of 3.
        ("auto", None, [8, 8, 8, 8, 1, 1]),
        (None, None, [2, 2, 2, 2, 2, 2]),
        ("auto", "5", [5, 5, 5, 5, 5, 5]),
        (None, "5", [5, 5, 5, 5, 5, 5]),
    ],
)
def test_a_rank_has_a_share_of_the_cores_of_its_own_node_or_the_threads_that_the_user_says(
    monkeypatch, address, said, threads
):
    """Each node is asked once, also if ranks are started again; a Ray of the run's own is on this machine."""
    for name, value in (("RAY_ADDRESS", address), ("OMP_NUM_THREADS", said), ("RAY_JOB_CONFIG_JSON_ENV_VAR", None)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    nodes = {bundle: "large" if bundle in (3, 5, 7, 9) else "small" for bundle in range(12)}
    asked = []
    monkeypatch.setattr(train_group, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(train_group, "_beside", lambda group, bundle: {"node": nodes[bundle]})
    asking = lambda node: SimpleNamespace(remote=lambda: asked.append(node) or {"large": 32, "small": 3}[node])  # noqa: E731
    monkeypatch.setattr(train_group.ray, "remote", lambda function: SimpleNamespace(options=asking))
    monkeypatch.setattr(train_group, "wait_for_all", lambda refs, name, limit: refs)
    monkeypatch.setattr(train_group, "_cores", lambda: 11)
    group = TrainGroup(
        argparse.Namespace(actor_num_gpus_per_node=4), "group", [(bundle, 0) for bundle in (3, 5, 7, 9, 0, 1)]
    )
    assert group._threads == group._threads == threads
    assert sorted(asked) == (["large", "small"] if address and not said else [])


@pytest.mark.parametrize(("typed", "threads"), [({}, "7"), ({"OMP_NUM_THREADS": 5}, "5")])
def test_a_rank_starts_with_the_threads_of_train_env_vars_where_they_say_some(monkeypatch, typed, threads):
    given, asked = [], SimpleNamespace(remote=lambda *arguments: None)

    def options(**options):
        given.append(options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"])
        return SimpleNamespace(remote=lambda *arguments: type("Rank", (), {"call": asked, "call_after": asked}))

    monkeypatch.setattr(train_group.ray, "remote", lambda rank_class: SimpleNamespace(options=options))
    monkeypatch.setattr(TrainGroup, "_threads", [7])
    monkeypatch.setattr(train_group, "name_actors", lambda names: None)
    group_of(typed).start()
    assert given == [threads]


def environments(typed: dict, **changes):
    return group_of(typed, **changes)._environments()


def group_of(typed: dict, **changes):
    flags = {
        "deterministic_mode": False,
        "overlap_moe_expert_parallel_comm": False,
        "train_backend": "megatron",
        **changes,
    }
    args = argparse.Namespace(
        **flags, actor_num_gpus_per_node=1, train_env_vars=typed, has_trainer=True, has_engines=True,
        sglang_enable_nccl_nvls=None,
    )  # fmt: skip
    return TrainGroup(args, None, [(0, 0)])


class _Tracker:
    def __init__(self):
        self.told = []

    def add_scalars(self, numbers, axis, step):
        self.told.append((axis, step, numbers))


@pytest.fixture(scope="module")
def make_group():
    """Groups of two ranks, on a real Ray, that log two steps of a rollout and then end it as the shards say."""
    start_ray(num_cpus=2, num_gpus=2)
    placement = ray.util.placement_group([{"CPU": 1, "GPU": 1}] * 2)
    args = argparse.Namespace(
        actor_num_gpus_per_node=2,
        train_env_vars={},
        deterministic_mode=False,
        overlap_moe_expert_parallel_comm=False,
        train_backend="megatron",
        has_trainer=True,
        has_engines=False,
        colocate=False,
        train_start_timeout=300.0,
        role="actor",
        **NOTHING_TO_LOAD,
    )

    class Rank:
        def __init__(self, args, rank, world_size, device):
            self.rank = rank

        def rendezvous_address(self):
            return None

        def init(self, rendezvous):
            return 0

        def train(self, rollout_id, endings):
            import threading

            from slime.utils.errors import RunError

            self.logged = [
                ({"train/loss": float(step), "train/step": 2 * rollout_id + step}, "train/step") for step in range(2)
            ]
            if endings[self.rank] == "dies":
                os._exit(7)
            if endings[self.rank] == "hangs":
                threading.Event().wait(600)
            if endings[self.rank] is not None:
                raise RunError(endings[self.rank])
            return self.logged

        def dispose(self):
            pass

    class RankOfOurs(Rank):
        def take_logged(self):
            return self.logged

    class RankOfAUser(Rank):
        def train(self, rollout_id, endings):
            from slime.observability.logging_utils import drain_outbox, log

            try:
                super().train(rollout_id, endings)
            finally:
                for metrics, step_key in self.logged:
                    log(None, metrics, step_key)
            return drain_outbox()

    yield lambda of_a_user=False: TrainGroup(
        args, placement, [(0, 0), (1, 1)], RankOfAUser if of_a_user else RankOfOurs
    )
    ray.shutdown()


HANGS = ("hangs", "out of memory"), "^out of memory$"
# What the death of one does to the others, in a collective.
DIES = ("connection lost", "dies"), "connection lost|a process of the run died"
OTHERS = [pytest.param(*row, marks=pytest.mark.slow) for row in ((*HANGS, False), (*DIES, True))]


@pytest.mark.parametrize("endings, message, of_a_user", [(*HANGS, True), (*DIES, False), *OTHERS])
def test_what_ranks_logged_before_a_failure_reaches_the_trackers(make_group, monkeypatch, endings, message, of_a_user):
    tracker, group = _Tracker(), make_group(of_a_user)
    monkeypatch.setattr(logging_utils, "_trackers", [tracker])
    checked = {"ci_test": False, "ci_save_grad_norm": None, "ci_load_grad_norm": None}
    checked |= {"num_steps_per_rollout": 1, "log_interval": 1}
    args = argparse.Namespace(loss_type="policy_loss", initial_weights=None, save=None, **checked)
    report = StepReport(args, StartedRun(None, group, RunLength(8), 0), RunProgress())
    try:
        group.create()
        with report.step(3):
            group.train(3, RolloutResult((None, None), [], None), report.add)
        with pytest.raises(RunError, match=message), report.step(4):
            group.train(4, RolloutResult(endings, [], None), report.add)
    finally:
        group.kill()
    losses = [(step, numbers["train/loss"]) for axis, step, numbers in tracker.told if axis == "train/step"]
    assert losses == [(6, 0.0), (7, 1.0), (8, 0.0), (9, 1.0)]


def test_ranks_build_their_model_when_what_they_wait_for_is_ready(make_group, tmp_path):
    """On devices that they share with engines: when these sleep."""

    @ray.remote(num_cpus=0)
    def asleep(sign):
        wait_until(lambda: os.path.exists(sign))

    group, other, sign = make_group(), make_group(), tmp_path / "asleep"
    try:
        group.start(after=asleep.remote(str(sign)))
        other.create()
        # It started later, waits for nothing, and is there.
        assert ray.wait(group.starting, timeout=0.5)[0] == []
        sign.touch()
        assert group.wait_ready() == 0
    finally:
        group.kill()
        other.kill()


def test_a_rank_that_dies_while_it_has_nothing_to_do_ends_whatever_is_awaited(make_group):
    group = make_group()
    try:
        group.create()
        pid = ray.get(group._actors[1].__ray_call__.remote(lambda rank: os.getpid()), timeout=30)
        never = ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"^generation of rollout 1: .* died\. It was training rank 1\. "):
            wait_for(never, "generation of rollout 1", 60)
        ray.cancel(never, force=True)
    finally:
        group.kill()
    assert wait_for(ray.put(1), "what follows", 60) == 1, "a group that was killed is not watched"


NOTHING_TO_LOAD = {
    "initial_weights": WeightSource("random"), "ref_load": None, "ref_ckpt_step": None, "opd_teacher_load": None,
    "opd_teacher_ckpt_step": None,
}  # fmt: skip


class Ranks:
    """Stands for the Ray actors of a group: what they are asked."""

    def __init__(self, monkeypatch, **flags):
        self.told, self.created_with = [], []
        values = {"colocate": True, "save": "/s", "no_load_optim": True, "no_load_rng": True, "finetune": True,
                  "train_start_timeout": 7.0, "distributed_timeout_minutes": 1}  # fmt: skip
        args = argparse.Namespace(**{**values, **NOTHING_TO_LOAD, **flags})
        self.group = EndingTrainGroup(args, None, [(0, 0)])

        def start(group, after=None):
            self.created_with.append(group._args)
            group._actors = [self]

        def call(group, method, *arguments, **limit):
            assert group.lives
            self.told.append((method, *arguments))
            if method == "weights_pushed":
                return [None, "the chain"]
            return [[({"train/loss": 1.0}, "train/step")]]

        def end(group):
            self.told.append("end")
            group.dispose()

        monkeypatch.setattr(TrainGroup, "start", start)
        self.loaded: int | None = None
        monkeypatch.setattr(TrainGroup, "wait_ready", lambda group: self.wait_ready(group))
        monkeypatch.setattr(TrainGroup, "dispose", lambda group: group._actors.clear())
        monkeypatch.setattr(TrainGroup, "_call_all", call)
        monkeypatch.setattr(TrainGroup, "_call_first", call)
        monkeypatch.setattr(EndingTrainGroup, "_end", end)
        monkeypatch.setattr(EndingTrainGroup, "_claim_directory", lambda group: self.told.append("claim") or self)
        monkeypatch.setattr(EndingTrainGroup, "_give_directory_back", lambda group: None)
        self.group.create()

    def wait_ready(self, group):
        source = group._args.initial_weights
        return 1 + (source.step if source.resume else -1) if self.loaded is None else self.loaded


def test_ranks_that_end_are_created_from_where_the_run_starts_and_later_from_its_last_checkpoint(monkeypatch):
    ranks = Ranks(monkeypatch)
    group, first = ranks.group, ranks.created_with[0]
    group.open_weight_push()
    for holds in (Holds.WEIGHTS, Holds.NOTHING, Holds.ALL):
        group.hold(holds)
    assert ranks.created_with[1] is first
    # No engine has had weights yet.
    assert ranks.told == [
        "claim",
        ("open_weight_push",),
        ("hold", Holds.WEIGHTS),
        "end",
        ("open_weight_push",),
        ("hold", Holds.ALL),
    ]
    group.save(4)
    group.publish(4)
    group.weights_pushed(7)
    ranks.told.clear()
    for holds in (Holds.NOTHING, Holds.NOTHING, Holds.WEIGHTS):
        group.hold(holds)
    assert ranks.told == ["end", "end", ("continue_weight_pushes", 7, "the chain"), ("hold", Holds.WEIGHTS)]
    args = ranks.created_with[2]
    source = args.initial_weights
    assert (source.kind, source.path, source.step, source.resume) == ("megatron", "/s", 4, True)
    assert (args.no_load_optim, args.no_load_rng, args.finetune) == (False, False, False)
    assert first.initial_weights.kind == "random" and first.finetune, "nobody writes into arguments"


def test_ranks_load_what_the_first_of_them_loaded_although_newer_checkpoints_are_there(monkeypatch, tmp_path):
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    pointer.write_text("3")
    directory = str(tmp_path)
    flags = {
        "ref_load": directory,
        "opd_teacher_load": directory,
        "initial_weights": WeightSource("megatron", directory),
    }
    ranks = Ranks(monkeypatch, **flags)
    pointer.write_text("4")
    ranks.group.hold(Holds.NOTHING)
    ranks.group.hold(Holds.ALL)
    for args in ranks.created_with:
        assert (args.initial_weights.step, args.ref_ckpt_step, args.opd_teacher_ckpt_step) == (3, 3, 3)
    given = Ranks(monkeypatch, ref_load=directory, ref_ckpt_step=2).created_with[0]
    assert given.ref_ckpt_step == 2 and given.opd_teacher_ckpt_step is None


def test_ranks_that_would_train_another_rollout_than_is_next_end_the_run(monkeypatch):
    ranks = Ranks(monkeypatch)
    ranks.group.save(4)
    ranks.group.publish(4)
    ranks.group.hold(Holds.NOTHING)
    ranks.loaded = 3
    with pytest.raises(
        RunError, match=r"would train rollout 3, and rollout 5 is next: /s \(checkpoint\) is not what it was"
    ):
        ranks.group.hold(Holds.ALL)


def test_ranks_that_keep_their_weights_only_are_replaced_before_a_training(monkeypatch):
    ranks = Ranks(monkeypatch)
    for holds in (Holds.WEIGHTS, Holds.WEIGHTS, Holds.ALL, Holds.ALL):
        ranks.group.hold(holds)
    weights, everything = ("hold", Holds.WEIGHTS), ("hold", Holds.ALL)
    assert ranks.told == [weights, weights, "end", "claim", ("open_weight_push",), everything, everything]


def test_ranks_with_devices_of_their_own_hold_all_while_they_live(monkeypatch):
    ranks = Ranks(monkeypatch, colocate=False)
    for holds in (Holds.WEIGHTS, Holds.NOTHING, Holds.ALL, Holds.WEIGHTS):
        ranks.group.hold(holds)
    assert ranks.told == ["end", "claim", ("open_weight_push",)]


def test_a_process_that_does_not_end_is_an_error_that_names_it_and_another_of_its_number_is_none():
    name, created = "training rank 2", psutil.Process().create_time()
    message = (
        f"^training rank 2 has been killed, and 0.01 s later its process {os.getpid()} is still there.* start the run"
    )
    with pytest.raises(RunError, match=message):
        train_group._wait_until_gone(name, (os.getpid(), created), 0.01)
    train_group._wait_until_gone(name, (os.getpid(), created - 100.0), 0.01)
    with subprocess.Popen(["true"]) as ended:
        pass
    train_group._wait_until_gone(name, (ended.pid, created), 0.01)


def test_another_run_is_refused_the_directory_of_pushes_while_no_rank_lives(make_group, monkeypatch, tmp_path):
    ranks = make_group()
    args = argparse.Namespace(
        **vars(ranks._args), update_weight_disk_dir=str(tmp_path / "pushes"), distributed_timeout_minutes=1.0
    )
    run, another = (EndingTrainGroup(args, ranks._group, ranks._places) for _ in range(2))
    monkeypatch.setattr(TrainGroup, "open_weight_push", lambda group: None)
    try:
        run.open_weight_push()
        run.open_weight_push()
        with pytest.raises(UserError, match=r"^--update-weight-disk-dir .*pushes: another run pushes"):
            another.open_weight_push()
        run._pushed = 3, "the chain"
        with pytest.raises(RunError, match="weight_v000003 holds no weights of a push"):
            run.require_files()
    finally:
        run.kill()
    assert run._directory is None


@pytest.mark.slow
def test_processes_of_ranks_that_end_are_gone_and_what_they_had_logged_is_not(make_group, monkeypatch):
    of_a_user = make_group(of_a_user=True)
    group = EndingTrainGroup(of_a_user._args, of_a_user._group, of_a_user._places, of_a_user._actor_cls)
    monkeypatch.setattr(EndingTrainGroup, "open_weight_push", lambda group: None)
    told = []
    try:
        group.create()
        pids = [pid for pid, _ in ray.get([actor.identity.remote() for actor in group._actors], timeout=30)]
        ray.get(group._actors[0].__ray_call__.remote(_log_something), timeout=30)
        group.hold(Holds.NOTHING)
        assert not group.lives and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        group.hold(Holds.NOTHING)
        group.hold(Holds.ALL)
        group.train(3, RolloutResult((None, None), [], None), told.extend)
    finally:
        group.kill()
    left, seconds = told[:2]
    assert left == ({"user/hook": 1.0, "rollout/step": 2}, "rollout/step")
    assert (
        seconds[0]["perf/start_trainer_time"] > 0 < seconds[0]["perf/end_trainer_time"]
        and seconds[0]["rollout/step"] == 3
    )
    assert [metrics["train/loss"] for metrics, _ in told[2:]] == [0.0, 1.0]


def _log_something(process):
    from slime.observability.logging_utils import log

    log(None, {"user/hook": 1.0, "rollout/step": 2}, "rollout/step")


class _RankOfSomebody:
    """Is named in messages alone."""


@pytest.mark.parametrize("logged", [[({"loss": 0.5}, "step")], [[{"loss": 0.5}, "step"]], (({"loss": 0.5}, "step"),)])
def test_what_a_rank_of_a_users_logs_may_be_lists_or_tuples(monkeypatch, logged):
    assert _reported(monkeypatch, logged) == [({"loss": 0.5}, "step")]


@pytest.mark.parametrize(
    "logged", [None, {"loss": 0.5}, [{"loss": 0.5}], [({"loss": 0.5}, 3)], [({"loss": 0.5}, "step", 1)]]
)
def test_anything_else_that_it_logs_is_told_with_its_class(monkeypatch, logged):
    with pytest.raises(RunError, match=r"expected a list of \(metrics, step key\).*test_train_group._RankOfSomebody"):
        _reported(monkeypatch, logged)


def _reported(monkeypatch, logged):
    monkeypatch.setattr(TrainGroup, "_call_all", lambda group, method, *arguments: [logged, logged])
    reported = []
    group = TrainGroup(argparse.Namespace(), None, [], _RankOfSomebody)
    group.train(0, RolloutResult((None, None), [], None), reported.extend)
    return reported
