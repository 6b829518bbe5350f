"""The table of models on its page."""

import json

from tools.write_model_table import NOT_YET, PAGE, RECORDS, recorded, with_table


def test_the_table_is_up_to_date():
    assert PAGE.read_text() == with_table(PAGE.read_text(), recorded())


def test_a_row_says_what_is_tested_and_what_was_rehearsed():
    record = {"layout": "TP 2, DP 4", "rehearsed_gib": 12.34, "planned_gib": 12.3, "seconds": 7}
    page = with_table(PAGE.read_text(), {"glm4-9B": record})
    rows = {line.split(" | ")[0].strip("| `"): line for line in page.splitlines() if line.startswith("| `")}
    assert len(rows) == 50
    assert "| `glm4` | yes |" in rows["glm4-9B"] and rows["glm4-9B"].endswith("| TP 2, DP 4 | 12.3, 12.3 | 7 |")
    # Its engine is tested with experts on two training ranks, in a module of its own.
    assert rows["qwen3-30B-A3B"].split(" | ")[4] == "yes"
    # With experts tensor parallelism needs sequence parallelism.
    assert "tp2" in rows["deepseek-v3"] and "whole sequence" not in rows["deepseek-v3"]
    # A family that trains, whose engine no test starts, and which nobody rehearsed.
    assert rows["kimi-k2"].split(" | ")[2:6:3] == ["yes", NOT_YET] and rows["kimi-k2"].split(" | ")[4] == "no test"
    assert json.loads(RECORDS.read_text()).keys() <= rows.keys()
