"""A critic's memory beside the actor, and the memory of the machine against what a run takes."""

import argparse

import psutil
import pytest

from slime.arguments.checkpoints import WeightSource
from slime.arguments.config_files.role_config import critic_args
from slime.estimates.training_memory import training_memory
from slime.plan import make_plan, render, require_memory_of_machine
from slime.plan import memory as host_memory
from slime.plan.critic_memory import planned_critic
from slime.plan.memory import (
    ENGINE_BYTES,
    FURTHER_SCHEDULER_BYTES,
    GIB,
    RANK_BYTES,
    RUN_BYTES,
    HostShare,
    gpu_memory_gib,
    host_memory_problem,
    host_shares,
    machine_memory,
)
from slime.plan.placement import EnginePart
from slime.plan.setup import parallel_layout, shape_of, tokens_of_stream, training_setup
from slime.utils.errors import UserError
from tests.support.tables.plans import SMALL, TWO_NODES, planned

PPO = ("--advantage-estimator", "ppo")
AT_REST = ("weights", "gradients", "optimizer", "data", "overhead")


def training(*words):
    return make_plan(planned(SMALL, *words)).memory.training


def part(plan, name):
    return next((part.bytes for part in plan.parts if part.name == name), 0)


def test_a_critic_adds_what_it_has_while_the_actor_works():
    alone, both = training(), training(*PPO)
    assert part(alone, "critic") == 0
    # The model ties its embeddings: a critic has all of it, and a row of 2560 in place of an output layer, whole on both
    # tensor-parallel ranks; two data-parallel ones divide its state.
    assert part(both, "critic") == sum(part(alone, name) for name in AT_REST) + 2560 * (2 + 4 + 12 // 2)
    assert both.total == alone.total + part(both, "critic") == sum(part.bytes for part in both.parts)
    assert both.host_parts == alone.host_parts == ()


def test_a_critic_has_no_vocabulary_projection():
    actor = training(*PPO, "--untie-embeddings-and-output-weights")
    assert part(actor, "critic") == part(training(*PPO), "critic")
    assert part(actor, "critic") < sum(part(actor, name) for name in AT_REST)


def of_critic(args):
    """Its memory on a rank of each of its stages."""
    critic = planned_critic(critic_args(args))
    layout = parallel_layout(critic)
    return training_memory(
        shape_of(critic), training_setup(critic, layout, tokens_of_stream(critic, layout), layout.pipeline)
    )


@pytest.mark.parametrize("words", [(), ("--untie-embeddings-and-output-weights",)])
def test_a_critic_has_no_vocabulary_projection_on_its_last_stage(words):
    """Nor layers that predict further tokens, which are the actor's alone."""
    stages = ("--pipeline-model-parallel-size", "2", *words)
    first, last = of_critic(planned(SMALL, *PPO, *stages, "--mtp-num-layers", "1", "--enable-mtp-training"))
    # 18 layers each, the embedding's 151,936 rows and 128 that pad them, and a final norm beside the row.
    assert (first.weights - last.weights) / 2 == 152_064 // 2 * 2560 - 2 * 2560
    assert last.logits == 0


@pytest.mark.parametrize("words", [(), ("--optimizer-cpu-offload",)])
def test_a_critic_is_on_the_host_where_the_actor_is(words):
    """All of it that stays between two steps, but its gradients, where both sleep, and an optimizer that is there anyhow."""
    shared = ("--colocate", "--rollout-num-gpus", "4", *words)
    alone, both = training(*shared), training(*shared, *PPO)
    (critic,) = of_critic(planned(SMALL, *shared, *PPO))
    expected = critic.weights + critic.optimizer + critic.host_offloaded
    assert expected > 2 * GIB and both.host - alone.host == part_of_host(both, "critic") == expected
    assert both.host_of_node - alone.host_of_node == 4 * expected
    assert [ours - its for ours, its in zip(both.stage_hosts, alone.stage_hosts, strict=True)] == [expected]
    (share,) = host_shares(
        planned(SMALL, *shared, *PPO), make_plan(planned(SMALL, *shared, *PPO)).memory, 4, [], on_gpus=True
    )
    assert share.each >= both.host


def part_of_host(plan, name):
    return next((part.bytes for part in plan.host_parts if part.name == name), 0)


def test_every_stage_has_the_same_stage_of_the_critic_beside_it():
    """The one with the actor's head and logits not that with the critic's embedding."""
    stages = ("--pipeline-model-parallel-size", "2")
    alone, both = training(*stages).stage_totals, training(*stages, *PPO).stage_totals
    first, last = (with_critic - without for with_critic, without in zip(both, alone, strict=True))
    # One rank has each of the four parts: 18 bytes for a parameter.
    assert first - last == 18 * (152_064 // 2 * 2560 - 2 * 2560)


def test_a_critic_of_another_layout_has_its_largest_stage_beside_each_of_the_actors(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {pipeline_model_parallel_size: 2}}]\n")
    words = (*PPO, "--megatron-config-path", str(path))
    # Ranks 0 and 1 have the first stage of the critic, 2 and 3 the last, and all of them the one stage of the actor.
    first, last = of_critic(planned(SMALL, *words))
    assert part(training(*words), "critic") == first.persistent > last.persistent


def test_a_critic_that_needs_more_at_work_sets_the_peak(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {max_tokens_per_gpu: 65536}}]\n")
    larger = training(*PPO, "--megatron-config-path", str(path))
    assert part(larger, "critic") > part(training(*PPO), "critic") + 2**30


