"""What a rank records about itself: traces of torch's own profiler, and its memory with recorders that stand in for a GPU's."""

import gzip
import json
import logging
import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.observability.timer import Timer, phase
from slime.scheduling.device_turns import Holds
from slime.training import profiling, train_rank
from slime.training.profiling import Part, Profiler, Records, records_of
from slime.utils.errors import UserError
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.actor_run import Rank, command_line
from tests.support.processes.distributed import run_distributed

EVERY_PART = (Part.OVERALL, Part.STEPS, Part.LOG_PROBS)


def make_profiler(directory: Path, rollouts: range = range(1), *parts: Part, **options) -> Profiler:
    return Profiler(directory, "actor", 3, rollouts, frozenset(parts or [Part.OVERALL]), **options)


def work_on(profiler: Profiler, rollout_id: int, fails: bool = False) -> None:
    """A rank's work on a rollout, as an actor has it."""
    with profiler.traced(Part.OVERALL, rollout_id), phase("train"):
        with profiler.traced(Part.LOG_PROBS, rollout_id), phase("log_probs"):
            torch.ones(3, 3).exp()
        with profiler.traced(Part.STEPS, rollout_id), phase("actor_train"):
            torch.ones(3, 3).mm(torch.ones(3, 3))
            if fails:
                raise RuntimeError("not finite")


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def read(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def names_in(path: Path, category: str) -> list[str]:
    events = [event for event in read(path)["traceEvents"] if event.get("cat") == category]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]


@pytest.mark.parametrize(
    "rollouts, traced", [(range(2, 4), [2, 3]), (range(0, 1), [0]), (range(4, 9), [4, 5]), (range(6, 8), [])]
)
def test_rollouts_from_the_first_up_to_before_the_end_are_traced(tmp_path, rollouts, traced):
    """Also those of a window that a run ends in, and none behind its end."""
    profiler = make_profiler(tmp_path, rollouts)
    for rollout_id in range(6):
        work_on(profiler, rollout_id)
        assert len(files(tmp_path)) == len([one for one in traced if one <= rollout_id]), "each is written at its end"
    assert files(tmp_path) == [f"actor_train_overall_rank_3.{one}.pt.trace.json.gz" for one in traced]


