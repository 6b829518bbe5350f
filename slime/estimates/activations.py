"""Bytes that one transformer layer keeps for its backward pass, per token of a packed stream.

The lists follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), adapted to the models that are built here: the
attention kernel keeps no score matrix (its quadratic term is gone; a number per token and head is left), keys and values have
fewer heads than queries, the MLP is gated, norms are RMSNorm, there is no dropout, experts see `topk` copies of a token, and
latent attention has its down- and up-projections.

It depends on the kernels which tensors are kept: fused ones keep their input, plain PyTorch operations every intermediate step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slime.estimates.layout import ParallelLayout
from slime.estimates.shape import LinearAttentionShape, MlaShape, ModelShape


class Kernels(StrEnum):
    """The kernels that compute a layer."""

    TRANSFORMER_ENGINE = "Transformer Engine"
    TORCH_CUDA = "PyTorch on CUDA"
    TORCH_CPU = "PyTorch on CPU"


@dataclass(frozen=True)
class Recompute:
    """Which activations are recomputed in the backward pass instead of being kept.

    granularity: None: none; "selective": those inside the `modules`; "full": those of whole layers.
    method: for "full". With "uniform" every `num_layers` layers of a model chunk are one unit; with "block" each of the first
        `num_layers` layers of a chunk is a unit, and the activations of the others are kept.
    distributed: the kept inputs of units are divided over tensor-parallel ranks.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)
    distributed: bool = False

    def drops(self, module: str) -> bool:
        """Whether a module's inside is computed again."""
        return self.granularity == "selective" and module in self.modules


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per token that a layer keeps, by part; `backward` is what its backward pass needs on top for a while."""

    norms_and_residual: float
    attention: float
    mlp: float
    backward: float

    @property
    def kept(self) -> float:
        return self.norms_and_residual + self.attention + self.mlp


class ActivationModel:
    """Activations of the layers of one model under one layout.

    Args:
        compute_bytes: bytes of one element of the compute dtype.
        delta_rule_kernels: kernels for 16 bits compute the gated delta rule, whichever `kernels` compute the rest.
        residual_bytes: bytes of one element of the residual stream; 0: as many as of the compute dtype.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: ParallelLayout,
        kernels: Kernels,
        compute_bytes: int,
        recompute: Recompute,
        *,
        delta_rule_kernels: bool,
        residual_bytes: int = 0,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.kernels = kernels
        self.bytes = compute_bytes
        self.residual_bytes = residual_bytes or compute_bytes
        self.recompute = recompute
        self.delta_rule_kernels = delta_rule_kernels

    def layer(self, index: int) -> LayerActivations:
        """The activations of decoder layer `index`; -1 means a layer of multi-token prediction."""
        experts = self.shape.has_experts(index)
        mlp, hidden_gradient = self._experts() if experts else self._mlp(self.shape.ffn_hidden_size, "mlp")
        return LayerActivations(
            norms_and_residual=self._norms_and_residual(),
            attention=self._attention(index),
            mlp=mlp,
            # While the MLP is differentiated: the gradients of its two inner products, and the gradient of the residual.
            backward=hidden_gradient + self.hidden,
        )

    def shared(self, layers: Sequence[int]) -> float:
        """Bytes per token that these layers of one pass keep in common: the cosines and sines that rotate queries and keys.
        Layers of multi-token prediction (-1) use those of the decoder."""
        if self.shape.mla is not None or self.kernels is Kernels.TRANSFORMER_ENGINE:
            return 0.0
        rotate = any(index >= 0 and not self.shape.has_linear_attention(index) for index in layers)
        return self.bytes * 2 * self.shape.head_dim * rotate

    def kept(self, layers: Sequence[int]) -> float:
        """What these layers of one pass keep between forward and backward, if nothing is recomputed."""
        return sum(self.layer(index).kept for index in layers) + self.shared(layers)

    @property
    def hidden(self) -> float:
        """One hidden state, divided over tensor-parallel ranks with sequence parallelism."""
        return self.residual_bytes * self.shape.hidden_size / self._sequence_ranks

    @property
    def layer_input(self) -> float:
        """Bytes per token that are kept of a recomputed unit: its input."""
        if self.recompute.distributed:
            return self.residual_bytes * self.shape.hidden_size / self.layout.tensor
        return self.hidden

    def norm(self, width: float) -> float:
        """Bytes that a norm over `width` elements keeps, without its input, which another part counts."""
        return self.bytes * width

    @property
    def _sequence_ranks(self) -> int:
        return self.layout.tensor if self.layout.sequence_parallel else 1

    def _norms_and_residual(self) -> float:
        width = self.shape.hidden_size / self._sequence_ranks
        norms = 2 * self.norm(width) + self.shape.num_extra_norms * (self.norm(width) + self.bytes * width)
        if self.recompute.drops("layernorm"):
            norms = 0.0
        return norms + 2 * self.residual_bytes * width

    def _attention(self, index: int) -> float:
        if self.shape.has_linear_attention(index):
            return self._linear_attention(self.shape.linear_attention)
        if self.shape.mla is not None:
            return self._latent_attention(self.shape.mla) + self._chosen_keys(index) + self._learning(index)
        shape, tensor = self.shape, self.layout.tensor
        query, key = shape.query_width / tensor, max(shape.key_width / tensor, shape.head_dim)
        gate = query if shape.attention_output_gate else 0.0
        # The projection is kept, since the values and the inputs of norms are views of it. PyTorch's kernel on CUDA copies the
        # values, so that without norms the projection is freed; but a recomputed kernel is called with the values once more.
        elements = query + gate + 2 * key
        if shape.num_query_groups < tensor:
            # Ranks that share a group gather the projections of all, and what a rank takes of them is a view of the whole.
            elements = shape.query_width + gate * tensor + 2 * shape.key_width
        copies = self.kernels is Kernels.TORCH_CUDA and not self.recompute.drops("core_attn")
        if copies and shape.qk_norm is None:
            elements = gate
        kept = 0.0
        if shape.qk_norm is not None:
            kept += self._query_key_norm(query, key)
        elements += query + key  # rotated
        elements += 2 * gate  # its sigmoid, and the product
        return kept + self.bytes * elements + self._core_attention(query, key, shape.num_attention_heads / tensor)

    def _query_key_norm(self, query: float, key: float) -> float:
        # The outputs are rotated at once, and not kept. The inputs are views of the projection, except that the queries of
        # several groups are not contiguous there and are copied.
        return self.bytes * query if key > self.shape.head_dim else 0.0

    def _core_attention(self, output_width: float, value_width: float, heads: float) -> float:
        """Bytes of the kernel's output, which is the input of the projection, and of the logarithm of each row's sum."""
        output = self.bytes * output_width
        inside = 4.0 * heads
        if self.kernels is Kernels.TORCH_CPU:
            inside += output  # one tensor per sequence; the output is their concatenation
        elif self.kernels is Kernels.TORCH_CUDA or self.shape.mla is not None:
            # Latent attention uses this kernel even where Transformer Engine computes the rest. The kernel needs contiguous
            # values. Under context parallelism they are a copy of all rows that the rank's two chunks of a sequence attend to,
            # which are parts + 1/2 times as many as its own rows; so are the keys, which replace its own.
            parts = self.layout.context
            inside += self.bytes * value_width * (1 if parts == 1 else 2 * parts)
        return output if self.recompute.drops("core_attn") else output + inside

    def _latent_attention(self, mla: MlaShape) -> float:
        """DeepSeek-V2 (arXiv 2405.04434, section 2.1)."""
        rows = self._sequence_ranks
        heads = self.shape.num_attention_heads / self.layout.tensor
        query, value = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim), heads * mla.v_head_dim
        again, up_again = self.recompute.drops("core_attn"), self.recompute.drops("mla_up_proj")
        # At first every rank has the latent vectors of all rows. With sequence parallelism its own rows are then a copy of the
        # latent vectors of keys and values, but only a view of those of queries, which keeps all rows of these.
        elements = mla.kv_lora_rank / rows if rows > 1 else 0.0
        if rows == 1 or up_again:
            elements += mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        elements += mla.q_lora_rank or 0
        kept = 0.0
        if self.shape.qk_norm is not None:
            kept += self.norm((mla.kv_lora_rank + (mla.q_lora_rank or 0)) / rows)
        if not up_again:
            # Queries and keys are kept with their rotated part joined on, and cosines and sines of both; the projections are
            # not.
            elements += 2 * query + 4 * mla.qk_pos_emb_head_dim
            # On CUDA the kernel gets a copy of the values that is as wide as the keys: `_core_attention` counts it.
            elements += value if again or self.kernels is Kernels.TORCH_CPU else 0.0
        elif self.kernels is Kernels.TORCH_CPU and not again and value < query:
            elements += 2 * query  # for values of another width PyTorch keeps scaled copies of queries and keys
        if self.kernels is not Kernels.TORCH_CPU and not again and value < query:
            elements += query  # the kernel's padded output, of which the width of the values is copied
        return kept + self.bytes * elements + self._core_attention(value, query, heads)

    def _chosen_keys(self, index: int) -> float:
        """Bytes of the keys that an indexer chooses, int32. Every tensor-parallel rank has all rows. Where all sequences are
        so short that nothing is chosen, less is kept than this."""
        return 4.0 * self.shape.mla.indexer.topk if self.shape.has_indexer(index) else 0.0

    def _learning(self, index: int) -> float:
        """Bytes that an indexer keeps if it is trained: the gradients of its queries, their weights in float32, and the keys of
        all context-parallel ranks; keys before their norm, with its mean and deviation in float32; cosines and sines of
        queries and of keys. With sequence parallelism a rank has a part of the rows, and of keys all gradients."""
        if not (self.shape.trains_indexers and self.shape.has_indexer(index)):
            return 0.0
        indexer, rotated = self.shape.mla.indexer, self.shape.mla.qk_pos_emb_head_dim
        elements = (indexer.num_heads + 1) * indexer.head_dim + 4 * rotated
        own = self.bytes * elements + 4.0 * (indexer.num_heads + 2)
        return own / self._sequence_ranks + self.bytes * indexer.head_dim * self.layout.context

    def shared_choice(self, index: int) -> float:
        """Bytes per token that are kept of a recomputed layer beside its input: the keys that it chooses, if the next layer
        uses them too."""
        is_shared = index + 1 < self.shape.num_layers and not self.shape.has_indexer(index + 1)
        return self._chosen_keys(index) if is_shared else 0.0

    def _linear_attention(self, linear: LinearAttentionShape) -> float:
        """Gated delta net (arXiv 2412.06464); tensor-parallel ranks share its heads.

        For a rank's own rows are kept: the projection, and the steps of the gated norm. For the rows of all context-parallel
        ranks, since each rank computes the whole stream: queries, keys and values before and after their convolution, decay and
        rate, and the tensors of the delta rule. With kernels these are the values, the normalised queries and keys, once per
        value head, and a matrix of each chunk of 64 tokens. PyTorch keeps the inputs of its chunks, in float32: per key head
        the queries and keys as they are normalised and cut into chunks, and their products; per value head the two sides of the
        triangular system and its solution, four matrices of a chunk, its input and output, what it writes, and states.
        """
        mixed = 2 * linear.key_width + linear.value_width
        chunk, values = 64, linear.num_value_heads
        keys = values * linear.key_head_dim
        own = self.bytes * (mixed + 3 * linear.value_width + 2 * values) + 4.0 * 4 * linear.value_width
        whole = self.bytes * 2 * mixed + 4.0 * 8 * values
        if self.delta_rule_kernels and self.bytes == 2:
            whole += self.bytes * (linear.value_width + 2 * keys + chunk * values)
        else:
            in_chunks = 5 * linear.key_width + 2 * chunk * linear.num_key_heads
            systems = 5 * keys + 3 * linear.value_width + 4 * chunk * values
            states = 2 * linear.value_width + 2 * keys * linear.value_head_dim / chunk
            whole += 4.0 * (in_chunks + systems + states)
        return (own + self.layout.context * whole) / self.layout.tensor

    def _mlp(self, width: float, module: str) -> tuple[float, float]:
        """(kept, gradients on the way back) of an MLP with inner width `width`, divided over tensor-parallel ranks."""
        width /= self.layout.tensor
        inner = self._inner_elements() * self.bytes * width
        if self.recompute.drops(module):
            return 0.0, inner + 2 * self.bytes * width
        return inner, 2 * self.bytes * width

    def _inner_elements(self) -> int:
        """How many tensors of the inner width are kept: the first projection (two with a gate), and those of the activation."""
        if not self.shape.gated_mlp:
            return 2
        # Plain PyTorch keeps SiLU(gate) and a copy of the other half beside their product.
        return 3 if self.kernels is Kernels.TRANSFORMER_ENGINE else 5

    def _experts(self) -> tuple[float, float]:
        """Routed experts at balanced routing, router and shared expert; (kept, gradients on the way back)."""
        moe, layout = self.shape.moe, self.layout
        shared, shared_back = self._mlp(moe.shared_ffn_hidden_size, "shared_experts")
        # Every tensor-parallel rank routes its part of the tokens. Ranks that share an expert get each other's tokens too.
        copies = moe.topk * layout.expert_tensor / layout.tensor
        width = moe.ffn_hidden_size / layout.expert_tensor
        inner = self._inner_elements() + 1  # the product with the router's probability
        if self.recompute.drops("moe_act"):
            inner -= 2
        routed = self.bytes * copies * (self.shape.hidden_size + inner * width)
        routed_back = self.bytes * copies * 2 * width
        router = (
            4.0 * 3 * moe.num_experts / self._sequence_ranks + 12.0 * moe.topk
        )  # float32 scores, probabilities, map
        if self.recompute.drops("moe"):
            return router, routed + shared + max(routed_back, shared_back)
        return routed + shared + router, max(routed_back, shared_back)


