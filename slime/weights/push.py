"""A weight push: new weights from the training ranks to all engines, whatever carries them.

    connect → pause → flush → begin → send → put in place → verify → continue

Where weights travel as files, engines go on generating while these are written and copied to their hosts:

    connect → send → hook → fetch → pause → flush → put in place → verify → continue

`connect`, `send` and the user's `hook` are steps of the trainer, which stays connected to engines as long as they are the same.
Each bucket, or the order to load files, tells engines the version, which is verified when everything is in place. All orders
between two steps of the trainer are given to an engine at once, and it carries them out by itself, one after the other: the way
over the network costs more than most of them do.

Invariants:
- An engine that fails a step is left out of the rest, and the push goes on with the others. If it broke a connection or a
  transfer, the others get everything again. An engine that answered with an error gets a second chance, once in a push: a peer
  may have caused the error.
- `continue` goes only to engines that hold a whole version: the new one, or the old one if nothing was sent yet.
- If engines cannot use what was sent, because they lack what it changes, everything is sent again whole, once.
- The push owns the weight version. It goes up by one when engines go on with new weights, is saved with every checkpoint, and
  goes on after a resume.
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

from slime.utils.checkpoint_directory import WEIGHT_VERSION
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import write_json_atomically
from slime.weights.source import Connected, Sent
from slime.weights.transports import Order, Receiver, transport_of
from slime.weights.transports.transport import FLUSH_SECONDS, naming_engines
from slime.weights.verification import NamesDiffer, PushedNames

logger = logging.getLogger(__name__)

# Orders that take longer for larger models, and so have `--engine-load-timeout`.
_LOADING = frozenset({"fetch_weights", "update_weights_from_disk", "end_weight_update"})
# An engine has time limits of its own; after their end, its answer may still take this long to arrive.
_ANSWER_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a push has to know from the training ranks before it begins.

    `weight_version` is the one that their weights were pushed as, 0 if never. `expected_names` are those of the engines'
    checkpoint, None if they are not known.
    """

    num_sources: int
    weight_version: int
    expected_names: set[str] | None


