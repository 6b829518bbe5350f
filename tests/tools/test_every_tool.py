"""Every tool that is shipped starts, so none is left behind by a module that moved; bad input ends it with a message."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.tables.shell_arrays import ROOT

TOOLS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tools").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
# Command line → exit status and what the message names: the option, its value.
REFUSED = {
    "analyze_profile.py --profile-dir /nowhere": (2, "--profile-dir /nowhere"),
    "analyze_profile.py --profile-dir {tmp}": (2, "--profile-dir {tmp}: there is no trace"),
    "convert_hf_to_fp8.py --model-dir /nowhere --save-dir {tmp}/to": (2, "--model-dir /nowhere"),
    "convert_hf_to_fp8.py --model-dir {tmp} --save-dir {tmp}/to": (2, "--model-dir {tmp} has no config.json"),
    "convert_hf_to_int4.py --input-dir /nowhere --output-dir {tmp}/to --data-dir {tmp}": (2, "--input-dir /nowhere"),
    "convert_hf_to_int4_direct.py --model-dir /nowhere --save-dir {tmp}/to": (2, "--model-dir /nowhere"),
    "convert_k2_thinking_int4_to_bf16.py --model-dir /nowhere": (2, "--model-dir /nowhere"),
    "fp8_cast_bf16.py --input-fp8-hf-path /nowhere --output-bf16-hf-path {tmp}/to": (2, "--input-fp8-hf-path /nowhere"),
    "convert_hf_to_torch_dist.py --hf-checkpoint /nowhere --save {tmp}/to": (2, "--hf-checkpoint /nowhere"),
    "convert_hf_to_torch_dist.py --hf-checkpoint {tmp} --save {tmp}/to": (2, "--hf-checkpoint {tmp} has no config.json"),
    "convert_hf_to_megatron.py --hf_model_path /nowhere --save_path {tmp}/to": (2, "--hf_model_path /nowhere"),
    "convert_torch_dist_to_hf.py --input-dir /nowhere --output-dir {tmp}/to --origin-hf-dir {tmp}":
        (2, "--input-dir /nowhere"),
    "convert_torch_dist_to_hf_parallel.py --input-dir {tmp} --output-dir {tmp}/to --origin-hf-dir /nowhere":
        (2, "--origin-hf-dir /nowhere"),
    "convert_torch_dist_to_hf.py --input-dir {tmp} --output-dir {tmp}/to --origin-hf-dir {tmp} --vocab-size -4":
        (2, "--vocab-size -4"),
    "convert_to_hf.py --hf-checkpoint /nowhere --output-dir {tmp}/to": (2, "--hf-checkpoint /nowhere"),
    "inspect_checkpoint.py /nowhere": (2, "DIRECTORY /nowhere"),
    "inspect_checkpoint.py {tmp} --hf-checkpoint /nowhere": (2, "--hf-checkpoint /nowhere"),
    "make_toy_task.py /proc/no-such-place": (1, "/proc/no-such-place"),
    "make_toy_task.py {tmp}/toy --digits 19": (2, "--digits 19"),
    "make_toy_task.py /dev/null": (2, "OUTPUT_DIR /dev/null: is no directory"),
    "profile_rollout.py --router-url 10.0.0.1:3000 --action stop": (2, "--router-url 10.0.0.1:3000"),
    "profile_rollout.py --router-url http://127.0.0.1:1 --action stop --timeout 0": (2, "--timeout 0"),
    "profile_rollout.py --router-url http://127.0.0.1:1 --action stop": (1, "ConnectionError; does the run live"),
    "report.py /nowhere": (2, "/nowhere"),
    "serve_megatron_teacher.py --hf-checkpoint /nowhere": (2, "--hf-checkpoint /nowhere"),
    "serve_on_cpu.py --model-path /nowhere --port 30000": (2, "--model-path /nowhere is no directory"),
    "serve_on_cpu.py --model-path {tmp}": (2, "--model-path {tmp} has no config.json"),
    "simulate.py --phases /nowhere": (2, "/nowhere"),
    "trace_timeline_viewer.py /nowhere": (2, "DUMP /nowhere"),
    "write_model_scripts.py --config /nowhere": (2, "--config /nowhere"),
}  # fmt: skip
# Tools that users call from scripts of their own -> their options, with `!` behind one that must be given, and the default
# behind others.
OPTIONS = {
    "convert_hf_to_torch_dist.py": "--hf-checkpoint! --save!",
    "convert_hf_to_megatron.py": "--hf_model_path! --save_path!",
    "convert_torch_dist_to_hf.py":
        "--input-dir! --output-dir! --origin-hf-dir! --model-name -f --force -a --add-missing-from-origin-hf "
        "--chunk-size=5368709120 --vocab-size",
    "convert_torch_dist_to_hf_parallel.py":
        "--input-dir! --output-dir! --origin-hf-dir! --model-name -f --force -a --add-missing-from-origin-hf "
        "--chunk-size=5368709120 --vocab-size --load-max-workers=2 --save-max-workers=16",
    "convert_to_hf.py": "--output-dir! --check-same",
    "convert_hf_to_fp8.py":
        "--model-dir! --save-dir! --strategy=block --block-size=[128,128] --max-workers=2 --scale-fmt=float",
    "convert_hf_to_int4.py":
        "--input-dir! --output-dir! --data-dir! --quant-type=W4A16 --num-calibration-samples=256 "
        "--max-sequence-length=2048 --dampening-frac=0.01 --quant-group-size=32 --ignore-rules "
        "--trust-remote-code",
    "convert_hf_to_int4_direct.py":
        "--model-dir! --save-dir! --group-size=32 --is-symmetric=true --ignore-rules --max-workers=2",
    "convert_k2_thinking_int4_to_bf16.py": "--model-dir! --output-dir --files --config-path --overwrite",
    "fp8_cast_bf16.py": "--input-fp8-hf-path! --output-bf16-hf-path!",
    "analyze_profile.py": "--profile-dir! --rank --all-ranks --top-n=20",
    "profile_rollout.py":
        "--router-url! --action=start --output-dir --num-steps=3 --activities=[CPU,GPU] --profile-by-stage --with-stack "
        "--record-shapes",
    "trace_timeline_viewer.py": "--rebuild --serve=true --no-serve=true --port=9999",
}  # fmt: skip
# All in one process, as several of them import torch. Input: the command lines; output: the status of each, what it printed,
# its messages, and of each of its options whether it must be given, and the default.
RUN = """
import argparse, contextlib, io, json, runpy, sys, traceback
from pathlib import Path

