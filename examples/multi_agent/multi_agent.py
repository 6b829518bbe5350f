"""Solvers, rewriters and a selector: one model in three roles, every answer of which is a training sample.

--custom-generate-function-path examples/multi_agent/multi_agent.py:generate
--custom-rollout-log-function-path examples/multi_agent/multi_agent.py:log_roles
--custom-config-path examples/multi_agent/agents.yaml
"""

import re
import statistics
from collections import defaultdict
from typing import Any

from slime.observability.logging_utils import log
from slime.rollout.base_types import leaves
from slime.rollout.dialogue import ask, ask_all
from slime.rollout.rm_hub import batched_async_rm, without_end_mark
from slime.utils.types import Sample

Messages = list[dict[str, Any]]
CHOICE = re.compile(r"\\boxed\{\s*(\d+)\s*\}")


def listed(answers: list[Sample]) -> str:
    """Solutions one below the other, numbered from 1, without what was thought before them.

    An answer that ended before its thoughts did, or that was cut off without any, is shown as none: several of these would
    fill the context of the next role.
    """
    texts = []
    for answer in answers:
        _, thought, solution = without_end_mark(answer.response).rpartition("</think>")
        is_cut = answer.status is Sample.Status.TRUNCATED or solution.lstrip().startswith("<think>")
        texts.append("no answer" if is_cut and not thought else solution.strip())
    return "\n".join(f"{number}: {text}" for number, text in enumerate(texts, 1))


def with_request(messages: Messages, solutions: str, request: str) -> Messages:
    """`messages` with solutions and a request behind the question, in a context of its own."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}\n{solutions}\n{request}"}]


def to_rewrite(messages: Messages, solutions: str) -> Messages:
    return with_request(messages, solutions, "Write your own solution.")


def to_select(messages: Messages, solutions: str) -> Messages:
    return with_request(messages, solutions, "Box the number of the best one.")


def chosen(said: str, count: int) -> int | None:
    """The position that a selector chose among `count` solutions; None where it chose none of them."""
    numbers = CHOICE.findall(said)
    return int(numbers[-1]) - 1 if numbers and len(numbers[-1]) < 4 and 1 <= int(numbers[-1]) <= count else None


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False):
    """`num_parallel` solutions, as many rewritten ones, and the choice among those: one execution.

    Solvers and rewriters are graded by what they say, the selector by what it chose. All rewards of an execution are weighted
    by how it ended: `correct_reward_weight` where the chosen solution got a reward above 0, else `incorrect_reward_weight`. An
    evaluation gets the chosen solution alone, with its own reward, or the selector's answer where it chose none.
    """
    question = sample.prompt
    solvers = await ask_all(args, sample, [question] * args.num_parallel, sampling_params)
    rewriting = to_rewrite(question, listed(solvers))
    rewriters = await ask_all(args, sample, [rewriting] * args.num_parallel, sampling_params)
    selector = await ask(args, sample, to_select(question, listed(rewriters)), dict(sampling_params))
    everybody = [*solvers, *rewriters, selector]
    if any(answer.status is Sample.Status.ABORTED for answer in everybody):
        return everybody
    for role, answers in (("solver", solvers), ("rewriter", rewriters), ("selector", [selector])):
        for answer in answers:
            answer.metadata["role"] = role

    graded = [*solvers, *rewriters]
    for answer, reward in zip(graded, await batched_async_rm(args, graded, evaluation=evaluation), strict=True):
        answer.reward = reward
    position = chosen(selector.response, len(rewriters))
    best = None if position is None else rewriters[position]
    selector.reward = 0.0 if best is None else best.get_reward_value(args)
    if evaluation:
        return selector if best is None else best
    is_right = selector.reward > 0
    weight = args.correct_reward_weight if is_right else args.incorrect_reward_weight
    for answer in everybody:
        value = selector.reward if answer is selector else answer.get_reward_value(args)
        answer.metadata["raw_reward"] = value
        answer.reward = {args.reward_key: weight * value} if args.reward_key else weight * value
    return everybody


def log_roles(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    """The mean reward of each role, before weights; the usual metrics are logged as well."""
    rewards = defaultdict(list)
    for answer in leaves(samples):
        if "role" not in answer.metadata:
            # It failed before it had one.
            continue
        rewards[answer.metadata["role"]].append(answer.metadata["raw_reward"])
    means = {f"rollout/reward/{role}": statistics.fmean(values) for role, values in rewards.items()}
    log(args, {**means, "rollout/step": rollout_id}, "rollout/step")
    return False
