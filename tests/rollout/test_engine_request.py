"""Which router a model name leads to, and which engine a request goes to that passes by the router."""

import asyncio
import contextlib
import copy

import numpy as np
import pytest
from aiohttp import web

from slime.rollout import engine_request
from slime.rollout.engine_request import (
    EnginesOfRouter,
    ask_engine,
    build_payload,
    check_prompt_length,
    checked_token_ids,
    get_model_url,
)
from slime.rollout.failures import SampleFailed
from slime.rollout.generate_state import GenerateState, rollout_sampling_params
from slime.rollout.generation_call import GenerationCall
from slime.utils import http_utils
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError, close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.sample_fields import read_only
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args, make_checkpoint
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.http_server import serving
from tests.support.processes.waiting import until


def test_unknown_names_lead_to_the_first_router_with_one_warning(caplog):
    engine_request._warn_once.cache_clear()
    routers = {"actor": ("::1", 5), "reward": ("10.0.0.1", 6)}
    args = make_args("", 5, sglang_model_routers=routers)
    args.sglang_router_ip = "::1"
    assert get_model_url(args, "reward", "/x") == "http://10.0.0.1:6/x"
    assert get_model_url(args, "default") == "http://[::1]:5/generate"
    assert caplog.messages == []
    del args.sglang_model_routers
    assert get_model_url(args, "default", "/x") == "http://[::1]:5/x"
    args.sglang_model_routers = routers
    for _ in range(2):
        assert get_model_url(args, "rewrad") == "http://[::1]:5/generate"
    assert caplog.messages == ["no model is served under the name 'rewrad'; 'actor' is asked. Known: actor, reward"]


def test_a_request_has_what_the_flags_say(tmp_path):
    SingletonMeta.clear_instances()
    own = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 11,
        "stop": ["X"],
        "stop_token_ids": [5],
        "skip_special_tokens": True,
    }
    args = make_args(make_checkpoint(tmp_path), **{f"rollout_{name}": value for name, value in own.items()})
    request = build_payload(GenerateState(args), Sample(tokens=[65]), rollout_sampling_params(args), 3)
    assert request["sampling_params"] == {
        **own, "max_new_tokens": 3, "no_stop_trim": True, "spaces_between_special_tokens": False
    }  # fmt: skip
    SingletonMeta.clear_instances()


def test_evaluations_do_not_ask_for_experts(tmp_path):
    SingletonMeta.clear_instances()
    state = GenerateState(make_args(make_checkpoint(tmp_path), use_rollout_routing_replay=True))

    def request(evaluation):
        with GenerationCall(evaluation=evaluation).under_way(), GenerationCall().under_way():
            return build_payload(state, Sample(tokens=[65]), {}, 3)

    experts = {"return_routed_experts": True, "routed_experts_start_len": 0}
    assert request(False) == {**request(True), **experts} and "return_routed_experts" not in request(True)
    SingletonMeta.clear_instances()


EXPERTS = {"return_routed_experts": True, "routed_experts_start_len": 3}


def payload(**fields):
    return {"input_ids": [65, 66], "sampling_params": {"max_new_tokens": 8}, **fields}


@pytest.fixture
def servers(tmp_path):
    """A router that is an engine itself and drops the field, and another engine."""
    with FakeGenerateServer() as router, FakeGenerateServer() as engine:
        router.other_workers = [engine.url]
        args = make_args(make_checkpoint(tmp_path), router.port)
        GenerateState(args)
        yield router, engine, args


def run(coroutine):
    async def main():
        try:
            return await coroutine
        finally:
            await close_http_client()

    return asyncio.run(main())


def asked(server):
    return [request for request in server.requests if request["sampling_params"]["max_new_tokens"] > 1]


@pytest.mark.parametrize("flag", ["router_policy", "router_prefill_policy", "router_decode_policy"])
@pytest.mark.parametrize("policy", [None, "cache_aware", "consistent_hashing"])
def test_sessions_are_told_to_routers_that_keep_them_together_alone(servers, flag, policy):
    router, _, args = servers
    setattr(args, flag, policy)
    run(ask_engine(args, Sample(index=0, session_id="a"), payload()))
    assert (router.headers[-1].get("X-SMG-Routing-Key") == "a") is (policy == "consistent_hashing")


