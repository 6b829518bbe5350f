"""Which runs are alike: event files of a tracker of ours, read and compared."""

from pathlib import Path

import pytest
from tensorboard.summary import Writer

from slime.utils.plugin_loader import load_function

EXAMPLE = Path(__file__).parents[3] / "examples/reproducibility/compare.py"
bits, main = (load_function(f"{EXAMPLE}:{name}") for name in ("bits", "main"))
METRICS = {
    "train/loss": [0.5, 0.25, float("nan")],
    "rollout/raw_reward": [0.0, 1.0],
    "perf/step_time": [1.0, 2.0],
}  # fmt: skip


def write(directory: Path, **changes) -> str:
    directory.mkdir()
    writer = Writer(str(directory))
    for tag, values in {**METRICS, **{name.replace("_", "/", 1): value for name, value in changes.items()}}.items():
        for step, value in enumerate(values):
            writer.add_scalar(tag, value, step)
    writer.close()
    return str(directory)


@pytest.fixture
def first(tmp_path):
    return write(tmp_path / "first")


def test_runs_that_differ_in_times_alone_are_alike(first, tmp_path, capsys):
    assert main([first, write(tmp_path / "second", perf_step_time=[9.0])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 2 metrics differ; 5 values were compared"


def test_the_first_step_of_a_difference_is_told(first, tmp_path, capsys):
    assert main([first, write(tmp_path / "second", train_loss=[0.5, 0.250001, 0.1], rollout_extra=[1.0])]) == 1
    other, loss, summary = capsys.readouterr().out.splitlines()
    assert main([str(tmp_path / "second"), first]) == 1
    assert capsys.readouterr().out.startswith("rollout/extra: only the first has it")
    assert other == "rollout/extra: only the second has it"
    assert loss.startswith("train/loss: 0.25 and 0.2500") and loss.endswith("at step 1, and 1 more steps differ")
    assert summary.startswith("2 of 3 metrics differ")


def test_a_run_that_got_less_far_is_compared_as_far_as_it_got(first, tmp_path, capsys):
    assert main([first, write(tmp_path / "second", train_loss=[0.5])]) == 0
    assert "3 values were compared" in capsys.readouterr().out


def test_metrics_that_may_differ_are_left_out(first, tmp_path, capsys):
    second = write(tmp_path / "second", train_loss=[0.7])
    assert main([first, second]) == 1
    assert main([first, second, "--without", "train/loss"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 of 1 metrics differ; 2 values were compared"


def test_a_directory_without_a_run(first, tmp_path, capsys):
    assert main([first, str(tmp_path / "nothing")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_bits_of_numbers():
    assert bits(0.0) != bits(-0.0) and bits(float("nan")) == bits(float("nan")) and bits(1.0) == bits(1.0)
