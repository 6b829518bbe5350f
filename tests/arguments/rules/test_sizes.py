import pytest

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
        ("--dry-run-link-gbps 0", "--dry-run-link-gbps 0.0: it must be above 0"),
    ],
)
def test_numbers_below_their_least_value(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


def test_all_of_them_are_named_before_anything_is_derived(tmp_path):
    assert violations(tmp_path, "--rollout-batch-size 0 --micro-batch-size 0") == [
        "--rollout-batch-size 0: it must be at least 1",
        "--micro-batch-size 0: it must be at least 1",
    ]
