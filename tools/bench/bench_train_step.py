"""Our training step beside steps written by hand over transformers, in one process, alternating, on CPU.

    python tools/bench/bench_train_step.py [--model 0.8M|10M|50M …] [--threads 2] [--rounds 5] [--recompute]
    python tools/bench/bench_train_step.py --threads 1 --cpu-time     # where others use the machine too
    python tools/bench/bench_train_step.py --model 0.8M --rounds 1 --profile 30

One rank takes a GRPO step (one update on all samples of the step, so that it needs no pass for old log-probs) on samples of
log-normal length. The others start from the same weights, compute the same loss with transformers' Qwen3 and step with
PyTorch's fused AdamW after clipping. The gradient norm of the first step shows that all do the same work.

packed      the flattened micro-batches that we use, with position ids. It computes logits and log-probs only for rows that
            predict a response token, so fewer than ours. Attention is either one call per sequence or one per class of lengths
            (multiples of 16, padded at the end, where causal attention does not look), whichever is faster on this machine.
padded      micro-batches of --padded-samples in the order in which they come, padded to the longest of them, with a mask.
limit       the step's matrix products (`slime.estimates`, three times those of a forward pass) at the best speed of a few
            large products on this machine.

With --recompute, our step with recomputed layers is compared with our step without them, and the difference with what is
recomputed: the time that a pass without gradients spends in the decoder layers, or in their core attention. A cost of more than
one is more than the recomputation itself.

Times are the median of the rounds; ratios are the median of the rounds' ratios, which other load changes least.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench.bench_memory_plan import step_of_samples

if TYPE_CHECKING:
    import torch

    from slime.training.rollout_data import RolloutData

# (layers, hidden, MLP, heads, key/value heads, head width, vocabulary, samples of a step)
MODELS = {
    "0.8M": (4, 128, 384, 4, 2, 32, 320, 128),
    "10M": (6, 320, 960, 8, 4, 40, 4096, 64),
    "50M": (12, 512, 1536, 8, 4, 64, 32000, 24),
}
PROMPT, MEDIAN, SIGMA, CAP = 16, 64, 1.0, 512
RATE, CLIP = 1e-4, 1.0
# Contender → its flags, and the part of a forward pass that it repeats.
RECOMPUTED = {
    "full": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "decoder"),
    "selective": ("--recompute-granularity selective", "core_attention"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048, help="token budget of a packed micro-batch")
    parser.add_argument("--padded-samples", type=int, default=16, help="samples of a padded micro-batch")
    parser.add_argument(
        "--recompute", action="store_true", help="compare with recomputed layers instead of transformers"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of the processor, all threads, not of the clock"
    )
    parser.add_argument(
        "--profile", type=int, metavar="ROWS", help="print where the time of our step goes, and no times"
    )
    options = parser.parse_args()
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    from slime.utils.device import get_accelerator

    torch.set_num_threads(options.threads)
    # Training ranks do this, and so the hand-written steps get it too.
    get_accelerator().compute_in_this_thread()
    get_accelerator().keep_freed_memory()
    for name in options.model:
        with tempfile.TemporaryDirectory() as directory:
            compare(name, directory, options)


def compare(name: str, directory: str, options: argparse.Namespace) -> None:
    """Measure one model and print its times."""
    model = reference_model(name)
    model.save_pretrained(directory)
    ours = Trainer(name, directory, "", options)
    lengths = ours.data["total_lengths"]
    tokens = sum(lengths)
    if options.profile:
        profile(ours.step, options.profile)
        return
    contenders: dict[str, Callable[[], float]] = {"ours": ours.step}
    if options.recompute:
        contenders |= {kind: Trainer(name, directory, words, options).step for kind, (words, _) in RECOMPUTED.items()}
        contenders["forward pass"] = ours.forward
    else:
        contenders |= {
            "packed, by sequence": HandWritten(directory, ours.data, "by sequence").step,
            "packed, by class": HandWritten(directory, ours.data, "by class").step,
            "padded": HandWritten(directory, ours.data, "padded", options.padded_samples).step,
        }
    # The first step also does the work that is only done once.
    norms = {contender: step() for contender, step in contenders.items()}
    clock = ours.clock
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(options.rounds):
        for contender, step in contenders.items():
            start = clock()
            step()
            seconds[contender].append(clock() - start)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"\n{name}: {parameters / 1e6:.1f} M parameters, {len(lengths)} samples, {tokens} tokens (longest {max(lengths)}), "
        f"{options.threads} threads, {options.rounds} rounds, {'CPU' if options.cpu_time else 'wall'} time"
    )
    seconds["limit"] = [training_flops(ours.args, lengths) / peak_flops(clock)] * options.rounds
    print(f"{'':22}{'s per step':>12}{'tokens/s':>12}{'ours of this':>14}{'gradient norm':>16}")
    for contender, values in seconds.items():
        middle, ratio = statistics.median(values), median_ratio(values, seconds["ours"])
        norm = f"{norms[contender]:.6f}" if norms.get(contender) else ""
        print(f"{contender:22}{middle:12.3f}{tokens / middle:12,.0f}{ratio:14.2f}{norm:>16}", flush=True)
    for kind, (_, part) in RECOMPUTED.items() if options.recompute else ():
        more = [slow - fast for slow, fast in zip(seconds[kind], seconds["ours"], strict=True)]
        # Without those of the first pass, which did what is only done once.
        repeated = ours.seconds_of_parts[part][1:]
        print(
            f"{kind} recomputation costs {median_ratio(more, repeated):.2f} of what it repeats: "
            f"{statistics.median(repeated):.3f} s of a forward pass in {part}"
        )
    found = [norm for norm in norms.values() if norm]
    if max(found) > min(found) * 1.0001:
        sys.exit("the gradient norms of the first step differ: these are not the same steps")


def median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def reference_model(name: str) -> Any:
    """A model of transformers in Qwen3's shape, with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, ffn, heads, groups, width, vocabulary, _ = MODELS[name]
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
            num_key_value_heads=groups, head_dim=width, vocab_size=vocabulary, max_position_embeddings=4096,
            tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )  # fmt: skip


