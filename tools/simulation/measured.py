"""Measurements of runs: the seconds of their phases, as the times of the model, and the lengths of their answers.

A phase's time is a sum of a few parts, such as a fixed part and one for each token, and the steps of one run hardly differ. So
the parts are fitted with a pull: where the steps tell parts apart they decide, and otherwise time is shared out as `Part.usual`
says. Runs with other batch sizes tell more parts apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from slime.arguments.derivation import FULLY_ASYNC
from slime.utils.errors import UserError
from tools.report import Curve, read_arguments, read_run
from tools.simulation.arrangements import Speeds
from tools.simulation.engines import EngineSpeed, Fleet, Group

# Of a part in the fit: far below what two batch sizes tell about it, far above what the steps of one run do.
_PULL = 1e-2
_LOG_PROB_PHASES = ("log_probs", "ref_log_probs", "teacher_log_probs")


@dataclass(frozen=True)
class Part:
    """A part of a phase. `amounts`: how much of it each step has. `usual`: its share of the time if steps do not tell."""

    amounts: Sequence[float]
    usual: float


@dataclass(frozen=True)
class Step:
    """One rollout step of a run.

    lengths: tokens of the answers, [prompts, n_samples_per_prompt]. total_tokens: with the prompts. seconds: by phase; one
    that pushed no weights has no "push".
    """

    run: RunShape
    lengths: np.ndarray
    total_tokens: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class RunShape:
    """The sizes of a run by its arguments; names are those of `Speeds` and `Work`."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    trainer_devices: int
    engines: int
    engine_devices: int
    replica_devices: int
    max_running_requests: int
    asynchronous: bool
    async_buffer_size: int
    update_weights_interval: int
    max_weight_staleness: int | None


@dataclass(frozen=True)
class Measured:
    """The inputs of a model of time that runs give.

    error: mean distance of the fitted from the measured seconds of a step, as a share.
    """

    speeds: Speeds
    shape: RunShape
    prompt_tokens: int
    steps: list[Step] = field(default_factory=list)
    error: float = 0.0

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of all answers of the runs, [prompts, n_samples_per_prompt of the last run]."""
        return np.concatenate([step.lengths.reshape(-1, self.shape.n_samples_per_prompt) for step in self.steps])


def fit(seconds: Sequence[float], parts: Sequence[Part]) -> list[float]:
    """Seconds of one unit of each part, none negative, by least squares of relative errors with a pull to usual shares."""
    mean = float(np.mean(seconds))
    means = [float(np.mean(part.amounts)) for part in parts]
    present = [number for number, amount in enumerate(means) if amount > 0]
    if mean <= 0 or not present:
        return [0.0] * len(parts)
    columns = np.stack([np.asarray(parts[number].amounts) / means[number] for number in present], axis=1)
    rows = np.concatenate([columns / math.sqrt(len(columns)), math.sqrt(_PULL) * np.eye(len(present))])
    usual = [math.sqrt(_PULL) * parts[number].usual for number in present]
    wanted = np.concatenate([np.asarray(seconds) / mean / math.sqrt(len(columns)), usual])
    shares = _non_negative_least_squares(rows, wanted)
    found = [0.0] * len(parts)
    for number, share in zip(present, shares, strict=True):
        found[number] = float(share) * mean / means[number]
    return found


def _non_negative_least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Every set of columns is tried: there are at most a handful."""
    best, best_error = np.zeros(rows.shape[1]), float(np.sum(wanted**2))
    for size in range(1, rows.shape[1] + 1):
        for columns in map(list, itertools.combinations(range(rows.shape[1]), size)):
            solution = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
            error = float(np.sum((rows[:, columns] @ solution - wanted) ** 2))
            if solution.min() >= 0 and error < best_error:
                best, best_error = np.zeros(rows.shape[1]), error
                best[columns] = solution
    return best


