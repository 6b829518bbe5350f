"""Our own Ray: who can read its token, who can reach it, and how large its object store is."""

import contextlib
import copy
import itertools
import os
import resource
import socket
import stat
import subprocess
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest
import ray

from slime.observability import waiting
from slime.ray import cluster
from slime.ray.cluster import object_store_bytes
from slime.utils.errors import RunError, UserError
from tests.support.models.args import parse
from tests.support.tables.plans import SMALL, TWO_NODES, planned

GIB, MIB = 2**30, 2**20
Usage = namedtuple("Usage", "free")


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # What `mkdir` and `open` leave to the user's umask must not matter.
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_that_is_made_can_be_read_by_its_owner_only(home):
    cluster.settle_token()
    token = home / ".ray/auth_token"
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_a_token_that_is_there_is_kept_and_closed_to_others(home):
    token = home / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("a" * 64)
    token.chmod(0o644)
    cluster.settle_token()
    assert (mode(token), token.read_text()) == (0o600, "a" * 64)


def test_a_token_that_finds_no_room_is_told_and_leaves_nothing(home):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Files grow no further than this, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(RunError) as told:
            cluster.settle_token()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(home / ".ray/auth_token") in str(told.value) and "RAY_AUTH_TOKEN" in str(told.value)
    assert list((home / ".ray").iterdir()) == []
    cluster.settle_token()
    assert len((home / ".ray/auth_token").read_text()) == 64


@pytest.mark.parametrize(
    "name, value",
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t" * 64), ("RAY_AUTH_TOKEN_PATH", "/somewhere/token")],
)
def test_a_token_from_elsewhere_makes_no_file(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    cluster.settle_token()
    assert list(home.iterdir()) == []


@pytest.fixture
def starting_node(monkeypatch):
    """A node of the id 7 that is there when it has been looked for as often as the test says."""

    def start_after(looks):
        tables = itertools.chain([[]] * looks, itertools.repeat([{"NodeID": "7"}]))
        state = SimpleNamespace(_initialize_global_state=lambda options: None, node_table=lambda: next(tables))

        def get_node(address, node_id):
            if any(node["NodeID"] == node_id for node in next(tables)):
                return {"node_id": node_id}
            raise RuntimeError("not there")

        monkeypatch.setattr(cluster, "GlobalState", lambda: state)
        monkeypatch.setattr(cluster.services, "_get_gcs_client_options", lambda address: None)
        monkeypatch.setattr(cluster.services, "get_node", get_node)
        monkeypatch.setattr(cluster, "_NODE_POLL_SECONDS", 0.001)

    return start_after


def test_a_node_that_is_slow_to_start_is_waited_for(starting_node):
    starting_node(looks=3)
    plain = cluster.services.get_node
    with cluster._patience_with_node():
        assert cluster.services.get_node("address", "7") == {"node_id": "7"}
    assert cluster.services.get_node is plain


def test_a_node_that_never_starts_is_given_up(starting_node, monkeypatch):
    starting_node(looks=10**6)
    monkeypatch.setattr(cluster, "_NODE_SECONDS", 0.05)
    with cluster._patience_with_node(), pytest.raises(RuntimeError, match="not there"):
        cluster.services.get_node("address", "7")


@pytest.fixture
def machine(monkeypatch):
    def set_sizes(memory, shared):
        monkeypatch.setattr(ray._private.utils, "get_system_memory", lambda: memory)
        monkeypatch.setattr(psutil, "disk_usage", lambda path: Usage(shared))

    return set_sizes


def test_the_object_store_takes_the_train_batch_of_a_step(machine, caplog):
    machine(memory=1024 * GIB, shared=512 * GIB)
    assert object_store_bytes(planned(SMALL)) == 512 * MIB, "the least, for a batch of 32 MiB"
    large = planned(SMALL, "--rollout-batch-size", "1024")
    assert object_store_bytes(planned(TWO_NODES)) == 512 * MIB
    assert object_store_bytes(large) == 1.25 * 8192 * 8192 * 16
    large.asynchronous, large.async_buffer_size = True, 2
    assert object_store_bytes(large) == 3 * 1.25 * 8192 * 8192 * 16, "two more wait while one is trained"
    large.rollout_data_transport = "nixl"
    assert object_store_bytes(large) == 512 * MIB, "the manager has them"
    large.use_critic = True
    assert object_store_bytes(large) > 512 * MIB, "its columns lie in the store"
    assert "object store" not in caplog.text


@pytest.mark.parametrize(
    "memory, shared, granted, source",
    [
        (4 * GIB, 512 * GIB, int(0.3 * 4 * GIB), "30% of the memory"),
        (64 * GIB, GIB, int(0.95 * GIB), "what is free in /dev/shm"),
        # As in a container that was given none: Ray puts its store on disk and says so.
        (64 * GIB, 64 * MIB, 512 * MIB, "what is free in /dev/shm"),
    ],
)
def test_a_machine_with_less_gives_what_it_has_and_the_warning_has_both_numbers(
    machine, caplog, memory, shared, granted, source
):
    machine(memory, shared)
    large = planned(SMALL, "--rollout-batch-size", "1024")
    assert object_store_bytes(large) == granted
    assert f"may take 1.2 GiB of Ray's object store, which gets {granted / GIB:.1f} GiB ({source})" in caplog.text
    assert object_store_bytes(planned(SMALL)) == 512 * MIB
    assert "--rollout-top-k" not in caplog.text


def test_sets_of_kept_tokens_need_room_and_the_warning_names_their_flag(machine, caplog):
    machine(memory=4 * GIB, shared=512 * GIB)
    assert object_store_bytes(planned(SMALL, "--rollout-top-k", "400")) == int(0.3 * 4 * GIB)
    assert "may take 4.0 GiB" in caplog.text and "lower --rollout-batch-size, --rollout-top-k" in caplog.text


def test_a_ray_of_our_own_starts_on_loopback_with_a_closed_token_and_a_store_for_the_plan(home, machine, monkeypatch):
    machine(memory=1024 * GIB, shared=512 * GIB)
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: 8)
    started = {}

    def init(**options):
        token = home / ".ray/auth_token"
        started.update(options, several_nodes=cluster.ray_constants.ENABLE_RAY_CLUSTER)
        started["token"] = mode(token) if token.exists() else "none"

    monkeypatch.setattr(ray, "init", init)
    before = cluster.ray_constants.ENABLE_RAY_CLUSTER
    args = planned(SMALL, "--rollout-batch-size", "1024")
    cluster._start_local(args, cluster.plan_cluster(args))
    assert started["object_store_memory"] == object_store_bytes(args) > 512 * MIB
    assert (started["several_nodes"], started["token"]) == (False, 0o600)
    assert cluster.ray_constants.ENABLE_RAY_CLUSTER is before


