"""Three roles of one model: what each is shown, what each is worth, and that corrections find the log-probs they need; and the
task with demonstrations of all three."""

import copy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.multi_agent import multi_agent, toy_task
from examples.multi_agent.multi_agent import chosen, generate, listed, log_roles, to_rewrite, to_select
from slime.rollout.custom_generate import complete_sample
from slime.rollout.dialogue import ask_all
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.toy_rows import operands, toy_rows
from tests.support.processes.spoken import spoken

EXAMPLE = Path(__file__).parents[3] / "examples/multi_agent"
SETTINGS = {
    "num_parallel": 2,
    "correct_reward_weight": 1.2,
    "incorrect_reward_weight": 0.8,
    "rm_type": "math",
    "reward_key": None,
}
QUESTION = [{"role": "user", "content": "2+3?"}]
# Of the answers of an execution with two solvers.
SHARES = {"solver": 0.4, "rewriter": 0.4, "selector": 0.2}


def role_of(context):
    """Who is asked, by the request at the end."""
    return "selector" if "Box the" in context else "rewriter" if "Write your" in context else "solver"


def played(checkpoint, solutions, rewritten, choice, evaluation=False, **changes):
    """The execution in which the roles say this, in whatever order they are asked; and the requests."""
    left = {"solver": list(solutions), "rewriter": list(rewritten), "selector": [choice]}

    def say(context):
        return left[role_of(context)].pop(0)

    sample = Sample(index=4, group_index=2, prompt=QUESTION, label="5")
    return spoken(checkpoint, generate, sample, say, arguments=(evaluation,), **{**SETTINGS, **changes})


@pytest.mark.usefixtures("fresh_state")
def test_all_answers_are_samples_weighted_by_how_the_execution_ended(checkpoint):
    answers, _ = played(checkpoint, ["\\boxed{4}", "\\boxed{5}"], ["\\boxed{5}", "\\boxed{6}"], "\\boxed{1}")
    assert [answer.metadata["role"] for answer in answers] == ["solver"] * 2 + ["rewriter"] * 2 + ["selector"]
    assert (
        sorted(answer.reward for answer in answers[:2]) == sorted(answer.reward for answer in answers[2:4]) == [0, 1.2]
    )
    right = answers[2].metadata["raw_reward"] == 1
    assert answers[4].reward == (1.2 if right else 0.0)


@pytest.mark.parametrize(("choice", "weight"), [("\\boxed{1}", 1.2), ("none", 0.8), ("\\boxed{7}", 0.8)])
@pytest.mark.usefixtures("fresh_state")
def test_the_weight_is_that_of_the_choice(checkpoint, choice, weight):
    answers, _ = played(checkpoint, ["\\boxed{5}"] * 2, ["\\boxed{5}"] * 2, choice)
    assert [answer.reward for answer in answers] == [weight] * 4 + [weight * (weight > 1)]


@pytest.mark.usefixtures("fresh_state")
def test_r12_every_answer_has_the_log_probs_of_its_own_response(checkpoint):
    answers, requests = played(checkpoint, ["a \\boxed{5}", "b"], ["c", "dd \\boxed{5}"], "\\boxed{2}", use_tis=True)
    contexts = sorted(request["input_ids"] for request in requests)
    assert contexts == sorted(list(answer.tokens[: -answer.response_length]) for answer in answers)
    for answer in answers:
        assert len(answer.rollout_log_probs) == answer.response_length > 0
        assert all(value < 0 for value in answer.rollout_log_probs)
        complete_sample(None, answer, "test")
        answer.rollout_log_probs = answer.rollout_log_probs[1:]
        with pytest.raises(Exception, match="rollout_log_probs"):
            complete_sample(None, answer, "test")


@pytest.mark.usefixtures("fresh_state")
def test_each_role_is_shown_the_solutions_of_the_one_before(checkpoint):
    answers, _ = played(checkpoint, ["s1", "s2"], ["r1", "r2"], "\\boxed{1}")
    solutions, rewritten = listed(answers[:2]), listed(answers[2:4])
    assert sorted(solutions.split("\n"))[0][3:] in ("s1", "s2")
    assert [answer.prompt for answer in answers] == [
        QUESTION, QUESTION, to_rewrite(QUESTION, solutions), to_rewrite(QUESTION, solutions), to_select(QUESTION, rewritten),
    ]  # fmt: skip


@pytest.mark.usefixtures("fresh_state")
def test_an_evaluation_gets_the_chosen_answer_with_its_own_reward(checkpoint):
    answer, _ = played(checkpoint, ["x", "x"], ["\\boxed{5}", "\\boxed{5}"], "\\boxed{2}", evaluation=True)
    assert (answer.metadata["role"], answer.reward) == ("rewriter", 1)
    nobody, _ = played(checkpoint, ["x", "x"], ["\\boxed{5}", "\\boxed{5}"], "?", evaluation=True)
    assert (nobody.metadata["role"], nobody.reward) == ("selector", 0.0)


