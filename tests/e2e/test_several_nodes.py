"""Runs over four Ray nodes of this machine, each with a loopback address and eight logical GPUs of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.tiny_task import PLUG_INS, TinyTask
from tests.support.processes.ray_nodes import RayNodes
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until
from tests.support.tables.shell_arrays import ROOT, script_environment

NODES, GPUS = 4, 8


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[RayNodes]:
    with RayNodes(tmp_path_factory.mktemp("cluster"), NODES, GPUS) as cluster:
        yield cluster


# Flags of each mode. All 32 GPUs are taken, but for the run whose engines are somebody else's. Every rank, and the part of an
# engine on each of its nodes, is a process, which costs a second: modes are no larger than what they show.
_HALF_OF_ONE = ["--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "4"]
_ONE_NODE = ["--actor-num-gpus-per-node", "8", "--tensor-model-parallel-size", "4"]
_HALF, _ALL = [*_ONE_NODE, "--actor-num-nodes", "2"], [*_ONE_NODE, "--actor-num-nodes", "4"]
_OTHERS = ["http://127.0.0.9:1", "http://127.0.0.9:2"]
MODES = {
    "disaggregated": [*_HALF, "--rollout-num-gpus", "16", "--rollout-num-gpus-per-engine", "4"],
    "colocated": [*_ALL, "--colocate", "--rollout-num-gpus", "32", "--rollout-num-gpus-per-engine", "4"],
    # Two engines share the GPUs of the ranks, and two lie beside them.
    "mixed, a trainer that ends and starts again": [
        *_HALF, "--colocate", "--rollout-num-gpus", "32", "--rollout-num-gpus-per-engine", "8", "--release-train",
        "--save", "/nowhere/checkpoints", "--update-weight-transport", "disk", "--update-weight-disk-dir", "/nowhere/pushes",
    ],
    "an engine over whole nodes": [*_ONE_NODE, "--rollout-num-gpus", "24", "--rollout-num-gpus-per-engine", "24"],
    "engines over parts of nodes": [*_HALF_OF_ONE, "--rollout-num-gpus", "28", "--sglang-config", "{parts}"],
    "external engines": [*_HALF_OF_ONE, "--rollout-external-engine-addrs", *_OTHERS],
    "engines of several sizes and a placeholder": [*_ONE_NODE, "--rollout-num-gpus", "24", "--sglang-config", "{sizes}"],
    "several models": [*_ONE_NODE, "--rollout-num-gpus", "24", "--sglang-config", "{models}"],
}  # fmt: skip
SERVED = {
    "sizes": """
sglang:
  - name: actor
    server_groups:
      - {worker_type: placeholder, num_gpus: 4}
      - {num_gpus: 4, num_gpus_per_engine: 2}
      - {num_gpus: 8, num_gpus_per_engine: 8}
      - {num_gpus: 8, num_gpus_per_engine: 4}
""",
    "parts": """
sglang:
  - name: actor
    server_groups:
      - {num_gpus: 16, num_gpus_per_engine: 8}
      - {worker_type: placeholder, num_gpus: 2}
      - {num_gpus: 4, num_gpus_per_engine: 4}
      - {num_gpus: 6, num_gpus_per_engine: 2}
""",
    "models": """
sglang:
  - {name: actor, server_groups: [{num_gpus: 16, num_gpus_per_engine: 8}]}
  - {name: judge, model_path: /nowhere/judge, update_weights: false, server_groups: [{num_gpus: 8, num_gpus_per_engine: 4}]}
