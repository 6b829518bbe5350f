"""The Hugging Face config found, compared with the flags, and what of it cannot be trained."""

import argparse
import json
import re

import pytest

from slime.arguments import parse_args
from slime.arguments.derivation import resolve_aliases
from slime.arguments.hf_config import apply_hf_config, is_hf_checkpoint, read_hf_config, text_config_of
from slime.arguments.parser import build_parser, parse_known
from slime.arguments.violations import NOTED
from slime.models.families import SUPPORTED_MODEL_TYPES, TRAINED_MODEL_TYPES, model_args_from_hf, training_limits
from slime.utils.errors import UserError
from tests.support.models.args import TINY_QWEN3_CONFIG, command_line, parse, write_config
from tests.support.tables.model_scripts import script_flags
from tools.published_models import PUBLISHED_MODELS

WRITTEN_DOWN = script_flags()
YARN = PUBLISHED_MODELS["deepseek-v3"]["rope_scaling"]
LLAMA3 = PUBLISHED_MODELS["llama3.1-8B-Instruct"]["rope_scaling"]
BASE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.fixture(scope="module")
def parser():
    return build_parser()


def compared(parser, config: dict, *words: str, dry_run: bool = True) -> tuple[list[str], argparse.Namespace]:
    """Violations and arguments of a command line with these words and this config."""
    args = parse_known(parser, ["--hf-checkpoint", "/model", "--rollout-batch-size", "1", *words])
    resolve_aliases(args)
    found = apply_hf_config(args, text_config_of(config))
    args.plan_notes = [violation.message for violation in found if dry_run and violation.kind in NOTED]
    return [violation.message for violation in found if violation.message not in args.plan_notes], args


def flags_of(name: str, **changes: tuple[str, ...] | None) -> list[str]:
    """The words of a model's flags; `changes` (flag without dashes) replace values, None leaves a flag out."""
    replaced = {"--" + flag.replace("_", "-"): values for flag, values in changes.items()}
    flags = {flag: values for flag, values in {**WRITTEN_DOWN[name], **replaced}.items() if values is not None}
    return [word for flag, values in flags.items() for word in (flag, *values)]


def test_shape_comes_from_the_config(tmp_path):
    args = parse(tmp_path)
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (2, 64, 128, 16)
    assert args.group_query_attention and args.num_query_groups == 2 and args.qk_layernorm
    assert args.untie_embeddings_and_output_weights is False
    assert args.padded_vocab_size == 384  # 300 up to a multiple of 128


def test_a_plan_with_fsdp_asks_for_no_shape_flags(tmp_path):
    """It is a model of transformers, and Megatron's flags describe it in the plan only."""
    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    layout = ["--gradient-checkpointing", "--context-parallel-size", "2", "--actor-num-gpus-per-node", "4", "--dry-run"]
    args = parse_args(argv=[*words, "--train-backend", "fsdp", *layout])
    assert (args.num_layers, args.hidden_size, args.swiglu, args.qk_layernorm) == (2, 64, True, True)
    assert args.data_parallel_size == 2 and args.recompute_granularity is None
    assert not [note for note in args.plan_notes if note.startswith("--train-backend")]
    with pytest.raises(UserError, match="hf_validate_args failed"):
        parse_args(argv=[*words, *layout])