def measured(
    directories: Sequence[Path],
    keep: Callable[[int], bool] = lambda step: step > 0,
    max_running_requests: int | None = None,
) -> Measured:
    """Read runs of `train.py` or `train_async.py`, and fit the times of the model to their steps.

    Args:
        keep: the steps to read, by rollout id; the first one pays for imports and compilations of all others.
        max_running_requests: that of an engine, if the runs do not tell.

    Raises:
        ValueError: a directory holds no run, or not what is needed of it.
    """
    steps = [step for directory in directories for step in read_steps(directory, keep, max_running_requests)]
    shape = steps[-1].run
    rounds = [_decode_steps(step) for step in steps]
    ones = [1.0] * len(steps)
    fixed, per_step, per_request = fit(
        [step.seconds["rollout"] for step in steps],
        [
            Part(ones, 0.0),
            Part(rounds, 0.5),
            Part([step.lengths.sum() / step.run.engines for step in steps], 0.5),
        ],
    )
    # Seconds of one device for a token.
    tokens = Part([step.total_tokens / step.run.trainer_devices for step in steps], 1.0)
    log_probs_fixed, log_probs_token = fit([step.seconds["log_probs"] for step in steps], [Part(ones, 0.0), tokens])
    train_fixed, train_token = fit([step.seconds["train"] for step in steps], [Part(ones, 0.0), tokens])
    # With --update-weights-interval most steps have none, and those say nothing about how long one takes.
    pushes = [step.seconds["push"] for step in steps if "push" in step.seconds]
    if not pushes:
        raise ValueError(
            f"--from-run {directories[-1]}: none of the {len(steps)} steps that were read pushed weights "
            "(perf/update_weights_time); give a run of more steps"
        )
    synchronous = [step.seconds["rest"] for step in steps if not step.run.asynchronous]
    speeds = Speeds(
        decode_step_seconds=per_step,
        decode_request_seconds=per_request,
        rollout_fixed_seconds=fixed,
        log_probs_fixed_seconds=log_probs_fixed,
        log_probs_token_seconds=log_probs_token,
        train_fixed_seconds=train_fixed,
        train_token_seconds=train_token,
        push_seconds=float(np.mean(pushes)),
        step_fixed_seconds=max(0.0, float(np.mean(synchronous))) if synchronous else 0.0,
        engine_devices=shape.engine_devices,
        replica_devices=shape.replica_devices,
        max_running_requests=shape.max_running_requests,
    )
    errors = []
    for step, decode_steps in zip(steps, rounds, strict=True):
        device_tokens = step.total_tokens / step.run.trainer_devices
        generated = fixed + per_step * decode_steps + per_request * step.lengths.sum() / step.run.engines
        passes = log_probs_fixed + train_fixed + (log_probs_token + train_token) * device_tokens
        expected = sum(step.seconds[name] for name in ("rollout", "log_probs", "train"))
        errors.append(abs(generated + passes - expected) / expected)
    prompt = np.mean([(step.total_tokens - step.lengths.sum()) / step.lengths.size for step in steps])
    return Measured(speeds, shape, round(float(prompt)), steps, float(np.mean(errors)))


def _decode_steps(step: Step) -> float:
    """Decode steps of the engine that has the most: the time of a fleet whose steps take a second."""
    fleet = Fleet(EngineSpeed(1.0, 0.0, max_running=step.run.max_running_requests), step.run.engines)
    fleet.submit([Group.of(0, lengths) for lengths in step.lengths.tolist()])
    fleet.run()
    return fleet.now


