"""What a run tells and leaves around its loop, without Ray."""

import argparse
import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from slime.ray import session
from slime.ray.session import main
from slime.utils import filesystem
from slime.utils.child_process import environment_for_python
from slime.utils.errors import RunError, UserError
from tests.support.models.args import command_line, write_config, write_iteration, write_stand_ins


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `main` with `train`; gives its exit status and the lines that it printed, without their times.

    `whole`: whether the model has more than a config.
    """
    monkeypatch.setattr("slime.ray.cluster.ray_cluster", contextlib.nullcontext)
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    for name in ("RAY_ADDRESS", "TENSORBOARD_DIR", "SLIME_START_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(filesystem.tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)

    def run(train, *words, whole=True, **options):
        own = command_line(tmp_path)
        if whole:
            write_stand_ins(tmp_path / "model")
        status = main(train, [*own, *words], **options)
        shown = capsys.readouterr()
        return status, re.sub(r"^\d\d:\d\d:\d\d ", "", shown.out + shown.err, flags=re.MULTILINE).splitlines()

    return run


def test_what_was_said_is_told_and_what_follows_from_it_on_request(run):
    for words, told in (([], False), (["--log-level", "DEBUG"], True)):
        status, lines = run(lambda args, progress: None, *words)
        assert status == 0 and "configuration (what differs from the defaults):" in lines
        assert ("configuration (what follows):" in lines) is told


def test_a_driver_of_the_users_own_has_flags_of_its_own(run):
    def add(parser):
        parser.add_argument("--patience", type=int, default=3)
        return parser

    found = []
    status, lines = run(lambda args, progress: found.append(args.patience), "--patience", "5", add_custom_arguments=add)
    assert (status, found) == (0, [5])
    assert any("patience 5" in line for line in lines)
    _, plan = run(None, "--patience", "5", "--dry-run", add_custom_arguments=add)
    assert "  command line  --patience 5" in plan


def test_a_variable_of_ours_that_nothing_reads_is_told_at_the_start(run, monkeypatch):
    monkeypatch.setenv("SLIME_GRAD_COALESCE_CHUNK_BYTES", "1")
    _, lines = run(lambda args, progress: None)
    assert sum("SLIME_GRAD_COALESCE_CHUNK_BYTES is set and has no effect" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("ending", "status", "why"),
    [
        (None, 0, None),
        (KeyboardInterrupt(), 130, "ERROR: stopped by Ctrl-C"),
        (RunError("engine 0 died"), 1, "ERROR: engine 0 died"),
        (OSError("disk full"), 1, "ERROR: disk full"),
        (ZeroDivisionError("by us"), 1, "ZeroDivisionError: by us"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_however_a_run_ends_its_last_lines_say_what_was_kept_and_how_to_go_on(run, tmp_path, ending, status, why):
    save = tmp_path / "checkpoints"

    def train(args, progress):
        (save / "latest_checkpointed_iteration.txt").write_text("1")
        progress.start_rollout_id, progress.num_rollout, progress.rollouts_done, progress.rollout_saved = 0, 4, 2, 1
        if ending is not None:
            raise ending

    found, lines = run(train, "--save", str(save), "--save-interval", "1")
    *_, told, kept, go_on = lines if ending is not None else [None, *lines]
    assert found == status and (told == why or ending is None)
    assert kept == f"kept: the checkpoint of rollout 1 in {save}/iter_0000001"
    assert go_on.startswith("to train on, raise --num-rollout: " if ending is None else "go on: ")
    assert go_on.endswith("--num-rollout 8" if ending is None else f"--load {save}")


@pytest.fixture
def restarting(run, tmp_path):
    """Runs a loop that ends with `endings`, start by start, in a run that may start twice again; `saved`: before the first end.

    Gives exit status, lines, and by start what it loaded and the run's id.
    """
    save = tmp_path / "checkpoints"

    def restarting(*endings, saved=False, begins=True):
        loaded, left = [], list(endings)

        def train(args, progress):
            loaded.append((args.load, args.wandb_run_id))
            if begins:
                if progress.start_rollout_id is None:
                    progress.start_rollout_id = 0
                progress.num_rollout, progress.rollouts_done = 4, 2
            if saved and len(loaded) == 1:
                write_iteration(save)
                progress.rollout_saved = 1
            if (ending := left.pop(0)) is not None:
                raise ending

        words = [
            "--save",
            str(save),
            "--save-interval",
            "1",
            "--max-restarts",
            "2",
            "--use-wandb",
            "--wandb-mode",
            "offline",
        ]
        status, lines = run(train, *words)
        assert not left
        return status, lines, loaded

    return restarting


@pytest.mark.parametrize(
    ("failure", "saved"),
    [
        (RunError("rank 1 died"), True),
        (ZeroDivisionError("by us"), False),
        (OSError("lost a disk"), False),
        pytest.param(RunError("rank 1 died"), False, marks=pytest.mark.slow),
        pytest.param(ZeroDivisionError("by us"), True, marks=pytest.mark.slow),
        pytest.param(OSError("lost a disk"), True, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_a_run_that_fails_goes_on_from_its_newest_checkpoint_by_itself(restarting, tmp_path, failure, saved):
    status, lines, loaded = restarting(failure, failure, None, saved=saved)
    newest = str(tmp_path / "checkpoints") if saved else None
    assert status == 0 and [load for load, _ in loaded] == [None, newest, newest]
    assert len({run_id for _, run_id in loaded}) == 1 and loaded[0][1], "one run of the tracker"
    told = [line for line in lines if line.startswith(("ERROR: ", "WARNING: restart"))]
    assert [line for line in told if "WARNING" in line] == [
        f"WARNING: restart {n} of 2 (--max-restarts)" for n in (1, 2)
    ]
    assert sum(str(failure) in line for line in lines if "Error: " in line or "ERROR: " in line) == 2


def test_after_the_last_restart_the_run_ends_as_any_other(restarting, tmp_path):
    failure, save = RunError("rank 1 died"), tmp_path / "checkpoints"
    status, lines, _ = restarting(failure, failure, failure, saved=True)
    assert status == 1
    *_, told, kept, go_on = lines
    assert told == "ERROR: rank 1 died" and kept == f"kept: the checkpoint of rollout 1 in {save}/iter_0000001"
    # The command that it was started with has no --load.
    assert go_on.endswith(f" --load {save}")


@pytest.mark.parametrize(
    ("ending", "begins", "status"),
    [(UserError("--lr"), True, 2), (KeyboardInterrupt(), True, 130), (RunError("rank 1 died"), False, 1)],
    ids=["bad input", "Ctrl-C", "before the loop"],
)
def test_what_would_fail_again_and_who_is_told_to_end_does_not_start_again(restarting, ending, begins, status):
    found, lines, _ = restarting(ending, begins=begins)
    assert found == status and not [
        line for line in lines if "restart" in line and "--max-restarts" in line and "WARN" in line
    ]


def test_all_starts_of_a_run_have_one_directory(run, tmp_path, monkeypatch):
    names, found = iter(["first", "second"]), []
    monkeypatch.setattr(session, "tracking_directory", lambda args: tmp_path / next(names))

    def train(args, progress):
        found.append((args.run_dir, args.log_dir))
        progress.start_rollout_id, progress.num_rollout, progress.rollouts_done = 0, 4, 2
        if len(found) == 1:
            raise RunError("rank 1 died")

    words = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1", "--max-restarts", "1"]
    assert run(train, *words)[0] == 0
    assert found == [(str(tmp_path / "first"), str(tmp_path / "first/logs"))] * 2


def test_a_run_of_which_a_part_fails_when_all_is_trained_tells_what_is_kept(run, tmp_path):
    save, starts = tmp_path / "checkpoints", []

    def train(args, progress):
        starts.append(args)
        progress.start_rollout_id, progress.num_rollout, progress.rollouts_done = 0, 4, 4
        (save / "iter_0000003").mkdir()
        (save / "iter_0000003/.metadata").touch()
        (save / "latest_checkpointed_iteration.txt").write_text("3")
        progress.rollout_saved = 3
        raise RunError("engine 0 died in the last evaluation")

    status, lines = run(train, "--save", str(save), "--save-interval", "1", "--max-restarts", "2")
    assert (status, len(starts)) == (0, 1) and "ERROR: engine 0 died in the last evaluation" in lines
    *_, nothing, kept, _ = lines
    assert nothing.startswith("nothing left to do: 4 rollouts are done")
    assert kept.startswith("kept: the checkpoint of rollout 3 ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_is_told_to_end_while_its_parts_end_does_not_start_again(run, tmp_path, number):
    class Part:
        def kill(self):
            os.kill(os.getpid(), number)

    starts = []

    def train(args, progress):
        starts.append(args)
        progress.start_rollout_id, progress.num_rollout, progress.rollouts_done = 0, 4, 2
        with session.ending(Part()):
            raise RunError("rank 1 died")

    words = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "1", "--max-restarts", "2"]
    status, lines = run(train, *words)
    assert status == 1 and len(starts) == 1 and "ERROR: rank 1 died" in lines


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt()], ids=lambda value: type(value).__name__)
def test_what_killed_ranks_leave_goes_with_the_run(run, tmp_path, ending):
    left = tmp_path / "tmp/slime-rank-abcdefgh"

    def train(args, progress):
        left.mkdir()
        (left / "owner").touch()
        if ending is not None:
            raise ending

    run(train)
    assert not left.exists()


def test_a_run_that_ends_before_its_loop_has_nothing_to_keep(run, tmp_path):
    def train(args, progress):
        raise RunError("engine 0 did not start")

    status, lines = run(train, "--save", str(tmp_path / "checkpoints"))
    assert (status, lines[-1]) == (1, "ERROR: engine 0 did not start")
    assert not [line for line in lines if line.startswith("kept:")]


def test_processes_of_a_run_are_told_where_its_logs_are_and_the_parsed_arguments_stay(run, tmp_path, monkeypatch):
    parsed, given = [], []
    parse_args = session.parse_args
    monkeypatch.setattr(session, "parse_args", lambda **options: parsed.append(parse_args(**options)) or parsed[0])
    before = {}

    def train(args, progress):
        given.append(args)
        before.update(vars(parsed[0]))

    run(train)
    assert given[0].log_dir == f"{given[0].run_dir}/logs" and not {"run_dir", "log_dir"} & before.keys()
    assert vars(given[0]) == {**vars(parsed[0]), "run_dir": given[0].run_dir, "log_dir": given[0].log_dir}
    assert str(next(tmp_path.rglob("args.json")).parent) == given[0].run_dir
    record = json.loads(next(tmp_path.rglob("args.json")).read_text())
    assert record["arguments"]["log_dir"] == {"value": given[0].log_dir, "origin": None}


@pytest.fixture
def saves_elsewhere(tmp_path):
    """The lock that another run has while it lives, in the directory of this one."""
    save = tmp_path / "checkpoints"
    save.mkdir()
    with (save / ".checkpoints.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield save


def test_two_runs_do_not_write_their_checkpoints_into_one_directory(run, saves_elsewhere):
    words, began = ["--save", str(saves_elsewhere), "--save-interval", "1"], []
    status, lines = run(lambda args, progress: began.append(args), *words)
    assert (status, began) == (2, [])
    assert lines[-1].startswith(
        f"ERROR: --save {saves_elsewhere}: another run writes its checkpoints into this directory"
    )
    assert [path.name for path in saves_elsewhere.iterdir()] == [".checkpoints.lock"], "the record is the other run's"


@pytest.mark.parametrize(("estimator", "status"), [("ppo", 2), ("grpo", 0)])
def test_two_runs_do_not_write_their_critics_into_one_directory_either(
    run, tmp_path, saves_elsewhere, estimator, status
):
    """Also those whose actors have directories of their own. Without a critic nobody writes there."""
    roles = tmp_path / "roles.yaml"
    roles.write_text(f"megatron: [{{role: critic, overrides: {{save: {saves_elsewhere}}}}}]\n")
    own = tmp_path / "own"
    words = ["--save", str(own), "--save-interval", "1", "--advantage-estimator", estimator]
    found, lines = run(lambda args, progress: None, *words, "--megatron-config-path", str(roles))
    assert found == status, lines
    if status:
        named = f"ERROR: {roles}:1: role critic: save {saves_elsewhere}: another run writes its checkpoints"
        assert lines[-1].startswith(named)
        assert filesystem.claim_directory(own, ".checkpoints.lock"), "what was claimed before is let go of"
        filesystem.release_directory(own, ".checkpoints.lock")


@pytest.mark.parametrize(("words", "beside"), [(["--save-interval", "1"], True), (["--num-rollout", "0"], False)])
def test_what_stands_beside_checkpoints_is_of_the_run_that_wrote_them(run, tmp_path, words, beside):
    save = tmp_path / "checkpoints"
    run(lambda args, progress: None, "--save", str(save), *words)
    [record] = tmp_path.rglob("args.json")
    assert (record.parent == save) is beside


@pytest.mark.parametrize(
    "words", [["--dry-run"], ["--check"], ["--num-rollout", "0"], ["--debug-rollout-only"], None], ids=str
)
def test_what_writes_no_checkpoint_may_go_on_beside_a_run_that_does(run, saves_elsewhere, words):
    """None: without an interval nothing is saved."""
    words = ["--save", str(saves_elsewhere), *(["--save-interval", "1", *words] if words else [])]
    status, lines = run(lambda args, progress: None, *words)
    assert status == 0, lines


def test_weights_of_a_download_that_was_broken_off_are_told_before_anything_starts(run, tmp_path):
    """A file that is missing, one that is cut off; and whole ones."""
    model = tmp_path / "model"
    model.mkdir()
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    for content, told in (
        (None, f"{model}/part-1.safetensors is not there, and the index of the weights in {model} names it"),
        (b"1" * 8, f"{model}/part-1.safetensors cannot be read: it is shorter than its header says"),
        (b"1" * 16, None),
    ):
        if content is not None:
            (model / "part-1.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
        status, lines = run(None, "--check")
        assert (status, any(told in line for line in lines)) == (2, True) if told else status == 0, lines


def is_free(lock):
    with lock.open() as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


NO_WEIGHTS = "has no weights (*.safetensors), which are loaded from there; download them"
START_WITHOUT, FOR_RANKS = ", or start without: ", "--random-init for training ranks"
FOR_ENGINES = "--sglang-load-format dummy for engines"
NO_TOKENIZER = (
    "--hf-checkpoint MODEL has no tokenizer (tokenizer.json, or a vocabulary of another kind), which is loaded from there; "
    "download its files, or copy them there"
)
# Whose weights are their own.
EXTERNAL = "--rollout-external-engine-addrs 127.0.0.1:1 --rollout-num-gpus 0"
OWN_WAY = "--custom-generate-function-path plug_in.py:generate"
DUMP = "--debug-train-only --load-debug-rollout-data dump.pt"
SFT = (
    "--debug-train-only --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
    "--prompt-data chats.jsonl --input-key chat"
)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", [f"--hf-checkpoint MODEL {NO_WEIGHTS}{START_WITHOUT}{FOR_RANKS}, {FOR_ENGINES}", NO_TOKENIZER]),
        ("--random-init", [f"--hf-checkpoint MODEL {NO_WEIGHTS}{START_WITHOUT}{FOR_ENGINES}", NO_TOKENIZER]),
        ("--random-init --sglang-load-format dummy", [NO_TOKENIZER]),
        ("--debug-rollout-only", [f"--hf-checkpoint MODEL {NO_WEIGHTS}", NO_TOKENIZER]),
        (EXTERNAL, [f"--hf-checkpoint MODEL {NO_WEIGHTS}{START_WITHOUT}{FOR_RANKS}", NO_TOKENIZER]),
        (f"{EXTERNAL} --random-init", [NO_TOKENIZER]),
        (f"{EXTERNAL} --random-init {OWN_WAY}", []),
        (f"{EXTERNAL} --random-init {OWN_WAY} --apply-chat-template", [NO_TOKENIZER]),
        (f"{SFT} --random-init", [NO_TOKENIZER]),
        (DUMP, [f"--hf-checkpoint MODEL {NO_WEIGHTS}{START_WITHOUT}{FOR_RANKS}"]),
        (f"{DUMP} --random-init", []),
        (f"{DUMP} --load OTHER", [f"--load OTHER {NO_WEIGHTS}"]),
        (f"{DUMP} --use-kl-loss --ref-load OTHER", [f"--ref-load OTHER {NO_WEIGHTS}"]),
        (f"{DUMP} --load WHOLE --use-kl-loss --ref-load OTHER", [f"--ref-load OTHER {NO_WEIGHTS}"]),
        # Nothing asks for the reference.
        (f"{DUMP} --load WHOLE --ref-load OTHER", []),
        (
            f"{DUMP} --load WHOLE --use-opd --opd-type megatron --opd-teacher-load OTHER",
            [f"--opd-teacher-load OTHER {NO_WEIGHTS}"],
        ),
        (
            f"{DUMP} --load WHOLE --advantage-estimator ppo --megatron-config-path roles.yaml",
            [f"roles.yaml:1: role critic: OTHER {NO_WEIGHTS}"],
        ),
        # The critic has a checkpoint of its own beside the actor's.
        (f"{DUMP} --load RESUMED --advantage-estimator ppo", []),
        (
            "--rollout-num-gpus 2 --load WHOLE --sglang-config models.yaml",
            [
                f"--hf-checkpoint MODEL {NO_WEIGHTS}{START_WITHOUT}{FOR_ENGINES}",
                f"models.yaml:6: model judge: OTHER {NO_WEIGHTS}",
                NO_TOKENIZER,
                NO_TOKENIZER.replace("--hf-checkpoint MODEL", "models.yaml:6: model judge: OTHER"),
            ],
        ),
        ("--dry-run", []),
        ("--start-rollout-id 4", []),
    ],
)
def test_a_model_without_weights_or_tokenizer_is_told_where_a_run_would_load_them(
    run, tmp_path, monkeypatch, words, told
):
    """And nothing is where none would."""
    monkeypatch.setattr("slime.backends.sglang_utils.external.with_external_engines", lambda args: args)
    other, whole = write_config(tmp_path / "other"), write_stand_ins(write_config(tmp_path / "whole"))
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"chat": chat}) + "\n")
    (tmp_path / "plug_in.py").write_text("async def generate(args, sample, sampling_params): ...\n")
    # As a pickle begins.
    (tmp_path / "dump.pt").write_bytes(b"\x80")
    resumed = tmp_path / "resumed"
    for checkpoint in (resumed, resumed / "critic"):
        write_iteration(checkpoint)
    (tmp_path / "roles.yaml").write_text(f"megatron: [{{role: critic, overrides: {{load: {other}}}}}]\n")
    (tmp_path / "models.yaml").write_text(
        "sglang:\n- name: actor\n  server_groups: [{num_gpus: 1}]\n\n\n"
        f"- name: judge\n  model_path: {other}\n  server_groups: [{{num_gpus: 1}}]\n"
    )

    def named(text):
        places = {"OTHER": other, "WHOLE": whole, "RESUMED": resumed, "MODEL": tmp_path / "model"}
        for name, path in places.items():
            text = text.replace(name, str(path))
        return re.sub(r"(models|roles)\.yaml", rf"{tmp_path}/\1.yaml", text)

    status, lines = run(None, *named(words).split(), *([] if "--dry-run" in words else ["--check"]), whole=False)
    lacking = [
        line.removeprefix("ERROR: ") for line in lines if "which is loaded" in line or "which are loaded" in line
    ]
    assert (status, lacking) == (2 if told else 0, [named(line) for line in told]), lines


@pytest.mark.parametrize(
    ("files", "words", "status"), [("a.bin", "--random-init", 0), ("a.bin", "", 2), ("a.pt", "--random-init", 0)]
)
def test_engines_load_weights_of_older_formats_and_ranks_do_not(run, tmp_path, files, words, status):
    run(None, "--dry-run")
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model" / files)
    found, lines = run(None, "--check", *words.split(), whole=False)
    told = NO_WEIGHTS.replace("download them", f"make them of {files} by save_pretrained of transformers")
    assert found == status and any(f"{told}{START_WITHOUT}{FOR_RANKS}" in line for line in lines) is bool(status)


@pytest.mark.parametrize("ending", [None, RunError("engine 0 died"), KeyboardInterrupt()])
def test_the_directory_of_checkpoints_is_let_go_of_however_a_run_ends(run, tmp_path, ending):
    lock, held = tmp_path / "checkpoints/.checkpoints.lock", []

    def train(args, progress):
        held.append(not is_free(lock))
        if ending is not None:
            raise ending

    for _ in range(2):
        run(train, "--save", str(lock.parent), "--save-interval", "1")
        assert is_free(lock)
    assert held == [True, True]


# What holds the directory of a run.
OTHER_RUN = """
import sys
from pathlib import Path
from slime.ray.session import _directory_claimed
with _directory_claimed(Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


def warnings_of(result):
    status, lines = result
    assert status == 0, lines
    return [line for line in lines if "another run" in line]


def test_a_run_that_begins_in_the_directory_of_another_one_names_it_and_goes_on(run, tmp_path, monkeypatch):
    """Until that ends, however it does: the kernel lets go of what a killed one held."""
    both, alone = tmp_path / "both", tmp_path / "alone"

    def warnings_in(directory):
        monkeypatch.setenv("TENSORBOARD_DIR", str(directory))
        return warnings_of(run(lambda args, progress: None))

    with subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, str(both)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment_for_python(), text=True,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == "claimed\n"
        named = f"WARNING: {both}: another run (process {other.pid} on {socket.gethostname()}, since "
        for _ in range(2):
            # A second one takes nothing from the first one.
            [warning] = warnings_in(both)
            assert warning.startswith(named)
        assert warnings_in(alone) == []
        (both / ".run.lock").write_bytes(b"\xff")
        [warning] = warnings_in(both)
        assert warning.startswith(f"WARNING: {both}: another run writes into this directory: ")
        other.kill()
        other.wait(30)
    assert warnings_in(both) == []


@pytest.mark.parametrize("ending", [None, RunError("engine 0 died"), KeyboardInterrupt()])
def test_the_directory_of_a_run_is_held_while_it_lives_and_let_go_of_however_it_ends(
    run, tmp_path, monkeypatch, ending
):
    """With its own restarts it has nothing to warn of."""
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "own"))
    lock, held = tmp_path / "own/.run.lock", []

    def train(args, progress):
        held.append(not is_free(lock))
        progress.start_rollout_id, progress.num_rollout, progress.rollouts_done = 0, 4, 2
        if ending is not None:
            raise ending

    _, lines = run(train, "--save", str(tmp_path / "checkpoints"), "--save-interval", "1", "--max-restarts", "2")
    assert held == [True] * (3 if isinstance(ending, RunError) else 1)
    assert is_free(lock) and not [line for line in lines if "another run" in line]
    assert lock.read_text().startswith(f"process {os.getpid()} on {socket.gethostname()}, since ")


