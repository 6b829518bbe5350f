"""Which GPU holds which rank and which part of an engine, and how an engine's memory is divided."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from slime.estimates.serving_memory import WeightBytes
from slime.plan import make_plan, require_memory_of_machine
from slime.plan.placement import serving_setup
from slime.plan.setup import shape_of
from slime.plan.text import placement_lines, render
from slime.ray.cluster import plan_cluster
from tests.support.tables.plans import SMALL, TWO_NODES, planned


def gpus(plan):
    return [gpu for node in plan.placement.nodes for gpu in node.gpus]


def test_engines_follow_the_trainer_unless_they_share():
    apart = make_plan(planned(SMALL))
    assert apart.placement.mode == "disaggregated"
    assert [(gpu.rank, gpu.engine, gpu.engine_rank) for gpu in gpus(apart)] == [
        (0, None, None), (1, None, None), (2, None, None), (3, None, None), (None, 0, 0), (None, 0, 1),
    ]  # fmt: skip
    together = make_plan(planned(TWO_NODES))
    assert together.placement.mode == "colocated" and together.placement.num_gpus == 16
    assert [(gpu.rank, gpu.engine) for gpu in gpus(together)][7:9] == [(7, 0), (8, 1)]


@pytest.mark.parametrize(
    "words, mode, training, engines",
    [
        (["--debug-train-only"], "training only", 4, 0),
        (["--debug-rollout-only"], "engines only", 0, 1),
        (["--rollout-num-gpus", "8"], "disaggregated", 4, 4),
        (["--rollout-num-gpus", "0", "--router-api-key", "key"], "external engines", 4, 0),
    ],
)
def test_modes(words, mode, training, engines):
    plan = make_plan(planned(SMALL, *words)).placement
    assert (plan.mode, plan.training_ranks, plan.engines) == (mode, training, engines)
    assert render(make_plan(planned(SMALL, *words)))


def test_external_engines_without_a_trainer_leave_its_gpus_reserved():
    words = ("--debug-rollout-only", "--rollout-external-engine-addrs", "10.0.0.2:30000", "--actor-num-nodes", "4")
    args = planned(SMALL.replace("--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 ", ""), *words)
    plan = make_plan(args)
    assert plan.placement.num_gpus == plan_cluster(args).gpus == 16
    assert {(gpu.rank, gpu.engine) for gpu in gpus(plan)} == {(None, None)}
    text = render(plan)
    assert "external engines: 16 GPUs" in text and "nothing runs on these GPUs" in text and "alike: reserved" in text


def test_prefill_and_decode_engines():
    plan = make_plan(planned(SMALL, "--rollout-num-gpus", "6", "--prefill-num-servers", "1"))
    assert [(gpu.engine, gpu.worker) for gpu in gpus(plan)[4:]] == [
        (0, "prefill"), (0, "prefill"), (1, "decode"), (1, "decode"), (2, "decode"), (2, "decode"),
    ]  # fmt: skip


def test_topology_of_a_file(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(
        "sglang:\n  - name: actor\n    server_groups:\n"
        "      - {worker_type: placeholder, num_gpus: 2}\n"
        "      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4}\n"
        "      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}\n"
        "      - {worker_type: placeholder, num_gpus: 1}\n"
    )
    args = planned(SMALL, "--rollout-num-gpus", "9", "--sglang-config", str(path))
    plan = make_plan(args)
    assert [(gpu.engine, gpu.engine_rank) for gpu in gpus(plan)[4:]] == [
        (None, None), (None, None), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (None, None),
    ]  # fmt: skip
    assert plan.placement.engines == 3 and plan.placement.num_gpus == plan_cluster(args).gpus


def test_every_group_of_a_file_is_warned_of_by_its_line(tmp_path):
    """The memory that is shown is that of the first one with engines."""
    path = tmp_path / "serving.yaml"
    path.write_text(
        "sglang:\n  - name: actor\n    server_groups:\n      - {worker_type: placeholder, num_gpus: 1}\n"
        "      - {num_gpus: 2, num_gpus_per_engine: 2}\n"
        "      - {num_gpus: 1, num_gpus_per_engine: 1, overrides: {mem_fraction_static: 0.02}}\n"
    )
    plan = make_plan(planned(SMALL, "--rollout-num-gpus", "4", "--sglang-config", str(path)))
    assert plan.memory.serving.static_fraction == 0.8
    (warning,) = [warning for warning in plan.warnings if "KV cache" in warning]
    assert warning.startswith(f"{path}:6: the weights of an engine take ")
    assert "on each of its 1 GPUs" in warning and "raise num_gpus_per_engine or" in warning


GROUPS = ("--sglang-enable-dp-attention", "--sglang-dp-size", "2")


@pytest.mark.parametrize(
    ("words", "holder", "room"),
    [
        # A request is of one group, whose cache of 8193 tokens leaves two of them free.
        ((*GROUPS, "--sglang-max-total-tokens", "8193"), "a data-parallel group of an engine", 8191),
        (("--sglang-max-total-tokens", "8193"), "an engine", 8191),
        ((*GROUPS, "--sglang-max-total-tokens", "8194"), None, None),
    ],
)
def test_a_cache_without_room_for_the_longest_sample_is_warned_of(words, holder, room):
    """Which has 1024 + 7168 tokens."""
    told = [warning for warning in make_plan(planned(SMALL, *words)).warnings if "KV cache" in warning]
    assert told == [
        f"the KV cache of {holder} has room for samples of {room} tokens, and the longest may have 8192: its answer would be "
        "cut short; raise --sglang-max-total-tokens or --rollout-num-gpus-per-engine or --sglang-mem-fraction-static"
    ] * (room is not None)


def test_a_cache_is_too_small_for_an_evaluation_too(tmp_path):
    words = ["--eval-interval", "5", "--eval-prompt-data", "aime", str(tmp_path), "--sglang-max-total-tokens", "9000"]
    enough, more = (
        make_plan(planned(SMALL, *words, "--eval-max-response-len", length)).warnings for length in ("8998", "8999")
    )
    assert not any("KV cache" in warning for warning in enough)
    assert any("room for samples of 8998 tokens, and the longest may have 8999" in warning for warning in more)


def test_on_a_cpu_the_tokens_of_a_cache_are_known(monkeypatch, caplog):
    """So that a run is told of it too, when it starts."""
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    short = SMALL.replace("--dry-run-gpu-memory-gib 80", "").replace("7168", "31743")
    args = planned(short)
    warning = (
        "the KV cache of an engine has room for samples of 32766 tokens, and the longest may have 32767: its answer would be "
        "cut short; raise --sglang-max-total-tokens"
    )
    assert warning in make_plan(args).warnings
    monkeypatch.setattr("slime.plan.memory.machine_memory", lambda: 1 << 50)
    require_memory_of_machine(args)
    assert warning in caplog.messages
    raised = planned(short, "--sglang-max-total-tokens", "32769")
    assert not any("KV cache" in warning for warning in make_plan(raised).warnings)


def test_256_gpus_take_one_block_and_a_line_for_each_pipeline_stage():
    plan = make_plan(planned(TWO_NODES, "--actor-num-nodes", "32"))
    lines = placement_lines(plan.placement, plan.layout)
    assert plan.placement.num_gpus == 256 and len(lines) < 13
    assert lines[-2:] == [
        "nodes 1-15 alike: ranks 8-127, tp 0-3, ep 0-7, dp 2-31, pp 0, engine 1-15",
        "nodes 16-31 alike: ranks 128-255, tp 0-3, ep 0-7, dp 0-31, pp 1, engine 16-31",
    ]


def test_a_node_that_differs_gets_its_own_block():
    words = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "8"]
    plan = make_plan(planned(SMALL, *words))
    lines = placement_lines(plan.placement, plan.layout)
    assert any(line.startswith("node 1 alike: ranks 8-15") for line in lines)
    assert any(line.startswith("node 2 ") and "GPU 0" in line for line in lines)
    assert sum("engine  " in line for line in lines) == 1


def test_an_engine_on_more_nodes_than_it_needs_is_drawn_there_and_told_what_it_pays():
    words = ["--rollout-num-gpus", "16", "--rollout-num-gpus-per-engine"]
    spread = make_plan(planned(SMALL, *words, "8"))
    assert [gpu.engine for gpu in gpus(spread)[4:]] == [0] * 8 + [1] * 8
    engines = [line.split()[1:] for line in placement_lines(spread.placement, spread.layout) if "  engine  " in line]
    assert engines[0] == ["-"] * 4 + [f"0.{part}" for part in range(4)]
    assert engines[1] == [f"0.{part}" for part in range(4, 8)] + [f"1.{part}" for part in range(4)]
    (warning,) = [warning for warning in spread.warnings if "nodes" in warning]
    assert warning.startswith("engine 0 (like 1 more) has 8 GPUs on 2 nodes, and 1 would do: ")
    whole = make_plan(planned(SMALL, *words, "4"))
    assert not [warning for warning in whole.warnings if "nodes" in warning]


def test_an_engine_with_gpus_of_ranks_and_others_is_drawn_over_both(tmp_path):
    path = tmp_path / "serving.yaml"
    groups = "{num_gpus: 2, num_gpus_per_engine: 2}, {num_gpus: 4, num_gpus_per_engine: 4}"
    path.write_text(f"sglang:\n  - name: actor\n    server_groups: [{groups}]\n")
    words = ["--colocate", "--rollout-num-gpus", "6", "--num-gpus-per-node", "8", "--sglang-config", str(path)]
    plan = make_plan(planned(SMALL, *words))
    assert plan.placement.num_gpus == 6
    assert [(gpu.rank, gpu.engine, gpu.engine_rank) for gpu in gpus(plan)] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (None, 1, 2), (None, 1, 3),
    ]  # fmt: skip
    assert "by shared handles, and by process group to those with GPUs beside the trainer's" in render(plan)


def test_nodes_of_sixteen_gpus_wrap():
    words = ["--actor-num-gpus-per-node", "16", "--num-gpus-per-node", "16", "--rollout-num-gpus", "16"]
    plan = make_plan(planned(SMALL, *words))
    lines = placement_lines(plan.placement, plan.layout)
    assert any("GPU 8" in line and "GPU 15" in line for line in lines) and max(map(len, lines)) <= 118


def setup(args, config=None):
    return serving_setup(args, shape_of(args), config, 80 * 2**30)


def test_engine_sizes_and_data_parallel_attention():
    args = planned(
        TWO_NODES, "--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-kv-cache-dtype", "fp8_e5m2"
    )
    found = setup(args)
    assert (found.tensor, found.pipeline, found.attention_data, found.cache_bytes) == (8, 1, 4, 1.0)
    assert found.static_fraction == 0.7 and found.weight_bytes == WeightBytes.everywhere(2.0) and found.sharded_head
    two_stages = setup(planned(TWO_NODES, "--sglang-pp-size", "2"))
    assert (two_stages.tensor, two_stages.pipeline) == (4, 2)
    assert not setup(planned(TWO_NODES, "--sglang-enable-dp-lm-head")).sharded_head


def test_engines_compute_in_16_bits_where_nothing_says_otherwise(monkeypatch):
    """On GPUs, beside a trainer in float32 too, as SGLang's `auto` means. A push brings the trainer's dtype."""

    def sizes(params_dtype, *words):
        args = planned(SMALL, *words)
        args.params_dtype_name = params_dtype
        return setup(args).weight_bytes.rest, make_plan(args).sync.bytes / 4_022_468_096

    assert sizes("float32") == sizes("float32", "--sglang-dtype", "auto") == (2.0, 4)
    assert sizes("float32", "--sglang-dtype", "float32") == (4.0, 4)
    assert sizes("bfloat16") == sizes("bfloat16", "--sglang-dtype", "half") == (2.0, 2)
    assert sizes("bfloat16", "--sglang-dtype", "float") == (4.0, 2)
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    cpu = planned(SMALL.replace("--dry-run-gpu-memory-gib 80", ""))
    assert serving_setup(cpu, shape_of(cpu), None, None).weight_bytes.rest == 4.0
    # A typed one replaces what a run has them start with.
    cpu.sglang_dtype = "auto"
    assert serving_setup(cpu, shape_of(cpu), None, None).weight_bytes.rest == 2.0


def test_what_flags_of_experts_say_of_the_ranks_of_an_engine():
    def flags(command, *words):
        found = setup(planned(command, *words))
        return found.shared_whole, found.dense_whole, found.redundant_experts

    assert flags(TWO_NODES) == (False, False, 0)
    assert flags(TWO_NODES, "--sglang-moe-a2a-backend", "deepep", "--sglang-ep-num-redundant-experts", "16") == (
        True,
        False,
        16,
    )
    assert flags(TWO_NODES, "--sglang-moe-a2a-backend", "none", "--sglang-moe-dense-tp-size", "1") == (False, True, 0)
    # Models without experts do not read it.
    assert flags(SMALL, "--sglang-moe-dense-tp-size", "1") == (False, False, 0)


def test_caches_leave_engines_with_roles_and_those_that_keep_them_on_the_host():
    words = [[], ["--prefill-num-servers", "1"], ["--sglang-enable-hierarchical-cache"]]
    assert [setup(planned(TWO_NODES, *flags)).hands_over for flags in words] == [False, True, True]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4.0), ("bfloat16", 2.0)])
def test_the_dtype_of_a_group_is_that_of_its_weights(tmp_path, dtype, size):
    path = tmp_path / "serving.yaml"
    group = f"{{num_gpus: 8, num_gpus_per_engine: 8, overrides: {{dtype: {dtype}}}}}"
    path.write_text(f"sglang:\n  - name: actor\n    server_groups: [{group}]\n")
    words = ["--rollout-num-gpus", "8", "--sglang-config", str(path)]
    assert setup(planned(SMALL, *words)).weight_bytes == WeightBytes.everywhere(size)
    # The file's word for a group is nearer than the flag.
    assert setup(planned(SMALL, *words, "--sglang-dtype", "float32")).weight_bytes == WeightBytes.everywhere(size)


SERVING = """
sglang:
  - name: actor
    server_groups:
      - {{worker_type: placeholder, num_gpus: 2, num_gpus_per_engine: 1}}
      - {{num_gpus: 4, num_gpus_per_engine: 4, overrides: {{mem_fraction_static: 0.6}}}}
  - name: judge
    model_path: {judge}
    update_weights: false
    server_groups: [{{num_gpus: 2, num_gpus_per_engine: 1, overrides: {{mem_fraction_static: 0.7}}}}]
