import pytest

from tests.support.args import parse
from tests.support.rules import assert_violation, violations

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
