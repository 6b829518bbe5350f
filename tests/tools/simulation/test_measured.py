"""Times of the model from what runs left: parts that were put in are found again."""

import json
from pathlib import Path

import numpy as np
import pytest

from slime.arguments.derivation import FULLY_ASYNC
from slime.rollout.rollout_dump import save_rollout
from slime.utils.types import Sample
from tests.tools.test_report import write_events
from tools.simulation.measured import (
    Part,
    fit,
    lengths_from_statistics,
    lengths_of_dump,
    measured,
    read_steps,
    run_shape,
)

ARGUMENTS = {
    "actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1, "has_engines": True, "has_trainer": True, "over_sampling_batch_size": 4,
    "rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2,
    "sglang_max_running_requests": None, "sglang_server_concurrency": 7, "asynchronous": False,
    "save_debug_rollout_data": None, "colocate": False, "async_buffer_size": 1, "update_weights_interval": 1,
    "max_weight_staleness": None, "use_critic": False, "prefill_num_servers": None, "rollout_num_engines": 2,
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout", "rollout_external_engine_infos": None,
    "dynamic_sampling_filter_path": None,
}  # fmt: skip


def external(gpus: int, worker_type: str = "regular") -> dict:
    return {"num_gpus": gpus, "worker_type": worker_type}


STEP, REQUEST, FIXED = 0.5, 0.125, 2.0
PASS_TOKEN, TRAIN_TOKEN, PUSH, REST = 0.01, 0.04, 3.0, 1.5


def write_run(directory: Path, arguments: dict, lengths: list[list[list[int]]], prompt: int = 10) -> Path:
    """A run whose phases take exactly what the parts say. `lengths`: of every step, one list for each prompt.

    With an interval the last step of each has a push. Event files count in optimizer steps where the arguments say so.
    """
    unit = arguments["num_steps_per_rollout"] if arguments.get("wandb_always_use_train_step") else 1
    scalars = []
    for step, of_step in enumerate(lengths):
        flat = np.asarray(of_step).ravel()
        total = float(flat.mean()) + prompt
        device_tokens = total * flat.size / 2
        seconds = {
            "rollout": FIXED + STEP * flat.max() + REQUEST * flat.sum() / 2,
            "log_probs": 0.25 * PASS_TOKEN * device_tokens,
            "ref_log_probs": 0.75 * PASS_TOKEN * device_tokens,
            "actor_train": TRAIN_TOKEN * device_tokens,
        }
        if (step + 1) % arguments["update_weights_interval"] == 0:
            seconds["update_weights"] = PUSH
        seconds["step"] = sum(seconds.values()) + REST + 100.0 * (step == 1)
        seconds["save_model"] = 100.0 * (step == 1)
        scalars += [(f"perf/{name}_time", value, step) for name, value in seconds.items()]
        statistics = {"mean": flat.mean(), "median": np.median(flat), "max": flat.max()}
        scalars += [(f"rollout/response_len/{name}", float(value), step) for name, value in statistics.items()]
        scalars.append(("rollout/total_lengths", total, step))
        scalars.append(("perf/actor_train_tok_per_s", total * flat.size / seconds["actor_train"], step))
    write_events(directory / "tensorboard", [(tag, value, step * unit) for tag, value, step in scalars])
    record = {"arguments": {name: {"value": value, "origin": "default"} for name, value in arguments.items()}}
    (directory / "tensorboard" / "args.json").write_text(json.dumps(record))
    return directory


