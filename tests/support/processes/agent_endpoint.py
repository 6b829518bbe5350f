"""An endpoint for agents, in front of an engine whose answers a test has written down, and a client of the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from slime.agent.adapters import BaseAdapter
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.utils.types import Sample
from tests.support.models.tokenizer import CHATML_TEMPLATE, build_tokenizer
from tests.support.processes.fake_generate_server import FakeGenerateServer

BASE = Sample(group_index=1, index=5, prompt="p", label="l")
END = "<|im_end|>"


@dataclass
class Endpoint:
    """A client of the endpoint. One session, with the key `s`, is open at the start."""

    adapter: BaseAdapter
    engine: FakeGenerateServer
    served: AppHandle
    path: str

    def ask(self, body: dict[str, Any], key: str = "s", path: str | None = None, **headers: str) -> requests.Response:
        """POST a body to the route of turns, or to `path`."""
        headers = {"Authorization": f"Bearer {key}"} | headers if key else headers
        return requests.post(self.served.url + (path or self.path), json=body, headers=headers, timeout=60)

    def prompts(self) -> list[str]:
        """The prompts that the engine got, as texts."""
        return [self.adapter.tokenizer.decode(payload["input_ids"]) for payload in self.engine.requests]

    def finish(self, sid: str = "s", **options: Any) -> list[Sample]:
        """End a session. Returns its samples."""
        return asyncio.run(self.adapter.finish_session(sid, base_sample=BASE, **options))


@contextlib.contextmanager
def endpoint(
    kind: Callable[..., BaseAdapter],
    path: str,
    says: Sequence[str | list[int]],
    template: str = CHATML_TEMPLATE,
    defaults: dict[str, Any] | None = None,
    max_context_tokens: int | None = None,
    **options: Any,
) -> Iterator[Endpoint]:
    """Serves an adapter of this kind. `says`: the model's turns in order, each as text or ids."""
    tokenizer, left = build_tokenizer(template), iter(says)

    def answer(payload: dict[str, Any]) -> list[int]:
        said = next(left)
        return tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said

    with FakeGenerateServer(answer) as engine:
        # There is room for the answers of agents, whose limit is 4096 tokens.
        engine.context_length = 32768
        adapter = kind(tokenizer, engine.url, **options)
        adapter.open_session("s", defaults, max_context_tokens)
        served = run_app_in_thread(adapter.app)
        try:
            yield Endpoint(adapter, engine, served, path)
        finally:
            served.stop()


def events_of(response: requests.Response) -> list[Any]:
    """The data of a stream's events: objects, or texts where they are no JSON."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(text) if text.startswith("{") else text for text in data]
