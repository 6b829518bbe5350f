"""A real engine whose ranks host experts of their own takes from a bucket that differs by rank what each rank hosts.

Its server starts without weights, and loads files all the same.
"""

import pytest
from safetensors.torch import load_file

from slime.weights.buckets import BucketFlattener
from slime.weights.transports.shared_handles import SharedMemory, handle_of
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.processes.served_engines import MIXTURE, make_args, serving_of

RANKS = 2


@pytest.mark.slow
def test_each_rank_of_an_engine_takes_a_bucket_of_its_own(tmp_path):
    new = make_tiny_checkpoint(tmp_path / "new", seed=1, **MIXTURE)
    args = make_args(
        make_tiny_checkpoint(tmp_path / "old", seed=0, **MIXTURE),
        rollout_num_gpus_per_engine=RANKS,
        sglang_ep_size=RANKS,
        sglang_load_format="dummy",
    )
    with serving_of(args, tmp_path / "logs") as serving:
        serving.call_all("update_weights_from_disk", str(new))
        from_disk = serving.checksums()
        serving.call_all("reset_weights")
        assert serving.checksums() != from_disk
        tensors = load_file(new / "model.safetensors")
        serving.call_all("begin_weight_update")
        of_rank, nothing = (BucketFlattener(memory=SharedMemory()) for _ in range(2))
        for place in range(RANKS):
            hosted = [(name, t) for name, t in tensors.items() if expert_of(name) is None or rank_of(name) == place]
            bucket = of_rank.flatten(hosted)
            # The other rank has nothing to take.
            handles = [handle_of(bucket if rank == place else nothing.flatten([])) for rank in range(RANKS)]
            serving.call_all("update_weights_from_tensor", handles, "flattened_bucket", 60.0)
        serving.call_all("end_weight_update")
        assert serving.checksums() == from_disk
        of_rank.release()
        nothing.release()


def expert_of(name):
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


def rank_of(name):
    return expert_of(name) * RANKS // MIXTURE["num_experts"]
