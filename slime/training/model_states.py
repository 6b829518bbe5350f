"""Several sets of weights that take turns in one model: the actor, the reference, a teacher, older copies of the actor.

`with states("ref"):` puts the reference's weights into the live model; when the block ends, also by an error, the weights
that were there before are back, bit for bit. The active state has a name, so that nobody pushes or saves the wrong one.
Only the actor is trained: what any other state puts into the model is as it was stored.

In a block `with states.turns():`, where nothing is trained, several states follow each other: the actor is put aside once for
all of them, and is back when that block ends.

`StateSchedule` says when the other sets of weights change: they are loaded at the start, refreshed after rollouts, and shifted
by weight pushes.

- The reference becomes a copy of the actor after every `--ref-update-interval` rollouts. From then on no other file has it, so
  it goes into the checkpoints, and a resumed run takes it from there and not from `--ref-load`.
- The old actor gives the old log-probs. With a push after every rollout, the next rollout was generated before the last push,
  so the old actor lags one push: old actor ← rollout actor ← actor. With rarer pushes it is what the engines got last.
- A resumed run pushes its weights before it generates, which shifts the copies once. So a checkpoint holds the rollout actor,
  and after that push the copies are those of a run that was never interrupted. It need not hold the old actor.
- The asynchronous loop does not save rollouts that were generated ahead. The first one that a resumed run trains is generated
  with the weights of that first push, so there both copies begin as the actor.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from slime.arguments.checkpoints import (
    ACTOR,
    OLD_ACTOR,
    REFERENCE,
    ROLLOUT_ACTOR,
    TEACHER,
    WeightSource,
    lags_one_push,
    other_model_states,
    source_of_reference,
    source_of_teacher,
)
from slime.observability.timer import timer
from slime.utils.device import get_accelerator
from slime.utils.errors import RunError

__all__ = ["ACTOR", "OLD_ACTOR", "REFERENCE", "ROLLOUT_ACTOR", "TEACHER", "ModelStates"]


# Each copy begins at a multiple of this in its buffer: a cache line of the host, at which a tensor of any dtype may begin.
_ALIGNMENT = 64
# What the live model holds while weights are loaded into it, which have no name yet.
_ANY = "weights that are being loaded"


class HostCopy:
    """Room for a copy of `tensors` in one piece of host memory; `fill` makes the copy.

    The host never reads the buffer, and waits for no copy. On a GPU, copies to and from it are queued on the stream that
    computes, in the order of the calls: after the step whose weights they read, before the step that changes them, and first
    what fills the buffer, then what empties it. So no other stream may touch the weights or the buffer while states change.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        places, size = {}, 0
        for name, tensor in tensors:
            places[name] = size, tensor
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buffer = get_accelerator().host_buffer(size)
        self._views = {
            name: self.buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for name, (start, tensor) in places.items()
        }

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._views[name].copy_(tensor, non_blocking=True)

    def put_into(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            tensor.copy_(self._views[name], non_blocking=True)


class ModelStates:
    """Host copies of a model's tensors by state name.

    Args:
        live_tensors: the model's (name, tensor) pairs, in the same order at every call.
    """

    def __init__(self, live_tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._live_tensors = live_tensors
        self._copies: dict[str, HostCopy] = {}
        # The actor while another state is in the model; kept, because pinned memory is slow to allocate.
        self._put_aside: HostCopy | None = None
        self._takes_turns = False
        self.active = ACTOR

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def capture(self, name: str) -> None:
        """Store the live weights under `name`, replacing what was stored there."""
        self._copies[name] = self._snapshot(self._copies.get(name))

    def advance(self, newer: str, older: str) -> None:
        """`older` becomes what `newer` was, and `newer` the live weights."""
        self._copies[older], self._copies[newer] = self._copies[newer], self._copies[older]
        self.capture(newer)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Have the weights `name` in the live model for the length of the block."""
        previous = self.active
        try:
            self._switch(name)
            yield
        finally:
            if not self._takes_turns:
                self._switch(previous)

    @contextlib.contextmanager
    def turns(self) -> Iterator[None]:
        """Leave each state in the model until the next one is asked for, and have the actor back when the block ends.

        Nothing may change the live weights in it.
        """
        self.require_active(ACTOR)
        self._takes_turns = True
        try:
            yield
        finally:
            self._takes_turns = False
            self._switch(ACTOR)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Put the actor aside for a block that writes any weights into the live model, and have it back when the block ends."""
        self.require_active(ACTOR)
        self._put_aside = self._snapshot(self._put_aside)
        self.active = _ANY
        try:
            yield
        finally:
            self._switch(ACTOR)

    def buffers(self) -> list[torch.Tensor]:
        """The host memory that the copies lie in."""
        copies = [*self._copies.values(), *([self._put_aside] if self._put_aside is not None else [])]
        return [copy.buffer for copy in copies]

    def require_active(self, name: str) -> None:
        """Raise RunError unless `name` is the state in the live model."""
        if self.active != name:
            raise RunError(f"the live model holds the state {self.active!r}, not {name!r}")

    @torch.no_grad()
    def _switch(self, name: str) -> None:
        if name == self.active:
            return
        if name != ACTOR and name not in self._copies:
            raise RunError(f"no model state {name!r}; known: {', '.join([ACTOR, *self._copies])}")
        if self.active == ACTOR:
            self._put_aside = self._snapshot(self._put_aside)
        # Set before the copy: if that fails, the live weights are no longer those of the previous state either.
        self.active = name
        (self._put_aside if name == ACTOR else self._copies[name]).put_into(self._live_tensors())

    @torch.no_grad()
    def _snapshot(self, reuse: HostCopy | None) -> HostCopy:
        copy = reuse or HostCopy(self._live_tensors())
        copy.fill(self._live_tensors())
        return copy


class StateSchedule:
    """Keeps the sets of weights that the flags ask for up to date in `states`.

    Args:
        states: those of the live model; nothing is captured yet.
        tell: gets a line for the log about each set of weights that is loaded.
    """

    def __init__(self, args: argparse.Namespace, states: ModelStates, tell: Callable[[str], None]) -> None:
        self._args = args
        self._states = states
        self._tell = tell
        self._wanted = other_model_states(args)
        self._reference_has_moved = False
        self._pushed = False

    def load(self, load_source: Callable[[WeightSource], None], load_stored: Callable[[str], bool]) -> None:
        """Load what does not come from the actor. Afterwards the live model holds what it held before, because parameters that
        the actor's own checkpoint lacks (with random weights, all of them) must stay as they were drawn.

        Args:
            load_source: puts the weights of a checkpoint into the live model.
            load_stored: puts the state of that name into the live model, out of the checkpoint that the run resumes from;
                False, and nothing done, where there is none.
        """
        loaded = {REFERENCE, TEACHER, ROLLOUT_ACTOR}.intersection(self._wanted)
        if self._args.asynchronous and self._args.has_engines:
            # The rollout that is trained next is generated anew, after the first push. Only a run on dumps (without engines)
            # still has those that were generated ahead.
            loaded.discard(ROLLOUT_ACTOR)
        if not loaded:
            return
        with self._states.aside():
            if REFERENCE in loaded:
                self._load_reference(load_source, load_stored)
                self._states.capture(REFERENCE)
            if TEACHER in loaded:
                source = source_of_teacher(self._args)
                load_source(source)
                self._tell(f"teacher weights: {source}")
                self._states.capture(TEACHER)
            if ROLLOUT_ACTOR in loaded and load_stored(ROLLOUT_ACTOR):
                self._states.capture(ROLLOUT_ACTOR)

    def start(self) -> None:
        """The live model holds the actor's weights now: make the copies that begin as the actor."""
        for name in (ROLLOUT_ACTOR, OLD_ACTOR):
            if name in self._wanted and name not in self._states:
                self._states.capture(name)

    def before_rollout(self, rollout_id: int) -> None:
        """The rollout `rollout_id` is about to be trained.

        A run without engines never pushes. Its copies move when those of a run with engines do, so that training on that run's
        dumps gives the same numbers.
        """
        due = rollout_id % self._args.update_weights_interval == 0 or not self._pushed
        if not self._args.has_engines and due:
            self.after_push()

    def after_rollout(self, rollout_id: int) -> None:
        """The rollout `rollout_id` has been trained: refresh the reference if it is due."""
        interval = self._args.ref_update_interval
        if interval is None or REFERENCE not in self._wanted or (rollout_id + 1) % interval:
            return
        self._states.require_active(ACTOR)
        with timer("ref_model_update"):
            self._states.capture(REFERENCE)
        self._reference_has_moved = True

    def after_push(self) -> None:
        """The engines have the actor's weights."""
        self._pushed = True
        if OLD_ACTOR not in self._wanted:
            return
        self._states.require_active(ACTOR)
        if lags_one_push(self._args):
            self._states.advance(ROLLOUT_ACTOR, OLD_ACTOR)
        else:
            self._states.capture(OLD_ACTOR)

    def stored(self) -> tuple[str, ...]:
        """Names of the states that a checkpoint must hold."""
        reference = (REFERENCE,) if self._reference_has_moved else ()
        return (*reference, *(name for name in self._wanted if name == ROLLOUT_ACTOR))

    def _load_reference(self, load_source: Callable[[WeightSource], None], load_stored: Callable[[str], bool]) -> None:
        self._reference_has_moved = load_stored(REFERENCE)
        if self._reference_has_moved:
            self._tell("reference weights: those of the checkpoint, which an earlier rollout refreshed")
            return
        source = source_of_reference(self._args)
        load_source(source)
        self._tell(f"reference weights: {source}")
