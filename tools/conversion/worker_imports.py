"""Modules that the workers of a conversion are born with. Only the process from which they are forked imports this module."""

import gc

from slime.utils.misc import no_garbage_collection

with no_garbage_collection():
    import safetensors.torch  # noqa: F401

# A garbage collection in a worker would write to these objects, and so copy every page that it shares.
gc.freeze()
