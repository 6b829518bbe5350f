"""What must exist: a run is refused without it, a dry run tells it beside the plan."""

import re

import pytest

from slime.arguments import parse_args
from slime.arguments.violations import Refusal
from slime.plan import make_plan, render
from slime.utils.errors import UserError
from tests.support.models.args import command_line, parse
from tests.support.tables.rules import assert_violation, violations


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


@pytest.mark.parametrize("flag", ["--save", "--dump-details", "--update-weight-disk-dir", "--save-debug-rollout-data"])
def test_a_file_in_the_place_of_a_directory_is_told_and_a_dump_is_written_again(tmp_path, flag):
    (tmp_path / "file").write_text("")
    notes = parse(tmp_path, flag, str(tmp_path / "file"), "--dry-run").plan_notes
    message = f"{flag} {tmp_path}/file: {tmp_path}/file is a file, not a directory; give a place where you may write"
    assert (message in notes) == (flag != "--save-debug-rollout-data")


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


def test_a_relative_directory_of_a_submitted_job_is_told(tmp_path, caplog, monkeypatch):
    of_job = tmp_path / "session/runtime_resources/working_dir_files/_ray_pkg_0"
    of_job.mkdir(parents=True)
    monkeypatch.chdir(of_job)
    parse(tmp_path, "--save", str(tmp_path / "run"), "--save-interval", "1")
    assert "submitted job" not in caplog.text
    parse(tmp_path, "--save", "run", "--save-interval", "1")
    assert f"--save {of_job}/run: that is in Ray's copy of the directory of a submitted job" in caplog.text


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


@pytest.mark.parametrize("flag", ["--ci-save-grad-norm", "--ci-load-grad-norm"])
def test_gradient_norms_of_steps_have_names_of_their_own(tmp_path, flag):
    lines = violations(tmp_path, [flag, f"{tmp_path}/{{rollout_id}}.json"])
    assert [line for line in lines if line.startswith(f"{flag} {tmp_path}/{{rollout_id}}.json: several steps would")]
    parse(tmp_path, flag, f"{tmp_path}/{{rollout_id}}-{{step_id}}.json")
    lines = violations(tmp_path, [flag, f"{tmp_path}/{{rollout_id}}-{{step_id}}.json", "--advantage-estimator", "ppo"])
    assert any("with a critic also {role}" in line for line in lines)


def test_a_dump_that_overwrites_itself_is_warned_about(tmp_path, caplog):
    parse(tmp_path, "--save-debug-rollout-data", str(tmp_path / "x.pt"))
    assert "every rollout writes over the one before" in caplog.text
    caplog.clear()
    parse(tmp_path, "--save-debug-rollout-data", str(tmp_path / "{rollout_id}.pt"))
    assert caplog.text == ""


def test_what_follows_from_another_flag_is_not_asked_for(tmp_path):
    assert not any(line.startswith("--save-interval") for line in violations(tmp_path, "--release-train"))


def test_an_export_needs_config_and_tokenizer_of_a_checkpoint(tmp_path):
    _, _, *words = command_line(tmp_path)
    assert words[0] == "--model-args-from-hf"
    with pytest.raises(Refusal) as error:
        parse_args(argv=[*words, "--debug-train-only", "--save", str(tmp_path), "--save-hf", str(tmp_path / "export")])
    assert ("--save-hf", "--hf-checkpoint") in [violation.flags for violation in error.value.violations]
