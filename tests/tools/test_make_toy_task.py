"""The toy task: held-out problems stay held out, the answers are right, and the checkpoint is what transformers reads."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "make_toy_task.py"
SMALL = ("--train-size", "64", "--eval-size", "32", "--sft-size", "200", "--hidden-size", "32", "--ffn-hidden-size", "48",
         "--head-dim", "8", "--num-layers", "3")  # fmt: skip


def run_tool(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=60)


def read_rows(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    result = run_tool(str(directory), "--seed", "5", *SMALL)
    assert result.returncode == 0, result.stderr
    return directory


@pytest.fixture(scope="module")
def tokenizer(task: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(task / "model")


def operands_of(row: dict) -> tuple[int, int]:
    text = row.get("prompt", row.get("messages"))[0]["content"]
    left, right = re.fullmatch(r"What is (\d+)\+(\d+)\?", text).groups()
    return int(left), int(right)


def test_sizes_and_fields(task: Path) -> None:
    for name, size in (("train", 64), ("eval", 32)):
        rows = read_rows(task, name)
        assert len(rows) == size
        for row in rows:
            assert set(row) == {"prompt", "label", "metadata"}
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["label"] == str(sum(operands_of(row)))
            assert row["metadata"]["operands"] == list(operands_of(row))
    demonstrations = read_rows(task, "sft")
    assert len(demonstrations) == 200
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in demonstrations)


def test_held_out_problems_are_in_no_training_file_in_either_order(task: Path) -> None:
    held_out = {frozenset(operands_of(row)) for row in read_rows(task, "eval")}
    seen = {frozenset(operands_of(row)) for name in ("train", "sft") for row in read_rows(task, name)}
    assert len(held_out) == 32
    assert not held_out & seen


def test_demonstrations_are_wrong_exactly_where_a_carry_was_forgotten(task: Path) -> None:
    wrong_with_carry, with_carry = 0, 0
    for row in read_rows(task, "sft"):
        left, right = operands_of(row)
        answer = row["messages"][1]["content"]
        boxed = int(re.fullmatch(r".* \\boxed\{(\d+)\}", answer).group(1))
        has_carry = left % 10 + right % 10 >= 10
        assert row["metadata"]["carries"] == int(has_carry)
        assert boxed == left + right if not has_carry else boxed in (left + right, left + right - 10)
        assert ("+1=" in answer and boxed == left + right) or not has_carry or boxed == left + right - 10
        wrong_with_carry += boxed != left + right
        with_carry += has_carry
    # 0.8 of 200 problems and the default forget rate, within four standard deviations.
    assert 137 <= with_carry <= 183
    assert 0.45 <= wrong_with_carry / with_carry <= 0.8


@pytest.mark.parametrize(
    ("left", "right", "forgotten", "expected"),
    [
        (47, 38, None, r"7+8=15 4+3+1=8 \boxed{85}"),
        (47, 38, [True, False], r"7+8=15 4+3=7 \boxed{75}"),
        (95, 67, None, r"5+7=12 9+6+1=16 \boxed{162}"),
        (123, 456, None, r"3+6=9 2+5=7 1+4=5 \boxed{579}"),
        (999, 111, None, r"9+1=10 9+1+1=11 9+1+1=11 \boxed{1110}"),
        (999, 111, [False, True, True], r"9+1=10 9+1+1=11 9+1=10 \boxed{1010}"),
        (4, 5, None, r"4+5=9 \boxed{9}"),
    ],
)
def test_working_is_written_column_by_column(left, right, forgotten, expected) -> None:
    from tools.make_toy_task import Problem

    assert Problem(left, right).working(forgotten) == expected


def test_built_in_math_reward_grades_the_answers(task: Path) -> None:
    from slime.rollout.rm_hub import math_utils

    row = read_rows(task, "train")[0]
    right, wrong = row["label"], str(int(row["label"]) - 10)
    assert math_utils.extract_answer(f"1+1=2 \\boxed{{{right}}}") == right
    assert math_utils.grade_answer_verl(f"\\boxed{{{wrong}}}", right) is False


def test_tokenizer_renders_chatml_and_round_trips(task: Path, tokenizer) -> None:
    for row in read_rows(task, "sft"):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        question, answer = (message["content"] for message in row["messages"])
        assert text == (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert tokenizer.decode(ids) == text
    anything = "Grüße, \\boxed  { 12\n\n} 数学 <tab>\t"
    assert tokenizer.decode(tokenizer.encode(anything)) == anything


def test_prompt_is_a_token_prefix_of_the_conversation(task: Path, tokenizer) -> None:
    messages = read_rows(task, "sft")[0]["messages"]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(prompt)] == prompt


def test_digits_words_and_box_are_single_tokens(tokenizer) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("4+38=12 \\boxed{85}") == [*"4+38=12", "Ġ", "\\boxed{", *"85", "}"]
    assert tokenizer.tokenize("What is <|im_start|>assistant") == ["What", "Ġis", "Ġ", "<|im_start|>", "assistant"]


def test_checkpoint_loads_and_equals_an_independent_count(task: Path, tokenizer) -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model, info = Qwen3ForCausalLM.from_pretrained(task / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    # hidden 32, 4 heads of 8, 2 key/value heads, ffn 48: attention 32*32*2 + 32*16*2, MLP 3*32*48, norms 2*32 + 2*8
    of_a_layer = 3072 + 4608 + 80
    assert sum(p.numel() for p in model.parameters()) == 3 * of_a_layer + 32 + 32 * len(tokenizer)
    assert json.loads((task / "task.json").read_text())["parameters"] == 3 * of_a_layer + 32 + 32 * len(tokenizer)


def test_weights_have_the_stated_scale(task: Path) -> None:
    from safetensors.numpy import load_file

    weights = load_file(task / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert weights["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(32**-0.5, rel=0.1)
    assert weights["model.layers.2.mlp.down_proj.weight"].std() == pytest.approx(48**-0.5 * 6**-0.5, rel=0.1)
    assert numpy.all(weights["model.norm.weight"] == 1)


def test_equal_arguments_give_equal_bytes_and_another_seed_does_not(task: Path, tmp_path: Path) -> None:
    assert run_tool(str(tmp_path / "same"), "--seed", "5", *SMALL).returncode == 0
    assert run_tool(str(tmp_path / "other"), "--seed", "6", *SMALL).returncode == 0
    names = sorted(path.relative_to(task) for path in task.rglob("*") if path.is_file())
    assert len(names) == 9
    for name in names:
        assert (tmp_path / "same" / name).read_bytes() == (task / name).read_bytes(), name
    for name in ("train.jsonl", "eval.jsonl", "sft.jsonl", "model/model.safetensors"):
        assert (tmp_path / "other" / name).read_bytes() != (task / name).read_bytes(), name


def test_complete_task_is_not_written_over_without_force(task: Path) -> None:
    before = (task / "train.jsonl").read_bytes()
    result = run_tool(str(task), "--seed", "9", *SMALL)
    assert result.returncode == 2
    assert "--force" in result.stderr and "Traceback" not in result.stderr
    assert (task / "train.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--digits", "0"), "--digits 0"),
        (("--forget-rate", "1.5"), "--forget-rate 1.5"),
        (("--num-attention-heads", "3"), "--num-attention-heads 3"),
        (("--digits", "1", "--train-size", "60", "--eval-size", "4"), "found only 41 of 60"),
        (("--train-size", "999999999"), "found only 3839 of 999999999 distinct problems with --digits 2"),
        (("--train-size", "999999999", "--carry-share", "0"), "found only 1994 of 999999999"),
        (("--train-size", "999999999", "--carry-share", "1"), "found only 1589 of 999999999"),
        (
            ("--train-size", "999999999", "--data", f"{TOOL.parents[1]}/examples/calculator/toy_task.py:write_data"),
            "--eval-size 256 and --train-size 999999999: the task has 8100 distinct problems",
        ),
    ],
)
def test_impossible_arguments_are_refused_by_name(tmp_path: Path, arguments, named) -> None:
    result = run_tool(str(tmp_path), *arguments)
    assert result.returncode == 2
    assert named in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "task.json").exists()


@pytest.mark.parametrize(("digits", "share"), [(1, 0), (1, 0.5), (2, 0), (2, 0.5), (2, 1), (3, 0)])
def test_the_number_of_problems_is_that_of_a_count(digits: int, share: float) -> None:
    from tools.make_toy_task import Problem, count_problems

    numbers = range(10 ** (digits - 1), 10**digits)
    problems = [Problem(left, right) for left in numbers for right in range(left, numbers.stop)]
    wanted = (0 < share < 1) or digits == 1
    assert count_problems(digits, share) == sum(wanted or (one.carries > 0) == bool(share) for one in problems)


def test_all_problems_that_there_are_may_be_asked_for(tmp_path: Path) -> None:
    result = run_tool(str(tmp_path), *SMALL, "--digits", "1", "--train-size", "41", "--eval-size", "4")
    assert result.returncode == 0, result.stderr
    assert len({frozenset(operands_of(row)) for name in ("train", "eval") for row in read_rows(tmp_path, name)}) == 45


def test_what_lasts_tells_how_far_it_is(tmp_path: Path, monkeypatch, capsys) -> None:
    from tools import make_toy_task

    arguments = make_toy_task.build_parser().parse_args([str(tmp_path), *SMALL])
    make_toy_task.write_data(tmp_path, arguments)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(make_toy_task, "TOLD_EVERY_SECONDS", 0.0)
    make_toy_task.write_data(tmp_path, arguments)
    told = capsys.readouterr().err
    assert "drawing problems: 100%" in told and "64/64" in told and "drawing demonstrations: 100%" in told


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start = time.monotonic()
    command = [sys.executable, "-X", "importtime", str(TOOL), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert time.monotonic() - start < 10
    assert result.returncode == 0 and "OUTPUT_DIR" in result.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "numpy", "tokenizers"}


def test_a_task_is_kept_for_the_options_that_made_it_alone(task: Path, tmp_path: Path) -> None:
    task = shutil.copytree(task, tmp_path / "task")
    mark = task / "task.json"
    kept = run_tool(str(task), "--reuse", "--seed", "5", *SMALL)
    assert (kept.returncode, kept.stdout) == (0, "reused\n"), kept.stderr
    # One that was made before there was such an option.
    made = json.loads(mark.read_text())
    del made["digits"]
    mark.write_text(json.dumps(made))
    assert run_tool(str(task), "--reuse", "--seed", "5", *SMALL).stdout == "reused\n"
    refused = run_tool(str(task), "--reuse", "--seed", "6", *SMALL, "--digits", "3", "--data", "x.py:write")
    assert refused.returncode == 2 and refused.stdout == ""
    assert f"{task} holds a task that was made with --seed 5, no --data, --digits 2: choose another" in refused.stderr
    assert run_tool(str(task), "--reuse", "--force").returncode == 2
