"""The page on customization: every function that it shows is run by the part of the framework that calls it, and every
command is read by the real parser."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.arguments.flag import flag_of
from slime.arguments.paths import LOADED_BY_RANKS, MANAGER_PLUG_INS
from slime.plugins import POINTS
from slime.plugins.__main__ import main as try_functions
from slime.rollout.base_types import leaves
from slime.rollout.data_source import create_data_source
from slime.rollout.draws import draw_groups
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sglang_rollout import generate_rollout, generate_rollout_async
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils import async_utils
from slime.utils.device import get_accelerator
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.rollout_args import CountingDataSource, make_args, make_checkpoint
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.tables.page import blocks

PAGE = Path(__file__).parents[2] / "docs/en/get_started/customization.md"
PLUG_INS = {re.match(r"# (\S+\.py)\n", text)[1]: text for kind, text in blocks(PAGE) if kind == "python"}
COMMANDS = [text for kind, text in blocks(PAGE) if kind == "bash"]
TRIALS = [command for command in COMMANDS if command.startswith("python -m slime.plugins check ")]
COMMANDS = [command for command in COMMANDS if command not in TRIALS]
CHECKS = {}


def check(name):
    """Register the function below as the proof of the page's file `name`."""

    def register(function):
        CHECKS[name] = function
        return function

    return register


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """The page's files in the directory where its commands are typed."""
    for name, text in PLUG_INS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    SingletonMeta.clear_instances()
    yield tmp_path
    SingletonMeta.clear_instances()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def server(checkpoint):
    with FakeGenerateServer() as running:
        yield running


@dataclasses.dataclass
class Given:
    """What the proof of a file is given."""

    directory: Path
    checkpoint: str
    server: FakeGenerateServer

    def args(self, **changes):
        return make_args(self.checkpoint, self.server.port, **changes)

    def step(self, args, rollout_id=0, source=None):
        async def main():
            try:
                return await generate_rollout_async(args, rollout_id, source or CountingDataSource(2))
            finally:
                await close_http_client()

        return asyncio.run(main())


def answers(*responses, label="85"):
    return [
        Sample(index=i, group_index=0, prompt="What is 47+38?", response=text, response_length=len(text), label=label,
               tokens=[1, *range(len(text))], status=Sample.Status.COMPLETED)
        for i, text in enumerate(responses)
    ]  # fmt: skip


@check("test_my_reward.py")
def tries_a_function(given):
    load_function("test_my_reward.py:test_my_reward")()


@check("my_device.py")
def another_device(given):
    kind = load_function("my_device.py:MyDevice")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIME_ACCELERATOR", "my_device")
        get_accelerator.cache_clear()
        assert isinstance(get_accelerator(), kind), "its module has registered it"
    get_accelerator.cache_clear()


# -- rewards -----------------------------------------------------------------------------------------------------------


@check("my_reward.py")
def one_sample(given):
    args = given.args(custom_rm_path="my_reward.py:reward_func")
    assert asyncio.run(batched_async_rm(args, answers("it is 85 ", "it is 85<|im_end|>", "86"))) == [1.0, 1.0, 0.0]


@check("my_detailed_reward.py")
def several_values(given):
    args = given.args(custom_rm_path="my_detailed_reward.py:reward_func", reward_key="score", eval_reward_key="right")
    (sample,) = answers("85")
    sample.reward = asyncio.run(async_rm(args, sample))
    assert sample.reward == {"score": 1.1, "right": 1.0, "brief": 1.0} and sample.get_reward_value(args) == 1.1


@check("my_batch_reward.py")
def a_list_of_samples(given):
    args = given.args(custom_rm_path="my_batch_reward.py:reward_func")
    assert asyncio.run(batched_async_rm(args, answers("85", "86", "so 85"))) == [1.0, 0.0, 1.0]
    assert asyncio.run(async_rm(args, answers("85")[0])) == 1.0