def write_dumps(template: str, lengths: list[list[list[int]]]) -> None:
    for step, of_step in enumerate(lengths):
        samples = [
            Sample(index=2 * group + i, group_index=group, tokens=[1] * (length + 10), response_length=length)
            for group, of_group in enumerate(of_step)
            for i, length in enumerate(of_group)
        ]
        save_rollout(template, step, samples)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs, one of four times the prompts of the other."""
    generator = np.random.default_rng(0)
    found = []
    for name, prompts in (("small", 4), ("large", 16)):
        arguments = {**ARGUMENTS, "rollout_batch_size": prompts, "over_sampling_batch_size": prompts}
        arguments["save_debug_rollout_data"] = str(tmp_path / name / "rollout_{rollout_id}.pt")
        arguments["sglang_max_running_requests"] = 64
        lengths = generator.integers(5, 60, (6, prompts, 2)).tolist()
        write_dumps(arguments["save_debug_rollout_data"], lengths)
        found.append(write_run(tmp_path / name, arguments, lengths))
    return found


def test_two_batch_sizes_tell_the_parts_apart(runs):
    found = measured(runs)
    speeds = found.speeds
    assert speeds.decode_step_seconds == pytest.approx(STEP, rel=0.1)
    assert speeds.decode_request_seconds == pytest.approx(REQUEST, rel=0.1)
    assert speeds.train_token_seconds == pytest.approx(TRAIN_TOKEN, rel=0.01)
    assert speeds.log_probs_token_seconds == pytest.approx(PASS_TOKEN, rel=0.01)
    assert speeds.push_seconds == pytest.approx(PUSH)
    assert speeds.step_fixed_seconds == pytest.approx(REST), "what saving took is no part of it"
    assert (speeds.engine_devices, speeds.replica_devices, speeds.max_running_requests) == (2, 2, 64)
    assert found.error < 0.02
    assert found.prompt_tokens == 10
    assert measured(runs, max_running_requests=3).speeds.max_running_requests == 64, "the runs tell"
    assert len(found.steps) == 10, "the first step of each is left out"
    assert found.lengths.shape == (5 * 4 + 5 * 16, 2)


def test_engines_of_several_sizes_are_not_replayed(tmp_path, runs):
    record = tmp_path / "small" / "tensorboard" / "args.json"
    found = json.loads(record.read_text())
    found["arguments"]["sglang_config"] = {"value": "/serving.yaml"}
    record.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="has --sglang-config, and engines of several sizes are not replayed"):
        measured(runs)


def test_steps_that_are_alike_share_their_time_out_as_usual():
    seconds, alike = [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]
    assert fit(seconds, [Part([1.0] * 3, 0.0), Part(alike, 0.5), Part(alike, 0.5)]) == pytest.approx(
        [0.0, 0.25, 0.25], abs=0.01
    )
    assert fit(seconds, [Part([1.0] * 3, 0.0), Part(alike, 1.0)]) == pytest.approx([0.0, 0.5], abs=0.01)


def test_steps_that_differ_decide():
    amounts = [1.0, 2.0, 4.0, 8.0]
    fixed, each = fit([3.0 + 0.5 * amount for amount in amounts], [Part([1.0] * 4, 0.0), Part(amounts, 1.0)])
    assert (fixed, each) == pytest.approx((3.0, 0.5), rel=0.1)


def test_no_part_takes_less_than_nothing():
    fixed, each = fit([4.0, 3.0, 1.0], [Part([1.0] * 3, 0.0), Part([1.0, 2.0, 4.0], 1.0)])
    assert each == 0.0 and fixed > 0
    assert fit([0.0, 0.0], [Part([1.0, 1.0], 1.0)]) == [0.0]


def test_lengths_of_a_dump_keep_their_prompts(tmp_path):
    lengths = [(0, 5), (1, 9), (0, 6), (1, 2)]
    samples = [
        Sample(index=i, group_index=group, tokens=[1] * (n + 3), response_length=n)
        for i, (group, n) in enumerate(lengths)
    ]
    path = save_rollout(str(tmp_path / "dump_{rollout_id}.pt"), 0, samples)
    assert lengths_of_dump(path).tolist() == [[5, 6], [9, 2]]
    with pytest.raises(ValueError, match="have \\[2\\] answers, expected 3 each"):
        lengths_of_dump(path, 3)
    (tmp_path / "no.pt").write_text("x")
    with pytest.raises(ValueError, match="no.pt"):
        lengths_of_dump(tmp_path / "no.pt")


def test_lengths_from_statistics_have_their_mean_and_their_longest():
    shape = run_shape({**ARGUMENTS, "rollout_batch_size": 64, "over_sampling_batch_size": 64}, Path("args.json"))
    lengths = lengths_from_statistics(120.0, 80.0, 900.0, shape)
    assert lengths.shape == (64, 2) and lengths.max() == 900
    assert lengths.mean() == pytest.approx(120, rel=0.1)
    assert np.median(lengths) == pytest.approx(80, rel=0.1)
    assert set(lengths_from_statistics(50.0, 50.0, 50.0, shape).ravel()) == {50}


def test_a_run_without_dumps_is_read_from_its_statistics(tmp_path):
    directory = write_run(tmp_path / "run", ARGUMENTS, [[[4, 9], [8, 2], [3, 3], [5, 6]]] * 3)
    # A step that the run did not finish.
    write_events(directory / "tensorboard", [("perf/rollout_time", 1.0, 3)])
    steps = read_steps(directory, lambda step: step > 1)
    assert len(steps) == 1
    assert steps[0].lengths.shape == (4, 2) and steps[0].lengths.max() == 9
    assert steps[0].run.max_running_requests == 7, "an engine never has more than it is sent"
    assert read_steps(directory, lambda step: step > 1, 5)[0].run.max_running_requests == 5


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"has_trainer": False}, "without a trainer"),
        ({"over_sampling_batch_size": 8}, "--over-sampling-batch-size 8"),
        ({"dynamic_sampling_filter_path": "my_filter.py:keep"}, "--dynamic-sampling-filter-path my_filter.py:keep"),
        ({"colocate": True}, "--colocate"),
        ({"asynchronous": ...}, "no argument 'asynchronous'"),
        ({"use_critic": True}, "--advantage-estimator ppo"),
        (
            {"rollout_function_path": f"{FULLY_ASYNC}.generate_rollout_fully_async"},
            "--rollout-function-path .*fully_async",
        ),
        ({"prefill_num_servers": 1}, "--prefill-num-servers 1"),
        ({"rollout_num_engines": 0, "rollout_num_gpus": 0}, "--rollout-num-gpus 0"),
        (
            {"rollout_external_engine_infos": [external(4), external(2)]},
            "several kinds in --rollout-external-engine-addrs",
        ),
        (
            {"rollout_external_engine_infos": [external(2, "prefill"), external(2, "decode")]},
            "several kinds in --rollout-external-engine-addrs",
        ),
    ],
)
def test_a_run_that_does_not_tell_is_refused_by_name(changed, expected):
    values = {name: value for name, value in {**ARGUMENTS, **changed}.items() if value is not ...}
    with pytest.raises(ValueError, match=expected):
        run_shape(values, Path("args.json"))


def test_executions_of_several_samples_are_not_replayed(tmp_path):
    """Their dump says so by itself; without one, the tokens that were trained do."""
    lengths = [[[4, 9, 8], [8, 2, 8], [3, 3, 8], [5, 6, 8]]] * 3
    directory = write_run(tmp_path / "run", ARGUMENTS, lengths)
    with pytest.raises(ValueError, match="rollout 1 trained 12 samples, and .* 4 prompts with 2 answers"):
        read_steps(directory, lambda step: step > 0)


def test_engines_of_somebody_else_are_as_large_as_they_say():
    """The flag for engines of the run's own has its default then."""
    found = {"rollout_external_engine_infos": [external(4)] * 3, "rollout_num_engines": 3, "rollout_num_gpus": 12}
    shape = run_shape({**ARGUMENTS, **found, "rollout_num_gpus_per_engine": 1}, Path("args.json"))
    assert (shape.engines, shape.engine_devices) == (3, 4)


