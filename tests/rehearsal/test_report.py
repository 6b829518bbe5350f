from slime.estimates.layout import RankPlace
from slime.rehearsal.report import Failure, Planned, Pushed, RankReport, Rehearsed, Saved, apart, render

GIB = 2**30
BATCHES = [[(6000, 5000), (2192, 1000)]] * 2


def report(*roles, **changes):
    result = Rehearsed(
        **{
            "rank": 3,
            "seconds": {"model": 1.0, "step": 2.6},
            "peaks": {
                "step": {"weights": 2 * GIB, "activations": 5 * GIB, "data": 100},
                "push": {"weights": 2 * GIB, "push": 3 * GIB},
            },
            "operations": {"step": 1234},
            "waits": {
                "model": {"a copy to the device at a.py:1": 9},
                "step": {"a value at a.py:2": 1, "values at b.py:3": 12},
            },
            "collectives": {"step": [["TENSOR_MODEL_PARALLEL_GROUP", "allreduce", 5, 3 * 2**20]]},
            "data_dependent": {},
            "pushed": Pushed([f"tensor {i}" for i in range(707)], 130, None),
            "not_rehearsed": [],
            "failure": None,
            **changes,
        }
    )
    planned = Planned({"weights": 2 * GIB, "activations": 4 * GIB}, GIB, "loss", 2 * GIB)
    place = RankPlace(3, 0, 0, 0, 0, 0)
    return render([RankReport(role, place, BATCHES, result, planned) for role in roles], "", ("saving",)).splitlines()


def test_rehearsed_stands_beside_planned_and_what_is_far_apart_is_marked():
    lines = report("actor")
    assert "  actor: 1 rank, 2 micro-batches of 8,192 tokens in 2 samples each" in lines
    assert "    weights                       2.0 GiB      2.0 GiB" in lines
    assert "    activations                   5.0 GiB      4.0 GiB   apart by 25%" in lines
    assert "    data                            100 B            -" in lines
    assert "    together                      7.0 GiB      6.0 GiB   apart by 17%" in lines
    assert "    push                          3.0 GiB      1.0 GiB   apart by 200%" in lines
    assert "  weight push: 707 tensors in 130 buckets" in lines


def test_waits_are_those_of_the_loop_most_frequent_first():
    lines = report("actor")
    start = lines.index("  the host waits for the device in the phase step: 13")
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["12", "values", "at", "b.py:3"],
        ["1", "a", "value", "at", "a.py:2"],
    ]
    assert not any("a.py:1" in line for line in lines)
    assert "            5     3.0 MiB  allreduce over tensor_model_parallel" in lines


def test_a_checkpoint_stands_with_what_the_rank_writes_of_it():
    sizes, written = {"weights": 4 * GIB, "optimizer": 2 * GIB}, {"weights": GIB, "optimizer": 2 * GIB}
    saved = Saved({"weights": 310, "optimizer": 1}, sizes, written, 3 * GIB)
    lines = report("actor", saved=saved, pushed=None, peaks={"save": {"weights": 9, "save": GIB}})
    start = lines.index("  checkpoint: 3.0 GiB are written by this rank")
    assert lines[start + 1 : start + 5] == [
        "          310     4.0 GiB  weights, of which it writes 1.0 GiB",
        "            1     2.0 GiB  optimizer",
        "    on the device                 1.0 GiB            -",
        "    on the host                   3.0 GiB      2.0 GiB   apart by 50%",
    ]
    # Where nothing is gathered the device has no peak.
    assert lines[start + 3].replace("1.0 GiB", "    0 B") in report("actor", saved=saved, pushed=None, peaks={})


def test_what_was_left_out_and_what_stopped_is_named():
    lines = report(
        "actor",
        not_rehearsed=["loading x"],
        data_dependent={"c.py:4": 2},
        failure=Failure("push", "RuntimeError: no", "d.py:5", ""),
    )
    assert "  STOPPED in the phase push, at d.py:5: RuntimeError: no" in lines
    assert lines[lines.index("  not rehearsed") + 1] == "    loading x"
    assert lines[lines.index("  shapes that depend on values") + 1].split() == ["2", "c.py:4"]
    assert lines[-2:] == ["NOT REHEARSED", "  saving"]


def test_apart_is_a_share_of_the_plan():
    assert apart(0, 0) == 0.0 and apart(3, 2) == 0.5 and apart(1, 2) == 0.5 and apart(1, 0) == float("inf")


def test_ranks_of_both_roles_are_told_apart():
    lines = report("actor", "critic")
    assert lines[1:3] == [
        f"  {role}: 1 rank, 2 micro-batches of 8,192 tokens in 2 samples each" for role in ("actor", "critic")
    ]
    names = [line.partition(":")[0] for line in lines if line.endswith("rehearsed in 4 s")]
    assert names == ["RANK 3", "CRITIC RANK 3"]
