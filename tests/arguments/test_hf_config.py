import pytest

from slime.arguments.hf_config import model_args_from_hf, read_hf_config
from slime.utils.errors import UserError
from tests.support.args import TINY_QWEN3_CONFIG, command_line, parse, write_config


def test_shape_comes_from_the_config(tmp_path):
    args = parse(tmp_path)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (2, 64, 128, 16)
    assert args.group_query_attention and args.num_query_groups == 2 and args.qk_layernorm
    assert args.untie_embeddings_and_output_weights is False
    assert args.padded_vocab_size == 384  # 300 up to a multiple of 128


def test_padded_vocabulary_is_a_multiple_for_every_tensor_rank(tmp_path):
    args = parse(tmp_path, "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    assert args.padded_vocab_size == 512


def test_a8_rope_base_inside_rope_parameters_wins(tmp_path):
    config = {**TINY_QWEN3_CONFIG, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 5000000.0}}
    assert model_args_from_hf(config)["rotary_base"] == 5000000


def test_typed_shape_that_differs_is_shown_in_one_table(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--num-layers", "3", "--rotary-base", "77")
    message = str(error.value)
    assert message.startswith("hf_validate_args failed")
    assert "--num-layers: 3 here, 2 in config.json" in message and "--rotary-base: 77 here, 10000" in message


def test_explicit_shape_without_derivation_must_be_complete(tmp_path):
    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    from slime.arguments import parse_args

    with pytest.raises(UserError, match="hf_validate_args failed"):
        parse_args(argv=words)


def test_text_config_is_taken_out(tmp_path):
    directory = write_config(tmp_path / "m", text_config={"hidden_size": 96})
    assert read_hf_config(directory)["hidden_size"] == 96


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.mkdir(), "holds no config.json"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("{\n bad")), r"config.json:2: broken JSON"),
    ],
)
def test_unusable_checkpoint_directory(tmp_path, prepare, message):
    path = tmp_path / "missing"
    prepare(path)
    with pytest.raises(UserError, match=message):
        read_hf_config(path)


def test_unknown_family_lists_the_supported_ones():
    with pytest.raises(UserError, match="'gpt2' .* supported: qwen2, qwen3"):
        model_args_from_hf({"model_type": "gpt2"})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be trained"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type 'llama3'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"attention_bias": True}, "attention_bias True"),
    ],
)
def test_architecture_that_would_be_built_differently_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        model_args_from_hf({**TINY_QWEN3_CONFIG, **changes})


def test_incomplete_config_names_what_is_missing():
    config = {name: value for name, value in TINY_QWEN3_CONFIG.items() if name != "hidden_size"}
    with pytest.raises(UserError, match="lacks hidden_size"):
        model_args_from_hf(config)
