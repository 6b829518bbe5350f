"""Megatron-Core's dataclasses as flags: what the describer says of a field, and that typed values arrive in it."""

import contextlib
import dataclasses
import enum
import io
import json
import typing
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import flag_surface
from tests.support.models.args import TINY_QWEN3_CONFIG, parse
from tests.support.processes.distributed import run_distributed


class Engine(enum.Enum):
    impulse = 1
    warp = 2


@dataclasses.dataclass
class BaseConfig:
    size: int = 1
    """How many there are. A second sentence."""


@dataclasses.dataclass
class NewConfig(BaseConfig):
    """What a newer version might bring."""

    factor: float = 9
    """Speed factor, e.g. 9 (the usual one). Not more."""

    engine: Engine = Engine.warp
    """Which engine."""

    shields: bool = False
    cloak: bool = True
    """Hide."""

    renamed: bool = dataclasses.field(default=True, metadata={"argparse_meta": {"arg_names": ["--no-old-name"]}})
    crew: list[str] | None = None
    decks: int | list[int] = 1
    shift: typing.Union[float, typing.List[float]] = 0.0  # noqa: UP006, UP007
    bounds: tuple[int, int] | None = None
    mode: typing.Literal["a", "b"] | None = None
    dtype: torch.dtype = torch.float32
    names: list[str] = dataclasses.field(default_factory=list)
    unset: int = dataclasses.field(default=0, metadata={"argparse_meta": {"default": None}})
    call: typing.Callable | None = None
    params_dtype: torch.dtype = torch.float32
    _inside: int = 0
    later: int = dataclasses.field(default=0, init=False)


@pytest.fixture
def described(monkeypatch):
    monkeypatch.setattr(flag_surface, "config_classes", lambda: (NewConfig, BaseConfig))
    return flag_surface.flag_specs()


def test_a_field_becomes_a_flag_of_its_type(described):
    specs = {spec.dest: spec for spec in reversed(described)}
    shown = {name: (spec.action, spec.type, spec.nargs, spec.choices, spec.default) for name, spec in specs.items()}
    assert shown == {
        "size": ("store", "int", None, None, 1),
        "factor": ("store", "float", None, None, 9),
        "engine": ("store", "str", None, ("impulse", "warp"), "warp"),
        "shields": ("store_true", "str", None, None, False),
        "cloak": ("bool", "str", None, None, True),
        "renamed": ("bool", "str", None, None, True),
        "crew": ("store", "str", "+", None, None),
        "decks": ("store", "layer_pattern", None, None, 1),
        "shift": ("store", "float", "+", None, 0.0),
        "bounds": ("store", "integers", None, None, None),
        "mode": ("store", "str", None, ("a", "b"), None),
        "dtype": ("store", "str", None, ("fp32", "bf16", "fp16", "fp8"), "fp32"),
        "names": ("store", "str", "+", None, []),
        "unset": ("store", "int", None, None, None),
    }
    assert specs["size"].metadata["configs"] == ["NewConfig", "BaseConfig"]
    assert specs["shift"].metadata["one_or_more"] and not specs["crew"].metadata["one_or_more"]


def test_switches_have_every_spelling(described):
    spellings = {}
    for spec in described:
        spellings.setdefault(spec.dest, []).append((spec.action, spec.flags))
    assert spellings["cloak"] == [("bool", ("--cloak",)), ("store_false", ("--disable-cloak",))]
    assert spellings["renamed"] == [("bool", ("--renamed",)), ("store_false", ("--no-old-name",))]
    assert spellings["shields"] == [("store_true", ("--shields",))]


def test_the_text_of_a_field_is_its_first_sentence(described):
    texts = {spec.dest: spec.help for spec in reversed(described)}
    assert texts["size"] == "How many there are"
    assert texts["factor"] == "Speed factor, e.g. 9 (the usual one)"
    assert texts["crew"] == "Megatron's crew"


def test_what_is_no_flag_has_a_reason(described):
    reasons = flag_surface.unrepresentable()
    assert set(reasons) == {"call", "params_dtype", "_inside"}
    assert reasons["params_dtype"] == "follows --bf16 and --fp16" and "Callable" in reasons["call"]


def _installed() -> dict[str, str]:
    return flag_surface.unrepresentable()


def test_fields_of_the_installed_version_that_are_no_flags():
    """Functions, objects and what Megatron sets itself; a field that drops out for another reason shows itself here."""
    (reasons,) = run_distributed(_installed, 1)
    assert set(reasons) == {
        "params_dtype", "pipeline_dtype", "mtp_standalone", "timers", "finalize_model_grads_func", "grad_scale_func",
        "no_sync_func", "grad_sync_func", "param_sync_func", "_cpu_offloading_context", "activation_func", "init_method",
        "output_layer_init_method", "embedding_init_method", "quant_recipe",
    }  # fmt: skip


def _printed() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        flag_surface.main()
    return printed.getvalue()


def test_the_description_is_one_line_of_json():
    """That the module runs as a program is seen in `test_megatron_lm_flags.py`."""
    (printed,) = run_distributed(_printed, 1)
    rows = json.loads(printed.splitlines()[-1])
    assert len(rows) > 300 and {"flags", "dest", "action", "type", "default", "help"} <= set(rows[0])


