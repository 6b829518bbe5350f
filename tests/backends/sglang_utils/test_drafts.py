"""Engines draft with a layer of the model: SGLang's own draft models take what a push sends."""

import pytest

from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import PREDICTS_BESIDE, write_predicting
from tests.support.processes.distributed import run_distributed
from tests.support.processes.draft_models import receive

# Their own entries of published configs, which SGLang reads.
_MIXED = {"layer_types": ["linear_attention", "full_attention", "full_attention"], "full_attention_interval": 2}
_PUBLISHED = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# Family → further entries of its config; None: it has a layer for multi-token prediction anyway.
DRAFTING = {
    "mimo": None,
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "deepseek_v3": _PUBLISHED,
    "deepseek_v32": _PUBLISHED,
    "glm_moe_dsa": {**_PUBLISHED, "indexer_types": ["full", "shared", "full"]},
    "qwen3_next": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_5_moe_text": _MIXED,
}


@pytest.fixture(scope="module")
def received(tmp_path_factory):
    root, written = tmp_path_factory.mktemp("drafting"), {}
    for name, changes in DRAFTING.items():
        row, written[name] = TINY_FAMILIES[name], str(root / name)
        if changes is None:
            row.save(root / name)
            continue
        own_names = PREDICTS_BESIDE if changes is _MIXED else None
        options = {"model_type": row.model_type, **row.entries, **changes}
        write_predicting(root / name, row.write, own_names, **options)
    return run_distributed(receive, 1, (written, 4000), start_method="spawn", timeout=600)[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", DRAFTING)
def test_a_push_reaches_the_model_that_drafts(received, family):
    """In small buckets, and under the names of the whole checkpoint, which both models get."""
    found = received[family]
    assert found.lost == {"target": set(), "draft": set()}
    own = found.loaded["draft"] - found.shared
    assert len(own) > 8 and found.shared
    # Nothing else brings it back: an engine that was reset, or has slept, has to be sent the layer.
    assert found.without_layer == {"target": set(), "draft": own}
