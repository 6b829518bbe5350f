import pytest

from slime.arguments import parse_args
from slime.utils.errors import UserError
from tests.support.rules import assert_violation, violations


@pytest.mark.parametrize(
    "words, message",
    [
        ("--n-samples-per-prompt 0", "--n-samples-per-prompt 0: it must be at least 1"),
        ("--global-batch-size 0", "--global-batch-size 0: it must be at least 1"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size 0: it must be at least 1"),
        ("--async-buffer-size 0", "--async-buffer-size 0: it must be at least 1"),
        ("--num-rollout -1", "--num-rollout -1: it must be at least 0"),
        ("--max-weight-staleness -1", "--max-weight-staleness -1: it must be at least 0"),
        ("--rm-timeout 0", "--rm-timeout 0.0: it must be above 0"),
        ("--lr nan", "--lr nan: it must be a finite number"),
        ("--lr inf", "--lr inf: it must be a finite number"),
        ("--adam-beta1 1.5", "--adam-beta1 1.5: it must be at least 0 and below 1 (0.9 is usual)"),
        ("--adam-eps -1", "--adam-eps -1.0: it must be at least 0"),
        ("--weight-decay -1", "--weight-decay -1.0: it must be at least 0"),
        ("--seed -1", "--seed -1: it must be at least 0"),
        ("--rollout-seed 99999999999999999999", "--rollout-seed 99999999999999999999: a seed is at most 2147483647"),
        ("--num-layers -3", "--num-layers -3: it must be at least 1"),
        ("--dry-run-link-gbps 0", "--dry-run-link-gbps 0.0: it must be above 0"),
    ],
)
def test_numbers_below_their_least_value(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


def test_other_rules_are_told_with_them(tmp_path):
    words = "--keep-last 0 --rollout-temperature 0 --eval-interval 3 --save-interval 2"
    assert violations(tmp_path, words) == [
        "--keep-last 0: it must be at least 1",
        "--rollout-temperature 0.0: training needs a value above 0 (1.0 is usual); --eval-temperature may be 0",
        "--eval-interval 3 needs data sets: give --eval-prompt-data name path, or --eval-config",
        "--save-interval 2 needs --save, the directory of checkpoints, such as --save outputs/checkpoints",
    ]


def test_no_rule_speaks_of_a_number_that_was_replaced(tmp_path):
    words = "--tensor-model-parallel-size 0 --actor-num-gpus-per-node 3 --eval-top-p 2"
    assert violations(tmp_path, words) == [
        "--tensor-model-parallel-size 0: it must be at least 1",
        "--eval-top-p 2.0: it is a share of the probability, above 0 and at most 1",
    ]


def test_a_longer_flag_is_another_flag(tmp_path):
    assert violations(tmp_path, "--lr -1 --lr-warmup-fraction 2") == [
        "--lr -1.0: it must be at least 0",
        "--lr-warmup-fraction 2.0: it must be at least 0 and below 1, 0.1 for example",
    ]


def test_all_of_them_are_named_before_anything_is_derived(tmp_path):
    assert violations(tmp_path, "--rollout-batch-size 0 --micro-batch-size 0") == [
        "--rollout-batch-size 0: it must be at least 1",
        "--micro-batch-size 0: it must be at least 1",
    ]


def test_a_missing_batch_size_has_no_consequences():
    with pytest.raises(UserError) as error:
        parse_args(argv=["--dry-run"])
    assert "--global-batch-size" not in str(error.value) and "--rollout-batch-size is needed" in str(error.value)
