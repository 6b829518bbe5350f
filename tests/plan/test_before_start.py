"""What ends a run before Ray starts, by the way that the driver goes."""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tqdm

from slime.arguments import parse_args
from slime.backends.sglang_utils import server_arguments
from slime.plan import make_plan
from slime.plan.before_start import check_before_start
from slime.ray import cluster
from slime.ray.session import main
from slime.utils.errors import UserError
from tests.support.models import args as arguments
from tests.support.models.args import command_line, write_iteration, write_stand_ins

SFT = "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only"
PLAIN_PROMPTS = '{"prompt": "a", "label": "1"}\n'


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def start(args):
        raise AssertionError("Ray was started")

    monkeypatch.setattr("slime.ray.cluster.ray_cluster", start)
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def run(directory: Path, *words: str) -> int:
    own = command_line(directory)
    write_stand_ins(directory / "model")
    return main(lambda args, progress: None, [*own, *words])


def parse(directory: Path, *words: str) -> argparse.Namespace:
    """Checked arguments whose model has what is looked for."""
    args = arguments.parse(directory, *words)
    write_stand_ins(directory / "model")
    return args


def problems(directory: Path, *words: str, **keywords) -> list[str]:
    with pytest.raises(UserError) as error:
        check_before_start(parse(directory, *words), **keywords)
    return str(error.value).splitlines()


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def give_tokenizer(directory: Path, **config: object) -> None:
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(config))


def test_broken_and_incomplete_rows_are_named_by_file_and_line(tmp_path):
    good = {"prompt": "a", "label": "1"}
    path = write(tmp_path / "rows.jsonl", good, "\n", '{"prompt": \n', good, {"label": "2"}, {"prompt": 3}, [1],
                 {"prompt": [{"content": "x"}]}, good)  # fmt: skip
    mend = "; mend the row, or skip and count such rows with --allow-bad-rows"
    lines = problems(tmp_path, "--prompt-data", path)
    assert all(line.endswith(mend) for line in lines)
    assert [line.removesuffix(mend).split(": ", 1)[0] for line in lines] == [f"{path}:{n}" for n in (3, 5, 6, 7, 8)]
    assert lines[1] == f"{path}:5: there is no field 'prompt'; the row has label{mend}"
    check_before_start(parse(tmp_path, "--prompt-data", path, "--allow-bad-rows"))


def test_a_label_or_a_reward_type_that_only_later_rows_lack(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "a"})
    assert problems(tmp_path, "--prompt-data", path, "--label-key", "answer") == [
        f"{path}:2: there is no field 'answer' (--label-key); mend the row, or skip and count such rows with --allow-bad-rows"
    ]
    words = ["--eval-prompt-data", "held_out", path, "--eval-interval", "1", "--eval-label-key", "answer"]
    (line,) = problems(tmp_path, *words)
    assert line.startswith(f"{path}:2: there is no field 'answer' (--eval-label-key); mend")
    typed = {"prompt": "a", "label": "1", "metadata": {"rm_type": "math"}}
    path = write(tmp_path / "typed.jsonl", typed, {"prompt": "a"})
    words = command_line(tmp_path)
    without_type = [*words[: words.index("--rm-type")], "--prompt-data", path]
    with pytest.raises(UserError) as error:
        check_before_start(parse_args(argv=without_type))
    assert str(error.value) == (
        f"{path}:2: nothing says how responses are graded: no `rm_type` in 'metadata'; give --rm-type"
    )  # fmt: skip


UNLABELLED = [
    {"prompt": "a", "label": "1"},
    {"prompt": "a"},
    {"prompt": "a", "label": "", "metadata": {"rm_type": "f1"}},
]


