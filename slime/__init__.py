"""Reinforcement-learning post-training for language models on Megatron-Core, SGLang and Ray."""

import contextlib
import os
import sys

__version__ = "0.1.0"


@contextlib.contextmanager
def installed_packages():
    """Imports of an entry point: where Python or a package is missing, one line says what to do, and the process ends with 2.

    This module imports nothing that has to be installed, so that the line can be said by any Python.
    """
    try:
        if sys.version_info < (3, 11):  # noqa: UP036 - older ones come as far as this line
            raise ModuleNotFoundError("Python 3.11 or later is needed", name="python")
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "slime").partition(".")[0]
        if missing == "slime":
            raise
        repository = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        python = os.path.join(repository, ".venv", "bin", "python")
        program = os.path.basename(sys.argv[0])
        way = "bash scripts/install.sh makes the environment .venv"
        if os.path.exists(python):
            way = f"the environment is there, start it with {python}"
        what = str(error) if missing == "python" else f"the package {missing!r} is not installed"
        sys.stderr.write(f"{program}: {what} ({sys.executable}); {way}\n")
        raise SystemExit(2) from None