def test_requests_for_experts_are_spread_over_the_engines_of_a_router_that_drops_them(servers):
    router, engine, args = servers
    router.hold = engine.hold = lambda request: request["sampling_params"]["max_new_tokens"] > 1

    async def main():
        requests = [asyncio.create_task(ask_engine(args, Sample(index=i), payload(**EXPERTS))) for i in range(6)]
        await until(lambda: len(asked(router)) + len(asked(engine)) == 6)
        assert len(asked(router)) == len(asked(engine)) == 3
        router.release(), engine.release()
        return await asyncio.gather(*requests)

    # Stock engines honour the start without saying so.
    assert [answer["meta_info"]["routed_experts_start_len"] for answer in run(main())] == [3] * 6
    # What the router drops was tried once, with a token that every vocabulary has.
    (probe,) = [request for request in router.requests if request not in asked(router)]
    assert probe["input_ids"] == [0] and probe["return_routed_experts"] is True


def test_other_requests_and_a_router_that_drops_nothing_are_asked_as_ever(servers, monkeypatch):
    router, engine, args = servers
    run(ask_engine(args, Sample(index=0), payload()))
    assert len(router.requests) == 1
    monkeypatch.setattr(router, "_scores", lambda request: {"routed_experts": "AAAA"})
    for _ in range(2):
        run(ask_engine(args, Sample(index=0), payload(**EXPERTS)))
    assert len(asked(router)) == 3 and len(router.requests) == 4 and engine.requests == []


def test_an_engine_that_breaks_requests_gets_no_other_for_a_while(servers, monkeypatch):
    """A dead one has the fewest requests, and the router lists it for some seconds."""
    router, _, args = servers
    monkeypatch.setattr(http_utils, "RETRY_DELAY_S", 0.0)
    router.other_workers = ["http://127.0.0.1:1"]
    tries = []
    monkeypatch.setattr(http_utils, "is_news", lambda address, status: tries.append(address))

    async def main():
        for index in range(5):
            await ask_engine(args, Sample(index=index), payload(**EXPERTS))

    run(main())
    assert len(asked(router)) == 5 and tries == ["http://127.0.0.1:1/generate"]


@pytest.mark.parametrize(("status", "tries"), [(503, 1), (429, 1), (400, 3)])
def test_an_engine_that_refuses_at_once_does_not_draw_all_requests(servers, monkeypatch, status, tries):
    """It looks idle. What is wrong with a request itself is not held against the engine."""
    router, engine, args = servers
    monkeypatch.setattr(http_utils, "RETRY_DELAY_S", 0.0)
    engine.refuse, engine.refusal_status = lambda request: "no", status

    async def main():
        requests = [ask_engine(args, Sample(index=index), payload(**EXPERTS)) for index in range(6)]
        return [(await asyncio.gather(request, return_exceptions=True))[0] for request in requests]

    failures = [answer for answer in run(main()) if isinstance(answer, Exception)]
    assert len(engine.requests) == tries
    assert [failure.status for failure in failures] == ([400] * 3 if status == 400 else [])


def test_a_field_that_is_false_is_no_wish_for_its_answer(servers):
    router, engine, args = servers
    run(ask_engine(args, Sample(index=0), payload(return_routed_experts=False)))
    assert len(router.requests) == 1 and engine.requests == []


def test_past_the_router_a_session_stays_with_its_engine(servers):
    router, engine, args = servers
    args.router_policy = "consistent_hashing"

    async def main():
        for number in range(12):
            before = len(asked(router))
            for _ in range(3):
                await ask_engine(args, Sample(index=number, session_id=f"session {number}"), payload(**EXPERTS))
            assert len(asked(router)) - before in (0, 3)

    run(main())
    assert asked(router) and asked(engine)


def test_several_prompts_of_one_request_have_an_answer_each(monkeypatch):
    answers = [{"meta_info": {"id": "a"}}, {"meta_info": {"id": "b"}}]

    async def post_generate(url, request, **options):
        return answers

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    assert asyncio.run(ask_engine(make_args(""), Sample(index=0), payload(input_ids=[[65], [66]]))) == answers
    answers[1] = "<html>"
    with pytest.raises(HttpError, match="was not answered by an engine") as failure:
        asyncio.run(ask_engine(make_args(""), Sample(index=0), payload(input_ids=[[65], [66]])))
    assert failure.value.url.endswith("/generate")
    answers.clear()
    with pytest.raises(HttpError, match="was not answered by an engine"):
        asyncio.run(ask_engine(make_args(""), Sample(index=0), payload()))


