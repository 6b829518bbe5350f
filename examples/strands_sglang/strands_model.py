"""Agents of the library strands-agents, whose model is the run's: what the engine sampled is trained, token by token.

--custom-generate-function-path examples/strands_sglang/strands_model.py:generate
--custom-config-path examples/strands_sglang/agent.yaml
--max-turns 8

The agent asks its model for a message, runs the tools that the message calls, and asks again with the results. Its model is a
provider that turns this inside out: the first request becomes the prompt, each turn of the dialogue answers a request, and what
the agent says next is the reply. So a sample has the engine's own tokens, and no text of the model is tokenised again.
"""

import asyncio
import copy
import importlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from slime.agent.adapters.parsing import END_OF_THINK, ModelOutput, parse_model_output
from slime.rollout.dialogue import dialogue
from slime.rollout.failures import mark_failed
from slime.rollout.generate_state import GenerateState
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample

# What `strands` of --custom-config-path may say otherwise.
STRANDS_CONFIGS: dict[str, Any] = {
    "agent": "examples.strands_sglang.calculator_agent:build_agent",  # build_agent(args, sample, model)
    "tool_parser": None,  # of SGLang's, by name; None: calls as most models write them
    "reasoning_parser": None,
    "seconds": 300,  # that the tools of a turn may take
}
# That an agent may take to end, once it is told to.
END_SECONDS = 10.0
UNREADABLE = "This call could not be read: give the name of a tool that there is, and arguments, as JSON."
# What opens a call, as most models write them.
CALL = "<tool_call>"


class AgentFailed(Exception):
    """The agent raised, or its tools take too long."""


def settings(args: Any) -> SimpleNamespace:
    """`STRANDS_CONFIGS` with what the run says otherwise.

    Raises:
        UserError: the run names a setting that there is not.
    """
    given = args.strands if hasattr(args, "strands") else {}
    unknown = sorted(set(given) - set(STRANDS_CONFIGS))
    if unknown:
        raise UserError(
            f"--custom-config-path: strands has no {', '.join(unknown)}; it has {', '.join(STRANDS_CONFIGS)}"
        )
    return SimpleNamespace(**{**STRANDS_CONFIGS, **given})


def library(module: str) -> Any:
    """A module of the library.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"examples/strands_sglang needs the package strands-agents ({error}); install it") from error


# -- messages and events of the library ----------------------------------------------------------------------------------


def chat_tools(tool_specs: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The library's descriptions of tools as chat templates take them."""
    return [
        {
            "type": "function",
            "function": {
                "name": spec["name"],
                "description": spec.get("description", ""),
                "parameters": spec["inputSchema"].get("json", spec["inputSchema"]),
            },
        }
        for spec in tool_specs or ()
    ]


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The library's messages, lists of blocks, as chat messages. Each result of a tool is a message of the role `tool`.

    Raises:
        UserError: a block is none of text, reasoning, a call of a tool and the result of one.
    """
    found = []
    for message in messages:
        texts, calls, results = [], [], []
        for block in message["content"]:
            if "text" in block:
                texts.append(block["text"])
            elif "toolUse" in block:
                function = {"name": block["toolUse"]["name"], "arguments": block["toolUse"]["input"]}
                calls.append({"type": "function", "function": function})
            elif "toolResult" in block:
                results.append({"role": "tool", "content": _text_of_result(block["toolResult"])})
            elif "reasoningContent" not in block:
                raise UserError(f"the agent said something else than text and results of tools: {', '.join(block)}")
        found += results
        if texts or calls:
            said = {"role": message["role"], "content": "\n".join(texts)}
            found.append({**said, "tool_calls": calls} if calls else said)
    return found


def _text_of_result(result: dict[str, Any]) -> str:
    texts = []
    for part in result["content"]:
        if "text" not in part and "json" not in part:
            raise UserError(f"a tool of the agent returned something else than text and JSON: {', '.join(part)}")
        texts.append(part["text"] if "text" in part else json.dumps(part["json"], ensure_ascii=False))
    return "\n".join(texts)


def stream_events(output: ModelOutput) -> list[dict[str, Any]]:
    """A turn of the model as the library's events: its text, and a block for each call. Reasoning is not told."""
    blocks: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"text": output.text})] if output.text else []
    for use in output.tool_uses:
        start = {"toolUse": {"name": use.name, "toolUseId": use.id}}
        blocks.append((start, {"toolUse": {"input": json.dumps(use.arguments)}}))
    events: list[dict[str, Any]] = [{"messageStart": {"role": "assistant"}}]
    for start, delta in blocks:
        events += [
            {"contentBlockStart": {"start": start}},
            {"contentBlockDelta": {"delta": delta}},
            {"contentBlockStop": {}},
        ]
    return [*events, {"messageStop": {"stopReason": "tool_use" if output.tool_uses else "end_turn"}}]


# -- the agent and the dialogue ------------------------------------------------------------------------------------------


