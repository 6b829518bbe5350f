"""How a turn is requested from an engine: what is sent, how long the answer may take, and what ends the request early."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime.agent.trajectory import Message, TurnRecord
from slime.utils.engine_protocol import within_budget
from slime.utils.http_utils import ROUTING_KEY, HttpError, get, post_control, post_generate, trust_engine_urls
from slime.utils.ports import engine_urls

logger = logging.getLogger(__name__)

MAX_NEW_TOKENS = 4096
READ_TIMEOUT_S = 900.0
CLIENT_CLOSED_REQUEST = 499
_ABORT_TIMEOUT_S = 10.0
# Seconds between two looks whether the client of a turn is still there.
_LOOK_S = 0.2
# Special tokens and stop texts stay in the answer, since the model wrote them.
_ALWAYS = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
_CLIENT_SAMPLING = ("temperature", "top_p", "top_k")
_OF_SAMPLING = (
    *_CLIENT_SAMPLING, "frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias", "seed",
    "response_format", "tool_choice",
)  # fmt: skip
# Fields of requests that may be asked for in vain → why.
_IGNORED = {
    **dict.fromkeys(_OF_SAMPLING, "what is trained is what is sampled"),
    **dict.fromkeys(
        ("min_tokens", "stop_token_ids", "ignore_eos"),
        "beside stop texts and a limit, its session says where an answer ends",
    ),
    **dict.fromkeys(
        ("chat_template_kwargs", "reasoning_effort", "thinking"),
        "prompts are rendered by chat_template_kwargs of the adapter",
    ),
    **dict.fromkeys(("logprobs", "top_logprobs"), "agents are told texts alone"),
    "functions": "tools are read from `tools`",
}


class Refusal(Exception):
    """Ends a request with an HTTP status, and a message that the client gets in the form of its protocol."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Chat:
    """The contents of a request, in the form of chat templates.

    Attributes:
        messages: role and content as text; arguments of `tool_calls` are objects, and `reasoning_content` is separate.
        tools: each `{"type": "function", "function": {…}}`.
        max_new_tokens: the request's own limit, if it has one.
        stop: texts that end the answer.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_new_tokens: int | None = None
    stop: list[str] = field(default_factory=list)


class _TurnIds(set[str]):
    """The ids under which engines know a turn's requests. They are also noted for the rollout call that the turn belongs to,
    which may abort them."""

    def __init__(self, noted: set[str]) -> None:
        super().__init__()
        self._noted = noted

    def update(self, ids: Any) -> None:
        super().update(ids)
        self._noted.update(ids)

    def difference_update(self, ids: Any) -> None:
        super().difference_update(ids)
        self._noted.difference_update(ids)


class Engine:
    """The engine, or the router before several, that answers turns.

    Args:
        url: base URL of a router or an engine, or that of its `/generate`.
        request_fields: further fields of each request.
        allow_client_sampling: heed temperature, top-p and top-k of an agent's requests.
    """

    def __init__(self, url: str, request_fields: dict[str, Any], allow_client_sampling: bool) -> None:
        self._base_url = url.rstrip("/").removesuffix("/generate")
        self._request_fields = request_fields
        self._heeded = _CLIENT_SAMPLING if allow_client_sampling else ()
        self._warned: set[str] = set()

    def sampling_params(self, defaults: dict[str, Any], body: dict[str, Any], chat: Chat) -> dict[str, Any]:
        """The sampling parameters of a turn: a session's `defaults`, overridden by what is heeded of the request's `body`."""
        params = {name: value for name, value in defaults.items() if value is not None}
        params |= {name: body[name] for name in self._heeded if body.get(name) is not None}
        for name, why in _IGNORED.items():
            is_asked = body.get(name) is not None and body[name] is not False
            if is_asked and name not in self._heeded and name not in self._warned:
                self._warned.add(name)
                way_out = " (allow_client_sampling=True heeds it)" if name in _CLIENT_SAMPLING else ""
                logger.warning("%s of requests is ignored: %s%s", name, why, way_out)
        limit = params.get("max_new_tokens", MAX_NEW_TOKENS)
        limit = limit if chat.max_new_tokens is None else min(limit, chat.max_new_tokens)
        stop = params.pop("stop", None) or []
        stop = [*([stop] if isinstance(stop, str) else stop), *chat.stop]
        return {**params, **_ALWAYS, "max_new_tokens": limit, **({"stop": stop} if stop else {})}

    async def turn(
        self,
        request: web.Request,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str,
        noted_ids: set[str],
    ) -> TurnRecord:
        """The engine's answer to a prompt; an empty answer if no token is left for it.

        Args:
            request: the agent's request; if its client goes away, the engine's work is aborted.
            session_id: the router sends all requests of a session to the same engine.
            noted_ids: hold the ids of the request until it is answered.

        Raises:
            Refusal: the client is gone (499), or the engine takes too long (504).
            HttpError: the engine refuses, cannot be reached, or gives an answer of which no turn can be made.
        """
        budget = sampling_params["max_new_tokens"]
        if budget <= 0:
            return TurnRecord(prompt_ids, [], "length")
        params = within_budget(sampling_params, budget)
        payload = {"input_ids": prompt_ids, "sampling_params": params, "return_logprob": True}
        ids, headers = _TurnIds(noted_ids), {ROUTING_KEY: session_id}
        url, deadline = f"{self._base_url}/generate", time.monotonic() + READ_TIMEOUT_S
        asking = asyncio.create_task(post_generate(url, payload | self._request_fields, headers, request_ids=ids))
        try:
            while not (await asyncio.wait([asking], timeout=_LOOK_S))[0]:
                if is_gone(request):
                    raise Refusal(CLIENT_CLOSED_REQUEST, "the client is gone")
                if time.monotonic() > deadline:
                    raise Refusal(504, f"the engine did not answer within {READ_TIMEOUT_S:g} s")
        finally:
            if not asking.done():
                unanswered = list(ids)
                asking.cancel()
                await self._abort(unanswered)
        return _record(prompt_ids, asking.result())

    async def _abort(self, request_ids: list[str]) -> None:
        """Abort these requests at all engines behind the router, or at the one engine that is asked directly."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                try:
                    urls = engine_urls((await get(f"{self._base_url}/workers", 2))["workers"])
                    trust_engine_urls(urls, listed_by=self._base_url)
                except (HttpError, KeyError, TypeError):
                    urls = [self._base_url]
                bodies = [(f"{url}/abort_request", {"rid": request_id}) for url in urls for request_id in request_ids]
                await asyncio.gather(*[post_control(url, body, max_retries=1) for url, body in bodies])
        except (HttpError, TimeoutError) as error:
            logger.warning("an engine was not told that nobody waits for a turn any more: %s", error)


