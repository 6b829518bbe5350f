"""Opens buckets of weights from handles of host memory, as a rank of an engine does."""

import base64
import pickle

import torch


def open_bucket(handle: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns (id of the process that owns the memory, copies of the tensors in the bucket by name)."""
    found = pickle.loads(base64.b64decode(handle))
    flat = found["flattened_tensor"]
    _, name, _ = flat.untyped_storage()._share_filename_cpu_()
    return int(name.decode().split("_")[1]), {
        entry.name: flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape).clone()
        for entry in found["metadata"]
    }