def test_a_head_that_takes_connections_and_says_nothing_is_not_asked_for_long(monkeypatch):
    asked = []

    def init(**options):
        asked.append(cluster.ray_constants.NUM_REDIS_GET_RETRIES)
        raise RuntimeError("Failed to connect to GCS")

    before = cluster.ray_constants.NUM_REDIS_GET_RETRIES
    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match=f"^RAY_ADDRESS={address}: no Ray cluster answers there: Failed to connect"):
            cluster._join(address, None)
    assert asked == [2] and cluster.ray_constants.NUM_REDIS_GET_RETRIES == before > 2


def test_a_process_of_ray_that_ends_while_agents_are_looked_for_is_none(monkeypatch):
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        gone = psutil.Process(sleeper.pid)
        sleeper.kill()
    raylet = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(all_processes={"raylet": [raylet]}))
    monkeypatch.setattr(psutil.Process, "children", lambda process: [gone])
    with cluster._agents_follow_driver():
        assert not gone.is_running()


@pytest.mark.parametrize(("output", "errors", "plain"), [(True, True, None), (True, False, "0"), (False, True, "0")])
def test_names_of_processes_are_coloured_for_people_only(monkeypatch, output, errors, plain):
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "RAY_" not in name})
    monkeypatch.setattr(cluster, "_start_local", lambda args, plan: None)
    monkeypatch.setattr(cluster, "_agents_follow_driver", contextlib.nullcontext)
    for stream, watched in (("stdout", output), ("stderr", errors)):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda watched=watched: watched)
    with cluster.ray_cluster(planned(SMALL)):
        assert os.environ.get("RAY_COLOR_PREFIX") == plain


_GPUS, _LOGICAL = {"GPU": 4.0, "accelerator_type:H200": 1.0}, {"GPU": 4.0}


@pytest.fixture
def joined(monkeypatch):
    """A cluster with the resources that the function is given is at `RAY_ADDRESS`; this machine has no GPUs."""
    monkeypatch.setattr(os, "environ", {**os.environ, "RAY_ADDRESS": "auto"})
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    monkeypatch.setattr("slime.arguments.sizes.gpus_on_this_machine", lambda: 0)
    monkeypatch.setattr(cluster, "_join", lambda address, plan: None)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True}, {"Alive": False}])
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    return lambda resources: monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)


@pytest.mark.parametrize(
    ("resources", "forced", "precision"),
    [
        (_GPUS, None, "bfloat16"),
        (_LOGICAL, None, "float32"),
        (_GPUS, "cpu", "float32"),
        (_LOGICAL, "cuda", "bfloat16"),
    ],
)
def test_the_precision_follows_the_devices_of_the_cluster_that_is_joined(
    joined, monkeypatch, tmp_path, resources, forced, precision
):
    """Whatever the driver's own machine has. Arguments that were parsed stay as they are."""
    joined(resources)
    if forced is not None:
        monkeypatch.setenv("SLIME_ACCELERATOR", forced)
    args = parse(tmp_path, "--check-weight-update-equal")
    parsed = copy.deepcopy(vars(args))
    with cluster.ray_cluster(args) as of_cluster:
        found = of_cluster.params_dtype_name, of_cluster.bf16, of_cluster.accumulate_allreduce_grads_in_fp32
        assert found == (precision, precision == "bfloat16", precision == "bfloat16")
        assert of_cluster.origins["params_dtype_name"] == "derived"
    assert vars(args) == parsed