def is_gone(request: web.Request) -> bool:
    """Whether the client of a request has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def matched_by(turn: TurnRecord) -> Any:
    """The stop token or stop text that ended an answer: an id, a text, or None."""
    return ((turn.meta_info or {}).get("finish_reason") or {}).get("matched")


def _record(prompt_ids: list[int], answer: Any) -> TurnRecord:
    """The turn of an engine's answer. Raises HttpError if it cannot be trained on."""
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise HttpError(f"the engine answered something without meta_info: {str(answer)[:200]}")
    try:
        turn = _turn(prompt_ids, answer["meta_info"])
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise HttpError(f"the engine's answer cannot be read ({type(error).__name__}: {error})") from error
    # An aborted turn is never recorded, so it may be incomplete.
    if turn.finish_reason != "abort":
        unknown = sum(not math.isfinite(log_prob) for log_prob in turn.output_log_probs)
        if unknown:
            raise HttpError(f"the engine gave no finite log-prob for {unknown} of {len(turn.output_ids)} tokens")
        told, counted = len(turn.output_ids), answer["meta_info"].get("completion_tokens")
        if counted not in (None, told) or (answer.get("text") and not told):
            raise HttpError(f"the engine counts {counted} tokens, and tells the ids of {told} (output_token_logprobs)")
    return turn


def _turn(prompt_ids: list[int], meta_info: dict[str, Any]) -> TurnRecord:
    """A turn from the engine's `meta_info`; raises whatever reading that raises."""
    # Imported late, because Arrow takes a moment to load.
    from slime.utils.engine_answers import TokenLogProbs

    entries = TokenLogProbs.of(meta_info.pop("output_token_logprobs", None))
    if meta_info.get("output_token_sampling_logprobs") is not None:
        # Where sampling kept sets of tokens, these are the log-probs within the sets, which the trainer computes too.
        entries = entries.with_log_probs(meta_info["output_token_sampling_logprobs"])
    return TurnRecord(
        prompt_ids,
        entries.tokens.tolist(),
        (meta_info.get("finish_reason") or {}).get("type", "stop"),
        entries.log_probs.tolist(),
        weight_version=meta_info.get("weight_version"),
        meta_info=meta_info,
    )