def test_a_label_that_a_built_in_reward_needs(tmp_path):
    path = write(tmp_path / "rows.jsonl", *UNLABELLED)
    words = ["--rm-type", "boxed_math", "--prompt-data", path]
    assert problems(tmp_path, *words) == [
        f"{path}:2: there is no label, which the reward boxed_math needs; --label-key names its field",
        f"{path}:3: there is no label, which the reward f1 needs; --label-key names its field",
    ]
    labelled = write(tmp_path / "labelled.jsonl", UNLABELLED[0])
    sets = write(tmp_path / "sets.yaml", f"eval: {{datasets: [{{name: held_out, path: {path}, rm_type: f1}}]}}\n")
    words = ["--rm-type", "random", "--prompt-data", labelled, "--eval-config", sets, "--eval-interval", "1"]
    assert [line.partition(": ")[0] for line in problems(tmp_path, *words)] == [f"{path}:2", f"{path}:3"]


@pytest.mark.parametrize(
    "words",
    ["--rm-type gpqa", "--rm-type random", "--rm-type math --rollout-sample-hook-path {file}:fn",
     "--rm-type math --buffer-filter-path {file}:fn",
     "--rm-type math --custom-generate-function-path {file}:fn", "--custom-rm-path {file}:fn",
     "--rm-type math --rollout-function-path {file}:fn --eval-function-path {file}:fn"],
)  # fmt: skip
def test_a_label_that_nobody_needs_or_a_function_may_give(tmp_path, words):
    file = write(tmp_path / "own.py", "def fn(args, *given, **named): ...\n")
    path = write(tmp_path / "rows.jsonl", *UNLABELLED[:2])
    check_before_start(parse(tmp_path, "--prompt-data", path, *words.format(file=file).split()))


def test_a_scan_ends_in_time_and_says_how_far_it_came(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", PLAIN_PROMPTS * 3, "broken\n")
    with caplog.at_level("INFO"):
        check_before_start(parse(tmp_path, "--prompt-data", path), scan_seconds=0)
    assert f"{path}: the first 1 rows can be used; the others are read while the run starts" in caplog.text


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_counts_the_rows_where_somebody_looks(tmp_path, monkeypatch, watched):
    terminal = io.StringIO()
    terminal.isatty = lambda: watched
    monkeypatch.setattr("sys.stderr", terminal)
    # Drawn at once and at every row: how long a scan takes does not matter here.
    at_once, bar = {"file": terminal, "delay": 0, "mininterval": 0}, tqdm.tqdm
    monkeypatch.setattr(tqdm, "tqdm", lambda **options: bar(**{**options, **at_once}))
    check_before_start(parse(tmp_path, "--prompt-data", write(tmp_path / "rows.jsonl", PLAIN_PROMPTS * 3)))
    drawn = [line for line in terminal.getvalue().split("\r") if "checking rows.jsonl" in line]
    assert any("3/3" in line for line in drawn) if watched else drawn == []


def test_many_broken_rows_are_told_by_a_few(tmp_path):
    path = write(tmp_path / "rows.jsonl", PLAIN_PROMPTS, "broken\n" * 3000)
    assert len(problems(tmp_path, "--prompt-data", path)) == 5


@pytest.mark.parametrize("rows", ["@[-2:]", "@[900:]"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_time_counts_for_rows_that_are_only_passed_too(tmp_path, monkeypatch, caplog, rows, ending):
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        write(path, PLAIN_PROMPTS * 1000)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"prompt": ["a"] * 1000, "label": ["1"] * 1000}), path)
    args = parse(tmp_path, "--prompt-data", f"{path}{rows}")
    asked = []

    def clock():
        asked.append(None)
        return float(len(asked))

    monkeypatch.setattr("slime.utils.dataset.time.monotonic", clock)
    with caplog.at_level("INFO"):
        check_before_start(args, scan_seconds=20)
    assert len(asked) < 30
    assert f"{path}{rows}: its rows are read while the run starts" in caplog.text


def test_only_what_the_run_reads_is_scanned(tmp_path):
    broken = write(tmp_path / "broken.jsonl", PLAIN_PROMPTS, "broken\n")
    evaluation = ["--eval-prompt-data", "held_out", broken]
    check_before_start(parse(tmp_path, *evaluation))
    assert problems(tmp_path, *evaluation, "--eval-interval", "2")[0].startswith(f"{broken}:2: no valid JSON")


