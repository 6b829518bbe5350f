"""What the generation loop records in samples, in their order and nested, and that dumps keep it."""

import pytest
import torch

from slime.rollout.base_types import leaves
from slime.rollout.generation import generate_and_rm, generate_and_rm_group
from slime.rollout.rollout_dump import save_rollout
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.rollout_steps import params, run


def group_of(size=2):
    return [Sample(index=number, group_index=0, prompt="hello") for number in range(size)]


def by_name(sample):
    found = {}
    for record in sample.trace["events"]:
        assert record["end"] is not None and record["status"] == "ok"
        found.setdefault(record["name"], []).append(record)
    return found


def test_a_group_of_answers(server, checkpoint, tmp_path):
    args, prompts = make_args(checkpoint, server.port), group_of()
    group = run(generate_and_rm_group(args, prompts, params(args)))
    assert not any(hasattr(prompt, "trace") for prompt in prompts), "prompts stay as they are"
    for number, sample in enumerate(group):
        assert (sample.trace["sample_id"], sample.trace["group_id"], sample.trace["attempt"]) == (number, 0, 0)
        found = by_name(sample)
        (whole,), (one,), (request,), (reward,) = (
            found[name] for name in ("generate_and_rm_group", "generate_and_rm", "sglang_generate", "reward_model")
        )
        assert (whole["parent_id"], one["parent_id"]) == (None, whole["span_id"])
        assert request["parent_id"] == reward["parent_id"] == one["span_id"]
        assert whole["start"] <= one["start"] <= request["start"] <= request["end"] <= reward["end"] <= whole["end"]
        assert request["attrs"]["finish_reason"] == "stop" and request["attrs"]["weight_version"] == "1"
    first, second = (by_name(sample)["generate_and_rm_group"][0]["span_id"] for sample in group)
    assert first == second
    save_rollout(str(tmp_path / "{rollout_id}.pt"), 0, group)
    dumped = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
    assert [entry["trace"] for entry in dumped] == [sample.trace for sample in group]


def test_several_graded_by_one_call(server, checkpoint):
    args = make_args(checkpoint, server.port, group_rm=True)
    for sample in run(generate_and_rm_group(args, group_of(), params(args))):
        found = by_name(sample)
        assert "reward_model" not in found
        assert found["group_reward_model"][0]["parent_id"] == found["generate_and_rm_group"][0]["span_id"]


@pytest.mark.parametrize("how", ["Sample(index=sample.index, prompt='p')", "copy.deepcopy(sample)", "sample"])
def test_samples_that_a_function_of_a_users_makes(server, checkpoint, tmp_path, how):
    (tmp_path / "own.py").write_text(
        "import copy\nfrom slime.observability.trace_utils import trace_span\n"
        "from slime.rollout.sglang_rollout import generate\nfrom slime.utils.types import Sample\n"
        "async def own(args, sample, sampling_params):\n"
        "    with trace_span(sample, 'tool'):\n        pass\n"
        f"    parts = [{how}, Sample(index=sample.index, prompt='p')]\n"
        "    return [await generate(args, part, dict(sampling_params)) for part in parts]\n"
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=f"{tmp_path}/own.py:own")
    group = run(generate_and_rm_group(args, group_of(1), params(args)))
    for sample in leaves(group):
        found = by_name(sample)
        assert {"generate_and_rm_group", "generate_and_rm", "sglang_generate", "group_reward_model"} <= set(found)
        assert found["generate_and_rm"][0]["parent_id"] == found["generate_and_rm_group"][0]["span_id"]
    # The second one never was the sample that was asked for.
    assert how != "copy.deepcopy(sample)" or "tool" in by_name(leaves(group)[0])


def test_the_second_attempt_on_a_prompt(server, checkpoint, tmp_path):
    (tmp_path / "own.py").write_text(
        "from slime.rollout.failures import SampleFailed\nfrom slime.rollout.sglang_rollout import generate\n"
        "async def own(args, sample, sampling_params):\n"
        "    args.asked += 1\n"
        "    if args.asked == 1:\n        raise SampleFailed('an accident')\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=f"{tmp_path}/own.py:own")
    args.asked = 0
    sample = run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))
    spans = [(record["name"], record["attempt"], record["status"]) for record in sample.trace["events"]]
    assert spans == [
        ("generate_and_rm", 0, "error"),
        ("generate_and_rm", 1, "ok"),
        ("sglang_generate", 1, "ok"),
        ("reward_model", 1, "ok"),
    ]


def test_m6_a_stream_is_one_request(server, checkpoint):
    path = "slime.rollout.sglang_streaming_rollout.generate_streaming"
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)
    sample = run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))
    (request,) = by_name(sample)["sglang_generate"]
    assert request["attrs"]["stream"] is True and request["attrs"]["finish_reason"] == "stop"
