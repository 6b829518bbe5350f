"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) over packed sequences, and the convolution before it.

Every head of a sequence has a state S, a matrix of keys by values that starts at zero. With decay exp(g_t) and rate β_t

    S_t = exp(g_t) S_(t-1) + k_t β_t (v_t − exp(g_t) S_(t-1)ᵀ k_t)ᵀ,        o_t = S_tᵀ q_t / sqrt(width of a key)

where queries and keys have length 1. Here it is computed in PyTorch by chunks (section 3.3 of the paper). Within a chunk of C
tokens, with G the running sum of g, the values that are really written solve a triangular system,

    (I + β ⊙ [e^(G_i − G_j) k_i·k_j, j < i]) (U, W) = β ⊙ (V, e^G K),        written = U − W S,
    O = (e^G Q) S + [e^(G_i − G_j) q_i·k_j, j ≤ i] written,        S' = e^(G_C) S + (e^(G_C − G) K)ᵀ written.

The chunks of all sequences are computed at once; only the states go from chunk to chunk, those of all sequences side by side. A
chunk has tokens of one sequence only, and its padding, rows of zeros without decay, changes no state. So sequences never mix.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F

from slime.models.qwen import DELTA_RULE_PACKAGES
from slime.training.packed_stream import PackedStream
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError

