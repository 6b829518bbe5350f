"""The part of agents' endpoints that does not depend on the protocol: sessions, and a turn's way from request to record.

A turn's messages are rendered by the chat template and sent as token ids to `/generate`. The ids and log-probs that come back
are recorded, and the agent program gets their text in its own protocol, for which there are subclasses. Earlier answers of the
model go into the next prompt with their recorded ids, as long as the template would write the same text.

The application serves on one event loop; sessions may be opened and finished from any other.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from aiohttp import web

from slime.agent.adapters.asking import CLIENT_CLOSED_REQUEST, Chat, Engine, Refusal, is_gone, matched_by
from slime.agent.adapters.parsing import THINK, ModelOutput, named_schema, parse_model_output, prepare_parsers
from slime.agent.trajectory import FORK_THRESHOLD_TOKENS, Message, TrajectoryManager, TurnRecord
from slime.utils.http_utils import HttpError, noted_request_ids
from slime.utils.processing_utils import ends_of_turns, render_chat, require_chat_template, unheard_end
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Session:
    """The state of one run of an agent.

    Attributes:
        noted_ids: the ids of all open requests of the rollout call that the agent works for.
        failure: why the last turn failed, if that was not the agent's fault.
        template_kwargs: arguments of the chat template, beside those of the adapter and above them.
    """

    sid: str
    sampling_defaults: dict[str, Any]
    max_context_tokens: int | None
    noted_ids: set[str]
    is_open: bool = True
    aborted: bool = False
    failure: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    running: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = field(default_factory=dict)

    def cancel(self) -> None:
        """End the turns that are under way, and let no new one begin."""
        self.is_open = False
        for task, loop in list(self.running.items()):
            loop.call_soon_threadsafe(task.cancel)


class BaseAdapter(abc.ABC):
    """The endpoint without its protocol; a subclass adds the routes, and translates.

    Args:
        tokenizer: has a chat template.
        sglang_url: base URL of a router or an engine, or that of its `/generate`.
        tool_parser, reasoning_parser: names of parsers of SGLang; None for the format that most models write.
        max_turns_per_sid: the most turns of a session, including those under way; None for no limit.
        fork_threshold_tokens: if a client rewrites an answer of the model with fewer output tokens than this, the answer is
            masked; with as many or more, another sample begins. 0: another sample always begins.
        debug_callback: called with a dict of everything about each turn that is recorded.
        allow_client_sampling: heed temperature, top-p and top-k of requests. The engine's log-probs are then at that
            temperature, and the trainer's are not.
        chat_template_kwargs: passed to the template, for example `{"enable_thinking": False}`.
        request_fields: further fields of `/generate` requests, such as `{"return_routed_experts": True}`.
        model_label: the name of the model in `/v1/models`.

    Raises:
        UserError: the tokenizer has no chat template, or SGLang no parser of such a name.
    """

    def __init__(
        self,
        tokenizer: Any,
        sglang_url: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int = FORK_THRESHOLD_TOKENS,
        debug_callback: Callable[[dict[str, Any]], None] | None = None,
        *,
        allow_client_sampling: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        request_fields: dict[str, Any] | None = None,
        model_label: str = "slime-actor",
    ) -> None:
        require_chat_template(tokenizer, "messages of agents are rendered")
        prepare_parsers(tool_parser, reasoning_parser)
        self.tokenizer = tokenizer
        self.trajectories = TrajectoryManager(fork_threshold_tokens)
        self._engine = Engine(sglang_url, request_fields or {}, allow_client_sampling)
        self._parsers = (tool_parser, reasoning_parser)
        self._max_turns = max_turns_per_sid
        self._debug_callback = debug_callback
        self._template_kwargs = chat_template_kwargs or {}
        self._template_ends = ends_of_turns(tokenizer, self._template_kwargs)
        self._sessions: dict[str, Session] = {}
        self._warned: set[Any] = set()
        self._looked_at_ends = False
        # Guards the sessions, and is notified when a turn ends.
        self._changed = threading.Condition()

        async def healthz(request: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        async def models(request: web.Request) -> web.Response:
            model = {"id": model_label, "object": "model", "owned_by": "slime"}
            return web.json_response({"object": "list", "data": [model]})

        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.add_routes([web.get("/healthz", healthz), web.get("/v1/models", models)])
        self._register_routes(self.app)

    # -- what a protocol adds ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _register_routes(self, app: web.Application) -> None:
        """Add the routes; the one for turns has the handler `guarded(handle_turn)`."""

    @abc.abstractmethod
    def _session_id(self, request: web.Request, body: dict[str, Any]) -> str:
        """The session that a request names, "" for none."""

    def _preprocess_body(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body, changed in whatever must not reach the prompt."""
        return body

    @abc.abstractmethod
    def _translate(self, body: dict[str, Any]) -> Chat:
        """The contents of a body. Raises Refusal, or any KeyError, TypeError or ValueError if it cannot be read."""

    @abc.abstractmethod
    def _build_reply(self, body: dict[str, Any], output: ModelOutput, turn: TurnRecord) -> dict[str, Any]:
        """The answer to a request that does not stream."""

    @abc.abstractmethod
    async def _respond(self, request: web.Request, body: dict[str, Any], reply: dict[str, Any]) -> web.StreamResponse:
        """Write the whole reply, or the events of a stream that are equal to it."""

    def offered(self, tools: list[dict[str, Any]], are_known: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Those of a request's tools that the model can be offered. Of the others is warned, once for each type."""
        known = [tool for tool in tools if are_known(tool)]
        for kind in sorted({str(tool.get("type"))[:40] for tool in tools if tool not in known}):
            self._warn_once(
                ("tools", kind),
                f"tools of the type {kind} are left out of requests: the model can be offered functions with a schema only, so "
                "the agent does without them; have it bring a function of its own",
            )
        return known

    def _error(self, status: int, message: str) -> dict[str, Any]:
        """The body of an answer that refuses a request, in the form of the protocol if it has one."""
        return {"error": {"code": status, "message": message}}

    # -- sessions ------------------------------------------------------------------------------------------------------

    def open_session(
        self,
        sid: str,
        sampling_defaults: dict[str, Any] | None = None,
        max_context_tokens: int | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Accept requests that name the session `sid`; clients do so by their key.

        Args:
            sampling_defaults: sampling parameters of `/generate`; without `max_new_tokens` an answer has at most 4096.
            max_context_tokens: limit of a prompt and its answer together; None: the engine's limit.
            chat_template_kwargs: passed to the template, beside the adapter's and above them.

        Raises:
            ValueError: there is such a session already, or the name is empty.
        """
        noted = noted_request_ids()
        session = Session(sid, dict(sampling_defaults or {}), max_context_tokens, set() if noted is None else noted)
        session.template_kwargs = dict(chat_template_kwargs or {})
        if not self._looked_at_ends:
            self._looked_at_ends = True
            self._look_at_ends(session.sampling_defaults)
        with self._changed:
            if not sid or sid in self._sessions:
                raise ValueError(f"session {sid!r} has no name, or is there already: finish or drop that one first")
            self._sessions[sid] = session

    def _look_at_ends(self, sampling_defaults: dict[str, Any]) -> None:
        """Warn if engines do not end answers where the chat template ends turns."""
        checkpoint = getattr(self.tokenizer, "name_or_path", "")
        if not os.path.isdir(checkpoint):
            return  # Where engines end answers is told by the files of a checkpoint.
        stops = sampling_defaults.get("stop"), sampling_defaults.get("stop_token_ids")
        if unheard := unheard_end(self.tokenizer, checkpoint, self._template_ends, *stops):
            logger.warning(unheard)

    async def shutdown_session(self, sid: str, wait_timeout: float = 5.0) -> None:
        """Refuse new turns (503), and wait for those under way; after `wait_timeout` seconds they are ended.

        Raises:
            ValueError: there is no such session.
        """
        with self._changed:
            session = self._sessions.get(sid)
            if session is None:
                raise ValueError(_no_session(sid))
            session.is_open = False

        def wait_idle() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not session.running, wait_timeout)

        if session.running and not await asyncio.to_thread(wait_idle):
            logger.warning("turns were under way %g s after the end of their session; they are lost", wait_timeout)
            session.cancel()

    def failure_of(self, sid: str) -> str | None:
        """Why the last turn of a session failed, if that was not the agent's fault. The agent's result then says nothing about
        the model.

        Such a failure is a turn that engines refused or answered unusably (502) or did not answer in time (504), or that an
        error of this process ended (500). The next turn that succeeds clears it. Refusals that are the agent's own fault (400,
        429), a client that went away (499) and an abort (503) do not change it. None if there is no such failure or no such
        session: call this when the agent has ended, before `finish_session` or `drop_session`.
        """
        with self._changed:
            session = self._sessions.get(sid)
            return None if session is None else session.failure

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        max_sample_tokens: int = 0,
        wait_timeout: float = 5.0,
        args: Any = None,
    ) -> list[Sample]:
        """End a session, and return the samples of its turns, with their texts. The arguments are those of `get_trajectory`.

        No sample is longer than the session's `max_context_tokens`, whatever `max_sample_tokens` is. There is no sample if
        nothing is to be trained. If a turn was aborted, all samples are ABORTED, and instead of no sample there is one without
        an answer.

        Raises:
            ValueError: there is no such session, or an engine's values for a turn contradict each other.
        """
        await self.shutdown_session(sid, wait_timeout)
        with self._changed:
            session = self._sessions.pop(sid, None)
        if session is None:
            raise ValueError(_no_session(sid))
        limits = [limit for limit in (max_sample_tokens, session.max_context_tokens) if limit]

        def finished() -> list[Sample]:
            samples = self.trajectories.get_trajectory(
                sid,
                base_sample=base_sample,
                reward=reward,
                extra_metadata=extra_metadata,
                max_sample_tokens=min(limits, default=0),
                args=args,
            )
            for sample in samples:
                sample.response = self._decode(sample.tokens[-sample.response_length :])
            return samples

        samples = await asyncio.to_thread(finished)
        if session.aborted:
            samples = samples or [dataclasses.replace(base_sample, metadata=dict(base_sample.metadata))]
            for sample in samples:
                sample.status, sample.reward = Sample.Status.ABORTED, None
        return samples

    def drop_session(self, sid: str) -> None:
        """Forget a session, and end its turns. It is no error if there is no such session."""
        with self._changed:
            session = self._sessions.pop(sid, None)
        if session is not None:
            session.cancel()
        self.trajectories.drop_session(sid)

    @contextlib.contextmanager
    def _turn_of(self, sid: str) -> Iterator[Session]:
        """The session, which has a turn for as long as the block lasts. Raises Refusal if it may not have one."""
        task = asyncio.current_task()
        with self._changed:
            session = self._sessions.get(sid)
            if session is None or not session.is_open:
                raise Refusal(503, "there is no such session, or it is closed; clients name it by their key")
            turns = self.trajectories.turn_count(sid) + len(session.running)
            if self._max_turns is not None and turns >= self._max_turns:
                raise Refusal(429, f"the session has had its {self._max_turns} turns")
            session.running[task] = asyncio.get_running_loop()
        try:
            yield session
            session.failure = None
        except Exception as error:
            if isinstance(error, HttpError) or getattr(error, "status", None) == 504:
                session.failure = str(error)
            elif not isinstance(error, Refusal | ConnectionResetError):
                session.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                del session.running[task]
                self._changed.notify_all()

    # -- a turn --------------------------------------------------------------------------------------------------------

    def guarded(self, handler: Handler) -> Handler:
        """`handler`, whose refusals are answered in the protocol, and counted in `trajectories.counts` as `refused_STATUS`. The
        first of each kind is logged as a warning."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except Refusal as error:
                refusal = error
            except HttpError as error:
                refusal = Refusal(502, f"the turn was not answered by an engine: {error}")
            except ConnectionResetError:
                refusal = Refusal(CLIENT_CLOSED_REQUEST, "the client is gone")
            self.trajectories.counts[f"refused_{refusal.status}"] += 1
            # What stands behind may be told of one request alone.
            reason = re.split("[:(]", str(refusal), maxsplit=1)[0]
            told = f"a request of an agent was refused with status {refusal.status}: {refusal}"
            self._warn_once((refusal.status, reason), f"{told}; `trajectories.counts` of the adapter has how often")
            logger.debug(told)
            return web.json_response(self._error(refusal.status, str(refusal)), status=refusal.status)

        return handle

    async def handle_turn(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a turn, and record the turn."""
        body = await self.body_of(request)
        with self._turn_of(self._session_id(request, body)) as session:
            chat, prompt_ids, prompt = await self.prompt_of(session.sid, body)
            params = self._engine.sampling_params(session.sampling_defaults, body, chat)
            if session.max_context_tokens is not None:
                params["max_new_tokens"] = min(params["max_new_tokens"], session.max_context_tokens - len(prompt_ids))
            turn = await self._engine.turn(request, prompt_ids, params, session.sid, session.noted_ids)
            if turn.finish_reason == "abort":
                # The rollout call is ending, and an agent that tried again would hold it up.
                session.is_open, session.aborted = False, True
                raise Refusal(503, "the turn was aborted, and the session is closed")
            output = await asyncio.to_thread(self._read, turn, chat, prompt)
            turn = dataclasses.replace(turn, ill_formed=output.ill_formed)
            reply = self._build_reply(body, output, turn)
            response = await self._respond(request, body, reply)
            if is_gone(request) or self._sessions.get(session.sid) is not session:
                self.trajectories.counts["not_delivered"] += 1
                self._warn_once(
                    "not_delivered", "an agent or its session went away while it was answered; the turn is lost"
                )
                return response
            message = {"role": "assistant", "content": output.text, "tool_calls": calls_of(output)}
            self.trajectories.record_turn(
                session.sid,
                turn=turn,
                prompt_messages=[routing_message(one) for one in chat.messages],
                response_message=routing_message(message),
            )
            if self._debug_callback is not None:
                told = {"session_id": session.sid, "chat": chat, "turn": turn, "output": output, "reply": reply}
                try:
                    self._debug_callback(told)
                except Exception:  # an error in a user's callback must not end the turn
                    logger.exception("debug_callback raised")
            return response

    async def body_of(self, request: web.Request) -> dict[str, Any]:
        """The preprocessed body. Raises Refusal if it is no JSON object."""
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is no JSON that can be read: {error}") from error
        if not isinstance(body, dict):
            raise Refusal(400, "the body is no JSON object")
        with _refusing_what_cannot_be_read():
            return self._preprocess_body(body)

    def _read(self, turn: TurnRecord, chat: Chat, prompt: str) -> ModelOutput:
        """The parts of an answer: text, reasoning and tool calls."""
        text, matched = self._spoken(turn), matched_by(turn)
        text = text.removesuffix(matched) if isinstance(matched, str) else text
        # Some templates open the reasoning in the prompt.
        opening = THINK if prompt.rstrip().endswith(THINK) else ""
        output = parse_model_output(opening + text, chat.tools, *self._parsers)
        if self._parsers[0] == "kimi_k2":
            # Its template writes the ids of calls and results, and the model knows such as count a conversation's calls.
            first = sum(len(message.get("tool_calls") or ()) for message in chat.messages)
            ids = [f"functions.{use.name}:{number}" for number, use in enumerate(output.tool_uses, first)]
            uses = [dataclasses.replace(use, id=own) for use, own in zip(output.tool_uses, ids, strict=True)]
            output = output._replace(tool_uses=uses)
        return output

    # -- its prompt ----------------------------------------------------------------------------------------------------

    async def prompt_of(self, sid: str, body: dict[str, Any]) -> tuple[Chat, list[int], str]:
        """(contents of a body, ids of its prompt, text of its prompt). Raises Refusal if it cannot be read or rendered."""
        with _refusing_what_cannot_be_read():
            chat = self._translate(body)
            routed = [routing_message(message) for message in chat.messages]
            for tool in chat.tools:
                if named_schema(tool) is None:
                    raise ValueError("a tool has no name, or parameters that are no schema")
        return chat, *await asyncio.to_thread(self._prompt, sid, chat, routed)

    def _prompt(self, sid: str, chat: Chat, routed: list[Message]) -> tuple[list[int], str]:
        """(ids, text) of the prompt. Up to the model's last turn the ids are the recorded ones, if the template writes their
        text."""
        session, said = self._sessions.get(sid), self.trajectories.recorded_turns(sid, routed)
        template_kwargs = self._template_kwargs | ({} if session is None else session.template_kwargs)
        if said:
            last, last_turn = said[-1]
            held = [*last_turn.prompt_ids, *last_turn.output_ids]
            # What the prompt's text must begin with. A token by which a model ended a turn, and which the template writes
            # behind none (`<|endoftext|>`), stays in the ids, and the template's own follows it.
            bare = self._without_other_ends(held, [turn for _, turn in said])
            held_texts = [self._decode(held), *([self._decode(bare)] if len(bare) < len(held) else [])]
            own = {place: {"role": "assistant", "content": self._spoken(turn)} for place, turn in said}
            # Clients write calls in another way than the model did, and leave reasoning out. So the model's own texts are put
            # into the messages: first all of them; then only the last one, since the prompt of that turn may have been rendered
            # with the client's version of the others; at last none.
            for replaced in (own, {last: own[last]}, {}):
                messages = [replaced.get(place, message) for place, message in enumerate(chat.messages)]
                with contextlib.suppress(Refusal):
                    text = self._rendered(messages, chat, template_kwargs)
                    for held_text in held_texts:
                        if text.startswith(held_text):
                            return held + self._encode(text[len(held_text) :]), text
        text = self._rendered(chat.messages, chat, template_kwargs)
        return self._encode(text), text

    def _rendered(self, messages: list[Message], chat: Chat, template_kwargs: dict[str, Any]) -> str:
        try:
            text = render_chat(self.tokenizer, messages, chat.tools, template_kwargs)
            # Clients that cut texts by units of UTF-16 leave lone surrogates, which cannot be tokenised.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (jinja2.TemplateError, LookupError, TypeError, ValueError) as error:
            raise Refusal(400, f"the chat template refused the messages ({type(error).__name__}: {error})") from error

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _spoken(self, turn: TurnRecord) -> str:
        """The text of an answer, without the special token that ends a turn."""
        return self._decode(turn.output_ids[:-1] if self._ends_by_a_mark(turn) else turn.output_ids)

    def _ends_by_a_mark(self, turn: TurnRecord) -> bool:
        marks = (matched_by(turn), *self.tokenizer.all_special_ids)
        return turn.finish_reason == "stop" and bool(turn.output_ids) and turn.output_ids[-1] in marks

    def _without_other_ends(self, held: list[int], turns: list[TurnRecord]) -> list[int]:
        """`held` without the tokens that ended these turns in it and that the chat template writes behind no turn."""
        places = set()
        for turn in turns:
            if self._template_ends and self._ends_by_a_mark(turn) and turn.output_ids[-1] not in self._template_ends:
                ids = [*turn.prompt_ids, *turn.output_ids]
                places |= {len(ids) - 1} if held[: len(ids)] == ids else set()
        return [token for place, token in enumerate(held) if place not in places]

    def _warn_once(self, subject: Any, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning(message)


@contextlib.contextmanager
def _refusing_what_cannot_be_read() -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Refusal(400, f"the request cannot be read ({type(error).__name__}: {error})") from error


def _no_session(sid: str) -> str:
    return f"there is no session {sid!r}: it was not opened, or is finished or dropped"


def calls_of(output: ModelOutput) -> list[dict[str, Any]]:
    """The calls of an answer, in the form that they have in a template's message."""
    return [{"function": {"name": use.name, "arguments": use.arguments}} for use in output.tool_uses]


def routing_message(message: Message) -> Message:
    """The part of a message by which conversations are compared, because clients keep it: no reasoning, only the first of
    several calls, no ids, no text beside a call."""
    routed = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_calls"):
        function = message["tool_calls"][0]["function"]
        routed |= {"content": "", "tool_calls": [{"name": function["name"], "arguments": function["arguments"]}]}
    return routed
