"""The library that lets a CPU build of torch compute with tensors on a fake CUDA device. It is built once, and loaded before
torch.

It lies in the user's cache directory, under a name that changes with torch's version and place, with the interpreter and with
the source. Without a compiler there is no library, and the rehearsal uses fake CPU tensors in place of fake CUDA tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from slime.utils import env

logger = logging.getLogger(__name__)

_BUILD_SECONDS = 300.0
_SOURCE = Path(__file__).with_name("stand_in.cpp")


@dataclass(frozen=True)
class StandIn:
    """The library's place, `library`; None: there is none, and `why_none` says why."""

    library: Path | None
    why_none: str | None = None


def find_or_build() -> StandIn:
    """The library for the torch that is installed; the first call on a machine builds it and says so."""
    version = metadata.version("torch")
    if not version.endswith("+cpu"):
        return StandIn(None, f"the library that stands for CUDA is for a CPU build of torch, and this one is {version}")
    cache = env.cache_home()
    if cache is None:
        return StandIn(None, "the user has no home directory to build a small library in; set XDG_CACHE_HOME")
    # The place of torch's libraries is built in, so a library of another environment would not find those of this one.
    place = metadata.distribution("torch").locate_file("torch")
    key = hashlib.blake2b(f"{version} {place} {sys.version} {_SOURCE.read_text()}".encode(), digest_size=6).hexdigest()
    library = cache / "slime" / f"cuda_stand_in_{key}.so"
    return StandIn(library) if library.is_file() else _build(library)


def load(library: Path) -> None:
    """Load the library into this process, which has not imported torch yet.

    Raises:
        RuntimeError: torch is imported already, or the library does not load.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in for CUDA must be loaded before torch is imported")
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(
            f"{library} does not load ({error}); delete it, and the next rehearsal builds it anew"
        ) from error


def _build(library: Path) -> StandIn:
    import torch
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return StandIn(
            None, f"a small library has to be built, and this machine has no {compiler}; CXX names another compiler"
        )
    logger.info("building a stand-in for CUDA, once, into %s", library)
    library.parent.mkdir(parents=True, exist_ok=True)
    # Two rehearsals may build at once, so each moves a whole file into place.
    draft = library.with_suffix(f".{os.getpid()}")
    libraries = cpp_extension.library_paths()
    # `cpp_extension.load` is not used, because it would load the library into this process, too.
    command = [
        compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{directory}" for directory in cpp_extension.include_paths()), str(_SOURCE), "-o", str(draft),
        *(f"-L{directory}" for directory in libraries), "-ltorch_cpu", "-lc10",
        *(f"-Wl,-rpath,{directory}" for directory in libraries),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        return StandIn(None, f"building a small library took {compiler} more than {_BUILD_SECONDS:.0f} s")
    except subprocess.CalledProcessError as error:
        lines = (
            [line for line in error.stderr.splitlines() if "error" in line]
            or error.stderr.splitlines()
            or ["no reason"]
        )
        return StandIn(None, f"{compiler} could not build a small library: {lines[0]}")
    draft.replace(library)
    return StandIn(library)
