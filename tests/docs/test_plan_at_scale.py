"""The example of the page on plans at scale prints what the page shows."""

import re
import shlex
from pathlib import Path

from tools.simulate import main

PAGE = Path(__file__).parents[2] / "docs/en/advanced/plan-at-scale.md"


def test_the_example_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (phases,) = (text for language, text in blocks if language == "json")
    (shown,) = (text for language, text in blocks if language == "text")
    (command,) = (text for language, text in blocks if language == "bash" and "--phases phases.json" in text)
    monkeypatch.chdir(tmp_path)
    Path("phases.json").write_text(phases)
    program, script, *arguments = shlex.split(command.replace("\\\n", " "))
    assert (program, script) == ("python", "tools/simulate.py")
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == shown.strip()