@check("my_group_reward.py")
def a_whole_group(given):
    args = given.args(custom_rm_path="my_group_reward.py:reward_func", group_rm=True)
    assert asyncio.run(batched_async_rm(args, answers("it is 85", "86", "85"))) == [0.5, 0.0, 1.0]
    assert asyncio.run(async_rm(args, answers("86")[0], evaluation=True)) == 0.0


@check("my_reward_model.py")
def a_class(given):
    args = given.args(custom_rm_path="my_reward_model.py:RewardModel", rm_model_path=given.checkpoint)
    right, wrong = asyncio.run(batched_async_rm(args, answers("85", "86")))
    assert right == pytest.approx(wrong + 1)


# -- generation --------------------------------------------------------------------------------------------------------


@check("my_calculator.py")
def two_turns(given):
    args = given.args(
        custom_generate_function_path="my_calculator.py:custom_generate", rollout_max_response_len=120,
        custom_rm_path="my_reward.py:reward_func",
    )  # fmt: skip
    tokenizer = GenerateState(args).tokenizer
    turns = {1: "<calc>47+38</calc><|im_end|>", 2: "It is 85"}
    given.server.answer = lambda payload: tokenizer.encode(turns[len(given.server.requests)])
    given.server.text_of = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)

    async def main():
        sample = Sample(index=0, group_index=0, prompt="What is 47+38?", label="85")
        try:
            return await generate_and_rm(args, sample, GenerateState(args).sampling_params)
        finally:
            await close_http_client()

    sample = asyncio.run(main())
    shown = "\n<|im_start|>user\n<tool_response>\n85\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert sample.response == "<calc>47+38</calc>" + shown + "It is 85" and sample.reward == 1.0
    written = [len(tokenizer.encode(text)) for text in (turns[1], shown, turns[2])]
    assert sample.loss_mask == [1] * written[0] + [0] * written[1] + [1] * written[2]
    first, second = (request["input_ids"] for request in given.server.requests)
    assert tokenizer.decode(second[len(first) :]) == turns[1] + shown
    assert sample.metadata["round_number"] == 2 and sample.status is Sample.Status.COMPLETED


# -- filters -----------------------------------------------------------------------------------------------------------


@check("my_filter.py")
def drops_what_is_too_easy(given):
    """The first two groups are all right, so the source is asked for more."""
    (given.directory / "coin.py").write_text(
        "def coin(args, sample):\n    return int(sample.group_index < 2 or sample.index % 2)"
    )
    args = given.args(
        dynamic_sampling_filter_path="my_filter.py:dynamic_filter", custom_rm_path=f"{given.directory}/coin.py:coin"
    )
    output = given.step(args)
    assert [leaves(group)[0].group_index for group in output.samples] == [2, 3]
    assert output.metrics["rollout/dynamic_filter/drop_too_easy"] == 2


@check("my_sample_filter.py")
def leaves_out_what_was_cut(given):
    filter_samples = load_function("my_sample_filter.py:leave_out_truncated", flag="--rollout-sample-filter-path")
    groups = [answers("85", "86")]
    groups[0][1].status = Sample.Status.TRUNCATED
    filter_samples(given.args(), groups)
    assert [sample.remove_sample for sample in groups[0]] == [False, True]


# -- hooks -------------------------------------------------------------------------------------------------------------


@check("my_hook.py")
def notes_before_the_reward(given):
    output = given.step(given.args(rollout_sample_hook_path=["my_hook.py:note_length"]))
    assert {sample.metadata["words"] for sample in leaves(output.samples)} == {1}


@check("my_archive.py")
def stores_all_groups(given):
    given.step(given.args(rollout_all_samples_process_path="my_archive.py:append_to_file"))
    assert len((given.directory / "archive.jsonl").read_text().splitlines()) == 4


@check("my_post_process.py")
def clips_rewards(given):
    args = parse(given.directory, "--custom-reward-post-process-path", "my_post_process.py:clipped")
    samples = answers("85", "86")
    samples[0].reward, samples[1].reward = 7.0, -0.5
    batch = convert_samples_to_train_batch(args, samples)
    assert (batch["rewards"].tolist(), batch["raw_reward"].tolist()) == ([1.0, -0.5], [7.0, -0.5])