@pytest.mark.parametrize(
    "parts, expected",
    [
        ([Part.OVERALL], {"train_overall": ["train", "log_probs", "actor_train"]}),
        # Those within are in it.
        (EVERY_PART, {"train_overall": ["train", "log_probs", "actor_train"]}),
        ([Part.STEPS], {"train_actor": ["actor_train"]}),
        ([Part.LOG_PROBS], {"train_log_probs": ["log_probs"]}),
        ([Part.STEPS, Part.LOG_PROBS], {"train_actor": ["actor_train"], "train_log_probs": ["log_probs"]}),
    ],
)
def test_each_part_is_a_file_with_its_phases(tmp_path, caplog, parts, expected):
    work_on(make_profiler(tmp_path, range(1), *parts), 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    paths = {part: tmp_path / f"actor_{part}_rank_3.0.pt.trace.json.gz" for part in expected}
    assert files(tmp_path) == sorted(path.name for path in paths.values())
    for part, path in paths.items():
        assert names_in(path, "user_annotation") == [f"phase {name}" for name in expected[part]]
        operators = names_in(path, "cpu_op")
        assert ("aten::exp" in operators) == (part != "train_actor"), part
        assert ("aten::mm" in operators) == (part != "train_log_probs"), part
        assert read(path)["slime"] == {"role": "actor", "rank": 3, "part": part, "rollout": 0}


def test_nothing_is_written_while_a_rank_is_at_work(tmp_path):
    """Others would wait for it, in a collective whose time is limited."""
    profiler = make_profiler(tmp_path, range(1), Part.LOG_PROBS)
    with profiler.traced(Part.OVERALL, 0):
        with profiler.traced(Part.LOG_PROBS, 0):
            pass
        assert files(tmp_path) == []
    assert len(files(tmp_path)) == 1


def test_a_step_that_raises_leaves_its_trace_and_its_error(tmp_path):
    profiler = make_profiler(tmp_path, range(2))
    with pytest.raises(RuntimeError, match="not finite"):
        work_on(profiler, 0, fails=True)
    assert "aten::mm" in names_in(tmp_path / "actor_train_overall_rank_3.0.pt.trace.json.gz", "cpu_op")
    assert Timer().range_of is None
    work_on(profiler, 1)
    assert len(files(tmp_path)) == 2


def test_phases_are_ranges_only_while_a_trace_is_made(tmp_path):
    profiler = make_profiler(tmp_path, range(1))
    with profiler.traced(Part.OVERALL, 5):
        assert Timer().range_of is None
    with profiler.traced(Part.OVERALL, 0):
        assert Timer().range_of is not None
    assert Timer().range_of is None
    Timer().pop_seconds()
    work_on(profiler, 0)
    assert set(Timer().pop_seconds()) == {"train", "log_probs", "actor_train"}


def test_tensorboard_finds_worker_and_span(tmp_path):
    """The plug-in looks for names that end so; before it, behind the last dot, stands the number of the span."""
    work_on(make_profiler(tmp_path, range(7, 8)), 7)
    (name,) = files(tmp_path)
    worker, span, *ending = name.split(".")
    assert (worker, span, ending) == ("actor_train_overall_rank_3", "7", ["pt", "trace", "json", "gz"])


@pytest.mark.parametrize("stacks, shapes", [(False, False), (True, True)])
def test_shapes_and_stacks_are_recorded_where_they_are_asked_for(tmp_path, stacks, shapes):
    work_on(make_profiler(tmp_path, range(1), stacks=stacks, shapes=shapes), 0)
    events = read(tmp_path / files(tmp_path)[0])["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events) == shapes
    assert any(event.get("cat") == "python_function" and "work_on" in event["name"] for event in events) == stacks


def test_no_secret_gets_into_a_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-key")
    monkeypatch.setattr(sys, "argv", ["train.py", "--wandb-key", "very-secret-key"])
    secret = SimpleNamespace(wandb_key="very-secret-key")
    profiler = make_profiler(tmp_path, range(1), stacks=True, shapes=True)
    with profiler.traced(Part.OVERALL, 0):
        (lambda args: torch.ones(3).exp())(secret)
    content = gzip.decompress((tmp_path / files(tmp_path)[0]).read_bytes())
    assert b"aten::exp" in content and b"very-secret-key" not in content


def test_a_disk_that_is_full_is_said_and_ends_nothing(tmp_path, caplog):
    """The profiler itself would leave a part of a file, or none, and say nothing."""
    profiler = make_profiler(tmp_path, range(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        work_on(profiler, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == []
    assert re.search(
        r"the trace .*rank_3\.0\.pt\.trace\.json\.gz could not be written: .*; the run goes on", caplog.text
    )
    work_on(profiler, 1)
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    "content",
    [
        "", '{"traceEvents": [', '{"traceEvents": [{"ph": "X"},', '{"traceEvents": [\n  {\n    "ph": "X"\n  }',
        '{"traceEvents": [\n  {\n    "ph": "X"\n  }\n  ],"traceName": "/run/a',
    ],
)  # fmt: skip
def test_a_trace_that_ends_early_is_none(tmp_path, content):
    broken = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_text(content))
    with pytest.raises(OSError, match="ends early"):
        profiling.write_trace(broken, tmp_path / "a.pt.trace.json.gz")
    assert files(tmp_path) == []


def test_a_directory_that_is_gone_is_said_and_ends_nothing(tmp_path, caplog):
    work_on(make_profiler(tmp_path / "gone"), 0)
    assert (
        "could not be written: it is not there, or ends early: is the disk full, or the directory gone?" in caplog.text
    )


def test_a_profiler_of_a_user_keeps_its_trace(tmp_path, caplog):
    """One around the work of a rank. One that a function of a user's starts in it takes ours: only that is lost."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        work_on(make_profiler(tmp_path), 0)
    assert "aten::mm" in {event.key for event in mine.key_averages()} and files(tmp_path) == []
    assert "rollout 0: train_overall is not traced: another profiler is at work" in caplog.text
    profiler = make_profiler(tmp_path, range(2))
    with profiler.traced(Part.OVERALL, 0):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(3).exp()
    assert "rollout 0: the trace of train_overall is lost: a function in it has used a profiler" in caplog.text
    work_on(profiler, 1)
    assert files(tmp_path) == ["actor_train_overall_rank_3.1.pt.trace.json.gz"]


def test_a_critic_has_a_trace_of_each_of_its_calls(tmp_path, monkeypatch):
    monkeypatch.setattr(train_rank, "forward_values", lambda *arguments: {})
    monkeypatch.setattr(train_rank, "train_one_step", lambda *arguments, **options: {})
    rank = train_rank.CriticRank.__new__(train_rank.CriticRank)
    rank.memory = SimpleNamespace(holds=Holds.ALL)
    rank.args = make_args(tmp_path, role="critic", num_steps_per_rollout=1, reset_optimizer_states=False)
    rank.rank, rank.backend = 0, SimpleNamespace(groups=SimpleNamespace(is_last_stage=False), broadcast=lambda own: own)
    rank._fetch = lambda shards: {"num_microbatches": [1]}
    rank._records = records_of(rank.args, 0)
    rank.values(1, [])
    rank.train(1, [])
    names = {"values": ["critic_values"], "train_overall": ["critic_train"]}
    for part, phases in names.items():
        path = tmp_path / "run" / f"critic_{part}_rank_0.1.pt.trace.json.gz"
        assert names_in(path, "user_annotation") == [f"phase {name}" for name in phases]
    assert len(files(tmp_path / "run")) == 2


def make_args(tmp_path: Path, **changes) -> SimpleNamespace:
    values = {
        "use_pytorch_profiler": True, "profile_ranks": [], "profile_target": ["train_overall"], "role": "actor",
        "run_dir": str(tmp_path / "run"), "profile_step_start": 1, "profile_step_end": 2,
        "pytorch_profiler_collect_shapes": False, "pytorch_profiler_collect_callstack": False,
        "record_memory_history": False, "memory_recorder": "torch", "memory_snapshot_dir": str(tmp_path / "memory"),
        "memory_snapshot_num_steps": None, "release_train": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("ranks, profiled", [([], [0]), ([1, 3], [1, 3])])
def test_the_first_rank_is_profiled_unless_others_are_named(tmp_path, ranks, profiled):
    args = make_args(tmp_path, profile_ranks=ranks)
    assert [rank for rank in range(4) if records_of(args, rank) is not None] == profiled
    assert records_of(make_args(tmp_path, use_pytorch_profiler=False), 0) is None


def test_a_directory_that_a_rank_cannot_write_is_refused_when_it_starts(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(
        UserError, match=r"--use-pytorch-profiler: rank 0 on .* writes into .*/run, which cannot be made"
    ):
        records_of(make_args(tmp_path), 0)


@pytest.mark.parametrize("first, expected", [
    (1, []), (2, ["no traces: the run goes on at rollout 2, and --profile-step-end is 2"]),
])  # fmt: skip
def test_who_resumes_behind_the_window_is_told_once(tmp_path, caplog, first, expected):
    caplog.set_level(logging.INFO)
    after(records_of(make_args(tmp_path), 0), first, 2, 3)
    assert [record.getMessage() for record in caplog.records if "no traces" in record.getMessage()] == expected


def test_ranks_that_begin_with_every_rollout_say_so_only_when_asked(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    after(records_of(make_args(tmp_path, release_train=True), 0), 2)
    assert caplog.text == ""


class Gpu:
    """Of an accelerator, what records memory."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.problem: OSError | None = None

    def record_memory(self, out_of_memory) -> None:
        self.done.append("begin")
        self.out_of_memory = out_of_memory

    def write_recorded_memory(self, path: Path) -> None:
        path.write_text("half of it")
        if self.problem is not None:
            raise self.problem
        path.write_text("all")

    def stop_recording_memory(self) -> None:
        self.done.append("stop")


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(profiling, "get_accelerator", lambda: gpu)
    return gpu


def recording(tmp_path: Path, **changes) -> Records:
    flags = {"use_pytorch_profiler": False, "record_memory_history": True}
    return records_of(make_args(tmp_path, **{**flags, **changes}), 5)


def after(records: Records, *rollouts: int) -> None:
    for rollout_id in rollouts:
        with records.within(Part.OVERALL, rollout_id), records.within(Part.STEPS, rollout_id):
            pass


def contents(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def test_a_snapshot_is_taken_after_the_chosen_rollout_and_nothing_later(tmp_path, gpu):
    records = recording(tmp_path, memory_snapshot_num_steps=3)
    after(records, 0, 1)
    # The first of a critic's two calls on a rollout.
    with records.within(Part.VALUES, 2):
        pass
    assert contents(tmp_path / "memory") == {} and gpu.done == ["begin"]
    after(records, 2, 3)
    assert contents(tmp_path / "memory") == {f"memory_{tmp_path.name}-run_actor_rank_5_rollout_2.pickle": "all"}
    assert gpu.done == ["begin", "stop"]
    # Nothing of it is recorded any more.
    gpu.out_of_memory()
    records.close()
    assert len(files(tmp_path / "memory")) == 1 and gpu.done == ["begin", "stop"]


def test_the_first_allocation_that_fails_is_seen_and_those_after_it_are_not(tmp_path, gpu):
    records = recording(tmp_path)
    after(records, 0, 1, 2)
    gpu.out_of_memory()
    path = tmp_path / "memory" / f"memory_{tmp_path.name}-run_actor_rank_5_out_of_memory.pickle"
    assert path.read_text() == "all"
    path.unlink()
    gpu.out_of_memory()
    assert files(tmp_path / "memory") == []
    records.close()
    assert gpu.done == ["begin", "stop"]


def test_runs_that_write_into_one_directory_keep_their_snapshots(tmp_path, gpu):
    for run in ("one", "other"):
        after(recording(tmp_path, memory_snapshot_num_steps=1, run_dir=f"/runs/{run}/tensorboard"), 0)
    names = [f"memory_{run}-tensorboard_actor_rank_5_rollout_0.pickle" for run in ("one", "other")]
    assert files(tmp_path / "memory") == names


def test_a_rollout_that_fails_is_not_the_one_that_is_looked_at(tmp_path, gpu):
    records = recording(tmp_path, memory_snapshot_num_steps=1)
    with pytest.raises(RuntimeError), records.within(Part.OVERALL, 0):
        raise RuntimeError("not finite")
    assert files(tmp_path / "memory") == [] and gpu.done == ["begin"]


@pytest.mark.parametrize("first, records", [(2, True), (3, False)])
def test_a_resume_counts_rollouts_on(tmp_path, gpu, caplog, first, records):
    caplog.set_level(logging.INFO)
    after(recording(tmp_path, memory_snapshot_num_steps=3), first)
    assert (files(tmp_path / "memory") == [f"memory_{tmp_path.name}-run_actor_rank_5_rollout_2.pickle"]) == records
    expected = "memory is not recorded: the run goes on at rollout 3, and --memory-snapshot-num-steps is 3"
    assert (expected in caplog.text) != records and gpu.done == ["begin", "stop"]


@pytest.mark.parametrize("when", ["out of memory", "rollout"])
def test_a_snapshot_that_finds_no_room_is_said_and_ends_nothing(tmp_path, gpu, caplog, when):
    records = recording(tmp_path, memory_snapshot_num_steps=1)
    gpu.problem = OSError(28, "No space left on device")
    gpu.out_of_memory() if when == "out of memory" else after(records, 0)
    assert "could not be written: [Errno 28] No space left on device" in caplog.text
    assert files(tmp_path / "memory") == []


def test_a_rank_on_a_cpu_refuses_the_recorder_of_gpus(tmp_path):
    with pytest.raises(UserError, match="--memory-recorder torch records the memory of GPUs"):
        recording(tmp_path)


def test_memray_is_asked_for_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "memray", None)
    with pytest.raises(UserError, match="--memory-recorder memray needs the package memray on every node: pip install"):
        recording(tmp_path, memory_recorder="memray")


def test_memray_records_until_the_chosen_rollout_or_the_end(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    open_files = []

    class Tracker:
        def __init__(self, *, destination) -> None:
            self.path = destination

        def __enter__(self):
            open_files.append(self.path)

        def __exit__(self, *error):
            open_files.remove(self.path)

    stand_in = SimpleNamespace(Tracker=Tracker, FileDestination=lambda path, *, overwrite: Path(path))
    monkeypatch.setitem(sys.modules, "memray", stand_in)
    path = tmp_path / "memory" / f"memory_{tmp_path.name}-run_actor_rank_5_process_{os.getpid()}.memray"
    chosen = recording(tmp_path, memory_recorder="memray", memory_snapshot_num_steps=2)
    after(chosen, 0)
    assert open_files == [path]
    after(chosen, 1)
    assert open_files == []
    endless = recording(tmp_path, memory_recorder="memray")
    after(endless, 0, 1, 2)
    assert open_files == [path]
    endless.close()
    endless.close()
    assert open_files == []
    assert caplog.text.count(str(path)) == 2


def test_without_flags_a_rank_has_nothing_to_ask():
    assert train_rank.TrainRank._records is None
    rank = train_rank.TrainRank.__new__(train_rank.TrainRank)
    with rank._recorded(Part.OVERALL, 0):
        assert Timer().range_of is None and not torch.autograd._profiler_enabled()


def worker(directory: Path) -> dict[str, list[str]]:
    """Files of each case, in the directory of a rank's own machine."""
    run_dir = directory / "run" / os.environ["RANK"]
    window = ["--use-pytorch-profiler", "--profile-step-start", "1", "--profile-step-end", "3"]
    parts = ["--profile-ranks", "0", "1", "--profile-target", "train_actor", "train_log_probs"]
    reference = ["--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(directory / "actor")]
    run = Rank(command_line(directory, *window, *parts, *reference), run_dir=str(run_dir / "parts"))
    found = {}
    for rollout_id in range(4):
        run.train(rollout_id)
        found[f"after {rollout_id}"] = files(run_dir / "parts")
    run.end()

    # A run of one step for each rollout and without a reference has no pass for log-probs.
    run = Rank(command_line(directory, *window, "--profile-target", "train_log_probs"), run_dir=str(run_dir / "none"))
    run.train(1)
    found["no pass"] = files(run_dir / "none") if (run_dir / "none").exists() else []
    run.end()

    # A run that goes on in the middle of the window, and fails there.
    run = Rank(command_line(directory, *window), run_dir=str(run_dir / "overall"))
    run.actor.backend.step = fail
    try:
        run.train(2)
    except ArithmeticError as error:
        found["error"] = str(error)
    found["overall"] = files(run_dir / "overall") if (run_dir / "overall").exists() else None
    run.end()
    return found


def fail(*arguments, **options):
    raise ArithmeticError("it fails")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("profiled")
    write_tiny_model(directory / "actor", tied=True)
    rows = "".join(json.dumps({"prompt": "1+1", "label": "2"}) + "\n" for _ in range(8))
    (directory / "prompts.jsonl").write_text(rows)
    return directory / "run", run_distributed(worker, 2, (directory,), timeout=300)


def test_ranks_of_a_run_write_their_traces_rollout_by_rollout(ranks):
    directory, found = ranks
    for rank, of_rank in enumerate(found):
        made = {
            one: [f"actor_{part}_rank_{rank}.{one}.pt.trace.json.gz" for part in ("train_actor", "train_log_probs")]
            for one in (1, 2)
        }
        assert of_rank["after 0"] == of_rank["no pass"] == []
        assert of_rank["after 1"] == sorted(made[1])
        assert of_rank["after 2"] == of_rank["after 3"] == sorted(made[1] + made[2])
        for part, name, operator in (
            ("train_actor", "actor_train", "Backward"),
            ("train_log_probs", "ref_log_probs", "mm"),
        ):
            path = directory / str(rank) / "parts" / f"actor_{part}_rank_{rank}.2.pt.trace.json.gz"
            assert f"phase {name}" in names_in(path, "user_annotation")
            assert any(operator in one for one in names_in(path, "cpu_op"))
            assert any("Backward" in one for one in names_in(path, "cpu_op")) == (part == "train_actor")


def test_a_rank_that_fails_in_the_window_leaves_a_trace_of_the_failure(ranks):
    directory, found = ranks
    assert [of_rank["error"] for of_rank in found] == ["it fails"] * 2
    assert found[0]["overall"] == ["actor_train_overall_rank_0.2.pt.trace.json.gz"]
    # Nobody asked for it.
    assert found[1]["overall"] is None
    path = directory / "0" / "overall" / found[0]["overall"][0]
    assert names_in(path, "user_annotation")[:2] == ["phase train", "phase data_preprocess"]