def test_event_files_in_optimizer_steps_are_read_by_rollout(tmp_path):
    lengths = [[[4, 9], [8, 2], [3, 3], [5, 6]], [[5, 5]] * 4, [[7, 7]] * 4]
    of_steps = {"wandb_always_use_train_step": True, "num_steps_per_rollout": 2}
    of_steps["save_debug_rollout_data"] = str(tmp_path / "rollout_{rollout_id}.pt")
    write_dumps(of_steps["save_debug_rollout_data"], lengths)
    directory = write_run(tmp_path / "run", {**ARGUMENTS, **of_steps}, lengths)
    assert [step.lengths.max() for step in read_steps(directory, lambda step: step > 0)] == [5, 7]


def test_a_checkpoint_in_the_background_is_no_part_of_a_step(tmp_path):
    """That of the last step is waited for when the loop has ended, and hides what the step waited for itself."""
    directory = write_run(tmp_path / "run", ARGUMENTS, [[[4, 9], [8, 2], [3, 3], [5, 6]]] * 5)
    plain = read_steps(directory, lambda step: step > 1)
    waits = {3: 0.5, 4: 200.0}
    write_events(directory / "tensorboard", [("perf/finish_save_time", value, step) for step, value in waits.items()])
    found = read_steps(directory, lambda step: step > 1)
    assert [step.seconds["rest"] for step in plain] == pytest.approx([REST] * 3)
    assert [step.seconds["rest"] for step in found] == pytest.approx([REST, REST - 0.5])


def test_steps_without_a_push_say_nothing_about_pushes(tmp_path):
    arguments = {**ARGUMENTS, "update_weights_interval": 2}
    directory = write_run(tmp_path / "run", arguments, [[[4, 9], [8, 2], [3, 3], [5, 6]]] * 6)
    speeds = measured([directory]).speeds
    assert speeds.push_seconds == pytest.approx(PUSH)
    assert speeds.step_fixed_seconds == pytest.approx(REST)
    with pytest.raises(ValueError, match=r"none of the 2 steps .*perf/update_weights_time"):
        measured([directory], lambda step: step in (2, 4))


def test_what_is_missing_in_a_run_is_named(tmp_path):
    directory = write_run(tmp_path / "run", ARGUMENTS, [[[4, 9], [8, 2], [3, 3], [5, 6]]])
    with pytest.raises(ValueError, match="1 finished steps .* none to read"):
        measured([directory])
    (directory / "tensorboard" / "args.json").unlink()
    with pytest.raises(ValueError, match=r"no args\.json"):
        measured([directory])
    write_events(tmp_path / "other", [("perf/step_time", 1.0, 1)])
    (tmp_path / "other" / "args.json").write_text(
        json.dumps({"arguments": {name: {"value": value} for name, value in ARGUMENTS.items()}})
    )
    with pytest.raises(ValueError, match="no perf/rollout_time at rollout 1"):
        measured([tmp_path / "other"])
