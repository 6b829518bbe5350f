"""What the server of `run_distributed` imports once, for all processes that it forks: torch, and Megatron as a rank sees it."""

import gc
import warnings

from slime.backends.megatron_utils import cpu_runtime

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    cpu_runtime.install()
    from slime.backends.megatron_utils import actor, critic  # noqa: F401

# A collection would write to every page that the children share.
gc.freeze()