@dataclass
class Request:
    """What the agent asks its model: chat messages, of which the first request has all and others those that are new."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: asyncio.Future[ModelOutput]


class Requests:
    """The requests of one agent, in their order. It asks one after the other, and each goes on from the one before."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Request] = asyncio.Queue()
        self._seen: list[dict[str, Any]] = []
        self._frame: Any = None
        self._refusal: UserError | None = None

    async def ask(
        self, messages: list[dict[str, Any]], tool_specs: list[dict[str, Any]] | None, system_prompt: str | None
    ) -> ModelOutput:
        """The model's turn behind `messages`.

        Raises:
            UserError: they are not those of the last request, the model's answer to it and further ones; or rules or tools
                are others. What the model has sampled stands behind what it was told, which can no longer be changed.
        """
        try:
            request = self._request(messages, (system_prompt, chat_tools(tool_specs)))
        except UserError as error:
            # The library raises another error in its place.
            self._refusal = error
            raise
        self._queue.put_nowait(request)
        return await request.answer

    def _request(self, messages: list[dict[str, Any]], frame: tuple[str | None, list[dict[str, Any]]]) -> Request:
        known, new = messages[: len(self._seen)], messages[len(self._seen) :]
        if self._frame is None:
            rules = [{"role": "system", "content": frame[0]}] if frame[0] else []
            said = [*rules, *chat_messages(messages)]
        elif frame != self._frame or known != self._seen or len(new) < 2 or new[0]["role"] != "assistant":
            raise UserError(
                "the agent changed what its model has been told (rules, tools or earlier messages), which a model that is "
                "trained on its tokens cannot follow; give the agent a NullConversationManager and tools that stay"
            )
        else:
            said = chat_messages(new[1:])
        self._frame, self._seen = frame, copy.deepcopy(messages)
        return Request(said, frame[1], asyncio.get_running_loop().create_future())

    async def next(self, agent: asyncio.Task[Any], seconds: float) -> Request | None:
        """The next request; None where the agent has come to its end.

        Raises:
            AgentFailed: the agent raised, or neither asks nor ends in so many seconds.
            UserError: what `ask` has refused.
        """
        waiting = asyncio.ensure_future(self._queue.get())
        try:
            await asyncio.wait({waiting, agent}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        if not agent.done():
            raise AgentFailed(f"its tools took more than {seconds} s")
        if self._refusal is not None:
            raise self._refusal
        if agent.cancelled():
            raise AgentFailed("it was cancelled")
        error = agent.exception()
        if error is not None:
            raise AgentFailed(f"{type(error).__name__}: {error}") from error
        return None


def model_of(requests: Requests) -> Any:
    """A model of the library that asks by `requests`."""

    class EngineModel(library("strands.models").Model):
        def __init__(self) -> None:
            self.config: dict[str, Any] = {}

        def update_config(self, **model_config: Any) -> None:
            self.config.update(model_config)

        def get_config(self) -> dict[str, Any]:
            return self.config

        async def structured_output(
            self, output_model: Any, prompt: Any, system_prompt: Any = None, **kwargs: Any
        ) -> Any:
            raise UserError("examples/strands_sglang: structured output is not there; let the agent answer in text")
            yield {}  # an asynchronous generator, as the library has it

        async def stream(
            self, messages: Any, tool_specs: Any = None, system_prompt: Any = None, **kwargs: Any
        ) -> AsyncIterator[dict[str, Any]]:
            for event in stream_events(await requests.ask(messages, tool_specs, system_prompt)):
                yield event

    return EngineModel()


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The answer of an agent to a question, as one sample; FAILED where the agent is, with the reason in
    `metadata["fail_reason"]`.

    The prompt is the agent's own: its rules, its tools and what it makes of the question.
    """
    config = settings(args)
    if args.partial_rollout:
        raise UserError("examples/strands_sglang: an agent cannot be gone on with; drop --partial-rollout")
    if not isinstance(sample.prompt, list):
        raise UserError("examples/strands_sglang: prompts are messages here; drop --apply-chat-template")
    requests = Requests()
    agent = load_function(config.agent)(args, sample, model_of(requests))
    running = asyncio.ensure_future(agent.invoke_async(sample.prompt[-1]["content"]))
    # Of an agent that is given up nobody asks what it raised.
    running.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        request = await requests.next(running, config.seconds)
        if request is None:
            raise AgentFailed("it asked its model nothing")
        sample.prompt, sample.metadata["tools"] = request.messages, request.tools
        end_of_turn = GenerateState(args).tokenizer.eos_token

        async def reply(said: str) -> list[dict[str, Any]] | dict[str, Any] | None:
            nonlocal request
            output = parse_model_output(
                said.removesuffix(end_of_turn), request.tools, config.tool_parser, config.reasoning_parser
            )
            # Of a tool that there is not, no call is left.
            is_call = output.ill_formed or CALL in said.rpartition(END_OF_THINK)[2]
            if is_call and not output.tool_uses:
                return {"role": "tool", "content": UNREADABLE}
            # An agent may have given its model up meanwhile: what it does instead is seen next.
            if not request.answer.done():
                request.answer.set_result(output)
            request = await requests.next(running, config.seconds)
            return None if request is None else request.messages

        return await dialogue(args, sample, sampling_params, reply)
    except AgentFailed as error:
        return mark_failed(args, sample, f"the agent failed: {error}")
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=END_SECONDS)
