"""`--eval-config`: evaluation sets from a file."""

import json

import pytest

from slime.arguments.config_files.eval_file import load_eval_config, places_in
from slime.arguments.origins import Origin
from slime.arguments.parser import build_parser
from slime.utils.errors import UserError
from tests.support.models.args import parse, write_rows
from tests.support.tables.config_files import written

ARGS = build_parser().parse_args(
    [
        "--eval-temperature",
        "0.5",
        "--rollout-top-p",
        "0.9",
        "--rollout-max-response-len",
        "64",
        "--n-samples-per-eval-prompt",
        "3",
    ]
)


def load(tmp_path, text, name="eval.yaml"):
    return load_eval_config(ARGS, str(written(tmp_path, text, name)))


LISTED = """eval:
  defaults: {n_samples_per_eval_prompt: 2, temperature: 6e-1, rm_type: math, stop: [X]}
  datasets:
    - {name: aime, path: DIR/aime.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16}
    - name: gpqa
      path: /data/gpqa.jsonl@[0:10]
      top_p: 0.7
      metadata_overrides: {tool: none}
      app_service: {url: u}
      eval_task_timeout: 60
"""


def test_entry_beats_defaults_beats_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (aime, gpqa), violations = load(tmp_path, LISTED)
    assert violations == []
    assert (aime.n_samples_per_eval_prompt, aime.rm_type, aime.path) == (16, "deepscaler", f"{tmp_path}/DIR/aime.jsonl")
    assert (gpqa.n_samples_per_eval_prompt, gpqa.temperature, gpqa.rm_type, gpqa.stop) == (2, 0.6, "math", ["X"])
    assert (aime.top_p, gpqa.top_p, aime.max_response_len) == (0.9, 0.7, 64)
    assert gpqa.path == "/data/gpqa.jsonl@[0:10]" and gpqa.eval_task_timeout == 60
    assert type(gpqa.app_service) is dict and type(gpqa.metadata_overrides) is dict


def test_where_a_value_stands(tmp_path):
    text = (
        "defaults:\n  top_k: 3\n  top_p: 0.5\n"
        "datasets:\n  a: {path: /a}\n  b:\n    path: /b\n    top_k: 4\n    top_p: null\n"
    )
    (of_a, of_b), violations = load(tmp_path, text)
    assert violations == [] and (of_a.top_k, of_b.top_k, of_b.top_p) == (3, 4, 0.9), "null leaves it to the flags"
    place = places_in(str(tmp_path / "eval.yaml"))
    found = {(name, key): place(name, key) for name in "ab" for key in ("top_k", "top_p", "stop")}
    assert {names: line and line.rpartition(":")[2] for names, line in found.items()} == {
        ("a", "top_k"): "2", ("a", "top_p"): "3", ("a", "stop"): None,
        ("b", "top_k"): "8", ("b", "top_p"): None, ("b", "stop"): None,
    }  # fmt: skip
    assert places_in(None)("a", "top_k") is None


def test_files_of_functions_start_where_the_command_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "defaults: {custom_rm_path: rm.py:grade}\n"
        "datasets: {a: {path: a.jsonl}, b: {path: /b, custom_rm_path: m.f, custom_generate_function_path: g.py}}\n"
    )
    (a, b), violations = load(tmp_path, text)
    assert violations == [] and (a.path, a.custom_rm_path) == (f"{tmp_path}/a.jsonl", f"{tmp_path}/rm.py:grade")
    assert (b.custom_rm_path, b.custom_generate_function_path) == ("m.f", f"{tmp_path}/g.py")


def test_a_mapping_of_sets_at_the_top_and_json(tmp_path):
    text = json.dumps({"datasets": {"a": {"path": "/a"}, "b": {"path": "/b", "temperature": 0}}}, indent="\t")
    configs, violations = load(tmp_path, text, "eval.json")
    assert violations == [] and [(c.name, c.path, c.temperature) for c in configs] == [("a", "/a", 0.5), ("b", "/b", 0)]


