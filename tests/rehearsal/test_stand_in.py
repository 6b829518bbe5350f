import ctypes
import subprocess
import sys

import pytest

from slime.rehearsal import stand_in


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "slime"


def test_it_is_built_once_and_whole(cache, monkeypatch, caplog):
    commands = []

    def compile_(command, **options):
        assert options["timeout"] > 0
        commands.append(command)
        draft = command[command.index("-o") + 1]
        with open(draft, "w") as file:
            file.write("a library")

    monkeypatch.setattr(stand_in.subprocess, "run", compile_)
    with caplog.at_level("INFO"):
        first, second = stand_in.find_or_build(), stand_in.find_or_build()
    assert first == second and first.library.read_text() == "a library" and first.why_none is None
    assert [file.name for file in cache.iterdir()] == [first.library.name]
    assert len(commands) == 1 and str(first.library) in caplog.text


def test_every_environment_has_one_of_its_own(cache, monkeypatch, tmp_path):
    """A library finds torch's by their path, which ends with the environment that it was built in."""
    monkeypatch.setattr(stand_in, "_build", stand_in.StandIn)
    here = stand_in.find_or_build()

    class ElsewhereInstalled:
        version = stand_in.metadata.version("torch")

        def locate_file(self, path):
            return tmp_path / path

    monkeypatch.setattr(stand_in.metadata, "distribution", lambda name: ElsewhereInstalled())
    assert stand_in.find_or_build().library != here.library


def test_one_that_does_not_load_says_the_way_out(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    broken = tmp_path / "stand_in.so"
    broken.write_text("no library")
    with pytest.raises(RuntimeError, match=f"{broken} does not load .*delete it"):
        stand_in.load(broken)


def test_without_a_compiler_it_is_said_what_is_lacking(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = stand_in.find_or_build()
    assert found.library is None and "no-such-compiler" in found.why_none


def test_a_build_that_fails_says_the_first_error(cache, monkeypatch):
    def fail(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="note: x\na.cpp:1: error: no such header\nmore")

    monkeypatch.setattr(stand_in.subprocess, "run", fail)
    found = stand_in.find_or_build()
    assert found.library is None and found.why_none.endswith("a.cpp:1: error: no such header")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cu130", "2.13.0+rocm7.0"])
def test_any_torch_but_a_cpu_build_gets_none(cache, monkeypatch, version):
    monkeypatch.setattr(stand_in.metadata, "version", lambda name: version)
    found = stand_in.find_or_build()
    assert found.library is None and found.why_none.endswith(f"this one is {version}") and not cache.exists()


def test_it_is_not_loaded_behind_torch(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: pytest.fail("loaded"))
    with pytest.raises(RuntimeError, match="before torch"):
        stand_in.load("anything")