def test_padded_vocabulary_is_a_multiple_for_every_tensor_rank(tmp_path):
    args = parse(tmp_path, "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    assert args.padded_vocab_size == 512


def test_typed_shape_that_differs_is_shown_in_one_table(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--num-layers", "3", "--rotary-base", "77", "--norm-epsilon", "1e-5")
    title, header, *rows = str(error.value).splitlines()
    assert title.startswith("hf_validate_args failed") and "drop the typed flags" in title
    assert header.split() == ["flag", "typed", "or", "default", "config.json"]
    assert [row.split() for row in rows[:3]] == [
        ["--num-layers", "3", "2"], ["--norm-epsilon", "1e-05", "1e-06"], ["--rotary-base", "77", "10000"]
    ]  # fmt: skip
    assert len({row.rindex(row.split()[-1]) for row in (header, *rows[:3])}) == 1, "columns are aligned"


def test_explicit_shape_without_derivation_must_be_complete(tmp_path):
    from slime.arguments import parse_args

    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    with pytest.raises(UserError, match="hf_validate_args failed.*\n(.*\n)*.*--num-layers +unset +2"):
        parse_args(argv=words)


def test_rollout_only_runs_are_not_compared(tmp_path):
    assert parse(tmp_path, "--debug-rollout-only", "--num-layers", "3").num_layers == 3


@pytest.mark.parametrize("derivation", [(), ("--model-args-from-hf",)])
@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_flags_of_a_published_model_agree_with_its_config(name, derivation, parser):
    violations, _ = compared(parser, PUBLISHED_MODELS[name], *flags_of(name), *derivation)
    assert violations == []


@pytest.mark.parametrize(
    ("name", "changes", "row"),
    [
        ("qwen3-4B", {"hidden_size": ("2048",)}, ["--hidden-size", "2048", "2560"]),
        ("qwen3-4B", {"num_attention_heads": ("16",)}, ["--num-attention-heads", "16", "32"]),
        ("qwen3-4B", {"num_query_groups": ("4",)}, ["--num-query-groups", "4", "8"]),
        ("qwen3-4B", {"kv_channels": None}, ["--kv-channels", "unset", "128"]),
        ("qwen3-4B", {"ffn_hidden_size": ("9729",)}, ["--ffn-hidden-size", "9729", "9728"]),
        ("qwen3-4B", {"vocab_size": ("151937",)}, ["--vocab-size", "151937", "151936"]),
        ("qwen3-4B", {"qk_layernorm": None}, ["--qk-layernorm", "not given", "given"]),
        ("qwen3-4B", {"add_qkv_bias": ()}, ["--add-qkv-bias", "given", "not given"]),
        ("qwen3-4B", {"num_experts": ("8",)}, ["--num-experts", "8", "unset"]),
        ("qwen3-4B", {"disable_bias_linear": None}, ["--disable-bias-linear", "not given", "given"]),
        (
            "qwen3-4B",
            {"untie_embeddings_and_output_weights": ()},
            ["--untie-embeddings-and-output-weights", "given", "not given"],
        ),
        ("glm4-9B", {"post_mlp_layernorm": None}, ["--post-mlp-layernorm", "not given", "given"]),
        ("glm4-9B", {"spec": None}, ["--spec", "unset", "slime_plugins.models.glm4 get_glm_spec"]),
        ("glm4.5-355B-A32B", {"rotary_percent": ("1.0",)}, ["--rotary-percent", "1.0", "0.5"]),
        ("glm4.5-355B-A32B", {"moe_ffn_hidden_size": ("1408",)}, ["--moe-ffn-hidden-size", "1408", "1536"]),
        (
            "glm4.5-355B-A32B",
            {"moe_shared_expert_intermediate_size": None},
            ["--moe-shared-expert-intermediate-size", "unset", "1536"],
        ),
        ("glm4.5-355B-A32B", {"moe_layer_freq": None}, ["--moe-layer-freq", "1", "[0]*3+[1]*89"]),
        ("glm4.5-355B-A32B", {"ffn_hidden_size": ("1",)}, ["--ffn-hidden-size", "1", "12288"]),
        ("deepseek-v3", {"q_lora_rank": None}, ["--q-lora-rank", "unset", "1536"]),
        ("deepseek-v3", {"rotary_scaling_factor": ("32",)}, ["--rotary-scaling-factor", "32.0", "40.0"]),
        ("deepseek-v3", {"rope_type": ("rope",)}, ["--rope-type", "rope", "yarn"]),
        ("kimi-k2", {"moe_router_num_groups": ("8",)}, ["--moe-router-num-groups", "8", "1"]),
        *(
            (name, {"experimental_attention_variant": (typed,)}, ["--experimental-attention-variant", typed, of_config])
            for name, typed, of_config in (
                ("qwen3-4B", "gated_delta_net", "unset"),
                ("qwen3-4B", "dsa", "unset"),
                ("deepseek-v3", "dsa", "unset"),
                ("qwen3-next-80B-A3B", "dsa", "gated_delta_net"),
                ("glm5-744B-A40B", "gated_delta_net", "dsa"),
            )
        ),
    ],
)
def test_one_difference_is_one_row(name, changes, row, parser):
    (table,), _ = compared(parser, PUBLISHED_MODELS[name], *flags_of(name, **changes))
    title, _, only = table.splitlines()
    assert title.startswith("hf_validate_args failed") and "or give --model-args-from-hf" in title
    assert only.split("  ")[1] == row[0] and [cell.strip() for cell in only.split("  ") if cell.strip()] == row


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-30B-A3B", {"ffn_hidden_size": ("1",)}),  # no layer has this width
        ("qwen3-30B-A3B", {"moe_layer_freq": None}),
        ("qwen3-30B-A3B", {"moe_token_dispatcher_type": ("flex",)}),
        ("glm4.5-106B-A12B", {"moe_router_topk_scaling_factor": ("1.0",)}),
        ("glm4.5-106B-A12B", {"moe_router_num_groups": ("1",), "moe_router_group_topk": ("1",)}),
        ("deepseek-v3", {"kv_channels": None}),
        ("glm4.7-30B-A3B", {"add_qkv_bias": None}),
        ("glm4.7-30B-A3B", {"rope_type": ("rope",)}),  # nothing is scaled
        ("deepseek-v3", {"rope_type": ("yarn",)}),
        ("deepseek-v3", {"moe_router_bias_update_rate": ("1e-3",)}),
        ("qwen2.5-7B", {"kv_channels": ("128",)}),
        ("mimo-7B-rl", {"mtp_num_layers": None}),
        ("glm4-9B", {"spec": ("my.module", "my_spec")}),
        *(
            (name, {"experimental_attention_variant": ("gated_delta_net",)})
            for name in ("qwen3-next-80B-A3B", "qwen3.5-4B")
        ),
        ("glm5-744B-A40B", {"experimental_attention_variant": ("dsa",)}),
    ],
)
def test_what_means_the_same_or_is_the_users_choice(name, changes, parser):
    violations, _ = compared(parser, PUBLISHED_MODELS[name], *flags_of(name, **changes))
    assert violations == []


