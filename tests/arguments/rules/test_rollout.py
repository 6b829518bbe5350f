import pytest

from slime.arguments import parse_args
from tests.support.args import command_line, parse, write_rows
from tests.support.rules import assert_violation, violations

REASON = "with --true-on-policy-mode samples must come from the weights that train on them"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--rollout-temperature 0",
            "--rollout-temperature 0.0: training needs a value above 0 (1.0 is usual); --eval-temperature may be 0",
        ),
        ("--eval-temperature -1", "--eval-temperature -1.0: it must not be negative; 0 is greedy"),
        ("--rollout-top-p 0", "--rollout-top-p 0.0: it is a share of the probability, above 0 and at most 1"),
        ("--eval-top-p 1.5", "--eval-top-p 1.5: it is a share of the probability, above 0 and at most 1"),
        ("--rollout-top-k 0", "--rollout-top-k 0: give -1 for no cut, or at least 1"),
        (
            "--rollout-max-context-len 10 --rollout-max-prompt-len 10",
            "--rollout-max-prompt-len 10 must be below --rollout-max-context-len 10, at most 9",
        ),
        ("--rollout-temperature nan", "--rollout-temperature nan: it must be a finite number"),
        (
            "--rollout-max-context-len 10 --rollout-max-response-len 20",
            "--rollout-max-response-len 20 must be below --rollout-max-context-len 10, at most 9",
        ),
        (
            "--eval-max-context-len 10 --eval-max-response-len 20",
            "--eval-max-response-len 20 must be below --eval-max-context-len 10, at most 9",
        ),
        (
            "--rollout-max-response-len 1000",
            "--rollout-max-response-len 1000 is above the model's --max-position-embeddings 512; give at most that",
        ),
        (
            "--eval-max-context-len 1000",
            "--eval-max-context-len 1000 is above the model's --max-position-embeddings 512; give at most that",
        ),
        (
            "--rm-type nosuch",
            "--rm-type nosuch is no built-in reward; known types: dapo, deepscaler, f1, math, random (each also with the "
            "prefix boxed_), or give --custom-rm-path",
        ),
        (
            "--rollout-max-context-len 1000",
            "--rollout-max-context-len 1000 is above the model's --max-position-embeddings 512; give at most that",
        ),
        (
            "--true-on-policy-mode --num-steps-per-rollout 2",
            f"2 optimizer steps per rollout: {REASON}; give --num-steps-per-rollout 1",
        ),
        (
            "--true-on-policy-mode --update-weights-interval 2",
            f"--update-weights-interval 2: {REASON}; give 1",
        ),
        ("--true-on-policy-mode --keep-old-actor", f"--keep-old-actor: {REASON}; drop it"),
        (
            "--true-on-policy-mode --partial-rollout",
            f"--partial-rollout: {REASON}; add --mask-offpolicy-in-partial-rollout",
        ),
        ("--rm-url host:80", "--rm-url host:80: it must start with http:// or https://"),
        ("--rollout-buffer-url host:80", "--rollout-buffer-url host:80: it must start with http:// or https://"),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


def asynchronous(tmp_path, words: str):
    return parse_args(argv=[*command_line(tmp_path), "--dry-run", *words.split()], asynchronous=True)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--colocate",
            "--colocate: train_async.py generates while it trains, so both need GPUs of their own; use train.py, or drop it",
        ),
        ("--true-on-policy-mode", f"train_async.py trains on older samples: {REASON}; use train.py"),
        (
            "--async-buffer-size 3 --update-weights-interval 2 --max-weight-staleness 1",
            "--max-weight-staleness 1: with --async-buffer-size 3 and --update-weights-interval 2 samples are up to 2 "
            "versions old when they are trained; give at least 2, or a smaller buffer",
        ),
    ],
)
def test_rule_of_the_asynchronous_loop(tmp_path, words, message):
    assert_violation(tmp_path, words, message, asynchronous=True)


def test_the_smallest_possible_staleness_is_accepted(tmp_path):
    asynchronous(tmp_path, "--async-buffer-size 3 --update-weights-interval 2 --max-weight-staleness 2")
    parse(tmp_path, "--max-weight-staleness", "0", "--dry-run")


def test_masked_partial_rollouts_are_on_policy(tmp_path):
    parse(tmp_path, "--true-on-policy-mode", "--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--dry-run")


def test_the_position_limit_is_the_models_only_when_it_is_known(tmp_path):
    assert parse(tmp_path, "--rollout-max-context-len", "512").rollout_max_prompt_len == 511


def test_an_empty_stop_string(tmp_path):
    message = "--rollout-stop: an empty stop string would end every response at once; give text, or drop the flag"
    assert_violation(tmp_path, ["--rollout-stop", "###", ""], message)


def test_reward_types_of_own_functions_and_boxed_ones_are_free(tmp_path):
    parse(tmp_path, "--rm-type", "boxed_math")
    parse(tmp_path, "--rm-type", "mine", "--custom-rm-path", "tests.support.reward")


def test_values_of_a_file_are_named_with_their_line(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "eval.yaml").write_text(
        f"datasets:\n  - name: a\n    path: {rows}\n    rm_type: maths\n    max_response_len: 1000\n"
    )
    words = f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml"
    lines = violations(tmp_path, words)
    assert lines[0] == (
        f"{tmp_path}/eval.yaml:5: max_response_len 1000 is above the model's --max-position-embeddings 512; give at most that"
    )
    assert lines[1].startswith(f"{tmp_path}/eval.yaml:4: rm_type maths is no built-in reward; known types: dapo")
    message = "{tmp}/eval.yaml:5: max_response_len 1000 must be below --eval-max-context-len 100, at most 99"
    assert_violation(tmp_path, f"{words} --eval-max-context-len 100", message)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("--rollout-max-prompt-len 400 --rollout-max-response-len 400", "--max-position-embeddings 512"),
        ("--eval-max-prompt-len 400 --rollout-max-response-len 400", "--max-position-embeddings 512"),
        ("--rollout-max-prompt-len 80 --rollout-max-response-len 80 --sglang-context-length 100", "context-length 100"),
        ("--rollout-max-prompt-len 400 --rollout-max-response-len 112", None),
        ("--rollout-max-prompt-len 400 --rollout-max-response-len 400 --rollout-max-context-len 512", None),
    ],
)
def test_prompt_and_response_that_fit_only_alone(tmp_path, caplog, words, warned):
    parse(tmp_path, *words.split())
    found = [record.getMessage() for record in caplog.records if "together above" in record.getMessage()]
    assert found == [] if warned is None else warned in found[0]
