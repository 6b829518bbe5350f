"""What a person reads when a run has ended, and that the command it names goes on."""

import itertools
from types import SimpleNamespace

import pytest

from slime.arguments.checkpoints import WeightSource
from slime.arguments.groups.training_flags import CHECKPOINTS
from slime.arguments.origins import Origin
from slime.arguments.parser import build_parser
from slime.ray import session
from slime.ray.continuation import OF_THIS_START, closing_lines, words_of_restart
from slime.ray.driver import RunProgress
from slime.utils.checkpoint_directory import POINTER
from slime.utils.errors import UserError

COMMAND = ["python", "train.py", "--load", "hf/model", "--num-rollout", "8", "--ckpt-step=3", "--lr", "1e-6"]


def make(save, **values):
    """The arguments of a run, and how far it has come."""
    arguments = {
        "has_trainer": True, "save": save and str(save), "load": save and str(save), "save_interval": 2,
        "initial_weights": None, "typed_flags": set(), "origins": {}, "role_overrides": {},
        "custom_config_path": "/run.yaml", "megatron_config_path": "/roles.yaml",
    }  # fmt: skip
    progress = {"start_rollout_id": 0, "num_rollout": 8, "rollouts_done": 6, "rollout_saved": 3}
    of_progress = {name: values.pop(name, default) for name, default in progress.items()}
    return SimpleNamespace(**{**arguments, **values}), RunProgress(**of_progress)


@pytest.fixture
def saved(tmp_path):
    (tmp_path / POINTER).write_text("3")
    return tmp_path


def test_an_interrupted_run_names_its_checkpoint_what_is_lost_and_the_same_command(saved):
    command = ["python", "train.py", "--load", str(saved), "--save", str(saved)]
    kept, go_on = closing_lines(*make(saved), command, finished=False)
    assert kept == f"kept: the checkpoint of rollout 3 in {saved}/iter_0000003; rollouts 4 to 5 are lost"
    assert go_on == f"go on: python train.py --load {saved} --save {saved}"
    assert closing_lines(*make(saved, rollouts_done=5), command, finished=False)[0].endswith("; rollout 4 is lost")
    for done in (4, 0):
        assert closing_lines(*make(saved, rollouts_done=done), command, finished=False)[0].endswith("iter_0000003")


def test_the_command_loads_what_was_saved_and_forgets_where_this_start_began(saved):
    words = [*COMMAND, "--finetune", "--save", str(saved), "--start-rollout-id", "4"]
    _, go_on = closing_lines(*make(saved, load="hf/model"), words, finished=False)
    assert go_on == f"go on: python train.py --num-rollout 8 --lr 1e-6 --save {saved} --load {saved}"


def test_a_finished_run_says_how_to_train_on(saved):
    (saved / POINTER).write_text("7")
    kept, more = closing_lines(
        *make(saved, rollouts_done=8, rollout_saved=7), [*COMMAND, "--num-epoch", "2"], finished=True
    )
    assert kept == f"kept: the checkpoint of rollout 7 in {saved}/iter_0000007"
    assert more == ("to train on, raise --num-rollout: python train.py --load hf/model --lr 1e-6 --num-rollout 16")


def test_without_a_checkpoint_it_is_said_why(tmp_path):
    (line,) = closing_lines(*make(None), COMMAND, finished=False)
    assert line == "kept: no checkpoint, since --save was not given; what rollouts 0 to 5 taught is lost"
    kept, again = closing_lines(*make(tmp_path), ["train.py", "--lr", "1"], finished=False)
    assert kept == "kept: no checkpoint of this run yet (--save-interval 2); rollouts 0 to 5 are lost"
    assert again == "start again: train.py --lr 1"
    kept, _ = closing_lines(*make(tmp_path, save_interval=None), COMMAND, finished=True)
    assert kept == "kept: no checkpoint of this run, since --save-interval was not given; rollouts 0 to 5 are lost"
    kept, _ = closing_lines(*make(tmp_path, rollouts_done=0), COMMAND, finished=False)
    assert kept == "kept: no checkpoint of this run yet (--save-interval 2)"


@pytest.mark.parametrize("flag", sorted(OF_THIS_START))
def test_what_held_for_the_first_start_is_not_said_again(saved, flag):
    action = build_parser()._option_string_actions[flag]
    values = ["3"] if action.nargs is None else []
    assert OF_THIS_START[flag] == len(values)
    words = ["train.py", "--load", "old", flag, *values, "--seed", "5", "--save", str(saved)]
    go_on = closing_lines(*make(saved, load="old"), words, finished=False)[1]
    assert go_on == f"go on: train.py --seed 5 --save {saved} --load {saved}"


def test_every_flag_of_loading_is_said_again_or_left_out():
    """A new one has to be decided about. What stays says where a reference or weights come from when --load has none."""
    of_loading = itertools.takewhile(lambda flag: flag.dest != "save", CHECKPOINTS.flags)
    flags = {name for flag in of_loading for name in flag.names}
    assert flags - set(OF_THIS_START) == {"--load", "--ref-load", "--ref-ckpt-step"}
    assert set(OF_THIS_START) - flags == {"--start-rollout-id", "--fresh-data-state"}


def test_a_flag_of_the_first_start_that_stands_in_a_script_is_named(saved):
    run = make(saved, typed_flags={"finetune", "lr"})
    assert closing_lines(*run, ["bash", "run.sh"], finished=False)[1].endswith(
        "    # without --finetune, which the script or its file of flags gives"
    )


