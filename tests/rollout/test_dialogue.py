"""Dialogues of the model with an environment: which tokens they consist of, who is trained on what, and how they end."""

import asyncio
import copy
import shutil
import threading
import time

import pytest

from slime.rollout.dialogue import ask, ask_all, dialogue
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import GenerationCall
from slime.utils.http_utils import close_http_client, post
from slime.utils.processing_utils import render_chat
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.tokenizer import CHATML_TEMPLATE, build_tokenizer, save_tokenizer
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.spoken import spoken
from tests.support.processes.waiting import until

pytestmark = pytest.mark.usefixtures("fresh_singletons")

Status = Sample.Status
TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
PROMPT = [{"role": "user", "content": "go"}]


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.fixture
def talk(checkpoint):
    """The sample after a dialogue in which the model says `turns`, one after the other, each with its end of turn."""

    def run(turns, reply, sample=None, interrupt=False, aborted=False, **changes):
        left = [encode(turn) for turn in turns]
        with FakeGenerateServer(lambda payload: left.pop(0), hold=lambda payload: interrupt) as server:
            server.text_of = TOKENIZER.decode
            settings = {"max_turns": None, "rollout_max_response_len": 100, "apply_chat_template": True, **changes}
            args = make_args(checkpoint, server.port, **settings)
            server.context_length = args.sglang_context_length or server.context_length
            asked = sample or Sample(index=0, prompt=PROMPT)

            async def main():
                call = GenerationCall()
                with call.under_way():
                    call.aborted = aborted
                    try:
                        params = dict(GenerateState(args).sampling_params)
                        answer = asyncio.ensure_future(dialogue(args, asked, params, reply))
                        if interrupt:
                            await until(lambda: server.in_flight)
                            await post(f"{server.url}/abort_request", {"abort_all": True})
                        return await answer
                    finally:
                        await close_http_client()

            return asyncio.run(main()), server

    return run


def replies(*answers):
    left, heard = list(answers), []

    def reply(said):
        heard.append(said)
        return left.pop(0)

    reply.heard = heard
    return reply


def test_the_response_is_what_the_template_makes_of_the_whole_chat(talk):
    tool = {"role": "tool", "content": "4"}
    reply = replies(tool, None)
    sample, _ = talk(["2+2?<|im_end|>", "it is 4<|im_end|>"], reply)
    chat = [*PROMPT, {"role": "assistant", "content": "2+2?"}, tool, {"role": "assistant", "content": "it is 4"}]
    whole = TOKENIZER.apply_chat_template(chat, tokenize=False).removesuffix("\n")
    assert TOKENIZER.decode(sample.tokens) == whole
    assert whole.endswith(sample.response) and sample.response.startswith("2+2?<|im_end|>\n")
    assert reply.heard == ["2+2?<|im_end|>", "it is 4<|im_end|>"]
    assert sample.status is Status.COMPLETED and sample.metadata == {"round_number": 2}


def test_replies_are_rendered_with_the_arguments_of_the_prompts_own_set(talk, checkpoint, tmp_path):
    """As the prompt was, also where the run has others."""
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    template = CHATML_TEMPLATE + "{% if add_generation_prompt %}{{ mood }}{{ voice }}{% endif %}"
    settings = {
        "hf_checkpoint": save_tokenizer(directory, template),
        "apply_chat_template_kwargs": {"mood": "glad ", "voice": "low "},
    }
    asked = Sample(index=0, prompt=PROMPT, apply_chat_template_kwargs={"mood": "sad "})
    sample, _ = talk(["a<|im_end|>", "b<|im_end|>"], replies({"role": "tool", "content": "c"}, None), asked, **settings)
    text = TOKENIZER.decode(sample.tokens)
    assert text.count("<|im_start|>assistant\nsad low ") == 2 and "glad" not in text


@pytest.mark.parametrize("plain", [False, True])
def test_the_time_of_replies_is_no_time_of_generation(talk, plain):
    def tool(said):
        time.sleep(0.02)

    async def slow(said):
        await asyncio.sleep(0.02)

    sample, _ = talk(["a<|im_end|>"], tool if plain else slow)
    assert 0.015 < sample.non_generation_time < 60