def test_an_engine_that_says_where_its_experts_begin_is_believed(servers, monkeypatch):
    router, _, args = servers
    monkeypatch.setattr(router, "_scores", lambda request: {"routed_experts": "AAAA", "routed_experts_start_len": 1})
    answer = run(ask_engine(args, Sample(index=0), payload(**EXPERTS)))
    assert answer["meta_info"]["routed_experts_start_len"] == 1


def test_a_probe_samples_among_one_token_since_engines_tell_of_a_limited_set_alone(servers):
    router, _, args = servers
    run(ask_engine(args, Sample(index=0), payload(**EXPERTS)))
    assert router.requests[0]["sampling_params"] == {"max_new_tokens": 1, "top_k": 1}


@pytest.mark.parametrize("kind", [list, np.int32, np.int64])
@pytest.mark.parametrize("beyond", [None, -1, 0, 2**31 - 1])
def test_ids_outside_of_the_vocabulary_are_told_whatever_holds_them(tmp_path, kind, beyond):
    state = GenerateState(make_args(make_checkpoint(tmp_path)))
    last = state.vocab_size - 1
    # The first id behind the last, or one far away.
    added = [] if beyond is None else [beyond or last + 1]
    ids = [0, last, *added, 2]
    sample = Sample(index=5, tokens=ids if kind is list else np.array(ids, kind))
    if not added:
        assert checked_token_ids(state, sample).tolist() == ids
        return
    with pytest.raises(UserError, match=f"sample 5: token id {added[0]} at position 2 is outside"):
        checked_token_ids(state, sample)


def test_ids_that_siblings_share_are_looked_at_once(tmp_path):
    """A prompt may have very many."""
    state = GenerateState(make_args(make_checkpoint(tmp_path)))
    shared = read_only(np.array([1, 2, 3], np.int64))
    assert checked_token_ids(state, Sample(tokens=shared)) is shared
    state.__dict__["vocab_size"] = 0
    assert checked_token_ids(state, Sample(tokens=shared)) is shared
    with pytest.raises(UserError):
        checked_token_ids(state, Sample(tokens=shared.copy()))


@pytest.mark.parametrize(("tokens", "limit"), [([], None), ([1, 2], 2)])
def test_a_prompt_without_tokens_or_room_is_not_tried_again(tokens, limit):
    with pytest.raises(SampleFailed) as failure:
        check_prompt_length(Sample(tokens=tokens), limit)
    assert not failure.value.retryable


def test_a_request_may_bring_a_text(servers):
    router, engine, args = servers
    text = {"text": "A", "sampling_params": {"max_new_tokens": 8}, "return_routed_experts": True}
    assert run(ask_engine(args, Sample(index=0), text))["text"] == "FGH"
    assert [request["text"] for request in asked(router) + asked(engine)] == ["A"]


def probing(monkeypatch, answers):
    """Answers in turn, each when the others wait as well; what is raised stands among them. And how often it was asked."""
    asked = []

    async def post_generate(url, probe, request_ids, engine=None):
        asked.append(url)
        await asyncio.sleep(0)
        if isinstance(answer := answers[len(asked) - 1], Exception):
            raise answer
        return {"meta_info": answer}

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    return asked


def engines_of_routers():
    SingletonMeta.clear_instances()
    return engine_request._Engines()


ASKED = frozenset({"return_routed_experts"})


def behind(engines, times):
    return asyncio.gather(
        *[engines.behind("http://r/generate", "m", ASKED) for _ in range(times)], return_exceptions=True
    )


def test_each_set_of_fields_is_probed_and_all_of_it_has_to_come_through(monkeypatch):
    both = frozenset({"return_routed_experts", "return_sampling_mask"})
    kept = {"output_token_sampling_mask": [[0]]}
    # Two fields of which one is dropped, and an engine past the router; one field; another one, and an engine.
    answers = [{"routed_experts": "AAAA"}, kept, {"routed_experts": "AAAA"}, {"id": 1}, kept]
    asked, engines = probing(monkeypatch, answers), engines_of_routers()
    fields = [both, ASKED, frozenset({"return_sampling_mask"})] * 2
    found = [asyncio.run(engines.behind("http://r/generate", "m", one)) for one in fields]
    assert [way.engines is None for way in found[:3]] == [False, True, False]
    assert not any(way.asks_patched for way in found)
    assert found[3:] == found[:3] and len(asked) == 5


KEPT = {"output_token_sampling_mask": [[70, 9], [71]], "output_token_sampling_logprobs": [-0.25, 0.0]}


