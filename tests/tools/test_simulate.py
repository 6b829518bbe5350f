"""The command: what it reads, what it refuses by name, and what it says."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.tools.simulation.test_measured import ARGUMENTS, write_run
from tools.simulate import build_parser, main, read_devices, read_lengths, work_from
from tools.simulation.measured import measured

PHASES = {
    "decode_step_seconds": 0.02,
    "decode_request_seconds": 0.001,
    "train_token_seconds": 0.001,
    "push_seconds": 1.0,
}
SIZES = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--prompt-tokens", "20", "--rollouts", "8"]
LENGTHS = ["--lengths", "lognormal:200,1.2,4000"]


@pytest.fixture
def phases(tmp_path: Path) -> Path:
    path = tmp_path / "phases.json"
    path.write_text(json.dumps(PHASES))
    return path


def refusal(arguments: list, capsys) -> str:
    assert main([str(each) for each in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("simulate: ") and "Traceback" not in error
    return error


def rows_of(output: str) -> dict[str, list]:
    """Arrangement → the words of its line, numbers as numbers; word 5 is the seconds of a step, word 6 the steps per hour."""
    found = {}
    for line in re.findall(r"^[a-z_]+ +\d.*$", output, re.MULTILINE):
        words = [word.replace(",", "") for word in line.split()]
        found[words[0]] = [float(word) if re.fullmatch(r"[\d.]+", word) else word for word in words]
    return found


def test_a_table_a_winner_and_a_picture(phases, tmp_path, capsys):
    picture = tmp_path / "plan.png"
    arguments = ["--phases", phases, *SIZES, *LENGTHS, "--devices", "4..16", "--picture", picture]
    assert main([str(each) for each in arguments]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"^(\d+) devices$", output, re.MULTILINE) == ["4", "8", "16"]
    for name in ("colocated", "sync", "partial", "async", "in_flight"):
        assert len(re.findall(rf"^{name} ", output, re.MULTILINE)) >= 3
    assert len(re.findall(r"is fastest.* times sync: ", output)) == 3
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and picture.stat().st_size > 5000


def test_the_winner_has_the_most_steps_per_hour(phases, capsys):
    arguments = [
        "--phases",
        str(phases),
        *SIZES,
        *LENGTHS,
        "--devices",
        "16",
        "--arrangements",
        "sync",
        "partial",
        "async",
    ]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    rates = {
        row.split()[0]: float(row.split()[6].replace(",", ""))
        for row in re.findall(r"^[a-z_]+ +\d.*$", output, re.MULTILINE)
    }
    assert re.search(r"^(\w+) is fastest", output, re.MULTILINE)[1] == max(rates, key=rates.__getitem__)
    assert set(rates) == {"sync", "partial", "async"}


def test_a_run_gives_all_that_is_needed(tmp_path, capsys):
    generator = np.random.default_rng(0)
    run = write_run(tmp_path / "run", ARGUMENTS, generator.integers(5, 60, (5, 4, 2)).tolist())
    saved = tmp_path / "phases.json"
    command = ["--from-run", str(run), "--devices", "6", "--trainer-devices", "2", "--rollouts", "8"]
    assert main([*command, "--arrangements", "sync", "--save-phases", str(saved)]) == 0
    output = capsys.readouterr().out
    assert "measured: 4 steps" in output and "2 x 2" in output
    # What was saved, changed by hand, wins over what was measured.
    values = json.loads(saved.read_text())
    saved.write_text(json.dumps({"push_seconds": values["push_seconds"] + 1000}))
    assert main([*command, "--arrangements", "sync", "--phases", str(saved)]) == 0
    step = [
        float(re.search(r"^sync.*", text, re.MULTILINE)[0].split()[5].replace(",", ""))
        for text in (output, capsys.readouterr().out)
    ]
    assert step[1] == pytest.approx(step[0] + 1000, rel=0.02)


def test_what_nobody_gave_is_that_of_the_run(tmp_path):
    of_run = {"async_buffer_size": 3, "update_weights_interval": 2, "max_weight_staleness": 5}
    lengths = [[[4, 9], [8, 2], [3, 3], [5, 6]]] * 4
    run = measured([write_run(tmp_path / "run", {**ARGUMENTS, **of_run, "asynchronous": True}, lengths)])

    def sizes(found, *typed):
        work = work_from(build_parser().parse_args(typed), found)
        return {name: getattr(work, name) for name in of_run}

    assert sizes(run) == of_run
    assert sizes(run, "--async-buffer-size", "1", "--max-weight-staleness", "4") == {
        "async_buffer_size": 1, "update_weights_interval": 2, "max_weight_staleness": 4,
    }  # fmt: skip
    without = sizes(None, *SIZES, *LENGTHS)
    assert without == {"async_buffer_size": 1, "update_weights_interval": 1, "max_weight_staleness": None}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"decode_seconds": 1.0}, "'decode_seconds' is no phase; known are decode_step_seconds"),
        ({"push_seconds": -1.0}, "'push_seconds' is -1.0; expected a number of seconds"),
        ({"push_seconds": "1"}, "'push_seconds' is \"1\""),
        ({"engine_devices": 1.5}, "'engine_devices' is 1.5; expected a whole number, at least 1"),
        ({"engine_devices": True}, "'engine_devices' is true"),
        ({"decode_step_seconds": 0, "decode_request_seconds": 0}, "are both 0"),
    ],
)
def test_an_entry_of_the_phases_is_refused_by_name(phases, capsys, entry, expected):
    phases.write_text(json.dumps({**PHASES, **entry}))
    assert expected in refusal(["--phases", phases, *SIZES, *LENGTHS], capsys)


def test_phases_that_are_missing_are_named(phases, capsys):
    phases.write_text(json.dumps({"push_seconds": 1.0}))
    error = refusal(["--phases", phases, *SIZES, *LENGTHS], capsys)
    assert "no decode_step_seconds, decode_request_seconds, train_token_seconds; add them" in error
    phases.write_text("{")
    assert str(phases) in refusal(["--phases", phases, *SIZES, *LENGTHS], capsys)
    assert "absent.json" in refusal(["--phases", "absent.json", *SIZES, *LENGTHS], capsys)
    assert "--from-run DIR or --phases FILE" in refusal([], capsys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--devices", "8192"], "--devices 8192"),
        (["--devices", "16..8"], "--devices 16..8"),
        (["--devices", "many"], "--devices many"),
        (["--devices", "1", "--arrangements", "sync"], "--devices 1: no room"),
        (["--devices", "4", "--trainer-devices", "4", "--arrangements", "sync"], "of 4 devices (--trainer-devices)"),
        (["--trainer-devices", "0"], "--trainer-devices 0"),
        (["--max-running-requests", "0"], "--max-running-requests 0"),
        (["--lengths", "lognormal:0,1,5"], "--lengths lognormal:0,1,5"),
        (["--lengths", "lognormal:a,1,5"], "--lengths lognormal:a,1,5"),
        (["--lengths", "0"], "--lengths 0: expected 1 token or more"),
        (["--lengths", "absent.txt"], "--lengths absent.txt: no such file"),
        (["--rollout-batch-size", "0"], "--rollout-batch-size 0"),
        (["--over-sampling-batch-size", "7"], "--over-sampling-batch-size 7: must be at least --rollout-batch-size 8"),
        (["--async-buffer-size", "0"], "--async-buffer-size 0"),
        (
            ["--async-buffer-size", "3", "--max-weight-staleness", "2"],
            "--max-weight-staleness 2: with --async-buffer-size 3",
        ),
        (["--rollouts", "3", "--warm-up", "3"], "--warm-up 3"),
    ],
)
def test_what_can_not_be_replayed_is_refused_by_name(phases, capsys, arguments, expected):
    arguments = [
        "--phases",
        phases,
        *SIZES,
        *LENGTHS,
        *(["--arrangements", "sync"] if arguments[-1] == "1" else []),
        *arguments,
    ]
    assert expected in refusal(arguments, capsys)


def test_a_bound_of_staleness_binds_only_rollouts_ahead(phases):
    arguments = ["--phases", str(phases), *SIZES, *LENGTHS, "--max-weight-staleness", "0"]
    assert main([*arguments, "--arrangements", "sync", "partial"]) == 0


def test_sizes_that_nobody_gave_are_named(phases, capsys):
    assert "--rollout-batch-size is missing" in refusal(["--phases", phases, *LENGTHS], capsys)
    assert "--lengths is missing" in refusal(["--phases", phases, *SIZES], capsys)


def test_devices_double_up_to_the_last():
    assert read_devices("8..64") == [8, 16, 32, 64]
    assert read_devices("3..10") == [3, 6, 10]
    assert read_devices("4096") == [4096]
    assert read_devices("8,24") == [8, 24]


def test_lengths_of_a_file_are_drawn_from_it(tmp_path, capsys, phases):
    path = tmp_path / "lengths.txt"
    path.write_text("10\n20\n40\n")
    lengths = read_lengths(str(path))(np.random.default_rng(0), 50, 4)
    assert lengths.shape == (50, 4) and set(lengths.ravel()) == {10, 20, 40}
    path.write_text("10\n0\n")
    assert "at least 1 each" in refusal(["--phases", phases, *SIZES, "--lengths", path], capsys)
    path.write_text("ten")
    assert "one number of tokens per line" in refusal(["--phases", phases, *SIZES, "--lengths", path], capsys)
    assert set(read_lengths("7")(np.random.default_rng(0), 3, 2).ravel()) == {7}


def test_a_log_normal_distribution_has_its_median_and_its_end():
    lengths = read_lengths("lognormal:100,1.0,500")(np.random.default_rng(0), 5000, 4)
    assert np.median(lengths) == pytest.approx(100, rel=0.05)
    assert lengths.max() == 500 and lengths.min() >= 1
    # Of a normal distribution 16 % lie one standard deviation or more above its mean.
    assert np.mean(lengths > 100 * np.e) == pytest.approx(0.159, abs=0.01)
