"""Flags of engines and router that a run refuses, or cannot serve yet."""

import pytest

from slime.arguments.rules.not_built import names_of
from slime.arguments.server_flags import NOT_YET, REFUSED, TOLD_TOKENS
from slime.arguments.surface import load_surface
from slime.utils.errors import UserError
from tests.support.models.args import parse


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    return parse(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.name)
def test_every_row_is_about_flags_that_exist(args, row):
    assert names_of(row, vars(args))


def test_a_flag_has_one_reason(args):
    names = [name for row in NOT_YET for name in names_of(row, vars(args))]
    assert len(names) == len(set(names))
    assert not set(names) & set(REFUSED)


def test_whatever_else_is_said_of_drafts_is_not_built(args):
    """A flag that a later server has is among them, or has a row here."""
    settled = {name for row in NOT_YET for name in names_of(row, vars(args))}
    open_flags = {name for name in vars(args) if name.startswith("sglang_speculative_")} - settled
    assert open_flags == {"sglang_speculative_num_steps", "sglang_speculative_num_draft_tokens"}


def test_a_server_tells_as_many_kept_tokens_as_the_installed_one():
    (spec,) = [spec for spec in load_surface("sglang") if spec.dest == "sglang_sampling_mask_max_tokens"]
    assert spec.metadata["server_default"] == TOLD_TOKENS


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("--sglang-enable-pd-role-switch", "--sglang-enable-pd-role-switch"),
        ("--sglang-speculative-algorithm NGRAM", "--sglang-speculative-algorithm NGRAM"),
        ("--sglang-speculative-draft-model /d", "--sglang-speculative-draft-model-path /d"),
        ("--sglang-speculative-eagle-topk 4", "--sglang-speculative-eagle-topk 4"),
        ("--sglang-speculative-accept-threshold-acc 0.9", "--sglang-speculative-accept-threshold-acc 0.9"),
        ("--sglang-enable-lora", "--sglang-enable-lora"),
        ("--sglang-quantization fp8", "--sglang-quantization fp8"),
        ("--sglang-hicache-storage-backend file", "--sglang-hicache-storage-backend file"),
        (
            "--sglang-enable-dp-attention-local-control-broadcast",
            "--sglang-enable-dp-attention-local-control-broadcast",
        ),
        ("--sglang-dwdp-size 2", "--sglang-dwdp-size 2"),
        ("--sglang-ssl-keyfile-password s3cret", "--sglang-ssl-keyfile-password <redacted>"),
    ],
)
def test_a_run_refuses_what_is_not_built(tmp_path, words, flag):
    with pytest.raises(UserError, match="is not built yet") as error:
        parse(tmp_path, *words.split())
    assert any(line.startswith(flag) for line in str(error.value).splitlines())
    assert "s3cret" not in str(error.value)


def test_values_that_mean_no_such_feature_pass(tmp_path):
    words = "--sglang-quantization unquant --sglang-cpu-offload-gb 0 --no-sglang-enable-lora"
    parse(tmp_path, *words.split())


def test_a_run_that_only_trains_passes(tmp_path):
    parse(tmp_path, "--debug-train-only", "--prefill-num-servers", "1", "--sglang-enable-lora")
