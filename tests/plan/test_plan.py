"""What a plan holds, and what the driver does with it."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slime.arguments import parse_args
from slime.plan import batch, make_plan, plan_as_json, render, show_plan
from slime.plan.structure import GIB
from slime.training.columns import COLUMNS
from slime.utils.errors import UserError
from tests.support.models.args import command_line
from tests.support.tables.plans import SMALL, TWO_NODES, planned

REPOSITORY = Path(__file__).parents[2]


def test_batch_arithmetic():
    found = make_plan(planned(SMALL)).batch
    assert (found.prompts, found.samples_per_prompt, found.rollouts) == (32, 8, 256)
    assert (found.global_batch_size, found.optimizer_steps, found.total_optimizer_steps) == (128, 2, 20)
    # 128 rollouts of at most 1024 + 7168 tokens, two in a micro-batch of 16384, over two data-parallel ranks.
    assert found.longest_sample == 8192 and found.micro_batches == 32 and found.rollouts_per_rank_and_step == 64


def test_the_train_batch_is_as_large_as_its_columns():
    plan = make_plan(planned(SMALL))
    # 256 samples of at most 8192 tokens: ids in 8 bytes, masks and log-probs in 4 each.
    assert plan.batch.object_store == 256 * 8192 * 16 == 32 * 2**20
    assert "train batch in Ray's object store, host memory: 32.00 MiB of a rollout step" in render(plan)
    by_nixl = make_plan(planned(SMALL, "--rollout-data-transport", "nixl"))
    assert "train batch in the rollout manager, host memory: 32.00 MiB of a rollout step" in render(by_nixl)
    teacher = batch.train_batch_bytes(argparse.Namespace(**{**vars(planned(SMALL)), "use_opd": True}))
    critic = batch.train_batch_bytes(argparse.Namespace(**{**vars(planned(SMALL)), "use_critic": True}))
    assert (teacher, critic) == (256 * 8192 * 20, 256 * 8192 * 2 * 20)
    experts = argparse.Namespace(**{**vars(planned(TWO_NODES)), "use_rollout_routing_replay": True})
    assert batch.train_batch_bytes(experts) == 256 * 32768 * (16 + 48 * 8 * 4)
    assert batch.train_batch_bytes(argparse.Namespace(has_trainer=False)) == 0


STALE = ("--max-weight-staleness", "4")
PARTIAL = ("--partial-rollout", "--over-sampling-batch-size", "64")
MASKED = (*PARTIAL, "--mask-offpolicy-in-partial-rollout")
OWN_FUNCTION = ("--rollout-function-path", "mine.generate", "--eval-function-path", "mine.generate")


@pytest.mark.parametrize(
    "asynchronous, words, oldest, batches",
    [
        (False, (), 0, 1),
        (False, PARTIAL, None, 1),
        (False, (*PARTIAL, *STALE), 4, 1),
        (False, MASKED, 0, 1),
        (True, (), 1, 2),
        (True, ("--update-weights-in-flight", *STALE), 1, 2),
        (True, ("--async-buffer-size", "3", "--update-weights-interval", "2"), 2, 4),
        (True, MASKED, 1, 2),
        (True, OWN_FUNCTION, None, 2),
    ],
)
def test_what_is_ahead_and_how_old_it_may_be(asynchronous, words, oldest, batches):
    args = parse_args(argv=[*SMALL.split(), *words], asynchronous=asynchronous)
    plan = make_plan(args)
    found = plan.overlap
    assert found.loop == ("train_async.py" if asynchronous else "train.py")
    assert (found.oldest, found.batches, found.rollouts_ahead) == (oldest, batches, batches - 1)
    assert (found.push_interval, found.in_flight) == (args.update_weights_interval, args.update_weights_in_flight)
    assert f"{batches}, {batches * 32}.00 MiB" in render(plan) and plan_as_json(plan)["overlap"]["oldest"] == oldest


@pytest.mark.parametrize("words", [["--debug-rollout-only"], ["--num-rollout", "0"]])
def test_without_training_nothing_overlaps(words):
    plan = make_plan(planned(SMALL, *words))
    assert plan.overlap is None and "OVERLAP" not in render(plan)


def test_training_alone_waits_for_no_engines():
    found = make_plan(planned(SMALL, "--debug-train-only")).overlap
    assert (found.trainer, found.engines, found.push_interval, found.oldest) == (None, None, None, None)


def test_every_column_with_a_row_for_each_sample_counts():
    """All that the rollout brings in rows as long as samples; images, which have no such row, have a note."""
    everything = {"use_opd": True, "use_rollout_routing_replay": True, "rollout_top_k": 3}
    found = batch.bytes_per_token(argparse.Namespace(**{**vars(planned(TWO_NODES)), **everything}))
    assert set(found) == {name for name, column in COLUMNS.items() if column.is_ragged and not column.computed}
    entries = {"rollout_routed_experts": 48 * 8, "rollout_top_p_token_ids": 3}
    for name, size in found.items():
        assert size == np.dtype(COLUMNS[name].dtype).itemsize * entries.get(name, 1), name
    assert sum(batch.bytes_per_token(planned(TWO_NODES)).values()) == 16


def test_sets_of_kept_tokens_count_with_the_most_that_they_may_have():
    plan = make_plan(planned(SMALL, "--rollout-top-k", "50"))
    assert plan.batch.object_store == 256 * 8192 * (16 + 4 + 50 * 4)
    assert "with 50 ids in the set of kept tokens of each token" in render(plan)
    # A nucleus has a largest size too, and no more than the vocabulary.
    assert batch.kept_tokens(planned(SMALL, "--rollout-top-p", "0.9")) == 2048
    assert batch.kept_tokens(planned(SMALL, "--rollout-top-p", "0.9", "--vocab-size", "300")) == 300
    assert batch.kept_tokens(planned(SMALL)) == 0 and "kept tokens" not in render(make_plan(planned(SMALL)))


def test_images_are_not_in_the_size_of_the_train_batch_and_a_note_says_so():
    args = planned(SMALL)
    assert not any("images" in note for note in make_plan(args).notes)
    args.multimodal_keys = {"image": "images"}
    assert any("images is not in the size of the train batch" in note for note in make_plan(args).notes)


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
    # The push reads the trainer's weights, without optimizer and gradients.
    held = next(part.bytes for part in training.parts if part.name == "weights")
    assert 0 < sync.trainer - held - 2 * GIB < 6 * GIB
    assert all(phase.fits for phase in plan.memory.phases)


def test_a_trainer_that_ends_leaves_nothing_on_the_devices_and_on_the_host(tmp_path):
    files = ["--save", str(tmp_path), "--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path)]
    sleeping, ending = (make_plan(planned(TWO_NODES, *words)) for words in (files, [*files, "--release-train"]))
    _, sync, generation = ending.memory.phases
    assert generation.trainer == 0 < sync.trainer == sleeping.memory.phases[1].trainer
    assert [part.name for part in ending.memory.training.host_parts] == []
    assert [part.name for part in sleeping.memory.training.host_parts] != []


def test_a_push_to_a_replaced_engine_finds_the_caches_of_the_others():
    """All that belongs to a step fits, and this does not: weights, buffers and whole engines."""
    words = TWO_NODES.replace("--expert-model-parallel-size 8", "--expert-model-parallel-size 4")
    words = words.replace("--sglang-mem-fraction-static 0.7", "")
    plan = make_plan(planned(words, "--use-fault-tolerance"))
    *step, replaced = plan.memory.phases
    assert [phase.name for phase in step] == ["training", "weight sync", "generation"]
    assert all(phase.fits for phase in step) and not replaced.fits
    assert (replaced.trainer, replaced.engine) == (step[1].trainer, step[2].engine)
    assert any(warning.startswith("push to a replaced engine needs") for warning in plan.warnings)
    assert len(make_plan(planned(words)).memory.phases) == 3
    awake = planned(TWO_NODES, "--use-fault-tolerance", "--no-offload-rollout")
    assert len(make_plan(awake).memory.phases) == 3, "every push is one beside caches"


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
    # Far too large for a GPU, no part goes without.
    big = advice(SMALL, "--num-layers", "360")
    assert all(big[part] for part in ("weights", "gradients", "optimizer", "activations")), big
    assert "--use-distributed-optimizer" in advice(SMALL, "--no-use-distributed-optimizer")["optimizer"]


def test_what_the_advice_on_the_optimizer_brings():
    def optimizer(*words):
        return next(
            part for part in make_plan(planned(SMALL, *words)).memory.training.parts if part.name == "optimizer"
        )

    plain, narrow = optimizer(), optimizer("--use-precision-aware-optimizer")
    assert "--use-precision-aware-optimizer" in plain.lower and "--use-precision-aware" not in narrow.lower
    assert narrow.bytes == pytest.approx(plain.bytes * 10 / 12)
    assert "--use-precision-aware" not in optimizer("--fp16").lower


def test_a_pipeline_layout_is_planned_like_the_same_split_by_numbers():
    def plan(*words):
        plan = make_plan(planned(SMALL, "--pipeline-model-parallel-size", "2", *words))
        return plan.parameters, plan.memory.training, plan.layout

    by_layout = plan("--pipeline-model-parallel-layout", "Et*20|t*16L")
    assert by_layout == plan("--decoder-first-pipeline-num-layers", "20", "--decoder-last-pipeline-num-layers", "16")
    assert by_layout[2].layers == (20, 16) and by_layout != plan()


def test_parameters_of_a_rank_may_be_unknown():
    plan = make_plan(planned(SMALL, "--debug-rollout-only"))
    assert plan.parameters.total > 0 and plan.parameters.per_rank is None


def test_sync_cost_follows_link_and_bytes():
    plan = make_plan(planned(SMALL, "--dry-run-link-gbps", "100"))
    assert plan.sync.bytes == 2 * 4_022_468_096 and plan.sync.transport == "process group"
    assert plan.sync.seconds == pytest.approx(plan.sync.bytes * 8 / 100e9)
    assert plan.sync.buckets == -(-plan.sync.bytes // 536870912)
    shared = make_plan(planned(TWO_NODES))
    assert shared.sync.transport == "shared handles" and shared.sync.seconds > 0
    assert "on the same GPU, over no link" in render(shared) and "ranks gather what they hold: 1.2 s" in render(shared)
    whole = SMALL.replace("--tensor-model-parallel-size 2 --sequence-parallel", "")
    alone = planned(whole, "--colocate", "--rollout-num-gpus", "4")
    assert make_plan(alone).sync.seconds == 0


# Of the model on two nodes: 48 layers of 128 experts of 3 x 2048 x 768, of 16 bits; and the rest: embedding and head of
# 151936 x 2048, 48 times attention of 2 x 2048 x 4096 + 2 x 2048 x 512, two norms of 128, a router and two norms, and a norm.
EXPERT_BYTES = 2 * 48 * 128 * 3 * 2048 * 768
REST_BYTES = 2 * (2 * 151936 * 2048 + 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 256 + 2048 * 128 + 4096) + 2048)
TENSOR, STAGES, EXPERTS = (
    "--tensor-model-parallel-size 4 --sequence-parallel", "--pipeline-model-parallel-size 2",
    "--expert-model-parallel-size 8",
)  # fmt: skip
DIRECTLY = ["--sglang-ep-size", "8"]


@pytest.mark.parametrize(
    ("without", "words", "direct", "gathered"),
    [
        # Rank r holds the experts that its engine rank hosts: the (r mod 8)th eighth. The rest is cut by four.
        ([STAGES], DIRECTLY, True, REST_BYTES),
        ([STAGES, TENSOR], DIRECTLY, True, 0),
        # Rank 1 holds the second quarter, and its engine rank hosts the second eighth: it lacks all 16 of these.
        ([STAGES, EXPERTS], [*DIRECTLY, "--expert-model-parallel-size", "4"], True, REST_BYTES + EXPERT_BYTES // 8),
        # Engines of four: rank 1 holds the second sixteenth, and its engine rank hosts the second quarter.
        (
            [STAGES, TENSOR, EXPERTS, "--rollout-num-gpus-per-engine 8"],
            ["--rollout-num-gpus-per-engine", "4", "--sglang-ep-size", "4", "--expert-model-parallel-size", "16"],
            True,
            EXPERT_BYTES // 4,
        ),
        # Engine ranks share experts, or a stage has some of the layers: everything is gathered that no rank holds whole.
        ([STAGES], [], False, REST_BYTES + EXPERT_BYTES),
        ([STAGES, TENSOR], [], False, EXPERT_BYTES),
        ([TENSOR], DIRECTLY, False, REST_BYTES + EXPERT_BYTES),
        ([STAGES, EXPERTS], [], False, REST_BYTES),
    ],
)
def test_ranks_gather_what_they_lack_and_experts_only_where_these_do_not_go_directly(without, words, direct, gathered):
    command = TWO_NODES
    for part in without:
        assert part in command
        command = command.replace(part, "")
    plan = make_plan(planned(command, *words))
    assert plan.sync.bytes == REST_BYTES + EXPERT_BYTES
    assert (plan.sync.shared_handles, plan.sync.direct_experts, plan.sync.gathered) == (True, direct, gathered)
    assert plan.sync.seconds == pytest.approx(gathered * 8 / 400e9)
    told = [line for line in render(plan).splitlines() if "before that, ranks gather" in line]
    assert len(told) == (gathered > 0) and all(("those that their GPU hosts" in line) == direct for line in told)


def test_a_bucket_of_experts_has_what_its_ranks_host_and_send():
    command = TWO_NODES.replace(STAGES, "")
    bucket = 512 * 2**20
    aligned = make_plan(planned(command, *DIRECTLY)).sync
    assert aligned.buckets == -(-REST_BYTES // bucket) + -(-(EXPERT_BYTES // 8) // bucket) == 6 + 14
    crossed = make_plan(planned(command.replace(EXPERTS, ""), *DIRECTLY, "--expert-model-parallel-size", "4")).sync
    assert crossed.buckets == 6 + -(-(EXPERT_BYTES // 4) // bucket) == 6 + 27
    # Rank 0 hosts a quarter, and sends the sixteenth that it holds to three others, from one memory.
    words = ["--sglang-ep-size", "4", "--rollout-num-gpus-per-engine", "4", "--expert-model-parallel-size", "16"]
    for part in (EXPERTS, TENSOR, "--rollout-num-gpus-per-engine 8"):
        command = command.replace(part, "")
    assert make_plan(planned(command, *words)).sync.buckets == 6 + -(-(5 * EXPERT_BYTES // 16) // bucket) == 6 + 34


def test_a_plan_for_a_host_without_gpus_gathers_experts_on_one_node(monkeypatch):
    """The memory of one rank serves all of its node; over two, each engine rank has that of the rank on its device."""
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    command = TWO_NODES.replace(STAGES, "").replace("--dry-run-gpu-memory-gib 80", "")
    one = command.replace("--actor-num-nodes 2", "").replace("8 --colocate", "16 --colocate")
    assert make_plan(planned(command, *DIRECTLY)).sync.direct_experts
    assert not make_plan(planned(one, *DIRECTLY)).sync.direct_experts


SERVED = """
sglang:
  - {{name: actor, server_groups: [{groups}]}}
  - {{name: judge, model_path: /nowhere/judge, update_weights: false, server_groups: [{{num_gpus: 4}}]}}