def read_steps(directory: Path, keep: Callable[[int], bool], max_running_requests: int | None = None) -> list[Step]:
    """The steps of a run that `keep` takes, in order.

    Raises:
        ValueError: the directory holds no run, or not what is needed of it.
    """
    curves = read_run(directory).curves
    record, values = read_arguments(directory)
    if record is None:
        raise ValueError(
            f"--from-run {directory}: no args.json in it; give the directory that has the run's checkpoints and event files"
        )
    shape = run_shape(values, record)
    if max_running_requests is not None and values["sglang_max_running_requests"] is None:
        shape = dataclasses.replace(shape, max_running_requests=max_running_requests)

    def value(tag: str, step: int, default: float | None = None) -> float:
        found = curves.get(tag, {}).get(step, default)
        if found is None:
            raise ValueError(f"--from-run {directory}: no {tag} at rollout {step} in its event files")
        return found

    steps = []
    finished = step_seconds(curves)
    for rollout_id in filter(keep, sorted(finished)):
        seconds = {
            "rollout": value("perf/rollout_time", rollout_id),
            "log_probs": sum(value(f"perf/{name}_time", rollout_id, 0.0) for name in _LOG_PROB_PHASES),
            "train": value("perf/actor_train_time", rollout_id),
            "step": finished[rollout_id],
        }
        push = value("perf/update_weights_time", rollout_id, 0.0)
        seconds["rest"] = seconds["step"] - sum(seconds[name] for name in ("rollout", "log_probs", "train")) - push
        if rollout_id in curves.get("perf/update_weights_time", {}):
            seconds["push"] = push
        dump = Path(str(values["save_debug_rollout_data"]).format(rollout_id=rollout_id))
        if dump.is_file():
            lengths = lengths_of_dump(dump, shape.n_samples_per_prompt)
        else:
            names = ("mean", "median", "max")
            lengths = lengths_from_statistics(*(value(f"rollout/response_len/{n}", rollout_id) for n in names), shape)
        per_sample = value("rollout/total_lengths", rollout_id)
        # The rate is that of all tokens which were trained.
        samples = round(value("perf/actor_train_tok_per_s", rollout_id, 0.0) * seconds["train"] / per_sample)
        if samples > lengths.size:
            raise ValueError(
                f"--from-run {directory}: rollout {rollout_id} trained {samples} samples, and a rollout has "
                f"{shape.rollout_batch_size} prompts with {shape.n_samples_per_prompt} answers each: executions of several "
                "samples (--custom-generate-function-path) are not replayed; give a run whose executions have one"
            )
        steps.append(Step(shape, lengths, per_sample * lengths.size, seconds))
    if not steps:
        raise ValueError(
            f"--from-run {directory}: {len(finished)} finished steps in its event files, none to read beside the first"
        )
    return steps


def step_seconds(curves: dict[str, Curve]) -> dict[int, float]:
    """Of every finished step, by rollout id, without those of checkpoints, which are not replayed.

    The last checkpoint of `--async-save` is waited for when the loop has ended, under the id of the last step: what that step
    waited for itself is then unknown, and it is left out.
    """
    # The last metric of a step: one that a run did not finish has none.
    steps, waits = dict(curves.get("perf/step_time", {})), curves.get("perf/finish_save_time", {})
    if steps and max(steps) in waits:
        del steps[max(steps)]
    saves = curves.get("perf/save_model_time", {})
    return {step: seconds - saves.get(step, 0.0) - waits.get(step, 0.0) for step, seconds in steps.items()}


def run_shape(values: dict[str, Any], path: Path) -> RunShape:
    """From the values of `args.json`.

    Raises:
        ValueError: an argument is missing, or the run is none that tells the speed of its engines.
    """
    try:
        trainer = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
        parallel = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        if not values["has_engines"] or not values["has_trainer"]:
            raise ValueError(
                f"--from-run: {path} is of a run without engines or without a trainer; give one that has both"
            )
        if values["colocate"]:
            raise ValueError(
                f"--from-run: {path} has --colocate, so its steps hold seconds in which trainer and engines change places, and "
                "other arrangements have none; give a run with both apart, and switch_seconds in --phases"
            )
        if values.get("sglang_config") is not None:
            raise ValueError(
                f"--from-run: {path} has --sglang-config, and engines of several sizes are not replayed; give a run whose "
                "engines are alike"
            )
        if values["over_sampling_batch_size"] > values["rollout_batch_size"]:
            raise ValueError(
                f"--from-run: {path} has --over-sampling-batch-size {values['over_sampling_batch_size']}, so part of what its "
                "engines wrote is in no record; give a run that generates what it trains"
            )
        if values["dynamic_sampling_filter_path"]:
            raise ValueError(
                f"--from-run: {path} has --dynamic-sampling-filter-path {values['dynamic_sampling_filter_path']}, and of the "
                "groups that it dropped perf/rollout_time has the seconds, but no record has the lengths; give a run that "
                "trains all that it generates"
            )
        if values["use_critic"]:
            raise ValueError(
                f"--from-run: {path} is of a run with a critic (--advantage-estimator ppo), whose phases are not replayed; "
                "give a run without one"
            )
        if values["rollout_function_path"].startswith(f"{FULLY_ASYNC}."):
            raise ValueError(
                f"--from-run: {path} has --rollout-function-path {values['rollout_function_path']}: generation never stops, so "
                "perf/rollout_time is what a step waited for its queue, and tells no speed of engines; give a run with "
                "another rollout function"
            )
        if values["prefill_num_servers"]:
            raise ValueError(
                f"--from-run: {path} has --prefill-num-servers {values['prefill_num_servers']}, and engines that only prefill "
                "or decode are not replayed; give a run whose engines are alike"
            )
        engines = values["rollout_num_engines"]
        if not engines:
            raise ValueError(
                f"--from-run: {path} is of a run with 0 engines (--rollout-num-gpus {values['rollout_num_gpus']}); give one "
                "that has engines"
            )
        return RunShape(
            rollout_batch_size=values["rollout_batch_size"],
            n_samples_per_prompt=values["n_samples_per_prompt"],
            trainer_devices=trainer,
            engines=engines,
            engine_devices=_engine_devices(values, path),
            replica_devices=math.prod(values[name] for name in parallel),
            # What an engine decides for itself is in no record; it never has more than these.
            max_running_requests=values["sglang_max_running_requests"] or values["sglang_server_concurrency"],
            asynchronous=values["asynchronous"],
            async_buffer_size=values["async_buffer_size"],
            update_weights_interval=values["update_weights_interval"],
            max_weight_staleness=values["max_weight_staleness"],
        )
    except KeyError as error:
        raise ValueError(f"--from-run: {path} has no argument {error}; it was written by another version") from None


