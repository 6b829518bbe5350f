"""Calls a generate function with an engine whose answers a test has written down."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import GenerationCall
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.tokenizer import build_tokenizer
from tests.support.processes.fake_generate_server import FakeGenerateServer


def spoken(
    checkpoint: str,
    function: Callable[..., Any],
    sample: Sample,
    turns: Sequence[str | list[int]] | Callable[[str], str],
    arguments: tuple[Any, ...] = (),
    **changes: Any,
) -> tuple[Any, list[dict[str, Any]]]:
    """Call `function(args, sample, sampling_params, *arguments)`. Returns (its result, the requests that it made).

    `turns`: the engine's answers in order, each as text or ids; or a function from a prompt's text to the answer.
    """
    tokenizer = build_tokenizer()
    left = iter(turns) if not callable(turns) else None

    def answer(payload: dict[str, Any]) -> list[int]:
        said = next(left) if left else turns(tokenizer.decode(payload["input_ids"]))
        return tokenizer.encode(said, add_special_tokens=False) if isinstance(said, str) else said

    async def main(args: Any) -> Any:
        with GenerationCall().under_way():
            try:
                return await function(args, sample, dict(GenerateState(args).sampling_params), *arguments)
            finally:
                await close_http_client()

    with FakeGenerateServer(answer) as server:
        server.text_of = tokenizer.decode
        settings = {"max_turns": None, "rollout_max_response_len": 200, "apply_chat_template": False, **changes}
        args = make_args(checkpoint, server.port)
        # Settings of the function itself may be among them.
        vars(args).update(settings)
        config = json.loads((Path(checkpoint) / "config.json").read_text())
        server.context_length = args.sglang_context_length or config["max_position_embeddings"]
        return asyncio.run(main(args)), server.requests
