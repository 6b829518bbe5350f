"""What a generator of one's own inherits, against an engine and a service of a reward over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from slime.utils import http_utils
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import HttpError, HttpSettings, close_http_client, post
from slime_plugins.rollout_buffer import base_generator
from slime_plugins.rollout_buffer.base_generator import BaseGenerator
from slime_plugins.rollout_buffer.math_generator import MathGenerator
from tests.support.models.rollout_args import make_checkpoint
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.http_server import forget_everything

ROW = {"prompt": "why?", "label": None}


class Own(BaseGenerator):
    """Keeps what it would send."""

    def __init__(self, data):
        super().__init__(data)
        self.sent = []

    async def trajectory(self, row):
        return self.item(await self.chat(row["prompt"]), reward=1.0)

    async def send(self, item):
        self.sent.append(item)


class FirstOfMany(Own):
    """Asks nobody, and ends after the first `most` trajectories."""

    async def trajectory(self, row):
        return {"messages": [], "reward": 1.0, "prompt": row["prompt"]}

    async def send(self, item):
        if len(self.sent) == self.data["most"]:
            raise UserError("enough")
        await super().send(item)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def client(monkeypatch):
    """Two attempts of a request, one after the other."""
    forget_everything(monkeypatch)
    monkeypatch.setattr(http_utils, "_settings", HttpSettings(max_retries=2))
    monkeypatch.setattr(base_generator, "_WAIT_S", 0.01)


@pytest.fixture
def engine():
    with FakeGenerateServer() as running:
        yield running


def generator(checkpoint, engine, cls=Own, **data):
    params = {"max_new_tokens": 60}
    return cls({"tokenizer_path": checkpoint, "remote_engine_url": engine.url, "sampling_params": params, **data})


def awaited(coroutine):
    async def main():
        try:
            async with asyncio.timeout(120):
                return await coroutine
        finally:
            await close_http_client()

    return asyncio.run(main())


@pytest.mark.parametrize("shuffle", [False, True])
def test_prompts_come_by_the_weights_of_their_files(checkpoint, engine, tmp_path, shuffle):
    files = []
    for name, weight in (("a", ""), ("b", "*3")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(f'{{"prompt": "{name}{row}"}}\n' for row in range(4)))
        files.append(f"{file}{weight}")

    def sent(**data):
        words = {"input_files": files, "num_repeat_per_sample": 1, "num_process": 1, "shuffle": shuffle, "seed": 5}
        made = generator(checkpoint, engine, FirstOfMany, **{**words, **data})
        with pytest.raises(UserError, match="enough"):
            made.run()
        return [(item["prompt"], item["instance_id"]) for item in made.sent]

    found = sent(most=16)
    assert [sum(prompt[0] == "a" for prompt, _ in part) for part in (found[:8], found[8:])] == [2, 2], "in each epoch"
    of_a, of_b = ([f"{name}{row}" for row in range(4)] for name in "ab")
    assert sorted(prompt for prompt, _ in found) == [*of_a, *sorted(3 * of_b)]
    # Each time that a row comes is a group of its own, and those that a run has already do not come again.
    assert {instance for _, instance in found} == {
        f"{number}-{4 * (row in of_b) + int(row[1])}"
        for row in of_a + of_b
        for number in range(3 if row in of_b else 1)
    }
    assert sent(most=14, skip_instance_ids=[instance for _, instance in found[:2]]) == found[2:]
    # The same weight everywhere: all rows in every epoch.
    plain = sent(most=16, input_files=[file.removesuffix("*3") for file in files])
    assert [sorted(instance for _, instance in part) for part in (plain[:8], plain[8:])] == [
        [f"{epoch}-{row}" for row in range(8)] for epoch in range(2)
    ]


def test_bad_rows_are_left_out_where_the_run_allows_them(checkpoint, engine, tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n{"question": "b"}\n{"prompt": "c"}\n')
    words = {"input_files": [str(file)], "input_key": "prompt", "num_repeat_per_sample": 1, "num_process": 1, "most": 2}
    with pytest.raises(UserError, match="rows.jsonl:2: .*--allow-bad-rows"):
        generator(checkpoint, engine, FirstOfMany, **words).run()
    made = generator(checkpoint, engine, FirstOfMany, allow_bad_rows=True, **words)
    with pytest.raises(UserError, match="enough"):
        made.run()
    assert [item["prompt"] for item in made.sent] == ["a", "c"]
    assert "rows.jsonl:2 is left out" in caplog.text
    assert "rows.jsonl:3 is left out: there is no prompt (--input-key) among question" in caplog.text


def test_a_trajectory_that_changes_its_row_changes_no_other(checkpoint, engine, tmp_path):
    """Neither one of its group nor one of a later pass."""

    class GoesOn(FirstOfMany):
        async def trajectory(self, row):
            seen = list(row["prompt"])
            row["prompt"].append({"role": "assistant", "content": "because"})
            return {"messages": row["prompt"], "reward": 1.0, "prompt": seen}

    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "why?"}]}\n')
    made = generator(
        checkpoint, engine, GoesOn, input_files=[str(file)], num_repeat_per_sample=2, num_process=2, most=4
    )
    with pytest.raises(UserError, match="enough"):
        made.run()
    assert {item["instance_id"] for item in made.sent} == {"0-0", "1-0"}
    assert [item["prompt"] for item in made.sent] == [[{"role": "user", "content": "why?"}]] * 4


@pytest.mark.parametrize("label", [None, "", {"ground_truth": "7"}, ["7"]])
def test_a_label_that_no_answer_equals_is_told(checkpoint, engine, label):
    made = generator(checkpoint, engine, MathGenerator)
    with pytest.raises(UserError, match="the label of a row is .*--label-key"):
        asyncio.run(made.trajectory({"prompt": "why?", "label": label}))


def test_an_answer_has_no_more_tokens_than_the_context_leaves(checkpoint, engine):
    made = generator(checkpoint, engine, context_length=64)
    turn = awaited(made.chat("why?"))
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 64 - len(turn.prompt_ids) < 60
    awaited(made.chat("why?", max_new_tokens=3))
    assert engine.requests[1]["sampling_params"]["max_new_tokens"] == 3
    awaited(made.chat("why?", max_new_tokens=3, min_new_tokens=5))
    assert engine.requests[2]["sampling_params"]["min_new_tokens"] == 3
    with pytest.raises(UserError, match="with its answer it may have 64 .*no answer is possible"):
        awaited(made.chat("why? " * 100))
    assert len(engine.requests) == 3


def test_an_answer_that_is_sampled_otherwise_than_is_trained_is_told_of_once(checkpoint, engine, caplog):
    made = generator(checkpoint, engine, sampling_params={"temperature": 0.8, "max_new_tokens": 60})

    async def chat_with(*all_params):
        for params in all_params:
            await made.chat("why?", **params)

    awaited(chat_with({}, {"temperature": 0.8, "top_p": 1.0}, {"max_new_tokens": 3, "stop": ["x"]}))
    assert "chat is asked with" not in caplog.text
    awaited(chat_with(*[{"temperature": 0.3}] * 2, {"temperature": 0.8, "min_p": 0.1}))
    counts = [caplog.text.count(f"chat is asked with {other}, and") for other in ("temperature 0.3", "min_p 0.1")]
    assert counts == [1, 1]


def test_a_chat_goes_on_without_the_mark_that_ends_a_turn(checkpoint, engine):
    """The text of an engine has it, and the chat template writes it once more."""
    engine.text_of = lambda tokens: "It is 4<|im_end|>"
    made = generator(checkpoint, engine)
    first = awaited(made.chat("2+2?"))
    assert first.text == "It is 4" and first.messages[-1] == {"role": "assistant", "content": "It is 4"}
    second = awaited(made.chat([*first.messages, {"role": "user", "content": "sure?"}]))
    assert made.tokenizer.decode(second.prompt_ids).count("It is 4<|im_end|>") == 1


@pytest.mark.parametrize(
    ("told", "versions"),
    [
        (
            {"weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]},
            ["3", "5"],
        ),
        ({"weight_version": "5"}, ["5"]),
        ({}, []),
    ],
)
def test_an_answer_that_went_through_a_push_has_the_versions_of_all_its_parts(checkpoint, engine, told, versions):
    """Its age is that of the oldest."""
    made = generator(checkpoint, engine)

    async def answered(*_):
        return {"text": "x", "meta_info": {"weight_version": None, **told, "finish_reason": {"type": "stop"}}}

    made._answered = answered
    assert made.item(awaited(made.chat("why?")), 1.0)["extra_info"]["weight_versions"] == versions


@pytest.mark.parametrize(
    ("log_probs", "error"),
    [
        ([-0.5, None], "token 1 of an answer the log-prob None"),
        ([float("nan"), -0.5], "token 0 of an answer the log-prob nan"),
        ([-0.5], "counts 2 tokens, and tells the log-probs of 1"),
        ([], "counts 2 tokens, and tells the log-probs of 0"),
    ],
)
def test_an_answer_without_a_log_prob_for_each_token_fails_its_trajectory(checkpoint, engine, log_probs, error):
    made = generator(checkpoint, engine)

    async def answered(*_):
        entries = [[log_prob, 70 + place, None] for place, log_prob in enumerate(log_probs)]
        told = {"output_token_logprobs": entries, "completion_tokens": 2, "finish_reason": {"type": "stop"}}
        return {"text": "FG", "meta_info": told}

    made._answered = answered
    awaited(made._make_item("0-0", ROW))
    assert made.sent[0]["reward"] is None and error in made.sent[0]["extra_info"]["error"]


@pytest.mark.parametrize("status", [429, 503])
def test_engines_that_come_back_are_waited_for(checkpoint, engine, status):
    """Longer than the attempts of one request last."""
    engine.refusal_status = status
    engine.refuse = lambda payload: "none is there" if len(engine.requests) < 10 else None
    assert awaited(generator(checkpoint, engine, engine_wait_s=60.0).chat("why?")).output_ids == [70, 71, 72]


def test_engines_that_stay_away_end_the_generator(checkpoint, engine):
    engine.refusal_status, engine.refuse = 503, lambda payload: "none is there"
    made = generator(checkpoint, engine, engine_wait_s=0.05)
    with pytest.raises(HttpError, match="none is there"):
        awaited(made._make_item("0-0", ROW))
    assert made.sent == []


def test_a_request_that_the_engine_refuses_fails_its_trajectory_alone(checkpoint, engine):
    engine.refuse = lambda payload: "longer than the context"
    made = generator(checkpoint, engine)
    awaited(made._make_item("0-0", ROW))
    (sent,) = made.sent
    assert sent["reward"] is None and "longer than the context" in sent["extra_info"]["error"]


def test_a_reward_service_that_fails_fails_the_trajectory_alone(checkpoint, engine):
    class Graded(Own):
        async def trajectory(self, row):
            return self.item(await self.chat(row["prompt"]), reward=await post(f"{self.data['reward_url']}/grade", {}))

    with FakeGenerateServer() as reward:
        # One has no such path, the other one is not there.
        for url in (reward.url, "http://127.0.0.1:9"):
            made = generator(checkpoint, engine, Graded, reward_url=url)
            awaited(made._make_item("0-0", ROW))
            assert made.sent[0]["reward"] is None and "HttpError" in made.sent[0]["extra_info"]["error"]


def test_a_trajectory_that_never_ends_is_given_up(checkpoint, engine):
    class Hangs(Own):
        async def trajectory(self, row):
            await asyncio.Event().wait()

    made = generator(checkpoint, engine, Hangs, trajectory_timeout=0.05)
    awaited(made._make_item("0-0", ROW))
    (sent,) = made.sent
    assert sent["extra_info"]["error"] == "it was not done within 0.05 s (--trajectory-timeout of the service)"


def test_a_prompt_whose_trajectories_all_fail_does_not_end_the_generator(checkpoint, engine):
    class Fails(Own):
        async def trajectory(self, row):
            raise KeyError("no such tool")

    async def fail(made, instances):
        for instance in instances:
            await made._make_item(instance, ROW)

    made = generator(checkpoint, engine, Fails)
    awaited(fail(made, ["0-0"] * 40))
    assert len(made.sent) == 40
    with pytest.raises(
        RunError, match="41 trajectories in a row failed, the last with KeyError: 'no such tool'; start again"
    ):
        awaited(fail(made, ["0-1"]))


def test_items_say_of_which_run_they_are(checkpoint, engine, monkeypatch):
    posted = []

    async def post_item(url, item):
        posted.append(item)

    monkeypatch.setattr(base_generator, "_post_item", post_item)

    class Sends(Own):
        send = BaseGenerator.send

    awaited(
        generator(checkpoint, engine, Sends, remote_buffer_url="http://127.0.0.1:9", run_id="one")._make_item(
            "0-0", ROW
        )
    )
    assert posted[0]["run_id"] == "one"
