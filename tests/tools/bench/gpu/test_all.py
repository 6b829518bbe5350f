"""All measurements run at a tiny size on the CPU, without Ray, SGLang and a network; what they say is right, however fast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.oracles.plain_grid import WITHOUT_LOOPS
from tests.support.processes.objective_grid import CRITIC_OBJECTIVES, OBJECTIVES
from tools.bench.bench_log_probs import CONTENDERS
from tools.bench.gpu import all as all_measurements
from tools.bench.gpu.all import MEASUREMENTS, REHEARSED
from tools.bench.gpu.kernels import OTHERS

ROOT = Path(__file__).parents[4]
# Imported by every process at its start.
ALONE = """
import socket, sys

ABSENT = {"ray", "sglang", "sglang_router"}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def connect(self, address, _connect=socket.socket.connect):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise OSError(f"no network, and no way to {address}")
    return _connect(self, address)


sys.meta_path.insert(0, Absent())
socket.socket.connect = connect
"""
# One process imports torch and Megatron once for all of them. Arguments: the directory for records, then command lines.
IN_TURN = """
import contextlib, io, runpy, sys

for words in sys.argv[1:]:
    sys.argv = words.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print("ended with", end.code, file=sys.stderr, flush=True)
        if end.code:
            raise
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone")
    (directory / "sitecustomize.py").write_text(ALONE)
    environment = {name: value for name, value in os.environ.items() if name not in ("SLIME_ACCELERATOR", "RANK")}
    return {**environment, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def records(environment, tmp_path_factory):
    """Of each measurement its record, and under its name with .txt the table."""
    out = tmp_path_factory.mktemp("records")
    rehearsed = out / "rehearsed.json"
    commands = [f"tools/bench/gpu/waits.py --tiny --rehearse {rehearsed}"]
    for name in MEASUREMENTS:
        words = f"tools/bench/gpu/{name}.py --device cpu --tiny --record {out}/{name}.json"
        commands.append(f"{words} --rehearsed {rehearsed}" if name in REHEARSED else words)
    ended = subprocess.run(
        [sys.executable, "-c", IN_TURN, *commands],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in MEASUREMENTS}
    assert all(record["tiny"] and record["device"] == "cpu" for record in found.values())
    # What stands in the file is the line after the table.
    assert all(json.dumps(record) in ended.stdout.splitlines() for record in found.values())
    return found


@pytest.mark.slow
def test_objectives_agree(records):
    rows = records["grid"]["rows"]
    assert [(row["backend"], row["role"], row["objective"]) for row in rows] == [
        ("megatron", "actor", "grpo"), ("megatron", "actor", "gspo"), ("megatron", "critic", "value"),
        ("fsdp", "actor", "grpo"), ("fsdp", "actor", "gspo"),
    ]  # fmt: skip
    assert [row["what differs"] for row in rows] == [None] * 5 and records["grid"]["met"]


@pytest.mark.slow
def test_utilisation_of_a_step(records):
    (row,) = records["mfu"]["rows"]
    # 8 micro-batches of 4 samples of 64 tokens. In a layer: 2·64·64 + 2·64·32 of the attention, 3·64·128 of the MLP.
    per_token = 2 * 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 64 * 512
    flops = 3 * 32 * (64 * per_token + 2 * 64 * 64 // 2 * 2 * 2 * 64)
    assert (row["tokens of a step"], row["model TFLOP"]) == (2048, pytest.approx(flops / 1e12))
    assert row["MFU"] is None and records["mfu"]["met"] is None
    assert row["TFLOP/s"] == pytest.approx(row["model TFLOP"] / row["seconds"])
    assert row["tokens per second"] == pytest.approx(2048 / row["seconds"])


@pytest.mark.slow
def test_waits_of_a_rehearsal(records):
    rows = records["waits"]["rows"]
    assert {row["phase"] for row in rows} == {"log-probs", "step", "metrics", "push"}
    assert {row["measured"] for row in rows} == {None}
    total = {row["phase"]: row["rehearsed"] for row in rows if row["function"] == "all"}
    of_step = {row["function"]: row["rehearsed"] for row in rows if row["phase"] == "step"}
    if total["step"] is None:  # no compiler here: fake CPU tensors are not waited for
        assert "counted no waits" in records["waits"]["notes"][0]
    else:
        assert total["step"] == sum(of_step.values()) - total["step"] > 0
        assert of_step["slime/training/loss_guard.py: accepts"] == 1


@pytest.mark.slow
def test_kernels_give_what_torch_gives(records):
    rows = records["kernels"]["rows"]
    assert [row["contender"] for row in rows if row["kernel"].startswith("log-probs")] == list(CONTENDERS)
    attention = [row for row in rows if row["kernel"].startswith("attention")]
    assert [row["kernel"] for row in attention[::2]] == [
        "attention, 1 x 64", "attention, 4 x 16", "attention, 32 x 2", *(f"attention, {family}" for family in OTHERS)
    ]  # fmt: skip
    assert all(row["remark"] is None and row["furthest from float32"] < 2**-6 for row in attention)
    # Three passes of two products over half of the pairs, 16 heads of 128 wide: 6·L²·2048.
    flops = [6 * samples * (64 // samples) ** 2 * 2048 for samples in (1, 4, 32) for _ in range(2)]
    assert [row["TFLOP/s"] * row["ms"] / 1e3 * 1e12 for row in attention[:6]] == pytest.approx(flops)


@pytest.mark.slow
def test_memory_beside_rehearsal_and_plan(records):
    rows = {row["phase"]: row for row in records["memory"]["rows"]}
    assert list(rows) == ["model", "load", "data", "log-probs", "first step", "step", "metrics", "push"]
    steps = ("first step", "step")
    assert all(
        row["of the rehearsal"] == pytest.approx(1, abs=0.05) for phase, row in rows.items() if phase not in steps
    )
    # A CPU computes a norm in several operations, which keep its input and its result in float32; CUDA's kernel, which is
    # rehearsed, keeps neither. There are five norms 64 wide, and in both layers those of queries and keys, 64 and 32 wide.
    norms = 2 * 4 * 256 * (5 * 64 + 2 * (64 + 32)) / 2**20
    assert all(0 <= rows[phase]["measured"] - rows[phase]["rehearsed"] <= norms for phase in steps)
    assert rows["step"]["of the plan"] == pytest.approx(1, abs=0.1)
    assert [phase for phase, row in rows.items() if row["planned"] is not None] == ["step", "push"]
    # Of each parameter 6 bytes of weight and gradient, which come with the model, and 12 of the optimizer.
    parameters = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 512 * 64 + 64
    assert rows["push"]["planned"] * 2**20 > 18 * parameters
    assert rows["model"]["measured"] * 2**20 > 6 * parameters


@pytest.mark.slow
def test_every_weight_gets_into_a_bucket(records):
    rows = {row["what"]: row for row in records["buckets"]["rows"]}
    parameters = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 512 * 64 + 64
    assert {what: row["MB copied"] for what, row in rows.items()} == pytest.approx(
        {what: parameters * 2 / 1e6 for what in ("copy", "flatten", "walk and flatten")} | {"walk": 0}
    )
    assert rows["copy"]["of the copy's speed"] == 1 and rows["walk"]["GB/s"] is None
    for row in (rows["flatten"], rows["walk and flatten"]):
        assert row["of the copy's speed"] == pytest.approx(rows["copy"]["ms"] / row["ms"])


@pytest.mark.slow
def test_a_family_is_as_near_its_reference_as_the_tests_want_it(records):
    (row,) = records["families"]["rows"]
    assert row["agrees"] and row["same experts"] and max(row["logits"], row["gradients"]) < 2e-5


@pytest.mark.slow
def test_weights_arrive_in_another_process(records):
    (row,) = records["handles"]["rows"]
    assert row["different"] == 0 and row["MB"] == records["buckets"]["rows"][0]["MB copied"]


@pytest.mark.slow
def test_a_rank_that_slept_has_what_it_had(records):
    rows = records["asleep"]["rows"]
    assert [row["turn"] for row in rows] == ["first, gives", "first, takes", "second, gives", "second, takes"]
    # Of each parameter 2 bytes of weight, and 12 of the optimizer.
    parameters = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 512 * 64 + 64
    assert all(row["different"] == 0 and row["MB copied"] == pytest.approx(14e-6 * parameters, 0.01) for row in rows)


class TestOneAfterTheOther:
    @pytest.fixture
    def scripts(self, tmp_path, monkeypatch):
        """Measurements that are quick: one that works, one that stops, one whose figures are wrong, one that hangs."""
        record = (
            "import json, pathlib, sys\n"
            "row = dict(name='x', rows=[dict(words=' '.join(sys.argv[1:-2]))], notes=[], target='all', met=False)\n"
            "pathlib.Path(sys.argv[-1]).write_text(json.dumps(row))\n"
        )
        bodies = {
            "works": record,
            "stops": "raise SystemExit('no such kernel')",
            "wrong": f"{record}sys.exit(1)",
            "hangs": "import time\nprint('at it', flush=True)\ntime.sleep(600)",
        }
        for name, body in bodies.items():
            (tmp_path / f"{name}.py").write_text(body)
        monkeypatch.setattr(all_measurements, "__file__", str(tmp_path / "all.py"))
        monkeypatch.setattr(all_measurements, "enter", lambda device: None)
        # `--only` has these for its choices.
        monkeypatch.setattr(all_measurements, "MEASUREMENTS", tuple(bodies))
        monkeypatch.setattr(all_measurements, "REHEARSED", ("wrong",))
        return tmp_path

    def run(self, monkeypatch, out, *words):
        monkeypatch.setattr(sys, "argv", ["all.py", "--out", str(out), "--device", "cpu", *words])
        return all_measurements.main()

    def test_one_that_fails_leaves_the_others_alone(self, scripts, monkeypatch, capsys):
        out = scripts / "out"
        status = self.run(monkeypatch, out, "--only", "stops", "wrong", "works", "--tiny", "--rehearsed", "a.json")
        said = capsys.readouterr().out
        assert status == 1 and said.endswith("FAILED: stops, wrong\n") and "1 of 3 measured" in said
        assert "no such kernel" in said and "works: measured" in said and "target: all: MISSED" in said
        gathered = json.loads((out / "all.json").read_text())
        assert gathered["stops"]["record"] is None and "no such kernel" in gathered["stops"]["failure"]
        assert gathered["wrong"]["record"]["rows"] == [{"words": "--device cpu --tiny --rehearsed a.json"}]
        assert gathered["works"] == {"failure": None, "record": json.loads((out / "works.json").read_text())}
        assert gathered["works"]["record"]["rows"] == [{"words": "--device cpu --tiny"}]

    def test_what_was_left_from_before_does_not_count(self, scripts, monkeypatch):
        out = scripts / "out"
        assert self.run(monkeypatch, out, "--only", "works") == 0
        (scripts / "works.py").write_text("raise SystemExit(3)")
        assert self.run(monkeypatch, out, "--only", "works") == 1
        assert json.loads((out / "all.json").read_text())["works"]["record"] is None

    def test_one_that_hangs_is_ended(self, scripts, monkeypatch, capsys):
        assert self.run(monkeypatch, scripts / "out", "--only", "hangs", "--seconds", "1") == 1
        assert "hangs: it did not end within 1 s (--seconds)" in capsys.readouterr().out


def run_all(out, environment, *words):
    command = [sys.executable, "tools/bench/gpu/all.py", "--out", str(out), *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return json.loads((out / "all.json").read_text())


@pytest.mark.slow
def test_each_in_a_process_of_its_own(environment, tmp_path):
    gathered = run_all(tmp_path, environment, "--device", "cpu", "--tiny")
    assert tuple(gathered) == MEASUREMENTS and all(entry["failure"] is None for entry in gathered.values())


@pytest.mark.slow
def test_every_objective_agrees_on_the_cpu(environment, tmp_path):
    words = ["--device", "cpu", "--objectives", *OBJECTIVES, *CRITIC_OBJECTIVES]
    command = [sys.executable, "tools/bench/gpu/grid.py", *words, "--record", str(tmp_path / "record.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert len(rows) == 2 * len(OBJECTIVES) + len(CRITIC_OBJECTIVES)
    assert [row["objective"] for row in rows if not row["agrees"]] == 2 * list(WITHOUT_LOOPS)


@pytest.mark.gpu
def test_on_a_gpu(environment, tmp_path):
    gathered = run_all(tmp_path, environment, "--tiny")
    assert all(entry["failure"] is None for entry in gathered.values())
