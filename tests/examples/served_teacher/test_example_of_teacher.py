"""The files of the example: a run takes the one, and the other grades and asks the teacher."""

import asyncio
from pathlib import Path

import pytest

from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.args import parse

EXAMPLE = Path(__file__).parents[3] / "examples/served_teacher"
WORDS = (
    "--sglang-config", str(EXAMPLE / "serving.yaml"), "--rollout-num-gpus", "2", "--use-opd", "--opd-type", "sglang",
    "--opd-kl-coef", "0.01", "--custom-rm-path", f"{EXAMPLE}/reward.py:reward",
)  # fmt: skip


def test_a_run_takes_them(tmp_path):
    args = parse(tmp_path, *WORDS)
    assert [(model.name, model.update_weights) for model in args.served_models] == [("actor", True), ("teacher", False)]
    assert {model.model_path for model in args.served_models} == {args.hf_checkpoint}


def test_the_reward_grades_and_the_teacher_is_asked(tmp_path, monkeypatch):
    args = parse(tmp_path, *WORDS)
    args.sglang_model_routers = {"actor": ("127.0.0.1", 1), "teacher": ("127.0.0.1", 2)}
    args.sglang_router_ip, args.sglang_router_port = args.sglang_model_routers["actor"]
    asked = []

    async def answer(url, payload, headers=None):
        asked.append(url)
        return {"meta_info": {"input_token_logprobs": [[None, 1], [-0.5, 2], [-0.25, 3]]}}

    monkeypatch.setattr("slime.rollout.on_policy_distillation.post_generate", answer)
    reward = load_function(args.custom_rm_path, flag="--custom-rm-path")
    right = Sample(tokens=[1, 2, 3], response_length=2, response="\\boxed{7}", label="7")
    wrong = Sample(tokens=[1, 2, 3], response_length=2, response="\\boxed{8}", label="7")
    assert [asyncio.run(reward(args, sample)) for sample in (right, wrong)] == [1.0, 0.0]
    assert asked == ["http://127.0.0.1:2/generate"] * 2
    assert asyncio.run(reward(args, right, evaluation=True)) == 1.0 and len(asked) == 2, "nobody reads it there"
    assert list(right.teacher_log_probs) == [-0.5, -0.25]
    with pytest.raises(UserError, match="the label of a row is None.*--label-key"):
        asyncio.run(reward(args, Sample(tokens=[1, 2, 3], response_length=2, response="\\boxed{7}")))
