"""Fields that no row has, and prompts of which the tokenizer makes nothing that a run can use."""

import json
from pathlib import Path

import pytest

from slime.plan.before_start import check_before_start
from slime.utils.errors import UserError
from tests.support.models.args import parse, write_config, write_stand_ins
from tests.support.models.tokenizer import CHATML_TEMPLATE, build_tokenizer, save_tokenizer

REFUSING = "{{ raise_exception('no system role') if messages[0].role == 'system' }}" + CHATML_TEMPLATE


@pytest.fixture
def told(tmp_path, caplog):
    """The problems of a run, whose words may name rows.jsonl (the prompts) and more.jsonl; `{}` stands for the directory."""

    def problems(
        words: str = "", *, template: str | None = CHATML_TEMPLATE, seconds: float = 60, **config: int
    ) -> list:
        given = [word.replace("{}", str(tmp_path)) for word in words.split()]
        args = parse(tmp_path, "--prompt-data", str(tmp_path / "rows.jsonl"), *given)
        write_stand_ins(tmp_path / "model")
        save_tokenizer(tmp_path / "model", template)
        write_config(tmp_path / "model", **config)
        try:
            check_before_start(args, scan_seconds=seconds)
        except UserError as error:
            return str(error).splitlines()
        return []

    return problems


