"""One `/generate` request: what is sent for a sample, and to whom.

What is sent is checked here, because some mistakes would end an engine. Requests go to a router. But a router may drop fields
of a request that it does not know: a request with such a field goes past it, to one of the engines that it lists.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from slime.observability.trace_utils import trace_engine_answer, trace_span
from slime.rollout.failures import SampleFailed
from slime.rollout.generate_state import GenerateState, deterministic_inference, samples_among_some
from slime.rollout.generation_call import GenerationCall, current_call
from slime.utils import http_utils
from slime.utils.async_utils import SingleFlight
from slime.utils.engine_answers import TokenLogProbs
from slime.utils.engine_protocol import within_budget
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import ROUTING_KEY, HttpError, post_generate, post_generate_stream
from slime.utils.misc import SingletonMeta
from slime.utils.ports import engine_urls, host_for_url
from slime.utils.sample_fields import KEPT_IDS, finish_type, held, token_array
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_ASKS_SETS = "return_sampling_mask"
# Fields of a request that a router may drop → what an engine answers to them.
_ANSWERED_BY = {"return_routed_experts": "routed_experts", _ASKS_SETS: "output_token_sampling_mask"}
# What asks patched engines of older versions for kept sets, among `custom_params`; others have no use for it.
_ASKS_PATCHED = {"return_top_p_token_ids": True}
# How long the list of engines is believed. A request that failed is sent again after a longer time than this.
_LISTED_SECONDS = 0.5
# An engine that broke a request, or answered it by 429 or 5xx, gets no other for this long if there are others. A dead engine,
# or one that refuses at once, looks idle, and the router lists a dead one until its owner has noticed the end.
_AVOIDED_SECONDS = 10.0


def token_budget(sample: Sample, sampling_params: dict[str, Any], context_length: int | None) -> int:
    """Tokens that `sample` may still get: the response limit minus what it has, within the context length.

    Raises:
        UserError: neither limit is known.
    """
    limits = []
    if sampling_params.get("max_new_tokens") is not None:
        limits.append(sampling_params["max_new_tokens"] - sample.response_length)
    if context_length is not None:
        limits.append(context_length - len(held(sample, "tokens")))
    if not limits:
        raise UserError(
            "neither --rollout-max-response-len nor --rollout-max-context-len is given, and config.json of "
            "--hf-checkpoint has no max_position_embeddings: a response would have no limit"
        )
    return min(limits)


def build_payload(state: GenerateState, sample: Sample, sampling_params: dict[str, Any], budget: int) -> dict[str, Any]:
    """Body of the request that continues `sample.tokens` by at most `budget` tokens.

    `min_new_tokens` is, like `max_new_tokens`, about the whole response, all turns of a dialogue together.

    Raises:
        UserError: an id outside the vocabulary, or `min_p` together with deterministic inference; both would end the
            engine. Or `min_p` of engines that draft, which would not heed it.
    """
    token_ids = checked_token_ids(state, sample)
    min_p, drafting = sampling_params.get("min_p"), state.args.sglang_speculative_algorithm
    if min_p and deterministic_inference(state.args):
        raise UserError(
            f"min_p {min_p} cannot be used with --sglang-enable-deterministic-inference: "
            "it ends the engine; leave one of them out"
        )
    if min_p and drafting is not None:
        raise UserError(
            f"min_p {min_p} has no effect with --sglang-speculative-algorithm {drafting}: drafts are "
            "accepted without it; leave one of them out"
        )
    given = {name: value for name, value in sampling_params.items() if value is not None}
    params = within_budget(given, budget, generated=sample.response_length)
    payload = {"input_ids": token_ids, "sampling_params": params, "return_logprob": True}
    # Nobody replays an evaluation, whose experts would fill gigabytes until it is over.
    if state.args.use_rollout_routing_replay and not current_call().evaluation:
        experts = sample.rollout_routed_experts
        payload |= {"return_routed_experts": True, "routed_experts_start_len": 0 if experts is None else len(experts)}
    if asks_kept_sets(state.args):
        payload[_ASKS_SETS] = True
    return payload


def asks_kept_sets(args: Any) -> bool:
    """Whether the call that is under way needs the sets of tokens that engines sample among. An evaluation trains nothing, so
    it does not."""
    return samples_among_some(args) and not current_call().evaluation


def check_kept_sets(args: Any, sample: Sample) -> None:
    """Raise SampleFailed if `sample` was begun under flags that ask engines for these sets and the flags of now do not, or the
    other way round."""
    asked, told = asks_kept_sets(args), sample.rollout_top_p_token_offsets is not None
    if (told and not asked) or (asked and not told and sample.effective_response_length):
        raise SampleFailed("it was begun under another --rollout-top-p or --rollout-top-k; it starts from its prompt")


def checked_token_ids(state: GenerateState, sample: Sample) -> np.ndarray:
    """`sample.tokens`, read-only. Raises UserError, naming sample, id and vocabulary size, when an id lies outside the
    vocabulary."""
    tokens, size = token_array(sample, "tokens"), state.vocab_size
    if tokens is state.checked_ids:
        return tokens
    # Of whole numbers at one look: those below zero are large ones without their sign.
    if tokens.dtype == np.int64 and np.maximum.reduce(tokens.view(np.uint64), initial=0) < size:
        state.checked_ids = tokens
        return tokens
    outside = (tokens < 0) | (tokens >= size)
    if not outside.any():
        return tokens
    position = int(np.argmax(outside))
    raise UserError(
        f"sample {sample.index}: token id {tokens[position]} at position {position} is outside the vocabulary of "
        f"{state.vocab_size} tokens (config.json of --hf-checkpoint); do tokenizer and model belong together?"
    )


def check_prompt_length(sample: Sample, context_length: int | None) -> None:
    """Raise SampleFailed when the prompt is empty or leaves no room for a single token."""
    length = len(held(sample, "tokens"))
    if length == 0:
        raise SampleFailed("the prompt has no tokens", retryable=False)
    if context_length is not None and length >= context_length:
        raise SampleFailed(
            f"the prompt has {length} tokens, and with its response it may have {context_length} (--rollout-max-context-len, "
            "or --eval-max-context-len in evaluation; or what engines take, a little less than --sglang-context-length or the "
            "model's own)",
            retryable=False,
        )


# -- who is asked --------------------------------------------------------------------------------------------------------


async def ask_engine(args: Any, sample: Sample, payload: dict[str, Any], model_name: str = "default") -> dict[str, Any]:
    """The answer of an engine of a served model to the `/generate` request `payload` for `sample`.

    Users' functions ask by it if a run replays the routing of engines, or the tokens that they kept: a request with
    `return_routed_experts` or `return_sampling_mask` goes past a router that would drop this field. With the latter, the
    log-probs of the answer are those among the kept tokens; engines that take another request for these sets get that one.

    Raises:
        HttpError: the engine refused the request, or did not answer.
        SampleFailed: the engine tells another number of log-probs among the kept tokens than of tokens, or none to be read.
        UserError: the engine does not tell what it kept.
    """
    url, sent, options = await _addressed(args, sample, payload, model_name)
    with trace_span(sample, "sglang_generate") as span:
        answer = _completed(payload, _of_an_engine(url, await post_generate(url, sent, **options)))
        trace_engine_answer(span, answer)
    return answer


async def stream_engine(
    args: Any,
    sample: Sample,
    payload: dict[str, Any],
    on_answer: Callable[[dict[str, Any]], None],
    model_name: str = "default",
) -> None:
    """As `ask_engine`, with `stream`: `on_answer` is called with the answer so far whenever it has grown.

    A stream whose connection breaks ends so, without a `finish_reason`.
    """
    url, sent, options = await _addressed(args, sample, payload, model_name)
    last: dict[str, Any] = {}

    def received(answer: dict[str, Any]) -> None:
        nonlocal last
        last = _completed(payload, answer)
        on_answer(last)

    with trace_span(sample, "sglang_generate", {"stream": True}) as span:
        await post_generate_stream(url, {**sent, "stream": True}, received, **options)
        trace_engine_answer(span, last)


async def _addressed(
    args: Any, sample: Sample, payload: dict[str, Any], model_name: str
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The URL that a request goes to, the request as the engines there take it, and what else there is to say about it to
    `post_generate`."""
    url, ids = get_model_url(args, model_name), current_call().request_ids
    policies = (args.router_policy, args.router_prefill_policy, args.router_decode_policy)
    session = sample.session_id if "consistent_hashing" in policies else None
    headers = {ROUTING_KEY: session} if session else None
    engine = None
    asked = frozenset(filter(payload.get, _ANSWERED_BY))
    if asked:
        way = await _Engines().behind(url, model_name, asked)
        if way.asks_patched:
            payload = _for_patched(payload)
        if way.engines is not None:
            ids = _IdsPastTheRouter(current_call(), url)
            engine = functools.partial(ids.sent_to, way.engines, session)
    return url, payload, {"headers": headers, "request_ids": ids, "engine": engine}


