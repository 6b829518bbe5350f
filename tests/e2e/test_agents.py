"""A conversation of an agent with a real engine: its sample has the engine's tokens, and log-probs as a model computes them."""

import asyncio

import pytest
import requests

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils import http_utils
from slime.utils.http_utils import init_http_client
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel
from tests.support.processes.http_server import make_args
from tests.support.processes.plain_engine import KEY, PlainEngine


@pytest.mark.slow
def test_two_turns_have_the_log_probs_of_one_forward_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(http_utils, "_settings", http_utils.HttpSettings())
    model = make_tiny_checkpoint(tmp_path / "model")
    engine, turns = PlainEngine(model, tmp_path / "engine.log"), []
    try:
        host, port = engine.address.split(":")
        init_http_client(make_args(router_api_key=KEY, sglang_router_ip=host, sglang_router_port=int(port)))
        adapter = OpenAIAdapter(load_tokenizer(str(model)), f"http://{engine.address}", debug_callback=turns.append)
        served = run_app_in_thread(adapter.app)
        adapter.open_session("s", {"temperature": 1.0, "max_new_tokens": 24}, max_context_tokens=2048)
        messages = []
        for question in ("What is 1+1?", "And now?"):
            messages.append({"role": "user", "content": question})
            reply = requests.post(
                f"{served.url}/v1/chat/completions",
                json={"messages": messages, "stream": False},
                headers={"Authorization": "Bearer s"},
                timeout=120,
            )
            messages.append(reply.json()["choices"][0]["message"])
        (sample,) = asyncio.run(adapter.finish_session("s", base_sample=Sample(index=0)))
        served.stop()
    finally:
        engine.end()
    first, second = (told["turn"] for told in turns)
    assert sample.tokens == [*second.prompt_ids, *second.output_ids]
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == [*first.prompt_ids, *first.output_ids]
    between = sample.response_length - len(first.output_ids) - len(second.output_ids)
    assert sample.loss_mask == [1] * len(first.output_ids) + [0] * between + [1] * len(second.output_ids)
    told = [*first.output_log_probs, *[0.0] * between, *second.output_log_probs]
    assert sample.rollout_log_probs == told and min(told) < -0.1
    computed = ReferenceModel(model).log_probs(list(first.prompt_ids), sample.tokens[-sample.response_length :])
    trained = [place for place, one in enumerate(sample.loss_mask) if one]
    assert [sample.rollout_log_probs[place] for place in trained] == pytest.approx(
        [computed[place] for place in trained], abs=1e-4
    )
    assert sample.weight_versions == ["default"] * 2