@pytest.mark.parametrize("config", [{}, {"chat_template": ""}])
def test_a_missing_chat_template_is_told(tmp_path, config):
    give_tokenizer(tmp_path, **config)
    model = tmp_path / "model"
    has_none = f"but the tokenizer {model} has no chat template; put one there as chat_template.jinja"
    assert problems(tmp_path, "--apply-chat-template") == [f"--apply-chat-template is given, {has_none}"]
    chat = {"prompt": [{"role": "user", "content": "a"}], "label": "1"}
    chats = write(tmp_path / "chats.jsonl", PLAIN_PROMPTS, chat)
    assert problems(tmp_path, "--prompt-data", chats) == [
        f"{chats}:2: the prompt is a list of messages, {has_none}"
    ]  # fmt: skip
    # A function of the user's may do without.
    plug_in = write(tmp_path / "generate.py", "def generate(args, sample, sampling_params): ...\n")
    check_before_start(parse(tmp_path, "--prompt-data", chats, "--custom-generate-function-path", plug_in))
    messages = write(tmp_path / "messages.jsonl", {"prompt": [{"role": "user", "content": "a"}]})
    assert problems(tmp_path, "--prompt-data", messages, *SFT.split()) == [
        f"supervised fine-tuning renders chats, {has_none}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "place", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", "tekken.json", "code", None]
)
def test_a_template_may_stand_in_several_places(tmp_path, place):
    if place is not None:
        here = {"chat_template": "{{ messages }}"} if place == "tokenizer_config.json" else {}
        give_tokenizer(tmp_path, **({"auto_map": {"AutoTokenizer": "x.Y"}} if place == "code" else here))
        if "." in place and not here:
            (tmp_path / "model" / place).write_text("{}")
    check_before_start(parse(tmp_path, "--apply-chat-template"))


def test_supervised_fine_tuning_needs_messages(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "a"})
    lines = problems(tmp_path, "--prompt-data", path, *SFT.split())
    assert lines[0].startswith(f"{path}:2: the prompt is text, and supervised fine-tuning needs a list of messages")


@pytest.mark.parametrize(("name", "words", "told"), [
    ("iter_0000007", "", "does not exist, although {checkpoint}/latest_checkpointed_iteration.txt names it; name a whole one"),
    ("iter_0000001", "--ckpt-step 1", "is no whole checkpoint; ask for another step, or start elsewhere"),
])  # fmt: skip
def test_a_checkpoint_that_is_not_whole_is_told(tmp_path, name, words, told):
    checkpoint = tmp_path / "checkpoint"
    (checkpoint / "iter_0000001").mkdir(parents=True)
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("7")
    words = ["--num-rollout", "20", "--load", str(checkpoint), *words.split()]
    (line,) = problems(tmp_path, *words)
    assert line.startswith(f"{checkpoint}/{name} {told.format(checkpoint=checkpoint)}")
    write_iteration(checkpoint, int(name.removeprefix("iter_")))
    check_before_start(parse(tmp_path, *words))


