"""Conversations of τ-bench: the model serves a customer, whom another model plays, with tools over a data base of their own.

--custom-generate-function-path examples/tau-bench/generate_with_tau.py:generate
--custom-config-path examples/tau-bench/tau.yaml
--max-turns 30

A prompt is a task: `env`, `task_split` and `task_index` of its metadata. What the model is shown, the rules of the shop, its
tools and what the customer says, comes from the environment. So does its reward: 1 where the conversation has left the data
base as its task asks.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from slime.agent.adapters.parsing import END_OF_THINK, parse_model_output
from slime.rollout.dialogue import dialogue
from slime.rollout.failures import mark_failed
from slime.rollout.generate_state import GenerateState
from slime.rollout.user_functions import run_in_daemon_thread
from slime.utils.async_utils import slots
from slime.utils.errors import UserError
from slime.utils.types import Sample

# What `tau` of --custom-config-path may say otherwise.
TAU_CONFIGS: dict[str, Any] = {
    "env": "retail",  # or airline
    "task_split": "train",  # of rows that name none
    "user_strategy": "llm",
    "user_model": "gpt-4o",
    "user_provider": "openai",
    "tool_parser": None,  # of SGLang's, by name; None: calls as most models write them
    "reasoning_parser": None,
    "concurrency": 64,  # steps of environments under way at a time: each may ask the customer's model
}
UNREADABLE = "This call could not be read: give the name of a tool that there is, and arguments, as JSON."

# What opens a call, as most models write them.
CALL = "<tool_call>"


class EnvironmentFailed(Exception):
    """The environment, or the model behind its customer, gave no answer."""


def settings(args: Any) -> SimpleNamespace:
    """`TAU_CONFIGS` with what the run says otherwise.

    Raises:
        UserError: the run names a setting that there is not.
    """
    given = args.tau if hasattr(args, "tau") else {}
    unknown = sorted(set(given) - set(TAU_CONFIGS))
    if unknown:
        raise UserError(f"--custom-config-path: tau has no {', '.join(unknown)}; it has {', '.join(TAU_CONFIGS)}")
    return SimpleNamespace(**{**TAU_CONFIGS, **given})


def library(module: str) -> Any:
    """A module of τ-bench.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"examples/tau-bench needs the package tau_bench ({error}); install it from its repository"
        ) from error


async def in_environment(config: SimpleNamespace, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a method of an environment returns; it may wait for the customer's model, so it has a thread of its own.

    Raises:
        EnvironmentFailed: it raised.
    """
    async with slots("tau", config.concurrency):
        try:
            return await run_in_daemon_thread(function, *arguments)
        except Exception as error:  # whatever a client of a service raises
            raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error


def action_of(said: str, tools: list[dict[str, Any]], config: SimpleNamespace) -> tuple[str, dict[str, Any]] | None:
    """What a turn of the model does: the tool that it calls first, with arguments, or what it tells the customer.

    None for a call that cannot be read, or of a tool that there is not. Neither these nor reasoning are told to the customer.
    """
    types = library("tau_bench.types")
    found = parse_model_output(said, tools, config.tool_parser, config.reasoning_parser)
    if found.tool_uses:
        return found.tool_uses[0].name, found.tool_uses[0].arguments
    if found.ill_formed or CALL in said.rpartition(END_OF_THINK)[2]:
        return None
    return types.RESPOND_ACTION_NAME, {types.RESPOND_ACTION_FIELD_NAME: found.text}


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The conversation of a task, graded; FAILED where the environment is, with the reason in `metadata["fail_reason"]`.

    A conversation that did not come to its end, in `--max-turns` turns or within the length limits, is worth nothing.

    Raises:
        UserError: the package is not installed, the row is a task of another environment than the run's, or the sample has an
            answer already.
    """
    config, types = settings(args), library("tau_bench.types")
    of_row = sample.metadata.get("env", config.env)
    if of_row != config.env:
        raise UserError(
            f"examples/tau-bench: a row is a task of {of_row}, and `tau` of --custom-config-path plays {config.env}; set "
            "env there, or give rows that write_tasks.py wrote for it"
        )
    if sample.response_length:
        raise UserError("examples/tau-bench: an environment cannot be gone on with; drop --partial-rollout")
    try:
        environment, start = await begin(config, sample.metadata)
        sample.prompt = [
            {"role": "system", "content": environment.wiki},
            {"role": "user", "content": start.observation},
        ]
        sample.metadata["tools"] = environment.tools_info
        end_of_turn = GenerateState(args).tokenizer.eos_token
        reward = 0.0

        async def reply(said: str) -> dict[str, str] | None:
            nonlocal reward
            action = action_of(said.removesuffix(end_of_turn), environment.tools_info, config)
            if action is None:
                return {"role": "tool", "content": UNREADABLE}
            name, arguments = action
            step = await in_environment(config, environment.step, types.Action(name=name, kwargs=arguments))
            if step.done:
                reward = float(step.reward)
                return None
            return {"role": "user" if name == types.RESPOND_ACTION_NAME else "tool", "content": step.observation}

        sample = await dialogue(args, sample, sampling_params, reply)
        sample.reward = reward
    except EnvironmentFailed as error:
        return mark_failed(args, sample, f"τ-bench: {error}")
    return sample


async def begin(config: SimpleNamespace, task: dict[str, Any]) -> tuple[Any, Any]:
    """An environment of its own for a task, and what the customer says first.

    Args:
        task: the metadata of a row. Held-out tasks are of another split than those of training, whose numbers they share.

    Raises:
        EnvironmentFailed: there is no such task, or the customer's model does not answer.
    """
    get_env, task_index = library("tau_bench.envs").get_env, int(task["task_index"])

    def make() -> tuple[Any, Any]:
        environment = get_env(
            config.env,
            user_strategy=config.user_strategy,
            user_model=config.user_model,
            user_provider=config.user_provider,
            task_split=task.get("task_split", config.task_split),
            task_index=task_index,
        )
        return environment, environment.reset(task_index=task_index)

    return await in_environment(config, make)
