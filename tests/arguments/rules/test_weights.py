import pytest

from tests.support.args import parse
from tests.support.rules import assert_violation, violations

RELEASE = "--release-train recreates the trainer from a checkpoint for each step"
COMPLETE_DELTA = (
    "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir /d "
    "--update-weight-local-checkpoint-dir /l"
)
COMPLETE_RELEASE = "--release-train --save /s --update-weight-transport disk --update-weight-disk-dir /d"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--only-train-params-name-list a --freeze-params-name-list b",
            "--only-train-params-name-list and --freeze-params-name-list exclude each other: each says which parameters are "
            "trained; keep one",
        ),
        (
            "--freeze-params-name-list layers(",
            "--freeze-params-name-list layers(: it is no regular expression (missing ), unterminated subpattern at position "
            "6); write one such as 'layers\\.0\\.'",
        ),
        (
            "--update-weight-transport disk",
            "--update-weight-transport disk needs --update-weight-disk-dir, a directory that trainer and engines share",
        ),
        (
            "--update-weight-mode delta",
            "--update-weight-mode delta with --update-weight-transport nccl: deltas travel as files; give "
            "--update-weight-transport disk",
        ),
        (
            "--update-weight-mode delta --update-weight-transport disk",
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, a directory on every engine host to which "
            "the deltas are applied",
        ),
        (
            f"{COMPLETE_DELTA} --colocate",
            "--update-weight-mode delta with --colocate: weights are handed over in memory there; give "
            "--update-weight-mode full",
        ),
        ("--release-train", f"{RELEASE}; give --save"),
        (
            "--release-train",
            f"{RELEASE} and hands weights over as files: give --update-weight-mode full --update-weight-transport disk "
            "instead of full over nccl",
        ),
        (f"{COMPLETE_RELEASE} --save-interval 2", f"{RELEASE}, so --save-interval 2 must be 1"),
        (
            f"{COMPLETE_RELEASE} --train-backend fsdp",
            "--release-train with --train-backend fsdp: only megatron can; drop it",
        ),
        (
            f"{COMPLETE_RELEASE} --advantage-estimator ppo",
            "--release-train with --advantage-estimator ppo: the critic would be lost; drop it",
        ),
        (f"{COMPLETE_RELEASE} --keep-old-actor", "--release-train with --keep-old-actor: the copy would be lost; drop one"),
        (
            "--use-stateless-adam --no-save-optim --optimizer sgd",
            "--use-stateless-adam with --optimizer sgd: give --optimizer adam",
        ),
        (
            "--use-stateless-adam --no-save-optim --no-decoupled-weight-decay",
            "--use-stateless-adam with --no-decoupled-weight-decay: its decay is decoupled; drop one of them",
        ),
        ("--use-stateless-adam", "--use-stateless-adam has no optimizer state to save: add --no-save-optim"),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


@pytest.mark.parametrize("words", [COMPLETE_DELTA, COMPLETE_RELEASE, "--use-stateless-adam --no-save-optim"])
def test_complete_settings_break_no_rule(tmp_path, words):
    parse(tmp_path, *words.split(), "--dry-run")


def test_a_released_trainer_saves_every_rollout(tmp_path):
    assert parse(tmp_path, *COMPLETE_RELEASE.split(), "--dry-run").save_interval == 1


def test_one_advice_for_deltas_of_colocated_engines(tmp_path):
    lines = violations(tmp_path, "--update-weight-mode delta --colocate")
    assert not any("give --update-weight-transport disk" in line or "local-checkpoint-dir" in line for line in lines)


def test_an_old_actor_in_the_synchronous_loop_is_warned_about(tmp_path, caplog):
    parse(tmp_path, "--keep-old-actor", "--dry-run")
    assert (
        caplog.text.count("--keep-old-actor without train_async.py: a rollout trains on the weights that generated it")
        == 1
    )
    caplog.clear()
    parse(tmp_path, "--keep-old-actor", "--debug-train-only", "--dry-run")
    assert "--keep-old-actor" not in caplog.text
    parse(tmp_path, "--keep-old-actor", "--use-rollout-logprobs", "--dry-run")
    assert "the old log-probs come from those before" not in caplog.text
