"""What a person reads when a run has ended, and that the command it names goes on."""

from types import SimpleNamespace

import pytest

from slime.arguments.checkpoints import POINTER
from slime.ray.run_ending import closing_lines

COMMAND = ["python", "train.py", "--load", "hf/model", "--num-rollout", "8", "--ckpt-step=3", "--lr", "1e-6"]


def make(save, **values):
    defaults = {
        "has_trainer": True, "num_rollout": 8, "save": save and str(save), "load": save and str(save), "save_interval": 2,
        "start_rollout_id": 0, "rollouts_done": 6,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **values})


@pytest.fixture
def saved(tmp_path):
    (tmp_path / POINTER).write_text("3")
    return tmp_path


def test_an_interrupted_run_names_its_checkpoint_what_is_lost_and_the_same_command(saved):
    command = ["python", "train.py", "--load", str(saved), "--save", str(saved)]
    kept, go_on = closing_lines(make(saved), command, finished=False)
    assert kept == f"kept: the checkpoint of rollout 3 in {saved}/iter_0000003; rollouts 4 to 5 are lost"
    assert go_on == f"go on: python train.py --load {saved} --save {saved}"
    assert closing_lines(make(saved, rollouts_done=5), command, finished=False)[0].endswith("; rollout 4 is lost")
    for done in (4, None):
        assert closing_lines(make(saved, rollouts_done=done), command, finished=False)[0].endswith("iter_0000003")


def test_the_command_loads_what_was_saved_and_forgets_where_this_start_began(saved):
    words = [*COMMAND, "--finetune", "--save", str(saved), "--start-rollout-id", "4"]
    _, go_on = closing_lines(make(saved, load="hf/model"), words, finished=False)
    assert go_on == f"go on: python train.py --num-rollout 8 --lr 1e-6 --save {saved} --load {saved}"


def test_a_finished_run_says_how_to_train_on(saved):
    (saved / POINTER).write_text("7")
    kept, more = closing_lines(make(saved, rollouts_done=8), [*COMMAND, "--num-epoch", "2"], finished=True)
    assert kept == f"kept: the checkpoint of rollout 7 in {saved}/iter_0000007"
    assert more == ("to train on, raise --num-rollout: python train.py --load hf/model --lr 1e-6 --num-rollout 16")


def test_without_a_checkpoint_it_is_said_why(tmp_path):
    (line,) = closing_lines(make(None), COMMAND, finished=False)
    assert line == "kept: no checkpoint, since --save was not given; what rollouts 0 to 5 taught is lost"
    kept, again = closing_lines(make(tmp_path), ["train.py", "--lr", "1"], finished=False)
    assert kept == "kept: no checkpoint yet (--save-interval 2); rollouts 0 to 5 are lost"
    assert again == "start again: train.py --lr 1"


@pytest.mark.parametrize("values", [{"has_trainer": False}, {"num_rollout": 0}])
def test_a_run_that_trains_nothing_has_nothing_to_keep(saved, values):
    assert closing_lines(make(saved, **values), COMMAND, finished=True) == []


@pytest.mark.parametrize(
    "words",
    [
        ["--wandb-key", "hush"],
        ["--wandb-key=hush"],
        ["--train-env-vars", '{"HF_TOKEN": "hush", "OMP_NUM_THREADS": "2"}'],
        ["--train-env-vars", '{"HF_TOKEN": hush'],
        ["--rm-url", "https://me:hush@host/?api_key=hush"],
    ],
)
def test_secrets_stay_out_of_the_command(saved, words):
    go_on = closing_lines(make(saved), ["train.py", *words, "--lr", "1"], finished=False)[1]
    assert "hush" not in go_on and "redacted" in go_on and go_on.endswith("# with what is redacted put back in")