def test_log_probs_among_kept_tokens_take_the_place_of_the_others(monkeypatch):
    """And an engine that does not tell them is named at once."""
    SingletonMeta.clear_instances()
    answer = {"output_token_logprobs": [[-0.5, 70, None], [-0.75, 71, None]]}

    async def post_generate(url, request, **options):
        return {"meta_info": {**answer, **(KEPT if request["input_ids"] == [65, 66] else {})}}

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    monkeypatch.setattr(engine_request, "list_engine_urls", lambda *_: asyncio.sleep(0, ["http://e"]))
    args, asking = make_args(""), {"return_sampling_mask": True}
    meta_info = asyncio.run(ask_engine(args, Sample(index=0), payload(**asking)))["meta_info"]
    assert meta_info["output_token_logprobs"].log_probs.tolist() == [-0.25, 0.0]
    assert meta_info["output_token_logprobs"].tokens.tolist() == [70, 71]
    with pytest.raises(UserError, match="does not tell which tokens it kept"):
        asyncio.run(ask_engine(args, Sample(index=0), {**payload(**asking), "input_ids": [65]}))
    answer["output_token_logprobs"] = []
    assert asyncio.run(ask_engine(args, Sample(index=0), {**payload(**asking), "input_ids": [65]}))


def fleet(monkeypatch, *, drops, patched, aborted=()):
    """Engines behind a router; `drops`: it drops what it does not know. Returns the requests: whether each went past the
    router, and what it said. Those numbered by `aborted` end without a token."""
    SingletonMeta.clear_instances()
    sent = []

    async def post_generate(url, request, *, engine=None, **options):
        async with contextlib.nullcontext(url) if engine is None else engine() as address:
            past = address != url
        sent.append((past, request))
        meta_info = {"output_token_logprobs": [[-0.5, 70, None], [-0.75, 71, None]]}
        if len(sent) - 1 in aborted:
            return {"meta_info": {"finish_reason": {"type": "abort"}}}
        if past or not drops:
            custom = request["sampling_params"].get("custom_params", {})
            if patched and custom.get("return_top_p_token_ids"):
                meta_info |= {"top_p_token_ids": [70, 9, 71], "top_p_token_offsets": [0, 2, 3]}
            if not patched and request.get("return_sampling_mask"):
                meta_info |= KEPT
        return {"meta_info": meta_info}

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    monkeypatch.setattr(engine_request, "list_engine_urls", lambda *_: asyncio.sleep(0, ["http://e"]))
    return sent


@pytest.mark.parametrize("drops", [False, True], ids=["hands on", "drops"])
@pytest.mark.parametrize(
    ("patched", "own", "log_probs"),
    [(False, {}, [-0.25, 0.0]), (True, {}, [-0.5, -0.75]), (True, {"mine": 1}, [-0.5, -0.75])],
    ids=["stock", "patched", "patched, with parameters of its own"],
)
def test_engines_are_asked_for_kept_sets_in_the_way_that_they_heed(monkeypatch, drops, patched, own, log_probs):
    sent = fleet(monkeypatch, drops=drops, patched=patched)
    asking = payload(return_sampling_mask=True)
    asking["sampling_params"] |= {"custom_params": own} if own else {}
    given = copy.deepcopy(asking)
    for _ in range(2):
        answer = asyncio.run(ask_engine(make_args(""), Sample(index=0), asking))
        sample = Sample(index=0, tokens=[65, 66])
        tokens = engine_request.generated_tokens(answer["meta_info"])
        assert tokens.log_probs.tolist() == log_probs
        sample.append_response_tokens(
            make_args(""), tokens=tokens.tokens, log_probs=tokens.log_probs, meta_info=answer["meta_info"]
        )
        assert sample.rollout_top_p_token_ids.tolist() == [70, 9, 71]
        assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    probes, requests = sent[:-2], sent[-2:]
    assert [past for past, _ in probes] == ([False, True] if drops else [False])
    assert [past for past, _ in requests] == [drops] * 2
    custom = {**own, "return_top_p_token_ids": True} if patched else None
    assert [request["sampling_params"].get("custom_params") for _, request in requests] == [custom] * 2
    assert asking == given