class Sources(Protocol):
    """The training ranks as a push sees them. A source is a rank that sends; ranks that help it are asked together with it."""

    def open_weight_push(self) -> Opening: ...

    def connect_engines(self, source: int, engines: Sequence[Receiver]) -> Connected: ...

    def send_weights(self, source: int, version: int, whole: bool) -> Sent:
        """`whole`: send everything; otherwise a transport may leave out what engines have already."""
        ...

    def weights_written(self, version: int, engines: Sequence[Any]) -> None:
        """All ranks hear that the files of weights `version` are on the disk; `engines` are the handles of those to come."""
        ...

    def weights_pushed(self, version: int) -> None:
        """All ranks hear that engines serve their weights as `version`."""
        ...

    def weights_settled(self) -> None:
        """All ranks hear that engines have in place what was sent, under the version of the last push."""
        ...

    def require_files(self) -> None:
        """Raise RunError unless the files of the last push are there. Asked of ranks only that have ended."""
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
        args: reads `update_weight_transport` and `_mode`, `colocate`, the limits of requests to engines, the hook, and what the
            transport needs.
    """

    def __init__(self, args: Any, sources: Sources) -> None:
        self._args = args
        self._sources = sources
        self._transport = transport_of(args)
        # Bytes of deltas since all weights travelled. An engine that starts anew has to read all of these deltas, so when they
        # are as many as the weights have, all weights travel again.
        self._delta_bytes = 0
        self._next_is_whole = False
        # The engines that all sources are connected to.
        self._connected: list[Receiver] = []
        self._has_logged = False
        opening = sources.open_weight_push()
        self._num_sources = opening.num_sources
        self._expected_names = opening.expected_names
        self.version = opening.weight_version

    def push(self, engines: Sequence[Receiver]) -> PushReport:
        """Push the current weights to `engines` as version `version + 1`.

        Raises:
            RunError: the weights themselves are wrong, or the trainer failed. Engines that hold no whole version stay paused.
        """
        return self._push(engines, self.version + 1)

    def repeat(self, engines: Sequence[Receiver]) -> PushReport:
        """Push the weights of the last push to `engines` that have missed it, under its version; raises as `push`.

        The weights must be the same still: nothing was trained since.
        """
        return self._push(engines, self.version)

    def repeat_from_files(self, engines: Sequence[Receiver]) -> PushReport:
        """`repeat` without the trainer, which has ended: the files of the last push are there still.

        Raises:
            RunError: they are not; no engine was asked for anything.
        """
        started = time.monotonic()
        self._sources.require_files()
        served = _Engines(self._args, engines)
        order = self._transport.fetching_order(self._args, self.version)
        if order is not None:
            served.leave_out(served.refusing(order))
        served.order(*self._pausing_orders(), *self._placing_orders(self.version))
        return self._report(served, [], time.monotonic() - started)

    def _push(self, engines: Sequence[Receiver], version: int) -> PushReport:
        started = time.monotonic()
        served = _Engines(self._args, engines)
        through_files = self._transport.directory(self._args, version) is not None
        pause, opening = self._pausing_orders(), self._transport.opening_order(self._args, version)
        if served.remaining != self._connected:
            self._connect(served)
        if not through_files:
            joined = len(served.remaining)
            served.order(*pause, *([] if opening is None else [opening]))
            if len(served.remaining) < joined:
                # Sources must not send to engines that have failed: the others would wait for them.
                self._connect(served)
        sent = self._send(served, version, self._next_is_whole)
        if through_files:
            sent += self._fetch(served, version)
        served.order(*(pause if through_files else ()), *self._placing_orders(version))
        if served.remaining and version > self.version:
            self.version = version
            self._sources.weights_pushed(version)
        elif served.remaining:
            self._sources.weights_settled()
        return self._report(served, sent, time.monotonic() - started)

    def _pausing_orders(self) -> list[Order]:
        # "retract": requests go on later with the new weights, and compute the flushed part of their cache again.
        return [("pause_generation", "retract" if self._args.update_weights_in_flight else "abort"), ("flush_cache",)]

    def _placing_orders(self, version: int) -> list[Order]:
        """Orders to put in place what arrived, and to go on. The trainer only hears of the version afterwards: if no engine
        serves it in the end, the next push takes the same number."""
        return [
            self._transport.placing_order(self._args, version),
            ("prove_weight_version", str(version)),
            ("continue_generation",),
        ]

    def _connect(self, served: _Engines) -> None:
        """Connect every source, in turn, to the engines that remain. If one connection fails, all sources connect again."""
        # Not known while some are connected, nor after an error.
        self._connected, source = [], 0
        while served.remaining and source < self._num_sources:
            connected = self._sources.connect_engines(source, served.remaining)
            served.blame(connected)
            source = 0 if connected.failed else source + 1
        self._connected = list(served.remaining)

    def _fetch(self, served: _Engines, version: int) -> list[Sent]:
        """Let the hosts of engines copy what was written. If some cannot use it, all weights are written again, whole.

        Returns:
            What was written again.
        """
        order = self._transport.fetching_order(self._args, version)
        if order is None or not (refused := served.refusing(order)):
            return []
        logger.warning("weight push: all weights are written again: %s", "; ".join(dict.fromkeys(refused.values())))
        sent = self._send(served, version, whole=True)
        served.leave_out(served.refusing(order))
        return sent

    def _send(self, served: _Engines, version: int, whole: bool) -> list[Sent]:
        """Send from every source, in turn, to the engines that remain. If an engine breaks that, all sources send again."""
        sent: list[Sent] = []
        while served.remaining and len(sent) < self._num_sources:
            of_source = self._sources.send_weights(len(sent), version, whole)
            sent.append(of_source)
            if of_source.refusal is not None:
                self._release_untouched(served, sent)
                raise NamesDiffer(of_source.refusal)
            if of_source.failed:
                served.blame(of_source)
                self._connect(served)
                sent = []
        names = PushedNames(self._expected_names)
        for of_source in sent:
            names.check_bucket(of_source.names)
        if served.remaining:
            names.check_complete()
        deltas = [one.delta for one in sent if one.delta]
        # A source that does not know what engines have sends everything, whether or not it was asked to.
        whole = whole or any(delta.is_whole for delta in deltas)
        self._delta_bytes = 0 if whole else self._delta_bytes + sum(delta.wire_bytes for delta in deltas)
        self._next_is_whole = self._delta_bytes > sum(one.num_bytes for one in sent)
        hook = self._args.custom_update_weight_post_write_path
        # Nobody wrote if no engine is left.
        if sent and hook is not None and self._transport.directory(self._args, version) is not None:
            self._sources.weights_written(version, [engine.handle for engine in served.remaining])
        return sent

    def _release_untouched(self, served: _Engines, sent: list[Sent]) -> None:
        """Let the engines go on with the old weights. Only if nothing was sent: otherwise they hold no whole version."""
        if any(of_source.num_buckets for of_source in sent):
            return
        opened = self._transport.opening_order(self._args, self.version) is not None
        placing = [self._transport.placing_order(self._args, self.version)] if opened else []
        served.order(*placing, ("continue_generation",))

    def _report(self, served: _Engines, sent: list[Sent], seconds: float) -> PushReport:
        num_bytes, parts = sum(one.num_bytes for one in sent), sum(one.num_buckets for one in sent)
        rate = num_bytes / seconds / 1e9
        # The first push comes before every rollout, so no rollout's line and no metrics tell of it: the log does.
        level = logging.INFO if parts and not self._has_logged else logging.DEBUG
        self._has_logged = True
        logger.log(
            level, "weights version %d: %.1f MB in %d parts, %.2f s, %.2f GB/s",
            self.version, num_bytes / 1e6, parts, seconds, rate,
        )  # fmt: skip
        metrics = {
            "perf/update_weights_time": seconds,
            "perf/update_weights_bytes": float(num_bytes),
            "perf/update_weights_gb_per_s": rate,
            "perf/update_weights_parts": float(parts),
        }
        deltas = [one.delta for one in sent if one.delta is not None]
        if deltas:
            metrics["perf/update_weights_density"] = sum(delta.changed_bytes for delta in deltas) / max(num_bytes, 1)
            metrics["perf/update_weights_wire_bytes"] = float(sum(delta.wire_bytes for delta in deltas))
        return PushReport(self.version, served.failed, metrics)


def write_weight_version(checkpoint: Path, version: int) -> None:
    """Note in a checkpoint the version of the last push: that of its weights, or of earlier ones if these were not pushed."""
    write_json_atomically(checkpoint / WEIGHT_VERSION, {"weight_version": version})


def read_weight_version(checkpoint: Path) -> int:
    """What `write_weight_version` noted; 0, as in a new run, in a checkpoint that was saved before versions were.

    Raises:
        UserError: the file is damaged.
    """
    path = checkpoint / WEIGHT_VERSION
    if not path.is_file():
        return 0
    try:
        return int(json.loads(path.read_bytes())["weight_version"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} holds no weight version ({error}); copy the checkpoint again, or remove this file to count from 0"
        ) from error


class _Engines:
    """The engines that still take part in a push (`remaining`), and why the others do not (`failed`)."""

    def __init__(self, args: Any, engines: Sequence[Receiver]) -> None:
        # Seconds that an engine has for any order that `_limits` does not name.
        self._limit = args.http_control_timeout
        self._limits = {"flush_cache": FLUSH_SECONDS, **dict.fromkeys(_LOADING, args.engine_load_timeout)}
        self.remaining = list(engines)
        self.failed: dict[int, str] = {}
        self._tried_again = False

    def leave_out(self, failed: dict[int, str]) -> None:
        """Go on without these engines. The first reason that an engine had counts: the others follow from it."""
        self.failed = {**failed, **self.failed}
        self.remaining = [engine for engine in self.remaining if engine.id not in failed]

    def blame(self, broken: Connected | Sent) -> None:
        """Leave out engines that broke a connection or a transfer. Engines that answered with an error get a second chance,
        once in a push: a peer may be the cause."""
        if not broken.failed:
            return
        if broken.certain or self._tried_again:
            self.leave_out(broken.failed)
            return
        logger.warning("weight push: broken by %s; all engines are connected and get everything again", broken.failed)
        self._tried_again = True

    def order(self, *orders: Order) -> list[Any]:
        """Have all that remain carry out `orders`, one after the other, each engine by itself.

        Returns:
            The results of the last order, from the engines that still remain.
        """
        from slime.observability.waiting import wait_for_each

        answers = [engine.handle.carry_out.remote(orders) for engine in self.remaining]
        name = f"weight push, {', '.join(method for method, *_ in orders)} of the engines"
        limit = sum(self._limits.get(method, self._limit) for method, *_ in orders) + _ANSWER_SECONDS
        ids = [engine.id for engine in self.remaining]
        outcome_of = dict(zip(ids, wait_for_each(answers, name, limit, pending=naming_engines(ids)), strict=True))
        self.leave_out({id: str(outcome) for id, outcome in outcome_of.items() if isinstance(outcome, RunError)})
        return [outcome_of[engine.id] for engine in self.remaining]

    def refusing(self, order: Order) -> dict[int, str]:
        """Give an order that engines may refuse. Returns the reasons of those that do, by id."""
        reasons = self.order(order)
        return {engine.id: reason for engine, reason in zip(self.remaining, reasons, strict=True) if reason is not None}
