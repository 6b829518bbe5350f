"""Arguments that many tests take are everyone's own."""

from tests.support.models.args import default_args


def test_what_one_test_changes_in_its_arguments_no_other_finds():
    def changeable():
        return {name: value for name, value in vars(default_args()).items() if isinstance(value, list | dict)}

    mine, before = changeable(), changeable()
    assert {type(value) for value in mine.values()} == {list, dict}
    for value in mine.values():
        value.append("of one test") if isinstance(value, list) else value.update(of="one test")
    assert changeable() == before != mine
