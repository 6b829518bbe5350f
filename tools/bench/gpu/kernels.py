"""The kernels of a training step on one GPU beside those of torch: log-probs with entropy, and attention over packed samples.

    python tools/bench/gpu/kernels.py [--tokens 8192] [--repeats 20]
    python tools/bench/gpu/kernels.py --device cpu --tiny

All times are of forward and backward. Log-probs: the contenders of `tools/bench/bench_log_probs.py`, on the logits of a Qwen3
micro-batch; `F.cross_entropy` has no entropy. Attention: `PackedAttention`, which the local layers have, beside one call of
`F.scaled_dot_product_attention` for each sample, with the heads of Qwen3 0.6B and 1.7B; and how far apart their results are,
beside how far torch's own is from float32. Its TFLOP/s count the causal half of forward and backward, without recomputation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import torch
import torch.nn.functional as F

from slime.estimates.flops import gqa_attention_flops
from slime.utils.device import get_accelerator
from tools.bench import bench_log_probs
from tools.bench.gpu.common import TERA, Report, best_seconds, make_parser, run
from tools.published_models import DENSE

LOG_PROBS_TARGET = 1.0
_CONFIG = DENSE["qwen3-0.6B"]
HEADS, GROUPS, HEAD_DIM = _CONFIG["num_attention_heads"], _CONFIG["num_key_value_heads"], _CONFIG["head_dim"]
_TINY_TOKENS, _TINY_VOCABULARY = 64, 1024
# Of the packed stream; the samples of one are of one length.
_SAMPLES = (1, 4, 32)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Log-probs, then attention."""
    tokens = _TINY_TOKENS if options.tiny else options.tokens
    repeats = 1 if options.tiny else options.repeats
    log_probs = _log_probs(options, tokens, repeats)
    attention = [row for samples in _SAMPLES for row in _attention(tokens, samples, repeats)]
    fused = next(row for row in log_probs if row["contender"] == "fused_log_probs_and_entropy")
    return Report(
        "kernels",
        [*log_probs, *attention],
        [f"{tokens} tokens; ratio: time over that of the first contender of its kind"],
        f"log-probs with entropy at most {LOG_PROBS_TARGET:g} times as long as F.cross_entropy",
        None if options.tiny else fused["ratio"] <= LOG_PROBS_TARGET,
        failed=any("far apart" in (row["remark"] or "") or row["ms"] is None for row in attention),
    )


def _log_probs(options: argparse.Namespace, tokens: int, repeats: int) -> list[dict[str, Any]]:
    vocabulary = _TINY_VOCABULARY if options.tiny else _CONFIG["vocab_size"]
    contenders = list(bench_log_probs.CONTENDERS)
    case = argparse.Namespace(
        tokens=tokens, vocab=vocabulary, dtype="bfloat16", device=options.device, repeats=repeats, contenders=contenders
    )
    best, extra, of_logits = bench_log_probs.measure(case)
    return [
        {
            "kernel": f"log-probs [{tokens} x {vocabulary}]",
            "contender": name,
            "ms": best[name],
            "ratio": best[name] / best["cross_entropy"],
            "extra memory, of the logits": extra[name] / of_logits,
            "remark": None,
        }
        for name in contenders
    ]


def _attention(tokens: int, samples: int, repeats: int) -> list[dict[str, Any]]:
    lengths = [tokens // samples] * samples
    inputs = _inputs(lengths, torch.bfloat16)
    reference = _results(with_all_heads(per_sample(lengths)), _inputs(lengths, torch.float32))
    contenders: dict[str, Attend] = {
        "scaled_dot_product_attention": per_sample(lengths),
        "PackedAttention": ours(lengths),
    }
    rows, calls = {}, {}
    for name, attend in contenders.items():
        row: dict[str, Any] = {
            "kernel": f"attention, {samples} x {lengths[0]}",
            "contender": name,
            "ms": None,
            "ratio": None,
        }
        try:
            row["furthest from float32"] = furthest(_results(attend, inputs), reference)
            row["remark"] = None
        except (RuntimeError, TypeError) as error:
            # Versions of torch differ in what their kernels take, and what does not run says so beside what does.
            row["remark"] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            calls[name] = lambda attend=attend: _results(attend, inputs)
        rows[name] = row
    best = best_seconds(calls, repeats)
    flops = attention_flops(lengths)
    for name, seconds in best.items():
        first = best.get("scaled_dot_product_attention")
        rows[name] |= {
            "ms": 1e3 * seconds,
            "ratio": None if first is None else seconds / first,
            "TFLOP/s": flops / seconds / TERA,
        }
    own, torchs = (
        rows[name].get("furthest from float32") for name in ("PackedAttention", "scaled_dot_product_attention")
    )
    if own is not None and torchs is not None and not own <= 2 * torchs:
        rows["PackedAttention"]["remark"] = "its results are far apart from torch's"
    return list(rows.values())


def attention_flops(lengths: Sequence[int]) -> int:
    """Of forward and backward of the core, without projections, over samples of these lengths."""
    per_pair = gqa_attention_flops(1, HEADS, GROUPS, HEAD_DIM).per_token_pair
    return 3 * per_pair * sum(length * length for length in lengths)


def per_sample(lengths: Sequence[int]) -> Attend:
    """A call of torch's own attention for every sample."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        pieces = zip(
            *(tensor.transpose(0, 1).split(list(lengths), dim=1) for tensor in (query, key, value)), strict=True
        )
        outputs = [
            F.scaled_dot_product_attention(*(piece[None] for piece in sample), is_causal=True, enable_gqa=True)[0]
            for sample in pieces
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)

    return attend


def with_all_heads(attend: Attend) -> Attend:
    """`attend` with a key and a value for every head: for float32 a GPU has no kernel that shares them and makes no score
    matrix."""

    def attend_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, *(tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value)))

    return attend_all


def ours(lengths: Sequence[int]) -> Attend:
    """The attention of the local layers, as the trainer describes a packed stream to it."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.attention import PackedAttention, packed_seq_params
    from slime.training.packed_stream import pack_stream

    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=HEAD_DIM, attention_dropout=0.0,
    )  # fmt: skip
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self")
    device = get_accelerator().current_device()
    samples = [torch.zeros(length, dtype=torch.int64, device=device) for length in lengths]
    stream = packed_seq_params(pack_stream(samples, [1] * len(samples), 1), by_position=True)
    return lambda query, key, value: attention(query, key, value, None, packed_seq_params=stream)


def _inputs(lengths: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value, and the gradient of the output: the same numbers, which bfloat16 has, in either dtype."""
    device, generator = get_accelerator().current_device(), torch.Generator().manual_seed(0)
    shapes = [(HEADS, HEAD_DIM), (GROUPS, HEAD_DIM), (GROUPS, HEAD_DIM), (HEADS * HEAD_DIM,)]
    made = [torch.randn(sum(lengths), *shape, generator=generator).bfloat16().to(device, dtype) for shape in shapes]
    return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(made)]


def _results(attend: Attend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value."""
    *inputs, gradient = inputs
    output = attend(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def furthest(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest number of its tensor."""
    shares = [
        (one.float() - other.float()).abs().max() / other.abs().max()
        for one, other in zip(found, expected, strict=True)
    ]
    return float(torch.stack(shares).max())


if __name__ == "__main__":
    sys.exit(main())
