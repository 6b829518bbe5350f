"""A data source's state in plain values, and the directory that holds it.

The directory has `state.json`, and `arrays.safetensors` if there are arrays. There is no pickle in it, so nothing but plain
values and numpy arrays can be read back. What JSON does not have (`slime.utils.plain_files`) and arrays are written as objects
whose keys start with `__`; arrays take the narrowest type that holds their values exactly. The directory appears whole or not
at all. Rollouts behind the state may have drawn groups ahead: these lie in a directory of their own in it, in the same form.

Also here: which methods a data source must have, be it ours or a user's, and errors of these that name flag and class.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.dataset import Dataset, StreamedDataset
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import free_room, publishing_directory
from slime.utils.plain_files import decode_plain, encode_plain, is_plain_array, type_name
from slime.utils.plugin_loader import calling_user_code, is_coroutine_function, nobody_awaits
from slime.utils.processing_utils import encode_image_for_rollout_engine, is_image
from slime.utils.sample_fields import exactly_as, hold_arrays
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# A source need not be thread-safe: if several rollouts are under way, one at a time calls it.
source_turn = threading.RLock()

# The ending of states that other programs wrote, with a pickle in them.
PICKLED = ".pt"
_JSON_FILE = "state.json"
_ARRAY_FILE = "arrays.safetensors"
_DRAWN_AHEAD = "drawn_ahead"
# Token ids take four bytes, masks one, and log-probs four where the engine computes them in float32.
_NARROW_TYPES = {"i": (np.int8, np.int32), "f": (np.float32,)}

FLAG = "--data-source-path"
# All methods of a source that we, or our own sources, call.
_METHODS = ("get_samples", "add_samples", "state_dict", "load_state_dict", "save", "load", "buffer_filter")
_DEFAULT_LOOP = "slime.rollout.sglang_rollout.generate_rollout"


def state_directory(root: str | Path, rollout_id: int) -> Path:
    """Where the state after rollout `rollout_id` lies below a checkpoint directory."""
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}"


def find_state(args: Any, rollout_id: int) -> Path | None:
    """The directory of the state after rollout `rollout_id` below `args.load`, or a file of that name that ends in `.pt`; None:
    start from zero, as asked for.

    Raises:
        UserError: there is none, and `args.fresh_data_state` is not set.
    """
    directory = state_directory(args.load, rollout_id) if args.load else None
    if directory is not None and directory.is_dir():
        return directory
    if directory is not None and (file := directory.with_name(directory.name + PICKLED)).is_file():
        return file
    if args.fresh_data_state:
        logger.warning("no data-source state of rollout %d: the data starts from zero", rollout_id)
        return None
    raise UserError(
        f"--load {args.load}: there is no data-source state of rollout {rollout_id} ({directory}); "
        "resuming without it would repeat prompts. Give --fresh-data-state to start the data from zero"
    )


def left_for_a_fresh_start(args: Any, error: UserError) -> bool:
    """Whether `error`, about a state that cannot be read, is only a warning: with `--fresh-data-state` the data may start from
    zero."""
    if args.fresh_data_state:
        logger.warning("--fresh-data-state: the data starts from zero: %s", error)
    return args.fresh_data_state


def write_state(directory: str | Path, state: dict[str, Any]) -> None:
    """Publish `state` as `directory`, replacing one of that name.

    Raises:
        UserError: `state` holds something that is neither a plain value nor a numpy array; the message says where.
        RunError: it cannot be written (the disk is full); one of that name is as it was.
    """
    from safetensors import SafetensorError

    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(encode_plain(state, "state", functools.partial(_encode, arrays)))
    try:
        with publishing_directory(directory) as temporary:
            (temporary / _JSON_FILE).write_text(text)
            if arrays:
                from safetensors.numpy import save_file

                save_file(arrays, str(temporary / _ARRAY_FILE))
    except (OSError, SafetensorError) as error:
        there = free_room(Path(directory).parent)
        raise RunError(
            f"the data state {directory} could not be written: {error}. {there}. Older ones are untouched"
        ) from error


def read_state(directory: str | Path) -> dict[str, Any]:
    """What `write_state` wrote; or a dict that `torch.save` wrote to a file that ends in `.pt`, of plain values and tensors.

    Raises:
        UserError: the directory is incomplete or its content is broken; or the file holds something else.
    """
    from safetensors import SafetensorError

    directory = Path(directory)
    if directory.suffix == PICKLED:
        return _read_pickled(directory)
    try:
        value = json.loads((directory / _JSON_FILE).read_text())
        arrays: dict[str, np.ndarray] = {}
        if (directory / _ARRAY_FILE).exists():
            from safetensors.numpy import load_file

            arrays = load_file(str(directory / _ARRAY_FILE))
        state = decode_plain(value, functools.partial(_decode, arrays))
        if not isinstance(state, dict):
            raise ValueError(f"{_JSON_FILE} holds {type(state).__name__} in place of an object")
        return state
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise UserError(
            f"{directory}: no readable data-source state ({type(error).__name__}: {error}); copy the checkpoint again, or give "
            "--fresh-data-state to start the data from zero"
        ) from error


def _read_pickled(file: Path) -> dict[str, Any]:
    import torch

    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of the archive, of the pickle in it, or of what that asks for
        raise UserError(
            f"{file}: cannot be read ({type(error).__name__}): it is broken, or names code that would have to be run; give "
            "--fresh-data-state to start the data from zero"
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds {type(state).__name__}; expected the dict of a data source's state")
    return state


@dataclass(frozen=True)
class DrawnAhead:
    """What rollouts behind a state have drawn.

    Attributes:
        entries: groups and prompts that are still with them, in plain values.
        positions: by rollout, the position behind the last number that a group made of a plain prompt has got in it.
        group_size: samples of each group that is made of a prompt; None: not known.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    group_size: int | None = None


