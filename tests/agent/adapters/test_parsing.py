"""What agents are told of a model's text, by our own reading and by SGLang's parsers."""

import functools
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.agent.adapters import parsing
from slime.agent.adapters.parsing import ToolUse, parse_model_output, prepare_parsers
from slime.utils.child_process import environment_for_python
from slime.utils.errors import UserError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "unit": {"type": "string"}},
            },
        },
    }
]
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "<parameter=unit>\n7\n</parameter>\n</function>\n</tool_call>"
)
UNKNOWN_CALL = JSON_CALL.replace("add", "subtract")
BROKEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>'
CUT_CALL = '<tool_call>\n{"name": "add", "argum'
ADDED = [ToolUse("add", {"a": 1, "b": 2})]


REASONED = [
    ("4", "", "4"),
    ("<think>\nhm\n</think>\n\n4", "hm", "4"),
    ("hm</think>4", "hm", "4"),
    ("<think>hm", "hm", ""),
    ("<think>\n\n</think>\n\n4", "", "4"),
    ("<think>a</think>b</think>c", "a", "b</think>c"),
]
CALLED = [
    ("no call", "no call", [], False),
    (f"so\n{JSON_CALL}", "so", ADDED, False),
    (f"so\n{JSON_CALL}\n{JSON_CALL}", "so", ADDED * 2, False),
    (f"so\n{UNKNOWN_CALL}", "so", [], False),
    (f"so\n{JSON_CALL}\n{UNKNOWN_CALL}", "so", ADDED, False),
    (f"so\n{BROKEN_CALL}", "so", [], True),
    (f"so\n{JSON_CALL}\n{BROKEN_CALL}", "so", ADDED, True),
    (f"so\n{CUT_CALL}", "so", [], True),
    ('so\n<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>', "so", [], True),
]
DEEP = "[" * 100_000
HOSTILE = [
    "", "<tool_call>", "<tool_call></tool_call>", "<tool_call>[1]</tool_call>", "<tool_call>7</tool_call>",
    f"<tool_call>{DEEP}</tool_call>",
    '<tool_call>{"name": "add", "arguments": "' + DEEP + '"}</tool_call>',
]  # fmt: skip
PARSERS = ["qwen25", "hermes", "llama3", "pythonic", "qwen3_coder"]
# Without a GPU, SGLang can be imported behind its adapter only, in a process that does so first.
IN_ENGINES_PLACE = """
import json, sys
from slime.backends.sglang_utils import cpu_runtime
cpu_runtime.install()
from slime.agent.adapters.parsing import parse_model_output, prepare_parsers
prepare_parsers("qwen25", "qwen3")
found = []
for text, tools, tool_parser, reasoning_parser in json.load(sys.stdin):
    output = parse_model_output(text, tools, tool_parser, reasoning_parser)
    calls = [[use.name, use.arguments] for use in output.tool_uses]
    found.append([output.text, output.reasoning, calls, output.ill_formed])
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize(("text", "reasoning", "answer"), REASONED)
def test_reasoning_is_apart(text, reasoning, answer):
    output = parse_model_output(text)
    assert (output.text, output.reasoning, output.tool_uses, output.ill_formed) == (answer, reasoning, [], False)


@pytest.mark.parametrize(("text", "answer", "uses", "ill_formed"), CALLED)
def test_calls_are_read_and_what_cannot_be_read_is_flagged(text, answer, uses, ill_formed):
    output = parse_model_output(text, TOOLS)
    assert (output.text, output.tool_uses, output.ill_formed) == (answer, uses, ill_formed)


def test_parameters_as_elements_have_the_types_of_the_schema():
    text, reasoning, uses, ill_formed = parse_model_output(f"<think>hm</think>{XML_CALL}", TOOLS)
    assert uses == [ToolUse("add", {"a": 1, "b": 2, "unit": "7"})] and not ill_formed
    assert (text, reasoning) == ("", "hm")


# The format of calls with elements, as it is defined, in the time that it may take.
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
PIECES = ["<function=", "<function=add>", "</function>", "<parameter=", "<parameter=a>", "</parameter>", ">", "\n", "x"]


def test_elements_are_read_as_the_format_is_defined():
    chosen, read = random.Random(0), 0
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "x", "xx", "<function=")]
    for _ in range(20_000):
        body = "".join(chosen.choices(PIECES, k=chosen.randrange(2, 14)))
        uses = parse_model_output(f"<tool_call>{body}</tool_call>", tools).tool_uses
        function = FUNCTION.search(body)
        expected = function and {name.strip(): text for name, text in PARAMETER.findall(function[2])}
        if function is not None and function[1].strip() in ("add", "x", "xx", "<function="):
            assert uses == [ToolUse(function[1].strip(), expected)], body
            read += bool(expected)
        else:
            assert uses == [], body
    assert read > 300


def least_seconds(text):
    """Of the processor, for reading `text`; others of the machine have the least part in the shortest of several times."""
    seconds = []
    for _ in range(5):
        started = time.thread_time()
        parse_model_output(text, TOOLS)
        seconds.append(time.thread_time() - started)
    return min(seconds)


@pytest.mark.parametrize(
    ("before", "repeated", "after"),
    [
        ("", "<function=a>", ""),
        ("", "<function=", ""),
        ("", "<function=\n", ">"),
        ("<function=add>", "<parameter=a>", "</function>"),
        ("<function=add>", "<parameter=", "</function>"),
        ("<function=add>", "<parameter=a>\n1\n</parameter>", "</function>"),
        ("", "</function>", "<function=add>"),
        ("", "<tool_call>", ""),
    ],
)
def test_the_time_that_a_text_takes_grows_as_its_length(before, repeated, after):
    """Eight times as long: not 64 times the seconds, for which an agent's endpoint would serve nobody else."""
    short, long = (f"<tool_call>{before}{repeated * count}{after}</tool_call>" for count in (1_000, 8_000))
    assert least_seconds(long) < 24 * least_seconds(short)


