"""Where prompts come from: a data set that is read epoch after epoch, and a buffer in front of it.

A data source hands out groups: `n_samples_per_prompt` independent copies of one prompt with running `index` and a
common `group_index`. Its state is a cursor (`epoch_id`, `sample_offset`), the two running numbers, the user's metadata
and the buffer. The order of an epoch is a function of seed and epoch, so the cursor is enough to go on exactly where
the state was taken: no prompt is skipped or repeated, and no global random generator is touched.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import inspect
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.rollout.attempts import own_copy
from slime.rollout.data_source_files import (
    FLAG,
    PICKLED,
    calling_source,
    check_methods,
    dataset_fingerprint,
    describe_difference,
    find_state,
    groups_from_plain,
    groups_to_plain,
    left_for_a_fresh_start,
    read_state,
    state_directory,
    write_state,
)
from slime.utils.data_workers import DataWorkers, Preparation
from slime.utils.dataset import Dataset, RowKeys, StreamedDataset
from slime.utils.epoch_order import Part, epoch_order
from slime.utils.errors import UserError
from slime.utils.plugin_loader import calling_user_code, load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.prompt_rows import prompt_limit
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_FORMAT_VERSION = 1

# In place of a data set: read the one that the flags name. A source that is made with `args` alone gets this.
_OF_FLAGS: Any = object()

Group = list[Any]  # entries are samples, or lists of samples where one execution gave several


class DataSource(abc.ABC):
    """What a class given by `--data-source-path` has to offer; it need not inherit from this one.

    A run that saves needs `state_dict()` and `load_state_dict(state)` as well, of plain values and numpy arrays, or
    `save(rollout_id)` and `load(rollout_id)`, which find a place of their own.
    """

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` groups; or as many prompts, of which the framework makes groups."""

    @abc.abstractmethod
    def add_samples(self, groups: list[Group]) -> None:
        """Take groups back; they are handed out before new prompts."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Prompts per epoch."""


def create_data_source(args: Any) -> DataSource:
    """The source that `--data-source-path` names; its signature says whether it takes `(dataset, args)` or `(args)`.

    Raises:
        UserError: the constructor raised, or the source lacks a method that the run needs.
    """
    source_class = load_function(args.data_source_path, flag=FLAG)
    arguments = [args]
    if next(iter(inspect.signature(source_class).parameters), None) == "dataset":
        arguments = [build_dataset(args), args]
    with calling_source(args, source_class, "__init__", "start of the run"):
        source = source_class(*arguments)
    check_methods(args, source)
    return source


def build_dataset(args: Any) -> Dataset | StreamedDataset | None:
    """The data set of `--prompt-data`, or None with `--disable-rollout-global-dataset`.

    Raises:
        UserError: no or bad data (see `Dataset`).
    """
    if not args.rollout_global_dataset:
        return None
    if not args.prompt_data:
        raise UserError("--prompt-data is missing; give one, or --disable-rollout-global-dataset with your own source")
    max_length = prompt_limit(args)
    tokenizer = None
    if args.apply_chat_template or max_length is not None:
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    processor = None
    if args.multimodal_keys and max_length is not None:
        processor = load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    workers = None
    # Without a tokenizer rows are neither rendered nor measured: to read them needs no workers.
    if tokenizer is not None:
        workers = _data_workers(args, measures=max_length is not None, sees_images=processor is not None)
    common = {
        "workers": workers,
        "seed": args.rollout_seed,
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "allow_bad_rows": args.allow_bad_rows,
    }
    if args.streaming_data:
        images = (args.multimodal_keys or {}).get("image")
        keys = RowKeys(args.input_key, args.label_key, args.tool_key, args.metadata_key, images=images)
        return StreamedDataset(args.prompt_data, tokenizer, max_length, keys=keys, processor=processor, **common)
    with contextlib.nullcontext() if workers is None else contextlib.closing(workers):
        return Dataset(
            args.prompt_data,
            tokenizer,
            processor,
            max_length,
            prompt_key=args.input_key,
            multimodal_keys=args.multimodal_keys,
            label_key=args.label_key,
            tool_key=args.tool_key,
            metadata_key=args.metadata_key,
            **common,
        )


def _data_workers(args: Any, *, measures: bool, sees_images: bool) -> DataWorkers | None:
    """Processes that prepare rows beside this one; None with `--num-data-workers 0`."""
    if not args.num_data_workers:
        return None
    preparation = Preparation(
        checkpoint=args.hf_checkpoint,
        trust_remote_code=args.trust_remote_code,
        rendered=args.apply_chat_template,
        template_kwargs=dict(args.apply_chat_template_kwargs or {}),
        measures=measures,
        sees_images=sees_images,
    )
    return DataWorkers(args.num_data_workers, preparation)