@check("my_log.py")
def logs_a_metric(given):
    from slime.observability.logging_utils import drain_outbox
    from slime.ray.rollout_pipeline import RolloutPipeline

    args = parse(given.directory, "--custom-rollout-log-function-path", "my_log.py:log_questions")
    drain_outbox()
    assert RolloutPipeline(args).logged_by_user(3, answers("85?", "86"), {}, 1.0) is False
    assert drain_outbox() == [({"rollout/questions": 0.5, "rollout/step": 3}, "rollout/step")]


# -- data --------------------------------------------------------------------------------------------------------------


@check("my_source.py")
def goes_on_where_it_was(given):
    words = ["--data-source-path", "my_source.py:Sums", "--disable-rollout-global-dataset", "--save", "out"]
    args = parse(given.directory, *words)
    source = create_data_source(args)
    first = draw_groups(args, source, 2, 0)
    assert [len(group) for group in first] == [2, 2]
    assert sum(map(int, re.findall(r"\d+", first[0][0].prompt[0]["content"]))) == int(first[0][0].label)
    state = copy.deepcopy(source.state_dict())
    following = [group[0].label for group in draw_groups(args, source, 2, 1)]
    again = create_data_source(args)
    again.load_state_dict(state)
    assert [group[0].label for group in draw_groups(args, again, 2, 1)] == following
    source.add_samples(first[:1])
    again.load_state_dict(copy.deepcopy(source.state_dict()))
    assert draw_groups(args, source, 1, 2) == draw_groups(args, again, 1, 2) == first[:1]


# -- training ----------------------------------------------------------------------------------------------------------


@check("my_advantages.py")
def shares_the_reward(given):
    from slime.training.advantages import compute_advantages_and_returns
    from tests.support.models.objective_step import case_args, make_samples, rollout_data

    data = rollout_data(make_samples())
    compute_advantages_and_returns(case_args(custom_advantage_function_path="my_advantages.py:reward_per_token"), data)
    assert [float(part.sum()) for part in data["advantages"]] == pytest.approx(data["rewards"], rel=1e-5)


@check("my_loss.py")
def reinforce_is_the_policy_gradient_where_nothing_is_clipped(given):
    from slime.training.advantages import compute_advantages_and_returns
    from tests.support.models.objective_step import (
        assert_equal_gradients,
        case_args,
        make_logits,
        make_samples,
        rollout_data,
        run_step,
    )

    plain = {"use_kl_loss": False, "entropy_coef": 0.0}
    data = rollout_data(make_samples())
    compute_advantages_and_returns(case_args(**plain), data)
    # Without old log-probs the ratio is 1, and so is the factor of its gradient.
    del data["log_probs"]
    own = case_args(**plain, loss_type="custom_loss", custom_loss_function_path="my_loss.py:reinforce_loss")
    logits = make_logits(make_samples())
    _, metrics, found = run_step(own, data, logits, [range(6)])
    _, _, expected = run_step(case_args(**plain), data, logits, [range(6)])
    assert_equal_gradients(found, [gradient.double() for gradient in expected])
    assert any(gradient.any() for gradient in found) and set(metrics) == {"loss", "pg_loss"}


@check("my_hooks.py")
def begins_with_a_tenth_of_the_learning_rate(given):
    import torch

    function = load_function("my_hooks.py:gently", flag="--custom-megatron-before-train-step-hook-path")
    args = parse(
        given.directory, "--num-steps-per-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"
    )
    rates = []
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = SimpleNamespace(get_lr=lambda group: 1.0)
    # After a step that was skipped the schedule has not set the rate anew.
    for rollout_id, step_id in ((0, 0), (1, 0), (1, 0), (40, 1)):
        function(args, rollout_id, step_id, [], optimizer, schedule)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.3, 0.3, 1.0])


