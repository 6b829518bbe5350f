"""What is drawn from a data source and what goes back to it, whether by our functions or a user's; and its saved states.

A source may hand out groups, or prompts, of which `n_samples_per_prompt` numbered copies are made here.

A checkpoint may be written when later prompts were already drawn. So a source's state is taken as soon as the rollout that will
be saved, and all before it, have their prompts, and is kept until the save. The state lacks the prompts that later rollouts
have drawn by then, even if those are over already. `Draws` notes these prompts, for as long as an earlier rollout is under way
or its state is still to be taken, and a run that resumes draws them first. A source's state goes by those of its methods that
it has:

* `state_dict()` and `save(rollout_id, state)`, as our own sources have them;
* `state_dict()` and `load_state_dict(state)` alone: the state is written and read here, by `data_source_files`;
* `save(rollout_id)` and `load(rollout_id)` alone, or overridden in a class that inherits its `state_dict`: the state is that
  of the moment of saving.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.rollout.attempts import begin_anew_where_sampled_otherwise
from slime.rollout.base_types import check_sample, leaves
from slime.rollout.data_source_files import (
    FLAG,
    DrawnAhead,
    calling_source,
    find_state,
    groups_from_plain,
    groups_to_plain,
    has_method,
    left_for_a_fresh_start,
    read_drawn_ahead,
    read_state,
    source_is_late,
    source_turn,
    state_directory,
    turn_for_state,
    write_drawn_ahead,
    write_state,
)
from slime.utils.errors import RunError, UserError
from slime.utils.plugin_loader import accepted_keywords
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# Groups made of plain prompts get the number rollout · this + position, so that a resumed run gives new numbers, too.
_NUMBERS_PER_ROLLOUT = 2**20

# This holds (the `Draws` that note it, the rollout that draws here). Tasks and threads inherit it as they do the call.
_drawing: contextvars.ContextVar[tuple[Draws, int] | None] = contextvars.ContextVar("drawing", default=None)
# It stands for the unknown rollouts that will take what is drawn ahead, and is later than every rollout.
_AHEAD = sys.maxsize
# While groups go back, it holds them as they were drawn, if that is known: the source may be given copies.
_origins: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("origins", default=None)


@dataclass(eq=False)
class _Drawn:
    """A group or a prompt that was drawn.

    Attributes:
        held: the object that the caller has.
        plain: the same as it was when it was drawn, in plain values.
        finished: gives the group that was made of it, as long as no rollout has taken that.
    """

    held: Any
    plain: dict[str, Any]
    finished: Callable[[], list[Any]] | None = None

    def as_of_now(self) -> dict[str, Any]:
        """What a saved state holds of it, in plain values."""
        return self.plain if self.finished is None else _as_plain(self.finished())


class Draws:
    """The groups and prompts that rollouts have drawn from `source`, and that states which are still to be taken will lack.

    Args:
        saves: whether states are taken at all.

    Attributes:
        awaited: rollouts after which a state is still to be taken.
        again: entries that the source gave to rollouts of an earlier run; they are drawn before those of the source.
    """

    def __init__(self, source: Any, saves: bool) -> None:
        self.awaited: set[int] = set()
        self.again: list[Any] = []
        # It is held for moments, and never while a source works, which may wait for threads that call the source themselves.
        self.lock = threading.RLock()
        self._source, self._saves = source, saves
        self._observing = False
        self._told = False
        self._begun: set[int] = set()
        self._under_way: set[int] = set()
        self._noted: dict[int, list[_Drawn]] = {}
        # For each rollout these hold the first position that no group of an earlier run has, and the first that is free.
        self._first_positions: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    def _observe(self) -> None:
        """Observe from now on what `get_samples` and `add_samples` of the source give and take, by changing its class.

        Called only if something is to be noted or drawn again: the source of a loop with one rollout at a time keeps its class.
        """
        if self._observing:
            return
        self._observing, own = True, type(self._source)
        about = {
            "__slots__": (),
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
        }
        try:
            telling = type(own)(own.__name__, (own,), about)
            object.__setattr__(self._source, "__class__", telling)
        except Exception as error:
            logger.warning(
                "%s: a %s cannot be observed (%s): where several rollouts are under way, a checkpoint lacks the prompts that "
                "those behind it have drawn",
                FLAG, own.__name__, error,
            )  # fmt: skip
            return
        for name, told in (("get_samples", self._drawn_from), ("add_samples", self._taken_by)):
            if has_method(own, name):
                setattr(telling, name, _telling(telling, name, told))
        telling.__reduce_ex__ = _reducing_as(own, telling)

    def resume_after(self, rollout_id: int, ahead: DrawnAhead) -> None:
        """Start after `rollout_id`, and first draw again the entries that `behind` gave."""
        self._begun.add(rollout_id)
        if ahead.entries:
            self._observe()
        entries = ahead.entries
        self.again = [groups_from_plain(one["samples"]) if "samples" in one else one["prompt"] for one in entries]
        # Groups that went back to the source are not among the entries, but still have their numbers.
        self._first_positions = dict(ahead.positions)
        numbers = (leaf.group_index for leaf in leaves(self.again) if isinstance(leaf, Sample))
        for number in (number for number in numbers if number is not None):
            owner, position = divmod(number, _NUMBERS_PER_ROLLOUT)
            self._first_positions[owner] = max(self._first_positions.get(owner, 0), position + 1)
        self._positions = dict(self._first_positions)

    def first_number(self, rollout_id: int) -> int:
        """The number of the first group made of a plain prompt for `rollout_id`; it follows those of an earlier run."""
        return rollout_id * _NUMBERS_PER_ROLLOUT + self._first_positions.get(rollout_id, 0)

    def numbered(self, rollout_id: int, last: int) -> None:
        """Note that `last` is the highest number so far of a group made for `rollout_id`."""
        with self.lock:
            position = last + 1 - rollout_id * _NUMBERS_PER_ROLLOUT
            self._positions[rollout_id] = max(self._positions.get(rollout_id, 0), position)

    @contextlib.contextmanager
    def of_rollout(self, rollout_id: int) -> Iterator[None]:
        """Whatever is drawn in the block is drawn for `rollout_id`."""
        with self.lock:
            self._begun.add(rollout_id)
            self._under_way.add(rollout_id)
            if self._saves and self._is_needed(rollout_id):
                self._observe()
        token = _drawing.set((self, rollout_id))
        try:
            yield
        finally:
            _drawing.reset(token)
            with self.lock:
                self._under_way.discard(rollout_id)
                self.release()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """Whatever is drawn in the block is for rollouts that take it later; every state has it until `taken`."""
        with self.lock:
            if self._saves:
                self._observe()
        token = _drawing.set((self, _AHEAD))
        try:
            yield
        finally:
            _drawing.reset(token)

    def finished(self, group: list[Any], give: Callable[[], list[Any]]) -> None:
        """Note that `group`, which was drawn ahead, became `give()`; states hold that in its place."""
        with self.lock:
            for drawn in self._noted.get(_AHEAD, []):
                if drawn.held is group:
                    drawn.finished = give

    def taken(self, groups: list[list[Any]], rollout_id: int | None) -> None:
        """Note that the results of `groups`, which were drawn ahead, now belong to `rollout_id`; None: they are dropped."""
        ids = {id(group) for group in groups}
        with self.lock:
            noted = self._noted.get(_AHEAD, [])
            mine = [drawn for drawn in noted if id(drawn.held) in ids]
            noted[:] = [drawn for drawn in noted if id(drawn.held) not in ids]
            if rollout_id is None or not self._is_needed(rollout_id):
                return
            self._noted.setdefault(rollout_id, []).extend(mine)
            for drawn in mine:
                drawn.plain, drawn.finished = drawn.as_of_now(), None

    def is_complete(self, rollout_id: int) -> bool:
        """Whether no rollout before `rollout_id` is under way; such a one might draw more, or give back."""
        return all(other >= rollout_id for other in self._under_way)

    def behind(self, rollout_id: int, group_size: int) -> DrawnAhead:
        """What rollouts after `rollout_id` have drawn, in their order, and then what is still to be drawn again."""
        # Locked, because the worker's thread may hand groups that were made ahead to a rollout meanwhile.
        with self.lock:
            later = [
                drawn.as_of_now()
                for number in sorted(self._noted)
                if number > rollout_id
                for drawn in self._noted[number]
            ]
            positions = {number: position for number, position in self._positions.items() if number > rollout_id}
            return DrawnAhead(later + [_as_plain(entry) for entry in self.again], positions, group_size)

    def release(self) -> None:
        """Forget what no state that is still to be taken needs."""
        with self.lock:
            self._noted = {number: noted for number, noted in self._noted.items() if self._is_needed(number)}
            oldest = min(self.awaited | self._under_way, default=0)
            self._positions = {number: position for number, position in self._positions.items() if number > oldest}

    def hold(self, rollout_id: int, entry: Any, group: list[Any]) -> None:
        """Note that `rollout_id` has made `group` of `entry`, which it had drawn."""
        with self.lock:
            for drawn in self._noted.get(rollout_id, []):
                if drawn.held is entry:
                    drawn.held = group
                    return

    def _is_needed(self, rollout_id: int) -> bool:
        if rollout_id == _AHEAD:
            return self._saves
        if any(other < rollout_id for other in self._under_way | self.awaited):
            return True
        # The rollout before it may be about to begin, in another thread.
        return rollout_id in self._under_way and rollout_id - 1 not in self._begun and len(self._begun) > 1

    def _drawn_from(self, get_samples: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Entries that an earlier run had drawn, and as many of the source as are missing then."""
        if self.again:
            call = inspect.signature(get_samples).bind(*args, **keywords)
            size = next(iter(call.arguments))
            with self.lock:
                again, self.again = self.again[: call.arguments[size]], self.again[call.arguments[size] :]
            call.arguments[size] -= len(again)
            entries = [*again, *(get_samples(*call.args, **call.kwargs) if call.arguments[size] else ())]
        else:
            entries = get_samples(*args, **keywords)
        if isinstance(entries, list | tuple):
            with self.lock:
                self._note(entries)
        return entries

    def _taken_by(self, add_samples: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call `add_samples`, and forget the groups that went back. A copy that shares no sample with what was drawn counts as
        another group, since it is better to draw a group twice than never."""
        result = add_samples(*args, **keywords)
        back = {id(sample) for sample in leaves(_origins.get() or [*args, *keywords.values()])}
        with self.lock:
            for noted in self._noted.values():
                noted[:] = [drawn for drawn in noted if not back.intersection(map(id, leaves(drawn.held)))]
        return result

    def _note(self, entries: list[Any] | tuple[Any, ...]) -> None:
        drawing = _drawing.get()
        if drawing is not None:
            if self._is_needed(drawing[1]):
                self._noted.setdefault(drawing[1], []).extend(_Drawn(entry, _as_plain(entry)) for entry in entries)
        elif self._under_way and not self._told:
            self._told = True
            logger.warning(
                "%s: prompts are drawn in a thread that works for no rollout; a checkpoint lacks those that are not used yet. "
                "Give threads the context of the rollout: pool.submit(contextvars.copy_context().run, function)", FLAG,
            )  # fmt: skip


def current_draws() -> Draws | None:
    """The `Draws` of the rollout that this code works for; None outside of rollouts."""
    drawing = _drawing.get()
    return None if drawing is None else drawing[0]


def drawing_ahead(draws: Draws | None) -> contextlib.AbstractContextManager[None]:
    """`draws.ahead()`; a block without effect if there are no `draws`."""
    return contextlib.nullcontext() if draws is None else draws.ahead()


def _telling(cls: type, name: str, told: Callable[..., Any]) -> Callable[..., Any]:
    """A method `name` for `cls` that passes the inherited method to `told`, which calls it."""

    @functools.wraps(getattr(cls, name))
    def method(source: Any, *args: Any, **keywords: Any) -> Any:
        return told(getattr(super(cls, source), name), *args, **keywords)

    return method


def _reducing_as(own: type, telling: type) -> Callable[..., Any]:
    """A `__reduce_ex__` with which objects of `telling`, a class that cannot be imported, are pickled as objects of `own`."""

    def reduced(source: Any, protocol: Any) -> Any:
        how = super(telling, source).__reduce_ex__(protocol)
        if isinstance(how, str):
            return how
        make, arguments, *rest = how
        # For functions that it knows, pickle demands the object's own class as argument; for `_made` it does not.
        return (_made, (make, *(own if argument is telling else argument for argument in arguments)), *rest)

    return reduced


def _made(make: Callable[..., Any], *arguments: Any) -> Any:
    return make(*arguments)


def _as_plain(entry: Any) -> dict[str, Any]:
    """Plain values: a group or a sample under `samples`, a text or a chat under `prompt`."""
    if all(isinstance(leaf, Sample) for leaf in leaves(entry)):
        return {"samples": groups_to_plain(entry)}
    return {"prompt": copy.deepcopy(entry)}


def draw_groups(args: Any, source: Any, num_samples: int, rollout_id: int, drawn: int = 0) -> list[list[Any]]:
    """The next groups of `source`; single prompts are copied `n_samples_per_prompt` times, and what has no numbers gets some.
    Attempts that an earlier start sampled under other flags become prompts again.

    `drawn`: how many entries were drawn for this rollout before; the numbers of groups that are made here follow from it.

    Raises:
        UserError: the source raised, or did not return a list of groups or prompts.
    """
    with source_turn:
        with calling_source(args, source, "get_samples", f"rollout {rollout_id}"):
            keywords = accepted_keywords(source.get_samples, {"rollout_id": rollout_id})
            entries = source.get_samples(num_samples, **keywords)
        if not isinstance(entries, list | tuple):
            raise UserError(
                f"{FLAG} {args.data_source_path}: get_samples returned {type(entries).__name__}; expected a list of groups "
                "of Samples, or of prompts"
            )
        draws, drawn_for = _drawing.get() or (None, rollout_id)
        first = rollout_id * _NUMBERS_PER_ROLLOUT if draws is None else draws.first_number(rollout_id)
        first += drawn
        groups = [_as_group(args, entry, first + position) for position, entry in enumerate(entries)]
        made = [group for entry, group in zip(entries, groups, strict=True) if group is not entry]
        groups = begin_anew_where_sampled_otherwise(args, groups, rollout_id)
        if draws is not None:
            if made:
                draws.numbered(rollout_id, made[-1][0].group_index)
            for entry, group in zip(entries, groups, strict=True):
                draws.hold(drawn_for, entry, group)
        return groups


async def wait_for_source(args: Any, call: asyncio.Future[Any], method: str) -> Any:
    """The result of `call`, which calls `method` of the source. It goes on if this wait is cancelled or takes too long.

    Raises:
        UserError: it did not return within `--http-request-timeout`.
    """
    await asyncio.wait([call], timeout=args.http_request_timeout)
    if call.done():
        return call.result()
    asked = f", which asks --buffer-filter-path {args.buffer_filter_path}," if args.buffer_filter_path else ""
    raise source_is_late(args, f"{method}{asked}")


def give_back(
    args: Any, source: Any, groups: list[list[Any]], rollout_id: int, origins: list[list[Any]] | None = None
) -> None:
    """Hand `groups` to the source's `add_samples`.

    `origins`: the groups that `draw_groups` gave in their place; None: the same ones.

    Raises:
        UserError: the source raised, or has no such method.
    """
    if not has_method(source, "add_samples"):
        raise UserError(
            f"{FLAG} {args.data_source_path}: {type(source).__name__} has no add_samples(groups), but rollout "
            f"{rollout_id} has {len(groups)} unfinished groups to give back"
        )
    token = _origins.set(origins)
    try:
        with source_turn, calling_source(args, source, "add_samples", f"rollout {rollout_id}"):
            source.add_samples(groups)
    finally:
        _origins.reset(token)


def _as_group(args: Any, entry: Any, number: int) -> list[Any]:
    size, returned = args.n_samples_per_prompt, f"{FLAG} {args.data_source_path}: get_samples returned"
    is_chat = isinstance(entry, list) and bool(entry) and all(isinstance(message, dict) for message in entry)
    if isinstance(entry, str) or is_chat:
        entry = Sample(prompt=entry)
    if not isinstance(entry, Sample):
        if other := [leaf for leaf in leaves(entry) if not isinstance(leaf, Sample)]:
            holds = f"a group that holds {type(other[0]).__name__}"
            raise UserError(f"{returned} {holds}; expected Samples (a prompt stands alone, not in a list)")
        if not isinstance(entry, list) or len(entry) != size:
            found = f"{len(entry)} entries" if isinstance(entry, list) else type(entry).__name__
            raise UserError(f"{returned} a group of {found}; expected a list of {size} Samples")
    # Those of our own sources are as they should be.
    for sample in [] if args.data_source_path.startswith("slime.rollout.") else leaves(entry):
        check_sample(sample, returned)
    if isinstance(entry, list) and any((one.group_index, one.index) != (None, None) for one in leaves(entry)):
        return entry
    # Copies, one by one: a source may give one object several times, and again later.
    group = [copy.deepcopy(one) for one in (entry if isinstance(entry, list) else [entry] * size)]
    for position, one in enumerate(group):
        for sample in leaves(one):
            sample.group_index = number
            sample.index = number * size + position
    return group


def _saves_more_than_state(source: Any) -> bool:
    """Whether `save` or `load` come from a subclass of the class with `state_dict`, and so may save more than that gives."""

    def place(*names: str) -> int:
        """The position of the first class that has one of the methods; a very large number if they are found another way."""
        places = [i for i, cls in enumerate(type(source).__mro__) for name in names if name in vars(cls)]
        return min(places, default=sys.maxsize)

    if not (has_method(source, "save") and has_method(source, "load")):
        return False
    return place("save", "load") < place("state_dict", "load_state_dict")


class DataSourceSnapshots:
    """Remembers, saves and loads the states of `source`."""

    def __init__(self, args: Any, source: Any) -> None:
        self._args = args
        self._source = source
        # For each rollout this holds the state after it, and what later rollouts had drawn by then.
        self._kept: dict[int, tuple[Any, DrawnAhead]] = {}
        self._saves_given_state = has_method(source, "save") and "state" in inspect.signature(source.save).parameters
        has_state = has_method(source, "state_dict")
        has_state = has_state and (self._saves_given_state or not _saves_more_than_state(source))
        self._written_here = has_state and has_method(source, "load_state_dict") and not self._saves_given_state
        self._has_snapshots = self._written_here or (has_state and self._saves_given_state)
        self._draws = Draws(source, saves=args.save is not None)

    @contextlib.contextmanager
    def of_rollout(self, rollout_id: int) -> Iterator[None]:
        """Whatever is drawn from the source in the block is drawn for `rollout_id`."""
        with self._draws.of_rollout(rollout_id):
            yield
        self._take_states()

    def remember(self, rollout_id: int) -> None:
        """Keep the state after `rollout_id`, which has its prompts and will be saved, as soon as all before it are over."""
        with self._draws.lock:
            self._draws.awaited.add(rollout_id)
        self._take_states()

    def _take_states(self) -> None:
        if not self._has_snapshots or not self._draws.awaited:
            return
        with turn_for_state(self._args):
            for rollout_id in sorted(filter(self._draws.is_complete, self._draws.awaited)):
                with calling_source(self._args, self._source, "state_dict", f"rollout {rollout_id}"):
                    state = self._source.state_dict()
                    # A user's source may hand out objects that it changes later.
                    state = copy.deepcopy(state) if self._written_here else state
                self._kept[rollout_id] = state, self._draws.behind(rollout_id, self._args.n_samples_per_prompt)
                self._draws.awaited.remove(rollout_id)
            self._draws.release()

    def save(self, rollout_id: int) -> None:
        """Write the state after `rollout_id` below `args.save`. A source that cannot tell its state saves the present one.

        Raises:
            RunError: no state was kept for this rollout, or it cannot be written.
            UserError: the source raised, or its state is not plain.
        """
        directory = state_directory(self._args.save, rollout_id)
        if not self._has_snapshots:
            with turn_for_state(self._args):
                with calling_source(self._args, self._source, "save", f"rollout {rollout_id}"):
                    self._source.save(rollout_id)
                ahead = self._draws.behind(rollout_id, self._args.n_samples_per_prompt)
                self._draws.awaited = {other for other in self._draws.awaited if other > rollout_id}
                self._draws.release()
            write_drawn_ahead(directory, ahead)
            return
        if rollout_id not in self._kept:
            raise RunError(
                f"the data state after rollout {rollout_id} cannot be saved: none was taken when its prompts were drawn, as is "
                "done for the rollouts that --save-interval names"
            )
        state, ahead = self._kept[rollout_id]
        if self._written_here:
            write_state(directory, state)
        else:
            with calling_source(self._args, self._source, "save", f"rollout {rollout_id}"):
                self._source.save(rollout_id, state)
        write_drawn_ahead(directory, ahead)
        # Saves come in order, so earlier states are not needed any more.
        for old in [kept for kept in tuple(self._kept) if kept <= rollout_id]:
            del self._kept[old]

    def load(self, rollout_id: int) -> None:
        """Restore the state after `rollout_id`; nothing to do for a negative id.

        Raises:
            UserError: there is no such state (unless `args.fresh_data_state`), it is unreadable, the source raised, or
                groups of another size are to be drawn again.
        """
        ahead = DrawnAhead()
        if rollout_id >= 0:
            restored = self._load_here(rollout_id) if self._written_here else self._load_by_source(rollout_id)
            if restored and self._args.fresh_data_state:
                logger.warning(
                    "--fresh-data-state: the data state after rollout %d is there, and is gone on with",
                    rollout_id,
                )
            if self._args.load:
                ahead = self._drawn_ahead(rollout_id, restored)
        self._draws.resume_after(rollout_id, ahead)

    def _drawn_ahead(self, rollout_id: int, restored: bool) -> DrawnAhead:
        """What is to be drawn again; nothing if the source was not `restored`, since a fresh one gives the prompts anyway, or
        never had them."""
        fresh, place = self._args.fresh_data_state, state_directory(self._args.load, rollout_id)
        ahead = read_drawn_ahead(self._args, place)
        if ahead.entries and not restored:
            logger.warning(
                "--fresh-data-state: %d prompts that rollouts behind %d had drawn are not drawn again",
                len(ahead.entries),
                rollout_id,
            )
            return dataclasses.replace(ahead, entries=[])
        size = self._args.n_samples_per_prompt
        groups = [one for one in ahead.entries if isinstance(one.get("samples"), list)]
        if not groups or ahead.group_size in (None, size):
            return ahead
        drawn = f"rollouts behind {rollout_id} had drawn {len(groups)} groups of {ahead.group_size}"
        if not fresh:
            raise UserError(
                f"--n-samples-per-prompt {size}: {drawn}, which are drawn again; resume with the value of the first start, or "
                "give --fresh-data-state to leave them out"
            )
        logger.warning("--fresh-data-state: %s, which --n-samples-per-prompt %d leaves out", drawn, size)
        prompts = [one for one in ahead.entries if not isinstance(one.get("samples"), list)]
        return dataclasses.replace(ahead, entries=prompts)

    def _load_here(self, rollout_id: int) -> bool:
        """Load the state that was written here. Returns False if there is none, and the data start from zero."""
        directory = find_state(self._args, rollout_id)
        if directory is None:
            return False
        try:
            state = read_state(directory)
        except UserError as error:
            if left_for_a_fresh_start(self._args, error):
                return False
            raise
        with calling_source(self._args, self._source, "load_state_dict", str(directory)):
            self._source.load_state_dict(state)
        return True

    def _load_by_source(self, rollout_id: int) -> bool:
        """Have the source load its state. Returns False if it cannot, or has none, so that the data start from zero."""
        if not has_method(self._source, "load"):
            if self._args.fresh_data_state:
                logger.warning("the data source cannot be restored: the data starts from zero")
                return False
            raise UserError(
                f"{FLAG} {self._args.data_source_path}: {type(self._source).__name__} has no load(rollout_id) and no "
                f"load_state_dict(state), so the run cannot go on after rollout {rollout_id}; give "
                "--fresh-data-state to start the data from zero"
            )
        with calling_source(self._args, self._source, "load", f"rollout {rollout_id}"):
            return self._source.load(rollout_id) is not False