def test_a_model_with_fewer_layers_needs_a_checkpoint_of_that_depth(parser):
    words = flags_of("deepseek-v3-5layer")
    (table,), _ = compared(parser, PUBLISHED_MODELS["deepseek-v3"], *words)
    assert [row.split()[0] for row in table.splitlines()[2:]] == ["--num-layers", "--moe-layer-freq"]
    assert compared(parser, PUBLISHED_MODELS["deepseek-v3-5layer"], *words)[0] == []


def test_all_heads_have_their_own_keys_without_grouped_queries(parser):
    config = {**TINY_QWEN3_CONFIG, "num_key_value_heads": 4}
    words = (
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --kv-channels 16 --swiglu "
        "--norm-epsilon 1e-6 --vocab-size 300 --disable-bias-linear --qk-layernorm --normalization RMSNorm"
    )
    assert compared(parser, config, *words.split())[0] == []


def test_typed_values_stay_and_others_are_filled(parser):
    config = PUBLISHED_MODELS["kimi-k2"]
    words = ["--model-args-from-hf", "--moe-token-dispatcher-type", "flex", "--max-position-embeddings", "4096"]
    violations, args = compared(parser, config, *words)
    derived = model_args_from_hf(config)
    assert violations == []
    assert (args.moe_token_dispatcher_type, args.max_position_embeddings) == ("flex", 4096)
    assert {name: getattr(args, name) for name in derived if name not in args.typed_flags} == {
        name: value for name, value in derived.items() if name not in args.typed_flags
    }


def test_details_that_scripts_leave_out_come_from_the_config(parser):
    _, args = compared(parser, PUBLISHED_MODELS["kimi-k2"], *flags_of("kimi-k2"))
    assert (args.beta_fast, args.original_max_position_embeddings) == (1.0, 4096)
    _, args = compared(parser, PUBLISHED_MODELS["llama3.2-3B-Instruct"], *flags_of("llama3.2-3B-Instruct"))
    assert args.rope_scaling_factor == 32.0


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4.5-355B-A32B", "glm4.7-30B-A3B"])
def test_pretrained_biases_stay_unless_a_rate_is_typed(name, parser):
    """Megatron's default would move them."""
    violations, args = compared(parser, PUBLISHED_MODELS[name], *flags_of(name, moe_router_bias_update_rate=None))
    assert violations == [] and args.moe_router_bias_update_rate == 0.0


