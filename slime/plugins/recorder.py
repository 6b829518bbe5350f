"""The list of plug-in points, and a recorder of a plug-in's calls: their arguments, results and costs.

A watched function is called unchanged, and the framework gets and judges its result as usual. The recorder itself finds only
what the framework cannot see: changes to shared arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.base_types import leaves
from slime.utils.plugin_loader import is_coroutine_function
from slime.utils.types import Sample


@dataclass(frozen=True)
class Point:
    """A place where a user's function is called.

    Attributes:
        call: its signature, and the required result.
        keeps_samples: whether it must not change samples.
        words: further flags that a run needs to make use of it.
        in_megatron: whether a real training rank calls it, which takes some seconds to start.
        in_python: whether a user's own driver passes it; no flag of a run names it.
    """

    call: str
    keeps_samples: bool = False
    words: tuple[str, ...] = ()
    # Whether a run goes on if the function raises.
    is_forgiven: bool = False
    in_megatron: bool = False
    in_python: bool = False


_REWARD = (
    "fn(args, sample) → float or dict; fn(args, samples) → list; or a class with compute_reward(prompts, responses)"
)
_TIS = "fn(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw) → (pg_loss, masks, metrics)"
POINTS = {
    "--rollout-function-path": Point(
        "fn(args, rollout_id, data_source, evaluation=False) → RolloutFnTrainOutput, or a list of groups"
    ),
    "--eval-function-path": Point(
        "fn(args, rollout_id, data_source, evaluation=True) → RolloutFnEvalOutput, or {set: {rewards, truncated, samples}}"
    ),
    "--custom-generate-function-path": Point(
        "async fn(args, sample, sampling_params[, evaluation]) → Sample or list of them; fn(args, samples, evaluation) → list"
    ),
    "--rollout-sample-hook-path": Point("fn(args, sample, *, rollout_id=None, evaluation=False) → Sample or None"),
    "--custom-rm-path": Point(_REWARD),
    "--dynamic-sampling-filter-path": Point(
        "fn(args, samples, **kw) → DynamicFilterOutput(keep, reason) or bool", keeps_samples=True
    ),
    "--buffer-filter-path": Point("fn(args, rollout_id, buffer, num_samples) → groups, taken out of buffer"),
    "--rollout-sample-filter-path": Point("fn(args, data): sets remove_sample of samples; returns nothing"),
    "--rollout-all-samples-process-path": Point(
        "fn(args, all_groups, data_source): returns nothing", keeps_samples=True
    ),
    "--custom-reward-post-process-path": Point("fn(args, samples) → (raw rewards, rewards), one for each sample"),
    "--custom-convert-samples-to-train-data-path": Point(
        "fn(args, samples) → {tokens, response_lengths, rewards, raw_reward, truncated, sample_indices, loss_masks}"
    ),
    "--data-source-path": Point(
        "class(args) with get_samples(num_samples) → groups or prompts, and add_samples(groups)"
    ),
    "--custom-rollout-log-function-path": Point(
        "fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time) → True to leave out the usual metrics",
        keeps_samples=True,
        is_forgiven=True,
    ),
    "--custom-eval-rollout-log-function-path": Point(
        "fn(rollout_id, args, data, extra_metrics) → True to leave out the usual metrics", is_forgiven=True
    ),
    "--rollout-data-postprocess-path": Point(
        "fn(args, rollout_id, rollout_data): edits in place, on each training rank"
    ),
    "--custom-advantage-function-path": Point(
        "fn(args, rollout_data): sets advantages and returns, lists of tensors shaped as log_probs"
    ),
    "--custom-loss-function-path": Point(
        "fn(args, batch, logits, sum_of_sample_mean) → (loss, {name: scalar tensor})",
        words=("--loss-type", "custom_loss"),
    ),
    "--custom-tis-function-path": Point(_TIS, words=("--use-tis",)),
    "--custom-pg-loss-reducer-function-path": Point(
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss[, rollout_mask_sums]) → fn(flat tensor)"
    ),
    "--custom-update-weight-post-write-path": Point(
        "fn(args, version_dir, rollout_engines), on each training rank when its files are written",
        words=("--update-weight-transport", "disk"),
    ),
    "--sglang-custom-pull-weights-pre-read-hook": Point(
        "fn(source_dir, target_version), on each host of engines before it reads what a push has written",
        words=("--update-weight-transport", "disk"),
    ),
    "--custom-model-provider-path": Point(
        "fn(pre_process, post_process[, vp_stage][, config][, args]) → GPTModel", in_megatron=True
    ),
    "--spec": Point(
        "fn(args, config, vp_stage) → spec of the layers; or, with a parameter pre_process, what a model provider is",
        in_megatron=True,
    ),
    "--custom-megatron-init-path": Point("fn(args), on each rank once Megatron is initialised", in_megatron=True),
    "--custom-megatron-before-log-prob-hook-path": Point(
        "fn(args, model, store_prefix), before each pass without gradient", in_megatron=True
    ),
    "--custom-megatron-before-train-step-hook-path": Point(
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), when gradients are zero",
        in_megatron=True,
    ),
    "--actor-cls": Point(
        "class(args, rank, world_size, local_rank) for create_training_models, with rendezvous_address(), init(address) → "
        "first rollout, train(rollout_id, shards) → [(metrics, step key)], open_weight_push() → Opening, dispose()",
        in_python=True,
    ),
    "--adapter-cls": Point(
        "class(tokenizer, sglang_url), a subclass of OpenAIAdapter or AnthropicAdapter of slime.agent.adapters: its endpoint "
        "answers two turns, and finish_session(sid, base_sample=…) → samples",
        in_python=True,
    ),
    "--buffer-generator": Point(
        "module with TASK_TYPE and run_rollout(data), in a process of its own, which sends items {uid, instance_id, messages, "
        "reward, extra_info} to data['remote_buffer_url']",
        in_python=True,
    ),
    "--accelerator": Point(
        "class() for register_accelerator: a subclass of slime.utils.device.Accelerator with a name of its own",
        in_python=True,
    ),
    "--sandbox-cls": Point(
        "class(), an async context manager with sandbox_id, async exec(cmd, *, user, env, timeout, check, idempotent) → "
        "(status, out, err), write_file(path, content, *, user), read_file(path, *, user) → text",
        in_python=True,
    ),
    "--harness-cls": Point(
        "class() with name and async run(sb, *, workdir, session_id, adapter_url, time_budget_sec, prompt) → exit status; "
        "a subclass of slime.agent.harness.BaseHarness has launch_and_wait(sb, ctx, prompt, time_budget_sec)",
        in_python=True,
    ),
}
_LOSS = "--custom-loss-function-path"
_CONSTANT = (
    "its loss has no gradient, so that nothing would be trained: was it detached, or made of batch['log_probs'], which are "
    "those of before the step, and not of logits?"
)
LATE, FORGIVEN = "it did not return in time", "a run reports that and logs its usual metrics"
# How much is printed of a call: Megatron's objects have long descriptions.
_MOST_CHARACTERS = 400
# The watched methods of classes, which are constructed once.
_METHODS = ("compute_reward", "get_samples", "add_samples", "state_dict", "load_state_dict", "save", "load")


@dataclass
class Recorder:
    """The calls of one plug-in."""

    flag: str
    path: str
    signature: str = ""
    calls: int = 0
    seconds: list[float] = field(default_factory=list)
    given: str = ""
    returned: str = ""
    changed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    # Calls that are under way: their thread and start.
    running: dict[int, tuple[threading.Thread, float]] = field(default_factory=dict)

    def watched(self, found: Any) -> Any:
        """`found`, a function or a class, with its calls recorded."""
        self.named(found)
        if inspect.isclass(found):
            methods = {
                name: self.watched_function(getattr(found, name), 1) for name in _METHODS if hasattr(found, name)
            }
            return type(found.__name__, (found,), {"__module__": found.__module__, **methods})
        return self.watched_function(found)

    def named(self, found: Any) -> None:
        """Note the signature of `found`."""
        self.signature = _signature(found)

    def watched_function(self, function: Callable[..., Any], skipped: int = 0) -> Callable[..., Any]:
        """`function` with its calls recorded. The first `skipped` arguments (`self`) are not recorded."""
        if is_coroutine_function(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self.call([*args[skipped:], *kwargs.values()]) as done:
                    return done(await function(*args, **kwargs))

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.call([*args[skipped:], *kwargs.values()]) as done:
                return done(function(*args, **kwargs))

        return called

    @contextmanager
    def call(self, given: list[Any]) -> Iterator[Callable[[Any], Any]]:
        """Record the block as a call with these arguments. The block passes its result through the yielded function."""
        before = _shared_state(given)
        samples = [sample for value in given if isinstance(value, Sample | list) for sample in _samples(value)]
        fields = [_fields(sample) for sample in samples]
        self.calls += 1
        if not self.given:
            self.given = _cut(", ".join(map(described, given)))
        number, started = self.calls, time.perf_counter()
        self.running[number] = (threading.current_thread(), time.monotonic())

        def done(result: Any) -> Any:
            self.returned = self.returned or _cut(described(result))
            loss = result[0] if self.flag == _LOSS and isinstance(result, tuple) and result else None
            if not getattr(loss, "requires_grad", True):
                self._note(_CONSTANT)
            return result

        try:
            yield done
        except GeneratorExit:
            raise
        except BaseException as error:
            if POINTS[self.flag].is_forgiven:
                # A call is cancelled only when its time is over.
                late = isinstance(error, asyncio.CancelledError)
                self._note(f"{LATE if late else f'it raised {type(error).__name__}: {error}'}; {FORGIVEN}")
            raise
        finally:
            del self.running[number]
            self.seconds.append(time.perf_counter() - started)
            # A name that was not there before is one of its own, as long as it keeps its value.
            now_shared = _shared_state(given)
            changed = {name for name, value in before.items() if now_shared.get(name) != value}
            if changed:
                self._note(
                    f"it changed args.{', args.'.join(sorted(changed))}: args are shared by all calls under way; keep "
                    "what belongs to a sample in sample.metadata"
                )
            now = {
                name for old, sample in zip(fields, samples, strict=True) for name in _differing(old, _fields(sample))
            }
            self.changed |= now
            if now and POINTS[self.flag].keeps_samples:
                self._note(f"it changed {', '.join(sorted(now))} of samples, not its own; a sample hook may")

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _signature(found: Any) -> str:
    kind = "class" if inspect.isclass(found) else "async def" if is_coroutine_function(found) else "def"
    try:
        return f"{kind} {getattr(found, '__name__', 'function')}{inspect.signature(found)}"
    except (TypeError, ValueError):
        return kind


def _shared_state(given: list[Any]) -> dict[str, str]:
    shared = [one for one in given if isinstance(one, argparse.Namespace)]
    # A list at once: calls run side by side, and each may set attributes while another one is looked at.
    return {name: repr(value) for one in shared for name, value in list(vars(one).items())}


def _samples(value: Any) -> list[Sample]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Sample)]


def _fields(sample: Sample) -> dict[str, str]:
    return {name: repr(value) for name, value in sample.to_dict().items()}


def _differing(old: dict[str, str], new: dict[str, str]) -> set[str]:
    return {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"


def described(value: Any) -> str:
    """`value` in a few words."""
    if isinstance(value, Sample):
        lengths = f"{len(value.tokens)} tokens, response {value.response_length}"
        masked = "" if value.loss_mask is None else f", {sum(value.loss_mask)} of them trained"
        log_probs = ", with log-probs" if value.rollout_log_probs is not None else ""
        reward = "" if value.reward is None else f", reward {value.reward!r}"
        status = getattr(value.status, "value", repr(value.status))
        return f"Sample({lengths}{masked}{log_probs}, {status}{reward})"
    if isinstance(value, argparse.Namespace):
        return "args"
    if isinstance(value, list | tuple) and value:
        brackets = "[]" if isinstance(value, list) else "()"
        more = f", … {len(value)} of them" if len(value) > 3 else ""
        return brackets[0] + ", ".join(described(entry) for entry in value[:3]) + more + brackets[1]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__} {described(vars(value))}"
    if hasattr(value, "shape"):
        return f"{type(value).__name__} {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {described(entry)}" for key, entry in list(value.items())[:12]) + "}"
    text = repr(value).partition("\n")[0]
    return text if len(text) <= 60 else f"{type(value).__name__} {text[:40]}…"
