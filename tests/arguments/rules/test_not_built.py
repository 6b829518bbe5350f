"""What a run cannot do yet because of the value of a flag, or of several."""

import pytest

from slime.arguments import parse_args
from slime.models.families import FAMILIES_BY_NAME
from slime.models.family import Family
from tests.support.models.args import command_line, parse
from tests.support.tables.rules import violations


def test_prediction_layers(tmp_path):
    words = "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.1"
    args = parse(tmp_path, *words.split())
    assert (args.mtp_num_layers, args.enable_mtp_training, args.mtp_loss_scaling_factor) == (1, True, 0.1)


def test_layers_that_are_not_built(tmp_path):
    words = [word for word in command_line(tmp_path)[2:] if word != "--model-args-from-hf"]
    shape = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 300 --dry-run"
    args = parse_args(argv=[*words, *shape.split(), "--debug-train-only", "--random-init"])
    assert any(
        note.startswith("only models with gated SiLU, RMSNorm and no linear biases are built")
        for note in args.plan_notes
    )


def test_a_name_outside_of_the_list(tmp_path):
    (line,) = violations(tmp_path, "--model-name foo")
    assert line.startswith("--model-name foo: no such family; give one of deepseekv3, ") and "drop the flag" in line
    parse(tmp_path, "--model-name", "foo", "--debug-rollout-only")


def test_a_family_that_is_not_built(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES_BY_NAME, "seedoss", Family(model_types=(), names=("seedoss",)))
    (line,) = violations(tmp_path, "--model-name SeedOss")
    assert line.startswith("--model-name SeedOss: the conversion of seedoss is not built yet; ")
    assert line.removesuffix(" (--dry-run plans with it)") != line
    assert len(parse(tmp_path, "--model-name", "seed_oss", "--dry-run").plan_notes) == 1


@pytest.mark.parametrize("name", ["qwen3", "Qwen3ForCausalLM", "qwen3config"])
def test_names_of_families_that_are_trained(tmp_path, name):
    assert parse(tmp_path, "--model-name", name).model_name == name
