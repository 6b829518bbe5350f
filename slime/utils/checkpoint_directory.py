"""The layout of a directory of checkpoints, which is Megatron's: a directory for each iteration, and a pointer file, which is
written last.

The metadata in an iteration's directory, also written last, name the backend that wrote it. Metadata of torch in the same
directory name its tensors, and the places of these in its files.
"""

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.errors import UserError

POINTER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
# What Megatron writes into the pointer file, and calls the directory, where weights were converted and not trained.
_RELEASE = "release"
TORCH_METADATA = ".metadata"
# The file with the version of its weights' push, or of the last push before it.
WEIGHT_VERSION = "weight_version.json"
# The file with the number of rollouts that were trained before the latest evaluation that ended.
EVALUATED = "latest_evaluation.txt"
# The name of the FSDP backend in the metadata; checkpoints of Megatron have torch_dist. What its optimizer remembers lies in a
# directory of its own.
FSDP2, FSDP_OPTIMIZER = "fsdp2", "optimizer"


def why_no_directory(path: str | os.PathLike[str]) -> str:
    """What there is at `path` in the place of the directory of a checkpoint."""
    return "it is a file, and a checkpoint is a directory" if Path(path).is_file() else "no such directory"


def is_megatron_checkpoint(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / POINTER).is_file()


def latest_iteration(path: str | os.PathLike[str]) -> int:
    """The iteration that the pointer file of a Megatron checkpoint names.

    Raises:
        UserError: the pointer holds no number; the message names what to write there.
    """
    # Power that was lost may leave anything in a file.
    text = (Path(path) / POINTER).read_text(errors="replace").strip()
    if text == _RELEASE and (Path(path) / _RELEASE).is_dir():
        raise UserError(
            f"{Path(path) / POINTER} holds {text!r}, Megatron's name for weights without a training: rename "
            f"{Path(path) / _RELEASE} to iter_0000000 and write 0 into the file; --load then needs --finetune"
        )
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{Path(path) / POINTER} holds {text[:40]!r}, not an iteration number; {newest_whole(path)}")
    return int(text)


def evaluated_rollouts(path: str | os.PathLike[str]) -> int | None:
    """How many rollouts were trained before the latest evaluation of the run that saves below `path`; None where nothing tells
    so."""
    try:
        return int((Path(path) / EVALUATED).read_text())
    except (OSError, ValueError):
        return None


def newest_whole(path: str | os.PathLike[str]) -> str:
    """The way out where the pointer file of a directory is missing or damaged, as the end of a sentence."""
    found = [one for one in Path(path).glob("iter_*") if re.fullmatch(r"iter_\d+", one.name)]
    whole = sorted(int(one.name.removeprefix("iter_")) for one in found if (one / METADATA).is_file())
    if not whole:
        return "none is complete" if found else "there are no iter_* directories beside it"
    newest = iteration_directory(path, whole[-1])
    return f"the newest complete one is {newest.name}: write {whole[-1]} into {Path(path) / POINTER}"


def iteration_directory(path: str | os.PathLike[str], iteration: int) -> Path:
    return Path(path) / f"iter_{iteration:07d}"


def is_iteration_in(directory: str | os.PathLike[str] | None, path: str | os.PathLike[str] | None) -> bool:
    """Whether `path` is an iteration's directory in that directory of checkpoints. Links are followed."""
    if directory is None or path is None:
        return False
    one = Path(path).resolve()
    return one.name.startswith("iter_") and one.parent == Path(directory).resolve()


def sharded_backend(directory: Path) -> str | None:
    """The backend that has written an iteration's checkpoint, by its metadata; None if it is incomplete or damaged."""
    try:
        return json.loads((directory / METADATA).read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        return None


def require_backend(backend: str, kind: str, path: str | os.PathLike[str] | None, step: int | None) -> None:
    """Refuse a checkpoint that the trainer of `--train-backend` cannot load.

    Args:
        kind, path, step: those of a source of weights.

    Raises:
        UserError: another backend has written it, or its pointer is damaged; the message names the way out.
    """
    if kind != "megatron":
        return
    directory = iteration_directory(path, latest_iteration(path) if step is None else step)
    is_of_fsdp = sharded_backend(directory) == FSDP2
    if is_of_fsdp and backend != "fsdp":
        raise UserError(
            f"{directory} was saved with --train-backend fsdp, and goes on with that alone; to start from its weights, give it "
            "itself: it is a Hugging Face directory too"
        )
    if backend == "fsdp" and not is_of_fsdp:
        raise UserError(
            f"{directory} was not saved with --train-backend fsdp, which starts from a Hugging Face directory and goes on from "
            "its own checkpoints; tools/convert_torch_dist_to_hf.py makes such a directory of Megatron's"
        )


@dataclass(frozen=True)
class TorchMetadata:
    """What the metadata of torch say about a directory of `torch.distributed.checkpoint`, such as a torch_dist checkpoint.

    Attributes:
        tensors: torch's description of each tensor, by its name: `size`, `chunks`, `properties`. Sizes are tuples.
        places: where torch has put each piece (`relative_path`, and `offset` and `length` in bytes), by the name of its tensor
            or object and the piece's offset in it.
    """

    directory: Path
    tensors: Mapping[str, Any]
    places: Mapping[tuple[str, tuple[int, ...]], Any]

    def damage(self, is_needed: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
        """A message for every file that is missing, or too short for what `is_needed`, by its name, lies in it."""
        ends: dict[str, int] = {}
        for (name, _), place in self.places.items():
            if is_needed(name):
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for file, end in sorted(ends.items()):
            path = self.directory / file
            if not path.is_file():
                yield f"{path} is missing"
            elif path.stat().st_size < end:
                yield f"{path} is cut off: it has {path.stat().st_size} bytes, and should have {end}"


def read_torch_metadata(directory: Path) -> TorchMetadata:
    """Read the metadata of torch in `directory`, without torch. None of the files with tensors is opened.

    Raises:
        UserError: there are none, or they are damaged.
    """
    path = directory / TORCH_METADATA
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        tensors = {key: entry for key, entry in entries.items() if type(entry).__name__ == "TensorStorageMetadata"}
        by_name = {(index.fqn, tuple(vars(index).get("offset") or ())): place for index, place in places.items()}
    except FileNotFoundError as error:
        raise UserError(f"{directory} is no torch_dist checkpoint: it has no {TORCH_METADATA}") from error
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {str(error) or 'it is cut off'}") from error
    return TorchMetadata(directory, tensors, by_name)


class _Record:
    """Stands for an object of the metadata. Its saved state is its attributes or, if that was not a dict, in `saved`."""

    saved: Any = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.saved = state


class _Unpickler(pickle.Unpickler):
    """Reads metadata without importing the modules of its classes, which would take seconds, and a pickle could name any
    module. Every class that it names becomes a record, and every dtype the class of a record of its name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) in (("collections", "OrderedDict"), ("collections", "defaultdict")):
            return lambda *arguments: {}
        return type(name, (_Record,), {})
