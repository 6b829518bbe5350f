import argparse
import json

import pytest

from slime.arguments.time_limits import TIME_LIMITS, checkpoint_bytes, derive_time_limits
from slime.utils.errors import UserError
from tests.support.args import parse, write_config

GB = 10**9


def limits_of(directory, **typed) -> dict[str, float]:
    args = argparse.Namespace(hf_checkpoint=str(directory), **{**dict.fromkeys(TIME_LIMITS), **typed})
    derive_time_limits(args)
    return {name: getattr(args, name) for name in TIME_LIMITS}


def weights(directory, name, size) -> None:
    """A file of `size` bytes that takes no room."""
    with (directory / name).open("wb") as file:
        file.truncate(size)


def test_small_models_have_the_least_limits(tmp_path):
    weights(tmp_path, "model.safetensors", 1)
    assert limits_of(tmp_path) == {
        "engine_start_timeout": 601, "engine_load_timeout": 301, "train_start_timeout": 1801,
        "checkpoint_publish_timeout": 301,
    }  # fmt: skip


def test_large_models_have_time(tmp_path):
    """1.5 TB, as 744 billion parameters have in 16 bits."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1500 * GB}}))
    assert limits_of(tmp_path) == {
        "engine_start_timeout": 600 + 7500, "engine_load_timeout": 300 + 7500,
        "train_start_timeout": 1800 + 10500, "checkpoint_publish_timeout": 300 + 10500,
    }  # fmt: skip


def test_a_typed_limit_stays(tmp_path):
    weights(tmp_path, "model.safetensors", 20 * GB)
    limits = limits_of(tmp_path, engine_start_timeout=5.0)
    assert (limits["engine_start_timeout"], limits["engine_load_timeout"]) == (5.0, 400.0)


def test_the_size_is_that_of_the_files_that_are_loaded(tmp_path):
    assert checkpoint_bytes(None) == checkpoint_bytes(str(tmp_path / "nowhere")) == checkpoint_bytes(str(tmp_path)) == 0
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert checkpoint_bytes(str(tmp_path)) == 0
    weights(tmp_path, "pytorch_model.bin", 9)
    assert checkpoint_bytes(str(tmp_path)) == 9
    for part in (1, 2):
        weights(tmp_path, f"model-{part}.safetensors", 5)
    assert checkpoint_bytes(str(tmp_path)) == 10


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf"])
def test_a_limit_leaves_some_time(tmp_path, value):
    write_config(tmp_path)
    with pytest.raises(UserError, match="--engine-load-timeout .*must be a number of seconds above 0"):
        parse(tmp_path, f"--engine-load-timeout={value}")


def test_limits_are_among_the_derived_values(tmp_path):
    args = parse(tmp_path, "--train-start-timeout", "77")
    assert (args.train_start_timeout, args.engine_start_timeout) == (77, 600)
    assert {name: str(args.origins[name]) for name in TIME_LIMITS} == {
        "engine_start_timeout": "derived", "engine_load_timeout": "derived", "train_start_timeout": "command line",
        "checkpoint_publish_timeout": "derived",
    }  # fmt: skip
