"""The judge of the page on several models: its snippet grades by the model that it names, and by no other."""

import asyncio

import pytest

from slime.utils.http_utils import close_http_client, init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args, make_checkpoint
from tests.support.models.tokenizer import build_tokenizer
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT


@pytest.fixture
def reward(tmp_path):
    SingletonMeta.clear_instances()
    [snippet] = [text for kind, text in blocks(ROOT / "docs/en/advanced/sglang-config.md") if kind == "python"]
    (tmp_path / "judge.py").write_text(snippet)
    yield load_function(f"{tmp_path}/judge.py:reward", flag="--custom-rm-path")
    SingletonMeta.clear_instances()


@pytest.mark.parametrize(
    ("said", "grade"),
    [("7", 1.0), (" 7", 1.0), ("\n8\n", 1.0), ("3", 0.0), ("good", 0.0), ("\n", 0.0), ("", 0.0), ("45", 0.0)],
)
def test_the_judge_is_asked_and_its_first_digit_is_the_grade(tmp_path, reward, said, grade):
    tokenizer = build_tokenizer()
    with FakeGenerateServer(lambda payload: tokenizer.encode(said)) as judge, FakeGenerateServer() as policy:
        judge.text_of = tokenizer.decode
        routers = {"actor": ("127.0.0.1", policy.port), "judge": ("127.0.0.1", judge.port)}
        args = make_args(make_checkpoint(tmp_path), policy.port, sglang_model_routers=routers)

        async def main():
            init_http_client(args)
            try:
                return await reward(args, Sample(response="It is 85"))
            finally:
                await close_http_client()

        assert asyncio.run(main()) == grade
        [request] = judge.requests
        assert "It is 85" in request["text"] and request["text"].endswith("\n")
        assert request["sampling_params"] == {"max_new_tokens": 4, "temperature": 0}
        assert policy.requests == []
