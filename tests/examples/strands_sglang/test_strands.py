"""The provider for strands-agents, with agents that have the interface its README names: messages, events, masks, failures."""

import asyncio
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from examples.strands_sglang import strands_model
from examples.strands_sglang.calculator_agent import RULES, value_of
from examples.strands_sglang.strands_model import (
    UNREADABLE,
    AgentFailed,
    Requests,
    chat_messages,
    chat_tools,
    generate,
    library,
    settings,
    stream_events,
)
from slime.agent.adapters.parsing import ModelOutput, ToolUse
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.rollout_args import VOCAB_SIZE
from tests.support.models.tokenizer import build_tokenizer, save_tokenizer
from tests.support.processes.spoken import spoken

SPECS = [
    {"name": "calculator", "description": "Compute.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """As of the other examples, with room for rules and tools."""
    directory = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}))
    return str(directory)


class Agent:
    """The loop of the library's agent: asks its model, puts a message together from events, runs tools, asks again."""

    def __init__(self, model, tools, system_prompt, callback_handler, conversation_manager):
        assert callback_handler is None and type(conversation_manager).__name__ == "NullConversationManager"
        self.model, self.system_prompt, self.messages = model, system_prompt, []
        self.tools = {tool.__name__: tool for tool in tools}

    async def invoke_async(self, prompt):
        self.messages.append({"role": "user", "content": [{"text": prompt}]})
        while True:
            message, reason = await self._asked()
            self.messages.append(message)
            if reason != "tool_use":
                return message
            results = [self._used(block["toolUse"]) for block in message["content"] if "toolUse" in block]
            self.messages.append({"role": "user", "content": results})

    def _used(self, use):
        content = [{"text": self.tools[use["name"]](**use["input"])}]
        return {"toolResult": {"toolUseId": use["toolUseId"], "status": "success", "content": content}}

    async def _asked(self):
        message, block, reason = None, None, None
        async for event in self.model.stream(self.messages, SPECS, self.system_prompt, tool_choice=None):
            [(kind, content)] = event.items()
            if kind == "messageStart":
                message = {"role": content["role"], "content": []}
            elif kind == "contentBlockStart":
                block = {"start": content["start"], "text": "", "input": ""}
            elif kind == "contentBlockDelta":
                block["text"] += content["delta"].get("text", "")
                block["input"] += content["delta"].get("toolUse", {}).get("input", "")
            elif kind == "contentBlockStop" and "toolUse" in block["start"]:
                message["content"].append(
                    {"toolUse": {**block["start"]["toolUse"], "input": json.loads(block["input"])}}
                )
            elif kind == "contentBlockStop":
                message["content"].append({"text": block["text"]})
            else:
                reason = content["stopReason"]
        return message, reason


@pytest.fixture
def strands(monkeypatch, fresh_state):
    """The package, with the class of its agents as `strands.Agent`."""
    package, models = ModuleType("strands"), ModuleType("strands.models")
    managers = ModuleType("strands.agent.conversation_manager")
    package.Agent, package.tool, models.Model = Agent, lambda function: function, object
    managers.NullConversationManager = type("NullConversationManager", (), {})
    for module in (package, models, ModuleType("strands.agent"), managers):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


def played(checkpoint, *turns, **changes):
    sample = Sample(index=0, prompt=[{"role": "user", "content": "What is 47*38+6?"}], label="1792")
    return spoken(checkpoint, generate, sample, turns, **{"rollout_max_response_len": 2000, **changes})


def trained(answer):
    response = answer.tokens[-answer.response_length :]
    return [token for token, mask in zip(response, answer.loss_mask, strict=True) if mask]


def encoded(*texts):
    tokenizer = build_tokenizer()
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.usefixtures("strands")
def test_an_answer_is_one_sample_of_the_engine_s_tokens(checkpoint):
    turns = [f"I ask. {CALL % '47*38'}<|im_end|>", CALL % "1786+6", "\\boxed{1792}<|im_end|>"]
    answer, requests = played(checkpoint, *turns)
    assert answer.status is Sample.Status.COMPLETED and answer.metadata["round_number"] == 3
    assert trained(answer) == encoded(*turns)
    assert [value != 0.0 for value in answer.rollout_log_probs] == [mask == 1 for mask in answer.loss_mask]
    prompt = build_tokenizer().decode(requests[0]["input_ids"])
    assert RULES in prompt and '"name": "calculator"' in prompt and "What is 47*38+6?" in prompt
    assert "<tool_response>\n1786\n</tool_response>" in answer.response
    assert "<tool_response>\n1792\n</tool_response>" in answer.response
    # Every request goes on from the tokens of the one before, whatever text they are.
    for earlier, later in zip(requests, requests[1:], strict=False):
        assert later["input_ids"][: len(earlier["input_ids"])] == earlier["input_ids"]


@pytest.mark.usefixtures("strands")
def test_tokens_that_text_would_not_give_again_are_kept(checkpoint):
    """The tokenizer merges `he`, and the engine has sampled `h` and `e`."""
    apart = [build_tokenizer().convert_tokens_to_ids(letter) for letter in "he"]
    assert encoded("he") != apart
    said = [*apart, *encoded(CALL % "1+1")]
    answer, [first, second] = played(checkpoint, said, "\\boxed{2}")
    asked = len(first["input_ids"])
    assert second["input_ids"][asked : asked + len(said)] == said
    assert trained(answer)[:2] == apart and answer.response.startswith("he<tool_call>")


@pytest.mark.usefixtures("strands")
def test_results_of_several_calls_stand_in_one_turn(checkpoint):
    answer, requests = played(checkpoint, (CALL % "1+1") + (CALL % "2*3"), "\\boxed{8}")
    results = "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>"
    assert results in answer.response and len(requests) == 2


@pytest.mark.usefixtures("strands")
@pytest.mark.parametrize("call", ['{"name": ', '{"name": "abacus", "arguments": {}}'])
def test_a_call_that_cannot_be_read_or_served_is_told_to_the_model_and_not_to_the_agent(checkpoint, monkeypatch, call):
    heard = []
    asked = Requests.ask

    async def ask(self, *arguments):
        output = await asked(self, *arguments)
        heard.append(output.text)
        return output

    monkeypatch.setattr(Requests, "ask", ask)
    answer, _ = played(checkpoint, f"<tool_call>{call}</tool_call>", "\\boxed{1}<|im_end|>")
    assert UNREADABLE in answer.response and heard == ["\\boxed{1}"]


@pytest.mark.usefixtures("strands")
@pytest.mark.parametrize("changes", [{"max_turns": 1}, {"rollout_max_response_len": 4}])
def test_a_limit_ends_the_agent_too(checkpoint, changes):
    answer, requests = played(checkpoint, CALL % "1+1", **changes)
    assert len(requests) == 1 and trained(answer) == encoded(CALL % "1+1")[: answer.response_length]


class Failing(Agent):
    def _used(self, use):
        raise ConnectionError("no net")


class Hanging(Agent):
    async def _asked(self):
        if len(self.messages) > 1:
            await asyncio.Event().wait()
        return await super()._asked()


class Silent(Agent):
    async def invoke_async(self, prompt):
        return None


class Impatient(Agent):
    """Its model has hardly any time: it has gone when the answer comes."""

    async def _asked(self):
        asked = asyncio.ensure_future(super()._asked())
        await asyncio.wait({asked}, timeout=0)
        asked.cancel()
        raise TimeoutError("no answer")


class Cancelled(Agent):
    """A client of a tool gives up, and lets that out."""

    def _used(self, use):
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (Failing, "ConnectionError: no net"),
        (Hanging, "its tools took more than 0.5 s"),
        (Silent, "it asked its model nothing"),
        (Impatient, "TimeoutError: no answer"),
        (Cancelled, "it was cancelled"),
    ],
)
def test_an_agent_that_fails_is_no_wrong_answer(checkpoint, strands, agent, reason):
    strands.Agent = agent
    answer, _ = played(checkpoint, CALL % "1+1", strands={"seconds": 0.5})
    assert answer.status is Sample.Status.FAILED and answer.metadata["fail_reason"] == f"the agent failed: {reason}"
    # Also where the model has said something already.
    assert answer.remove_sample


