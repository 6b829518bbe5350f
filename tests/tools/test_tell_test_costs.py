import pytest

from tools import tell_test_costs

REPORT = """<testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.utils.test_ports.TestReserved" name="a" time="1.5" />
<testcase classname="tests.utils.test_ports" name="b[x.y]" time="0.5" />
<testcase classname="tests.backends.sglang_utils.test_engine" name="c" time="6.0"><skipped /></testcase>
<testcase classname="tests.test_floors" name="d" time="2.0" />
</testsuite></testsuites>"""


def test_rooms_and_files_by_what_they_cost(tmp_path, monkeypatch, capsys):
    (tmp_path / "report.xml").write_text(REPORT)
    monkeypatch.setattr("sys.argv", ["tell_test_costs.py", str(tmp_path / "report.xml"), "--files", "1"])
    assert tell_test_costs.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "| Room | Tests | Seconds | Share |",
        "| --- | ---: | ---: | ---: |",
        "| `tests/backends/sglang_utils` | 1 | 6 | 60% |",
        "| `tests/utils` | 2 | 2 | 20% |",
        "| `tests` | 1 | 2 | 20% |",
        "",
        "| File | Tests | Seconds | Share |",
        "| --- | ---: | ---: | ---: |",
        "| `tests/backends/sglang_utils/test_engine.py` | 1 | 6 | 60% |",
    ]


@pytest.mark.parametrize("text", [None, "no report"])
def test_what_is_no_report_is_said(tmp_path, monkeypatch, capsys, text):
    if text is not None:
        (tmp_path / "report.xml").write_text(text)
    monkeypatch.setattr("sys.argv", ["tell_test_costs.py", str(tmp_path / "report.xml")])
    with pytest.raises(SystemExit):
        tell_test_costs.main()
    assert "has to be what pytest writes with --junitxml" in capsys.readouterr().err