@pytest.mark.parametrize("aborted", [[0], [1]], ids=["at the router", "past it"])
@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_behind_an_aborted_probe_kept_sets_are_asked_for_in_both_ways(monkeypatch, patched, aborted):
    sent = fleet(monkeypatch, drops=True, patched=patched, aborted=aborted)
    asking = payload(return_sampling_mask=True)
    assert "output_token_logprobs" in asyncio.run(ask_engine(make_args(""), Sample(index=0), asking))["meta_info"]
    past, request = sent[-1]
    assert past and request["return_sampling_mask"] and request["sampling_params"]["custom_params"]
    # The next one finds out.
    asyncio.run(ask_engine(make_args(""), Sample(index=0), asking))
    assert ("custom_params" in sent[-1][1]["sampling_params"]) == patched


def test_of_several_prompts_each_answer_has_what_their_request_says(monkeypatch):
    SingletonMeta.clear_instances()

    async def post_generate(url, request, **options):
        entries = [[-0.5, 70, None], [-0.75, 71, None]]
        answers = [{"meta_info": {"output_token_logprobs": entries, **KEPT}} for _ in range(2)]
        return answers if len(request["input_ids"]) == 2 else answers[0]

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    monkeypatch.setattr(engine_request, "list_engine_urls", lambda *_: asyncio.sleep(0, ["http://e"]))
    asking = payload(input_ids=[[65], [66]], return_sampling_mask=True, routed_experts_start_len=0)
    for answer in asyncio.run(ask_engine(make_args(""), Sample(index=0), asking)):
        assert answer["meta_info"]["output_token_logprobs"].log_probs.tolist() == [-0.25, 0.0]
        assert answer["meta_info"]["routed_experts_start_len"] == 0


def test_tokens_of_an_answer_that_was_aborted_while_it_waited_are_drawn_again_where_their_sets_are_missing(monkeypatch):
    """SGLang tells none of a request that it had put back for want of room in the cache."""
    SingletonMeta.clear_instances()
    told = {"output_token_logprobs": [[-1.0, 7, None]], "completion_tokens": 1, "finish_reason": {"type": "abort"}}

    async def post_generate(url, request, **options):
        return {"text": "a", "meta_info": dict(told)}

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    monkeypatch.setattr(engine_request, "list_engine_urls", lambda *_: asyncio.sleep(0, ["http://e"]))
    asked = make_args(""), Sample(index=0), payload(return_sampling_mask=True)
    assert len(asyncio.run(ask_engine(*asked))["meta_info"]["output_token_logprobs"]) == 0
    told["finish_reason"] = {"type": "length"}
    with pytest.raises(UserError, match="does not tell which tokens it kept"):
        asyncio.run(ask_engine(*asked))


@pytest.mark.parametrize("told", [[], [-0.25], [-0.25, 0.0, 0.0]])
def test_an_answer_with_more_or_fewer_log_probs_among_kept_tokens_fails_its_sample_alone(monkeypatch, told):
    SingletonMeta.clear_instances()

    async def post_generate(url, request, **options):
        entries = [[-0.5, 70, None], [-0.75, 71, None]]
        return {"meta_info": {"output_token_logprobs": entries, **KEPT, "output_token_sampling_logprobs": told}}

    monkeypatch.setattr(engine_request, "post_generate", post_generate)
    with pytest.raises(
        SampleFailed, match=f"gave {len(told)} log-probs among kept tokens for an answer of 2"
    ) as failure:
        asyncio.run(ask_engine(make_args(""), Sample(index=0), payload(return_sampling_mask=True)))
    assert failure.value.retryable


def test_an_aborted_probe_says_nothing_of_the_router(monkeypatch):
    aborted = {"finish_reason": {"type": "abort"}}
    whole = {"finish_reason": {"type": "length"}, "routed_experts": "AAAA"}
    asked, engines = probing(monkeypatch, [aborted, whole]), engines_of_routers()

    async def main():
        return [(await behind(engines, 1))[0] for _ in range(3)]

    past, *later = asyncio.run(main())
    assert isinstance(past.engines, EnginesOfRouter), "nothing is lost of the request that came first"
    assert [way.engines for way in later] == [None, None] and len(asked) == 2


def test_a_probe_that_fails_fails_for_all_that_wait_and_the_next_request_tries_again(monkeypatch):
    asked = probing(monkeypatch, [http_utils.HttpError("no"), {"finish_reason": {"type": "length"}}])
    engines = engines_of_routers()

    async def main():
        return await behind(engines, 20), await behind(engines, 20)

    failures, found = asyncio.run(main())
    assert {type(failure) for failure in failures} == {http_utils.HttpError}
    assert {type(way.engines) for way in found} == {EnginesOfRouter} and len(set(map(id, found))) == 1
    assert len(asked) == 2


