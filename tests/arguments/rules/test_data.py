import pytest

from slime.arguments import parse_args
from slime.utils.errors import UserError
from tests.support.args import command_line, parse
from tests.support.rules import assert_violation, violations


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--eval-interval 2",
            "--eval-interval 2 needs data sets: give --eval-prompt-data name path, or --eval-config",
        ),
        (
            "--input-key question",
            "{tmp}/prompts.jsonl:1: there is no field 'question' (--input-key); the row has prompt, label",
        ),
    ],
)
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


def test_pairs_of_evaluation_sets(tmp_path):
    with pytest.raises(UserError, match=r"--eval-prompt-data needs pairs `name path`, but has 3 words: a b c"):
        parse(tmp_path, "--eval-prompt-data", "a", "b", "c")


def test_prompts_are_needed(tmp_path):
    words = command_line(tmp_path)
    at = words.index("--prompt-data")
    del words[at : at + 2]
    with pytest.raises(UserError) as error:
        parse_args(argv=words)
    assert str(error.value) == (
        "--prompt-data is needed (or --disable-rollout-global-dataset with an own data source)"
    )  # fmt: skip
    parse_args(argv=[*words, "--disable-rollout-global-dataset"])


def test_files_are_opened_before_anything_starts(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="--prompt-data .*empty.jsonl: holds no rows"):
        parse(tmp_path, "--prompt-data", str(tmp_path / "empty.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    with pytest.raises(
        UserError, match="other.jsonl:1: the row has neither `prompt` nor `input`, only question, answer"
    ):
        parse(tmp_path, "--eval-interval", "1", "--eval-prompt-data", "set", str(tmp_path / "other.jsonl"))


def test_a_wrong_row_is_an_error_in_a_dry_run_too(tmp_path):
    with pytest.raises(UserError, match="there is no field 'question'"):
        parse(tmp_path, "--input-key", "question", "--dry-run")


def test_an_own_data_source_reads_its_files_in_its_own_way(tmp_path):
    (tmp_path / "other.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    parse(tmp_path, "--data-source-path", "tests.support.Source", "--prompt-data", str(tmp_path / "other.jsonl"))


@pytest.mark.parametrize(
    "words", ["--eval-prompt-data a b c", "--eval-config {tmp}/nothing.yaml"], ids=["odd words", "no such file"]
)
def test_sets_that_cannot_be_read_are_not_asked_for_again(tmp_path, words):
    lines = violations(tmp_path, f"--eval-interval 2 {words}")
    assert len(lines) == 1 and "needs data sets" not in lines[0]


def eval_file(tmp_path, *lines):
    text = "".join(f"    {line}\n" for line in (f"path: {tmp_path}/prompts.jsonl", *lines))
    (tmp_path / "eval.yaml").write_text(f"datasets:\n  - name: a\n{text}")
    return f"--eval-interval 2 --eval-config {tmp_path}/eval.yaml"


def test_a_message_names_where_the_key_of_an_evaluation_set_comes_from(tmp_path):
    pairs = "--eval-interval 2 --eval-prompt-data a {tmp}/prompts.jsonl"
    row = "{tmp}/prompts.jsonl:1: there is no field 'q' (%s); the row has prompt, label"
    assert_violation(tmp_path, f"{pairs} --eval-input-key q", row % "--eval-input-key")
    assert_violation(tmp_path, f"{pairs} --eval-label-key q", row % "--eval-label-key")
    assert_violation(tmp_path, f"{pairs} --label-key q", row % "--label-key")
    assert_violation(tmp_path, eval_file(tmp_path, "input_key: q"), row % "input_key, {tmp}/eval.yaml:4")


def test_something_must_say_how_responses_are_graded(tmp_path):
    words = command_line(tmp_path)[:-2]
    with pytest.raises(UserError, match="prompts.jsonl: nothing says how responses are graded: .*; give --rm-type"):
        parse_args(argv=words)
    parse_args(argv=[*words, "--custom-rm-path", "tests.reward"])
    parse_args(argv=[*words, "--rollout-function-path", "tests.rollout"])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1", "label": "2", "metadata": {"rm_type": "math"}}\n')
    parse_args(argv=words)


def test_an_evaluation_set_may_say_it_alone(tmp_path):
    words = [*command_line(tmp_path)[:-2], "--rollout-function-path", "tests.rollout"]
    words += ["--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"]
    with pytest.raises(UserError, match=r"eval.yaml:3: path .*: nothing says how responses are graded"):
        parse_args(argv=[*words, *eval_file(tmp_path).split()])
    parse_args(argv=[*words, *eval_file(tmp_path, "rm_type: math").split()])
