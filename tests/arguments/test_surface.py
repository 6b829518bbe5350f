import argparse
import functools
import logging
import os

import pytest

from slime.arguments import surface
from slime.arguments.surface import Package, add_flag, read_or_describe, taken
from slime.utils.errors import UserError
from tests.support.processes.fake_flag_surface import SPECS

FAKE = Package("fake_engine", "fake-engine", "tests.support.processes.fake_flag_surface", watched=("options.py",))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package without metadata; `calls` counts how often it was described."""
    directory = tmp_path / "site" / "fake_engine"
    directory.mkdir(parents=True)
    (directory / "__init__.py").write_text("raise RuntimeError('the parent process must not import this')\n")
    (directory / "options.py").write_text("size = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("FAKE_FLAG_SURFACE_CALLS", str(tmp_path / "calls"))
    surface._say_uncached.cache_clear()
    return directory


def calls(tmp_path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_the_second_reading_comes_from_the_cache(package, tmp_path):
    cache = tmp_path / "cache"
    assert read_or_describe(FAKE, cache) == SPECS
    assert read_or_describe(FAKE, cache) == SPECS
    assert calls(tmp_path) == 1
    (file,) = cache.iterdir()
    assert file.name.startswith("flags-fake-engine-source-") and file.suffix == ".json"


def test_a_changed_package_is_described_again(package, tmp_path):
    read_or_describe(FAKE, tmp_path / "cache")
    (package / "options.py").write_text("size = 3\nmode = None\n")
    read_or_describe(FAKE, tmp_path / "cache")
    assert calls(tmp_path) == 2


def test_a_damaged_file_is_written_anew(package, tmp_path):
    cache = tmp_path / "cache"
    read_or_describe(FAKE, cache)
    (file,) = cache.iterdir()
    for damaged in (file.read_text()[:-20], "", "[]extra", '[{"flags": ["--x"], "unknown": 1}]'):
        file.write_text(damaged)
        assert read_or_describe(FAKE, cache) == SPECS
    assert calls(tmp_path) == 5


def test_a_package_that_is_not_installed_has_no_surface(tmp_path):
    absent = Package("no_such_package", "no-such-package", FAKE.describer)
    within_absent = Package("no_such_package.core", "no-such-package", FAKE.describer)
    assert read_or_describe(absent, tmp_path) is None and read_or_describe(within_absent, tmp_path) is None


def test_a_failing_child_shows_its_last_lines(package, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_FLAG_SURFACE_FAILS", "1")
    with pytest.raises(UserError, match=r"fake-engine source cannot be read.*exit code 1(.|\n)*does not import"):
        read_or_describe(FAKE, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_without_a_writable_cache_one_line_says_so(package, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the directory should be")
    with caplog.at_level(logging.INFO):
        assert read_or_describe(FAKE, tmp_path / "cache") == SPECS
        assert read_or_describe(FAKE, tmp_path / "cache") == SPECS
    said = [record.message for record in caplog.records if "read anew at every start" in record.message]
    assert len(said) == 1 and "XDG_CACHE_HOME" in said[0]


def test_without_a_home_it_works_too(package, caplog):
    with caplog.at_level(logging.INFO):
        assert read_or_describe(FAKE, None) == SPECS
    assert "no home directory" in caplog.text


def test_packages_are_described_at_the_same_time(package, tmp_path, monkeypatch):
    (tmp_path / "meeting").mkdir()
    monkeypatch.setenv("FAKE_FLAG_SURFACE_MEETS", str(tmp_path / "meeting"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = Package("fake_engine", "other-engine", FAKE.describer)
    monkeypatch.setattr(surface, "PACKAGES", {"one": FAKE, "two": other})
    monkeypatch.setattr(surface, "load_surface", functools.cache(surface.load_surface.__wrapped__))
    # Each child waits for the other: one after the other they would fail.
    surface.warm_surfaces(("one", "two"))
    assert surface.load_surface("one") == surface.load_surface("two") == SPECS
    assert len(os.listdir(tmp_path / "cache" / "slime")) == 2


def test_added_flags_are_taken():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("fake")
    for spec in SPECS:
        add_flag(group, spec)
    assert taken(group) == taken(parser)
    assert {"--fake-size", "--fs", "--fake-mode"} <= taken(parser).flags and "fake_mode" in taken(parser).dests
    args = parser.parse_args(["--fs", "5", "--fake-mode", "slow"])
    assert (args.fake_size, args.fake_mode) == (5, "slow")
    assert "100 % of it" in parser.format_help()


def test_every_package_has_a_describer():
    for name, package in surface.PACKAGES.items():
        assert surface.load_surface(name), f"{package.describer} describes nothing"