def test_a_run_starts_again_by_words_that_load_its_newest_checkpoint_where_it_has_one(saved):
    words = [*COMMAND, "--save", str(saved)]
    assert words_of_restart(*make(saved, load="hf/model"), words) == [
        "python", "train.py", "--num-rollout", "8", "--lr", "1e-6", "--save", str(saved), "--load", str(saved)
    ]  # fmt: skip
    assert words_of_restart(*make(saved, rollout_saved=None), words) == words
    of_file = {"origins": {"load": Origin.YAML}, "load": "hf", "typed_flags": {"finetune"}}
    with pytest.raises(
        UserError, match="--max-restarts: .*only without --finetune, .* and with `load: .*` in /run.yaml"
    ):
        words_of_restart(*make(saved, **of_file), words)


def test_a_value_of_a_file_that_would_overrule_the_command_is_to_be_changed_there(saved):
    (saved / POINTER).write_text("7")
    values = {"load": "hf", "rollouts_done": 8, "rollout_saved": 7}
    of_file = {"load": Origin.YAML, "num_rollout": Origin.YAML}
    run = make(saved, origins=of_file, typed_flags={"finetune"}, **values)
    assert closing_lines(*run, ["train.py"], finished=True)[1] == (
        f"to train on, raise --num-rollout: train.py --load {saved} --num-rollout 16"
        "    # without --finetune, which the script or its file of flags gives"
        f"    # with `load: {saved}` in /run.yaml and `num_rollout: 16` in /run.yaml, which goes before the command line"
    )
    run = make(saved, origins=of_file, role_overrides={"actor": {"load": "hf"}}, **values)
    assert closing_lines(*run, ["train.py"], finished=False)[1].endswith(
        f"--load {saved}    # with `load: {saved}` in /roles.yaml, which goes before the command line"
    )
    # What stands there may stay.
    run = make(saved, origins=of_file, **{**values, "load": str(saved)})
    assert closing_lines(*run, ["train.py"], finished=False)[1] == "go on: train.py"


def test_checkpoints_of_another_run_are_not_called_this_ones(saved):
    words = ["train.py", "--load", "hf", "--finetune", "--save", str(saved)]
    # Nothing is published yet, or an end came while the first checkpoint was.
    for own in (None, 1):
        run = make(saved, load="hf", initial_weights=WeightSource("hf", "hf"), rollout_saved=own)
        kept, again = closing_lines(*run, words, finished=False)
        assert kept == (
            f"kept: no checkpoint of this run yet (--save-interval 2); those in --save {saved} are of an earlier one; "
            "rollouts 0 to 5 are lost"
        )
        assert again == f"start again: {' '.join(words)}"
    # An end while the next checkpoint was published: this run's older one is still the newest.
    run = make(saved, load="hf", rollout_saved=5)
    assert closing_lines(*run, words, finished=False)[0].startswith(
        f"kept: the checkpoint of rollout 3 in {saved}/iter_0000003; rollouts 4 to 5"
    )


def test_before_its_first_checkpoint_a_resumed_run_goes_on_as_it_started(saved):
    words = ["train.py", "--load", str(saved), "--ckpt-step", "1", "--no-load-optim"]
    source = WeightSource("megatron", str(saved), step=1, resume=True)
    run = make(saved, initial_weights=source, start_rollout_id=2, rollouts_done=4, rollout_saved=None)
    kept, go_on = closing_lines(*run, words, finished=False)
    assert kept == (
        f"kept: the checkpoint of rollout 1 in {saved}/iter_0000001, where this start began; rollouts 2 to 3 are lost"
    )
    assert go_on == f"go on: {' '.join(words)}"


def test_a_finished_run_that_is_started_again_is_told_how_to_train_on(saved):
    """Epochs are counted when the data are there, so this start could not know that nothing is left."""
    words = ["train.py", "--load", str(saved), "--ckpt-step", "3", "--num-epoch", "2"]
    source = WeightSource("megatron", str(saved), step=3, resume=True)
    run = make(saved, initial_weights=source, num_rollout=4, start_rollout_id=4, rollouts_done=4, rollout_saved=None)
    kept, more = closing_lines(*run, words, finished=True)
    assert kept == f"kept: the checkpoint of rollout 3 in {saved}/iter_0000003, where this start began"
    assert more == f"to train on, raise --num-rollout: train.py --load {saved} --ckpt-step 3 --num-rollout 8"


@pytest.mark.parametrize("broken", ["command", "checkpoint"])
def test_what_cannot_be_told_leaves_the_exit_status(saved, monkeypatch, caplog, broken):
    if broken == "command":
        monkeypatch.setenv("SLIME_START_COMMAND", "bash 'run.sh")
    else:
        (saved / POINTER).write_bytes(b"\xff")
    with caplog.at_level("DEBUG"):
        session._tell_what_is_kept(*make(saved), ["--seed", "5"])
    if broken == "command":
        assert "--seed 5" in caplog.text
    else:
        assert "what was kept could not be told" in caplog.text


@pytest.mark.parametrize("values", [{"has_trainer": False}, {"num_rollout": 0}])
def test_a_run_that_trains_nothing_has_nothing_to_keep(saved, values):
    assert closing_lines(*make(saved, **values), COMMAND, finished=True) == []


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
    go_on = closing_lines(*make(saved), ["train.py", *words, "--lr", "1"], finished=False)[1]
    assert "hush" not in go_on and "redacted" in go_on and go_on.endswith("# with what is redacted put back in")
