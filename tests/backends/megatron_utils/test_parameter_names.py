"""Global names: the same whatever the layout."""

import pytest

from tests.support.processes.distributed import run_distributed

LAYERS = {"decoder.layers.0": 4, "decoder.layers.1": 5, "decoder.layers.10": 14}
CASES = [
    ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.5.mlp.linear_fc1.weight"),
    ("decoder.layers.10.mlp.linear_fc1.weight", "decoder.layers.14.mlp.linear_fc1.weight"),
    ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ("output_layer.weight", "embedding.word_embeddings.weight"),
    (
        "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
        "decoder.layers.4.mlp.experts.local_experts.11.linear_fc2.weight",
    ),
    ("decoder.layers.0.mlp.experts.linear_fc1.weight12", "decoder.layers.4.mlp.experts.linear_fc1.weight20"),
    ("decoder.layers.0.mlp.experts.linear_fc2.bias0", "decoder.layers.4.mlp.experts.linear_fc2.bias8"),
]


def names_worker():
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils.parameter_names import global_name

    names = [global_name(local, LAYERS, first_expert=8, tied=True) for local, _ in CASES]
    return names, global_name("output_layer.weight", {}, first_expert=0, tied=False)


@pytest.fixture(scope="module")
def names():
    return run_distributed(names_worker, 1)[0]


def test_layers_experts_and_tied_embeddings(names):
    assert names[0] == [name for _, name in CASES]


def test_an_untied_output_layer_has_its_own_name(names):
    assert names[1] == "output_layer.weight"