class Forgetting(Agent):
    async def _asked(self):
        self.messages = self.messages[-2:]
        return await super()._asked()


class Editing(Agent):
    async def _asked(self):
        self.messages[0]["content"][0]["text"] += "!"
        return await super()._asked()


class Wrapping(Forgetting):
    async def invoke_async(self, prompt):
        try:
            return await super().invoke_async(prompt)
        except Exception as error:
            raise RuntimeError("the loop of the agent failed") from error


@pytest.mark.parametrize("agent", [Forgetting, Editing, Wrapping])
def test_an_agent_that_changes_what_was_said_is_refused(checkpoint, strands, agent):
    strands.Agent = agent
    with pytest.raises(UserError, match="changed what its model has been told .* NullConversationManager"):
        played(checkpoint, CALL % "1+1", CALL % "2+2", "\\boxed{1}")


@pytest.mark.parametrize("change", ["tools", "rules"])
def test_rules_and_tools_stay(change):
    async def main():
        requests = Requests()
        question = [{"role": "user", "content": [{"text": "?"}]}]
        first = asyncio.ensure_future(requests.ask(question, SPECS, "rules"))
        request = await requests.next(first, 10)
        assert [message["role"] for message in request.messages] == ["system", "user"]
        request.answer.set_result(ModelOutput("hm", "", [], False))
        await first
        further = [*question, {"role": "assistant", "content": [{"text": "hm"}]}, *question]
        others = {"tools": (further, [], "rules"), "rules": (further, SPECS, "other rules")}
        await requests.ask(*others[change])

    with pytest.raises(UserError, match="changed what its model has been told"):
        asyncio.run(asyncio.wait_for(main(), 30))