def write_drawn_ahead(directory: str | Path, ahead: DrawnAhead) -> None:
    """Put what rollouts behind a state have drawn into its directory, in the place of what lies there of an earlier save.

    Raises:
        UserError: an entry is not plain.
    """
    place = Path(directory) / _DRAWN_AHEAD
    if ahead.entries or ahead.positions:
        write_state(place, {one.name: getattr(ahead, one.name) for one in fields(ahead)})
    elif place.exists():
        shutil.rmtree(place)


def read_drawn_ahead(args: Any, directory: str | Path) -> DrawnAhead:
    """What `write_drawn_ahead` wrote, which may be nothing; nothing also if it cannot be read and `args.fresh_data_state` is
    set. Else raises as `read_state`."""
    place = Path(directory) / _DRAWN_AHEAD
    try:
        return DrawnAhead(**read_state(place)) if place.is_dir() else DrawnAhead()
    except UserError as error:
        if not args.fresh_data_state:
            raise
        logger.warning("--fresh-data-state: what rollouts behind this state had drawn is left out: %s", error)
        return DrawnAhead()


def groups_to_plain(entry: Any) -> Any:
    """Nested lists of samples as nested lists of dicts that share no container with the samples, only read-only arrays.

    The samples hold their per-token fields as arrays afterwards. What a processor made of images is left out: it is large, and
    made again when a sample is gone on with.
    """
    if isinstance(entry, list):
        return [groups_to_plain(inner) for inner in entry]
    hold_arrays(entry)
    return {**entry.to_dict(token_arrays=True), "multimodal_train_inputs": None}


def groups_from_plain(entry: Any) -> Any:
    """The inverse of `groups_to_plain`."""
    return [groups_from_plain(inner) for inner in entry] if isinstance(entry, list) else Sample.from_dict(entry)


def dataset_fingerprint(dataset: Any) -> dict[str, Any]:
    """What the prompts are read from: `num_samples`, and `files` (path, slice, size, sha256) of a `Dataset`."""
    files = dataset.fingerprint() if isinstance(dataset, Dataset | StreamedDataset) else []
    return {"num_samples": 0 if dataset is None else len(dataset), "files": files}


