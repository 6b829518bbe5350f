"""What a plan holds, and what the driver does with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.arguments.plan import make_plan, plan_as_json, render, show_plan
from slime.utils.errors import UserError
from tests.support.plans import SMALL, TWO_NODES, planned

REPOSITORY = Path(__file__).parents[3]
GIB = 2**30


def test_batch_arithmetic():
    batch = make_plan(planned(SMALL)).batch
    assert (batch.prompts, batch.samples_per_prompt, batch.rollouts) == (32, 8, 256)
    assert (batch.global_batch_size, batch.optimizer_steps, batch.total_optimizer_steps) == (128, 2, 20)
    # 128 rollouts of at most 1024 + 7168 tokens, two in a micro-batch of 16384, over two data-parallel ranks.
    assert batch.longest_sample == 8192 and batch.micro_batches == 32 and batch.rollouts_per_rank_and_step == 64


def test_parts_add_up_and_phases_take_both():
    plan = make_plan(planned(TWO_NODES))
    training, serving = plan.memory.training, plan.memory.serving
    assert sum(part.bytes for part in training.parts) == training.total == max(training.stage_totals)
    assert sum(part.bytes for part in serving.parts) == pytest.approx(80 * GIB, abs=2**20)
    weights, cache = (
        next(part.bytes for part in serving.parts if part.name == name) for name in ("weights", "kv_cache")
    )
    training_phase, sync, generation = plan.memory.phases
    # Who waits keeps the context of its process.
    assert training_phase.total == training.total + 2 * GIB
    assert (sync.engine, generation.total) == (2 * GIB + weights, 2 * GIB + weights + cache)
    assert all(phase.fits for phase in plan.memory.phases)


def test_without_offload_both_count():
    plan = make_plan(planned(TWO_NODES, "--no-offload-train", "--no-offload-rollout"))
    training, _, generation = plan.memory.phases
    assert training.engine == generation.engine > 50 * GIB and generation.trainer > 30 * GIB
    assert not training.fits
    assert any("training needs" in warning and "does not fit" in warning for warning in plan.warnings)
    assert "DOES NOT FIT" in render(plan)


def test_warnings_name_what_to_change():
    plan = make_plan(planned(SMALL, "--dry-run-gpu-memory-gib", "40", "--rollout-max-prompt-len", "17000"))
    assert any("training needs" in warning and "40.0 GiB" in warning for warning in plan.warnings)
    assert any("longest allowed sample (24168 tokens)" in warning for warning in plan.warnings)
    tiny = make_plan(planned(SMALL, "--dry-run-gpu-memory-gib", "4"))
    assert any("leave nothing for the KV cache; raise --rollout-num-gpus-per-engine" in w for w in tiny.warnings)


def test_advice_names_only_what_is_not_used_yet():
    def advice(command, *words):
        return {part.name: part.lower or "" for part in make_plan(planned(command, *words)).memory.training.parts}

    assert "--recompute-granularity full" in advice(SMALL)["activations"]
    assert "--sequence-parallel" not in advice(SMALL)["activations"]
    assert "--optimizer-cpu-offload" in advice(TWO_NODES)["optimizer"]
    assert "--use-distributed-optimizer" in advice(SMALL, "--no-use-distributed-optimizer")["optimizer"]


def test_sync_cost_follows_link_and_bytes():
    plan = make_plan(planned(SMALL, "--dry-run-link-gbps", "100"))
    assert plan.sync.bytes == 2 * 4_022_468_096 and plan.sync.transport == "process group"
    assert plan.sync.seconds == pytest.approx(plan.sync.bytes * 8 / 100e9)
    assert plan.sync.buckets == -(-plan.sync.bytes // 536870912)
    assert make_plan(planned(TWO_NODES)).sync.transport == "shared handles"


def test_without_a_shape_the_plan_says_which_flags_are_missing():
    words = SMALL.split()
    start, end = words.index("--num-layers"), words.index("--actor-num-gpus-per-node")
    plan = make_plan(planned(" ".join([*words[:start], "--num-layers", "4", *words[end:]])))
    assert plan.memory is plan.parameters is plan.sync is None
    assert plan.missing == ("--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--vocab-size")
    text = render(plan)
    assert "Missing: --hidden-size, --ffn-hidden-size, --num-attention-heads" in text and "node 0" in text


def test_layers_that_do_not_divide_are_an_error():
    with pytest.raises(UserError, match="--pipeline-model-parallel-size 5"):
        make_plan(planned(TWO_NODES, "--pipeline-model-parallel-size", "5", "--actor-num-gpus-per-node", "40"))


def test_values_with_origins_and_without_secrets():
    values = {value.flag: value for value in make_plan(planned(SMALL)).values}
    assert (values["--actor-num-gpus-per-node"].value, values["--actor-num-gpus-per-node"].origin) == (
        4,
        "command line",
    )
    assert values["--global-batch-size"].origin == "derived"
    assert values["--wandb-key"].value == "<redacted>"
    assert "--dry-run" not in values and "--lr" not in values and "--memory-snapshot-dir" not in values


def test_custom_values_of_yaml(tmp_path):
    path = tmp_path / "custom.yaml"
    path.write_text("rollout_batch_size: 64\ncustom:\n  my_margin: 0.5\n  my_token: abc\n")
    plan = make_plan(planned(SMALL, "--custom-config-path", str(path)))
    assert plan.custom_values == {"my_margin": 0.5, "my_token": "<redacted>"}
    assert next(v.origin for v in plan.values if v.flag == "--rollout-batch-size") == "YAML"
    assert "YAML (custom)" in render(plan)


def test_json_round_trip(tmp_path, capsys):
    args = planned(TWO_NODES, "--dry-run-json", str(tmp_path / "plan.json"))
    show_plan(args)
    assert capsys.readouterr().out.startswith("PLAN\n")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written == plan_as_json(make_plan(args))
    gpu = written["placement"]["nodes"][1]["gpus"][5]
    assert (gpu["rank"], gpu["tensor"], gpu["data"], gpu["pipeline"], gpu["engine"], gpu["engine_rank"]) == (
        13,
        1,
        1,
        1,
        1,
        5,
    )
    args.dry_run_json = "-"
    show_plan(args)
    assert json.loads(capsys.readouterr().out)["memory"]["gpu_memory"] == 80 * GIB


def test_cpu_runs_are_planned_for_cpu(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    words = SMALL.replace("--dry-run-gpu-memory-gib 80", "")
    plan = make_plan(planned(words))
    assert (plan.device, plan.precision, plan.memory.gpu_memory, plan.memory.phases) == ("CPU", "float32", None, ())
    assert make_plan(planned(SMALL)).precision == "bfloat16"
    monkeypatch.delenv("SLIME_ACCELERATOR")
    assert make_plan(planned(words)).device == "GPU"


def test_the_driver_prints_the_plan_and_touches_nothing(tmp_path):
    code = (
        "import sys, train\n"
        "from slime.ray.session import main\n"
        "status = main(train.train)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(status)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TENSORBOARD_DIR": str(tmp_path / "events")}
    done = subprocess.run(
        [sys.executable, "-c", code, *SMALL.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PLAN\n") and "4 training ranks" in done.stdout
    assert list(tmp_path.iterdir()) == []