""",
}


@pytest.fixture(scope="module")
def placed(nodes, tmp_path_factory) -> dict[str, dict]:
    """By mode, what the plan says and what light actors found."""
    directory = tmp_path_factory.mktemp("served")
    files = {name: directory / f"{name}.yaml" for name in SERVED}
    for name, path in files.items():
        path.write_text(SERVED[name])
    modes = {mode: [word.format(**files) for word in words] for mode, words in MODES.items()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.processes.light_cluster", json.dumps(modes)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        env={**os.environ, "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled", "SLIME_HOST_IP": nodes.addresses[3]},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_lies_where_the_plan_says(nodes, placed, mode):
    found = placed[mode]
    # In the order of their addresses: those that Ray chose for a run that does not take all.
    chosen = [node for node in nodes.addresses if node in {rank["node"] for rank in found["ranks"]}]
    if mode != "external engines":
        chosen = nodes.addresses

    def place_of(gpu: int) -> tuple[str, int]:
        return chosen[gpu // GPUS], gpu % GPUS

    ranks = {rank["rank"]: (rank["node"], rank["device"]) for rank in found["ranks"]}
    assert ranks == {rank: place_of(gpu) for gpu, rank, _ in found["plan"] if rank is not None}
    # The address at which all ranks meet is that of the node of rank 0.
    assert {rank["rendezvous"] for rank in found["ranks"]} == {chosen[0]}
    # The driver is on a node of its own choice.
    assert found["driver"] == nodes.addresses[3]
    if mode == "external engines":
        assert [(engine["engine"], engine["url"], engine["node"]) for (engine,) in found["engines"]] == [
            (number, url, found["driver"]) for number, url in enumerate(_OTHERS)
        ]
        return
    gpus_of = {engine: [gpu for gpu, _, of_gpu in found["plan"] if of_gpu == engine] for _, _, engine in found["plan"]}
    gpus_of.pop(None, None)
    assert sorted(gpus_of) == list(range(len(found["engines"])))
    for engine, gpus in gpus_of.items():
        # A part of an engine for each of its nodes, which is told the first of its GPUs there.
        parts = [(part["engine"], part["host"], part["node"], part["device"]) for part in found["engines"][engine]]
        assert parts == [
            (engine, place_of(gpu)[0], *place_of(gpu)) for gpu in gpus if gpu == gpus[0] or gpu % GPUS == 0
        ]


RAY = str(Path(sys.executable).with_name("ray"))
SCRIPT = ROOT / "scripts" / "run-qwen3-4B.sh"
OF_A_RUN = r"train\.py|RankProcess|RolloutManager|EngineActor|server_process|sglang::|router_process"


def of_a_run(nodes: RayNodes) -> list[str]:
    """Command lines of processes of a run on the cluster."""
    return [command for command in nodes.processes().values() if re.search(OF_A_RUN, command)]


def submission(nodes: RayNodes, directory: Path, *words: str) -> list[str]:
    """The command that submits the script with `words`, on the toy model, and follows its lines."""
    script = f"env -C {directory} MODEL=toy NUM_GPUS=2 BASE_DIR={directory} bash {SCRIPT}".split()
    return [RAY, "job", "submit", "--address", nodes.dashboard, "--", *script, *words]


@pytest.mark.slow
def test_ray_job_submit_runs_a_launch_script(nodes, tmp_path):
    done = subprocess.run(
        submission(nodes, tmp_path, "--num-rollout", "1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=330, env=script_environment(RAY_AUTH_MODE="disabled"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    (norm,) = re.findall(r"rollout 0 \(1/1\) \|.* grad_norm ([\d.]+)", done.stdout)
    assert float(norm) > 0
    assert (tmp_path / "checkpoints/qwen3-4B-toy/latest_checkpointed_iteration.txt").read_text().strip() == "0"
    wait_until(lambda: not of_a_run(nodes), 60)


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True], ids=["of a script that submits", "of a script that was submitted"])
def test_ray_job_stop_ends_the_run(nodes, tmp_path, by_hand):
    words = ["--num-rollout", "1000"]
    environment = script_environment(
        MODEL="toy", NUM_GPUS="2", BASE_DIR=str(tmp_path), RAY_ADDRESS=nodes.dashboard, RAY_AUTH_MODE="disabled"
    )
    command = submission(nodes, tmp_path, *words) if by_hand else ["bash", str(SCRIPT), *words]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        script = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT)
    with script:
        try:
            wait_until(lambda: script.poll() is not None or "rollout 0 (1/" in output.read_text(), 330)
            assert of_a_run(nodes), output.read_text()
            job = re.search(r"Job '(\S+)' submitted", output.read_text())[1]
            stop = [RAY, "job", "stop", "--address", nodes.dashboard, job]
            assert subprocess.run(stop, env=environment, timeout=120).returncode == 0
            # To Ray what was stopped has not failed.
            assert script.wait(60) == 0
            assert "was stopped" in output.read_text(), output.read_text()
            if not by_hand:
                # Ray gives a run that the script submits time for its last lines.
                assert "stopped by SIGTERM" in output.read_text(), output.read_text()
            wait_until(lambda: not of_a_run(nodes), 60)
        finally:
            script.kill()


HOLD = """
import json, ray, sys
from ray.util.placement_group import placement_group
ray.init(logging_level="ERROR", _node_ip_address=sys.argv[2])
held = [{"GPU": gpus, f"node:{address}": 0.001} for address, gpus in json.loads(sys.argv[1]).items()]
print("held" if placement_group(held).wait(120) else "not held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(nodes: RayNodes, gpus: list[int]) -> Iterator[None]:
    """Another run has so many GPUs of each node."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, json.dumps(dict(zip(nodes.addresses, gpus, strict=True))), nodes.addresses[0]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled"},
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.stdin.close()
            process.wait(60)


def in_a_directory_that_nobody_else_sees(directory: Path) -> list[str]:
    """Words of a command that runs another one in `directory`, which is empty at first and stays empty to all others."""
    directory.mkdir()
    for unshare in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        words = [*unshare, "sh", "-c", 'mount -t tmpfs none "$0" && cd "$0" && exec "$@"', str(directory)]
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    raise AssertionError(
        "unshare is refused here, and nothing tells whether a run needs a path that only its driver has: run this test where "
        "mount namespaces are allowed (as root, or docker run --cap-add SYS_ADMIN)"
    )


@pytest.mark.slow
def test_ranks_and_engines_of_a_run_find_each_other_over_four_nodes(nodes, task: TinyTask, tmp_path):
    """One GPU is free on the first node and on the last, and two on those between, where tensor-parallel ranks lie then."""
    driver = tmp_path / "driver"
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2",
        "--tensor-model-parallel-size", "2", "--rollout-num-gpus", "2", "--num-rollout", "2", "--save",
        tmp_path / "checkpoints", "--save-interval", "2", "--custom-generate-function-path", f"{PLUG_INS}:held_generate",
    ]  # fmt: skip
    # No accelerator is named: the nodes have none either.
    env = {
        "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled", "SLIME_HOST_IP": nodes.addresses[3],
        "TMPDIR": str(driver), "XDG_CACHE_HOME": str(driver), "TENSORBOARD_DIR": str(driver / "tensorboard"),
    }  # fmt: skip
    run = TrainProcess(flags, tmp_path / "run", env, within=in_a_directory_that_nobody_else_sees(driver))
    with held(nodes, [GPUS - 1, GPUS - 2, GPUS - 2, GPUS - 1]), run:
        run.wait_for_line(r"rollout 0 \(1/2\) ", 330)
        actors, listening = nodes.actors(), nodes.listening()
        (tmp_path / "checkpoints" / "go").touch()
        run.wait_for_success(120)
    first, second, third, last = nodes.addresses
    ranks_of = {node: sorted(name for name in names if name.startswith("rank ")) for node, names in actors.items()}
    assert ranks_of == {first: [], second: ["rank 0", "rank 1"], third: ["rank 2", "rank 3"], last: []}
    engines_of = {node: [name for name in names if name.startswith("engine ")] for node, names in actors.items()}
    assert engines_of == {first: ["engine 0"], second: [], third: [], last: ["engine 1"]}
    # Every server is at the address of its own node. Gloo takes the first address of the interface, which all nodes have here.
    servers = {node: addresses_of(listening[node], "server_process") for node in nodes.addresses}
    assert servers == {first: {first}, second: set(), third: set(), last: {last}}
    (manager,) = (node for node, names in actors.items() if "manager" in names)
    assert {node: addresses_of(listening[node], "router_process") - {"127.0.0.1"} for node in nodes.addresses} == {
        node: {node} if node == manager else set() for node in nodes.addresses
    }
    for node in nodes.addresses:
        assert addresses_of(listening[node], OF_A_RUN) <= {node, "127.0.0.1"}, listening[node]
    assert second in addresses_of(listening[second], "RankProcess"), "the store at which ranks meet"
    norms = [float(norm) for norm in re.findall(r"rollout \d \(\d/2\) \|.* grad_norm ([\d.]+)", run.output())]
    assert len(norms) == 2 and all(norm > 0 for norm in norms)
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text().strip() == "1"
    wait_until(lambda: not of_a_run(nodes), 60)


@pytest.mark.slow
def test_an_engine_over_parts_of_nodes_beside_a_training_rank(nodes, task: TinyTask, tmp_path):
    """Two GPUs are free on the first node and one on the second: the rank has one, and each half of the engine another."""
    flags = [
        *task.rollout_flags, *task.train_flags, "--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "2",
        "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--num-rollout", "2", "--check-weight-update-equal",
        "--save", tmp_path / "checkpoints", "--custom-generate-function-path", f"{PLUG_INS}:held_generate",
    ]  # fmt: skip
    env = {"RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "disabled", "SLIME_HOST_IP": nodes.addresses[3]}
    run = TrainProcess(flags, tmp_path / "run", env)
    with held(nodes, [GPUS - 2, GPUS - 1, GPUS, GPUS]), run:
        run.wait_for_line(r"rollout 0 \(1/2\) ", 330)
        actors, listening = nodes.actors(), nodes.listening()
        (tmp_path / "checkpoints" / "go").touch()
        run.wait_for_success(120)
    first, second, *others = nodes.addresses
    assert {node: sorted(set(names) & {"rank 0", "engine 0"}) for node, names in actors.items()} == {
        first: ["engine 0", "rank 0"], second: ["engine 0"], **dict.fromkeys(others, []),
    }  # fmt: skip
    servers = {node: addresses_of(listening[node], "server_process") for node in nodes.addresses}
    assert servers == {first: {first}, second: {second}, **dict.fromkeys(others, set())}
    assert re.search(r"weight check: \d+ tensors equal on 1 engines", run.output())
    differences = run.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == [0, 1] and all(0 < difference <= 1e-5 for difference in differences.values())
    wait_until(lambda: not of_a_run(nodes), 60)


def addresses_of(listening: set[tuple[str, str]], pattern: str) -> set[str]:
    return {address for command, address in listening if re.search(pattern, command) and ":" not in address}