def one(line):
    return f"datasets:\n  - name: aime\n    path: /a\n    {line}\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (one("temprature: 1"), 4, "evaluation set aime: unknown key temprature: did you mean temperature?"),
        (one("zzz: 1"), 4, "evaluation set aime: unknown key zzz: known: app_service, apply_chat_template"),
        (one("temperature: hot"), 4, "temperature is 'hot', must be a number"),
        (one("top_p: 3"), 4, "top_p is 3, must be a share of the probability, above 0 and at most 1"),
        (one("top_k: 0"), 4, "top_k is 0, must be -1 for no cut, or at least 1"),
        (one("stop: ['']"), 4, "stop holds an empty string"),
        ("defaults: {temprature: 1}\ndatasets: {a: {path: /a}}\n", 1, "eval.defaults: unknown key temprature"),
        (
            "defaults: {temperature: hot}\ndatasets: {a: {path: /a}, b: {path: /b}}\n",
            1,
            "eval.defaults: temperature is 'hot'",
        ),
        ("defaults: {path: /a}\ndatasets: {a: {path: /a}}\n", 1, "eval.defaults: unknown key path"),
        ("datasets:\n  - {path: /a}\n", 2, "the evaluation set needs a `name`"),
        ("datasets:\n  a: {top_p: 1}\n", 2, "path missing"),
        ("datasets:\n  - {name: a, path: /a}\n  - {name: a, path: /b}\n", 3, "need different names; a also stands at"),
        ("datasets:\n  a: /a\n", 1, "evaluation set a: expected `key: value` lines"),
        ("datasets: []\n", 1, "names no evaluation set"),
        ("eval:\n  defaults: {}\n", 2, "`datasets:` must be a list"),
        ("eval: {}\ndatasets: {}\n", 1, "nothing beside"),
        ("dataset: {}\n", 1, "did you mean datasets?"),
    ],
)
def test_wrong_lines(tmp_path, text, line, message):
    _, violations = load(tmp_path, text)
    assert len(violations) == 1
    assert f"{tmp_path}/eval.yaml:{line}: " in violations[0] and message in violations[0]


def test_all_mistakes_are_told(tmp_path):
    text = "defaults: {a: 1}\ndatasets:\n  - {name: x, path: /a, b: 1, top_k: x}\n  - {name: y, path: /a, c: 1}\n"
    assert len(load(tmp_path, text)[1]) == 4


def test_the_file_replaces_the_flag(tmp_path, caplog):
    rows = write_rows(tmp_path / "held_out.jsonl")
    (tmp_path / "eval.yaml").write_text(f"datasets:\n  - {{name: mine, path: {rows}, rm_type: f1}}\n")
    words = ["--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "2", "--eval-temperature", "0"]
    args = parse(tmp_path, *words, "--eval-prompt-data", "other", str(tmp_path / "none.jsonl"))
    assert [(c.name, c.rm_type, c.temperature) for c in args.eval_datasets] == [("mine", "f1", 0.0)]
    assert args.eval_prompt_data == ["mine", str(rows)]
    assert args.origins["eval_datasets"] is Origin.DERIVED
    assert "replaces --eval-prompt-data other" in caplog.text


def test_mistakes_are_reported_with_the_others(tmp_path):
    (tmp_path / "eval.yaml").write_text("datasets:\n  - {name: mine, path: /a, temprature: 1}\n")
    with pytest.raises(UserError) as caught:
        parse(tmp_path, "--eval-config", str(tmp_path / "eval.yaml"), "--rollout-temperature", "0")
    assert "eval.yaml:2: evaluation set mine: unknown key temprature" in str(caught.value)
    assert "--rollout-temperature 0" in str(caught.value)


def test_a_missing_data_file_is_told_with_its_line(tmp_path):
    (tmp_path / "eval.yaml").write_text("datasets:\n  - {name: mine, path: /nowhere.jsonl}\n  - {name: other}\n")
    with pytest.raises(UserError) as caught:
        parse(tmp_path, "--eval-config", str(tmp_path / "eval.yaml"), "--eval-interval", "1")
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/eval.yaml:3: evaluation set other: path missing",
        f"{tmp_path}/eval.yaml:2: path /nowhere.jsonl: there is no file /nowhere.jsonl",
    ]
