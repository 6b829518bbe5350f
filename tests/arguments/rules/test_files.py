"""What must exist: a run is refused without it, a dry run tells it beside the plan."""

import re

import pytest

from slime.arguments import parse_args
from slime.plan import make_plan, render
from slime.utils.errors import UserError
from tests.support.args import command_line, parse
from tests.support.rules import assert_violation, violations

MISSING = [
    (
        "--prompt-data /nowhere/data.jsonl@[0:5]",
        "--prompt-data /nowhere/data.jsonl@[0:5]: there is no file /nowhere/data.jsonl",
    ),
    (
        "--eval-prompt-data a /nowhere/eval.parquet",
        "--eval-prompt-data /nowhere/eval.parquet: there is no file /nowhere/eval.parquet",
    ),
    (
        "--ref-load /nowhere/ref",
        "--ref-load /nowhere/ref: no such directory; give a Megatron or Hugging Face checkpoint",
    ),
    (
        "--initial-megatron-checkpoint /nowhere/first",
        "--initial-megatron-checkpoint /nowhere/first: no such directory; give a Megatron or Hugging Face checkpoint",
    ),
    (
        "--load /nowhere/run",
        "--load /nowhere/run is missing or empty; give a Megatron directory (with latest_checkpointed_iteration.txt) or a "
        "Hugging Face directory. A directory that does not exist yet is allowed only when --save names it too",
    ),
    (
        "--custom-rm-path /nowhere/reward.py:grade",
        "--custom-rm-path /nowhere/reward.py:grade: there is no file /nowhere/reward.py",
    ),
    (
        "--rollout-sample-hook-path /nowhere/hook.py",
        "--rollout-sample-hook-path /nowhere/hook.py: there is no file /nowhere/hook.py",
    ),
    (
        "--use-opd --opd-type megatron --opd-teacher-load /nowhere/teacher",
        "--opd-teacher-load /nowhere/teacher: no such directory; give a Megatron or Hugging Face checkpoint",
    ),
]  # fmt: skip


@pytest.mark.parametrize("words, message", MISSING, ids=[words for words, _ in MISSING])
def test_a_run_is_refused_and_a_dry_run_notes_it(tmp_path, words, message):
    assert_violation(tmp_path, words, message)
    assert message in parse(tmp_path, *words.split(), "--dry-run").plan_notes


def test_one_missing_checkpoint_is_said_once(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--use-kl-loss", "--ref-load", "/nowhere/ref")
    assert str(error.value).count("--ref-load") == 1


def test_an_unreadable_config_is_reported_alone(tmp_path):
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--hf-checkpoint", "/nowhere/model")
    assert str(error.value).count("\n") == 0


SHAPE = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 300 --swiglu "
    "--disable-bias-linear --normalization RMSNorm"
)


def test_a_plan_needs_no_checkpoint_when_the_shape_is_typed(tmp_path):
    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    words[1] = "/nowhere/model"
    words[words.index("--prompt-data") + 1] = "/nowhere/data.jsonl"
    args = parse_args(argv=[*words, *SHAPE.split(), "--dry-run"])
    assert args.padded_vocab_size == 384 and args.initial_weights.path == "/nowhere/model"
    assert args.plan_notes == [
        "--hf-checkpoint /nowhere/model: no such directory; give a Hugging Face checkpoint directory",
        "--prompt-data /nowhere/data.jsonl: there is no file /nowhere/data.jsonl",
    ]


def test_a_plan_without_any_shape_leaves_memory_out(tmp_path):
    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    words[1] = "/nowhere/model"
    plan = make_plan(parse_args(argv=[*words, "--dry-run"]))
    assert plan.memory is None
    assert "--num-layers" in render(plan)
    with pytest.raises(UserError, match="--hf-checkpoint /nowhere/model: no such directory"):
        parse_args(argv=words)


@pytest.mark.parametrize("flag", ["--save", "--dump-details", "--save-hf", "--save-debug-rollout-data"])
def test_a_place_that_cannot_be_written(tmp_path, flag):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "x" / "{rollout_id}.pt") if "rollout" in flag else str(tmp_path / "file" / "x")
    words = [flag, path, *([] if flag != "--save-hf" else ["--save", str(tmp_path / "run")])]
    message = f"{flag} {path}: {tmp_path}/file is a file, not a directory; give a place where you may write"
    assert_violation(tmp_path, words, message.replace("{rollout_id}", "{{rollout_id}}"))
    assert message in parse(tmp_path, *words, "--dry-run").plan_notes