def write(path: Path, *rows: dict) -> None:
    path.write_text("".join(json.dumps({"label": "1", **row}) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("words", "place", "field"),
    [
        ("--metadata-key meta", "--metadata-key", "meta"),
        ("--tool-key functions", "--tool-key", "functions"),
        ("--eval-interval 1 --eval-prompt-data a {}/more.jsonl --eval-tool-key functions", "--eval-tool-key", "functions"),
        ("--eval-interval 1 --eval-config {}/sets.yaml", "{}/sets.yaml:1: metadata_key", "meta"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("skips", ["", " --allow-bad-rows"])
def test_a_field_that_no_row_has_is_told_with_the_key_that_names_it(tmp_path, told, words, place, field, skips):
    sets = f"eval: {{datasets: [{{name: a, path: {tmp_path}/more.jsonl, metadata_key: meta}}]}}\n"
    (tmp_path / "sets.yaml").write_text(sets)
    for name in ("rows", "more"):
        write(tmp_path / f"{name}.jsonl", {"prompt": "a", "metadata": {}})
    [line] = told(words + skips)
    file = "more.jsonl" if "more" in words or "sets" in words else "rows.jsonl"
    assert line.startswith(f"{place.replace('{}', str(tmp_path))}: no row of {tmp_path}/{file} has a field '{field}'")
    assert "only label, metadata, prompt; " in line
    # One row that has it is enough.
    write(tmp_path / file, {"prompt": "a"}, {"prompt": "b", field: [] if field == "functions" else {}})
    assert told(words + skips) == []


def test_files_of_a_mixture_need_not_have_the_same_fields(tmp_path, told):
    write(tmp_path / "rows.jsonl", {"prompt": "a"})
    write(tmp_path / "more.jsonl", {"prompt": "a", "meta": {}})
    assert told("--metadata-key meta --prompt-data {}/rows.jsonl {}/more.jsonl") == []
    write(tmp_path / "more.jsonl", {"prompt": "a"})
    [line] = told("--metadata-key meta --prompt-data {}/rows.jsonl {}/more.jsonl")
    assert f"no row of {tmp_path}/rows.jsonl {tmp_path}/more.jsonl has" in line


def test_of_rows_that_are_not_read_nothing_is_refused(tmp_path, told, caplog):
    write(tmp_path / "rows.jsonl", *({"prompt": "a"},) * 5)
    assert told("--metadata-key meta", seconds=0) == []
    assert "--metadata-key: none of the first 1 rows of" in caplog.text


def test_a_label_that_is_no_text_and_no_number_is_told_where_a_built_in_reward_compares_with_it(tmp_path, told):
    labels = [3.5, True, ["1"], {"ground_truth": "1"}, float("nan")]
    path = tmp_path / "rows.jsonl"
    write(path, *({"prompt": "a", "label": label} for label in labels))
    assert [line.partition(",")[0] for line in told("--rm-type f1")] == [
        f"{path}:3: the label is list", f"{path}:4: the label is dict", f"{path}:5: there is no label",
    ]  # fmt: skip
    # A service makes of it what it likes.
    assert told("--rm-type remote_rm --rm-url http://127.0.0.1:1") == []


EVALUATED = "--eval-interval 1 --eval-prompt-data a {}/more.jsonl"


@pytest.mark.parametrize(
    ("words", "limit", "flag"),
    [
        ("", 30, "--rollout-max-prompt-len 30"),
        ("--check", 30, "--rollout-max-prompt-len 30"),
        ("--apply-chat-template --check", 50, "--rollout-max-prompt-len 50"),
        ("--apply-chat-template", 30, "--rollout-max-prompt-len 30"),
        ("--rollout-max-context-len 31", None, "--rollout-max-prompt-len 30"),
        ("--streaming-data", 30, "--rollout-max-prompt-len 30"),
        (f"--eval-max-prompt-len 30 {EVALUATED}", 99, "--eval-max-prompt-len 30"),
    ],
)
def test_prompts_that_are_all_too_long_are_told(tmp_path, told, words, limit, flag):
    write(tmp_path / "rows.jsonl", {"prompt": "x" * 40}, {"prompt": "x" * 35})
    write(tmp_path / "more.jsonl", {"prompt": "x" * 36})
    words += f" --rollout-max-prompt-len {limit}" if limit is not None else ""
    [line] = told(words)
    assert f" prompts have more than {flag} tokens, and none is left; the shortest has " in line
    evaluated = "eval" in flag
    assert (
        f"{'--eval-prompt-data' if evaluated else '--prompt-data'} {tmp_path}/{'more' if evaluated else 'rows'}" in line
    )
    # One that fits is enough. It has more bytes than tokens.
    # Seven tokens, and where there is a template those of its words.
    fitting = {"prompt": "hello" * 7}
    for name in ("rows", "more"):
        write(tmp_path / f"{name}.jsonl", {"prompt": "x" * 99}, fitting)
    assert told(words) == []


@pytest.mark.parametrize(
    "loss", ["sft_loss", "custom_loss --custom-loss-function-path slime.backends.megatron_utils.loss.sft_loss_function"]
)
def test_chats_that_are_cut_are_not_too_long(tmp_path, told, loss):
    write(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": "x" * 40}]})
    words = "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --rollout-max-context-len 9 --loss-type"
    assert [line for line in told(f"{words} {loss}") if "prompts have more than" in line] == []


def test_prompts_whose_bytes_fit_are_not_tokenised(tmp_path, told, monkeypatch):
    def load(*args, **keywords):
        raise AssertionError("the tokenizer was loaded")

    monkeypatch.setattr("slime.plan.prompt_files.load_tokenizer", load)
    write(tmp_path / "rows.jsonl", {"prompt": "x" * 99}, {"prompt": "x" * 28})
    assert told("--rollout-max-prompt-len 30") == []
    assert told() == []
    with pytest.raises(AssertionError):
        told("--rollout-max-prompt-len 29")


@pytest.mark.parametrize("words", ["--apply-chat-template", "--rollout-max-prompt-len 500"])
def test_a_chat_that_the_template_refuses_is_told_by_a_check(tmp_path, told, words):
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    write(tmp_path / "rows.jsonl", {"prompt": chat[1:]}, {"prompt": chat})
    assert told(f"{words} --check") == []
    [line] = told(f"{words} --check", template=REFUSING)
    assert line.startswith(f"{tmp_path}/rows.jsonl:2: the chat template refused") and "no system role" in line
    assert told(f"{words} --check --allow-bad-rows", template=REFUSING) == []


@pytest.mark.parametrize(
    ("words", "is_told"), [("--apply-chat-template", True), ("--rollout-max-prompt-len 500", False)]
)
def test_a_turn_that_ends_where_engines_do_not_stop_is_told_by_a_check(
    tmp_path, told, caplog, monkeypatch, words, is_told
):
    write(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": "b"}]})
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    monkeypatch.setattr("tests.plan.test_prompt_files.save_tokenizer", lambda path, _: tokenizer.save_pretrained(path))
    assert told(f"{words} --check") == []
    assert ("give --rollout-stop-token-ids 266" in caplog.text) is is_told


@pytest.mark.parametrize(("size", "problem"), [(300, []), (200, ["its tokenizer makes token 259 of a prompt in"])])
def test_the_tokenizer_of_another_model_is_told_by_a_check(tmp_path, told, size, problem):
    write(tmp_path / "rows.jsonl", {"prompt": "hello"})
    lines = told("--rollout-max-prompt-len 500 --check", vocab_size=size)
    assert [text in line for line, text in zip(lines, problem, strict=True)] == [True] * len(problem)


def test_a_tokenizer_that_cannot_be_loaded_is_told_by_a_check(tmp_path, told, monkeypatch):
    write(tmp_path / "rows.jsonl", {"prompt": "hello"})
    monkeypatch.setattr("tests.plan.test_prompt_files.save_tokenizer", lambda *given: None)
    [line] = told("--rollout-max-prompt-len 500 --check")
    assert line.startswith(f"--hf-checkpoint {tmp_path}/model: no tokenizer could be loaded from this directory")
