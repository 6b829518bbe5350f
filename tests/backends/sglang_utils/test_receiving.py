"""What the installed SGLang takes to receive weights: why a single tensor is sent as it is, and whole."""

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
