"""Tables of a profile: numbers worked by hand on small traces, and what torch's own profiler writes."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from slime.observability.timer import phase
from slime.training.profiling import Part, Profiler
from slime.utils.errors import UserError
from tools.analyze_profile import Span, length_of_union, main, own_times, place_of, summaries_of

# Microseconds since some beginning, as large as in a trace.
BEGIN = 4881114046000.0


def event(name: str, category: str, start: float, duration: float, thread: int = 1, **args) -> dict:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 9,
        "tid": thread,
        "ts": BEGIN + start,
        "dur": duration,
        "args": args,
    }


def range_of(name: str, start: float, duration: float) -> dict:
    return event(f"phase {name}", "user_annotation", start, duration)


def launched(name: str, at: float, number: int, start: float, duration: float, stream: int = 7) -> list[dict]:
    """A kernel and its launch."""
    return [
        event("cudaLaunchKernel", "cuda_runtime", at, 2, correlation=number),
        event(name, "kernel", start, duration, stream, correlation=number),
    ]


# A rollout of 1000 µs: 400 of log-probs, 500 of steps. Two kernels at a time for 50 µs; behind its phase one runs on, and one
# begins.
ON_GPU = [
    range_of("train", 0, 1000),
    range_of("log_probs", 100, 400),
    range_of("actor_train", 500, 500),
    *launched("gemm", 110, 1, 150, 100),
    *launched("gemm", 120, 2, 250, 300),
    *launched("exp", 510, 3, 600, 100),
    *launched("gemm", 520, 4, 650, 100, stream=8),
    *launched("reduce", 20, 5, 30, 20),
    *launched("late", 130, 6, 560, 30),
    event("phase actor_train", "gpu_user_annotation", 600, 150, 7),
    event("Optimizer.step#Adam.step", "user_annotation", 700, 100),
    event("aten::mm", "cpu_op", 105, 10),
    event("PyTorch Profiler (0)", "Trace", -500, 5000),
    {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},
]


def write(path: Path, events: list[dict], **content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, **content}).encode()))


def write_rank(directory: Path, events: list[dict], rank: int = 0, rollout: int = 3, role: str = "actor") -> None:
    about = {"role": role, "part": "train_overall", "rank": rank, "rollout": rollout}
    write(directory / f"{role}_train_overall_rank_{rank}.{rollout}.pt.trace.json.gz", events, slime=about)


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table whose first column has that title."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(title))
    rows = lines[first : lines.index("", first) if "" in lines[first:] else None]
    return [re.split(r"\s{2,}", line.strip()) for line in rows]


def test_phases_and_kernels_by_hand(tmp_path, capsys):
    write_rank(tmp_path, ON_GPU)
    assert main(["--profile-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("actor train_overall, rank 0, rollout 3\n1 trace of 0.001000 s\n")
    # On the device: 20 + 400 + 30 + 150; 400 + 30, of which 80 lie behind the phase; from 600 to 750.
    assert table(text, "phase") == [
        ["phase", "calls", "seconds", "on device"],
        ["train", "1", "0.001000", "0.000600"],
        ["log_probs", "1", "0.000400", "0.000430"],
        ["actor_train", "1", "0.000500", "0.000150"],
    ]
    assert "\n  log_probs" in text and "\n  actor_train" in text
    assert table(text, "kernel") == [
        ["kernel", "calls", "seconds", "share", "mean µs", "longest µs", "mostly in"],
        ["gemm", "3", "0.000500", "76.9%", "166.7", "300.0", "log_probs"],
        ["exp", "1", "0.000100", "15.4%", "100.0", "100.0", "actor_train"],
        ["late", "1", "0.000030", "4.6%", "30.0", "30.0", "log_probs"],
        ["reduce", "1", "0.000020", "3.1%", "20.0", "20.0", "train"],
    ]


def test_of_what_begins_at_one_moment_the_longer_holds_the_other(tmp_path, capsys):
    """In whatever order the trace has them."""
    ranges = [range_of("train", 0, 1000), range_of("log_probs", 0, 400)]
    operators = [event("aten::mm", "cpu_op", 100, 50), event("aten::matmul", "cpu_op", 100, 150)]
    for rank in range(2):
        write_rank(tmp_path, [*ranges, *operators], rank)
        ranges.reverse()
        operators.reverse()
        main(["--profile-dir", str(tmp_path), "--rank", str(rank)])
        text = capsys.readouterr().out
        assert re.findall(r"^ *(?:train|log_probs)\b(?=  )", text, re.MULTILINE) == ["train", "  log_probs"]
        assert [(name, seconds, phase) for name, _, seconds, *_, phase in table(text, "operator")[1:]] == [
            ("aten::matmul", "0.000100", "log_probs"), ("aten::mm", "0.000050", "log_probs"),
        ]  # fmt: skip


def test_operators_stand_for_kernels_where_no_device_was_traced(tmp_path, capsys):
    """Each with its own time: of 300 µs a product has 200 in what it calls, on the other thread nothing calls anything."""
    events = [
        range_of("train", 0, 1000),
        event("aten::matmul", "cpu_op", 100, 300),
        event("aten::mm", "cpu_op", 150, 200),
        event("aten::resolve", "cpu_op", 150, 50),
        event("aten::mm", "cpu_op", 380, 100, 2),
        event("aten::exp", "cpu_op", 400, 50),
    ]
    write_rank(tmp_path, events)
    main(["--profile-dir", str(tmp_path)])
    text = capsys.readouterr().out
    # From 100 to 480.
    assert table(text, "phase")[1] == ["train", "1", "0.001000", "0.000380"]
    rows = {name: (calls, seconds) for name, calls, seconds, *_ in table(text, "operator")[1:]}
    assert rows == {
        "aten::mm": ("2", "0.000250"), "aten::matmul": ("1", "0.000100"), "aten::exp": ("1", "0.000050"),
        "aten::resolve": ("1", "0.000050"),
    }  # fmt: skip


def test_own_times_add_up_to_what_is_covered():
    operators = [
        event("a", "cpu_op", 0, 100),
        event("b", "cpu_op", 0, 40),
        event("c", "cpu_op", 40, 60),
        event("d", "cpu_op", 100, 5),
    ]
    found = {span.name: own for span, own in own_times(operators)}
    assert found == {"a": 0, "b": 40, "c": 60, "d": 5}


def test_a_union_counts_nothing_twice():
    assert length_of_union([Span("", 5, 9), Span("", 0, 4), Span("", 3, 6), Span("", 20, 21)]) == 10
    assert length_of_union([Span("", 0, 10), Span("", 2, 3)]) == 10 and length_of_union([]) == 0


def test_rollouts_of_a_rank_are_summed(tmp_path, capsys):
    for rollout in (3, 4):
        write_rank(tmp_path, ON_GPU, rollout=rollout)
    main(["--profile-dir", str(tmp_path), "--top-n", "1"])
    text = capsys.readouterr().out
    assert text.startswith("actor train_overall, rank 0, rollout 3, 4\n2 traces of 0.002000 s\n")
    assert table(text, "phase")[2] == ["log_probs", "2", "0.000800", "0.000860"]
    assert table(text, "kernel")[1:] == [
        ["gemm", "6", "0.001000", "76.9%", "166.7", "300.0", "log_probs"],
        ["and 3 others, 0.000300 s (--top-n)"],
    ]


def test_ranks_are_chosen_or_taken_together(tmp_path, capsys):
    short = [range_of("train", 0, 600), *launched("gemm", 10, 1, 20, 300)]
    write_rank(tmp_path, ON_GPU, rank=2)
    write_rank(tmp_path, short, rank=5)
    main(["--profile-dir", str(tmp_path)])
    assert capsys.readouterr().out.startswith("actor train_overall, rank 2,")
    main(["--profile-dir", str(tmp_path), "--rank", "5"])
    text = capsys.readouterr().out
    assert text.startswith("actor train_overall, rank 5,") and table(text, "phase")[1][2:] == ["0.000600", "0.000300"]
    main(["--profile-dir", str(tmp_path), "--all-ranks"])
    text = capsys.readouterr().out
    assert text.startswith("actor train_overall, rank 2, 5, rollout 3\n2 traces of 0.001600 s\n")
    # Means of 1000 and 600, of 600 and 300.
    assert table(text, "phase")[:2] == [
        ["phase", "calls", "seconds", "on device", "least", "most", "of rank"],
        ["train", "1", "0.000800", "0.000450", "0.000600", "0.001000", "2"],
    ]
    assert table(text, "kernel")[1] == ["gemm", "4", "0.000800", "84.2%", "200.0", "300.0", "log_probs"]
    with pytest.raises(UserError, match="--rank 7: there are traces of 2, 5"):
        main(["--profile-dir", str(tmp_path), "--rank", "7"])


def test_roles_have_tables_of_their_own(tmp_path, capsys):
    write_rank(tmp_path, ON_GPU)
    write_rank(tmp_path, [range_of("critic_train", 0, 100)], role="critic")
    main(["--profile-dir", str(tmp_path)])
    titles = [line for line in capsys.readouterr().out.splitlines() if ", rank 0" in line]
    assert titles == ["actor train_overall, rank 0, rollout 3", "critic train_overall, rank 0, rollout 3"]


def test_traces_of_engines_have_kernels_and_no_phases(tmp_path, capsys):
    write(tmp_path / "1764201600" / "1764201600.5-TP-1.trace.json.gz", launched("attention", 0, 1, 5, 95))
    main(["--profile-dir", str(tmp_path), "--rank", "1"])
    text = capsys.readouterr().out
    assert text.startswith("engine, rank 1\n1 trace of 0.000100 s\n") and "hold no phases of a training rank" in text
    assert table(text, "kernel")[1][:3] == ["attention", "1", "0.000095"]


def test_what_a_trace_is_of():
    assert place_of(Path("a.trace.json"), {"distributedInfo": {"rank": 4}}) == ("engine", 4, None)
    assert place_of(Path("a.trace.json"), {}) == ("engine", 0, None)


# What is packed holds the second in which that was done, so no process would find the names of another one's tests in it.
@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"traceEvents": 3}', gzip.compress(b'{"traceEvents": [{"ph"')],
    ids=["nothing", "no events", "no list of events", "packed half an event"],
)
def test_what_is_no_trace_is_named(tmp_path, content):
    path = tmp_path / f"a.pt.trace.json{'.gz' if content[:1] == gzip.compress(b'')[:1] else ''}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path} is no trace, or was not written to its end"):
        main(["--profile-dir", str(tmp_path)])


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"ts": None}, "has no ts"), ({"dur": None}, "has no dur"), ({"name": None}, "has no name"),
        ({"tid": None}, "has no tid"), ({"ts": "late"}, "has a ts of another kind"),
        ({"args": [1]}, "has args that are no object"),
    ],
)  # fmt: skip
def test_an_event_that_lacks_something_is_named_with_its_file(tmp_path, changes, problem):
    broken = {name: value for name, value in {**ON_GPU[3], **changes}.items() if value is not None}
    path = tmp_path / "a.pt.trace.json.gz"
    write(path, [*ON_GPU, broken])
    with pytest.raises(UserError) as error:
        main(["--profile-dir", str(tmp_path)])
    assert str(error.value) == f"{path}: event {len(ON_GPU)} of traceEvents {problem}: {str(broken)[:200]}"


def test_what_is_no_event_is_named_with_its_file(tmp_path):
    write(tmp_path / "a.pt.trace.json.gz", [ON_GPU[0], 3])
    with pytest.raises(UserError, match=r"a.pt.trace.json.gz: event 1 of traceEvents is no object: 3$"):
        main(["--profile-dir", str(tmp_path)])


def test_a_packed_file_that_was_cut_is_named(tmp_path):
    path = tmp_path / "a.pt.trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}' * 99)[:-12])
    with pytest.raises(UserError, match="was not written to its end"):
        main(["--profile-dir", str(tmp_path)])


@pytest.mark.parametrize("words", [["--top-n", "0"], ["--rank", "1", "--all-ranks"]])
def test_words_that_mean_nothing_are_refused(tmp_path, words):
    with pytest.raises(SystemExit) as end:
        main(["--profile-dir", str(tmp_path), *words])
    assert end.value.code == 2


def test_a_trace_of_torchs_profiler(tmp_path, capsys):
    """Phases add up to what they lie in, and operators are found in the phase that they were called in."""
    profiler = Profiler(tmp_path, "actor", 0, range(1), frozenset([Part.OVERALL]))
    with profiler.traced(Part.OVERALL, 0), phase("train"):
        with phase("log_probs"):
            torch.ones(64, 64).exp()
        for _ in range(3):
            with phase("actor_train"):
                torch.ones(256, 256).mm(torch.ones(256, 256))
    (summary,) = summaries_of(tmp_path, None, all_ranks=False)
    phases = summary.phases
    assert {name: (one.calls, one.depth) for name, one in phases.items()} == {
        "train": (1, 0), "log_probs": (1, 1), "actor_train": (3, 1),
    }  # fmt: skip
    assert 0 < phases["log_probs"].seconds + phases["actor_train"].seconds < phases["train"].seconds <= summary.seconds
    assert all(0 < one.busy <= one.seconds * 1.001 for one in phases.values())
    assert summary.kernels["aten::mm"].calls == 3 and set(summary.kernels["aten::mm"].phases) == {"actor_train"}
    assert set(summary.kernels["aten::exp"].phases) == {"log_probs"} and not summary.on_device
    assert sum(one.seconds for one in summary.kernels.values()) <= phases["train"].busy * 1.001
    assert main(["--profile-dir", str(tmp_path)]) == 0
    assert "aten::mm" in capsys.readouterr().out
