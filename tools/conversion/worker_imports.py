"""What the workers of a conversion are born with. The process that they are forked of imports it, and nobody else."""

import gc

from slime.utils.misc import no_garbage_collection

with no_garbage_collection():
    import safetensors.torch  # noqa: F401

# Looking through all of it again, a worker would copy every page that it shares.
gc.freeze()