@pytest.mark.parametrize(
    ("gpus", "counted", "precision"), [(4, 4.0, "bfloat16"), (4, 0.0, "float32"), (0, 4.0, "float32")]
)
def test_gpus_of_this_machine_whose_type_ray_does_not_know_are_gpus(
    joined, monkeypatch, tmp_path, gpus, counted, precision
):
    """Where Ray counts them; it may count devices that are none, too."""
    joined(_LOGICAL)
    nodes = [{"NodeID": "own", "Alive": True, "Resources": {"GPU": counted}}]
    nodes.append({"NodeID": "other", "Alive": True, "Resources": {"GPU": 4.0}})
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: gpus)
    with cluster.ray_cluster(parse(tmp_path)) as of_cluster:
        assert of_cluster.params_dtype_name == precision


def test_what_is_watched_in_a_cluster_is_forgotten_with_it(joined, monkeypatch, tmp_path):
    """A start of the run after it would ask those whom only the cluster before it knew."""
    monkeypatch.setattr(waiting, "_watched", [])
    monkeypatch.setattr(waiting, "_asked", {})
    joined(_GPUS)
    with pytest.raises(RunError, match="a rank died"), cluster.ray_cluster(parse(tmp_path)):
        waiting.watch([object()])
        waiting.watch_actors([object()])
        raise RunError("a rank died")
    assert not waiting._watched and not waiting._asked


def test_flags_that_only_some_devices_take_are_refused_when_the_cluster_shows_its_own(joined, tmp_path):
    in_16_bits = "--main-grads-dtype bf16 --use-precision-aware-optimizer --use-distributed-optimizer"
    words = {
        in_16_bits: "--main-grads-dtype bf16 needs --bf16",
        "--grad-reduce-in-bf16": "--grad-reduce-in-bf16 has nothing to act on without --bf16",
    }
    for typed, refusal in words.items():
        args = parse(tmp_path, *typed.split())
        joined(_GPUS)
        with cluster.ray_cluster(args) as of_cluster:
            assert not of_cluster.accumulate_allreduce_grads_in_fp32, "gradients in bfloat16 were asked for"
        joined(_LOGICAL)
        with pytest.raises(UserError, match=f"^{refusal}"), cluster.ray_cluster(args):
            pass
    args = parse(tmp_path, "--colocate", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2")
    with cluster.ray_cluster(args):
        pass
    joined(_GPUS)
    with (
        pytest.raises(UserError, match="an engine would have the GPUs 0 to 1 of the run"),
        cluster.ray_cluster(args),
    ):
        pass


def test_what_ranks_write_for_engines_of_other_nodes_needs_a_directory_that_all_see(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True}] * 2)
    ended = []
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(UserError, match="^--check-weight-update-equal on a cluster of 2 nodes needs --save: "):
        cluster._require_shared_directory(planned(SMALL, "--check-weight-update-equal"))
    assert ended == [True]
    cluster._require_shared_directory(planned(SMALL))
    cluster._require_shared_directory(planned(SMALL, "--check-weight-update-equal", "--save", str(tmp_path)))


@pytest.mark.parametrize(
    ("have", "told"),
    [({"GPU": 1.0, "CPU": 64.0}, "1 GPUs and 64 CPUs"), ({"GPU": 64.0, "CPU": 1.0}, "64 GPUs and 1 CPUs"), ({}, "0 GPUs and")],
)  # fmt: skip
def test_a_cluster_that_is_too_small_is_left_and_both_numbers_are_told(monkeypatch, have, told):
    monkeypatch.setattr(cluster, "_require_listener", lambda address: None)
    monkeypatch.setattr(cluster, "_answers_on_loopback_only", lambda address: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **options: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: have)
    left = []
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: left.append(True))
    plan = cluster.plan_cluster(planned(SMALL))
    needs = f"^the run needs {plan.gpus} GPUs .* and {plan.cpus} CPUs, but the cluster at 10.0.0.1:6379 has {told}"
    with pytest.raises(UserError, match=needs):
        cluster._join("10.0.0.1:6379", plan)
    assert left == [True]


def test_a_node_with_several_addresses_joins_under_the_one_that_is_given(monkeypatch):
    asked = {}
    monkeypatch.setenv("SLIME_HOST_IP", "10.0.0.7")
    monkeypatch.setattr(cluster, "_require_listener", lambda address: None)
    monkeypatch.setattr(cluster, "_answers_on_loopback_only", lambda address: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **options: asked.update(options))
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"GPU": 64.0, "CPU": 64.0})
    cluster._join("10.0.0.1:6379", cluster.plan_cluster(planned(SMALL)))
    assert (asked["address"], asked["_node_ip_address"]) == ("10.0.0.1:6379", "10.0.0.7")
