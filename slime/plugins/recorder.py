"""A recorder of a plug-in's calls: their arguments, results and costs.

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
from slime.utils.plugin_loader import description_of, is_coroutine_function
from slime.utils.plugin_points import POINTS
from slime.utils.types import Sample

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
        self.signature = description_of(found)

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
                self.note(_CONSTANT)
            return result

        try:
            yield done
        except GeneratorExit:
            raise
        except BaseException as error:
            if POINTS[self.flag].is_forgiven:
                # A call is cancelled only when its time is over.
                late = isinstance(error, asyncio.CancelledError)
                self.note(f"{LATE if late else f'it raised {type(error).__name__}: {error}'}; {FORGIVEN}")
            raise
        finally:
            del self.running[number]
            self.seconds.append(time.perf_counter() - started)
            # A name that was not there before is one of its own, as long as it keeps its value.
            now_shared = _shared_state(given)
            changed = {name for name, value in before.items() if now_shared.get(name) != value}
            if changed:
                self.note(
                    f"it changed args.{', args.'.join(sorted(changed))}: args are shared by all calls under way; keep "
                    "what belongs to a sample in sample.metadata"
                )
            now = {
                name for old, sample in zip(fields, samples, strict=True) for name in _differing(old, _fields(sample))
            }
            self.changed |= now
            if now and POINTS[self.flag].keeps_samples:
                self.note(f"it changed {', '.join(sorted(now))} of samples, not its own; a sample hook may")

    def note(self, problem: str) -> None:
        """Add a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)


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