@pytest.mark.parametrize(
    ("model", "name", "way_out"),
    [
        (
            "glm4.5-355B-A32B",
            "glm4.5-355B-A32B",
            "means glm4, and config.json of --hf-checkpoint is of type glm4_moe; drop",
        ),
        ("qwen3-30B-A3B", "Qwen3-30B-A3B", "drop --model-name, or give qwen3moe"),
        ("qwen3-30B-A3B", "qwen3_moe", None),
        ("qwen3.5-35B-A3B", "Qwen3.5-35B-A3B", None),  # a name that dense models and those with experts share
        ("qwen3.5-35B-A3B", "qwen3_5", None),
        ("qwen3.5-0.8B", "qwen3_5_moe", None),
        ("qwen3.5-0.8B", "qwen3_5_text", "drop --model-name, or give qwen35"),
        ("deepseek-v3", "kimi-k2", None),  # its weights have the same names
    ],
)
def test_a_name_of_another_family(model, name, way_out, parser):
    found, _ = compared(parser, PUBLISHED_MODELS[model], *flags_of(model), "--model-name", name)
    assert len(found) == (way_out is not None) and all(way_out in message for message in found)


def test_a_run_refuses_what_a_dry_run_notes(parser):
    config = {**PUBLISHED_MODELS["qwen3-4B"], "hidden_act": "gelu"}
    violations, _ = compared(parser, config, "--model-args-from-hf", dry_run=False)
    assert len(violations) == 1 and "hidden_act 'gelu' cannot be trained" in violations[0]
    planned, args = compared(parser, config, "--model-args-from-hf", dry_run=True)
    assert planned == [] and args.plan_notes == violations


@pytest.mark.parametrize("dry_run", [False, True])
def test_unknown_type_lists_the_supported_ones(dry_run, parser):
    violations, _ = compared(parser, {"model_type": "gpt2"}, dry_run=dry_run)
    assert len(violations) == 1 and "'gpt2'" in violations[0] and "qwen3_next" in violations[0]


def test_unknown_type_is_planned_from_typed_flags(parser):
    words = flags_of("qwen3-4B")
    violations, args = compared(parser, {"model_type": "gpt2"}, *words)
    assert violations == [] and "planned from the typed flags alone" in args.plan_notes[0]
    violations, _ = compared(parser, {"model_type": "gpt2"}, *words, dry_run=False)
    assert "is not known; supported" in violations[0]


def test_an_incomplete_config_is_one_violation(parser):
    violations, _ = compared(parser, {"model_type": "qwen3"}, "--model-args-from-hf")
    assert len(violations) == 1 and "lacks num_hidden_layers, hidden_size" in violations[0]


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
        (lambda path: (path.mkdir(), (path / "config.json").write_bytes(b'{"a": "\xff"}')), "cannot be read: 'utf-8'"),
        (
            lambda path: (path.mkdir(), (path / "config.json").write_text('{"text_config": {"a": 1, "a": 1}}')),
            "config.json cannot be read: 'a' stands twice in it, and only the last one would count",
        ),
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


def limits_of(config: dict) -> list[str]:
    return list(training_limits(config, model_args_from_hf(config)))


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_published_models_lack_nothing_but_their_layers(name):
    config = text_config_of(PUBLISHED_MODELS[name])
    if config["model_type"] in TRAINED_MODEL_TYPES:
        assert limits_of(config) == []
    else:
        (message,) = limits_of(config)
        assert message.startswith(f"model_type {config['model_type']!r}")
        assert "planned by --dry-run, but its layers are not built yet" in message and "qwen2 or qwen3" in message