"""


@pytest.mark.parametrize(
    "groups, gpus, ways",
    [
        ("{num_gpus: 4}, {num_gpus: 4}", 12, {"shared handles", "process group"}),
        ("{worker_type: placeholder, num_gpus: 4}, {num_gpus: 4}", 12, {"process group"}),
        # The frozen model beside the ranks gets nothing.
        ("{num_gpus: 4}", 8, {"shared handles"}),
        # An engine with GPUs of both kinds, alone and beside one with GPUs of ranks only.
        ("{worker_type: placeholder, num_gpus: 2}, {num_gpus: 4, num_gpus_per_engine: 4}", 10, {"process group"}),
        (
            "{num_gpus: 2}, {num_gpus: 4, num_gpus_per_engine: 4}, {worker_type: placeholder, num_gpus: 2}", 12,
            {"shared handles", "process group"},
        ),
    ],
)  # fmt: skip
def test_ways_of_the_weights_in_a_run_with_engines_beside_the_ranks(tmp_path, groups, gpus, ways):
    path = tmp_path / "serving.yaml"
    path.write_text(SERVED.format(groups=groups))
    words = ["--colocate", "--rollout-num-gpus", str(gpus), "--sglang-config", str(path), "--num-gpus-per-node", "8"]
    sync = make_plan(planned(SMALL, *words)).sync
    assert {way for way in ("shared handles", "process group") if way in sync.transport} == ways
    assert sync.shared_handles == (ways == {"shared handles"})
    assert sync.seconds == pytest.approx(sync.bytes * 8 / (sync.link_gbps * 1e9))


def test_without_a_shape_the_plan_says_which_flags_are_missing():
    words = SMALL.split()
    start, end = words.index("--num-layers"), words.index("--actor-num-gpus-per-node")
    plan = make_plan(planned(" ".join([*words[:start], "--num-layers", "4", *words[end:]])))
    assert plan.memory is plan.parameters is plan.sync is None
    assert plan.missing == ("--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--vocab-size")
    text = render(plan)
    assert "Missing: --hidden-size, --ffn-hidden-size, --num-attention-heads" in text and "node 0" in text


def test_only_engines_are_planned_from_the_config(tmp_path):
    words = [*command_line(tmp_path), "--debug-rollout-only", "--dry-run", "--dry-run-gpu-memory-gib", "80"]
    plan = make_plan(parse_args(argv=words))
    # 300 x 64 embedding, two layers of 64 x 64 x 3 attention and 3 x 64 x 128 MLP, norms of 16, 16, 64, 64, and the last.
    assert plan.missing == () and plan.parameters.total == 300 * 64 + 2 * (12288 + 24576 + 160) + 64
    assert plan.memory.training is None and plan.memory.serving.parts[0].bytes == 2 * plan.parameters.total
    assert plan.sync is None and "not estimated" not in render(plan)


def test_a_prompt_without_limit_makes_lower_bounds():
    words = SMALL.replace("--rollout-max-prompt-len 1024", "").replace("7168", "8192")
    plan = make_plan(planned(words))
    # Two responses of 8192 fill the budget of 16384, so that their prompts do not fit.
    assert plan.batch.micro_batches == 64 and "at least 64 micro-batches" in render(plan)
    assert any("no flag limits the prompt" in note for note in plan.notes)
    assert "at least" not in render(make_plan(planned(SMALL)))


def test_an_assumed_length_is_shown():
    words = SMALL.replace("--rollout-max-prompt-len 1024 --rollout-max-response-len 7168", "")
    plan = make_plan(planned(words))
    assert (plan.batch.longest_sample, plan.batch.assumed_sample) == (None, 4096)
    text = render(plan)
    assert (
        "no flag limits a sample: 4096 tokens are assumed (--seq-length); token budget of a micro-batch: 16384" in text
    )
    assert plan.batch.micro_batches == 128 // 2 // 4 and "16 micro-batches per rank" in text


def test_host_memory_is_explained():
    plan = make_plan(planned(TWO_NODES, "--use-kl-loss"))
    training = plan.memory.training
    weights = next(part.bytes for part in training.parts if part.name == "weights")
    asleep, copies = training.host_parts
    # The reference, and the actor's weights that are put aside while it is in place.
    assert copies.bytes == 2 * weights and copies.name == "sets of weights (reference, actor put aside)"
    assert asleep.bytes + copies.bytes == training.host
    assert "(reference, actor put aside)" in render(plan)


@pytest.mark.parametrize("shared", [True, False])
def test_a_trainer_that_is_not_estimated_does_not_fit_by_itself(shared):
    placed = ["--colocate"] if shared else ["--rollout-num-gpus", "8"]
    args = planned(SMALL, *placed)
    args.train_backend = "fsdp"
    plan = make_plan(args)
    training, generation = plan.memory.phases
    assert (training.trainer, training.fits) == (None, None)
    assert (generation.trainer, generation.fits) == ((None, None) if shared else (0, True))
    assert "not known" in render(plan) and not any("does not fit" in warning for warning in plan.warnings)


def test_a_sample_above_the_budget_is_said_once(caplog):
    words = [*SMALL.split(), "--max-tokens-per-gpu", "1000"]
    for backend in ("megatron", "fsdp"):
        args = planned(" ".join(words))
        args.train_backend = backend
        plan = make_plan(args)
        assert sum("longest allowed sample" in warning for warning in plan.warnings) == 1
    assert "longest allowed sample" not in caplog.text


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
    path.write_text("rollout_batch_size: 64\ncustom:\n  my_margin: 0.5\n  my_token: abc\n  judge_key: abc\n")
    plan = make_plan(planned(SMALL, "--custom-config-path", str(path)))
    assert plan.custom_values == {"my_margin": 0.5, "my_token": "<redacted>", "judge_key": "<redacted>"}
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


def test_a_file_that_cannot_be_written_is_named_before_anything_is_printed(capsys):
    args = planned(SMALL, "--dry-run-json", "/proc/nowhere/plan.json")
    with pytest.raises(UserError, match="--dry-run-json /proc/nowhere/plan.json cannot be written"):
        show_plan(args)
    assert capsys.readouterr().out == ""


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
        "heavy = {'torch', 'transformers', 'megatron.core', 'sglang', 'ray', 'aiohttp', 'requests', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
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
