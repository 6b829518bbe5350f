"""Splits a model's text into what an agent gets: the answer, the reasoning before it, and tool calls.

SGLang's parsers, chosen by the names that its servers take, know the formats of model families. Without them the two formats
that most models write are understood: reasoning that ends at `</think>`, and calls within `<tool_call>`, as JSON or as
`<function=…><parameter=…>`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

THINK, END_OF_THINK = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# The start of an element: its name, and the ">" behind it or whatever is there instead. Only in a well-formed one is the name
# not empty, and followed by ">". These patterns read each character once, whatever a model writes.
_FUNCTION, _PARAMETER = (re.compile(rf"<{kind}=([^>\n]*)(>|\n|\Z)") for kind in ("function", "parameter"))
_END_OF_FUNCTION, _END_OF_PARAMETER = "</function>", "</parameter>"
# JSON of a model may be malformed, or nested more deeply than Python can follow.
_UNREADABLE = (ValueError, RecursionError)
# Attributes of SGLang's parsers that may hold the text that opens a call.
_OPENING = ("bot_token", "tool_call_start_token")


@dataclass(frozen=True)
class ToolUse:
    """A call of a tool by the model; `id` where the format of its calls has ids, "" for any."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)


class ModelOutput(NamedTuple):
    """The parts of a text; `ill_formed`: it has a call that cannot be read."""

    text: str
    reasoning: str
    tool_uses: list[ToolUse]
    ill_formed: bool


