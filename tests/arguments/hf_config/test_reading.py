import json

import pytest

from slime.arguments.hf_config import is_hf_checkpoint, read_hf_config
from slime.utils.errors import UserError
from tests.support.args import write_config


def test_text_config_is_taken_out(tmp_path):
    directory = write_config(tmp_path / "m", text_config={"hidden_size": 96})
    assert read_hf_config(directory)["hidden_size"] == 96


def test_what_is_said_of_the_whole_model_wins_over_its_text_config(tmp_path):
    text = {"hidden_size": 96, "model_type": "qwen3_5_text", "tie_word_embeddings": False}
    directory = write_config(tmp_path / "m", model_type="qwen3_5", tie_word_embeddings=True, text_config=text)
    config = read_hf_config(directory)
    assert (config["model_type"], config["tie_word_embeddings"], config["hidden_size"]) == ("qwen3_5", True, 96)


def test_text_config_counts_where_the_whole_model_says_nothing(tmp_path):
    config = {"model_type": "qwen3_5", "text_config": {"tie_word_embeddings": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_hf_config(tmp_path)["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.mkdir(), "holds no config.json"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{\n bad")), r"config.json:2: broken JSON"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("[1]")), "holds no JSON object"),
    ],
)
def test_unusable_checkpoint_directory(tmp_path, prepare, message):
    path = tmp_path / "missing"
    prepare(path)
    with pytest.raises(UserError, match=message):
        read_hf_config(path)


@pytest.mark.parametrize(("model_type", "expected"), [("qwen3", True), ("kimi_k2", True), ("gpt2", False)])
def test_directory_of_a_supported_family(tmp_path, model_type, expected):
    assert is_hf_checkpoint(write_config(tmp_path / "m", model_type=model_type)) is expected


def test_directory_without_config_is_no_checkpoint(tmp_path):
    assert not is_hf_checkpoint(tmp_path)
