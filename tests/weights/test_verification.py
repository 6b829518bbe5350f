import pytest

from slime.utils.errors import RunError
from slime.weights.verification import PushedNames, check_all_reset, check_equal_checksums, differing_tensors

REPORT = {"0/embed": "11", "0/norm": "22"}
ALIKE = dict.fromkeys(range(6), 0)


def test_s11_a_name_that_the_engine_does_not_know_is_refused():
    names = PushedNames({"a", "b"})
    names.check_bucket(["a"])
    with pytest.raises(RunError, match="does not have: c"):
        names.check_bucket(["c"])


class Counted(set):
    """Counts the names that are looked up in it."""

    looked_up = 0

    def __contains__(self, name):
        self.looked_up += 1
        return super().__contains__(name)

    def __rsub__(self, names):
        return {name for name in names if name not in self}


def test_a_name_is_looked_up_with_its_bucket_alone():
    expected = Counted({"a", "b", "c", "d"})
    names = PushedNames(expected)
    for bucket in (["a", "b"], ["c"], ["d"]):
        names.check_bucket(bucket)
    assert expected.looked_up == 4


def test_s11_a_name_that_was_not_sent_is_reported():
    names = PushedNames({"a", "b"})
    names.check_bucket(["a"])
    with pytest.raises(RunError, match="1 tensors .* were not sent: b"):
        names.check_complete()


def test_a_name_sent_twice_is_refused():
    names = PushedNames(None)
    names.check_bucket(["a"])
    with pytest.raises(RunError, match="twice: a"):
        names.check_bucket(["a"])
    with pytest.raises(RunError, match="twice: b"):
        PushedNames(None).check_bucket(["b", "b"])


def test_a_complete_push_passes():
    names = PushedNames({"a", "b"})
    names.check_bucket(["b"])
    names.check_bucket(["a"])
    names.check_complete()


def test_equal_reports_pass():
    check_equal_checksums({0: REPORT, 1: dict(REPORT)}, {0: dict(REPORT), 1: dict(REPORT)}, ALIKE)


def test_a_tensor_that_was_not_pushed_is_named():
    with pytest.raises(RunError, match="engine 1 does not hold the trainer's weights.*0/norm") as error:
        check_equal_checksums({0: REPORT, 1: REPORT}, {0: REPORT, 1: {**REPORT, "0/norm": "33"}}, ALIKE)
    assert "0/embed" not in str(error.value)


def test_engines_that_disagree_after_loading_are_named():
    with pytest.raises(RunError, match="engine 1 and engine 0 differ.*0/embed"):
        check_equal_checksums({0: REPORT, 1: {**REPORT, "0/embed": "0"}}, {0: REPORT, 1: REPORT}, ALIKE)
    with pytest.raises(RunError, match="engine 5 and engine 2 differ.*0/embed"):
        check_equal_checksums({2: REPORT, 5: {**REPORT, "0/embed": "0"}}, {2: REPORT, 5: REPORT}, ALIKE)


def test_engines_that_are_started_alike_are_compared_with_each_other():
    """Two ranks hold half a tensor each, an engine of one has all of it, and another one has it in another dtype."""
    halves = {f"{rank}/{name}": f"half of {name}" for rank in range(2) for name in ("embed", "norm")}
    other_dtype = {name: f"bfloat16 of {name}" for name in REPORT}
    reports = dict(enumerate([halves, REPORT, dict(halves), dict(REPORT), other_dtype, dict(other_dtype)]))
    alike = {0: 0, 1: 1, 2: 0, 3: 1, 4: 4, 5: 4}
    check_equal_checksums(reports, dict(reports), alike)
    for engine, other in ((2, 0), (3, 1), (5, 4)):
        wrong = {**reports, engine: {**reports[engine], "0/embed": "0"}}
        with pytest.raises(RunError, match=f"engine {engine} and engine {other} differ.*: 1 of .* tensors: 0/embed"):
            check_equal_checksums(wrong, wrong, alike)


def test_a_tensor_that_only_one_side_has_differs():
    assert differing_tensors(REPORT, {"0/embed": "11", "0/head": "5"}) == ["0/head", "0/norm"]


def test_an_empty_report_proves_nothing():
    with pytest.raises(RunError, match="engine 0 reports no tensors"):
        check_equal_checksums({0: {}}, {0: {}}, ALIKE)


def test_a_missing_engine_is_an_error():
    with pytest.raises(RunError, match="2 engines before the push, 1 after"):
        check_equal_checksums({0: REPORT, 1: REPORT}, {0: REPORT}, ALIKE)


def test_a_tensor_that_survived_the_reset_is_named():
    check_all_reset({0: REPORT}, {0: {"0/embed": "1", "0/norm": "2"}})
    with pytest.raises(RunError, match="engine 0 kept.*0/norm"):
        check_all_reset({0: REPORT}, {0: {"0/embed": "1", "0/norm": "22"}})


def test_many_names_are_shortened():
    many = {f"t{index:02d}": "1" for index in range(30)}
    with pytest.raises(RunError, match="30 of 30 tensors: t00, .* and 20 more"):
        check_equal_checksums({0: many}, {0: dict.fromkeys(many, "2")}, ALIKE)