class Trainer:
    """The product's trainer on one rank."""

    def __init__(self, name: str, directory: str, words: str, options: argparse.Namespace) -> None:
        from slime.arguments import parse_args
        from slime.arguments.checkpoints import WeightSource
        from slime.training.backend import make_backend

        self.clock = time.process_time if options.cpu_time else time.perf_counter
        # Part of the model → its seconds in every pass of `forward`.
        self.seconds_of_parts: dict[str, list[float]] = {part: [] for _, part in RECOMPUTED.values()}
        samples = MODELS[name][-1]
        command = (
            f"--debug-train-only --disable-rollout-global-dataset --num-rollout 1000 --n-samples-per-prompt 8 "
            f"--rollout-batch-size {samples // 8} --hf-checkpoint {directory} --model-args-from-hf --actor-num-gpus-per-node 1 "
            f"--use-dynamic-batch-size --max-tokens-per-gpu {options.tokens} --lr {RATE} --lr-decay-style constant "
            f"--clip-grad {CLIP} --weight-decay 0.1 --adam-beta2 0.98 {words}"
        )
        self.args = parse_args(argv=command.split())
        # The process groups have one rank, and several trainers may use them in turns.
        if "megatron.core" in sys.modules:
            sys.modules["megatron.core"].parallel_state.destroy_model_parallel()
        self.backend = make_backend(self.args)
        self.backend.place()
        self.backend.load(WeightSource("hf", directory))
        self.data = step_of_samples(self.args, PROMPT, log_normal_lengths(samples))

    def step(self) -> float:
        from slime.training.train_step import train_one_step

        return train_one_step(self.args, self.backend, self.data, 0, 0)["grad_norm"]

    def forward(self) -> float:
        """One pass over all micro-batches without gradients, with log-probs and entropy. Notes the seconds of the parts that
        are recomputed. Returns 0, as there is no norm."""
        from slime.training.train_step import forward_log_probs

        with contextlib.ExitStack() as hooks:
            for part, seconds in self.seconds_of_parts.items():
                seconds.append(0.0)
                for chunk in self.backend.model:
                    for name, module in chunk.named_modules():
                        if name.rpartition(".")[2] == part:
                            self.time_calls(module, seconds, hooks)
            forward_log_probs(self.args, self.backend, self.data, with_entropy=True)
        return 0.0

    def time_calls(self, module: torch.nn.Module, seconds: list[float], hooks: contextlib.ExitStack) -> None:
        """Add the time of each call of the module to the last of `seconds`, while `hooks` are open."""
        starts: list[float] = []

        def start(*_: Any) -> None:
            starts.append(self.clock())

        def end(*_: Any) -> None:
            seconds[-1] += self.clock() - starts.pop()

        hooks.callback(module.register_forward_pre_hook(start).remove)
        hooks.callback(module.register_forward_hook(end).remove)


def log_normal_lengths(count: int) -> list[int]:
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, count)
    return np.clip(drawn, 1, CAP).astype(int).tolist()