def _engine_devices(values: dict[str, Any], path: Path) -> int:
    """GPUs of each engine: engines that somebody else started say it themselves.

    Raises:
        ValueError: they are not alike.
    """
    infos = values["rollout_external_engine_infos"]
    if not infos:
        return values["rollout_num_gpus_per_engine"]
    kinds = {(info["num_gpus"], info["worker_type"]) for info in infos}
    if len(kinds) > 1:
        raise ValueError(
            f"--from-run: {path} has engines of several kinds in --rollout-external-engine-addrs, and those are not replayed; "
            "give a run whose engines are alike"
        )
    return infos[0]["num_gpus"]


def lengths_of_dump(path: Path, n_samples_per_prompt: int | None = None) -> np.ndarray:
    """Tokens of the answers in a dump of `--save-debug-rollout-data`, [prompts, answers of each].

    Raises:
        ValueError: the file is no such dump, or its prompts have other numbers of answers.
    """
    # It imports torch.
    from slime.rollout.rollout_dump import load_rollout

    try:
        # As a template the path would lose its braces.
        samples = load_rollout(str(path).replace("{", "{{").replace("}", "}}"), 0)
    except UserError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('--load-debug-rollout-data: ')}") from None
    groups: dict[int | None, list[int]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(max(1, sample.response_length))
    sizes = set(map(len, groups.values()))
    if len(sizes) != 1 or (n_samples_per_prompt is not None and sizes != {n_samples_per_prompt}):
        wanted = "as many each" if n_samples_per_prompt is None else f"{n_samples_per_prompt} each"
        raise ValueError(f"{path}: its prompts have {sorted(sizes)} answers, expected {wanted}")
    return np.asarray(list(groups.values()))


def lengths_from_statistics(mean: float, median: float, longest: float, shape: RunShape) -> np.ndarray:
    """Lengths that have this median and mean, log-normal up to the longest: one for each answer of a rollout, dealt at random.

    The median of a log-normal distribution is exp(μ), its mean exp(μ + σ²/2).
    """
    sigma = math.sqrt(2 * math.log(max(1.0, mean / median)))
    answers = shape.rollout_batch_size * shape.n_samples_per_prompt
    quantiles = (np.arange(answers) + 0.5) / answers
    normal = np.asarray([NormalDist().inv_cdf(quantile) for quantile in quantiles])
    lengths = np.minimum(median * np.exp(sigma * normal), longest)
    lengths = np.maximum(1, np.round(lengths * mean / lengths.mean()))
    # The longest answer is what a rollout waits for.
    lengths[-1] = longest
    return np.random.default_rng(0).permutation(lengths).astype(int).reshape(shape.rollout_batch_size, -1)