def describe_difference(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """A message with both fingerprints, or None if they are the same content. Where the files lie does not matter."""

    def content(fingerprint: dict[str, Any]) -> tuple:
        files = [(file["slice"], file["size"], file["sha256"], file.get("weight")) for file in fingerprint["files"]]
        return fingerprint["num_samples"], files

    if content(saved) == content(current):
        return None
    return (
        f"--prompt-data is not what the checkpoint was trained on.\n  checkpoint: {saved}\n  now:        {current}\n"
        "Resume with the same files and prompt filter, or give --fresh-data-state to start the data from zero"
    )


def _encode(arrays: dict[str, np.ndarray], value: Any, where: str) -> Any:
    """What is not plain in a state: arrays, which `arrays` gets, and images."""
    if is_plain_array(value):
        name = f"array_{len(arrays)}"
        # `ascontiguousarray` would give an array without dimensions one.
        arrays[name] = np.asarray(_narrowed(value), order="C")
        return {"__array__": name, "__dtype__": value.dtype.name}
    if is_image(value):
        return encode_image_for_rollout_engine(value)
    raise UserError(f"the data source cannot be saved: {where} is a {type_name(value)}; keep plain values there")


def _narrowed(array: np.ndarray) -> np.ndarray:
    for dtype in _NARROW_TYPES.get(array.dtype.kind, ()):
        if np.dtype(dtype).itemsize < array.dtype.itemsize and (narrow := exactly_as(array, dtype)) is not None:
            return narrow
    return array


def _decode(arrays: dict[str, np.ndarray], entry: dict[str, Any]) -> np.ndarray:
    array = arrays[entry["__array__"]]
    return array.astype(entry.get("__dtype__", array.dtype), copy=False)


def calling_source(args: Any, source: Any, method: str, subject: str) -> contextlib.AbstractContextManager[None]:
    """`calling_user_code` for a method that a user wrote; nothing for our own, whose errors speak for themselves.

    `source`: the source, or its class or factory for the constructor.
    """
    function = getattr(source if isinstance(source, type) else type(source), method, None)
    if (getattr(function, "__module__", None) or "").startswith("slime."):
        return contextlib.nullcontext()
    return calling_user_code(FLAG, args.data_source_path, f"{method}, {subject}")


@contextlib.contextmanager
def turn_for_state(args: Any) -> Iterator[None]:
    """Nobody else calls the source in the block, which takes its state.

    Raises:
        UserError: a call that another rollout made did not return within `--http-request-timeout`.
    """
    if not source_turn.acquire(timeout=min(args.http_request_timeout, threading.TIMEOUT_MAX)):
        raise source_is_late(args, "get_samples or add_samples, which another rollout has called,")
    try:
        yield
    finally:
        source_turn.release()


def source_is_late(args: Any, call: str) -> UserError:
    """The error for a `call` of the source that has taken too long."""
    limit = f"--http-request-timeout {args.http_request_timeout:g} s"
    return UserError(f"{FLAG} {args.data_source_path}: {call} did not return within {limit}")


def has_method(source: Any, name: str) -> bool:
    """Whether `source` offers the method `name`."""
    return callable(getattr(source, name, None))


def check_methods(args: Any, source: Any) -> None:
    """Raise UserError, naming flag, class and methods, if `source` lacks a method that this run calls, or has an `async` one
    that nobody would await."""
    for name in _METHODS:
        if is_coroutine_function(getattr(source, name, None)):
            raise UserError(nobody_awaits(f"{FLAG} {args.data_source_path}: {type(source).__name__}.{name}"))
    missing = [] if has_method(source, "get_samples") else ["get_samples(num_samples)"]
    if _groups_come_back(args) and not has_method(source, "add_samples"):
        missing.append("add_samples(groups), which the default rollout function gives unused prompts back by")
    pairs = (("state_dict", "load_state_dict"), ("save", "load"))
    if args.save and not any(all(has_method(source, name) for name in pair) for pair in pairs):
        missing.append("state_dict() and load_state_dict(state), or save(rollout_id) and load(rollout_id), for --save")
    if missing:
        raise UserError(f"{FLAG} {args.data_source_path}: {type(source).__name__} has no {'; no '.join(missing)}")


def prompts_per_epoch(args: Any, source: Any) -> int | None:
    """The length of `source`, or None when it has none and the run does not count in epochs.

    Raises:
        UserError: the run counts in epochs and the source has no length, or its `__len__` raised.
    """
    if not hasattr(source, "__len__"):
        if args.num_rollout is None:
            raise UserError(
                f"{FLAG} {args.data_source_path}: {type(source).__name__} has no __len__; give --num-rollout in place "
                "of --num-epoch"
            )
        return None
    with calling_source(args, source, "__len__", "start of the run"):
        return len(source)


def _groups_come_back(args: Any) -> bool:
    if args.rollout_function_path != _DEFAULT_LOOP:
        return False
    # A group that the filter drops is replaced by one other, so only the first draw can bring more than the step needs.
    return args.over_sampling_batch_size > args.rollout_batch_size
