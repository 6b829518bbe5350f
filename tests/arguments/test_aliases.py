import pytest

from slime.utils.errors import UserError
from tests.support.args import parse


def recomputation(args):
    return args.recompute_granularity, args.recompute_method, args.recompute_num_layers


def test_gradient_checkpointing_recomputes_every_layer(tmp_path):
    assert recomputation(parse(tmp_path, "--gradient-checkpointing")) == ("full", "uniform", 1)


def test_typed_recomputation_comes_before_gradient_checkpointing(tmp_path):
    args = parse(tmp_path, "--gradient-checkpointing", "--recompute-activations", "--dry-run")
    assert recomputation(args) == ("selective", None, None)
    typed = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    assert recomputation(parse(tmp_path, "--gradient-checkpointing", *typed.split())) == ("full", "block", 2)


def test_tis_threshold_is_tis_clip(tmp_path):
    assert parse(tmp_path, "--tis-threshold", "3", "--dry-run").tis_clip == 3
    assert parse(tmp_path, "--tis-threshold", "3", "--tis-clip", "3", "--dry-run").tis_clip == 3


def test_gated_attention_is_an_attention_output_gate(tmp_path):
    with pytest.raises(UserError, match=r"hf_validate_args failed(.|\n)*--attention-output-gate +given"):
        parse(tmp_path, "--use-gated-attention")


def test_a_file_for_the_plan_means_a_dry_run(tmp_path):
    assert parse(tmp_path, "--dry-run-json", str(tmp_path / "plan.json")).dry_run


def test_offload_optimizer_states(tmp_path):
    assert parse(tmp_path, "--offload-optimizer-states", "--dry-run").optimizer_cpu_offload


def test_messages_are_about_the_name_that_was_typed(tmp_path):
    notes = parse(tmp_path, "--tis-threshold", "3", "--dry-run").plan_notes
    assert [note for note in notes if "--tis-clip" in note] == []
