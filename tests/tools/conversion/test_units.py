"""Conversions in units: resumed after a failure, refused where they would overwrite, visible only when they are whole."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from slime.utils.errors import RunError, UserError
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.waiting import wait_until
from tests.support.tables.shell_arrays import ROOT
from tools.conversion.units import Conversion, Unit, split_into_units, write_streamed_shard

UNITS = [Unit(0, ("a", "b"), 2), Unit(1, ("c",), 1), Unit(2, ("d",), 1)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_text("1")
    return tmp_path / "source"


def write(failing, draft, unit):
    """Writes a line for every call, by unit."""
    if unit.index in failing:
        raise OSError(28, "No space left on device")
    with open(draft / f"unit-{unit.index}", "a") as file:
        file.write("written\n")
    return draft / f"unit-{unit.index}", list(unit.names)


def finish(draft, results):
    (draft / "all").write_text(json.dumps(results))


def kill(draft, unit):
    os._exit(9)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failed_conversion_goes_on_with_what_is_left(source, tmp_path, workers):
    target = tmp_path / "target"
    conversion = Conversion(source, target, {"option": 1}, workers)
    with pytest.raises(RunError, match=r"No space left on device.* MB are free there.*the same command goes on"):
        conversion.run(UNITS, functools.partial(write, (2,)), finish)
    assert not target.exists() and (conversion.draft / "unit-0").read_text() == "written\n"
    conversion.run(UNITS, functools.partial(write, ()), finish)
    # Nothing was done twice, and nothing is left beside what was made.
    assert sorted(path.name for path in target.iterdir()) == ["all", "unit-0", "unit-1", "unit-2"]
    assert all((target / f"unit-{index}").read_text() == "written\n" for index in range(3))
    assert json.loads((target / "all").read_text()) == [["a", "b"], ["c"], ["d"]]
    assert not conversion.draft.exists()


@pytest.mark.slow
def test_a_failure_ends_a_conversion_of_many_units(source, tmp_path):
    units = [Unit(index, (str(index),), 1) for index in range(20)]
    conversion = Conversion(source, tmp_path / "target", {}, workers=2)
    with pytest.raises(RunError, match="No space left on device"):
        conversion.run(units, functools.partial(write, (0,)), finish)
    conversion.run(units, functools.partial(write, ()), finish)
    assert all((tmp_path / "target" / f"unit-{unit.index}").read_text() == "written\n" for unit in units)


@pytest.mark.parametrize("change", ["source", "options", "also_read", "form of notes"])
def test_what_was_left_of_another_conversion_is_not_used(source, tmp_path, monkeypatch, change):
    target, other = tmp_path / "target", tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(RunError):
        Conversion(source, target, {}, also_read=(other,)).run(UNITS, functools.partial(write, (2,)), finish)
    if change == "source":
        (source / "weights").write_text("22")
    elif change == "also_read":
        (other / "config.json").write_text("[1]")
    elif change == "form of notes":
        monkeypatch.setattr("tools.conversion.units._NOTED", ("file", "bytes", "more"))
    options = {"changed": True} if change == "options" else {}
    Conversion(source, target, options, also_read=(other,)).run(UNITS, functools.partial(write, ()), finish)
    assert (target / "unit-0").read_text() == "written\n"


@pytest.mark.parametrize("damage", [os.unlink, lambda file: os.truncate(file, 3)], ids=["lost", "cut off"])
def test_a_unit_whose_file_is_not_as_noted_is_done_again(source, tmp_path, damage):
    target, done = tmp_path / "target", []

    def record(draft, unit):
        (draft / "below").mkdir(exist_ok=True)
        (draft / "below" / f"unit-{unit.index}").write_text(f"numbers of {unit.names}")
        done.append(unit.index)
        return draft / "below" / f"unit-{unit.index}", list(unit.names)

    def full(draft, unit):
        raise OSError(28, "No space left on device")

    conversion = Conversion(source, target, {})
    with pytest.raises(RunError):
        conversion.run(UNITS, lambda draft, unit: (full if unit.index == 2 else record)(draft, unit), finish)
    damage(conversion.draft / "below" / "unit-0")
    # Before the unit is done again its note is gone, so that a kill on the way leaves nothing that looks whole.
    with pytest.raises(RunError):
        conversion.run(UNITS, full, finish)
    assert [note.name for note in (conversion.draft / ".finished").iterdir()] == ["00001.json"]
    assert conversion.run(UNITS, record, finish) == [["a", "b"], ["c"], ["d"]] and done == [0, 1, 0, 2]
    for unit in UNITS:
        assert (target / "below" / f"unit-{unit.index}").read_text() == f"numbers of {unit.names}"


def test_a_file_and_all_that_names_it_are_on_the_disk_before_its_note(source, tmp_path, monkeypatch):
    # By number: it stays when a file is renamed.
    order, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append(os.fstat(descriptor).st_ino) or fsync(descriptor))

    def write_below(draft, unit):
        (draft / "below").mkdir()
        (draft / "below" / "unit").write_text("numbers")
        return draft / "below" / "unit", None

    def look(draft, results):
        seen.update(
            (name, (draft / name).stat().st_ino) for name in ("below/unit", "below", "", ".finished/00000.json")
        )

    seen = {}
    Conversion(source, tmp_path / "target", {}).run(UNITS[:1], write_below, look)
    note = order.index(seen[".finished/00000.json"])
    first = order.index(seen["below/unit"])
    assert first < note and {seen["below"], seen[""]} <= set(order[first:note])


@pytest.mark.parametrize("fails", ["fsync_tree", "replace_directory"])
def test_what_fails_at_the_very_end_is_not_done_again(source, tmp_path, monkeypatch, fails):
    def full(*paths):
        raise OSError(28, "No space left on device")

    conversion = Conversion(source, tmp_path / "target", {})
    with monkeypatch.context() as patched, pytest.raises(RunError, match="No space left"):
        patched.setattr(f"tools.conversion.units.{fails}", full)
        conversion.run(UNITS, functools.partial(write, ()), finish)
    # No unit could be written any more.
    conversion.run(UNITS, functools.partial(write, (0, 1, 2)), finish)
    assert (tmp_path / "target" / "unit-0").read_text() == "written\n"
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["all", "unit-0", "unit-1", "unit-2"]


def test_a_target_that_cannot_be_made_and_sizes_of_nothing_are_told(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="target cannot be made"):
        Conversion(source, tmp_path / "file" / "target", {}).run(UNITS, functools.partial(write, ()), finish)
    with pytest.raises(UserError, match="--max-workers 0"):
        split_into_units([("a", 3)], 0, 6)
    with pytest.raises(UserError, match="--chunk-size -1"):
        split_into_units([("a", 3)], 1, -1)


@pytest.mark.slow
def test_a_killed_process_is_an_error(source, tmp_path):
    with pytest.raises(RunError, match="a process was killed .*give fewer --max-workers"):
        Conversion(source, tmp_path / "target", {}, workers=2).run(UNITS, kill, finish)


def test_fewer_workers_go_on_with_what_more_have_left(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tools.conversion.units.LEAST_UNIT_BYTES", 1)
    sizes = [(name, 1) for name in "abcdefgh"]
    many, few = (split_into_units(sizes, workers, 100) for workers in (4, 1))
    assert len(many) == 8 and len(few) == 2
    conversion = Conversion(source, tmp_path / "target", {})
    with pytest.raises(RunError):
        conversion.run(many, functools.partial(write, (5,)), finish)
    conversion.run(few, functools.partial(write, (0, 1, 2, 3, 4)), finish)
    assert json.loads((tmp_path / "target" / "all").read_text()) == [[name] for name in "abcdefgh"]


PARENT = """
import json, sys, time
from pathlib import Path
from tests.support.processes.waiting import wait_until
from tests.support.tables.shell_arrays import ROOT
from tools.conversion.units import Conversion, Unit

