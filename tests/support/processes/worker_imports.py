"""The imports that the server of `forked_workers.py` does once for all data workers that it forks. It loads a tokenizer, which
imports more. It has no torch, as in a worker."""

import gc
import os
import sys
import tempfile

from slime.utils import data_workers

os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.modules["torch"] = None
gc.disable()
try:
    from tests.support.models.tokenizer import save_tokenizer
    from tests.support.processes import forked_workers  # noqa: F401

    with tempfile.TemporaryDirectory() as directory:
        data_workers.load_tokenizer(save_tokenizer(directory))
except ImportError as error:
    # The server ignores an ImportError silently, and every worker would then import everything by itself.
    raise RuntimeError(f"the processes of data workers cannot be prepared: {error}") from error
gc.freeze()
gc.enable()
