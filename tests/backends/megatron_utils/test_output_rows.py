"""The output layer on some rows: their logits and all gradients are those of a layer that sees every row."""

import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args

ROWS = 8
CHOSEN = [range(1, 3), range(5, 8)]
LAYOUTS = {"whole streams": False, "parts of streams": True}
# What becomes of the gradient of the weight: it is a tensor, there is none, or a kernel adds it into a buffer.
WEIGHTS = ("trained", "frozen", "fused")


class Adding:
    """Apex's kernel, in the words of PyTorch."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows, gradient, buffer):
        buffer += gradient.T @ rows


def worker(hf_dir):
    return {name: layer_on_rows(hf_dir, split) for name, split in LAYOUTS.items()}


def layer_on_rows(hf_dir, split):
    from tests.support.processes import megatron_worker

    megatron_worker.start(layout_args(hf_dir, tensor_model_parallel_size=2, sequence_parallel=split))
    import torch
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, layers

    from slime.backends.megatron_utils.output_rows import logits_of
    from slime.training.packed_stream import Rows

    rank, hidden, columns = parallel_state.get_tensor_model_parallel_rank(), 6, 10
    config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=split)
    layer = ColumnParallelLinear(hidden, columns, config=config, init_method=torch.nn.init.zeros_, bias=False)
    draw = torch.Generator().manual_seed(3)
    weight, stream, factor = (
        torch.randn(*size, generator=draw) for size in ((columns, hidden), (ROWS, 1, hidden), (ROWS, columns))
    )
    place = slice(rank * columns // 2, (rank + 1) * columns // 2)
    with torch.no_grad():
        layer.weight.copy_(weight[place])
    rows = Rows.at(CHOSEN, torch.device("cpu"))

    layers.fused_weight_gradient_mlp_cuda = Adding

    def on(chosen, kind):
        parameter = layer.weight
        parameter.grad, parameter.main_grad = None, torch.zeros_like(parameter, requires_grad=False)
        layer.gradient_accumulation_fusion, parameter.grad_added_to_main_grad = kind == "fused", False
        own = (stream.chunk(2)[rank] if split else stream).clone().requires_grad_()
        with logits_of(chosen, layer):
            logits, _ = layer(own, weight=parameter.detach() if kind == "frozen" else None)
        # What is there only once it is asked for is another tensor each time.
        saved, again = logits.grad_fn.saved_tensors, logits.grad_fn.saved_tensors
        kept = [one.data_ptr() == same.data_ptr() for one, same in zip(saved, again, strict=True)]
        used = logits if chosen is not None else logits.index_select(0, rows.index)
        # As in a loss, nothing else has a gradient.
        (used[:, 0] * factor[rows.index, place]).sum().backward()
        # Megatron's buffers wait for a gradient, whatever is in it, and are told whether theirs has it already.
        is_told = parameter.grad is not None and parameter.grad_added_to_main_grad == (kind == "fused")
        of_weight = parameter.main_grad if kind == "fused" else parameter.grad
        return used.tolist(), own.grad.tolist(), is_told and of_weight.tolist(), (len(logits), kept)

    of_ranks = {kind: (on(rows, kind), on(None, kind)) for kind in WEIGHTS}
    return of_ranks, layer.sequence_parallel is split, (stream[:, 0] @ weight.T)[rows.index, place].tolist()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    return run_distributed(worker, 2, (directory,), timeout=180)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_logits_and_gradients_are_those_of_a_layer_that_sees_every_row(seen, layout, kind):
    for results, is_as_before, expected in (of_rank[layout] for of_rank in seen):
        (logits, gradient, of_weight, made), (all_logits, all_gradient, of_all, all_made) = results[kind]
        # Rows of which a rank has parts are not kept whole.
        assert made == (5, [True] if kind == "frozen" else [not LAYOUTS[layout], True])
        assert all_made[0] == ROWS and is_as_before
        assert [row for (row,) in logits] == [pytest.approx(row, abs=1e-5) for row in expected]
        assert (of_weight is False) == (kind == "frozen")
        for found, wanted in ((logits, all_logits), (gradient, all_gradient), (of_weight or [], of_all or [])):
            assert flat(found) == pytest.approx(flat(wanted), abs=1e-6)
        assert any(flat(gradient))


def flat(nested):
    return [number for part in nested for number in flat(part)] if isinstance(nested, list) else [nested]
