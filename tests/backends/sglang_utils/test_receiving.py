"""What the installed SGLang takes to receive weights: why a single tensor is sent as it is, and whole; and handles."""

import os
from types import SimpleNamespace

import pytest

from tests.support.processes.distributed import run_distributed

ROWS, COLUMNS = 1024, 64


def _receive():
    """Bytes that are live at once while a server receives an embedding, by format; and what its layer says to half of it."""
    import torch

    from slime.backends.sglang_utils import cpu_runtime
    from slime.rehearsal.recorder import Recorder

    cpu_runtime.install()
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    torch.distributed.broadcast = lambda *arguments, **options: SimpleNamespace(wait=lambda: None)
    runner = WeightUpdater.__new__(WeightUpdater)
    object.__setattr__(runner, "device", "cpu")
    object.__setattr__(runner, "_model_update_group", {"group": None})
    recorder = Recorder("cpu")
    for load_format in (None, "flattened_bucket"):
        with recorder, recorder.during(str(load_format)):
            received = runner.receive_weights_from_distributed(
                names=["embedding"],
                dtypes=["float32"],
                shapes=[[ROWS, COLUMNS]],
                group_name="group",
                load_format=load_format,
            )
            assert [tensor.shape for _, tensor in received] == [(ROWS, COLUMNS)]
            del received
    peaks = {name: sum(kinds.values()) for name, kinds in recorder.peaks({}, 0).items()}

    layer = SimpleNamespace(
        shard_indices=SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=ROWS),
        org_vocab_size=ROWS,
        use_presharded_weights=False,
        tp_size=1,
    )
    weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS))
    weight.output_dim = 0
    VocabParallelEmbedding.weight_loader(layer, weight, torch.ones(ROWS, COLUMNS))
    assert weight.eq(1).all()
    with pytest.raises(AssertionError) as refused:
        VocabParallelEmbedding.weight_loader(layer, weight, torch.ones(ROWS // 2, COLUMNS))
    return peaks, str(refused.value)


@pytest.mark.slow
def test_an_embedding_is_received_whole_and_held_once_if_it_comes_as_it_is():
    ((peaks, refused),) = run_distributed(_receive, 1, start_method="spawn", timeout=300)
    assert peaks == {"None": 4 * ROWS * COLUMNS, "flattened_bucket": 2 * 4 * ROWS * COLUMNS}
    assert f"org_vocab_size={ROWS}" in refused


def _take(expected):
    """Rank 0 shares a bucket, and then sends it as it is; on rank 1 SGLang opens the handle as its schedulers do, loads what it
    finds into a model, and receives the tensors. What it found in both cases: name → dtype, shape and value."""
    import torch
    import torch.distributed as dist

    from slime.backends.sglang_utils import cpu_runtime
    from slime.weights.buckets import BucketFlattener
    from slime.weights.transports import process_group
    from slime.weights.transports.shared_handles import SharedMemory, handle_of

    rank = int(os.environ["RANK"])
    if rank == 1:
        cpu_runtime.install()
    dist.init_process_group("gloo")
    handle, loaded, received = [None], {}, {}
    if rank == 0:
        tensors = {
            name: torch.full(shape, value, dtype=getattr(torch, dtype)) for name, dtype, shape, value in expected
        }
        flattener = BucketFlattener(memory=SharedMemory())
        handle = [handle_of(flattener.flatten(list(tensors.items())))]
    dist.broadcast_object_list(handle, 0)
    if rank == 1:
        from sglang.srt.managers.tp_worker import BaseTpWorker
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payload

        def note(named_tensors, found):
            for name, tensor in named_tensors:
                (value,) = set(tensor.flatten().tolist())
                found[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), value)

        class Model(torch.nn.Module):
            def load_weights(self, named_tensors):
                note(named_tensors, loaded)

        model = Model()
        updater = weight_updater.WeightUpdater.__new__(weight_updater.WeightUpdater)
        object.__setattr__(updater, "get_model", lambda: model)
        weight_updater.WeightUpdater._assert_weight_cache_inactive = lambda self, op: None
        worker = SimpleNamespace(model_runner=SimpleNamespace(tp_rank=1))
        payloads = [b"of another rank", normalize_serialized_named_tensor_payload(handle[0])]
        found = BaseTpWorker.deserialize_own_rank(worker, payloads)
        assert updater.update_weights_from_tensor(found, "flattened_bucket") == (True, "Success")
        del found
    dist.barrier()
    if rank == 0:
        flattener.release()
        process_group._broadcast(list(tensors.values()), dist.group.WORLD)
    else:
        object.__setattr__(updater, "device", "cpu")
        object.__setattr__(updater, "_model_update_group", {"group": dist.group.WORLD})
        names, dtypes, shapes, _ = zip(*expected, strict=True)
        note(
            updater.receive_weights_from_distributed(names=names, dtypes=dtypes, shapes=shapes, group_name="group"),
            received,
        )
    dist.barrier()
    dist.destroy_process_group()
    return loaded, received


@pytest.mark.slow
def test_tensors_arrive_by_handles_and_as_they_are():
    expected = [("a", "float32", (3, 4), 1.5), ("b", "bfloat16", (5,), 2.0), ("c", "int8", (7,), 3)]
    _, (loaded, received) = run_distributed(_take, 2, (expected,), start_method="spawn", timeout=300)
    assert loaded == received == {name: (dtype, shape, value) for name, dtype, shape, value in expected}
