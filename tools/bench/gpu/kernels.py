"""The kernels of a training step on one GPU, beside those of torch: log-probs with entropy, and attention over packed samples.

    python tools/bench/gpu/kernels.py [--tokens 8192] [--repeats 20]
    python tools/bench/gpu/kernels.py --device cpu --tiny

All times are of forward and backward. Log-probs: the contenders of `tools/bench/bench_log_probs.py`, on the logits of a Qwen3
micro-batch; `F.cross_entropy` computes no entropy. Attention: `PackedAttention`, which the local layers use, beside one call of
`F.scaled_dot_product_attention` per sample, with the heads of Qwen3 0.6B and 1.7B. The table has the difference of their
results, beside the difference of torch's own from float32. TFLOP/s count the causal half of forward and backward, without
recomputation. The same comparison with float32 is made for heads of other families: wide heads, keys that are wider than
values, and learnable sinks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import torch
import torch.nn.functional as F

from slime.estimates.flops import gqa_attention_flops
from slime.utils.device import get_accelerator
from tools.bench import bench_log_probs
from tools.bench.gpu.common import TERA, Report, alone, best_seconds, make_parser, run
from tools.published_models import DENSE

LOG_PROBS_TARGET = 1.0
_CONFIG = DENSE["qwen3-0.6B"]
HEADS, GROUPS, HEAD_DIM = _CONFIG["num_attention_heads"], _CONFIG["num_key_value_heads"], _CONFIG["head_dim"]
_TINY_TOKENS, _TINY_VOCABULARY = 64, 1024
# Numbers of samples in a packed stream, all of one length.
_SAMPLES = (1, 4, 32)
# Lengths of samples that fit no block of a kernel.
_UNEVEN, _TINY_UNEVEN = (1, 63, 700, 1285), (1, 5, 20)

# Takes queries, keys and values of a packed stream, and sinks if the heads have them; returns the output of every query.
Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Heads:
    """The heads of a rank's attention: number of query heads, number of key/value groups, channels of a key and of a value.
    With `sinks` every head has a logit that takes part in its softmax."""

    heads: int
    groups: int
    key: int
    value: int
    sinks: bool = False


QWEN3 = Heads(HEADS, GROUPS, HEAD_DIM, HEAD_DIM)
# The shapes of published models of other families, with at most 16 heads.
OTHERS = {
    "qwen3_next": Heads(16, 2, 256, 256),
    "deepseek_v3": Heads(16, 16, 192, 128),
    "glm4_moe": Heads(12, 1, 128, 128),
    "gpt_oss": Heads(16, 2, 64, 64, sinks=True),
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    return run(measure, parser)


def measure(options: argparse.Namespace) -> Report:
    """Measure log-probs, then attention."""
    tokens = _TINY_TOKENS if options.tiny else options.tokens
    repeats = 1 if options.tiny else options.repeats
    log_probs = _log_probs(options, tokens, repeats)
    attention = [row for samples in _SAMPLES for row in _attention(tokens, samples, repeats)]
    uneven = _TINY_UNEVEN if options.tiny else _UNEVEN
    attention += [row for family, heads in OTHERS.items() for row in _of_heads(family, heads, uneven)]
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
    kernel = f"attention, {samples} x {lengths[0]}"
    rows, calls = _beside_float32(kernel, QWEN3, lengths)
    best = best_seconds(calls, repeats)
    flops = attention_flops(lengths)
    first = best.get("scaled_dot_product_attention")
    for name, seconds in best.items():
        rows[name] |= {
            "ms": 1e3 * seconds,
            "ratio": None if first is None else seconds / first,
            "TFLOP/s": flops / seconds / TERA,
        }
    return list(rows.values())


def _of_heads(family: str, heads: Heads, lengths: Sequence[int]) -> list[dict[str, Any]]:
    with alone():
        rows, calls = _beside_float32(f"attention, {family}", heads, lengths)
        for name, seconds in best_seconds(calls, 1).items():
            rows[name]["ms"] = 1e3 * seconds
    return list(rows.values())


def _beside_float32(
    kernel: str, heads: Heads, lengths: Sequence[int]
) -> tuple[dict[str, dict[str, Any]], dict[str, Callable[[], Any]]]:
    """Returns (rows with the differences of torch's attention and ours from float32, calls of those that run), by contender."""
    inputs = _inputs(lengths, torch.bfloat16, heads)
    reference = _results(with_all_heads(per_sample(lengths)), _inputs(lengths, torch.float32, heads))
    contenders: dict[str, Callable[[], Attend]] = {
        "scaled_dot_product_attention": lambda: per_sample(lengths),
        "PackedAttention": lambda: ours(lengths, heads),
    }
    rows, calls = {}, {}
    for name, made in contenders.items():
        row: dict[str, Any] = {"kernel": kernel, "contender": name, "ms": None, "ratio": None}
        try:
            attend = made()
            row["furthest from float32"] = furthest(_results(attend, inputs), reference)
            row["remark"] = None
        except (RuntimeError, TypeError) as error:
            # Versions of torch differ in the inputs that their kernels take. A contender that does not run shows its error.
            row["remark"] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            calls[name] = lambda attend=attend: _results(attend, inputs)
        rows[name] = row
    own, torchs = (
        rows[name].get("furthest from float32") for name in ("PackedAttention", "scaled_dot_product_attention")
    )
    if own is not None and torchs is not None and not own <= 2 * torchs:
        rows["PackedAttention"]["remark"] = "its results are far apart from torch's"
    return rows, calls


def attention_flops(lengths: Sequence[int]) -> int:
    """The FLOPs of forward and backward of the attention core, without projections, over samples of these lengths."""
    per_pair = gqa_attention_flops(1, HEADS, GROUPS, HEAD_DIM).per_token_pair
    return 3 * per_pair * sum(length * length for length in lengths)


def per_sample(lengths: Sequence[int]) -> Attend:
    """Calls torch's own attention for every sample. A sink becomes a first key of zeros, whose score is a bias."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None):
        pieces = zip(
            *(tensor.transpose(0, 1).split(list(lengths), dim=1) for tensor in (query, key, value)), strict=True
        )
        outputs = [_of_sample(*(piece[None] for piece in sample), sinks) for sample in pieces]
        return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)

    return attend


def _of_sample(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0]
    length = query.shape[2]
    hidden = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device).triu(1)
    bias = torch.cat([sinks[:, None, None].expand(-1, length, 1), hidden.expand(len(sinks), -1, -1)], dim=-1)
    key, value = (F.pad(tensor, (0, 0, 1, 0)) for tensor in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None], enable_gqa=True)[0]


def with_all_heads(attend: Attend) -> Attend:
    """`attend` with a key and a value for every query head: in float32, torch has no kernel for a GPU that shares keys among
    heads and makes no score matrix."""

    def attend_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sinks: torch.Tensor) -> torch.Tensor:
        shares = query.shape[1] // key.shape[1]
        return attend(query, *(tensor.repeat_interleave(shares, dim=1) for tensor in (key, value)), *sinks)

    return attend_all


def ours(lengths: Sequence[int], heads: Heads = QWEN3) -> Attend:
    """The attention of the local layers, with the trainer's description of a packed stream. Sinks only work within `alone`."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.attention import PackedAttention, packed_seq_params
    from slime.training.packed_stream import pack_stream

    config = TransformerConfig(
        num_layers=1, hidden_size=heads.heads * heads.key, num_attention_heads=heads.heads,
        num_query_groups=heads.groups, kv_channels=heads.key, attention_dropout=0.0, params_dtype=torch.bfloat16,
    )  # fmt: skip
    device = get_accelerator().current_device()
    samples = [torch.zeros(length, dtype=torch.int64, device=device) for length in lengths]
    stream = pack_stream(samples, [min(1, length - 1) for length in lengths], 1)
    # Attention reads nothing of a micro-batch but its stream.
    packed = packed_seq_params(SimpleNamespace(stream=stream), by_position=True)
    own = (config, 1, AttnMaskType.causal, "self")
    if not heads.sinks:
        attention = PackedAttention(*own)
        return lambda query, key, value: attention(query, key, value, None, packed_seq_params=packed)
    from megatron.core import parallel_state

    from slime_plugins.models.learnable_softmax_attention import LearnableSoftmaxAttention

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(get_accelerator().process_group_backend)
        parallel_state.initialize_model_parallel()
    attention = LearnableSoftmaxAttention(*own).to(device)
    return lambda query, key, value, sinks: torch.func.functional_call(
        attention, {"softmax_offset": sinks}, (query, key, value, None), {"packed_seq_params": packed}
    )


def _inputs(lengths: Sequence[int], dtype: torch.dtype, heads: Heads) -> list[torch.Tensor]:
    """Query, key, value, sinks if the heads have them, and the gradient of the output. All numbers are exact in bfloat16, so
    both dtypes get the same ones."""
    device, generator = get_accelerator().current_device(), torch.Generator().manual_seed(0)
    rows = sum(lengths)
    shapes = [(rows, heads.heads, heads.key), (rows, heads.groups, heads.key), (rows, heads.groups, heads.value)]
    shapes += [(heads.heads,)] * heads.sinks + [(rows, heads.heads * heads.value)]
    made = [torch.randn(shape, generator=generator).bfloat16().to(device, dtype) for shape in shapes]
    return [*(tensor.requires_grad_() for tensor in made[:-1]), made[-1]]


def _results(attend: Attend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output, and the gradients of all inputs."""
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