"""


def test_models_are_drawn_with_their_engines_and_the_engine_of_the_trained_one_is_planned(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(SERVING.format(judge="/nowhere/judge"))
    args = planned(SMALL.replace("--rollout-num-gpus 2", "--rollout-num-gpus 8"), "--sglang-config", str(path))
    found = setup(args)
    assert (found.tensor, found.static_fraction) == (4, 0.6)
    plan = make_plan(args)
    assert [gpu.engine for gpu in gpus(plan)[4:]] == [None, None, 0, 0, 0, 0, 1, 2]
    lines = render(plan).splitlines()
    assert "model actor, with a router of its own: engine 0" in [line.strip() for line in lines]
    frozen = "model judge, with a router of its own: engine 1-2, weights of /nowhere/judge that stay"
    assert frozen in [line.strip() for line in lines]
    assert any("to every engine of model actor by process group" in line for line in lines)


def test_the_cache_of_a_frozen_model_is_judged_by_its_own_shape(tmp_path):
    judge = tmp_path / "judge"
    judge.mkdir()
    large = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8192, "intermediate_size": 32768,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (judge / "config.json").write_text(json.dumps(large))
    path = tmp_path / "serving.yaml"
    path.write_text(SERVING.format(judge=judge))
    args = planned(SMALL.replace("--rollout-num-gpus 2", "--rollout-num-gpus 8"), "--sglang-config", str(path))
    (warning,) = [warning for warning in make_plan(args).warnings if "KV cache" in warning]
    assert warning.startswith(f"{path}:10: the weights of an engine take ") and "leave nothing" in warning
    # What its config is silent about it has not, whatever the trained model has: here some layers of another attention.
    flags = SMALL.replace("--rollout-num-gpus 2", "--rollout-num-gpus 8")
    hybrid = make_plan(planned(flags, *HYBRID.split(), "--sglang-config", str(path)))
    assert warning in hybrid.warnings


HYBRID = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 4 "
    "--linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 4 --linear-num-value-heads 4"
)


def ratio_of_servers():
    """What the installed SGLang takes for a ratio that is not given."""
    file = Path(importlib.util.find_spec("sglang").origin).parent / "srt/arg_groups/fields/schedule.py"
    declared = file.read_text().partition("mamba_full_memory_ratio:")[2].partition("] = None")[0]
    return float(re.search(r"fallback=([\d.]+)", declared).group(1))


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("", None),
        ("--sglang-mamba-full-memory-ratio 0.25", 0.25),
        ("--sglang-max-mamba-cache-size 64", 0),
        ("--sglang-disable-radix-cache --sglang-max-running-requests 8", 0),
        ("--sglang-max-running-requests 8", None),
    ],
)
def test_states_of_linear_attention_have_a_pool_beside_the_cache(words, share):
    plan = make_plan(planned(SMALL, *f"{HYBRID} {words}".split()))
    sizes = {part.name: part.bytes for part in plan.memory.serving.parts}
    wanted = ratio_of_servers() if share is None else share
    assert sizes.get("states", 0) / sizes["kv_cache"] == pytest.approx(wanted, rel=1e-3)
    assert ("states of linear attention" in render(plan)) == bool(wanted)


def test_an_unknown_format_is_a_note(monkeypatch):
    monkeypatch.setattr("slime.plan._hf_config", lambda args: {"quantization_config": {"quant_method": "quark"}})
    plan = make_plan(planned(SMALL))
    assert any("the format of the quantised checkpoint, quark, is not known" in note for note in plan.notes)