def write(draft, unit):
    if unit.index and sys.argv[3] == "hangs":
        time.sleep(600)
    (draft / f"unit-{unit.index}").write_text(sys.argv[3])
    return draft / f"unit-{unit.index}", None

if __name__ == "__main__":
    units = [Unit(index, (str(index),), 10) for index in range(3)]
    Conversion(Path(sys.argv[1]), Path(sys.argv[2]), {}, workers=2).run(units, write, lambda draft, results: None)
"""


@pytest.mark.slow
def test_a_parent_that_is_killed_takes_its_workers_along_and_the_next_goes_on(source, tmp_path):
    target, script = tmp_path / "target", tmp_path / "convert.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), str(source), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, "hangs"], env=environment, stderr=subprocess.PIPE) as parent:
        note = Conversion(source, target, {}).draft / ".finished" / "00000.json"
        wait_until(note.is_file, 120)
        parent.kill()
        # All processes that could write there have the other end: it closes when the last of them has ended.
        parent.communicate(timeout=120)
    result = subprocess.run([*command, "again"], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert [(target / f"unit-{index}").read_text() for index in range(3)] == ["hangs", "again", "again"]


def test_progress_is_told_and_goes_on_where_it_was(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    conversion = Conversion(source, tmp_path / "target", {})
    with pytest.raises(RunError):
        conversion.run(UNITS, functools.partial(write, (1,)), finish)
    assert "target:  50%" in capsys.readouterr().err
    conversion.run(UNITS, functools.partial(write, ()), finish)
    told = capsys.readouterr().err
    assert "100%" in told and "4.00/4.00" in told


def test_nothing_is_overwritten(source, tmp_path):
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(UserError, match="is the source"):
            Conversion(source, target, {}, force=True).run(UNITS, functools.partial(write, ()), finish)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match="is the source .*other"):
        Conversion(source, other, {}, force=True, also_read=(other,)).run(UNITS, functools.partial(write, ()), finish)
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(UserError, match="exists already.* --force"):
        Conversion(source, target, {}).run(UNITS, functools.partial(write, ()), finish)
    Conversion(source, target, {}, force=True).run(UNITS, functools.partial(write, ()), finish)
    assert not (target / "mine").exists() and (target / "all").exists()


# Run elsewhere: what the tools are imported from is not where a new process looks, and `tools` may be another's there.
_SERVED = """
import multiprocessing, os, sys
sys.path.insert(0, sys.argv[1])
from tools.conversion.units import start_server
before = dict(os.environ)
start_server(2, "tools.conversion.hugging_face")
assert dict(os.environ) == before
with multiprocessing.get_context("forkserver").Pool(1) as pool:
    names = pool.apply(eval, ("list(__import__('sys').modules)",))
    frozen = pool.apply(eval, ("__import__('gc').get_freeze_count()",))
