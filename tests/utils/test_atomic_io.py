import json
import os

import pytest

from slime.utils.files import publishing_directory, replace_directory, write_json_atomically, write_text_atomically


def test_text_replaces_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text_atomically(path, "old")
    write_text_atomically(path, "new")
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file.txt"]


def test_json_that_cannot_be_written_keeps_the_old_file(tmp_path):
    path = tmp_path / "value.json"
    write_json_atomically(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_failed_rename_removes_the_temporary_file(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "full").write_text("x")
    with pytest.raises(OSError):
        write_text_atomically(tmp_path / "target", "text")
    assert os.listdir(tmp_path) == ["target"]


def test_directory_appears_whole(tmp_path):
    final = tmp_path / "state"
    with publishing_directory(final) as directory:
        (directory / "a").write_text("1")
        assert not final.exists()
    assert (final / "a").read_text() == "1"


def test_error_in_the_block_keeps_the_old_directory(tmp_path):
    final = tmp_path / "state"
    with publishing_directory(final) as directory:
        (directory / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), publishing_directory(final) as directory:
        (directory / "a").write_text("new")
        raise ZeroDivisionError
    assert (final / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["state"]


def test_replaced_directory_is_gone(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("")
    replace_directory(tmp_path / "new", tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"] and os.listdir(tmp_path / "old") == ["new"]
