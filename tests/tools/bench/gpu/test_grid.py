from types import SimpleNamespace

from tools.bench.gpu import grid

PLAIN = SimpleNamespace(batches={"full": [], "sparse": []})


def test_what_stops_or_differs_is_a_row(monkeypatch):
    rank = SimpleNamespace(role="actor", args=None)
    monkeypatch.setattr(grid, "grid_args", lambda hf_dir, batch, **changes: (hf_dir, batch, changes))
    monkeypatch.setattr(grid, "run_objective", lambda rank, samples, objective: rank.args)
    compared = []
    monkeypatch.setattr("tests.support.oracles.plain_grid.assert_like_loops", lambda *case: compared.append(case))
    row = grid.row_of(rank, "gspo", {"eps_clip": 0.1}, "model", PLAIN)
    assert row == {"objective": "gspo", "role": "actor", "agrees": True, "what differs": None}
    found = {("gspo", batch): ("model", batch, {"eps_clip": 0.1}) for batch in PLAIN.batches}
    assert compared == [("model", PLAIN, "gspo", found)]

    row = grid.row_of(rank, "top-p", {}, "model", PLAIN)
    assert (row["agrees"], row["what differs"], len(compared)) == (None, None, 1)

    def differs(*case):
        raise AssertionError("loss: 1.0 instead of 2.0")

    monkeypatch.setattr("tests.support.oracles.plain_grid.assert_like_loops", differs)
    row = grid.row_of(rank, "gspo", {}, "model", PLAIN)
    assert (row["agrees"], row["what differs"]) == (False, "AssertionError: loss: 1.0 instead of 2.0")

    def stops(rank, samples, objective):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(grid, "run_objective", stops)
    for objective in ("gspo", "top-p"):
        row = grid.row_of(rank, objective, {}, "model", PLAIN)
        assert (row["agrees"], row["what differs"]) == (False, "RuntimeError: no kernel image")
