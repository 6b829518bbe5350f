import re

import pytest

from slime.utils.checkpoint_directory import POINTER, iteration_directory, latest_iteration
from slime.utils.errors import UserError
from tests.support.models.args import parse, write_config


def megatron_checkpoint(directory, iteration=3):
    (directory / f"iter_{iteration:07d}").mkdir(parents=True)
    (directory / f"iter_{iteration:07d}" / "metadata.json").write_text("{}")
    (directory / POINTER).write_text(str(iteration))
    return directory


def test_hf_checkpoint_is_the_default_source(tmp_path):
    args = parse(tmp_path)
    assert (args.initial_weights.kind, args.initial_weights.path) == ("hf", str(tmp_path / "model"))
    assert args.start_rollout_id == 0 and args.no_load_optim


def test_random_start_needs_the_flag(tmp_path):
    assert parse(tmp_path, "--random-init").initial_weights.kind == "random"


def test_first_launch_of_a_resumable_script(tmp_path):
    run = str(tmp_path / "run")
    args = parse(tmp_path, "--load", run, "--save", run)
    assert args.initial_weights.kind == "hf"


def test_a_first_launch_may_be_refused(tmp_path):
    run = str(tmp_path / "run")
    words = ["--load", run, "--save", run, "--exit-on-missing-checkpoint"]
    with pytest.raises(
        UserError, match="--load .*/run holds no checkpoint; for a first launch drop --exit-on-missing-"
    ):
        parse(tmp_path, *words)
    megatron_checkpoint(tmp_path / "run")
    assert parse(tmp_path, *words).initial_weights.resume


def test_reference_gives_the_initial_weights(tmp_path):
    reference = megatron_checkpoint(tmp_path / "sft")
    run = str(tmp_path / "run")
    args = parse(tmp_path, "--load", run, "--save", run, "--ref-load", str(reference), "--ref-ckpt-step", "3")
    assert args.initial_weights.path == str(reference)
    assert args.initial_weights.step == 3 and not args.initial_weights.resume


def test_the_iteration_of_the_reference_is_the_one_that_is_loaded(tmp_path):
    reference = megatron_checkpoint(tmp_path / "sft")
    assert parse(tmp_path, "--ref-load", str(reference), "--ref-ckpt-step", "3").ckpt_step == 3


def test_an_initial_checkpoint_comes_before_the_reference_and_after_load(tmp_path):
    first, reference = megatron_checkpoint(tmp_path / "first"), megatron_checkpoint(tmp_path / "sft")
    words = ["--initial-megatron-checkpoint", str(first), "--ref-load", str(reference)]
    args = parse(tmp_path, *words)
    assert args.initial_weights.path == str(first) and not args.initial_weights.resume
    run = megatron_checkpoint(tmp_path / "run")
    assert parse(tmp_path, *words, "--load", str(run)).initial_weights.path == str(run)


def test_a_plan_is_not_stopped_by_missing_weights(tmp_path):
    args = parse(tmp_path, "--load", "/nowhere/run", "--dry-run")
    assert args.initial_weights is None and args.plan_notes[0].startswith("--load /nowhere/run is missing or empty")


def test_load_with_pointer_is_a_resume(tmp_path):
    run = megatron_checkpoint(tmp_path / "run")
    args = parse(tmp_path, "--load", str(run))
    assert args.initial_weights.resume and args.start_rollout_id is None


def test_a7_explicit_start_id_is_kept(tmp_path):
    run = megatron_checkpoint(tmp_path / "run")
    assert parse(tmp_path, "--load", str(run), "--start-rollout-id", "5").start_rollout_id == 5


