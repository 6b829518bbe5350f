"""Every model script against the real parser and the published configs."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from slime.arguments.hf_config import CHOICES, SUPPLEMENTS
from slime.arguments.parser import build_parser, parse_known
from slime.estimates.parameters import count_parameters
from slime.estimates.shape import expert_layers
from slime.models.families import model_args_from_hf
from slime.models.shape_of_flags import model_shape_from_args
from tests.support.tables.model_scripts import PARAMETER_COUNTS, SCRIPTS, script_arrays
from tests.support.tables.shell_arrays import as_flags, source_all
from tools.published_models import PUBLISHED_MODELS

ARRAYS = ("MODEL_ARGS", "CKPT_ARGS")
EVERY_SCRIPT = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return build_parser()


@pytest.fixture(scope="module")
def parsed(parser) -> dict[str, argparse.Namespace]:
    """What the real parser makes of the flags; an unknown one or a wrong type is an error here."""
    needed = ["--rollout-batch-size", "1"]
    return {name: parse_known(parser, [*arrays["MODEL_ARGS"], *needed]) for name, arrays in script_arrays().items()}


def test_there_is_a_script_for_every_published_model() -> None:
    assert sorted(SCRIPTS) == sorted(PUBLISHED_MODELS)


@EVERY_SCRIPT
def test_checkpoint_flags_are_empty_without_variables(name: str) -> None:
    assert script_arrays()[name]["CKPT_ARGS"] == []


@EVERY_SCRIPT
def test_o8_what_the_published_config_tells_agrees(name: str, parsed) -> None:
    """All flags that the config says something about; those that the script leaves out, by their defaults."""
    args = parsed[name]
    told = model_args_from_hf(_text_config(PUBLISHED_MODELS[name]))
    differences = {
        flag: (ours, theirs)
        for flag, theirs in told.items()
        if (flag in args.typed_flags or flag not in CHOICES | SUPPLEMENTS)
        and (ours := _effective(args, flag)) != _comparable(flag, theirs)
    }
    assert differences == {}


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_parameter_count_is_that_of_the_published_checkpoint(name: str, parsed) -> None:
    args = argparse.Namespace(**vars(parsed[name]))
    args.mtp_num_layers = None
    args.normalization = "RMSNorm"
    assert count_parameters(model_shape_from_args(args)).total == PARAMETER_COUNTS[name]


def test_variables_override_depth_and_rotary_base() -> None:
    names = ("qwen2.5-1.5B", "deepseek-v3", "deepseek-v3-5layer", "glm4.5-106B-A12B", "qwen3-30B-A3B")
    scripts = {name: SCRIPTS[name] for name in names}
    arrays = source_all(scripts, ARRAYS, MODEL_ARGS_NUM_LAYERS="4", MODEL_ARGS_ROTARY_BASE="12345")
    flags = {name: as_flags(arrays[name]["MODEL_ARGS"]) for name in names}
    assert {flags[name]["--num-layers"] for name in names} == {("4",)}
    assert {flags[name]["--rotary-base"] for name in names} == {("12345",)}
    assert [flags[name].get("--moe-layer-freq") for name in names] == [
        None, ("[0]*3+[1]*1",), ("[0]*3+[1]*1",), ("[0]*1+[1]*3",), ("[1]*4",)
    ]  # fmt: skip


def test_a_model_cut_below_its_dense_layers_has_no_expert_layer() -> None:
    arrays = source_all({"deepseek-v3": SCRIPTS["deepseek-v3"]}, ARRAYS, MODEL_ARGS_NUM_LAYERS="2")
    assert as_flags(arrays["deepseek-v3"]["MODEL_ARGS"])["--moe-layer-freq"] == ("[0]*2",)


def test_a_shortened_model_leaves_no_variable_behind(tmp_path: Path) -> None:
    both = tmp_path / "both.sh"
    both.write_text(f"source {SCRIPTS['deepseek-v3-5layer']}\nsource {SCRIPTS['deepseek-v3']}\n")
    arrays = source_all({"both": both}, ARRAYS)
    assert as_flags(arrays["both"]["MODEL_ARGS"])["--num-layers"] == ("61",)


def test_checkpoint_variables_become_flags() -> None:
    scripts = {"qwen3-4B": SCRIPTS["qwen3-4B"], "deepseek-r1": SCRIPTS["deepseek-r1"]}
    arrays = source_all(scripts, ARRAYS, HF_CHECKPOINT="/m/a b", REF_LOAD="/r", LOAD="/l", SAVE="/s")
    expected = ["--hf-checkpoint", "/m/a b", "--ref-load", "/r", "--load", "/l", "--save", "/s"]
    assert [arrays[name]["CKPT_ARGS"] for name in scripts] == [expected, expected]


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What the product's reader makes of a config: the language model's part of a multimodal one."""
    return {**config, **config.get("text_config", {}), "model_type": config["model_type"]}


def _effective(args: argparse.Namespace, flag: str) -> Any:
    """The value that holds for the model when `flag` may have been left out."""
    value = getattr(args, flag)
    if flag == "kv_channels" and value is None:
        return args.hidden_size // args.num_attention_heads
    if flag == "spec" and value is not None:
        return list(value)
    return _comparable(flag, value)


def _comparable(flag: str, value: Any) -> Any:
    if flag == "moe_layer_freq" and isinstance(value, list):
        return 1 if all(expert_layers(value, len(value))) else value
    return value