def test_without_tools_nothing_is_a_call():
    assert parse_model_output(JSON_CALL).text == JSON_CALL


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_model_writes_raises(text):
    assert parse_model_output(text, TOOLS).tool_uses == []


def test_a_parameter_that_is_nested_beyond_reading_is_a_text():
    (use,) = parse_model_output(XML_CALL.replace("\n1\n", f"\n{DEEP}\n"), TOOLS).tool_uses
    assert use.arguments["a"] == DEEP


@pytest.mark.parametrize("function", [None, {}, {"name": None}, {"name": "add", "parameters": [1]}, 7])
def test_nothing_raises_whatever_tools_are_offered(function):
    tools = [{"type": "function", "function": function}, *TOOLS]
    for text in (JSON_CALL, XML_CALL):
        assert parse_model_output(text, tools).tool_uses[0].name == "add"


@pytest.mark.slow
def test_sglangs_parsers_find_the_same():
    asked = [(text, None, None, "qwen3") for text, _, _ in REASONED]
    expected = [[answer, reasoning, [], False] for _, reasoning, answer in REASONED]
    asked += [(text, TOOLS, "qwen25", None) for text, *_ in CALLED]
    expected += [[answer, "", [[use.name, use.arguments] for use in uses], ill] for _, answer, uses, ill in CALLED]
    asked.append((f"<think>hm</think>{XML_CALL}", TOOLS, "qwen3_coder", "qwen3"))
    expected.append(["", "hm", [["add", {"a": 1, "b": 2, "unit": "7"}]], False])
    asked += [(text, TOOLS, parser, "deepseek-r1") for text in HOSTILE for parser in PARSERS]
    done = subprocess.run(
        [sys.executable, "-c", IN_ENGINES_PLACE], input=json.dumps(asked), env=environment_for_python(), text=True,
        capture_output=True, timeout=300, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[: len(expected)] == expected
    assert [calls for _, _, calls, _ in found[len(expected) :]] == [[]] * len(HOSTILE) * len(PARSERS)
    assert "cannot be imported" not in done.stderr


def test_without_sglang_the_common_format_is_read(monkeypatch, caplog):
    """Nothing of it is left behind that others would take for the whole."""
    monkeypatch.setattr(parsing, "_parsers_of_sglang", functools.cache(parsing._parsers_of_sglang.__wrapped__))
    monkeypatch.setitem(sys.modules, "sglang.srt.function_call.function_call_parser", None)
    before = {name for name in sys.modules if name.startswith("sglang")}
    for _ in range(2):
        output = parse_model_output(f"<think>hm</think>{JSON_CALL}", TOOLS, "qwen25", "qwen3")
        assert (output.reasoning, output.tool_uses) == ("hm", ADDED)
    assert caplog.text.count("SGLang's parsers cannot be imported") == 1
    assert {name for name in sys.modules if name.startswith("sglang")} == before


def test_names_of_parsers_are_checked(monkeypatch):
    loaded = []
    monkeypatch.setattr(parsing, "_parsers_of_sglang", lambda: loaded.append(1))
    prepare_parsers(None, None)
    assert loaded == []
    prepare_parsers("qwen25", "qwen3")
    assert loaded == [1]
    with pytest.raises(UserError, match="tool_parser 'qwen-25'.* qwen25"):
        prepare_parsers("qwen-25", None)
    with pytest.raises(UserError, match="reasoning_parser 'quen3'"):
        prepare_parsers(None, "quen3")