@pytest.mark.parametrize("flag", ["--load", "--ref-load"])
@pytest.mark.parametrize("written_by, other", [("fsdp", "megatron"), ("megatron", "fsdp")])
def test_a_checkpoint_of_another_backend_is_refused(tmp_path, flag, written_by, other):
    run = megatron_checkpoint(tmp_path / "run")
    metadata = {"fsdp": '{"sharded_backend": "fsdp2"}', "megatron": '{"sharded_backend": "torch_dist"}'}[written_by]
    (run / "iter_0000003" / "metadata.json").write_text(metadata)
    source = parse(tmp_path, flag, str(run), "--train-backend", written_by).initial_weights
    assert (source.path, source.resume) == (str(run), flag == "--load")
    with pytest.raises(UserError, match=r"run/iter_0000003 was (not )?saved with --train-backend fsdp, .*Hugging Face"):
        parse(tmp_path, flag, str(run), "--train-backend", other)


def test_load_of_an_hf_directory(tmp_path):
    other = write_config(tmp_path / "other")
    args = parse(tmp_path, "--load", str(other))
    assert (args.initial_weights.kind, args.initial_weights.path) == ("hf", str(other))


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda path: None, "is missing or empty"),
        (lambda path: (path / "stuff").mkdir(parents=True), "holds stuff but no checkpoint"),
        (
            lambda path: (path / "iter_0000007").mkdir(parents=True),
            f"iter_\\* directories but no {POINTER}; none is complete",
        ),
    ],
)
def test_load_that_is_no_checkpoint(tmp_path, prepare, message):
    path = tmp_path / "typo"
    prepare(path)
    with pytest.raises(UserError, match=message):
        parse(tmp_path, "--load", str(path))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--load", "{} is a file; give a Megatron directory"),
        ("--ref-load", "{}: it is a file, and a checkpoint is a directory; give a Megatron"),
        ("--initial-megatron-checkpoint", "{}: it is a file, and a checkpoint is a directory; give a Megatron"),
        ("--hf-checkpoint", "{}: it is a file, and a checkpoint is a directory; give a Hugging Face"),
        ("--save", "{0}: {0} is a file, not a directory; give a place where you may write"),
    ],
)
def test_a_file_in_the_place_of_a_checkpoint_is_called_a_file(tmp_path, flag, message):
    file = tmp_path / "model.safetensors"
    file.write_text("weights")
    with pytest.raises(UserError, match=re.escape(f"{flag} {message.format(file)}")):
        parse(tmp_path, "--use-kl-loss", flag, str(file))
    if flag == "--load":
        with pytest.raises(UserError, match=re.escape(f"--load {message.format(file)}")):
            parse(tmp_path, flag, str(file), "--save", str(file))


def test_complete_iteration_without_pointer_names_the_way_out(tmp_path):
    run = megatron_checkpoint(tmp_path / "run", 12)
    (run / POINTER).unlink()
    with pytest.raises(UserError, match="newest complete one is iter_0000012: write 12 into"):
        parse(tmp_path, "--load", str(run), "--save", str(run))
    with pytest.raises(UserError, match="--ref-load .* the newest complete one is iter_0000012: write 12 into"):
        parse(tmp_path, "--ref-load", str(run))


@pytest.mark.parametrize("content", [b"", b"\x00\x00", b"\xff\xfe", b"12.5", "²".encode(), b"-1"])
def test_a_pointer_without_a_number_names_the_way_out(tmp_path, content):
    run = megatron_checkpoint(tmp_path / "run", 12)
    iteration_directory(run, 13).mkdir()
    (run / POINTER).write_bytes(content)
    with pytest.raises(UserError, match=f"{run / POINTER} holds .*newest complete one is iter_0000012: write 12 into"):
        latest_iteration(run)


def test_weights_that_megatron_has_converted_are_told_to_be_renamed(tmp_path):
    run = megatron_checkpoint(tmp_path / "run", 12)
    iteration_directory(run, 12).rename(run / "release")
    (run / POINTER).write_text("release\n")
    with pytest.raises(UserError, match=f"rename {run}/release to iter_0000000 and write 0"):
        latest_iteration(run)


