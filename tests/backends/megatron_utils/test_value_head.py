"""The value head by itself; in a model it is tested with the critic."""

from types import SimpleNamespace

from tests.support.processes.distributed import run_distributed


def _worker():
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    import torch

    from slime.backends.megatron_utils.value_head import ValueHead, is_value_head, put_value_head

    def config(dtype):
        return SimpleNamespace(hidden_size=6, params_dtype=dtype, sequence_parallel=False)

    head = ValueHead(config(torch.bfloat16))
    new = (str(head.weight.dtype), bool(head.weight.any()), is_value_head(head.weight))
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0, 2.0, 0.0, 0.0, 0.0, 0.5]]))
    hidden = torch.tensor([[[256.0, 1.0, 7.0, 7.0, 7.0, 1.0]], [[0.0, 0.0, 9.0, 9.0, 9.0, 0.0]]], dtype=torch.bfloat16)
    values, bias = head(hidden, weight=None, runtime_gather_output=None)

    first = SimpleNamespace(post_process=False)
    last = SimpleNamespace(post_process=True, share_embeddings_and_output_weights=False, config=config(torch.float32))
    put_value_head(first)
    put_value_head(last)
    places = (hasattr(first, "output_layer"), isinstance(last.output_layer, ValueHead))
    last.share_embeddings_and_output_weights = True
    try:
        put_value_head(last)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    return new, (str(values.dtype), tuple(values.shape), values.flatten().tolist(), bias), places, refusal


def test_a_head_is_zero_gives_float32_and_stands_on_the_last_stage_of_an_untied_model():
    new, values, places, refusal = run_distributed(_worker, 1)[0]
    assert new == ("torch.bfloat16", False, True)
    # 258.5 is no bfloat16.
    assert values == ("torch.float32", (2, 1, 1), [258.5, 0.0], None)
    assert places == (False, True)
    assert "weights of their own" in refusal