def prepare_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Load SGLang's parsers, if one is named, since that takes seconds for which no turn should wait.

    Raises:
        UserError: the installed SGLang has no parser of this name.
    """
    package = importlib.util.find_spec("sglang")
    for what, name, module, names in (
        ("tool_parser", tool_parser, "function_call/parser_names.py", "TOOL_CALL_PARSER_NAMES"),
        ("reasoning_parser", reasoning_parser, "parser/reasoning_parser_names.py", "REASONING_PARSER_NAMES"),
    ):
        if name is None or package is None:
            continue
        # The files with the lists are run instead of imported, because an import would load the whole package.
        known = runpy.run_path(os.path.join(package.submodule_search_locations[0], "srt", module))[names]
        if name not in known:
            raise UserError(f"{what} {name!r}: SGLang has no such parser; it has {', '.join(known)}")
    if tool_parser is not None or reasoning_parser is not None:
        _parsers_of_sglang()


@functools.cache
def _parsers_of_sglang() -> SimpleNamespace | None:
    """SGLang's classes; None if it cannot be imported, as in all processes but those of engines on a machine without GPUs."""
    before = set(sys.modules)
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser
    except ImportError as error:
        # Otherwise a later import would find the modules that were loaded, and take the half package for the whole.
        for name in [name for name in set(sys.modules) - before if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        logger.warning("SGLang's parsers cannot be imported (%s): the format that most models write is read", error)
        return None
    return SimpleNamespace(Tool=Tool, FunctionCallParser=FunctionCallParser, ReasoningParser=ReasoningParser)


def parse_model_output(
    text: str,
    tools_schema: Sequence[dict[str, Any]] | None = None,
    tool_parser_name: str | None = None,
    reasoning_parser_name: str | None = None,
) -> ModelOutput:
    """The parts of a model's text. Nothing is raised, whatever the text is.

    Args:
        tools_schema: the tools that the model was offered, each `{"type": "function", "function": {"name": …, "parameters":
            …}}`. Without any, nothing is taken for a call. Calls of other tools, and of tools of another shape, are left out.
        tool_parser_name, reasoning_parser_name: names of parsers of SGLang; None for the format that most models write.
    """
    reasoning, answer = _read_by_sglang(_reasoning_by_sglang, text, reasoning_parser_name) or ("", text)
    if not reasoning and (END_OF_THINK in answer or answer.startswith(THINK)):
        # If the prompt has opened the reasoning, only its end is in the answer.
        reasoning, end, rest = answer.removeprefix(THINK).partition(END_OF_THINK)
        answer = rest if end else ""
    if not tools_schema:
        return ModelOutput(answer.strip(), reasoning.strip(), [], False)
    schemas = dict(schema for tool in tools_schema if (schema := named_schema(tool)) is not None)
    own_calls = [_call(body, end, schemas) for body, end in _CALL.findall(answer)]
    found = _read_by_sglang(_calls_by_sglang, answer, tool_parser_name, tools_schema)
    rest, calls, opened = found or (_CALL.sub("", answer), own_calls, len(own_calls))
    known = set(schemas)
    # SGLang leaves out calls of unknown tools, which may be well formed all the same.
    unknown = sum(call is not None and call[0] not in known for call in own_calls) if found else 0
    read = [call for call in calls if call is not None]
    uses = [ToolUse(name, arguments) for name, arguments in read if name in known]
    return ModelOutput(rest.strip(), reasoning.strip(), uses, opened > len(read) + unknown)


def _read_by_sglang(read: Callable[..., Any], text: str, name: str | None, *arguments: Any) -> Any | None:
    """The result of one of SGLang's parsers for `text`; None if there is no such parser, or if it fails."""
    sglang = None if name is None else _parsers_of_sglang()
    if sglang is None:
        return None
    try:
        return read(sglang, text, name, *arguments)
    except Exception as error:  # a model may write anything, and parsers may raise anything at it
        logger.warning("SGLang's parser %s failed at an answer (%s: %s)", name, type(error).__name__, error)
        return None


def _reasoning_by_sglang(sglang: SimpleNamespace, text: str, name: str) -> tuple[str, str]:
    reasoning, answer = sglang.ReasoningParser(model_type=name).parse_non_stream(text)
    return reasoning or "", answer or ""


def _calls_by_sglang(
    sglang: SimpleNamespace, text: str, name: str, tools: Sequence[dict[str, Any]]
) -> tuple[str, list[Any], int]:
    """(text beside the calls, calls with None for what cannot be read, how many were opened)."""
    parser = sglang.FunctionCallParser([sglang.Tool(**tool) for tool in tools], name)
    rest, items = parser.parse_non_stream(text)
    marks = [getattr(parser.detector, attribute, "") for attribute in _OPENING]
    opening = next(filter(None, marks), "").strip()
    opened = text.count(opening) if opening else int(parser.has_tool_call(text))
    return rest, [_with_arguments(item.name, item.parameters) for item in items], max(opened, len(items))


def named_schema(tool: Any) -> tuple[str, dict[str, Any]] | None:
    """(name, properties of the parameters) of a tool; None if it has another shape."""
    try:
        function = tool["function"]
        name, properties = function["name"], (function.get("parameters") or {}).get("properties") or {}
    except (AttributeError, LookupError, TypeError):
        return None
    return (name, properties) if isinstance(name, str) and isinstance(properties, dict) else None


def _call(body: str, end: str, schemas: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) of the call in `<tool_call>`; None if it cannot be read. `schemas`: parameters' properties by tool."""
    if not end:
        return None
    end_of_function = body.rfind(_END_OF_FUNCTION)
    function = _opened(_FUNCTION, body, 0)
    if function is None or function.end() > end_of_function:
        try:
            called = json.loads(body)
        except _UNREADABLE:
            return None
        return _with_arguments(called.get("name"), called.get("arguments", {})) if isinstance(called, dict) else None
    name = function[1].strip()
    types = schemas.get(name, {})
    parameters = _parameters(body[function.end() : end_of_function])
    return name, {key.strip(): _value(text, types.get(key.strip())) for key, text in parameters}


def _opened(element: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    """The first well-formed start of an element in `text[start:]`."""
    return next((found for found in element.finditer(text, start) if found[1] and found[2] == ">"), None)


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each parameter, without the line breaks around a value."""
    end = 0
    while (found := _opened(_PARAMETER, text, end)) is not None:
        close = text.find(_END_OF_PARAMETER, found.end())
        if close < 0:
            return
        yield found[1], text[found.end() : close].removeprefix("\n").removesuffix("\n")
        end = close + len(_END_OF_PARAMETER)


def _with_arguments(name: Any, arguments: Any) -> tuple[str, dict[str, Any]] | None:
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except _UNREADABLE:
        return None
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _value(text: str, schema: Any) -> Any:
    """The value of a parameter that is written as text."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except _UNREADABLE:
        return text