def test_a_file_system_that_takes_no_files(tmp_path):
    note = next(note for note in parse(tmp_path, "--save", "/proc/x", "--dry-run").plan_notes if "/proc" in note)
    assert re.fullmatch(r"--save /proc/x: /proc cannot be written \(.*\); give a place where you may write", note)


def test_writable_places_are_left_as_they_were(tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    command_line(tmp_path)
    parse(tmp_path, "--save", str(tmp_path / "a" / "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*before, "model", "prompts.jsonl"})


def test_a_name_of_the_hub_gets_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--hf-checkpoint", "Qwen/Qwen3-4B")
    assert "`hf download Qwen/Qwen3-4B --local-dir " in str(error.value) and "\n" not in str(error.value)


SAVE = "the directory of checkpoints, such as --save outputs/checkpoints"


@pytest.mark.parametrize(
    "words, message",
    [
        ("--save-interval 2", f"--save-interval 2 needs --save, {SAVE}"),
        ("--keep-last 2", f"--keep-last 2 needs --save, {SAVE}"),
        ("--save-hf /export", f"--save-hf /export needs --save, {SAVE}"),
        (
            "--save {tmp}/run --save-hf {tmp}/model",
            "--save-hf {tmp}/model would overwrite --hf-checkpoint; give another directory",
        ),
        (
            "--save-debug-rollout-data /d/a.pt --save-debug-train-data /d/a.pt",
            "--save-debug-rollout-data and --save-debug-train-data name the same file /d/a.pt; give two, or --dump-details "
            "DIRECTORY",
        ),
        (
            "--load-debug-rollout-data x.pt --load-debug-rollout-data-subsample 2",
            "--load-debug-rollout-data-subsample 2.0: it must be above 0 and at most 1",
        ),
        (
            "--load-debug-rollout-data-subsample 0.5",
            "--load-debug-rollout-data-subsample 0.5 needs --load-debug-rollout-data, the dump to take it from",
        ),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


def test_a_directory_in_which_nothing_would_be_written_is_told(tmp_path, caplog):
    parse(tmp_path, "--save", str(tmp_path / "run"))
    assert f"--save {tmp_path}/run without --save-interval: no checkpoint is written" in caplog.text
    caplog.clear()
    for words in (
        ["--save-interval", "2"],
        ["--num-rollout", "0", "--eval-prompt-data", "a", f"{tmp_path}/prompts.jsonl"],
    ):
        parse(tmp_path, "--save", str(tmp_path / "run"), *words)
    assert "no checkpoint is written" not in caplog.text


@pytest.mark.parametrize(
    "words, told",
    [("", True), ("--load {save} --finetune", True), ("--load {save}", False), ("--load {save} --ckpt-step 1", False)],
)
def test_checkpoints_that_the_run_does_not_go_on_from_are_told(tmp_path, caplog, words, told):
    save = tmp_path / "earlier"
    (save / "iter_0000001").mkdir(parents=True)
    (save / "latest_checkpointed_iteration.txt").write_text("2\n")
    parse(tmp_path, "--save", str(save), "--save-interval", "1", *words.format(save=save).split())
    line = f"--save {save} holds the checkpoint of rollout 2, and this run does not go on from it"
    assert (line in caplog.text) is told


@pytest.mark.parametrize(
    "flag, known",
    [
        ("--save-hf", "{rollout_id} is"),
        ("--save-debug-rollout-data", "{rollout_id} is"),
        ("--save-debug-train-data", "{rollout_id} {rank} are"),
        ("--ci-save-grad-norm", "{role} {rollout_id} {step_id} are"),
    ],
)
def test_unknown_placeholders(tmp_path, caplog, flag, known):
    lines = violations(tmp_path, [flag, "/d/{stage}.pt"])
    assert f"{flag} /d/{{stage}}.pt: nothing fills in {{stage}}; only {known} filled in" in lines
    # Told once.
    assert "{stage}" not in caplog.text


def test_a_dump_that_overwrites_itself_is_warned_about(tmp_path, caplog):
    parse(tmp_path, "--save-debug-rollout-data", str(tmp_path / "x.pt"))
    assert "every rollout writes over the one before" in caplog.text
    caplog.clear()
    parse(tmp_path, "--save-debug-rollout-data", str(tmp_path / "{rollout_id}.pt"))
    assert caplog.text == ""


def test_what_follows_from_another_flag_is_not_asked_for(tmp_path):
    assert not any(line.startswith("--save-interval") for line in violations(tmp_path, "--release-train"))
