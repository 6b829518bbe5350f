"""The teacher behind HTTP, with ranks that answer as a test says: who may ask when, and what a refusal names."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from tests.support.models.args import write_config
from tests.support.processes.http_server import status_with_token
from tests.support.processes.waiting import until
from tools.teacher import server as teacher
from tools.teacher.server import TeacherServer

VOCAB = 300
QUESTION = {"input_ids": [5, 6, 7], "sample_n": 2, "label_token_ids": [[1], [2]], "seed": 4}


class Ranks:
    """What has all ranks do something. `held`: names of what goes on only when `go_on` is set."""

    def __init__(self, held=(), problem=None, value=-1.5, error=None):
        self.held, self.problem, self.value, self.error = held, problem, value, error
        self.told, self.go_on = [], threading.Event()

    def lead(self, name, *arguments):
        self.told.append((name, *arguments))
        if name in self.held:
            assert self.go_on.wait(60)
        if self.error is not None and name == "answer":
            raise self.error
        if name == "update":
            return self.problem
        if name == "answer":
            (question,) = arguments
            rows = len(question.tokens) - 1
            found = {"log_probs": np.full(rows, self.value, np.float32)}
            if question.sample_n:
                found["sampled_token_ids"] = np.full((rows, question.sample_n), 9)
                found["sampled_log_probs"] = np.full((rows, question.sample_n), -0.5, np.float32)
            if question.labels is not None:
                found["label_token_log_probs"] = -question.labels.astype(np.float32)
            return found

    def names(self):
        return [name for name, *_ in self.told if name != "beat"]


class Client:
    def __init__(self, session, url, server):
        self.session, self.url, self.server = session, url, server

    async def ask(self, path, body=None, headers=None):
        method = "GET" if body is None else "POST"
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        async with self.session.request(method, self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    def begin(self, path, body):
        return asyncio.create_task(self.ask(path, body))


@asynccontextmanager
async def running(ranks, model, start=lambda: None, warm_up=None, **options):
    given = {"hf_checkpoint": str(model), "vocab_size": VOCAB, "loaded": ("/first", None), **options}
    server = TeacherServer(ranks.lead, {"hf_checkpoint": str(model)}, **given)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    task = asyncio.create_task(server.run(start, None if warm_up is None else lambda: warm_up(url)))
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            client = Client(session, url, server)
            if warm_up is None and start.__name__ == "<lambda>":
                await until(lambda: server._is_ready)
            yield client
    finally:
        ranks.go_on.set()
        task.cancel()
        await runner.cleanup()


@pytest.fixture
def model(tmp_path):
    return write_config(tmp_path / "model")


@pytest.fixture
def other(tmp_path):
    """Further checkpoints of the model."""
    return [str(write_config(tmp_path / name)) for name in ("second", "third")]


def run(body, ranks, model, **options):
    async def main():
        async with running(ranks, model, **options) as client:
            return await body(client)

    return asyncio.run(main())


def test_an_answer(model):
    async def body(client):
        return await client.ask("/generate", QUESTION)

    status, answer = run(body, ranks := Ranks(), model)
    assert status == 200 and len(answer.pop("request_id")) > 8
    assert answer == {
        "log_probs": [-1.5, -1.5], "sampled_token_ids": [[9, 9], [9, 9]], "sampled_log_probs": [[-0.5, -0.5]] * 2,
        "label_token_log_probs": [[-1.0], [-2.0]],
    }  # fmt: skip
    ((_, question),) = ranks.told
    assert (question.tokens.tolist(), question.sample_n, question.seed) == ([5, 6, 7], 2, 4)
    assert question.temperature == 1.0 and question.labels.tolist() == [[1], [2]]


def test_an_engines_answer(model):
    asked = {
        "input_ids": [40, 41, 42], "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True,
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False},
    }  # fmt: skip

    async def body(client):
        return await client.ask("/generate", asked)

    status, answer = run(body, ranks := Ranks(), model, decode=lambda tokens: [chr(token) for token in tokens])
    assert status == 200
    assert answer["meta_info"]["input_token_logprobs"] == [[None, 40, "("], [-1.5, 41, ")"], [-1.5, 42, "*"]]
    assert ranks.told[0][1].temperature == 0.7


# Body or what it changes of QUESTION → status and what the reason names.
REFUSED = [
    (b"{", 400, "no JSON"),
    (b"\xff\xfe", 400, "no JSON"),
    (b"[]", 400, "must be an object"),
    (b"{}", 400, "input_ids must be a list"),
    ({"input_ids": "abc"}, 400, "input_ids must be a list"),
    ({"input_ids": [1.5, 2]}, 400, "input_ids must be a list"),
    ({"input_ids": [[1, 2], [3]]}, 400, "input_ids must be a list"),
    ({"input_ids": [2**63, 2]}, 400, "input_ids must be a list"),
    ({"input_ids": []}, 400, "input_ids must be a list"),
    ({"input_ids": [1]}, 400, "two tokens"),
    ({"input_ids": [1, 2, VOCAB]}, 400, f"input_ids has {VOCAB}; ids are from 0 to {VOCAB - 1}"),
    ({"input_ids": [1, -1, 3]}, 400, "input_ids has -1"),
    ({"input_ids": [1] * 17, "label_token_ids": None}, 413, "--megatron-server-max-length is 16"),
    ({"label_token_ids": [[1], [2], [3]]}, 400, "3 rows for 3 input_ids"),
    ({"label_token_ids": [[1], [2, 3]]}, 400, "all as long"),
    ({"label_token_ids": [1, 2]}, 400, "label_token_ids must be"),
    ({"label_token_ids": [[1], [VOCAB]]}, 400, "label_token_ids has"),
    ({"sample_n": -1}, 400, "sample_n"),
    ({"sample_n": True}, 400, "sample_n"),
    ({"sample_n": 2**24}, 413, "give them in parts"),
    ({"seed": 1.0}, 400, "seed"),
    ({"seed": 2**63}, 400, "seed"),
    ({"temperature": 0}, 400, "temperature"),
    ({"temperature": "1"}, 400, "temperature"),
    ({"sampling_params": {"top_p": 0.5}}, 400, "sampling_params"),
    ({"sampling_params": {"max_new_tokens": 5}}, 400, "max_new_tokens"),
    ({"sample_m": 1}, 400, "unknown fields ['sample_m']"),
    (b'{"input_ids": [' + b"1," * 2**20 + b"1]}", 413, "--megatron-server-max-length is 16"),
]


def test_a_wrong_question_is_refused_with_a_reason_and_asks_no_rank(model, monkeypatch):
    async def body(client):
        found = [
            await client.ask("/generate", given if isinstance(given, bytes) else {**QUESTION, **given})
            for given, _, _ in REFUSED
        ]
        monkeypatch.setattr(teacher, "MOST_BYTES", 0)
        return found, await client.ask("/generate", {"input_ids": [1] * 16})

    found, after = run(body, ranks := Ranks(), model, max_length=16)
    for (given, status, named), (answered, answer) in zip(REFUSED, found, strict=True):
        assert (answered, named in answer["error"]) == (status, True), (str(given)[:80], answered, answer)
    assert after[0] == 200 and ranks.names() == ["answer"]


def test_a_body_that_is_too_large_and_paths_that_are_none(model):
    async def body(client):
        large = await client.ask("/generate", b'{"input_ids": [' + b" " * 100 * 10**6 + b"]}")
        return large, await client.ask("/nowhere"), await client.ask("/generate")

    (status, answer), nowhere, read = run(body, Ranks(), model)
    assert status == 413 and f"more than {teacher.MOST_BYTES} bytes" in answer["error"]
    assert nowhere[0] == 404 and read[0] == 405


def test_what_is_no_number_is_told_and_the_server_goes_on(model):
    ranks = Ranks(value=np.nan)

    async def body(client):
        broken = await client.ask("/generate", QUESTION)
        ranks.value = -1.0
        return broken, await client.ask("/generate", QUESTION)

    (status, answer), after = run(body, ranks, model)
    assert status == 500 and "log_probs is no finite number at [0]" in answer["error"]
    assert after[0] == 200


def test_questions_wait_for_each_other_and_one_whose_client_has_gone_is_not_asked(model):
    ranks = Ranks(held=("answer",))

    async def body(client):
        first = client.begin("/generate", {"input_ids": [1, 1]})
        await until(lambda: ranks.told)
        gone, last = (client.begin("/generate", {"input_ids": [i, i]}) for i in (2, 3))
        await until(lambda: client.server._asked == 3)
        loads = await client.ask("/get_loads")
        gone.cancel()
        await until(lambda: client.server._asked == 2)
        ranks.go_on.set()
        return loads, await first, await last, await client.ask("/get_loads")

    loads, first, last, after = run(body, ranks, model)
    assert loads == (200, {"loads": [{"num_reqs": 3, "num_running_reqs": 1, "num_waiting_reqs": 2}]})
    assert first[0] == last[0] == 200 and after[1]["loads"][0]["num_reqs"] == 0
    assert [question.tokens.tolist() for _, question in ranks.told] == [[1, 1], [3, 3]]


def test_too_many_questions_are_told_to_come_again(model, monkeypatch):
    monkeypatch.setattr(teacher, "MOST_WAITING", 1)
    ranks = Ranks(held=("answer",))

    async def body(client):
        first = client.begin("/generate", QUESTION)
        await until(lambda: ranks.told)
        second = await client.ask("/generate", QUESTION)
        ranks.go_on.set()
        return await first, second

    first, second = run(body, ranks, model)
    assert (first[0], second[0]) == (200, 429)


def test_an_update_waits_until_questions_are_answered_and_refuses_further_ones(model, other):
    ranks = Ranks(held=("answer",))

    async def body(client):
        question = client.begin("/generate", QUESTION)
        await until(lambda: ranks.told)
        update = client.begin("/update_weights_from_disk", {"model_path": other[0]})
        await until(lambda: client.server._update)
        while_updating = (
            await client.ask("/generate", QUESTION),
            await client.ask("/detect"),
            await client.ask("/healthz"),
        )
        joined = client.begin("/update_weights_from_disk", {"path": other[0]})
        await until(lambda: client.server._update.waiting == 2)
        another = await client.ask("/update_weights_from_disk", {"load": other[1]})
        assert ranks.names() == ["answer"]
        ranks.go_on.set()
        results = await question, await update, await joined
        again = await client.ask("/update_weights_from_disk", {"load": other[0]})
        return (
            while_updating,
            another,
            results,
            again,
            await client.ask("/info"),
            await client.ask("/generate", QUESTION),
        )

    while_updating, another, results, again, info, after = run(body, ranks, model)
    (refused, refusal), (detected, _), (lives, _) = while_updating
    assert (refused, detected, lives) == (503, 503, 200) and other[0] in refusal["error"]
    assert another[0] == 409 and other[0] in another[1]["error"]
    assert [status for status, _ in results] == [200, 200, 200]
    assert again[0] == 200 and "already" in again[1]["message"]
    assert info[1]["model_path"] == other[0] and after[0] == 200
    assert ranks.names() == ["answer", "update", "answer"]


def test_an_update_begins_behind_all_questions(model, other):
    """Of two that wait one is answered: nobody has begun."""
    ranks = Ranks(held=("answer",))

    async def body(client):
        first, second = (client.begin("/generate", {"input_ids": [i, i]}) for i in (1, 2))
        await until(lambda: client.server._asked == 2 and ranks.told)
        update = client.begin("/update_weights_from_disk", {"model_path": other[0]})
        await until(lambda: client.server._update)
        ranks.go_on.set()
        ranks.go_on = threading.Event()
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        begun = client.server._update.has_begun
        ranks.go_on.set()
        return begun, [(await task)[0] for task in (first, second, update)]

    assert run(body, ranks, model) == (False, [200] * 3) and ranks.names() == ["answer", "answer", "update"]


def test_a_question_that_is_read_while_an_update_comes_is_refused(model, other, monkeypatch):
    reads, read_question = threading.Event(), teacher.read_question
    monkeypatch.setattr(teacher, "read_question", lambda *given: reads.wait(60) and read_question(*given))
    ranks = Ranks(held=("update",))

    async def body(client):
        question = client.begin("/generate", QUESTION)
        update = client.begin("/update_weights_from_disk", {"model_path": other[0]})
        await until(lambda: ranks.names())
        reads.set()
        status, _ = await question
        ranks.go_on.set()
        return status, (await update)[0]

    try:
        assert run(body, ranks, model) == (503, 200) and ranks.names() == ["update"]
    finally:
        reads.set()


def test_ranks_are_kept_together_where_nobody_asks(model, monkeypatch):
    monkeypatch.setattr(teacher, "BEAT_SECONDS", 0.01)
    ranks = Ranks()

    async def body(client):
        await until(lambda: ranks.told.count(("beat",)) > 1)

    run(body, ranks, model)


def test_without_a_seed_every_question_has_draws_of_its_own(model):
    async def body(client):
        for _ in range(2):
            await client.ask("/generate", {"input_ids": [1, 2], "sample_n": 1})

    run(body, ranks := Ranks(), model)
    first, second = (question.seed for _, question in ranks.told)
    assert first != second


def test_an_update_that_nobody_waits_for_any_more_before_it_begins_is_dropped(model, other):
    ranks = Ranks(held=("answer",))

    async def body(client):
        question = client.begin("/generate", QUESTION)
        await until(lambda: ranks.told)
        late = await client.ask("/update_weights_from_disk", {"model_path": other[0], "timeout_s": 0.05})
        gone = client.begin("/update_weights_from_disk", {"model_path": other[0]})
        await until(lambda: client.server._update)
        gone.cancel()
        await until(lambda: client.server._update is None)
        ranks.go_on.set()
        return late, await question, await client.ask("/generate", QUESTION), await client.ask("/info")

    late, question, after, info = run(body, ranks, model)
    assert late[0] == 503 and "not updated after 0.05 s" in late[1]["error"]
    assert (question[0], after[0], info[1]["model_path"]) == (200, 200, "/first")
    assert ranks.names() == ["answer", "answer"]


def test_an_update_that_has_begun_goes_on_and_is_joined_again(model, other):
    ranks = Ranks(held=("update",))

    async def body(client):
        late = await client.ask("/update_weights_from_disk", {"model_path": other[0], "timeout_s": 0.5})
        joined = client.begin("/update_weights_from_disk", {"model_path": other[0]})
        await until(lambda: client.server._update.waiting)
        ranks.go_on.set()
        return late, await joined, await client.ask("/detect")

    late, joined, ready = run(body, ranks, model)
    assert late[0] == 503 and "being loaded" in late[1]["error"]
    assert joined[0] == 200 and ready == (200, {"status": "ready"}) and ranks.names() == ["update"]


def test_weights_that_do_not_fit_leave_those_before(model, other):
    async def body(client):
        refused = await client.ask("/update_weights_from_disk", {"model_path": other[0]})
        return refused, await client.ask("/info"), await client.ask("/generate", QUESTION)

    refused, info, after = run(body, Ranks(problem="lm_head.weight is missing"), model)
    assert refused[0] == 400 and "lm_head.weight is missing; the weights that were there before" in refused[1]["error"]
    assert info[1]["model_path"] == "/first" and after[0] == 200


def test_what_no_update_can_be_made_of_is_refused_before_any_rank_is_asked(model, tmp_path):
    (tmp_path / "empty").mkdir()
    deeper = write_config(tmp_path / "deeper", num_hidden_layers=3)
    bodies = [
        ({}, "model_path, path, load"), ({"model_path": 3}, "model_path"), ({"path": "a", "load": "b"}, "one of"),
        ({"model_path": str(tmp_path / "nowhere")}, "no such directory"),
        ({"model_path": str(tmp_path / "empty")}, "is no checkpoint"),
        ({"model_path": str(deeper)}, "num_layers 3 (served: 2)"),
        ({"model_path": str(model), "timeout_s": 0}, "timeout_s"), ({"model_path": str(model), "flush": 1}, "flush"),
    ]  # fmt: skip

    async def body(client):
        return [await client.ask("/update_weights_from_disk", given) for given, _ in bodies]

    found = run(body, ranks := Ranks(), model)
    for (given, named), (status, answer) in zip(bodies, found, strict=True):
        assert (status, named in answer["error"]) == (400, True), (given, status, answer)
    assert ranks.names() == []


def test_of_a_checkpoint_that_grows_the_iteration_is_loaded_that_was_the_newest_when_it_was_asked_for(model, tmp_path):
    """The run that writes it saves again while a question is answered. Weights of a later one are others."""
    (growing := tmp_path / "growing").mkdir()
    pointer = growing / "latest_checkpointed_iteration.txt"
    pointer.write_text("3")
    ranks, body_of_update = Ranks(held=("answer",)), {"model_path": str(growing)}

    async def body(client):
        question = client.begin("/generate", QUESTION)
        await until(lambda: ranks.told)
        first = client.begin("/update_weights_from_disk", body_of_update)
        await until(lambda: client.server._update)
        pointer.write_text("5")
        ranks.go_on.set()
        statuses = [(await question)[0], (await first)[0]]
        infos = [(await client.ask("/info"))[1]["iteration"]]
        for _ in range(2):
            statuses.append((await client.ask("/update_weights_from_disk", body_of_update))[0])
        pointer.write_text("none")
        return statuses, infos, await client.ask("/update_weights_from_disk", body_of_update)

    statuses, infos, refused = run(body, ranks, model)
    assert statuses == [200] * 4 and infos == [3]
    assert [source.step for name, source, _ in (told for told in ranks.told if told[0] == "update")] == [3, 5]
    assert refused[0] == 400 and "not an iteration number" in refused[1]["error"]


def test_an_error_on_the_ranks_ends_the_server(model):
    async def body(client):
        answer = await client.ask("/generate", QUESTION)
        return answer, await client.ask("/healthz"), await client.server.ended

    answer, alive, (status, reason) = run(body, Ranks(error=RuntimeError("connection closed")), model)
    assert answer[0] == 500 and "connection closed" in answer[1]["error"]
    assert alive[0] == 503 and status == 1 and "answer failed on rank 0: RuntimeError: connection closed" in reason


def test_while_it_starts_it_lives_and_is_not_ready(model):
    begins = threading.Event()
    ranks = Ranks()

    def start():
        assert begins.wait(60)

    async def main():
        async with running(ranks, model, start=start, warm_up=lambda url: teacher.ask_first(url, None, 60)) as client:
            paths = ("/detect", "/healthz", "/generate", "/update_weights_from_disk")
            found = [(await client.ask(path, QUESTION if path[1] in "gu" else None))[0] for path in paths]
            begins.set()
            await until(lambda: client.server._is_ready)
            return found, await client.ask("/detect")

    found, ready = asyncio.run(main())
    assert found == [503, 200, 503, 503] and ready[0] == 200
    # The first question was its own.
    assert [len(question.tokens) for _, question in ranks.told] == [4]


def test_a_warm_up_that_fails_ends_it(model):
    async def main(value, error):
        ranks = Ranks(value=value, error=error)
        async with running(ranks, model, warm_up=lambda url: teacher.ask_first(url, None, 60)) as client:
            return await client.server.ended

    status, reason = asyncio.run(main(np.nan, None))
    assert (
        status == 2
        and "warm-up request" in reason
        and "answered 500" in reason
        and "--no-megatron-server-warmup" in reason
    )
    status, reason = asyncio.run(main(-1.0, RuntimeError("gone")))
    assert status == 1 and "answer failed on rank 0" in reason


def test_the_token(model):
    async def body(client):
        right, wrong = {"Authorization": "Bearer right"}, {"Authorization": "Bearer wrong"}
        asked = [await client.ask("/generate", QUESTION, headers) for headers in (None, wrong, right)]
        others = [await client.ask(path) for path in ("/info", "/get_loads", "/detect", "/healthz")]
        of_bytes = [await status_with_token(f"{client.url}/info", token) for token in (b"right", b"\xff\xfe")]
        return [status for status, _ in asked + others] + of_bytes

    assert run(body, Ranks(), model, api_key="right") == [401, 401, 200, 401, 401, 200, 200, 200, 401]