@check("my_rollout.py")
def adds_a_metric(given):
    function = load_function("my_rollout.py", flag="--rollout-function-path")
    assert function is not generate_rollout
    try:
        output = function(given.args(), 0, CountingDataSource(2))
    finally:
        async_utils.run(close_http_client())
        async_utils.stop_async_loop()
    assert output.metrics["longest_response"] == 3 and len(output.samples) == 2


@check("my_step.py")
def answers_every_group(given):
    """Also those of a source that returns prompts."""
    args, source = given.args(), CountingDataSource(2)
    source.get_samples = lambda count: [Sample(prompt=f"{place}+1", label="a") for place in range(count)]
    try:
        groups = load_function("my_step.py:generate_rollout", flag="--rollout-function-path")(args, 0, source)
    finally:
        async_utils.run(close_http_client())
        async_utils.stop_async_loop()
    assert [len(group) for group in groups] == [args.n_samples_per_prompt] * args.rollout_batch_size
    samples = leaves(groups)
    assert all(sample.reward is not None and sample.response_length == 3 for sample in samples)
    assert [sample.index for sample in samples] == sorted({sample.index for sample in samples})


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLUG_INS)
def test_a_file_of_the_page_does_what_the_page_says(name, here, checkpoint, server, monkeypatch):
    monkeypatch.setattr("slime.ray.rollout_manager.configure_logger", lambda level: None)
    CHECKS[name](Given(here, checkpoint, server))


def test_every_file_is_run_and_named_in_a_command():
    assert set(CHECKS) == set(PLUG_INS)
    unnamed = [name for name in PLUG_INS if not any(name in command for command in COMMANDS + TRIALS)]
    assert unnamed == ["test_my_reward.py"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_accepted(command, here):
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["bash", "RUN/train.sh"]
    base = ["--eval-interval", "2", "--eval-prompt-data", "held_out", str(here / "prompts.jsonl")]
    args = parse(here, *base, *words[2:])
    for word in words:
        if ".py:" in word:
            assert os.path.isfile(word.partition(":")[0]) and callable(load_function(word))
    assert args.rollout_batch_size == 4


def test_functions_of_the_page_are_tried(here, monkeypatch, capsys):
    functions, device = TRIALS
    for trial, count, returned in ((functions, 2, "returned    1.0"), (device, 1, "returned    device(")):
        monkeypatch.setattr(sys, "argv", shlex.split(trial.replace("\\\n", " "))[2:])
        assert try_functions() == 0
        told = capsys.readouterr().out
        assert told.count("\n  fine") == count and returned in told


def test_every_field_of_a_sample_is_in_the_table():
    section = PAGE.read_text().partition("\n## Sample\n")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {field.name for field in dataclasses.fields(Sample)}


def section_of(page: Path, anchor: str) -> str:
    """The part of a page to which `page.md#anchor` leads, up to the next heading of its level; all of it without an anchor."""
    text = page.read_text()
    for heading in re.finditer(r"^(##+) (.*)$", text, re.MULTILINE):
        if anchor == re.sub(r"[^\w -]", "", heading[2].lower()).replace(" ", "-"):
            return re.split(rf"^{heading[1]} ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    assert not anchor, f"{page} has no #{anchor}"
    return text


def test_the_table_of_needs_leads_to_every_point_at_which_a_run_can_be_changed():
    """A flag of a run stands in a row; what no flag names stands, with the command that tries it, where a row leads."""
    table = PAGE.read_text().partition("| I want to")[2].partition("\n\n")[0]
    links = set(re.findall(r"\]\(([^)#]*)#?([^)]*)\)", table))
    led_to = "".join(section_of((PAGE.parent / page).resolve() if page else PAGE, anchor) for page, anchor in links)
    no_flags = {flag for flag, point in POINTS.items() if point.in_python}
    flags = {*map(flag_of, MANAGER_PLUG_INS + LOADED_BY_RANKS), *POINTS} - no_flags
    assert [flag for flag in sorted(flags) if not re.search(rf"{flag}(?![\w-])", table)] == []
    assert [flag for flag in sorted(no_flags) if not re.search(rf"{flag}(?![\w-])", led_to)] == []