parse, options = argparse.ArgumentParser.parse_known_args, {}

def noting_options(parser, *arguments, **keywords):
    if not options:
        options.update({name: [a.required, a.default] for a in parser._actions for name in a.option_strings})
    return parse(parser, *arguments, **keywords)

argparse.ArgumentParser.parse_known_args = noting_options
said = []
for tool, *words in json.load(sys.stdin):
    options.clear()
    sys.argv, output, errors = [tool, *words], io.StringIO(), io.StringIO()
    sys.path.insert(0, str(Path(tool).parent))
    status = "it went on"
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            runpy.run_path(tool, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        errors.write(traceback.format_exc())
    said.append([status, output.getvalue(), errors.getvalue(), dict(options)])
    sys.path.pop(0)
print(json.dumps(said, default=str))
"""


def said_by(commands):
    """(status, output, messages, options) of each command line, the words after `python`."""
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    result = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """The directory that bad input names, and what each tool says when it is asked for help, and of each bad input."""
    directory = str(tmp_path_factory.mktemp("refused"))
    commands = [f"tools/{words}".format(tmp=directory).split() for words in REFUSED]
    answers = said_by([*([tool, "--help"] for tool in TOOLS), *commands])
    return directory, dict(zip([*TOOLS, *REFUSED], answers, strict=True))


@pytest.mark.parametrize("tool", TOOLS)
def test_o10_every_tool_explains_itself(said, tool):
    status, output, errors, _ = said[1][tool]
    assert status == 0, errors
    assert output.startswith("usage: ")


def test_options_that_two_tools_share_are_explained_by_both(said):
    _, output, *_ = said[1]["tools/convert_torch_dist_to_hf_parallel.py"]
    options = (
        "--input-dir INPUT_DIR",
        "--output-dir OUTPUT_DIR",
        "--origin-hf-dir ORIGIN_HF_DIR",
        "--load-max-workers",
    )
    assert all(option in output for option in options)


@pytest.mark.parametrize("tool", OPTIONS)
def test_options_and_defaults_that_users_know_stay(said, tool):
    *_, options = said[1][f"tools/{tool}"]
    told = {}
    for name in re.findall(r"[\w-]+", re.sub(r"=\S+", "", OPTIONS[tool])):
        is_required, default = options.get(name, (None, "no such option"))
        is_nothing = default in (None, False, [])
        told[name] = "!" if is_required else "" if is_nothing else f"={json.dumps(default, separators=(',', ':'))}"
    assert " ".join(f"{name}{value}" for name, value in told.items()).replace('"', "") == OPTIONS[tool]


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_ends_a_tool_with_a_message(said, words):
    directory, answers = said
    status, _, errors, _ = answers[words]
    expected, named = REFUSED[words]
    assert status == expected, errors
    assert named.format(tmp=directory) in errors and "Traceback" not in errors and "--load-debug" not in errors