def kept_of_chunks(model: ActivationModel, chunks: Iterable[Sequence[int]]) -> float:
    """Bytes per token that the layers of one stage keep between forward and backward, recomputation taken into account.

    Args:
        chunks: decoder layers of each model chunk; a layer of multi-token prediction (-1) is a chunk of its own.
    """
    kept = 0.0
    for chunk in chunks:
        units = recomputed_units(model.recompute, chunk)
        again = {index for unit in units for index in unit}
        kept += len(units) * model.layer_input + model.kept([index for index in chunk if index not in again])
        kept += sum(model.shared_choice(index) for index in chunk if index in again)
    return kept


def backward_working_set(model: ActivationModel, chunks: Iterable[Sequence[int]]) -> float:
    """Bytes per token that the backward pass of the costliest unit of these chunks needs on top of `kept_of_chunks`."""
    chunks = list(chunks)
    found = [model.layer(index) for chunk in chunks for index in chunk]
    if not found:
        return 0.0
    gradients = max(layer.backward for layer in found)
    units = [unit for chunk in chunks for unit in recomputed_units(model.recompute, chunk)]
    if not units:
        # The layer has freed at least one hidden state by then.
        return gradients - model.hidden
    return max(model.kept(unit) for unit in units) + gradients


def recomputed_units(recompute: Recompute, chunk: Sequence[int]) -> list[Sequence[int]]:
    """Runs of layers of one model chunk of which only the input is kept."""
    if recompute.granularity != "full":
        return []
    if recompute.method == "block":
        return [(index,) for index in chunk[: recompute.num_layers]]
    size = recompute.num_layers
    return [chunk[start : start + size] for start in range(0, len(chunk), size)]
