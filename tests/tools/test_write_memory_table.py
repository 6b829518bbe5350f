"""The published table says what the code says."""

from tools.write_memory_table import CONFIGURATIONS, PAGE, memory_table, with_table


def test_the_documented_table_is_up_to_date():
    page = PAGE.read_text()
    table = memory_table()
    assert with_table(page, table) == page, "run `python tools/write_memory_table.py`"
    assert all(f"| {name} |" in table for name in CONFIGURATIONS)
    assert "MEASURED" not in page
