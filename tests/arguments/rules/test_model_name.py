import pytest

from tests.support.args import parse
from tests.support.rules import violations


def test_a_name_outside_of_the_list(tmp_path):
    (line,) = violations(tmp_path, "--model-name foo")
    assert line.startswith("--model-name foo: no such family; give one of deepseekv3, ") and "drop the flag" in line
    parse(tmp_path, "--model-name", "foo", "--debug-rollout-only")


def test_a_family_that_is_not_built(tmp_path):
    (line,) = violations(tmp_path, "--model-name Qwen3MoeForCausalLM")
    assert line.startswith("--model-name Qwen3MoeForCausalLM: the conversion of qwen3moe is not built yet; ")
    assert line.removesuffix(" (--dry-run plans with it)") != line
    assert len(parse(tmp_path, "--model-name", "qwen3_moe", "--dry-run").plan_notes) == 1


@pytest.mark.parametrize("name", ["qwen3", "Qwen3ForCausalLM", "qwen2.5", "qwen3config"])
def test_names_of_families_that_are_trained(tmp_path, name):
    assert parse(tmp_path, "--model-name", name).model_name == name
