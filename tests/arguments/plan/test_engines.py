"""From flags and --sglang-config to the engine that is planned."""

import pytest

from slime.arguments.plan import make_plan
from slime.arguments.plan.engines import serving_setup
from slime.arguments.plan.setup import shape_of
from slime.scheduling.serving_memory import WeightBytes
from tests.support.plans import SMALL, TWO_NODES, planned


def setup(args, config=None):
    return serving_setup(args, shape_of(args), config, 80 * 2**30)


def test_engine_sizes_and_data_parallel_attention():
    args = planned(
        TWO_NODES, "--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-kv-cache-dtype", "fp8_e5m2"
    )
    found = setup(args)
    assert (found.tensor, found.pipeline, found.attention_data, found.cache_bytes) == (8, 1, 4, 1.0)
    assert found.static_fraction == 0.7 and found.weight_bytes == WeightBytes.everywhere(2.0) and found.sharded_head
    two_stages = setup(planned(TWO_NODES, "--sglang-pp-size", "2"))
    assert (two_stages.tensor, two_stages.pipeline) == (4, 2)
    assert not setup(planned(TWO_NODES, "--sglang-enable-dp-lm-head")).sharded_head


SERVING = """
sglang:
  - name: judge
    model_path: /nowhere/judge
    update_weights: false
    server_groups: [{num_gpus: 2, num_gpus_per_engine: 1}]
  - name: actor
    server_groups:
      - {worker_type: placeholder, num_gpus: 2, num_gpus_per_engine: 1}
      - {num_gpus: 4, num_gpus_per_engine: 4, overrides: {mem_fraction_static: 0.6}}
"""


@pytest.mark.parametrize("known", [True, False])
def test_the_engine_of_the_trained_model_is_planned(tmp_path, known):
    path = tmp_path / "serving.yaml"
    path.write_text(SERVING if known else SERVING.replace("name: actor", "name: actor\n    update_weights: false"))
    command = SMALL.replace("--rollout-num-gpus 2", "--rollout-num-gpus 8")
    found = setup(planned(command, "--sglang-config", str(path)))
    # Where no model gets weights the first one with engines stands for all.
    assert (found.tensor, found.static_fraction) == ((4, 0.6) if known else (1, 0.8))


def test_an_unknown_format_is_a_note(monkeypatch):
    monkeypatch.setattr(
        "slime.arguments.plan._hf_config", lambda args: {"quantization_config": {"quant_method": "quark"}}
    )
    plan = make_plan(planned(SMALL))
    assert any("the format of the quantised checkpoint, quark, is not known" in note for note in plan.notes)
