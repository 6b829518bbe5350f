"""Bytes of the float32 rows in which log-probs are computed at a time: the trainer takes them, the memory plan counts them.

On a CPU each thread works on a chunk of its own, fastest when that stays in its cache. On an accelerator a chunk is a few
kernel launches.
"""

ONE_THREAD_CHUNK_BYTES = 1 * 2**20
ACCELERATOR_CHUNK_BYTES = 128 * 2**20
