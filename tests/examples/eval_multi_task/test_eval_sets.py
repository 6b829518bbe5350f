"""The files of evaluation sets: what a run makes of them."""

from pathlib import Path

from examples.eval_multi_task import toy_task
from tests.support.models.args import parse
from tests.support.models.toy_rows import toy_rows

EXAMPLE = Path(__file__).parents[3] / "examples/eval_multi_task"


def sets_of(tmp_path, file):
    args = parse(tmp_path, "--eval-config", str(file), "--eval-interval", "5")
    return {each.name: each for each in args.eval_datasets}


def test_three_sets_with_rewards_and_numbers_of_answers_of_their_own(tmp_path, monkeypatch):
    # Of IFBench, which a run must find.
    (tmp_path / "instructions_registry.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    data = tmp_path / "data"
    for name in ("aime-2024/aime-2024", "gpqa/gpqa_eval", "ifbench/ifbench_eval"):
        (data / name).parent.mkdir(parents=True)
        (data / f"{name}.jsonl").write_text('{"prompt": "x", "label": "1", "metadata": {}}\n')
    file = tmp_path / "eval.yaml"
    # The test's model has room for 512 tokens.
    text = (EXAMPLE / "eval.yaml").read_text().replace("max_response_len: 16384", "max_response_len: 256")
    file.write_text(text.replace("DATA_DIR/", f"{data}/"))
    found = sets_of(tmp_path, file)
    assert {name: (each.rm_type, each.n_samples_per_eval_prompt) for name, each in found.items()} == {
        "aime": ("deepscaler", 16), "gpqa": ("gpqa", 2), "ifbench": ("ifbench", 1),
    }  # fmt: skip
    assert {(each.max_response_len, each.top_p) for each in found.values()} == {(256, 0.7)}


def test_the_toy_task_brings_three_sets_along(tmp_path):
    directory = tmp_path / "task"
    directory.mkdir()
    task = toy_rows(directory, toy_task)
    found = sets_of(tmp_path, directory / "eval.yaml")
    answers = {name: (each.rm_type, each.n_samples_per_eval_prompt) for name, each in found.items()}
    assert answers == {"held_out": ("math", 1), "carries": ("math", 4), "letters": ("gpqa", 2)}
    assert len(task["carries"]) == 32 and all(row["metadata"]["carries"] for row in task["carries"])
    assert {(row["label"], *row["metadata"]["valid_letters"]) for row in task["letters"]} == {("A", "A", "B")}
