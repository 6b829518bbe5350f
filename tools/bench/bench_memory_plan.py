"""The memory that `--dry-run` announces, beside the memory that a training step takes on CPU.

    SLIME_ACCELERATOR=cpu python tools/bench/bench_memory_plan.py
    SLIME_ACCELERATOR=cpu python tools/bench/bench_memory_plan.py --case wide

Every case parses a command line, asks the plan, and trains two optimizer steps with the same flags and the product's own
trainer, in one process per rank (Gloo), from random weights, on made-up samples that fill the token budget. The bench counts
the bytes of live tensors: every storage that an operation returns, from then until it is freed. Counting starts when the model
is built, so the memory of imports is left out, and it does not see what a kernel allocates and frees inside itself. The rank
with the most bytes counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from slime.training.rollout_data import RolloutData

MIB = 2**20
MODELS = {
    # 54 M parameters, tied, with norms of queries and keys: activations dominate.
    "deep": "--num-layers 12 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 --num-query-groups 4 "
    "--kv-channels 64 --vocab-size 32000 --qk-layernorm",
    # 102 M, untied, biases in the projection: MLP and state dominate.
    "wide": "--num-layers 6 --hidden-size 768 --ffn-hidden-size 4096 --num-attention-heads 12 --num-query-groups 2 "
    "--vocab-size 24000 --untie-embeddings-and-output-weights --add-qkv-bias",
    # 79 M, most of them vocabulary: logits dominate.
    "vocabulary": "--num-layers 12 --hidden-size 384 --ffn-hidden-size 1152 --num-attention-heads 6 --num-query-groups 2 "
    "--kv-channels 64 --vocab-size 151936 --qk-layernorm",
}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "1 rank": (1, ""),
    "1 rank, full recompute": (1, FULL),
    "1 rank, selective recompute": (1, "--recompute-granularity selective"),
    "1 rank, bfloat16": (1, "--bf16"),
    "DP 2": (2, ""),
    "DP 2, full recompute": (2, FULL),
    "DP 2, no distributed optimizer": (2, "--no-use-distributed-optimizer"),
    "TP 2": (2, "--tensor-model-parallel-size 2"),
    "TP 2, sequence parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "TP 2, full recompute": (2, f"--tensor-model-parallel-size 2 {FULL}"),
}
TOKENS, SAMPLE = 1024, 512
_COMMON = (
    "--debug-train-only --disable-rollout-global-dataset --random-init --num-rollout 2 --n-samples-per-prompt 2 "
    "--group-query-attention --swiglu --disable-bias-linear --normalization RMSNorm --max-position-embeddings 4096 "
    f"--use-dynamic-batch-size --max-tokens-per-gpu {TOKENS} --rollout-max-context-len {SAMPLE} --weight-decay 0.1"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="only cases whose model or layout contains this")
    options = parser.parse_args()
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    print(f"{'model':12}{'layout':34}{'estimate MiB':>14}{'measured MiB':>14}{'difference':>12}   moment of the peak")
    worst = 0.0
    for model in MODELS:
        for layout, (world_size, _) in LAYOUTS.items():
            if options.case and options.case not in f"{model} {layout}":
                continue
            words = case_words(model, layout)
            estimate, moment = estimated(words)
            measured = max(run_ranks(words, world_size))
            difference = estimate / measured - 1
            worst = max(worst, abs(difference))
            line = f"{model:12}{layout:34}{estimate / MIB:14.1f}{measured / MIB:14.1f}{difference:12.1%}   {moment}"
            print(line, flush=True)
    print(f"largest difference: {worst:.1%}")


def case_words(model: str, layout: str, tokens: int = TOKENS) -> list[str]:
    """The command line of a case; every data-parallel rank has two micro-batches per step."""
    world_size, flags = LAYOUTS[layout]
    data = world_size // (2 if "tensor" in flags else 1)
    prompts = 2 * data * (tokens // SAMPLE) // 2
    words = f"{_COMMON} {MODELS[model]} {flags} --actor-num-gpus-per-node {world_size} --rollout-batch-size {prompts}"
    return words.split()


def estimated(words: Sequence[str]) -> tuple[int, str]:
    """The bytes that the plan announces for the rank with most, and the moment of its peak."""
    from slime.arguments import parse_args
    from slime.plan import make_plan

    memory = make_plan(parse_args(argv=[*words, "--dry-run"])).memory
    return memory.training.total, memory.training.moment


def run_ranks(
    words: Sequence[str], world_size: int, measure: Callable[[Sequence[str]], Any] | None = None
) -> list[Any]:
    """Run every rank in a process of its own. Returns the results of `measure`; if it is None, the ranks' peak bytes."""
    import torch.multiprocessing as multiprocessing
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(
            target=_rank, args=(rank, world_size, store.port, list(words), results, measure or peak_of_training)
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 600
    for rank in ranks:
        rank.join(max(deadline - time.monotonic(), 0))
    failed = [rank.exitcode for rank in ranks if rank.exitcode != 0]
    for rank in ranks:
        rank.kill()
    if failed:
        sys.exit(f"a rank ended with status {failed[0]}")
    return [results.get() for _ in ranks]


def _rank(rank: int, world_size: int, port: int, words: list[str], results: Any, measure: Callable) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    results.put(measure(words))


def peak_of_training(words: Sequence[str]) -> int:
    """Peak bytes of live tensors of this rank, from building the model to the end of its second optimizer step.

    The rank forms its process group from the environment and keeps it.
    """
    import torch

    torch.set_num_threads(1)
    from slime.arguments import parse_args
    from slime.arguments.checkpoints import WeightSource
    from slime.training.backend import make_backend
    from slime.training.train_step import train_one_step
    from tools.bench.live_tensors import LiveTensors

    args = parse_args(argv=list(words))
    backend = make_backend(args)
    with LiveTensors() as live:
        backend.place()
        backend.load(WeightSource("random"))
        for step in range(2):
            train_one_step(args, backend, batch_of_rank(args), step, 0)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return live.peak


def batch_of_rank(args: argparse.Namespace) -> RolloutData:
    """This rank's data of one rollout step: samples that fill the token budget, with prompts of one token. The plan counts the
    logits of every token, and a step with longer prompts would make fewer."""
    return step_of_samples(args, 1, [SAMPLE - 1] * args.global_batch_size)


def step_of_samples(args: argparse.Namespace, prompt: int, responses: Sequence[int]) -> RolloutData:
    """This rank's data of one rollout step: made-up samples with a prompt of `prompt` tokens and responses of these lengths."""
    import numpy as np
    import torch
    from megatron.core import parallel_state

    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors
    from slime.training.schedule import schedule_from_args
    from slime.utils.types import Sample

    generator = np.random.default_rng(0)
    samples = []
    for index, response in enumerate(responses):
        sample = Sample(index=index, group_index=index // args.n_samples_per_prompt, rollout_id=index, prompt="")
        sample.tokens = generator.integers(0, args.vocab_size, prompt + response).tolist()
        sample.response_length = response
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    rewards = generator.standard_normal(len(samples)).tolist()
    batch = build_train_batch(samples, rewards, rewards)
    schedule = schedule_from_args(
        args,
        {"dp_size": args.data_parallel_size, "cp_size": 1},
        batch["total_lengths"].tolist(),
        global_batch_size=args.global_batch_size,
        execution_ids=batch["rollout_ids"].tolist(),
    )
    shard = split_for_data_parallel(batch, schedule)[parallel_state.get_data_parallel_rank()]
    data = to_tensors(shard, torch.device("cpu"))
    compute_advantages_and_returns(args, data)
    return data


if __name__ == "__main__":
    main()