def test_first_launch_may_hold_only_its_own_leftovers(tmp_path):
    run = tmp_path / "run"
    (run / "rollout").mkdir(parents=True)
    (run / "args.json").write_text("{}")
    (run / ".iter_0000002.writing").mkdir()
    words = ["--load", str(run), "--save", str(run)]
    assert parse(tmp_path, *words).initial_weights.kind == "hf"
    # What other flags write there, a run that ended before its first checkpoint leaves, too.
    (run / "details/rollout_data").mkdir(parents=True)
    (run / "export-3").mkdir()
    with pytest.raises(UserError, match="holds details, export-3 but no checkpoint"):
        parse(tmp_path, *words)
    words += ["--dump-details", f"{run}/details", "--save-hf", f"{run}/export-{{rollout_id}}"]
    assert parse(tmp_path, *words).initial_weights.kind == "hf"


def test_a_reference_among_the_checkpoints_of_the_run_is_one_of_them_for_good(tmp_path):
    run = str(megatron_checkpoint(tmp_path / "run"))
    words = ["--load", run, "--save", run, "--ref-load", run]
    reference = [*words, "--use-kl-loss"]
    with pytest.raises(UserError, match="a later start would take the newest; give its iteration by --ref-ckpt-step"):
        parse(tmp_path, *reference)
    with pytest.raises(UserError, match="--keep-last 2 would delete what is read there"):
        parse(tmp_path, *reference, "--ref-ckpt-step", "3", "--keep-last", "2")
    assert parse(tmp_path, *reference, "--ref-ckpt-step", "3").ref_ckpt_step == 3
    # Without a reference it is but another name of where the run starts.
    parse(tmp_path, *words)
    parse(tmp_path, *reference, "--debug-rollout-only")


def test_a_model_among_the_checkpoints_of_the_run_is_not_deleted_as_one_of_them(tmp_path):
    """A checkpoint of FSDP is a model too. Everything that a save copies, and what an engine starts from, comes of it."""
    model = write_config(tmp_path / "run/iter_0000003")
    words = ["--hf-checkpoint", str(model), "--save", str(tmp_path / "run"), "--save-interval", "1"]
    with pytest.raises(UserError, match=rf"--keep-last 2 would delete --hf-checkpoint {model}, one of the checkpoints"):
        parse(tmp_path, *words, "--keep-last", "2")
    parse(tmp_path, *words)
    parse(tmp_path, *words, "--keep-last", "2", "--debug-rollout-only")
    beside = write_config(tmp_path / "run/model")
    parse(tmp_path, *words, "--keep-last", "2", "--hf-checkpoint", str(beside))


def test_a_refusal_stands_alone(tmp_path, caplog):
    """What a run would have begun with is no help to somebody whose flags are refused."""
    run = str(tmp_path / "run")
    sources = ["--load", run, "--save", run, "--use-kl-loss", "--ref-load", str(tmp_path / "model")]
    with caplog.at_level("INFO"), pytest.raises(UserError):
        parse(tmp_path, *sources, "--eps-clip", "-1")
    with caplog.at_level("INFO"), pytest.raises(UserError):
        parse(tmp_path, "--eps-clip", "-1")
    assert [record.getMessage() for record in caplog.records] == []


def test_missing_step_is_an_error(tmp_path):
    run = megatron_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match="--ckpt-step 9: .*iter_0000009 does not exist"):
        parse(tmp_path, "--load", str(run), "--ckpt-step", "9")


def test_reference_that_is_no_checkpoint(tmp_path):
    (tmp_path / "ref").mkdir()
    with pytest.raises(UserError, match="--ref-load .* is no checkpoint"):
        parse(tmp_path, "--use-kl-loss", "--ref-load", str(tmp_path / "ref"))


def test_a9_missing_reference_directory(tmp_path):
    with pytest.raises(UserError, match="--ref-load .*: no such directory"):
        parse(tmp_path, "--use-kl-loss", "--ref-load", str(tmp_path / "nowhere"))