@pytest.mark.parametrize(
    ("written", "flag"),
    [("log directory", "--tensorboard-dir"), ("lock of logs", "--tensorboard-dir"), ("record", "--tensorboard-dir"),
     ("lock of checkpoints", "--save"), ("record beside checkpoints", "--save")],
)  # fmt: skip
def test_a_full_disk_at_the_start_names_the_flag_of_its_directory(run, tmp_path, monkeypatch, written, flag):
    full = OSError(errno.ENOSPC, "No space left on device")
    write, claim = session.write_run_record, session.claim_directory

    def fail(*_):
        raise full

    locks = {"lock of logs": session._RUN_LOCK, "lock of checkpoints": session._CHECKPOINTS_LOCK}
    monkeypatch.setattr(
        session, "claim_directory", lambda path, lock: fail() if lock == locks.get(written) else claim(path, lock)
    )
    monkeypatch.setattr(session, "write_run_record", fail if written.startswith("record") else write)
    if written == "log directory":
        (tmp_path / "board").mkdir()
        (tmp_path / "board" / "logs").write_text("in the way")
    words = ["--save", str(tmp_path / "kept"), "--save-interval", "1"] if flag == "--save" else []
    status, lines = run(lambda args, progress: None, "--tensorboard-dir", str(tmp_path / "board"), *words)
    told = [line for line in lines if "make room there" in line]
    assert status == 1 and len(told) == 1 and flag in told[0]
    assert "record" not in written or f"{tmp_path / ('kept' if words else 'board')}/args.json" in told[0]


def test_the_record_of_a_run_is_about_the_devices_of_its_cluster(run, tmp_path, monkeypatch):
    @contextlib.contextmanager
    def on_gpus(args):
        yield argparse.Namespace(**{**vars(args), "params_dtype_name": "bfloat16"})

    monkeypatch.setattr("slime.ray.cluster.ray_cluster", on_gpus)
    told = []
    monkeypatch.setattr(session, "init_tracking", lambda args, directory, again: told.append(args.params_dtype_name))
    status, lines = run(lambda args, progress: None)
    assert status == 0 and [line for line in lines if "parameters in bfloat16" in line]
    record = json.loads(next(tmp_path.rglob("args.json")).read_text())
    assert record["arguments"]["params_dtype_name"]["value"] == "bfloat16" and told == ["bfloat16"]
