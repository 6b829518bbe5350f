"""How a tool ends, by its status and what it says."""

import pytest

from slime.utils.errors import RunError, UserError
from tools.command_line import run_tool


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("no such flag"), 2, "error: no such flag\n"),
        (RunError("the disk is full"), 1, "error: the disk is full\n"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), 1, "error: a.json: No such file or directory\n"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C\n"),
    ],
)
def test_an_error_is_one_line_and_a_status(monkeypatch, capsys, error, status, said):
    def main():
        raise error

    monkeypatch.delenv("SLIME_DEBUG", raising=False)
    with pytest.raises(SystemExit) as end:
        run_tool(main)
    assert (end.value.code, capsys.readouterr().err) == (status, said)
    monkeypatch.setenv("SLIME_DEBUG", "1")
    with pytest.raises(type(error)):
        run_tool(main)