def test_the_driver_ends_before_ray_with_a_status_for_each_case(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = write(tmp_path / "broken.jsonl", PLAIN_PROMPTS, "broken\n")
    assert run(tmp_path, "--prompt-data", broken) == 2
    shown = capsys.readouterr()
    assert f"{broken}:2: no valid JSON" in shown.err and "no valid JSON" not in shown.out
    assert run(tmp_path, "--start-rollout-id", "4") == 0
    assert "nothing left to do" in capsys.readouterr().out
    assert run(tmp_path, "--check") == 0
    assert capsys.readouterr().out == "ready to start; of Ray the run needs 2 GPUs and 3 CPUs\n"
    assert run(tmp_path, "--check", "--start-rollout-id", "4") == 0
    assert capsys.readouterr().out.startswith("nothing left to do")
    assert run(tmp_path, "--check", "--prompt-data", broken) == 2
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("gpus", "memory", "said"),
    [
        (1, 2**40, "the run needs 1 GPUs for training and 1 for engines = 2, but this machine has 1"),
        (0, 2**30, "of memory ("),
    ],
)
@pytest.mark.parametrize("check", [["--check"], []])
def test_a_machine_that_is_too_small_is_told_before_anything_is_written(
    tmp_path, capsys, monkeypatch, check, gpus, memory, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slime.ray.cluster.gpus_on_this_machine", lambda: gpus)
    monkeypatch.setattr("slime.plan.memory.machine_memory", lambda: memory)
    assert run(tmp_path, *check) == 2
    shown = capsys.readouterr()
    assert said in shown.err and "ready" not in shown.out
    assert not (tmp_path / "outputs").exists()
    # The machines of a cluster are not this one.
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run(tmp_path, "--check") == 0


@pytest.mark.parametrize(
    ("gpus", "there", "words", "message"),
    [
        (0, False, [], "moving their caches needs GPUs, which this machine has not, or the package mooncake-transfer-"),
        (0, True, [], None),
        (0, True, ["nixl"], "nixl moves caches between GPUs, and this machine has none; give mooncake_tcp, or leave --"),
        (3, False, [], "-backend mooncake needs the package mooncake-transfer-engine, which is not installed here"),
        (3, False, ["nixl"], "-backend nixl needs the package nixl, which is not installed here"),
        (3, True, ["nixl"], None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_file", [False, True])
def test_engines_that_prefill_need_a_way_for_their_caches(tmp_path, monkeypatch, gpus, there, words, message, by_file):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: gpus)
    monkeypatch.setattr(cluster, "require_memory_of_machine", lambda args: None)
    monkeypatch.setattr(server_arguments.importlib.util, "find_spec", lambda name: name if there else None)
    monkeypatch.setattr(server_arguments, "import_problem", lambda module: None)
    layout = ["--prefill-num-servers", "1"]
    layout += ["--sglang-disaggregation-transfer-backend", *words] if words else []
    if by_file:
        backend = f", overrides: {{disaggregation_transfer_backend: {words[0]}}}" if words else ""
        groups = "".join(f"      - {{worker_type: {role}, num_gpus: 1{backend}}}\n" for role in ("prefill", "decode"))
        (tmp_path / "serving.yaml").write_text(f"sglang:\n  - name: actor\n    server_groups:\n{groups}")
        layout = ["--sglang-config", str(tmp_path / "serving.yaml")]
    args = parse(tmp_path, "--rollout-num-gpus", "2", *layout)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        cluster.check_machine(args)
    # A run that only trains starts no engines, and a plan asks no machine.
    cluster.check_machine(parse(tmp_path, "--rollout-num-gpus", "2", *layout, "--debug-train-only"))


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_directory_of_ray_that_is_too_deep_for_sockets_is_told(tmp_path, monkeypatch, variable):
    monkeypatch.setattr(cluster, "require_memory_of_machine", lambda args: None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for characters in (39, 40):
        monkeypatch.setenv(variable, "/".ljust(characters, "d"))
        with pytest.raises(UserError, match="RAY_TMPDIR") if characters > 39 else contextlib.nullcontext():
            cluster.check_machine(parse(tmp_path))


@pytest.mark.parametrize(("gpus", "accelerator"), [(0, "cpu"), (2, None)])
def test_a_run_on_a_machine_without_gpus_computes_on_its_cpu(tmp_path, monkeypatch, gpus, accelerator):
    args = parse(tmp_path)
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: gpus)
    monkeypatch.setattr(cluster, "require_memory_of_machine", lambda args: None)
    cluster.check_machine(args)
    assert os.environ.get("SLIME_ACCELERATOR") == accelerator


@pytest.mark.parametrize(("words", "warned"), [(("3",), True), (("4",), False), (("3", "--debug-rollout-only"), False)])
def test_evaluations_between_pushes_are_warned_of(tmp_path, caplog, words, warned):
    write(tmp_path / "prompts.jsonl", PLAIN_PROMPTS)
    evaluated = ("--eval-prompt-data", "set", str(tmp_path / "prompts.jsonl"), "--update-weights-interval", "2")
    line = [*command_line(tmp_path), "--rollout-num-gpus", "1", *evaluated, "--eval-interval", *words]
    write_stand_ins(tmp_path / "model")
    args = parse_args(argv=line, asynchronous=True)
    check_before_start(args)
    said = "--eval-interval 3 is no multiple of --update-weights-interval 2"
    assert (said in caplog.text) is warned
    assert any(said in warning for warning in make_plan(args).warnings) is warned


def test_gpus_that_stay_reserved_are_told_by_their_flag(tmp_path, monkeypatch):
    words = (
        "--debug-rollout-only",
        "--rollout-external-engine-addrs",
        "10.0.0.2:30000",
        "--actor-num-gpus-per-node",
        "4",
    )
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: 1)
    with pytest.raises(
        UserError, match=r"reserves 4 GPUs, but this machine has 1: .*; lower --actor-num-gpus-per-node,"
    ):
        cluster.check_machine(parse(tmp_path, *words))


@pytest.mark.parametrize(("gpus", "refused"), [(0, True), (1, False)])
def test_engines_that_draft_want_gpus_before_anything_starts(tmp_path, monkeypatch, gpus, refused):
    args = parse(tmp_path, "--debug-rollout-only")
    args.sglang_speculative_algorithm = "EAGLE"
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: gpus)
    # Set by the check.
    monkeypatch.setenv("SLIME_ACCELERATOR", "")
    monkeypatch.setattr(cluster, "require_memory_of_machine", lambda args: None)
    said = "--sglang-speculative-algorithm EAGLE: engines draft on GPUs alone, and this machine has none"
    with pytest.raises(UserError, match=said) if refused else contextlib.nullcontext():
        cluster.check_machine(args)


IMAGES = ("--multimodal-keys", '{"image": "images"}', "--debug-rollout-only")


@pytest.mark.parametrize(
    ("accelerator", "address", "gpus", "refused"),
    [
        (None, None, 0, True),
        ("cpu", None, 0, True),
        ("cpu", "10.0.0.1:6379", 0, True),
        # The machines of a cluster are not this one.
        (None, "10.0.0.1:6379", 0, False),
        (None, None, 1, False),
    ],
)
def test_engines_on_cpus_are_not_asked_about_images(tmp_path, monkeypatch, accelerator, address, gpus, refused):
    for name, value in (("SLIME_ACCELERATOR", accelerator), ("RAY_ADDRESS", address)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: gpus)
    told = pytest.raises(UserError, match="--multimodal-keys: engines on CPUs have no image processors.*need GPUs")
    with told if refused else contextlib.nullcontext():
        cluster.refuse_images_on_cpus(parse(tmp_path, *IMAGES))
    cluster.refuse_images_on_cpus(parse(tmp_path))
    # These ask somebody else.
    (tmp_path / "mine.py").write_text("async def generate(args, sample, sampling_params):\n    return sample\n")
    mine = ("--custom-generate-function-path", f"{tmp_path}/mine.py:generate")
    cluster.refuse_images_on_cpus(parse(tmp_path, *IMAGES, *mine))
    cluster.refuse_images_on_cpus(parse(tmp_path, *IMAGES, "--rollout-external-engine-addrs", "10.0.0.2:30000"))


@pytest.mark.parametrize(
    ("words", "address", "gpus", "problem"),
    [
        ("", None, 0, "--memory-recorder torch records the memory of GPUs, and this run has none"),
        ("", None, 1, None),
        # What the machines of a cluster have is not known here; each rank looks for itself.
        ("", "10.0.0.1:6379", 0, None),
        ("--memory-recorder memray", None, 0, "--memory-recorder memray needs the package memray: pip install memray"),
        ("--memory-recorder memray", "10.0.0.1:6379", 0, None),
        ("--debug-rollout-only", None, 0, None),
    ],
)
def test_memory_that_ranks_cannot_record_is_refused_before_they_start(
    tmp_path, monkeypatch, words, address, gpus, problem
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("slime.arguments.sizes.gpus_on_this_machine", lambda: gpus)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = parse(tmp_path, "--no-use-tensorboard", *words.split())
    cluster.refuse_recording(args)
    args.record_memory_history = True
    with pytest.raises(UserError, match=problem) if problem else contextlib.nullcontext():
        cluster.refuse_recording(args)


def test_a_check_refuses_what_ranks_could_not_record(tmp_path, capsys):
    assert run(tmp_path, "--record-memory-history", "--check") == 2
    assert "--memory-recorder torch records the memory of GPUs, and this run has none" in capsys.readouterr().err


@pytest.mark.parametrize("check", [["--check"], []])
def test_batches_by_nixl_need_its_package(tmp_path, capsys, monkeypatch, check):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "nixl" else find(name, *more))
    words = ["--rollout-data-transport", "nixl"]
    assert run(tmp_path, *words, *check) == 2
    said = "--rollout-data-transport nixl needs the package nixl, which is not installed here: pip install nixl, or leave the"
    assert said in capsys.readouterr().err
    args = parse(tmp_path, *words)
    with pytest.raises(UserError, match=said):
        cluster.refuse_transport(args)
    # Nothing travels, and the machines of a cluster are not this one.
    cluster.refuse_transport(parse(tmp_path, *words, "--debug-rollout-only", "--rollout-num-gpus", "1"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster.refuse_transport(args)


def set_with_images(tmp_path, field="x", **entry):
    """The words of a run that evaluates a set whose images are in `field`; its key stands in line 3 of the file."""
    parse(tmp_path)
    lines = "".join(f"    {name}: {value}\n" for name, value in entry.items())
    head = f"datasets:\n  - name: seen\n    multimodal_keys: {{image: {field}}}\n    path: {tmp_path}/prompts.jsonl\n"
    (tmp_path / "eval.yaml").write_text(head + lines)
    return ("--eval-interval", "2", "--eval-config", f"{tmp_path}/eval.yaml")


def test_engines_on_cpus_are_not_asked_about_images_of_an_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: 0)
    words = set_with_images(tmp_path)
    assert run(tmp_path, *words, "--check") == 2
    told = f"{tmp_path}/eval.yaml:3: multimodal_keys (evaluation set seen): engines on CPUs have no image processors"
    assert told in capsys.readouterr().err
    # It is not evaluated.
    cluster.refuse_images_on_cpus(parse(tmp_path, *words[2:]))


MINE = """
def rollout(args, rollout_id, data_source, evaluation=False):
    return None

async def generate(args, sample, sampling_params):
    return sample
"""
STREAMING = ("--custom-generate-function-path", "slime.rollout.sglang_streaming_rollout.generate_streaming")


@pytest.mark.parametrize(
    ("words", "in_set", "refused"),
    [
        (("--rollout-function-path", "{tmp}/mine.py:rollout", *IMAGES), False, None),
        (("--custom-generate-function-path", "{tmp}/mine.py:generate", *IMAGES), False, None),
        # It asks engines as ours do: it is ours.
        ((*STREAMING, *IMAGES), False, "--multimodal-keys: "),
        (("--eval-function-path", "{tmp}/mine.py:rollout"), True, None),
        # What asks somebody else about rollouts says nothing about evaluations, whose sets take the flag's field.
        (("--rollout-function-path", "{tmp}/mine.py:rollout",
          "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout",
          "--eval-interval", "2", "--eval-prompt-data", "seen", "{tmp}/prompts.jsonl", *IMAGES), False,
         "--multimodal-keys (evaluation set seen): "),
    ],
)  # fmt: skip
def test_functions_of_the_users_own_are_not_known_to_ask_our_engines(tmp_path, monkeypatch, words, in_set, refused):
    monkeypatch.setattr(cluster, "gpus_on_this_machine", lambda: 0)
    parse(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    args = parse(tmp_path, *words, *(set_with_images(tmp_path) if in_set else ()))
    told = pytest.raises(UserError, match=f"^{re.escape(refused or '')}engines on CPUs have no image processors")
    with told if refused else contextlib.nullcontext():
        cluster.refuse_images_on_cpus(args)


def test_a_checkpoint_without_processor_is_told_with_the_key_of_the_set(tmp_path):
    from tests.support.models.vision import save_image

    words = set_with_images(tmp_path, "images")
    save_image(tmp_path / "red.png")
    write(tmp_path / "prompts.jsonl", {"prompt": "<image>", "images": "red.png", "label": "red"})
    [told] = problems(tmp_path, *words, "--prompt-data", write(tmp_path / "rows.jsonl", PLAIN_PROMPTS))
    assert told.startswith(
        f"--hf-checkpoint {tmp_path}/model: a prompt has images, and the checkpoint has no processor"
    )
    assert told.endswith(f"or drop {tmp_path}/eval.yaml:3: multimodal_keys (evaluation set seen)")


def test_chats_with_images_need_a_processor_too(tmp_path):
    from tests.support.models.vision import make_seeing_checkpoint, save_image

    save_image(tmp_path / "red.png")
    chat = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "red"}]
    path = write(tmp_path / "chats.jsonl", {"messages": chat, "images": "red.png"})
    words = [
        "--prompt-data", path, "--input-key", "messages", *IMAGES[:2], "--debug-train-only", "--loss-type", "sft_loss",
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout",
        "--custom-model-provider-path", "slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider",
    ]  # fmt: skip
    [told] = problems(tmp_path, *words)
    assert told.startswith(
        f"--hf-checkpoint {tmp_path}/model: a prompt has images, and the checkpoint has no processor"
    )
    make_seeing_checkpoint(tmp_path / "seeing")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "model" / name, tmp_path / "seeing")
    check_before_start(parse(tmp_path, *words, "--hf-checkpoint", str(tmp_path / "seeing")))


