"""The example of τ-bench, with an environment that has the interface of the package: actions, masks, rewards, failures."""

import asyncio
import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from slime.rollout.generation import grade
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.rollout_args import VOCAB_SIZE, make_args
from tests.support.models.tokenizer import build_tokenizer, save_tokenizer
from tests.support.processes.spoken import spoken

EXAMPLE = Path(__file__).parents[3] / "examples/tau-bench"
TOOLS = [{"type": "function", "function": {"name": "find_user", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "find_user", "arguments": {"email": "a@b"}}</tool_call>'
END = "###STOP###"


def load(name, module="generate_with_tau"):
    return load_function(f"{EXAMPLE}/{module}.py:{name}")


NAMES = ("generate", "action_of", "settings", "library", "in_environment")
generate, action_of, settings, library, in_environment = map(load, NAMES)
NO_PARSERS = SimpleNamespace(tool_parser=None, reasoning_parser=None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """As of the other examples, with room for rules and tools."""
    directory = tmp_path_factory.mktemp("checkpoint")
    save_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}))
    return str(directory)


class Environment:
    """Answers a call with the name of its tool, and the model with the next of `customer`; the last of these ends it."""

    wiki = "Be kind."
    tools_info = TOOLS
    tasks = [None] * 3

    def __init__(self, customer, reward, **options):
        self.customer, self.reward, self.options, self.actions = list(customer), reward, options, []

    def reset(self, task_index):
        self.task_index = task_index
        return SimpleNamespace(observation=self.said())

    def step(self, action):
        self.actions.append((action.name, action.kwargs))
        observation = self.said() if action.name == "respond" else f"user of {action.kwargs['email']}"
        done = observation == END
        return SimpleNamespace(observation=observation, done=done, reward=self.reward if done else 0.0)

    def said(self):
        said = self.customer.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


