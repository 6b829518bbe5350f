"""A weight push: new weights from the training ranks to all engines, whatever carries them.

pause → flush → connect → begin → send → put in place → version → verify → continue

Invariants:
- An engine that fails any of these is left out of the rest, and the push goes on with the others. When it broke a transfer,
  they get all of it again; so does an engine that answers with an error the first time, which a peer may have caused.
- `continue` goes only to engines that hold a whole version: the new one, or the old one if nothing was sent yet.
- The push owns the weight version, which goes up by one when engines go on with new weights, is saved with every checkpoint,
  and goes on after a resume.
- Nothing waits without a deadline.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slime.utils.errors import RunError
from slime.utils.filesystem import write_json_atomically
from slime.weights.source import Sent
from slime.weights.transports import TRANSPORTS, Receiver
from slime.weights.verification import NamesDiffer, PushedNames

logger = logging.getLogger(__name__)

_VERSION_FILE = "weight_version.json"
# Between the end of an engine's own time limit and its answer.
_ANSWER_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Opening:
    """What the training ranks say before the first push.

    `weight_version` is the one that their weights were pushed as, 0 if never. `expected_names` are those of the engines'
    checkpoint, None if they are not known.
    """

    num_sources: int
    weight_version: int
    expected_names: set[str] | None


class Sources(Protocol):
    """The training ranks as a push sees them. A source is asked together with all ranks that help it."""

    def open_weight_push(self) -> Opening: ...

    def connect_engines(self, source: int, engines: Sequence[Receiver]) -> dict[int, str]:
        """Connect a source to `engines`. Returns those that broke it, with the reason of each."""
        ...

    def send_weights(self, source: int, version: int) -> Sent: ...

    def weights_pushed(self, version: int) -> None:
        """All ranks hear that engines serve their weights as `version`."""
        ...

    def weights_settled(self) -> None:
        """All ranks hear that engines have in place what was sent, under the version of the last push."""
        ...


@dataclasses.dataclass(frozen=True)
class PushReport:
    """The outcome of a push: the engines serve `version`, except those in `failed` (engine id: reason).

    Where all failed, `version` is the one that they were last seen with.
    """

    version: int
    failed: dict[int, str]
    metrics: dict[str, float]


class WeightPush:
    """Pushes the weights of `sources`.

    Args:
        args: reads `update_weight_transport`, the limits of requests to engines, and what the transport needs.
    """

    def __init__(self, args: Any, sources: Sources) -> None:
        self._args = args
        self._sources = sources
        self._transport = TRANSPORTS[args.update_weight_transport]
        opening = sources.open_weight_push()
        self._num_sources = opening.num_sources
        self._expected_names = opening.expected_names
        self.version = opening.weight_version

    def push(self, engines: Sequence[Receiver]) -> PushReport:
        """Push the current weights to `engines` as version `version + 1`.

        Raises:
            RunError: what was to be sent is at fault, or the trainer failed; engines that hold no whole version stay paused.
        """
        return self._push(engines, self.version + 1)

    def repeat(self, engines: Sequence[Receiver]) -> PushReport:
        """Push the weights of the last push to `engines` that have missed it, under its version; raises as `push`.

        The weights must be the same still: nothing was trained since.
        """
        return self._push(engines, self.version)

    def _push(self, engines: Sequence[Receiver], version: int) -> PushReport:
        started = time.monotonic()
        served = _Engines(self._args, engines)
        served.order("pause_generation", "abort")
        served.order("flush_cache")
        self._connect(served)
        opening = self._transport.opening_order(self._args, version)
        if opening is not None:
            served.order(*opening)
        sent = self._send(served, version)
        served.order(*self._transport.placing_order(self._args, version))
        served.order("set_weight_version", str(version))
        served.verify_version(str(version))
        # Before the trainer hears of it: weights that nobody serves are pushed again, under the same number.
        served.order("continue_generation")
        if served.remaining and version > self.version:
            self.version = version
            self._sources.weights_pushed(version)
        elif served.remaining:
            self._sources.weights_settled()
        return PushReport(self.version, served.failed, self._metrics(sent, time.monotonic() - started))

    def _connect(self, served: _Engines) -> None:
        """Connect every source, in turn, to the engines that remain: until one round of all sources goes well."""
        source = 0
        while served.remaining and source < self._num_sources:
            failed = self._sources.connect_engines(source, served.remaining)
            served.leave_out(failed)
            source = 0 if failed else source + 1

    def _send(self, served: _Engines, version: int) -> list[Sent]:
        """Send everything from every source, in turn, to the engines that remain: until nobody broke it."""
        sent: list[Sent] = []
        tried_again = False
        while served.remaining and len(sent) < self._num_sources:
            of_source = self._sources.send_weights(len(sent), version)
            sent.append(of_source)
            if of_source.refusal is not None:
                self._release_untouched(served, sent)
                raise NamesDiffer(of_source.refusal)
            if of_source.failed:
                if of_source.certain or tried_again:
                    served.leave_out(of_source.failed)
                else:
                    logger.warning("weight push: broken by %s; all engines get everything again", of_source.failed)
                    tried_again = True
                self._connect(served)
                sent = []
        names = PushedNames(self._expected_names)
        for of_source in sent:
            names.check_bucket(of_source.names)
        if served.remaining:
            names.check_complete()
        return sent

    def _release_untouched(self, served: _Engines, sent: list[Sent]) -> None:
        """Let the engines go on with the weights that they have, if nothing was sent."""
        if any(of_source.num_buckets for of_source in sent):
            return
        if self._transport.opening_order(self._args, self.version) is not None:
            served.order(*self._transport.placing_order(self._args, self.version))
        served.order("continue_generation")

    def _metrics(self, sent: list[Sent], seconds: float) -> dict[str, float]:
        num_bytes, parts = sum(one.num_bytes for one in sent), sum(one.num_buckets for one in sent)
        rate = num_bytes / seconds / 1e9
        logger.debug(
            "weights version %d: %.1f MB in %d parts, %.2f s, %.2f GB/s",
            self.version,
            num_bytes / 1e6,
            parts,
            seconds,
            rate,
        )
        return {
            "perf/update_weights_time": seconds,
            "perf/update_weights_bytes": float(num_bytes),
            "perf/update_weights_gb_per_s": rate,
            "perf/update_weights_parts": float(parts),
        }


def write_weight_version(checkpoint: Path, version: int) -> None:
    """Note in a checkpoint that its weights, or the last ones before them that were pushed, went out as `version`."""
    write_json_atomically(checkpoint / _VERSION_FILE, {"weight_version": version})


def read_weight_version(checkpoint: Path) -> int:
    """What `write_weight_version` noted; 0, as in a new run, in a checkpoint that was saved before versions were."""
    path = checkpoint / _VERSION_FILE
    return json.loads(path.read_text())["weight_version"] if path.is_file() else 0


class _Engines:
    """The engines that still take part in a push (`remaining`), and why the others do not (`failed`)."""

    def __init__(self, args: Any, engines: Sequence[Receiver]) -> None:
        # Engines put what they received in place when a push ends, which takes the longer the larger the model is.
        self._timeout = max(args.http_control_timeout, args.engine_load_timeout) + _ANSWER_SECONDS
        self.remaining = list(engines)
        self.failed: dict[int, str] = {}

    def leave_out(self, failed: dict[int, str]) -> None:
        """Go on without these engines."""
        self.failed.update(failed)
        self.remaining = [engine for engine in self.remaining if engine.id not in failed]

    def order(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all that remain, at the same time. Returns the results of those that still do."""
        from slime.observability.waiting import wait_for_each

        answers = [getattr(engine.handle, method).remote(*arguments) for engine in self.remaining]
        outcomes = wait_for_each(answers, f"weight push, {method} of the engines", self._timeout)
        outcome_of = dict(zip((engine.id for engine in self.remaining), outcomes, strict=True))
        self.leave_out({id: str(outcome) for id, outcome in outcome_of.items() if isinstance(outcome, RunError)})
        return [outcome_of[engine.id] for engine in self.remaining]

    def verify_version(self, version: str) -> None:
        """Leave out whoever reports another version."""
        reported = self.order("get_weight_version")
        wrong = {engine.id: found for engine, found in zip(self.remaining, reported, strict=True) if found != version}
        message = f"weight push: engines report another version than {version} (engine: version): {wrong}"
        self.leave_out(dict.fromkeys(wrong, message))