def test_rows_with_images_and_their_processor(tmp_path):
    from tests.support.models.vision import make_seeing_checkpoint, save_image

    red = save_image(tmp_path / "red.png")
    rows = [{"prompt": "<image>", "images": "red.png"}, {"prompt": "text"}, {"prompt": "<image>", "images": "blue.png"}]
    path = write(tmp_path / "rows.jsonl", *rows)
    words = ["--prompt-data", path, *IMAGES, "--rm-type", "random"]
    checkpoint, row = problems(tmp_path, *words)
    assert checkpoint.startswith(
        f"--hf-checkpoint {tmp_path}/model: a prompt has images, and the checkpoint has no processor"
    )
    assert checkpoint.endswith("take a model that sees images, or drop --multimodal-keys")
    assert row.startswith(f"{path}:3: image 0 of 'images': there is no file {tmp_path}/blue.png; mend the row")
    make_seeing_checkpoint(tmp_path / "seeing")
    shutil.copy(tmp_path / "model/model.safetensors", tmp_path / "seeing")
    write(tmp_path / "rows.jsonl", *rows[:2], {"prompt": "<image>", "images": red})
    check_before_start(parse(tmp_path, *words, "--hf-checkpoint", str(tmp_path / "seeing")))
    # Of what a function of the user's does with them nothing is asked.
    (tmp_path / "mine.py").write_text("async def generate(args, sample, sampling_params):\n    return sample\n")
    check_before_start(parse(tmp_path, *words, "--custom-generate-function-path", f"{tmp_path}/mine.py:generate"))


def test_parquet_and_slices_are_scanned(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", None, "c"], "label": ["1", "2", "3"]}), path)
    assert problems(tmp_path, "--prompt-data", str(path))[0].startswith(f"{path}:2: 'prompt' is NoneType")
    check_before_start(parse(tmp_path, "--prompt-data", f"{path}@[2:3]"))