def test_the_phase_and_a_note_tell_of_it():
    plan = make_plan(planned(SMALL, *PPO))
    phase = next(phase for phase in plan.memory.phases if phase.name == "training")
    assert phase.trainer == plan.memory.training.total and phase.fits is False
    assert any("the critic stays on the GPU while the actor works" in note for note in plan.notes)


def test_actor_and_critic_are_two_processes_whose_contexts_stay_when_they_sleep():
    both = make_plan(planned(TWO_NODES, *PPO)).memory.phases
    alone = make_plan(planned(TWO_NODES)).memory.phases
    (_, sync, generation), (_, sync_of_both, generation_of_both) = alone, both
    assert sync_of_both.trainer - sync.trainer == generation_of_both.trainer - generation.trainer == 2 * GIB
    assert (sync_of_both.engine, generation_of_both.engine) == (sync.engine, generation.engine)


@pytest.mark.parametrize("command", [SMALL, TWO_NODES])
def test_plans_without_a_critic_say_nothing_of_one(command):
    plan = make_plan(planned(command))
    assert not any("critic" in note for note in plan.notes)


NO_CRITIC = argparse.Namespace(use_critic=False)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")


def memory_is(monkeypatch, gib: float) -> None:
    monkeypatch.setattr("slime.plan.machine_memory", lambda: round(gib * GIB))
    monkeypatch.setattr(host_memory, "machine_memory", lambda: round(gib * GIB))


def cpu_arguments(engines: int, *words: str) -> argparse.Namespace:
    """A model of 4 B parameters, as a run without GPUs sees it."""
    args = planned(SMALL, "--rollout-num-gpus", str(engines), "--rollout-num-gpus-per-engine", "1", *words)
    args.dry_run_gpu_memory_gib = None
    return args


def test_processes_count_where_the_model_is_not_known():
    shares = host_shares(NO_CRITIC, None, 3, [EnginePart(0, 4, 2)], on_gpus=False)
    assert [(share.count, share.each) for share in shares] == [
        (1, RUN_BYTES), (3, RANK_BYTES), (2, ENGINE_BYTES + FURTHER_SCHEDULER_BYTES),
    ]  # fmt: skip
    critic = host_shares(argparse.Namespace(use_critic=True, num_rollout=1), None, 3, [], on_gpus=False)
    assert critic[1].each == 2 * RANK_BYTES


def test_tensors_are_on_top_of_the_processes(on_cpu):
    args = cpu_arguments(3)
    memory = make_plan(args).memory
    shares = host_shares(args, memory, 4, [EnginePart(0, 3, 1)], on_gpus=False)
    assert [share.total for share in shares[1:]] == [
        4 * (RANK_BYTES + memory.training.total + memory.training.host), 3 * (ENGINE_BYTES + memory.serving.total),
    ]  # fmt: skip
    assert shares[2].flag == "--rollout-num-gpus"
    # 4 B parameters in float32, and a cache of 32768 tokens.
    assert memory.serving.total > 16e9