def _words_of(spec) -> tuple[list[str], object]:
    """Words that set the flag to something else than its default, and the value that must then be in the field."""
    flag = spec.flags[0]
    if spec.action == "store_true":
        return [flag], True
    if spec.action in ("store_false", "bool"):
        return [flag if spec.action == "store_false" else flag.replace("--", "--no-", 1)], False
    if spec.choices:
        choice = next(choice for choice in reversed(spec.choices) if choice != spec.default)
        return [flag, str(choice)], choice
    if spec.type == "layer_pattern":
        return [flag, "[0]*1+[1]*2"], [0, 1, 1]
    if spec.type == "integers":
        return [flag, "128,0"], (128, 0)
    if spec.nargs == "+":
        words = ["3", "5"] if spec.type != "str" else ["first", "second"]
        values = {"int": [3, 5], "float": [3.0, 5.0], "str": words}[spec.type]
        return [flag, *words], values
    number = {"int": 7, "float": 7.5, "str": "word"}[spec.type]
    return [flag, str(number)], number


def _arrival() -> dict[str, str]:
    """Fields that do not get the typed value, by spelling."""
    import argparse

    configs = {config.__name__: _without_checks(config) for config in flag_surface.config_classes()}
    from slime.arguments import groups as megatron
    from slime.backends.megatron_utils.config_fields import dtype_of_name, fields_from_args

    parser = argparse.ArgumentParser(allow_abbrev=False)
    megatron.add_megatron_flags(parser)
    lost = {}
    for spec in megatron.merge(flag_surface.flag_specs()):
        field = spec.metadata.get("field")
        if field is None:
            continue
        words, expected = _words_of(spec)
        args = parser.parse_args(words)
        for name in spec.metadata["configs"]:
            fields = fields_from_args(configs[name], args)
            found = getattr(configs[name](**fields), field)
            typed = found.name if isinstance(found, enum.Enum) else found
            wanted = dtype_of_name(expected) if isinstance(found, torch.dtype) else expected
            if typed != wanted or type(typed) is not type(wanted):
                lost[f"{name}.{field} {' '.join(words)}"] = repr(found)
    return lost


def _without_checks(config: type) -> type:
    """The dataclass without the checks and changes that follow construction."""
    return dataclasses.dataclass(type(config.__name__, (config,), {"__post_init__": lambda self: None}))


def test_every_typed_value_arrives_in_its_field():
    (lost,) = run_distributed(_arrival, 1)
    assert lost == {}


def _defaults(args: SimpleNamespace) -> dict[str, str]:
    """Fields that differ from what Megatron's dataclasses have when they get the shape of the model alone."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils.model_provider import build_ddp_config
    from slime.backends.megatron_utils.optimizer import build_optimizer_config
    from slime.backends.megatron_utils.transformer_config import build_transformer_config

    shape = {
        "num_layers": args.num_layers, "hidden_size": args.hidden_size, "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads, "num_query_groups": args.num_query_groups,
        "kv_channels": args.kv_channels,
    }  # fmt: skip
    differing = {}
    for config, plain in (
        (build_transformer_config(args), shape), (build_ddp_config(args, 0), {}), (build_optimizer_config(args), {}),
    ):  # fmt: skip
        own = type(config)(**plain)
        for field in dataclasses.fields(config):
            value, default = getattr(config, field.name), getattr(own, field.name)
            if value != default and not callable(value):
                differing[f"{type(config).__name__}.{field.name}"] = str(value)
    return differing


def test_defaults_of_the_command_line_are_megatrons_but_for_these(tmp_path):
    args = SimpleNamespace(**vars(parse(tmp_path)))
    (differing,) = run_distributed(_defaults, 1, (args,))
    shape_of_the_model = {
        "TransformerConfig.normalization": "RMSNorm",
        "TransformerConfig.layernorm_epsilon": str(TINY_QWEN3_CONFIG["rms_norm_eps"]),
        "TransformerConfig.add_bias_linear": "False",
        "TransformerConfig.gated_linear_unit": "True",
        "TransformerConfig.qk_layernorm": "True",
    }
    ours = {
        "TransformerConfig.hidden_dropout": "0.0",
        "TransformerConfig.attention_dropout": "0.0",
        "TransformerConfig.transformer_impl": "local",
        "TransformerConfig.use_cpu_initialization": "True",
        "TransformerConfig.variable_seq_lengths": "True",
        "TransformerConfig.moe_token_dispatcher_type": "alltoall",
        "TransformerConfig.pipeline_dtype": "torch.float32",
        "TransformerConfig.mtp_loss_scaling_factor": "0.2",
        "DistributedDataParallelConfig.use_distributed_optimizer": "True",
        "OptimizerConfig.use_distributed_optimizer": "True",
        "OptimizerConfig.lr": "1e-06",
        "OptimizerConfig.min_lr": "0.0",
    }
    # These act only with a feature that is off.
    idle = {
        "DistributedDataParallelConfig.align_param_gather": "True",
        "OptimizerConfig.optimizer_offload_fraction": "1.0",
        "OptimizerConfig.barrier_with_L1_time": "True",
    }
    assert differing == {**shape_of_the_model, **ours, **idle}