def test_trained_types_are_supported_types():
    """The type of a multimodal model's language model is no type of its own."""
    assert {name for name in TRAINED_MODEL_TYPES if not name.endswith("_text")} <= set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be trained; only 'silu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type 'llama3' .* only 'default'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
    ],
)
def test_what_would_be_built_differently(changes, message):
    (limit,) = limits_of({**TINY_QWEN3_CONFIG, **changes})
    assert re.search(message, limit)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama3.1-8B-Instruct", {"rope_scaling": {"rope_type": "dynamic"}}, "only 'default' or 'llama3' is built"),
        (
            "llama3.1-8B-Instruct",
            {"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}},
            "high_freq_factor 8.0 cannot be trained; only 4.0 is built",
        ),
        (
            "llama3.1-8B-Instruct",
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
            "original_max_position_embeddings 131072 cannot be trained; only 8192 is built",
        ),
        ("glm5-744B-A40B", {"rope_parameters": {"rope_type": "longrope"}}, "only 'default' or 'yarn' is built"),
    ],
)
def test_limits_of_families(name, changes, expected):
    """Of one that is only planned, behind the limit that it is."""
    assert expected in limits_of({**PUBLISHED_MODELS[name], **changes})[-1]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob False cannot be trained; only True is built"),
        (
            "deepseek-v3",
            {"scoring_func": "softmax"},
            "scoring_func 'softmax' cannot be trained; only 'sigmoid' is built",
        ),
        ("kimi-k2", {"scoring_func": "softmax"}, "scoring_func 'softmax' cannot be trained; only 'sigmoid' is built"),
        ("glm4.5-355B-A32B", {"scoring_func": "softmax"}, "scoring_func 'softmax' cannot be trained"),
        (
            "qwen3-30B-A3B",
            {"scoring_func": "sigmoid"},
            "scoring_func 'sigmoid' cannot be trained; only 'softmax' is built",
        ),
        ("deepseek-v3", {"num_experts_per_tok": 6}, "num_experts_per_tok 6 of topk_group 4 groups cannot be trained"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False cannot be trained"),
        ("deepseek-v3", {"rope_scaling": {**YARN, "attention_factor": 2.0}}, "attention_factor 2.0 cannot be trained"),
        (
            "deepseek-v3",
            {"rope_scaling": {**YARN, "truncate": False}},
            "truncate False cannot be trained; only True is built",
        ),
        ("glm4.7-30B-A3B", {"attention_bias": True}, "attention_bias True cannot be trained"),
    ],
)
def test_limits_of_routers_and_latent_attention(name, changes, expected):
    assert list(limits_of(PUBLISHED_MODELS[name])) == []
    (limit,) = limits_of({**PUBLISHED_MODELS[name], **changes})
    assert expected in limit


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"rope_parameters": BASE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, True),
        ({"rope_theta": None, "rope_parameters": BASE, "rope_scaling": {"type": "default"}}, True),
        ({"rope_theta": 1e6, "rope_parameters": BASE, "rope_scaling": {"type": "default", "factor": None}}, False),
        ({"rope_parameters": BASE, "rope_scaling": {"rope_type": "mrope", "rope_theta": 1000000}}, False),
        (
            {"rope_parameters": BASE, "rope_scaling": {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [1]}},
            True,
        ),
        ({"rope_parameters": BASE, "rope_scaling": {}}, False),
        ({"rope_parameters": {}, "rope_scaling": BASE}, False),
    ],
)
def test_two_ropes_must_mean_the_same(changes, differ):
    limits = limits_of({**TINY_QWEN3_CONFIG, **changes})
    assert ["rope_parameters and rope_scaling say different things" in limit for limit in limits] == [True] * differ


@pytest.mark.parametrize(
    ("name", "changes", "lines"),
    [
        ("qwen3-next-80B-A3B", {"rope_theta": None, "rope_parameters": BASE}, ["rope_theta .* rotary_base 10000, .* 1000000;"]),
        ("qwen3-next-80B-A3B", {"rope_theta": 1e6, "rope_parameters": BASE}, []),
        ("qwen3-next-80B-A3B", {"rope_theta": 5e6, "rope_scaling": BASE}, ["rope_theta .* rotary_base 5000000.0, .* 1000000;"]),
        ("qwen3-next-80B-A3B", {"partial_rotary_factor": None}, []),
        ("qwen3-next-80B-A3B", {"full_attention_interval": 2}, ["full_attention_interval .* 2, .*1, 1, 1, 0, 1, 1"]),
        ("qwen3-next-80B-A3B", {"full_attention_interval": None}, []),
        (
            "qwen3.5-4B", {"rope_parameters": {**BASE, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor .* rotary_percent 0.25, .* 0.5;"],
        ),
        ("qwen3.5-4B", {"partial_rotary_factor": 0.5, "rope_parameters": {**BASE, "partial_rotary_factor": 0.5}}, []),
        (
            "minimax-m2", {"rotary_dim": None, "partial_rotary_factor": 0.5, "use_routing_bias": None, "use_qk_norm": False},
            ["rotary_dim .* rotary_percent 1.0, .* 0.5;", "use_qk_norm .* False, .* True", "use_routing_bias .* False, .*True"],
        ),
    ],
)  # fmt: skip
def test_entries_that_engines_read_alone_must_say_what_all_entries_mean(name, changes, lines):
    config = text_config_of(PUBLISHED_MODELS[name])
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(config["num_hidden_layers"])]
    limits = limits_of({**config, "layer_types": kinds, **changes})
    assert len(limits) == len(lines)
    for limit, line in zip(limits, lines, strict=True):
        assert re.search(f"engines read {line}", limit)
