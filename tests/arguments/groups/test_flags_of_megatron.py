"""The Megatron family: Megatron-LM's names, one attribute per value, and no flag that is accepted and ignored."""

import argparse
import json
import re
from pathlib import Path

import pytest

from slime.arguments import groups as megatron
from slime.arguments.megatron.effects import ACTS_WITH, FIXED, NO_EFFECT, NOT_YET
from slime.arguments.megatron.names import FIELD_DESTS, OUR_DEFAULTS
from slime.arguments.parser import build_parser
from slime.arguments.surface import VALUE_TYPES, FlagSpec, load_surface
from slime.arguments.unknown_flags import NOT_FOR_THIS
from slime.utils.errors import UserError
from tests.support.models.args import parse

ROOT = Path(__file__).parents[3]
FIXTURE = json.loads((ROOT / "tests" / "arguments" / "data" / "megatron_lm_flags.json").read_text())

_NEWER = "the parser of the fixture is newer than the installed Megatron-Core"
_ON = "this trainer switches it on"
_NONE_IS_FALSE = "unset and off are the same"
# Spelling -> (what differs, why).
DEPARTURES: dict[str, tuple[set[str], str]] = {
    "--attention-softmax-in-fp32": ({"default"}, "the kernels always compute it in float32, as Megatron-Core's default says"),
    "--ckpt-assume-constant-structure": ({"default"}, _ON),
    "--ckpt-fully-parallel-load": ({"default"}, _ON),
    "--ckpt-fully-parallel-save": ({"default", "dest"}, "there it is a deprecated no-op beside --no-ckpt-fully-parallel-save"),
    "--cp-comm-type": ({"default"}, "Megatron-Core's unset value means p2p"),
    "--lr": ({"default"}, OUR_DEFAULTS["lr"][1]),
    "--attention-dropout": ({"default"}, OUR_DEFAULTS["attention_dropout"][1]),
    "--dist-ckpt-workers": ({"default"}, "Megatron-Core's own default"),
    "--hidden-dropout": ({"default"}, OUR_DEFAULTS["hidden_dropout"][1]),
    "--log-interval": ({"default"}, "every step is logged"),
    "--micro-batch-size": ({"default"}, "one sample unless more are asked for"),
    "--moe-hybridep-num-sms": ({"default"}, _NEWER),
    "--mtp-loss-scaling-factor": ({"default"}, "this trainer's weight"),
    "--muon-momentum": ({"default"}, _NEWER),
    "--no-overlap-p2p-communication": ({"default"}, "set with virtual pipeline stages only, as Megatron-Core's default says"),
    "--no-persist-layer-norm": ({"default", "dest"}, "both spellings set the field persist_layer_norm"),
    "--num-query-groups": ({"default"}, OUR_DEFAULTS["num_query_groups"][1]),
    "--position-embedding-type": ({"default"}, "only rotary embeddings are built"),
    "--seq-length": ({"default"}, "packed streams need none; 4096 sizes what has to have a size"),
    "--use-distributed-optimizer": ({"default"}, _ON),
    "--use-persistent-ckpt-worker": ({"default"}, _ON),
    "--no-load-optim": ({"default"}, _NONE_IS_FALSE),
    "--no-load-rng": ({"default"}, _NONE_IS_FALSE),
    "--no-save-optim": ({"default"}, _NONE_IS_FALSE),
    "--no-save-rng": ({"default"}, _NONE_IS_FALSE),
    "--use-cpu-initialization": ({"default"}, _NONE_IS_FALSE),
}  # fmt: skip

# Names of Megatron-LM's converters -> ours.
_TYPE_NAMES = {
    None: "str", "enum_type_handler": "str", "<lambda>": "str", "moe_freq_type": "layer_pattern",
    "la_freq_type": "layer_pattern", "no_rope_freq_type": "layer_pattern", "tuple_type": "integers",
}  # fmt: skip