def test_on_a_cpu_a_trainer_that_sleeps_takes_no_memory_for_it(on_cpu):
    """Nor does its critic: the bytes go into a file."""
    runs = [cpu_arguments(4, "--colocate", *words) for words in ((), ("--no-offload-train",), PPO)]
    memories = [make_plan(args).memory for args in runs]
    assert [memory.training.host for memory in memories] == [0, 0, 0]
    asleep, awake, _ = (
        host_shares(args, memory, 4, [EnginePart(0, 4, 1)], on_gpus=False)
        for args, memory in zip(runs, memories, strict=True)
    )
    assert [args.offload_train for args in runs] == [True, False, True] and asleep == awake


def test_pipeline_stages_are_added_up_and_not_taken_at_the_largest(on_cpu):
    words = ["--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "1"]
    args = planned(SMALL.replace(" --sequence-parallel", ""), *words)
    args.dry_run_gpu_memory_gib = None
    memory = make_plan(args).memory
    totals = memory.training.stage_totals
    assert len(totals) == 4 and max(totals) > min(totals)
    (_, ranks) = host_shares(args, memory, 4, [], on_gpus=False)
    assert abs(ranks.total - (4 * RANK_BYTES + sum(totals) + sum(memory.training.stage_hosts))) < 8


def test_no_number_is_named_where_fewer_parts_would_each_be_larger():
    machine = 10 * GIB
    ranks = HostShare("training rank", 4, 4 * GIB)
    generic = "take a smaller model or fewer of its parts, or join a cluster by RAY_ADDRESS"
    assert host_memory_problem([ranks], machine).endswith(generic)
    engines = HostShare("engine", 4, GIB, "--rollout-num-gpus")
    assert host_memory_problem([ranks, engines], machine).endswith(generic)
    # What engines take can be lowered by their number, though training takes more.
    assert "--rollout-num-gpus 1 would fit" in host_memory_problem([ranks, engines], 17 * GIB)
    assert host_memory_problem([engines, engines], 7 * GIB).endswith(generic), "no one flag counts both"


def test_on_gpus_an_estimate_refuses_nothing(monkeypatch, caplog):
    memory_is(monkeypatch, 1)
    args = planned(SMALL, "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    require_memory_of_machine(args)
    assert "but this machine has 1.0 GiB" in caplog.text


def test_a_run_that_is_too_large_is_refused_with_both_numbers_and_a_way_out(on_cpu, monkeypatch):
    # It needs no plan of the batch, no weights, and no data.
    memory_is(monkeypatch, 16)
    with pytest.raises(UserError) as error:
        require_memory_of_machine(cpu_arguments(64))
    assert "of memory (64 engines of " in str(error.value) and "this machine has 16.0 GiB" in str(error.value)
    memory_is(monkeypatch, 1e6)
    require_memory_of_machine(cpu_arguments(64))


def test_an_evaluation_alone_needs_no_memory_for_training(on_cpu, monkeypatch):
    """Neither optimizer nor steps, no critic, no train batch and no checkpoint: weights, and the model's gradient buffer."""
    trained, evaluated = (cpu_arguments(2, *PPO, "--save", "s", "--num-rollout", count) for count in ("10", "0"))
    memory_is(monkeypatch, 1e6)
    plans = [make_plan(args) for args in (trained, evaluated)]
    training, alone = (plan.memory.training for plan in plans)
    assert {part.name for part in alone.parts} == {"weights", "gradients", "buffers"} and alone.moment == "weight push"
    assert [part(alone, name) for name in ("weights", "gradients")] == [
        part(training, name) for name in ("weights", "gradients")
    ]
    assert alone.saving == 0 < training.saving
    assert plans[1].batch.object_store == 0 < plans[0].batch.object_store
    assert not any("critic" in note for note in plans[1].notes)
    shares = [
        host_shares(args, plan.memory, 4, [EnginePart(0, 2, 1)], on_gpus=False)
        for args, plan in zip((trained, evaluated), plans, strict=True)
    ]
    needs, enough = (sum(share.total for share in of_run) / GIB for of_run in shares)
    memory_is(monkeypatch, (needs + enough) / 2)
    require_memory_of_machine(evaluated)
    with pytest.raises(UserError, match="of memory"):
        require_memory_of_machine(trained)


def test_the_phases_of_an_evaluation_alone_have_no_training():
    def phases(command):
        return [phase.name for phase in make_plan(planned(command, "--num-rollout", "0")).memory.phases]

    assert phases(TWO_NODES) == phases(SMALL) == ["weight sync", "generation"]


def test_the_plan_warns_in_the_same_words(on_cpu, monkeypatch):
    memory_is(monkeypatch, 16)
    with pytest.raises(UserError) as error:
        require_memory_of_machine(cpu_arguments(64))
    assert str(error.value) in make_plan(cpu_arguments(64)).warnings
    memory_is(monkeypatch, 1e6)
    assert not any("this machine has" in warning for warning in make_plan(cpu_arguments(64)).warnings)


def test_a_plan_for_gpus_says_nothing_about_this_machine(monkeypatch):
    memory_is(monkeypatch, 0.1)
    assert not any("this machine has" in warning for warning in make_plan(planned(SMALL)).warnings)


@pytest.mark.parametrize(
    "engines, per_engine, way_out",
    [
        # 10 GiB for engines of 0.75 GiB, or of pairs of GPUs with one more scheduler.
        (64, 1, "--rollout-num-gpus 11 would fit"),
        (64, 2, "--rollout-num-gpus 16 would fit"),
    ],
)
def test_the_way_out_fits(engines, per_engine, way_out):
    machine = 10 * GIB

    def shares(gpus):
        return host_shares(NO_CRITIC, None, 1, [EnginePart(0, gpus, per_engine)], on_gpus=False)

    assert way_out in host_memory_problem(shares(engines), machine)
    largest = int(way_out.split()[1])
    assert host_memory_problem(shares(largest), machine) is None
    assert host_memory_problem(shares(largest + per_engine), machine) is not None


def test_one_engine_that_is_too_large_has_another_way_out():
    problem = host_memory_problem([HostShare("engine", 1, 30 * GIB, "--rollout-num-gpus")], 8 * GIB)
    assert problem == (
        "the run needs about 30.0 GiB of memory (1 engine of 30.0 GiB), but this machine has 8.0 GiB; take a smaller model "
        "or fewer of its parts, or join a cluster by RAY_ADDRESS"
    )


def test_on_gpus_what_ranks_keep_on_the_host_counts(monkeypatch):
    plan = make_plan(planned(SMALL))
    offloaded = make_plan(planned(SMALL, "--optimizer-cpu-offload", "--use-precision-aware-optimizer"))
    (share,) = host_shares(NO_CRITIC, offloaded.memory, 4, [EnginePart(4, 2, 2)], on_gpus=True)
    assert (share.count, share.each) == (4, offloaded.memory.training.host) and share.each > 0
    assert host_shares(NO_CRITIC, None, 4, [], on_gpus=True) == ()
    assert plan.memory.training.host < offloaded.memory.training.host


def test_what_engines_have_is_on_the_host_of_the_rank_that_sends_changes(tmp_path):
    directories = [
        "--update-weight-disk-dir",
        str(tmp_path),
        "--update-weight-local-checkpoint-dir",
        str(tmp_path / "local"),
    ]
    command = planned(SMALL, "--update-weight-transport", "disk", "--update-weight-mode", "delta", *directories)
    plan = make_plan(command)
    (kept,) = plan.memory.training.host_parts
    # Two tensor-parallel ranks have half of the matrices each, and all of the norms.
    weights = part(plan.memory.training, "weights")
    assert 1.9 * weights < kept.bytes < 2 * weights and kept.bytes == plan.memory.training.host_of_node
    (share,) = host_shares(NO_CRITIC, plan.memory, 4, [], on_gpus=True)
    assert share.total == kept.bytes, "the other three have nothing"
    assert "weights that engines have" in render(plan)
    assert training("--update-weight-transport", "disk", *directories[:2]).host == 0


def test_what_a_save_takes_of_the_host_counts(tmp_path):
    plan = make_plan(planned(SMALL, "--save", str(tmp_path)))
    saving = plan.memory.training
    # The model's 16-bit weights on two data-parallel ranks: half of them, and half of 12 bytes for each.
    weights = part(saving, "weights")
    assert [(part.name, part.bytes) for part in saving.saving_parts] == [
        ("optimizer", 3 * weights),
        ("weights", weights // 2),
    ]
    assert saving.saving == 3 * weights + weights // 2
    assert (saving.saving_of_node, saving.stage_savings) == (4 * saving.saving, (saving.saving,))
    (share,) = host_shares(NO_CRITIC, plan.memory, 4, [], on_gpus=True)
    assert share.each == saving.saving
    assert "host memory for a checkpoint while it is written" in render(plan)
    assert training().saving == 0 and "for a checkpoint" not in render(make_plan(planned(SMALL)))


def test_on_a_cpu_a_save_counts_where_it_is_above_the_peak(on_cpu, tmp_path):
    few = ["--max-tokens-per-gpu", "8", "--save", str(tmp_path)]
    plans = [make_plan(cpu_arguments(3, *words)).memory.training for words in (few, few[:2])]
    saving, without = plans
    (beyond,) = saving.stage_savings
    assert 0 < beyond < saving.saving and without.stage_savings == (0,)
    (_, ranks, _) = host_shares(
        NO_CRITIC, make_plan(cpu_arguments(3, *few)).memory, 4, [EnginePart(0, 3, 1)], on_gpus=False
    )
    assert ranks.each == RANK_BYTES + saving.total + saving.host + beyond


def loading_from(source, *words, of=lambda *words: planned(SMALL, *words)):
    args = of("--load-main-params-from-ckpt", *words)
    args.initial_weights = source
    return args, make_plan(args)


def test_weights_that_come_in_float32_by_way_of_the_host_count():
    _, plan = loading_from(WeightSource("megatron", "/m"))
    loading, weights = plan.memory.training, part(plan.memory.training, "weights")
    assert loading.loading == 2 * weights == loading.stage_savings[0] and loading.host == 0
    (share,) = host_shares(NO_CRITIC, plan.memory, 4, [], on_gpus=True)
    assert share.each == loading.loading
    assert f"host memory while weights are loaded, in float32, GiB: at most {2 * weights / GIB:.2f}" in render(plan)
    # An optimizer's state brings copies of its own, and a Hugging Face directory is read weight by weight.
    resumed = WeightSource("megatron", "/m", resume=True)
    assert loading_from(resumed, "--no-load-optim")[1].memory.training.loading == 2 * weights
    for source in (resumed, WeightSource("hf", "/m"), WeightSource("random"), None):
        assert loading_from(source)[1].memory.training.loading == 0, source
    assert "while weights are loaded" not in render(make_plan(planned(SMALL)))


def test_on_a_cpu_a_load_counts_where_it_is_above_the_peak(on_cpu):
    """It is over before the first pass, and before anything else of a rank is on the host."""

    def loading(*words):
        source = WeightSource("megatron", "/m")
        return loading_from(source, "--max-tokens-per-gpu", "8", *words, of=lambda *words: cpu_arguments(3, *words))[1]

    # Gloo's copy of the gradients is as large, later.
    assert loading().memory.training.stage_savings == (0,)
    plan = loading("--optimizer", "sgd", "--no-use-distributed-optimizer").memory.training
    room = plan.total - sum(part(plan, name) for name in AT_REST)
    assert plan.stage_savings == (plan.loading - room,) and 0 < room < plan.loading


def test_the_limit_of_a_container_is_the_machines_memory(tmp_path, monkeypatch):
    limit, none = tmp_path / "memory.max", tmp_path / "none"
    limit.write_text("1000000\n")
    none.write_text("max\n")
    monkeypatch.setattr(host_memory, "_LIMITS_OF_CONTAINERS", (str(none), str(tmp_path / "nowhere")))
    assert machine_memory() == psutil.virtual_memory().total
    monkeypatch.setattr(host_memory, "_LIMITS_OF_CONTAINERS", (str(none), str(limit)))
    assert machine_memory() == 1000000


def test_memory_is_typed_detected_or_assumed(monkeypatch):
    untyped = argparse.Namespace(dry_run_gpu_memory_gib=None)
    assert gpu_memory_gib(argparse.Namespace(dry_run_gpu_memory_gib=24.0)) == (24.0, "--dry-run-gpu-memory-gib")
    monkeypatch.setattr(host_memory, "gpus_on_this_machine", lambda: 2)
    monkeypatch.setattr(host_memory, "_QUERY", ["printf", "81920\\n40960\\n"])
    assert gpu_memory_gib(untyped) == (40.0, "this machine's GPU")
    monkeypatch.setattr(host_memory, "_QUERY", ["false"])
    gib, source = gpu_memory_gib(untyped)
    assert gib == 80.0 and source.startswith("assumed")
    monkeypatch.setattr(host_memory, "gpus_on_this_machine", lambda: 0)
    assert gpu_memory_gib(untyped)[0] == 80.0