def test_the_list_of_engines_is_the_routers(servers, monkeypatch):
    router, engine, args = servers
    monkeypatch.setattr(engine_request, "_LISTED_SECONDS", 0.0)

    async def main():
        for listed in ([engine.url], [], [engine.url]):
            router.other_workers = listed
            for index in range(2):
                await ask_engine(args, Sample(index=index), payload(**EXPERTS))

    run(main())
    assert (len(asked(router)), len(asked(engine))) == (4, 2)


def test_the_list_of_engines_is_believed_for_a_shorter_time_than_a_failed_request_waits(monkeypatch):
    now, lists = [100.0], [["a"], ["b"], ["c"]]
    monkeypatch.setattr(engine_request.time, "monotonic", lambda: now[0])

    async def listed(model_name, router_url):
        return lists.pop(0)

    monkeypatch.setattr(engine_request, "list_engine_urls", listed)
    choice = EnginesOfRouter("default", "http://router/generate")

    async def one():
        async with choice.one() as url:
            return url

    def after(seconds):
        now[0] += seconds
        return asyncio.run(one())

    assert [after(0.0), after(0.1), after(http_utils.RETRY_DELAY_S), after(0.1)] == [
        "a/generate", "a/generate", "b/generate", "b/generate",
    ]  # fmt: skip


def engines(monkeypatch, urls):
    async def listed(model_name, router_url):
        assert router_url == "http://router"
        return list(urls)

    monkeypatch.setattr(engine_request, "list_engine_urls", listed)
    return EnginesOfRouter("default", "http://router/generate")


def test_engines_of_equal_load_take_turns_and_none_leads_back_to_the_router(monkeypatch):
    async def main():
        found, choice = [], engines(monkeypatch, ["a", "b", "c"])
        for _ in range(4):
            async with choice.one() as url:
                found.append(url)
        async with choice.one() as busy, contextlib.AsyncExitStack() as others:
            rest = [await others.enter_async_context(choice.one()) for _ in range(2)]
            assert {busy, *rest} == {"a/generate", "b/generate", "c/generate"}
        async with engines(monkeypatch, []).one() as url:
            return found, url

    found, url = asyncio.run(main())
    assert found == ["a/generate", "b/generate", "c/generate", "a/generate"] and url == "http://router/generate"


def test_requests_that_find_no_list_ask_for_one_together(monkeypatch):
    lists = []

    async def listed(model_name, router_url):
        lists.append(router_url)
        await asyncio.sleep(0)
        return ["a", "b"]

    monkeypatch.setattr(engine_request, "list_engine_urls", listed)
    choice = EnginesOfRouter("default", "http://router/generate")

    async def one():
        async with choice.one() as url:
            return url

    async def main():
        return await asyncio.gather(*[one() for _ in range(50)])

    assert set(asyncio.run(main())) == {"a/generate", "b/generate"} and lists == ["http://router"]


def test_a_session_stays_with_its_engine_and_the_loss_of_another_moves_it_not(monkeypatch):
    sessions = [f"session {number}" for number in range(60)]

    async def places(urls):
        choice, found = engines(monkeypatch, urls), {}
        for session in sessions:
            async with choice.one(session) as first, choice.one(session) as again:
                assert first == again
                found[session] = first
        return found

    three, two = asyncio.run(places(["a", "b", "c"])), asyncio.run(places(["c", "a"]))
    assert {session: url for session, url in three.items() if url != "b/generate"}.items() <= two.items()
    assert all(list(three.values()).count(url) > 5 for url in ("a/generate", "b/generate", "c/generate"))


@pytest.mark.parametrize("page", ["<html>Back soon</html>", '{"error": "back soon"}', "[7]"])
@pytest.mark.parametrize("asked_for", [{}, EXPERTS])
def test_the_page_of_a_proxy_before_a_router_is_told_as_a_failed_request(tmp_path, page, asked_for):
    async def handler(request):
        return web.Response(text=page)

    async def main():
        async with serving(handler) as url:
            args = make_args(make_checkpoint(tmp_path), int(url.rpartition(":")[2]))
            GenerateState(args)
            with pytest.raises(HttpError, match="was not answered by an engine, but with .*(ack soon|7)"):
                await ask_engine(args, Sample(index=0), payload(**asked_for))

    SingletonMeta.clear_instances()
    asyncio.run(main())
    SingletonMeta.clear_instances()