def _for_patched(payload: dict[str, Any]) -> dict[str, Any]:
    """A request that asks patched engines for kept sets, with whatever other custom parameters it has."""
    params = payload.get("sampling_params") or {}
    custom = {**(params.get("custom_params") or {}), **_ASKS_PATCHED}
    return {**payload, "sampling_params": {**params, "custom_params": custom}}


class _IdsPastTheRouter(set[str]):
    """The `request_ids` of a `post_generate` past the router. The set itself stays empty: ids go to the call, together with the
    engine that works on each, which an abort needs to know."""

    def __init__(self, call: GenerationCall, router: str) -> None:
        super().__init__()
        self._call, self._router, self._asked = call, router, router

    @contextlib.asynccontextmanager
    async def sent_to(self, engines: "EnginesOfRouter", session: str | None) -> AsyncIterator[str]:
        """`EnginesOfRouter.one`, for an attempt whose id is drawn in the block."""
        async with engines.one(session) as self._asked:
            yield self._asked

    def update(self, ids: Any) -> None:
        self._call.request_ids.update(ids)
        if self._asked != self._router:
            self._call.engine_of_request.update(dict.fromkeys(ids, self._asked.removesuffix("/generate")))

    def difference_update(self, ids: Any) -> None:
        self._call.request_ids.difference_update(ids)
        for request_id in ids:
            self._call.engine_of_request.pop(request_id, None)