@pytest.mark.usefixtures("fresh_state")
def test_arguments_are_only_read(checkpoint):
    seen = []

    async def watched(args, sample, sampling_params):
        before = copy.deepcopy(vars(args))
        result = await generate(args, sample, sampling_params)
        seen.append(vars(args) == before)
        return result

    spoken(checkpoint, watched, Sample(index=0, prompt=QUESTION, label="5"), ["\\boxed{1}"] * 5, **SETTINGS)
    assert seen == [True]


@pytest.mark.usefixtures("fresh_state")
def test_agents_side_by_side_have_seeds_of_their_own_where_seeds_decide(checkpoint):
    async def three(args, sample, sampling_params):
        return await ask_all(args, sample, [QUESTION] * 3, {**sampling_params, "sampling_seed": 42})

    _, requests = spoken(checkpoint, three, Sample(index=0, prompt=QUESTION), ["x"] * 3, n_samples_per_prompt=8)
    assert sorted(request["sampling_params"]["sampling_seed"] for request in requests) == [42, 50, 58]


@pytest.mark.parametrize(
    ("said", "position"),
    [("\\boxed{2}", 1), ("\\boxed{1} no, \\boxed{3}", 2), ("\\boxed{0}", None), ("\\boxed{4}", None), ("2", None),
     ("\\boxed{" + "9" * 5000 + "}", None)],
)  # fmt: skip
def test_a_choice_is_a_number_of_the_list(said, position):
    assert chosen(said, 3) == position


def test_solutions_are_listed_without_thoughts():
    answers = [Sample(response="<think>hm</think> a<|im_end|>"), Sample(response="b")]
    assert listed(answers) == "1: a\n2: b"


def test_an_answer_that_ended_before_a_solution_is_shown_as_none():
    cut = Sample.Status.TRUNCATED
    answers = [
        Sample(response="<think>hm, hm", status=cut),
        # The chat template has opened the thoughts of this one, if it has any.
        Sample(response="hm, hm", status=cut),
        Sample(response="<think>hm<|im_end|>", status=Sample.Status.COMPLETED),
        Sample(response="<think>hm</think> \\boxed{5} because", status=cut),
    ]
    assert listed(answers) == "1: no answer\n2: no answer\n3: no answer\n4: \\boxed{5} because"


def test_the_mean_reward_of_each_role_is_logged(monkeypatch):
    logged = []
    monkeypatch.setattr(multi_agent, "log", lambda args, metrics, key: logged.append(metrics))
    samples = [
        Sample(metadata={"role": role, "raw_reward": reward}) for role, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0))
    ]
    # An answer that failed before it had a role, in a group.
    samples.append([Sample(metadata={}), samples.pop()])
    assert log_roles(3, SimpleNamespace(), samples, {}, 1.0) is False
    assert logged == [{"rollout/reward/a": 0.5, "rollout/reward/b": 1.0, "rollout/step": 3}]


@pytest.mark.parametrize(("name", "agents"), [("agents.yaml", 5), ("toy.yaml", toy_task.SOLUTIONS)])
def test_a_run_takes_the_settings(tmp_path, name, agents):
    args = parse(tmp_path, "--custom-config-path", str(EXAMPLE / name))
    assert (args.num_parallel, args.correct_reward_weight, args.incorrect_reward_weight) == (agents, 1.2, 0.8)


def test_each_role_is_demonstrated_as_often_as_it_plays_in_the_context_that_it_plays_in(tmp_path):
    roles = Counter()
    for row in toy_rows(tmp_path, toy_task)["sft"]:
        [asked, answer] = row["messages"]
        question, *solutions = asked["content"].split("\n")
        said, role = answer["content"], role_of(asked["content"])
        roles[role] += 1
        if role == "solver":
            assert not solutions
            continue
        *solutions, _ = solutions
        shown = [solution.partition(": ")[2] for solution in solutions]
        listing = listed([Sample(response=solution) for solution in shown])
        as_asked = to_rewrite if role == "rewriter" else to_select
        assert len(shown) == toy_task.SOLUTIONS
        assert [asked] == as_asked([{"role": "user", "content": question}], listing)
        if role == "selector":
            assert chosen(said, len(shown)) is not None
    assert all(abs(roles[role] / roles.total() - share) < 0.06 for role, share in SHARES.items())


def test_held_out_sums_are_nowhere_else(tmp_path):
    task = toy_rows(tmp_path, toy_task)
    held_out = {operands(row) for row in task["eval"]}
    assert len(held_out) == 64
    assert not held_out & {operands(row) for row in task["train"] + task["sft"]}
    assert all(row["label"] == str(sum(operands(row))) for row in task["train"] + task["eval"])
