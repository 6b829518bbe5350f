"""Several sets of weights that take turns in one model: the actor, the reference, a teacher, older copies of the actor.

`with states("ref"):` puts the reference's weights into the live model; when the block ends, also by an error, the weights
that were there before are back, bit for bit. The active state has a name, so that nobody pushes or saves the wrong one.
Only the actor is trained: what any other state puts into the model is as it was stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from slime.arguments.checkpoints import ACTOR, OLD_ACTOR, REFERENCE, ROLLOUT_ACTOR, TEACHER
from slime.utils.errors import RunError

__all__ = ["ACTOR", "OLD_ACTOR", "REFERENCE", "ROLLOUT_ACTOR", "TEACHER", "ModelStates"]


class ModelStates:
    """Host copies of a model's tensors by state name.

    Args:
        live_tensors: the model's (name, tensor) pairs, in the same order at every call.
    """

    def __init__(self, live_tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._live_tensors = live_tensors
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        # The actor while another state is in the model; kept, because pinned memory is slow to allocate.
        self._put_aside: dict[str, torch.Tensor] | None = None
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
        if name == self.active:
            yield
            return
        if name != ACTOR and name not in self._copies:
            raise RunError(f"no model state {name!r}; known: {', '.join([ACTOR, *self._copies])}")
        previous = self.active
        if previous == ACTOR:
            self._put_aside = self._snapshot(self._put_aside)
        try:
            self._restore(name)
            self.active = name
            yield
        finally:
            self._restore(previous)
            self.active = previous

    def require_active(self, name: str) -> None:
        """Raise RunError unless `name` is the state in the live model."""
        if self.active != name:
            raise RunError(f"the live model holds the state {self.active!r}, not {name!r}")

    @torch.no_grad()
    def _snapshot(self, reuse: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        copies = reuse or {}
        for name, tensor in self._live_tensors():
            if name not in copies:
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name].copy_(tensor)
        return copies

    @torch.no_grad()
    def _restore(self, name: str) -> None:
        copies = self._put_aside if name == ACTOR else self._copies[name]
        for key, tensor in self._live_tensors():
            tensor.copy_(copies[key])