def test_only_what_the_model_said_is_trained(talk):
    sample, server = talk(["a<|im_end|>", "b<|im_end|>"], replies({"role": "tool", "content": "c"}, None))
    response = sample.tokens[-sample.response_length :]
    said = [TOKENIZER.decode([token]) for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
    assert said == ["a", "<|im_end|>", "b", "<|im_end|>"]
    assert [p == 0.0 for p in sample.rollout_log_probs] == [mask == 0 for mask in sample.loss_mask]
    first, second = (request["input_ids"] for request in server.requests)
    assert second[: len(first) + 2] == [*first, *encode("a"), END]
    assert sample.tokens[: len(second)] == second


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template(talk):
    sample, _ = talk(["ask</q>", "b<|im_end|>"], replies({"role": "tool", "content": "c"}, None))
    assert sample.response.startswith("ask</q><|im_end|>\n<|im_start|>user\n<tool_response>")
    assert sample.loss_mask[len(encode("ask</q>"))] == 0


def test_several_messages_are_one_reply(talk):
    results = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    sample, _ = talk(["a<|im_end|>", "b<|im_end|>"], replies(results, None))
    chat = [*PROMPT, {"role": "assistant", "content": "a"}, *results, {"role": "assistant", "content": "b"}]
    assert TOKENIZER.decode(sample.tokens) == TOKENIZER.apply_chat_template(chat, tokenize=False).removesuffix("\n")


def test_text_is_put_behind_the_turn_as_it_is(talk):
    async def reply(said):
        return "<r>5</r>" if "?" in said else None

    sample, _ = talk(["5?", "five<|im_end|>"], reply)
    assert sample.response == "5?<r>5</r>five<|im_end|>"


def test_the_last_turn_gets_no_reply(talk):
    reply = replies("x", "y")
    sample, server = talk(["a", "b", "c"], reply, max_turns=2)
    assert (sample.response, sample.status, len(server.requests)) == ("axb", Status.COMPLETED, 2)
    assert reply.heard == ["a"]


def test_a_reply_that_leaves_no_room_for_an_answer_ends_it(talk):
    room = 10
    for length, whole in ((room - 2, True), (room - 1, False)):
        sample, server = talk(["a", "bcdefgh"], replies("." * length), rollout_max_response_len=room)
        assert sample.status is Status.TRUNCATED
        assert (sample.response, len(server.requests)) == (("a" + "." * length + "b", 2) if whole else ("a", 1))


def test_an_interrupted_dialogue_goes_on_where_it_stopped(talk):
    replied = replies("-", None)
    sample, _ = talk(["ab", "cd"], replied, interrupt=True)
    assert (sample.status, sample.response, replied.heard) == (Status.ABORTED, "a", [])
    sample.status = Status.PENDING
    sample, _ = talk(["bb", "cd"], replied, sample=sample)
    assert (sample.status, sample.response, replied.heard) == (Status.COMPLETED, "abb-cd", ["abb", "cd"])
    assert sample.metadata == {"round_number": 2}


def test_nothing_is_asked_after_an_abort(talk):
    sample, server = talk(["a"], replies(None), aborted=True)
    assert (sample.status, server.requests) == (Status.ABORTED, [])


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (7, TypeError, "returned int"),
        ([], TypeError, "returned list; expected chat messages, one at least"),
        ([PROMPT[0], "text"], TypeError, "returned list"),
        ({"content": "no role"}, Exception, "refused the reply"),
    ],
)
def test_a_wrong_reply_is_told(talk, answer, error, words):
    with pytest.raises(error, match=words):
        talk(["a"], replies(answer))


def test_an_answer_of_another_context_is_a_sample_of_its_own(checkpoint):
    other = [{"role": "user", "content": "other"}]
    sample = Sample(index=3, group_index=1, prompt=PROMPT, label="x", metadata={"kept": [1]}, status=Status.COMPLETED)
    sample.tokens, sample.response, sample.response_length = [1, 2, 3], "old", 2
    before = sample.to_dict()

    async def asked(args, sample, sampling_params):
        return await ask(args, sample, other, sampling_params)

    answer, [request] = spoken(checkpoint, asked, sample, ["new"])
    assert request["input_ids"] == encode(render_chat(TOKENIZER, other))
    assert (answer.response, answer.prompt, answer.status) == ("new", other, Status.COMPLETED)
    assert (answer.index, answer.group_index, answer.label) == (3, 1, "x")
    answer.metadata["kept"].append(2)
    assert sample.to_dict() == before
    # Nor does the answer change when the caller goes on with the messages.
    asked_with = copy.deepcopy(other)
    other[-1]["content"] = "something else"
    other.append({"role": "assistant", "content": answer.response})
    assert answer.prompt == asked_with


def test_answers_of_several_contexts_are_asked_for_at_once_and_come_in_their_order(checkpoint):
    async def asked(args, sample, sampling_params):
        contexts = [[{"role": "user", "content": text}] for text in "abc"]
        return await ask_all(args, sample, contexts, sampling_params)

    answers, _ = spoken(
        checkpoint, asked, Sample(index=0, prompt=PROMPT), lambda context: context.split("user\n")[1][0].upper()
    )
    assert [answer.response for answer in answers] == ["A", "B", "C"]
    assert len({answer.session_id for answer in answers}) == 3


def test_a_long_reply_is_encoded_while_the_event_loop_goes_on(talk, monkeypatch):
    """A megabyte takes seconds. To reach a thread takes longer than to encode a short reply, which is encoded at once."""
    kind, threads, ticked = type(TOKENIZER), [], threading.Event()
    encode_of_kind = kind.encode

    def encode(self, text, **options):
        if text.startswith("."):
            threads.append(threading.current_thread())
        if len(text) > 10_000:
            assert ticked.wait(60), "the event loop stands still"
        return encode_of_kind(self, text, **options)

    async def reply(said):
        asyncio.get_running_loop().call_later(0.2, ticked.set)
        return {"a": "." * 20, "b": "." * 20_000}.get(said)

    monkeypatch.setattr(kind, "encode", encode)
    limits = {"rollout_max_response_len": 50_000, "sglang_context_length": 60_000}
    sample, _ = talk(["a", "b", "c"], reply, **limits)
    assert sample.response == "a" + "." * 20 + "b" + "." * 20_000 + "c"
    assert len(sample.tokens) - len(encode_of_kind(TOKENIZER, render_chat(TOKENIZER, PROMPT))) == sample.response_length
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_a_long_message_becomes_the_same_tokens_as_a_short_one(talk):
    def lengths(content):
        sample, _ = talk(
            ["a<|im_end|>", "b<|im_end|>"], replies({"role": "tool", "content": content}, None),
            rollout_max_response_len=50_000, sglang_context_length=60_000,
        )  # fmt: skip
        return sample.response_length - len(encode(content)), sample.response.replace(content, "")

    assert lengths("x" * 20_000) == lengths("y")