CHUNK = 64
# The same as in the kernels.
_NORM_EPSILON = 1e-6
logger = logging.getLogger(__name__)
# [T, key heads, width], the same, [T, value heads, width], [T, value heads], the same -> [T, value heads, width]
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "Sequences"], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where the sequences of a stream of T rows lie: one after the other, with `lengths` that are above 0 and sum up to T."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """Cumulative lengths, int64 [sequences + 1]."""
        return self._on_device(torch.tensor([0, *itertools.accumulate(self.lengths)]))

    def spread(self, gap: int) -> torch.Tensor:
        """The places of the rows if `gap` rows are put before every sequence, int64 [T]."""
        return torch.arange(sum(self.lengths), device=self.device) + gap * self._number

    @cached_property
    def _number(self) -> torch.Tensor:
        """The number of each row's sequence, counted from 1."""
        numbers = torch.arange(1, len(self.lengths) + 1)
        counts = torch.tensor(self.lengths)
        return self._on_device(numbers.repeat_interleave(counts, output_size=sum(self.lengths)))

    @cached_property
    def waves(self) -> list[int]:
        """How many sequences have a first chunk, a second one, and so on."""
        chunks = [-(-length // CHUNK) for length in self.lengths]
        return [sum(count > number for count in chunks) for number in range(max(chunks))]

    @cached_property
    def chunk_rows(self) -> torch.Tensor:
        """The row at each place of each chunk, T if there is none, int64 [chunks · CHUNK]: all first chunks, all second ones, …

        Sequences are in the order of their lengths, the longest first, so that those with a further chunk come first.
        """
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths
        order = lengths.argsort(descending=True, stable=True)
        lengths, starts = lengths[order, None], starts[order, None]
        rows = []
        for number, count in enumerate(self.waves):
            within = number * CHUNK + torch.arange(CHUNK)
            rows.append(torch.where(within < lengths[:count], starts[:count] + within, sum(self.lengths)))
        return self._on_device(torch.cat(rows).flatten())

    @cached_property
    def places(self) -> torch.Tensor:
        """The inverse of `chunk_rows`: the place of each row in it, int64 [T]."""
        rows = sum(self.lengths)
        inverse = self.chunk_rows.new_empty(rows + 1)
        inverse[self.chunk_rows] = torch.arange(len(self.chunk_rows), device=self.device)
        return inverse[:rows]

    def _on_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.device, non_blocking=True)


# The layers of a model share them, and they are freed with the stream.
_OF_STREAM: weakref.WeakKeyDictionary[PackedStream, Sequences] = weakref.WeakKeyDictionary()


def sequences_of_stream(stream: PackedStream) -> Sequences:
    """The sequences of the whole stream, over all context-parallel ranks."""
    if stream not in _OF_STREAM:
        lengths = tuple(length for length in stream.sequence_lengths if length)
        _OF_STREAM[stream] = Sequences(lengths, stream.tokens.device)
    return _OF_STREAM[stream]


def causal_convolution(rows: torch.Tensor, weight: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """y_t = Σ_j weight_j · x_(t − width + 1 + j) of each channel, where x before the start of a sequence is 0.

    Args:
        rows: x, [T, channels].
        weight: [channels, 1, width].

    Returns:
        [T, channels]
    """
    gap = weight.shape[-1] - 1
    places = sequences.spread(gap)
    length = len(rows) + gap * len(sequences.lengths)
    spread = rows.new_zeros(length, rows.shape[1]).index_copy(0, places, rows)
    convolved = F.conv1d(spread.T[None], weight, groups=len(weight))[0].T
    return convolved.index_select(0, places - gap)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """The rule of this module's docstring in PyTorch, computed in float32, or in float64 if the input is.

    Args:
        query, key: [T, key heads, width], of any length, since they are scaled to length 1.
        value: [T, value heads, width]; the value heads of a key head are next to each other.
        decay, rate: g ≤ 0 and β, [T, value heads].

    Returns:
        [T, value heads, width of a value], in the dtype of `value`.
    """
    given, groups = value.dtype, key.shape[1]
    dtype = torch.promote_types(given, torch.float32)
    query, key = (_chunks(_unit(rows.to(dtype)), sequences).movedim(1, -2).unsqueeze(2) for rows in (query, key))
    query = query * query.shape[-1] ** -0.5
    # [chunks, key heads, values of a key head, CHUNK, …] from here on.
    value, decay, rate = (
        _chunks(rows.to(dtype).unflatten(1, (groups, -1)), sequences) for rows in (value, decay, rate)
    )
    value, decay, rate = value.movedim(1, -2), decay.movedim(1, -1), rate.movedim(1, -1)
    # The sum of all up to each; `cumsum` of floats has no deterministic kernel on GPUs (--deterministic-mode).
    total = decay @ torch.ones(CHUNK, CHUNK, dtype=dtype, device=key.device).triu()
    between = total[..., :, None] - total[..., None, :]
    below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril(-1)
    diagonal = torch.eye(CHUNK, dtype=torch.bool, device=key.device)
    between = between.masked_fill(~(below | diagonal), -torch.inf).exp()
    system = (rate[..., None] * between * (key @ key.mT)).masked_fill(~below, 0)
    right = rate[..., None] * torch.cat([value, total.exp()[..., None] * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within = between * (query @ key.mT)
    entering = total.exp()[..., None] * query
    leaving = (total[..., -1:] - total).exp()[..., None] * key
    of_waves = (
        tensor.split(sequences.waves) for tensor in (written, read, within, entering, leaving, total[..., -1].exp())
    )
    outputs, state = [], None
    for written, read, within, entering, leaving, kept in zip(*of_waves, strict=True):
        if state is None:
            outputs.append(within @ written)
            state = leaving.mT @ written
            continue
        state = state[: len(written)]
        new = written - read @ state
        outputs.append(entering @ state + within @ new)
        state = kept[..., None, None] * state + leaving.mT @ new
    # [chunks, CHUNK, heads, width]
    in_chunks = torch.cat(outputs).flatten(1, 2).transpose(1, 2)
    return in_chunks.flatten(0, 1).index_select(0, sequences.places).to(given)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def _chunks(rows: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """[T, …] -> [chunks, CHUNK, …]; places without a row are 0."""
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return padded.index_select(0, sequences.chunk_rows).unflatten(0, (-1, CHUNK))


def rule_of(args: Any) -> Rule:
    """The function that computes the rule: on a GPU the kernel of `--qwen-gdn-backend`, otherwise PyTorch's operations. These
    also do, with a warning, if the flag was not typed and its package is missing.

    Raises:
        UserError: the flag was typed, but its package is not installed or lacks the function.
    """
    if get_accelerator().name == "cpu":
        return gated_delta_rule
    module, package = DELTA_RULE_PACKAGES[args.qwen_gdn_backend]
    try:
        kernel = importlib.import_module(module).chunk_gated_delta_rule
    except (ImportError, AttributeError) as error:
        if "qwen_gdn_backend" in args.typed_flags:
            raise UserError(
                f"--qwen-gdn-backend {args.qwen_gdn_backend} needs the package {package} (module {module}), which has no "
                f"chunk_gated_delta_rule to import here ({error}); install it, or leave the flag out: PyTorch's own operations "
                "do the work then"
            ) from error
        _warn_once(
            f"the kernels of --qwen-gdn-backend {args.qwen_gdn_backend} do not import here ({error}): PyTorch's own operations "
            f"compute the gated delta rule, slower and with more memory; install {package}"
        )
        return gated_delta_rule

    def rule(query, key, value, decay, rate, sequences: Sequences) -> torch.Tensor:
        if value.dtype == torch.float32:
            # The kernels are for 16-bit types.
            return gated_delta_rule(query, key, value, decay, rate, sequences)
        # Some versions of the kernels cannot share a key head among several value heads, and none checks it, so heads repeat.
        query, key = (rows.repeat_interleave(value.shape[1] // key.shape[1], dim=1) for rows in (query, key))
        stream = (tensor[None].contiguous() for tensor in (query, key, value))
        output, _ = kernel(
            *stream,
            g=decay[None],
            beta=rate[None],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=sequences.boundaries,
        )
        return output[0]

    return rule


@cache
def _warn_once(message: str) -> None:
    """Log a warning once, although a model is built in several chunks."""
    logger.warning(message)
