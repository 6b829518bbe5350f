"""What the trainer on FSDP2 does: every flag that it would pass over is told by name, and every other model."""

import pytest

from slime.arguments.hf_config import read_hf_config
from slime.models.fsdp import MODEL_TYPES, ONLY_VALUES, other_values, unknown_models
from slime.utils.errors import UserError
from tests.support.models.args import command_line, default_args, parse, write_config
from tests.support.models.tiny_families import TINY_FAMILIES

TYPED = {
    "async_save": "--save /s --save-interval 1 --async-save",
    "decoupled_weight_decay": "--no-decoupled-weight-decay",
}
DENSE = sorted({family.model_type for family in TINY_FAMILIES.values()}.intersection(MODEL_TYPES))


@pytest.mark.parametrize("name", ONLY_VALUES)
def test_another_value_of_a_flag_is_found(name):
    values = vars(default_args(train_backend="fsdp"))
    only = ONLY_VALUES[name]
    assert list(other_values(values)) == []
    assert list(other_values({**values, name: not only if isinstance(only, bool) else "other"})) == [name]


@pytest.mark.parametrize(
    "words",
    [
        "--log-params-norm", "--freeze-params-name-list norm", "--bf16 --grad-reduce-in-bf16", "--check-for-large-grads",
        "--distributed-backend gloo", *TYPED.values(),
        *(f"--optimizer-cpu-offload {flag}" for flag in (
            "--optimizer-offload-fraction 0.5", "--overlap-cpu-optimizer-d2h-h2d", "--use-torch-optimizer-for-cpu-offload",
            "--no-pin-cpu-grads", "--no-pin-cpu-params",
        )),
    ],
)  # fmt: skip
def test_a_run_refuses_the_flag_and_names_the_way_out(tmp_path, words):
    flag = words.split(" --")[-1].split()[0]
    with pytest.raises(UserError, match=rf"(?m)^.*{flag}.* is not built for --train-backend fsdp; .* megatron$"):
        parse(tmp_path, *f"--train-backend fsdp {words}".split())
    (note,) = parse(tmp_path, *f"--train-backend fsdp {words} --dry-run".split()).plan_notes
    assert flag in note


def test_a_run_without_training_ranks_has_no_backend_to_ask(tmp_path):
    parse(tmp_path, "--train-backend", "fsdp", "--log-params-norm", "--debug-rollout-only")


def test_every_type_that_trains_has_a_tiny_model():
    assert sorted(MODEL_TYPES) == DENSE


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, []),
        (
            {"model_type": "qwen3_moe"},
            ["model_type 'qwen3_moe' of --hf-checkpoint is not built for --train-backend fsdp"],
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, ["config.json of --hf-checkpoint: quantization_config is"]),
    ],
)
def test_models_that_are_not_known_to_be_trained_as_they_are_served_are_told(tmp_path, changes, told):
    found = list(unknown_models(read_hf_config(write_config(tmp_path, **changes))))
    assert len(found) == len(told) and all(line.startswith(start) for line, start in zip(found, told, strict=True))
    assert all("give" in line and "--train-backend megatron" in line for line in found)


def test_a_run_refuses_such_a_model(tmp_path):
    words = command_line(tmp_path)
    write_config(tmp_path / "model", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    from slime.arguments import parse_args

    with pytest.raises(UserError, match="quantization_config is not built for --train-backend fsdp"):
        parse_args(argv=[*words, "--train-backend", "fsdp"])