class HandWritten:
    """A training step over transformers: `attention` is by sequence, by class (both packed) or padded."""

    def __init__(self, directory: str, data: RolloutData, attention: str, padded_samples: int = 0) -> None:
        import torch
        from transformers import AttentionInterface, Qwen3ForCausalLM

        self.data = data
        packed = attention != "padded"
        AttentionInterface.register("packed", self.attend)
        self.model = Qwen3ForCausalLM.from_pretrained(
            directory, attn_implementation="packed" if packed else "sdpa", dtype=torch.float32
        )
        self.by_class = attention == "by class"
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), fused=True)
        count = len(data["tokens"])
        if packed:
            self.micro_batches = data["micro_batch_indices"]
        else:
            self.micro_batches = [
                list(range(start, min(start + padded_samples, count))) for start in range(0, count, padded_samples)
            ]
        self.loss = self.packed_loss if packed else self.padded_loss

    def step(self) -> float:
        import torch

        self.model.train()
        self.optimizer.zero_grad()
        for positions in self.micro_batches:
            (self.loss(positions) / len(self.data["tokens"])).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return norm.item()

    def packed_loss(self, positions: Sequence[int]) -> torch.Tensor:
        import torch

        rows = [self.data["tokens"][position] for position in positions]
        lengths = [len(row) for row in rows]
        stream = torch.cat(rows)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        places = torch.cat([torch.arange(length) for length in lengths])
        predicting = torch.cat(
            [
                torch.arange(start + length - self.data["response_lengths"][position] - 1, start + length - 1)
                for start, length, position in zip(starts, lengths, positions, strict=False)
            ]
        )
        hidden = self.model.model(
            input_ids=stream[None],
            position_ids=places[None],
            attention_mask=NO_MASK,
            plan=self.plan(lengths),
            use_cache=False,
        ).last_hidden_state[0]
        logits = self.model.lm_head(hidden.index_select(0, predicting))
        return self.objective(logits, stream.index_select(0, predicting + 1), positions)

    def padded_loss(self, positions: Sequence[int]) -> torch.Tensor:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [self.data["tokens"][position] for position in positions]
        tokens = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        logits = self.model(input_ids=tokens, attention_mask=mask.long(), use_cache=False).logits
        responses = torch.tensor([self.data["response_lengths"][position] for position in positions])
        where = torch.arange(tokens.shape[1] - 1)
        chosen = (where >= (lengths - responses - 1)[:, None]) & (where < (lengths - 1)[:, None])
        return self.objective(logits[:, :-1][chosen], tokens[:, 1:][chosen], positions)

    def objective(self, logits: torch.Tensor, targets: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """GRPO's objective at the first step on its samples, where the ratio is 1."""
        import torch

        log_probs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        advantages = torch.cat([self.data["advantages"][position] for position in positions])
        weights = torch.cat(
            [
                torch.full((length,), 1 / length)
                for length in (self.data["response_lengths"][position] for position in positions)
            ]
        )
        return -((log_probs - log_probs.detach()).exp() * advantages * weights).sum()

    def plan(self, lengths: Sequence[int]) -> tuple[Sequence[int], Any]:
        """Returns the lengths, and None or, with classes, a pair: for each class the rows of the stream that it gathers,
        [sequences, width], and for each row of the stream its place in the concatenated outputs of all classes."""
        import torch

        if not self.by_class:
            return lengths, None
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        classes: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            classes.setdefault(-(-length // 16) * 16, []).append(index)
        gathered, back, before = [], torch.empty(starts[-1], dtype=torch.int64), 0
        for width, members in classes.items():
            first = torch.tensor([starts[member] for member in members])[:, None]
            last = torch.tensor([starts[member + 1] - 1 for member in members])[:, None]
            gathered.append(torch.minimum(first + torch.arange(width), last))
            for row, member in enumerate(members):
                back[starts[member] : starts[member + 1]] = before + row * width + torch.arange(lengths[member])
            before += len(members) * width
        return lengths, (gathered, back)

    @staticmethod
    def attend(module, query, key, value, attention_mask, scaling, plan, **_) -> tuple[torch.Tensor, None]:
        """Query, key and value are [1, heads, T, dim]; returns [1, T, heads, dim]."""
        import torch

        lengths, classes = plan

        def causal(*tensors: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                *tensors, is_causal=True, enable_gqa=True, scale=scaling
            )

        if classes is None:
            pieces = (tensor.split(list(lengths), dim=2) for tensor in (query, key, value))
            return torch.cat([causal(*of_one) for of_one in zip(*pieces, strict=True)], dim=2).transpose(1, 2), None
        gathered, back = classes
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        outputs = [
            causal(*(tensor[index].transpose(1, 2) for tensor in rows)).transpose(1, 2).flatten(0, 1)
            for index in gathered
        ]
        return torch.cat(outputs).index_select(0, back)[None], None


# transformers takes this for finished masks. A mask of its own would have the square of the stream's length.
NO_MASK = {"full_attention": None}


def training_flops(args: argparse.Namespace, lengths: Sequence[int]) -> float:
    """The FLOPs of the matrix products of one step."""
    from slime.models.shape_of_flags import flops_model_from_args

    flops = flops_model_from_args(args)
    return 3.0 * sum(flops.forward_flops(length) for length in lengths)


def peak_flops(clock: Callable[[], float]) -> float:
    """FLOPs per second of the best of a few products of 2048 × 2048 matrices in float32."""
    import torch

    left = torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(5):
        start = clock()
        left @ left
        best = min(best, clock() - start)
    return 2 * 2048**3 / best


def profile(step: Callable[[], float], rows: int) -> None:
    """Print the operators and the Python functions that a step spends its time in."""
    import cProfile
    import pstats

    import torch

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
        step()
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=60))
    functions = cProfile.Profile()
    functions.runcall(step)
    pstats.Stats(functions).sort_stats("tottime").print_stats(rows)


if __name__ == "__main__":
    main()
