"""What belongs to one call of a rollout function: which tasks are pending, whether it is aborted, how far it has come.

Several calls may be under way in a process at a time, say a training rollout and an evaluation, and none knows of another. A
context variable tells which call a piece of code works for; it goes along with tasks, with the threads of plain functions, and
with `slime.utils.async_utils.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from slime.observability.console import Progress
from slime.utils.http_utils import noting_request_ids
from slime.utils.misc import SingletonMeta


class GenerationCall:
    """One call. If another call is under way where it is made, that one encloses it, and both share their progress.

    Attributes:
        remaining_batch_size: how many groups are kept or may still be: those started, minus dropped, minus given back.
        pendings: tasks of the groups that are being generated.
        aborted: the call is being wound down; no request may start any more.
        request_ids: the ids under which engines know its unanswered requests.
        engine_of_request: for requests that were sent past the router, the URL of the engine. Where the router has sent the
            others, it tells nobody.
        trained_as: the version of the weights that its samples will train; None where nothing is trained, or nobody knows.
        evaluation: its samples are graded and train nothing.
        before_training: an evaluation before training on `rollout_id`, and not after it.
    """

    def __init__(
        self,
        rollout_id: int | None = None,
        trained_as: int | None = None,
        *,
        evaluation: bool = False,
        before_training: bool = False,
    ) -> None:
        self.parent: GenerationCall | None = _current.get()
        self.evaluation = evaluation or (self.parent is not None and self.parent.evaluation)
        self.before_training = before_training
        self.trained_as = trained_as if self.parent is None else self.parent.trained_as
        self.progress: Progress = Progress() if self.parent is None else self.parent.progress
        self.request_ids: set[str] = set()
        self.engine_of_request: dict[str, str] = {}
        self.rollout_id = rollout_id
        self.reset()

    def reset(self) -> None:
        """Back to where nothing is under way in this call."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    @contextlib.contextmanager
    def under_way(self) -> Iterator[GenerationCall]:
        """What starts in the block works for this call."""
        token = _current.set(self)
        _under_way.add(self)
        try:
            with noting_request_ids(self.request_ids):
                yield self
        finally:
            _under_way.discard(self)
            _current.reset(token)

    def is_alone(self) -> bool:
        """Whether no other call of this process asks the engines for anything, beside those that enclose this one."""
        enclosing, call = set(), self
        while call is not None:
            enclosing.add(call)
            call = call.parent
        return enclosing >= _under_way


class _OutsideOfCalls(GenerationCall, metaclass=SingletonMeta):
    """In place of a call where none is under way, say in a user's script. One per process."""


_current: contextvars.ContextVar[GenerationCall | None] = contextvars.ContextVar("generation_call", default=None)
_under_way: set[GenerationCall] = set()


def current_call() -> GenerationCall:
    """The call that this code works for."""
    return _current.get() or _OutsideOfCalls()
