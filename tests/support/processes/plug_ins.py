"""Plug-ins of the end-to-end runs: they wrap the defaults, and some of them stop or fail on purpose.

A test controls them by the environment of the run. `E2E_HOLD_ROLLOUT` is the rollout that waits for a file `go` in the run's
directory, `E2E_KEY_FILE` the file into which the run's API key is written, and `E2E_NOTES` a directory in which training ranks
record their calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.attempts import own_copy
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_streaming
from slime.rollout.rm_hub import grade_answer_verl
from slime.utils.types import Sample


async def marked_generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample:
    """The default generation, with a mark in the metadata."""
    if "E2E_KEY_FILE" in os.environ:
        Path(os.environ["E2E_KEY_FILE"]).write_text(args.router_api_key)
    rollout_id = GenerateState(args).rollout_id
    if not evaluation and str(rollout_id) == os.environ.get("E2E_HOLD_ROLLOUT"):
        print(f"holding rollout {rollout_id}", flush=True)
        while not Path("go").exists():
            await asyncio.sleep(0.05)
        print(f"going on with rollout {rollout_id}", flush=True)
    sample = await generate(args, sample, sampling_params)
    sample.metadata["generated_by"] = "marked_generate"
    return sample


async def streamed_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates by a stream, and checks that it equals a single answer to the same request."""
    whole = await generate(args, own_copy(sample), dict(sampling_params))
    sample = await generate_streaming(args, sample, sampling_params)
    for name in (
        "tokens",
        "response",
        "rollout_log_probs",
        "status",
        "weight_version_spans",
        "rollout_top_p_token_ids",
    ):
        streamed, expected = getattr(sample, name), getattr(whole, name)
        if name == "rollout_log_probs":
            streamed, expected = np.round(streamed, 4), np.round(expected, 4)
        if not np.array_equal(streamed, expected):
            raise AssertionError(f"{name} of a stream: {streamed}, of one answer: {expected}")
    return sample


async def branching_generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
    """Long answers for every third prompt, short ones for the others; every fourth execution gives two samples.

    One prompt of an evaluation never gets an answer.
    """
    if evaluation:
        while sample.metadata["number"] == 101:
            await asyncio.sleep(1)
        return await generate(args, sample, sampling_params)
    sampling_params["max_new_tokens"] = 100 if sample.group_index % 3 == 2 else 6
    sample = await generate(args, sample, sampling_params)
    if sample.index % 4 == 3 and sample.status is not Sample.Status.ABORTED:
        return [sample, own_copy(sample)]
    return sample


def count_shards(rollout_id: int, args: Any, samples: list[Sample], metrics: dict[str, Any], seconds: float) -> None:
    """A log function that adds the number of shards that the rollout manager keeps for ranks that read its memory."""
    from ray._private.worker import global_worker

    metrics["rollout/shards_kept"] = global_worker.rdt_manager.rdt_store.get_num_objects()


def not_every_fifth(args: Any, samples: list[Sample]) -> bool:
    """A dynamic filter that drops groups by their number."""
    return samples[0].group_index % 5 != 0


async def graded_group(args: Any, samples: list[Sample]) -> list[float]:
    """`graded_reward` for all samples of a group at once."""
    return [graded_reward(args, sample) for sample in samples]


async def held_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generation. In rollout 1 it waits for a file `go` in `--save`, which all nodes of a cluster see."""
    while GenerateState(args).rollout_id == 1 and not Path(args.save, "go").exists():
        await asyncio.sleep(0.05)
    return await generate(args, sample, sampling_params)


def graded_reward(args: Any, sample: Sample) -> float:
    """The built-in grader's reward, plus a part that differs among answers of a random model."""
    response = sample.tokens[-sample.response_length :]
    right = grade_answer_verl(sample.response, str(sample.label))
    return float(right) + sum(token % 2 for token in response) / max(1, len(response))


def parities(requests: list[dict[str, Any]]) -> list[float]:
    """A grader of a reward service: 1 for answers of an even number of characters."""
    return [float(len(request["response"]) % 2 == 0) for request in requests]


class OwnFunctions(RolloutDataSourceWithBuffer):
    """The default source. Samples of every second group bring a generate function and a reward function of their own."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups for sample in group if sample.group_index % 2):
            sample.generate_function_path = f"{__file__}:marked_generate"
            sample.custom_rm_path = f"{__file__}:graded_reward"
        return groups


async def generate_too_hot(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The default generation, at a temperature that engines refuse for sample 5."""
    return await generate(args, sample, {**sampling_params, **({"temperature": -1.0} if sample.index == 5 else {})})


def failing_reward(args: Any, sample: Sample) -> float:
    """Raises for one sample of the first rollout."""
    if sample.index == 5:
        raise KeyError(f"no entry for {sample.label}")
    return 0.0


def misplaced_experts(args: Any, sample: Sample, rollout_id: int) -> Sample:
    """In rollout 1, replaces every expert that the engine chose by the next one."""
    if rollout_id == 1:
        sample.rollout_routed_experts = (sample.rollout_routed_experts + 1) % args.num_experts
    return sample


def spoiled_log_prob(args: Any, sample: Sample, rollout_id: int) -> Sample:
    """In rollout 1, lowers the engine's log-prob of the first token of one sample."""
    if rollout_id == 1 and sample.index == 21:
        sample.rollout_log_probs = [sample.rollout_log_probs[0] - 0.25, *sample.rollout_log_probs[1:]]
    return sample


def noted_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets the advantages of GRPO, records the rank, and needs log-probs in the data."""
    import torch

    lengths = [len(log_probs) for log_probs in rollout_data["log_probs"]]
    rollout_data["advantages"] = [
        torch.full((length,), float(reward)) for reward, length in zip(rollout_data["rewards"], lengths, strict=True)
    ]
    rollout_data["returns"] = rollout_data["advantages"]
    _note("advantages")


def masked_first_token(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Trains on all response tokens but the first."""
    for mask in rollout_data["loss_masks"]:
        mask[:1] = 0


def hashed_token(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Writes the hash of the rank's variable `HUB_TOKEN` into the run's directory."""
    Path("hub_token.sha256").write_text(hashlib.sha256(os.environ["HUB_TOKEN"].encode()).hexdigest())


def noted_postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Changes nothing; records the rank, and whether it had advantages."""
    _note("postprocess with advantages" if "advantages" in rollout_data else "postprocess")


def without_memory_on_rank_1(args: Any) -> None:
    """Makes the loss of a memory probe fail on rank 1 as an allocator does. The other rank goes on and waits."""
    import torch
    import torch.distributed as dist

    from slime.training import memory_probe

    def fails(*given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    if dist.get_rank() == 1:
        memory_probe.step_loss = lambda *given: fails


def _note(text: str) -> None:
    import torch.distributed as dist

    with (Path(os.environ["E2E_NOTES"]) / f"rank{dist.get_rank()}").open("a") as file:
        file.write(f"{text}\n")
