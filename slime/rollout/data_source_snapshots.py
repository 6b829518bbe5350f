"""The states of a data source on their way to checkpoints and back.

A checkpoint may be written when later prompts are drawn already, so the state after the draw of a rollout that will be
saved is kept until then. Which of its methods a source is asked by:

* `state_dict()` and `save(rollout_id, state)`, as our own sources have them;
* `state_dict()` and `load_state_dict(state)` alone: the state is written and read here, as `data_source_files` does;
* `save(rollout_id)` and `load(rollout_id)` alone: the state is the one of the moment of saving.
"""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

from slime.rollout.data_source_calls import FLAG, calling_source, has_method
from slime.rollout.data_source_files import find_state, read_state, state_directory, write_state
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# Data states of so many rollouts are kept for a save that comes later than the draw.
_KEPT_STATES = 8


class DataSourceSnapshots:
    """Remembers, saves and loads the states of `source`."""

    def __init__(self, args: Any, source: Any) -> None:
        self._args = args
        self._source = source
        self._kept: dict[int, Any] = {}
        self._saves_given_state = has_method(source, "save") and "state" in inspect.signature(source.save).parameters
        has_state = has_method(source, "state_dict")
        self._written_here = has_state and has_method(source, "load_state_dict") and not self._saves_given_state
        self._has_snapshots = self._written_here or (has_state and self._saves_given_state)

    def remember(self, rollout_id: int) -> None:
        """Keep the state as it is now as the one after `rollout_id`, which will be saved, if the source can tell it."""
        if not self._has_snapshots:
            return
        self._kept[rollout_id] = self._snapshot(rollout_id)
        for old in sorted(self._kept)[:-_KEPT_STATES]:
            del self._kept[old]

    def save(self, rollout_id: int) -> None:
        """Write the state after `rollout_id` (the present one if that was not kept) below `args.save`.

        Raises:
            UserError: the source raised, or its state is not plain.
            OSError: the state cannot be written.
        """
        if not self._has_snapshots:
            with calling_source(self._args, self._source, "save", f"rollout {rollout_id}"):
                self._source.save(rollout_id)
            return
        state = self._kept[rollout_id] if rollout_id in self._kept else self._snapshot(rollout_id)
        if self._written_here:
            write_state(state_directory(self._args.save, rollout_id), state)
        else:
            with calling_source(self._args, self._source, "save", f"rollout {rollout_id}"):
                self._source.save(rollout_id, state)
        # Saves come in order.
        for old in [kept for kept in self._kept if kept <= rollout_id]:
            del self._kept[old]

    def load(self, rollout_id: int) -> None:
        """Restore the state after `rollout_id`; nothing to do for a negative id.

        Raises:
            UserError: there is no such state (unless `args.fresh_data_state`), it is unreadable, or the source raised.
        """
        if rollout_id < 0:
            return
        if not self._written_here:
            self._load_by_source(rollout_id)
            return
        directory = find_state(self._args, rollout_id)
        if directory is None:
            return
        state = read_state(directory)
        with calling_source(self._args, self._source, "load_state_dict", str(directory)):
            self._source.load_state_dict(state)

    def _load_by_source(self, rollout_id: int) -> None:
        if not has_method(self._source, "load"):
            if self._args.fresh_data_state:
                logger.warning("the data source cannot be restored: the data starts from zero")
                return
            raise UserError(
                f"{FLAG} {self._args.data_source_path}: {type(self._source).__name__} has no load(rollout_id) and no "
                f"load_state_dict(state), so the run cannot go on after rollout {rollout_id}; give "
                "--fresh-data-state to start the data from zero"
            )
        with calling_source(self._args, self._source, "load", f"rollout {rollout_id}"):
            self._source.load(rollout_id)

    def _snapshot(self, rollout_id: int) -> Any:
        with calling_source(self._args, self._source, "state_dict", f"rollout {rollout_id}"):
            state = self._source.state_dict()
            # A user's source may hand out what it goes on changing.
            return copy.deepcopy(state) if self._written_here else state