print(frozen > 10**5, *[name for name in ("torch", "tools.conversion.hugging_face") if name in names])
"""


def test_workers_have_imported_what_they_run(tmp_path):
    (tmp_path / "tools" / "conversion").mkdir(parents=True)
    (tmp_path / "tools" / "conversion" / "hugging_face.py").write_text("raise ImportError")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", _SERVED, str(ROOT)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["True", "torch", "tools.conversion.hugging_face"], run.stderr


def test_units_keep_the_order_and_the_bounds(monkeypatch):
    sizes = [("a", 3), ("b", 3), ("c", 10), ("d", 1)]
    assert split_into_units(sizes, 1, 6) == [
        Unit(0, ("a", "b"), 6),
        Unit(1, ("c",), 10),
        Unit(2, ("d",), 1),
    ]
    # Small conversions are one unit, however many could work.
    assert split_into_units(sizes, 8, 100) == [Unit(0, ("a", "b", "c", "d"), 17)]
    monkeypatch.setattr("tools.conversion.units.LEAST_UNIT_BYTES", 1)
    assert [unit.nbytes for unit in split_into_units(sizes, 2, 100)] == [3, 3, 10, 1]


def test_a_shard_is_written_as_its_tensors_come(tmp_path):
    tensors = {
        "odd": torch.arange(3, dtype=torch.uint8),
        "bf16": torch.randn(4, 4).bfloat16(),
        "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "float": torch.randn(2, 2),
        "scalar": torch.tensor(2.0),
        "single": torch.arange(6.0).view(2, 3)[1:, 2:].bfloat16().as_strided((1, 1), (5, 3)),
        "column": torch.arange(8.0)[3:].as_strided((1,), (7,)),
        "part": torch.arange(64).view(8, 8)[:, 2:4],
        "empty": torch.zeros(0, 4),
    }
    held = []

    def streamed():
        for name, tensor in tensors.items():
            held.append(name)
            yield name, tensor

    write_streamed_shard(tmp_path / "a.safetensors", streamed(), len(tensors))
    content = (tmp_path / "a.safetensors").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 4096 == 0, "the first tensor begins a page"
    found = load_file(tmp_path / "a.safetensors")
    assert held == list(tensors) and found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].float().equal(tensor.float()), name
    with pytest.raises(RunError, match="tensor x occurs twice"):
        write_streamed_shard(tmp_path / "b.safetensors", [("x", torch.zeros(2)), ("x", torch.zeros(2))], 2)


def test_a_shard_takes_tensors_in_parts(tmp_path):
    whole, odd, held = torch.randn(9, 4).bfloat16(), torch.arange(5, dtype=torch.uint8), []

    def rows():
        for part in whole.split(4):
            held.append(len(part))
            yield part

    named = [("odd", list(odd.split(2))), ("list", list(whole.split(2))), ("iterator", rows())]
    write_streamed_shard(tmp_path / "a.safetensors", named, 3)
    found = load_file(tmp_path / "a.safetensors")
    assert found["odd"].equal(odd) and found["list"].equal(whole) and found["iterator"].equal(whole)
    assert held == [4, 4, 1]


def test_a_conversion_to_hugging_face_waits_for_no_flags():
    program = "import sys; from tools.conversion import torch_dist; print('slime.arguments' in sys.modules)"
    environment = {**os.environ, "SLIME_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["False"], run.stderr


_DESCRIBED = """
import sys
from pathlib import Path
from tools.conversion.torch_dist import describe_model, parse_model_flags
parameters, _ = describe_model(parse_model_flags(Path(sys.argv[1]), []))
print(len(parameters) > 9, "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_model_is_described_without_the_compiler(tmp_path):
    write_tiny_model(tmp_path / "model")
    command = [sys.executable, "-W", "ignore", "-c", _DESCRIBED, str(tmp_path / "model")]
    environment = {**os.environ, "SLIME_ACCELERATOR": "cpu"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["True", "False"], run.stderr