class RolloutDataSource(DataSource):
    """Groups of prompts from a data set, epoch after epoch. Takes nothing back.

    Constructed with `(args)`, or with `(dataset, args)` where `dataset` is a sequence of samples or prompts. Without a
    data set (`--disable-rollout-global-dataset`) it hands out empty samples that are only numbered.
    """

    def __init__(self, dataset_or_args: Any = _OF_FLAGS, args: Any = None):
        if args is None:
            dataset_or_args, args = _OF_FLAGS, dataset_or_args
        dataset = build_dataset(args) if dataset_or_args is _OF_FLAGS else dataset_or_args
        if dataset is not None and len(dataset) == 0:
            raise UserError("the data source was given an empty data set")
        self.args = args
        self.dataset: Sequence[Any] | None = dataset
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self._shuffle = {"enabled": bool(args.rollout_shuffle), "seed": args.rollout_seed}
        self._order: tuple[int, Any, Sequence[int]] | None = None  # (epoch, data set, positions)
        # Taken now: if the file changes while the run goes on, a saved state must still name the data that were used.
        self._fingerprint = dataset_fingerprint(dataset)
        if isinstance(dataset, Dataset):
            self._epoch_order()

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)

    def get_samples(self, num_samples: int, rollout_id: int | None = None) -> list[Group]:
        """Exactly `num_samples` new groups, going through as many epochs as that takes."""
        return [self._make_group(self._next_prompt()) for _ in range(num_samples)]

    def add_samples(self, groups: list[Group]) -> None:
        """Raise: this source has no buffer."""
        raise UserError(
            f"--data-source-path: {type(self).__name__} cannot take samples back; "
            "use slime.rollout.data_source.RolloutDataSourceWithBuffer"
        )

    def get_metadata(self) -> dict[str, Any]:
        """The user's own values, saved with the state."""
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Add to the user's own values."""
        self.metadata.update(metadata)

    def state_dict(self) -> dict[str, Any]:
        """A snapshot in plain values that later calls do not change."""
        return {
            "format_version": _FORMAT_VERSION,
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": copy.deepcopy(self.metadata),
            "buffer": [],
            "generators": {"shuffle": dict(self._shuffle)},
            "fingerprint": copy.deepcopy(self._fingerprint),
            "read_with": _reading_flags(self.args),
            "rollout_batch_size": self.args.rollout_batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a snapshot.

        Raises:
            UserError: the snapshot belongs to other data, or is of another format.
        """
        if state.get("format_version") != _FORMAT_VERSION:
            raise UserError(
                f"the data-source state has format {state.get('format_version')!r}, expected {_FORMAT_VERSION}"
            )
        difference = describe_difference(state["fingerprint"], self._fingerprint)
        if difference:
            raise UserError(difference)
        saved_shuffle = state["generators"]["shuffle"]
        if saved_shuffle != self._shuffle:
            logger.warning(
                "the data order of the checkpoint is kept (%s): that of this start's --rollout-shuffle and "
                "--rollout-seed (%s) would skip and repeat prompts",
                saved_shuffle,
                self._shuffle,
            )
        now = _reading_flags(self.args)
        before = state.get("read_with", {})
        changed = [f"{flag} {was} → {now[flag]}" for flag, was in before.items() if was != now.get(flag, was)]
        if changed:
            logger.warning(
                "rows are read with other flags than before (%s): prompts that were drawn already, and are not trained yet, "
                "stay as they were read; --fresh-data-state starts the data from zero",
                ", ".join(changed),
            )
        size, size_before = self.args.rollout_batch_size, state.get("rollout_batch_size")
        if size_before not in (None, size) and self.args.num_epoch is not None:
            logger.warning(
                "--num-epoch %d is as many rollouts as these passes have by --rollout-batch-size %d, also of those that were "
                "done with %d: the run ends before or behind the end of a pass; --num-rollout says when",
                self.args.num_epoch, size, size_before,
            )  # fmt: skip
        # A class of a user's own may put the groups back itself.
        if state["buffer"] and type(self) is RolloutDataSource:
            logger.warning(
                "%d groups that were returned to the data are left out: --data-source-path %s takes none back",
                len(state["buffer"]), self.args.data_source_path,
            )  # fmt: skip
        self._shuffle = dict(saved_shuffle)
        self._order = None
        self.sample_offset = state["sample_offset"]
        self.epoch_id = state["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = copy.deepcopy(state["metadata"])
        if isinstance(self.dataset, Dataset):
            self._epoch_order()

    def save(self, rollout_id: int, state: dict[str, Any] | None = None) -> None:
        """Publish `state` (default: the state now) as the one after rollout `rollout_id`, below `args.save`."""
        if not self.args.save:
            raise UserError("--save is missing: there is no directory for the data-source state")
        write_state(state_directory(self.args.save, rollout_id), self.state_dict() if state is None else state)

    def load(self, rollout_id: int | None = None) -> bool:
        """Restore the state after rollout `rollout_id` from below `args.load`; nothing to do for None or a negative id.

        Returns:
            False where the data start from zero.

        Raises:
            UserError: the state is missing or belongs to other data, unless `args.fresh_data_state` is set.
        """
        directory = None if rollout_id is None or rollout_id < 0 else find_state(self.args, rollout_id)
        if directory is None:
            return False
        try:
            state = self._completed(read_state(directory), directory)
        except UserError as error:
            if left_for_a_fresh_start(self.args, error):
                return False
            raise
        difference = describe_difference(state["fingerprint"], self._fingerprint)
        if difference and self.args.fresh_data_state:
            logger.warning("%s: %s\nThe data starts from zero.", directory, difference)
            return False
        try:
            self.load_state_dict(state)
        except UserError as error:
            if left_for_a_fresh_start(self.args, error):
                return False
            raise UserError(f"{directory}: {error}") from error
        return True

    def _completed(self, state: dict[str, Any], place: Path) -> dict[str, Any]:
        """`state`, completed if another program wrote it: such a state lacks the fingerprint of the data, their order, and the
        buffer."""
        if place.suffix != PICKLED:
            return state
        counters = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")
        wrong = [name for name in counters if not isinstance(state.get(name), int) or state[name] < 0]
        if wrong:
            raise UserError(f"{place}: {', '.join(wrong)} of the data state is missing, or no number from 0 on")
        if self.dataset is not None and state["sample_offset"] > len(self.dataset):
            raise UserError(
                f"{place}: the run had drawn {state['sample_offset']} prompts of its epoch, and --prompt-data has "
                f"{len(self.dataset)}; give the same data, or --fresh-data-state to start the data from zero"
            )
        order = (
            " In another order, so prompts of this epoch may come twice, or not." if self._shuffle["enabled"] else ""
        )
        logger.warning("%s does not say which data it belongs to; these are gone on with.%s", place, order)
        known = {name: state[name] for name in counters}
        return {**self.state_dict(), **known, "metadata": state.get("metadata") or {}, "buffer": []}

    def _next_prompt(self) -> Sample:
        if self.dataset is None:
            return Sample()
        for _ in range(len(self.dataset)):
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
            order, offset = self._epoch_order(), self.sample_offset
            self.sample_offset += 1
            if isinstance(self.dataset, Dataset) and not isinstance(order, range):
                return _as_sample(self.dataset.row(int(order[offset])))
            if not isinstance(self.dataset, StreamedDataset):
                return _as_sample(self.dataset[int(order[offset])])
            sample = self.dataset.in_order(order, offset)
            # None: the row there cannot be used, so the next one is tried.
            if sample is not None:
                return sample
        raise UserError(
            f"--prompt-data {' '.join(self.dataset.paths)}: not one of {len(self.dataset)} rows can be used: they are bad, "
            f"or longer than --rollout-max-prompt-len {self.args.rollout_max_prompt_len}"
        )

    def _epoch_order(self) -> Sequence[int]:
        """The positions of the epoch's samples in the data set. A `Dataset` is put into that order too, for subclasses that
        read its `samples` themselves."""
        # A subclass may have another data set than it was made with.
        if self._order is None or self._order[0] != self.epoch_id or self._order[1] is not self.dataset:
            of_files = isinstance(self.dataset, Dataset | StreamedDataset)
            parts = self.dataset.parts if of_files else [Part(len(self.dataset), 1.0)]
            positions = epoch_order(parts, self._shuffle["seed"], self.epoch_id, self._shuffle["enabled"])
            if isinstance(self.dataset, Dataset) and not isinstance(positions, range):
                self.dataset.put_in_order(positions)
            self._order = self.epoch_id, self.dataset, positions
        return self._order[2]

    def _make_group(self, prompt: Sample) -> Group:
        # Rows of files hold nothing but containers and immutable values, which `own_copy` copies fast. A user's own data set
        # may hold anything.
        copied = own_copy if isinstance(self.dataset, Dataset | StreamedDataset) else copy.deepcopy
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copied(prompt)
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group


def pop_first(args: Any, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """The default buffer filter: take the oldest groups."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A `RolloutDataSource` that takes groups back and hands them out, through the buffer filter, before new prompts.

    The filter is `--buffer-filter-path`, else the method `buffer_filter(args, buffer, n)` of a subclass, else
    `pop_first`.
    """

    def __init__(self, dataset_or_args: Any = _OF_FLAGS, args: Any = None):
        super().__init__(dataset_or_args, args)
        self.buffer: list[Group] = []
        path = self.args.buffer_filter_path
        self._filter_flag, self._filter_name = "--buffer-filter-path", str(path)
        if path:
            self._filter = load_function(path, flag="--buffer-filter-path")
        elif callable(getattr(self, "buffer_filter", None)):
            self._filter_flag, self._filter_name = FLAG, f"{type(self).__name__}.buffer_filter"
            self._filter = lambda args, rollout_id, buffer, num: self.buffer_filter(args, buffer, num)
        else:
            self._filter = pop_first

    def get_samples(self, num_samples: int, rollout_id: int | None = None) -> list[Group]:
        """Exactly `num_samples` groups: those of the buffer first, then new ones."""
        groups = self._take_from_buffer(num_samples, rollout_id) if self.buffer and num_samples else []
        return groups + super().get_samples(num_samples - len(groups), rollout_id)

    def add_samples(self, groups: list[Group]) -> None:
        """Put groups of `n_samples_per_prompt` entries behind those in the buffer.

        Raises:
            UserError: a group of another size or kind, or one that is in the buffer; nothing is added then.
        """
        expected, known = self.args.n_samples_per_prompt, set(map(id, self.buffer))
        for group in groups:
            if not isinstance(group, list) or len(group) != expected:
                found = f"{len(group)} entries" if isinstance(group, list) else type(group).__name__
                raise UserError(f"add_samples takes lists of {expected} samples (--n-samples-per-prompt), not {found}")
            # Drawn twice, two tasks would write their answers into the same samples.
            if id(group) in known:
                raise UserError(
                    "add_samples got a group that is in the buffer already; to have it twice, add a deep copy"
                )
            known.add(id(group))
        self.buffer.extend(groups)

    def get_buffer_length(self) -> int:
        """Number of groups in the buffer."""
        return len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": groups_to_plain(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        buffer = groups_from_plain(state["buffer"])
        sizes = {len(group) for group in buffer}
        if sizes - {self.args.n_samples_per_prompt}:
            raise UserError(
                f"--n-samples-per-prompt {self.args.n_samples_per_prompt}: the saved buffer holds groups of "
                f"{', '.join(map(str, sorted(sizes)))}; resume with the value of the first start, or give "
                "--fresh-data-state to start the data from zero"
            )
        super().load_state_dict(state)
        self.buffer = buffer

    def _take_from_buffer(self, num_samples: int, rollout_id: int | None) -> list[Group]:
        with calling_user_code(self._filter_flag, self._filter_name, f"rollout {rollout_id}"):
            groups = self._filter(self.args, rollout_id, self.buffer, num_samples)
        if not isinstance(groups, list) or len(groups) > num_samples:
            found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
            raise UserError(
                f"{self._filter_flag} {self._filter_name} returned {found}; expected a list of at most {num_samples} groups"
            )
        remaining = {id(group) for group in self.buffer}
        if any(id(group) in remaining for group in groups):
            raise UserError(
                f"{self._filter_flag} {self._filter_name} returned groups that it did not remove from the buffer"
            )
        if len(set(map(id, groups))) < len(groups):
            raise UserError(f"{self._filter_flag} {self._filter_name} returned a group twice")
        return groups


def _reading_flags(args: Any) -> dict[str, Any]:
    """The flags that say what of a row becomes a prompt, in plain values."""
    names = (
        "input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys", "apply_chat_template",
        "apply_chat_template_kwargs",
    )  # fmt: skip
    return {f"--{name.replace('_', '-')}": copy.deepcopy(vars(args)[name]) for name in names}


def _as_sample(item: Any) -> Sample:
    if isinstance(item, Sample):
        return item
    if isinstance(item, str | list):
        return Sample(prompt=item)
    raise UserError(f"the data set given to the data source holds {type(item).__name__}; expected Sample or prompt")