def bare_parser() -> argparse.ArgumentParser:
    """A parser of the Megatron family alone."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    megatron.add_megatron_flags(parser)
    return parser


def groups_of_family(parser: argparse.ArgumentParser) -> list[argparse._ArgumentGroup]:
    return [group for group in parser._action_groups if group.title.startswith("Megatron: ")]


def family(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for group in groups_of_family(parser) for action in group._group_actions]


def test_names_types_and_defaults_are_those_of_megatron_lm():
    parser = build_parser()
    known = parser._option_string_actions
    first = {action.dest: action for action in reversed(parser._actions)}
    differing = {}
    for row in FIXTURE["flags"]:
        shared = [flag for flag in row["flags"] if flag in known]
        if not shared:
            continue
        action = known[shared[0]]
        found = {
            "spelling": sorted(shared) == sorted(row["flags"]),
            "dest": action.dest == row["dest"],
            "default": first[action.dest].default == row["default"],
        }
        if row["action"] == "store":
            kind = getattr(action.type, "__name__", None)
            found["type"] = _TYPE_NAMES.get(kind, kind) == _TYPE_NAMES.get(row["type"], row["type"])
        wrong = {name for name, agrees in found.items() if not agrees}
        if wrong:
            differing[row["flags"][0]] = wrong
    assert differing == {flag: wrong for flag, (wrong, _) in DEPARTURES.items()}


def test_most_of_megatron_lms_flags_are_known_or_explained():
    """What neither we know nor say a word about belongs to other kinds of training, or to a newer Megatron-Core."""
    known = build_parser()._option_string_actions
    explained = re.compile("|".join(re.escape(name).replace(r"\*", ".*") + "$" for name in NOT_FOR_THIS))
    rows = [row["flags"] for row in FIXTURE["flags"]]
    shared = [flags for flags in rows if any(flag in known for flag in flags)]
    explained_too = [flags for flags in rows if any(explained.match(flag) for flag in flags)]
    assert len(shared) > 370 and len(explained_too) > 100
    assert not [flags for flags in explained_too if flags in shared]


def test_flags_of_the_dataclasses_keep_their_own_spelling():
    known = build_parser()._option_string_actions
    fields = {spec.dest for spec in load_surface("megatron")}
    missing = {name for name in fields if "--" + name.replace("_", "-") not in known}
    assert missing == set()
    for name in fields:
        assert known["--" + name.replace("_", "-")].dest == FIELD_DESTS.get(name, name)


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--layernorm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-add-bias-linear", "add_bias_linear", False),
        ("--num-experts 8", "num_experts", 8),
        ("--num-moe-experts 8", "num_experts", 8),
        ("--fp8-format hybrid", "fp8", "hybrid"),
        ("--no-rope-fusion", "apply_rope_fusion", False),
        ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
        ("--no-persist-layer-norm", "persist_layer_norm", False),
        ("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", False),
        ("--disable-gloo-process-groups", "use_gloo_process_groups", False),
        ("--no-use-gloo-process-groups", "use_gloo_process_groups", False),
        ("--decoder-last-pipeline-num-layers 13", "decoder_last_pipeline_num_layers", 13),
        ("--num-layers-in-last-pipeline-stage 13", "decoder_last_pipeline_num_layers", 13),
        ("--no-use-distributed-optimizer", "use_distributed_optimizer", False),
        ("--use-nccl-ub", "nccl_ub", True),
        ("--moe-layer-freq [0]*3+[1]*2", "moe_layer_freq", [0, 0, 0, 1, 1]),
        ("--moe-layer-freq 2", "moe_layer_freq", 2),
        ("--moe-router-load-balancing-type seq_aux_loss", "moe_router_load_balancing_type", "seq_aux_loss"),
        ("--moe-router-load-balancing-type aux_loss none", "moe_router_load_balancing_type", ["aux_loss", "none"]),
        ("--moe-aux-loss-coeff 0.01", "moe_aux_loss_coeff", 0.01),
        ("--spec slime_plugins.models.glm4 get_glm_spec", "spec", ["slime_plugins.models.glm4", "get_glm_spec"]),
        ("--window-size 128,0", "window_size", [128, 0]),
        ("--no-position-embedding", "add_position_embedding", False),
        ("--rotary-base 1000000", "rotary_base", 1000000),
        ("--exp-avg-dtype bf16", "exp_avg_dtype", "bf16"),
        ("--attention-backend flash", "attention_backend", "flash"),
        ("--persistent-save-interval 5", "save_interval", 5),
        ("--recompute-modules core_attn mlp", "recompute_modules", ["core_attn", "mlp"]),
    ],
)  # fmt: skip
def test_all_spellings_of_a_value_set_one_attribute(words, dest, value):
    parser = bare_parser()
    assert getattr(parser.parse_args(words.split()), dest) == value
    assert getattr(parser.parse_args([]), dest) != value


def test_a_value_outside_the_choices_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--normalization.*BatchNorm.*LayerNorm.*RMSNorm"):
        parse(tmp_path, "--normalization", "BatchNorm")


def test_every_group_is_filled_and_no_attribute_is_defined_twice():
    parser = bare_parser()
    sizes = [len(group._group_actions) for group in groups_of_family(parser)]
    assert len(sizes) == 10 and min(sizes) >= 10
    with_default = [action.dest for action in family(parser) if action.default is not argparse.SUPPRESS]
    assert len(with_default) == len(set(with_default))
    assert {action.dest for action in family(parser)} == set(with_default)


def test_flags_that_exist_already_are_left_out():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int, default=7)
    parser.add_argument("--no-rope-fusion", action="store_true")
    megatron.add_megatron_flags(parser)
    args = parser.parse_args(["--no-rope-fusion"])
    assert args.num_layers == 7 and args.no_rope_fusion is True and args.apply_rope_fusion is True


def test_a_new_field_becomes_a_flag_without_a_line_here():
    new = FlagSpec(
        flags=("--warp-factor",), dest="warp_factor", type="float", default=9.0, metadata={"field": "warp_factor"}
    )
    merged = megatron.merge([*load_surface("megatron"), new])
    assert new in merged and megatron.topic_of(new) in ("other", "model shape")
    assert {spec.type for spec in merged} <= set(VALUE_TYPES)


def test_without_megatron_core_the_run_says_what_to_install(monkeypatch):
    monkeypatch.setattr(megatron, "load_surface", lambda package: None)
    with pytest.raises(UserError, match="pip install megatron-core"):
        bare_parser()


def _read_by_name() -> set[str]:
    """Attributes of `args` that our own code reads."""
    text = "\n".join(path.read_text() for path in [*(ROOT / "slime").rglob("*.py"), ROOT / "train.py"])
    return set(re.findall(r"\bargs\.([a-z_A-Z0-9]+)", text)) | set(
        re.findall(r"(?:getattr|_given)\(\s*args, \"([a-zA-Z_0-9]+)\"", text)
    )


def test_no_flag_is_accepted_and_ignored():
    fields = {FIELD_DESTS.get(spec.dest, spec.dest) for spec in load_surface("megatron")}
    rows = {row.name for row in NOT_YET}
    idle = {name for group in ACTS_WITH for name in group.names}
    dests = {action.dest for action in family(build_parser())}
    # What is neither a field of Megatron's configuration nor read by us must have its answer in a table.
    silent = dests - fields - _read_by_name() - rows - set(FIXED) - set(NO_EFFECT)
    refused_with_their_flag = {
        name for group in ACTS_WITH for name in group.names if rows & set(_attributes_in(group.needs))
    }
    assert silent - refused_with_their_flag == set()
    assert (set(FIXED) | set(NO_EFFECT)) & rows == set()
    assert set(FIXED) & set(NO_EFFECT) == set() and (set(FIXED) | set(NO_EFFECT)) & idle == set()


def _attributes_in(needs: str) -> list[str]:
    return [flag.replace("-", "_").replace("use_nccl_ub", "nccl_ub").replace("fp8_format", "fp8").replace("fp4_format", "fp4")
            for flag in re.findall(r"--([a-z0-9-]+)", needs)]  # fmt: skip


def test_tables_name_only_attributes_that_exist():
    dests = {action.dest for action in build_parser()._actions}
    named = {row.name for row in NOT_YET} | set(FIXED) | set(NO_EFFECT) | set(OUR_DEFAULTS)
    named |= {name for group in ACTS_WITH for name in group.names}
    assert named - dests == set()
    spellings = {flag for group in ACTS_WITH for flag in re.findall(r"--[a-z0-9-]+", group.needs)}
    assert spellings - set(build_parser()._option_string_actions) == set()
    names = [row.name for row in NOT_YET]
    assert len(names) == len(set(names))


def test_defaults_ask_for_nothing_that_is_not_built(tmp_path):
    args = parse(tmp_path)  # would be refused
    for row in NOT_YET:
        value = getattr(args, row.name)
        assert value is None or value is False or value in row.works, row.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data-path x", "prompts come from --prompt-data"),
        ("--train-samples 5", "--num-rollout x --rollout-batch-size"),
        ("--use-mcore-models", "there are no others"),
        ("--tiktoken-pattern v1", "--hf-checkpoint"),
        ("--eval-iters 3", "--eval-prompt-data"),
    ],
)
def test_names_that_mean_nothing_here_say_what_to_do(tmp_path, words, message):
    with pytest.raises(UserError) as error:
        parse(tmp_path, *words.split())
    assert f"{words.split()[0]} of Megatron-LM has no meaning here: " in str(error.value) and message in str(
        error.value
    )