def test_messages_of_the_library_become_chat_messages():
    messages = [
        {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
        {"role": "assistant", "content": [
            {"reasoningContent": {"reasoningText": {"text": "hm"}}}, {"text": "c"},
            {"toolUse": {"toolUseId": "1", "name": "calculator", "input": {"expression": "1"}}},
        ]},
        {"role": "user", "content": [
            {"toolResult": {"toolUseId": "1", "status": "success", "content": [{"text": "1"}, {"json": {"x": "é"}}]}},
            {"text": "go on"},
        ]},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1"}}}
    assert chat_messages(messages) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
        {"role": "tool", "content": '1\n{"x": "é"}'},
        {"role": "user", "content": "go on"},
    ]
    with pytest.raises(UserError, match="something else than text and results of tools: image"):
        chat_messages([{"role": "user", "content": [{"image": {}}]}])
    with pytest.raises(UserError, match="returned something else than text and JSON: image"):
        chat_messages([{"role": "user", "content": [{"toolResult": {"toolUseId": "1", "content": [{"image": {}}]}}]}])


def test_tools_of_the_library_are_described_to_the_template():
    parameters = SPECS[0]["inputSchema"]["json"]
    function = {"name": "calculator", "description": "Compute.", "parameters": parameters}
    assert chat_tools(SPECS) == [{"type": "function", "function": function}]
    assert chat_tools([{"name": "calculator", "inputSchema": parameters}])[0]["function"]["parameters"] == parameters
    assert chat_tools(None) == []


def test_a_turn_of_the_model_becomes_events():
    use = ToolUse("calculator", {"expression": "1"}, id="7")
    stop = {"contentBlockStop": {}}
    assert stream_events(ModelOutput("c", "hm", [use], False)) == [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockStart": {"start": {}}}, {"contentBlockDelta": {"delta": {"text": "c"}}}, stop,
        {"contentBlockStart": {"start": {"toolUse": {"name": "calculator", "toolUseId": "7"}}}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"expression": "1"}'}}}}, stop,
        {"messageStop": {"stopReason": "tool_use"}},
    ]  # fmt: skip
    assert stream_events(ModelOutput("", "", [], False)) == [
        {"messageStart": {"role": "assistant"}}, {"messageStop": {"stopReason": "end_turn"}},
    ]  # fmt: skip


@pytest.mark.usefixtures("strands")
def test_the_provider_has_the_methods_of_the_library_s():
    async def main(model):
        with pytest.raises(UserError, match="structured output is not there"):
            async for _ in model.structured_output(dict, []):
                pass

    model = strands_model.model_of(Requests())
    model.update_config(name="mine")
    assert model.get_config() == {"name": "mine"}
    asyncio.run(main(model))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47*38+6", "1792"), ("-(2-5)*4", "12"), ("2**9", "error"), ("1/2", "error"), ("x", "error"), ("", "error"),
        ("9" * 13, "error"), ("999999999999*10", "error"), ("1.5+1", "error"), ("__import__('os')", "error"),
        ("(" * 150 + "1" + ")" * 49, "error"), ("True+1", "error"),
        # What is too long to be looked at has no value, and not that of its begin.
        ("+".join(["11"] * 66) + "+1", "727"), ("+".join(["11"] * 80), "error"),
    ],
)  # fmt: skip
def test_the_calculator_computes_whole_numbers_alone(expression, value):
    assert value_of(expression) == value


@pytest.mark.usefixtures("strands")
def test_what_cannot_be_is_refused(checkpoint):
    with pytest.raises(UserError, match="drop --partial-rollout"):
        played(checkpoint, "x", partial_rollout=True)
    with pytest.raises(UserError, match="drop --apply-chat-template"):
        spoken(checkpoint, generate, Sample(index=0, prompt="x"), ["x"])
    with pytest.raises(UserError, match="strands has no agnt"):
        settings(SimpleNamespace(strands={"agnt": "mine"}))


def test_a_missing_package_is_named():
    with pytest.raises(UserError, match="needs the package strands-agents"):
        library("strands.models")


def test_the_settings_of_the_example_are_known(tmp_path):
    from tests.support.models.args import parse

    file = Path(__file__).parents[3] / "examples/strands_sglang/agent.yaml"
    config = settings(parse(tmp_path, "--custom-config-path", str(file)))
    assert config.seconds == 300 and config.agent == strands_model.STRANDS_CONFIGS["agent"]
    assert issubclass(AgentFailed, Exception)