@pytest.fixture
def tau(monkeypatch):
    """The package, whose environments have `tau.customer` and `tau.reward`; `tau.made` are those that were made."""
    found = SimpleNamespace(customer=["Hi", END], reward=1.0, made=[])

    def get_env(name, user_strategy, user_model, task_split, user_provider=None, task_index=None):
        options = {"name": name, "user_model": user_model, "task_split": task_split, "task_index": task_index}
        found.made.append(Environment(found.customer, found.reward, **options))
        return found.made[-1]

    types, envs = ModuleType("tau_bench.types"), ModuleType("tau_bench.envs")
    types.Action = SimpleNamespace
    types.RESPOND_ACTION_NAME, types.RESPOND_ACTION_FIELD_NAME = "respond", "content"
    envs.get_env = get_env
    for module in (ModuleType("tau_bench"), types, envs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def played(checkpoint, *turns, metadata=None, **changes):
    sample = Sample(index=0, prompt="retail 2", metadata=metadata or {"task_index": 2})
    answer, requests = spoken(checkpoint, generate, sample, turns, **{"rollout_max_response_len": 2000, **changes})
    return answer, requests


@pytest.mark.parametrize(
    "said, action",
    [
        (f"Let me see. {CALL}", ("find_user", {"email": "a@b"})),
        (f"{CALL}{CALL.replace('a@b', 'c@d')}", ("find_user", {"email": "a@b"})),
        ("<think>He is angry.</think>\n\nHello!", ("respond", {"content": "Hello!"})),
        ('<tool_call>{"name": "find_user", </tool_call>', None),
        (f"Let me see. {CALL.replace('find_user', 'refund')}", None),
        ("<think>A <tool_call>?</think>Hello!", ("respond", {"content": "Hello!"})),
        ("", ("respond", {"content": ""})),
    ],
)
@pytest.mark.usefixtures("tau")
def test_a_turn_is_one_action(said, action):
    assert action_of(said, TOOLS, NO_PARSERS) == action


@pytest.mark.usefixtures("fresh_state")
def test_what_customer_and_tools_say_is_not_trained_and_the_rest_is(checkpoint, tau):
    tau.customer = ["Hi, where is my parcel?", "It is 7.", END]
    turns = ["Which is your order?", CALL, "It comes today."]
    answer, requests = played(checkpoint, *turns)
    (environment,) = tau.made
    assert environment.task_index == 2 and environment.options["task_index"] == 2
    assert environment.actions == [
        ("respond", {"content": turns[0]}), ("find_user", {"email": "a@b"}), ("respond", {"content": turns[2]}),
    ]  # fmt: skip
    assert answer.reward == 1.0 and answer.metadata["round_number"] == 3
    tokenizer = build_tokenizer()
    trained = [t for t, mask in zip(answer.tokens[-answer.response_length :], answer.loss_mask, strict=True) if mask]
    assert trained == [token for text in turns for token in tokenizer.encode(text, add_special_tokens=False)]
    assert [value != 0.0 for value in answer.rollout_log_probs] == [mask == 1 for mask in answer.loss_mask]
    prompt = tokenizer.decode(requests[0]["input_ids"])
    assert (
        "Be kind." in prompt and "find_user" in prompt and prompt.endswith("parcel?<|im_end|>\n<|im_start|>assistant\n")
    )
    assert "<|im_start|>user\nIt is 7.<|im_end|>\n<|im_start|>assistant\n" in answer.response
    assert "<tool_response>\nuser of a@b\n</tool_response>" in answer.response


@pytest.mark.usefixtures("fresh_state")
def test_a_call_that_cannot_be_read_is_told_so_and_reaches_nobody(checkpoint, tau):
    answer, _ = played(checkpoint, '<tool_call>{"name": </tool_call>', "Goodbye.")
    assert tau.made[0].actions == [("respond", {"content": "Goodbye."})]
    assert "This call could not be read" in answer.response and answer.reward == 1.0


@pytest.mark.usefixtures("fresh_state")
def test_the_customer_is_not_told_the_mark_that_ends_a_turn(checkpoint, tau):
    played(checkpoint, "Goodbye.<|im_end|>")
    assert tau.made[0].actions == [("respond", {"content": "Goodbye."})]


@pytest.mark.usefixtures("fresh_state")
def test_a_wrong_end_and_no_end_are_worth_nothing(checkpoint, tau):
    tau.reward = 0.0
    assert played(checkpoint, "Goodbye.")[0].reward == 0.0
    tau.reward, tau.customer = 1.0, ["Hi", "And?", END]
    answer, _ = played(checkpoint, "Hm.", "Goodbye.", max_turns=2)
    assert answer.reward == 0.0 and answer.metadata["round_number"] == 2


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("customer", [[ConnectionError("no key")], ["Hi", ConnectionError("no key")]])
def test_a_customer_who_does_not_answer_is_no_wrong_answer(checkpoint, tau, customer):
    tau.customer = customer
    answer, _ = played(checkpoint, "Hello.")
    assert answer.status is Sample.Status.FAILED
    assert answer.metadata["fail_reason"] == "τ-bench: ConnectionError: no key"
    # Also where the model has said something already.
    assert answer.remove_sample
    # It is not graded by what the script of the model asks for, which would find no label, and end the run.
    args = SimpleNamespace(**{**vars(make_args(checkpoint)), "rm_type": "deepscaler"})
    asyncio.run(grade(args, answer, evaluation=False))
    assert answer.reward == 0.0


def test_as_many_environments_work_at_a_time_as_the_run_says():
    """More than a pool of threads has, which is the event loop's and not theirs."""
    config = settings(SimpleNamespace())
    together = threading.Barrier(config.concurrency)

    async def all_of_them():
        calls = [in_environment(config, together.wait, 20) for _ in range(config.concurrency)]
        return sorted(await asyncio.gather(*calls))

    assert asyncio.run(all_of_them()) == list(range(config.concurrency))


@pytest.mark.usefixtures("fresh_state")
def test_settings_of_the_run_win(checkpoint, tau):
    played(checkpoint, "Goodbye.", tau={"env": "airline", "task_split": "test", "user_model": "mine"})
    assert tau.made[0].options == {"name": "airline", "user_model": "mine", "task_split": "test", "task_index": 2}
    assert settings(SimpleNamespace()).env == "retail"
    with pytest.raises(UserError, match="tau has no usermodel"):
        settings(SimpleNamespace(tau={"usermodel": "mine"}))


@pytest.mark.usefixtures("fresh_state")
def test_a_row_says_of_which_part_its_task_is(checkpoint, tau):
    row = {"task_index": 2, "env": "retail", "task_split": "dev"}
    played(checkpoint, "Goodbye.", metadata=row, tau={"task_split": "train"})
    assert tau.made[0].options["task_split"] == "dev"
    with pytest.raises(UserError, match="a row is a task of retail, and `tau` of --custom-config-path plays airline"):
        played(checkpoint, "Goodbye.", metadata=row, tau={"env": "airline"})


@pytest.mark.usefixtures("tau")
def test_a_conversation_that_was_interrupted_is_refused(checkpoint):
    sample = Sample(
        index=0, prompt="retail 2", metadata={"task_index": 2}, response="Hel", response_length=1, tokens=[1]
    )
    with pytest.raises(UserError, match="--partial-rollout"):
        spoken(checkpoint, generate, sample, ["lo"])


def test_a_missing_package_is_named():
    with pytest.raises(UserError, match="needs the package tau_bench"):
        library("tau_bench.envs")


def test_tasks_become_rows(tau, tmp_path):
    words = ["--env", "airline", "--task-split", "test", "--output", str(tmp_path / "tasks.jsonl")]
    load("main", "write_tasks")(words)
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    task = {"env": "airline", "task_split": "test"}
    assert rows == [{"prompt": f"airline {index}", "metadata": {**task, "task_index": index}} for index in range(3)]
    assert (tau.made[0].options["name"], tau.made[0].options["task_split"]) == ("airline", "test")