def _of_an_engine(url: str, answer: Any) -> Any:
    """`answer`, or one for each of several prompts. Raises HttpError if a proxy on the way gave its page instead."""
    answers = _each(answer)
    if not answers or not all(isinstance(one, dict) and isinstance(one.get("meta_info"), dict) for one in answers):
        raise HttpError(f"POST {url} was not answered by an engine, but with {str(answer)[:500]!r}", url=url)
    return answer


def _each(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _completed(payload: dict[str, Any], answer: Any) -> Any:
    """An answer, or one for each of several prompts, with what its request says about it."""
    for meta_info in (one["meta_info"] for one in _each(answer)):
        if "routed_experts_start_len" in payload:
            # Stock engines honour the field, but do not repeat it in their answers.
            meta_info.setdefault("routed_experts_start_len", payload["routed_experts_start_len"])
        if payload.get(_ASKS_SETS):
            _take_log_probs_among_kept(meta_info)
    return answer


def generated_tokens(meta_info: dict[str, Any]) -> TokenLogProbs:
    """The tokens that an answer tells, with their log-probs; none where it has no `output_token_logprobs`.

    Raises:
        SampleFailed: they cannot be read.
    """
    try:
        return TokenLogProbs.of(meta_info.get("output_token_logprobs"))
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise SampleFailed(
            f"output_token_logprobs of the engine's answer cannot be read ({type(error).__name__}: {error})"
        ) from error


def _take_log_probs_among_kept(meta_info: dict[str, Any]) -> None:
    """Replace log-probs over the whole vocabulary by those that tokens were sampled with. Patched engines tell no others
    beside their sets."""
    entries, log_probs = meta_info.get("output_token_logprobs"), meta_info.get("output_token_sampling_logprobs")
    if log_probs is None:
        if entries is None or not len(entries) or _tells_patched(meta_info):
            return
        if finish_type(meta_info) == "abort":
            # It had been put back to wait for room in the cache, and SGLang tells no sets of such: they are drawn again.
            meta_info["output_token_logprobs"] = []
        else:
            raise UserError(
                "--rollout-top-p, --rollout-top-k: the engine does not tell which tokens it kept (return_sampling_mask), which "
                "the trainer's log-probs need; take SGLang 0.5.21 or later, or give --rollout-top-p 1 --rollout-top-k -1"
            )
        return
    generated = generated_tokens(meta_info)
    if len(log_probs) != len(generated):
        raise SampleFailed(
            f"the engine gave {len(log_probs)} log-probs among kept tokens for an answer of {len(generated)} tokens"
        )
    meta_info["output_token_logprobs"] = generated.with_log_probs(log_probs)


def _tells_patched(meta_info: dict[str, Any]) -> bool:
    return any(meta_info.get(name) is not None for name in KEPT_IDS)


class EnginesOfRouter:
    """The engines that a router lists, for requests past it; `url`: its `/generate`.

    The engine with the fewest of these requests gets the next one, in turn where several have. A session stays with its
    engine, and moves no other when an engine comes or goes (rendezvous hashing).
    """

    def __init__(self, model_name: str, url: str) -> None:
        self._model_name, self._url = model_name, url
        self._urls: list[str] = []
        self._list_again_at = 0.0
        self._first_list = SingleFlight()
        self._in_flight: collections.Counter[str] = collections.Counter()
        self._turns, self._last_turn = itertools.count(1), collections.Counter[str]()
        self._avoided_until: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def one(self, session: str | None = None) -> AsyncIterator[str]:
        """The `/generate` of an engine, which counts as asked until the end of the block; the router's where it lists none.

        Raises:
            RunError: the router does not tell its engines.
        """
        urls = await self._listed()
        if not urls:
            yield self._url
            return
        engine = self._choose(urls, session)
        self._in_flight[engine] += 1
        try:
            yield engine + "/generate"
        except Exception:
            self._avoided_until[engine] = time.monotonic() + _AVOIDED_SECONDS
            raise
        finally:
            self._in_flight[engine] -= 1

    async def _listed(self) -> list[str]:
        if not self._urls:
            await self._first_list.join(self._list)
        elif time.monotonic() >= self._list_again_at:
            # Only this request waits; others go by the old list meanwhile.
            await self._list()
        return self._urls

    async def _list(self) -> None:
        self._list_again_at = time.monotonic() + _LISTED_SECONDS
        self._urls = await list_engine_urls(self._model_name, self._url.removesuffix("/generate"))

    def _choose(self, urls: Sequence[str], session: str | None) -> str:
        now = time.monotonic()
        urls = [url for url in urls if self._avoided_until.get(url, 0.0) <= now] or urls
        if session is not None:
            return max(urls, key=lambda url: hashlib.blake2b(f"{session} {url}".encode()).digest())
        chosen = min(urls, key=lambda url: (self._in_flight[url], self._last_turn[url]))
        self._last_turn[chosen] = next(self._turns)
        return chosen


@dataclasses.dataclass(frozen=True)
class Way:
    """How requests with certain fields get to engines that heed them."""

    # The engines to ask past the router; None for a router that hands all fields on.
    engines: EnginesOfRouter | None = None
    # Whether `custom_params` ask for kept sets, too: only patched engines heed them, and heed nothing else.
    asks_patched: bool = False


class _Engines(metaclass=SingletonMeta):
    """For each router and set of fields, the way of requests with these."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, frozenset[str]], Way] = {}
        self._probes = collections.defaultdict[tuple[str, frozenset[str]], SingleFlight](SingleFlight)

    async def behind(self, url: str, model_name: str, asked: frozenset[str]) -> Way:
        """The way of requests with the fields `asked`. The first caller finds that out by asking for one token; others wait
        for the result.

        Raises:
            HttpError: the engine refused, or did not answer; all who waited get it.
        """
        if (url, asked) in self._known:
            return self._known[url, asked]
        return await self._probes[url, asked].join(functools.partial(self._probe, url, model_name, asked))

    async def _probe(self, url: str, model_name: str, asked: frozenset[str]) -> Way:
        # Every vocabulary has this token; the request itself may bring a text. Sets are told of a limited top-k only.
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "top_k": 1}, **dict.fromkeys(asked, True)}
        if _ASKS_SETS in asked:
            # Engines heed the way of asking that they know.
            probe = _for_patched(probe)
        call, past = current_call(), Way(EnginesOfRouter(model_name, url), asks_patched=_ASKS_SETS in asked)
        answer = _of_an_engine(url, await post_generate(url, probe, request_ids=call.request_ids))
        dropped = sorted(field for field in asked if not _answers(answer["meta_info"], field))
        if _ASKS_SETS in dropped and not _is_aborted(answer):
            ids = _IdsPastTheRouter(call, url)
            engine = functools.partial(ids.sent_to, past.engines, None)
            answer = _of_an_engine(url, await post_generate(url, probe, request_ids=ids, engine=engine))
        if dropped and _is_aborted(answer):
            # It had no token to tell of. What is asked for in all ways, past the router, comes in any case, and the next
            # request tries again.
            return past
        meta_info = answer["meta_info"]
        patched = meta_info.get(_ANSWERED_BY[_ASKS_SETS]) is None and _tells_patched(meta_info)
        self._known[url, asked] = Way(past.engines if dropped else None, patched)
        if dropped:
            logger.info("%s: the router drops %s; such requests go to its engines", url, ", ".join(dropped))
        return self._known[url, asked]


def _answers(meta_info: dict[str, Any], field: str) -> bool:
    return meta_info.get(_ANSWERED_BY[field]) is not None or (field == _ASKS_SETS and _tells_patched(meta_info))


def _is_aborted(answer: dict[str, Any]) -> bool:
    return (answer["meta_info"].get("finish_reason") or {}).get("type") == "abort"


def router_urls(args: Any) -> dict[str, str]:
    """Served model → base URL of its router; the first router of the run has the name `default` if none is given."""
    routers = _model_routers(args)
    first = (args.sglang_router_ip, args.sglang_router_port)
    if first not in [tuple(address) for address in routers.values()]:
        routers = {"default": first, **routers}
    return {name: _base_url(*address) for name, address in routers.items()}


def _model_routers(args: Any) -> dict[str, tuple[str, int]]:
    """Served model → IP and port of its router; `args` that a user's program made may name none."""
    return getattr(args, "sglang_model_routers", {})


@functools.lru_cache(maxsize=256)
def _base_url(ip: str, port: int) -> str:
    return f"http://{host_for_url(ip)}:{port}"


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """URL of `endpoint` at the router of `model_name`; an unknown name gives the first router, with a warning.

    The first router answers to `default` as well.
    """
    routers = _model_routers(args)
    if model_name in routers:
        # This is asked for each request, mostly about a model that is named.
        return _base_url(*routers[model_name]) + endpoint
    urls = router_urls(args)
    if model_name in urls:
        return urls[model_name] + endpoint
    name, first = next(iter(urls.items()))
    if model_name != "default":
        _warn_once(f"no model is served under the name {model_name!r}; {name!r} is asked. Known: {', '.join(urls)}")
    return first + endpoint


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


async def list_engine_urls(model_name: str, router_url: str, max_retries: int | None = None) -> list[str]:
    """URLs of the engines of a served model, as its router lists them.

    Raises:
        RunError: the router does not answer, or answers something else.
    """
    answer = await http_utils.get(f"{router_url}/workers", max_retries=max_retries)
    try:
        urls = engine_urls(answer["workers"])
    except (KeyError, TypeError) as error:
        raise RunError(
            f"the router of model {model_name!r} at {router_url} did not list its workers but answered "
            f"{str(answer)[:500]!r}"
        ) from error
    http_utils.trust_engine_urls(urls)
    return urls
