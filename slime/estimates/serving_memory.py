"""Memory of one GPU of an inference engine, from plain numbers: weights and key/value cache.

An engine takes `mem_fraction_static` of the GPU for both, and the cache gets what the weights leave. Of a model with linear
attention it shares this room with a pool of states. The rest of the GPU is for activations and graphs.

The size of a weight follows from the `quantization_config` of the served checkpoint: the bits of a quantised weight, and its
part of a scale. Modules that the checkpoint leaves unquantised are found layer by layer, by the name of one projection of each
part. A format that is not known counts as not quantised, and `unknown_quantisation` names it.
"""

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from slime.estimates.parameters import LayerParameters, count_parameters
from slime.estimates.shape import ModelShape
from slime.utils.errors import UserError


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one element of a weight, scales included, by part; `rest`: vocabulary, norms and routers."""

    attention: float
    linear_attention: float
    dense_mlp: float
    shared_experts: float
    routed_experts: float
    rest: float

    @classmethod
    def everywhere(cls, size: float) -> Self:
        """The same size in all parts."""
        return cls(**{field.name: size for field in fields(cls)})


@dataclass(frozen=True)
class ServingSetup:
    """Engines of one kind.

    tensor, pipeline: parallel sizes; their product is the number of GPUs of an engine.
    attention_data: groups that each keep the cache of their own requests (data-parallel attention); 1: none.
    sharded_head: the output head is shared by all ranks of a stage; otherwise by those of one such group.
    cache_bytes: bytes of one element of the cache.
    static_fraction: share of the GPU for weights and cache; None: the cache takes the room of `max_total_tokens`.
    max_total_tokens: upper limit of the cache, in tokens; None: what fits.
    draft_layers: how many layers of multi-token prediction the engines draft with. They use the model's embedding and head, and
        each has a cache like that of a layer of the model.
    hands_over: caches leave the engine, for others or for the host. Then SGLang has room for an indexer's key in every layer.
    state_ratio: size of the pool of states of linear attention by that of the cache; 0: another number tells its size, which
        does not count.
    shared_whole, dense_whole: every rank has shared experts, or dense MLPs, whole.
    redundant_experts: copies of routed experts, in each layer that has any.
    """

    tensor: int
    pipeline: int
    attention_data: int
    weight_bytes: WeightBytes
    cache_bytes: float
    gpu_memory: int
    static_fraction: float | None
    max_total_tokens: int | None = None
    sharded_head: bool = True
    draft_layers: int = 0
    hands_over: bool = False
    state_ratio: float = 0.0
    shared_whole: bool = False
    dense_whole: bool = False
    redundant_experts: int = 0


@dataclass(frozen=True)
class ServingMemory:
    """Bytes of one GPU of an engine, on the pipeline stage that takes most.

    states: the pool of states of linear attention.
    reserve: left free beside weights and cache, for activations, graphs and communication.
    cache_bytes_per_token: bytes on this GPU for one token.
    group_tokens: tokens in the cache of one group of data-parallel attention, which has the whole of each of its requests.
    cache_tokens: tokens in the caches of all groups of the engine; 0: the weights do not fit.
    stage: the number of that stage.
    stage_totals: bytes of one GPU of each stage.
    """

    weights: int
    kv_cache: int
    states: int
    reserve: int
    cache_bytes_per_token: float
    group_tokens: int
    cache_tokens: int
    stage: int
    stage_totals: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.states + self.reserve


def serving_memory(shape: ModelShape, setup: ServingSetup) -> ServingMemory:
    """Memory of a GPU of an engine that serves a model of this shape.

    Raises:
        UserError: the groups of data-parallel attention do not divide the engine.
    """
    require_whole_groups(setup.tensor, setup.attention_data)
    stages = range(min(setup.pipeline, shape.num_layers))
    held = [(_weights(shape, setup, stage), _cache_bytes_per_token(shape, setup, stage)) for stage in stages]
    states = [0] * len(held)
    if setup.static_fraction is None:
        tokens, reserve = setup.max_total_tokens or 0, 0
    else:
        static = round(setup.gpu_memory * setup.static_fraction)
        reserve = setup.gpu_memory - static
        rooms = [max(static - weights, 0) for weights, _ in held]
        if any(map(shape.has_linear_attention, range(shape.num_layers))):
            states = [round(room * setup.state_ratio / (1 + setup.state_ratio)) for room in rooms]
        # All stages cache the same tokens: as many as have room on each.
        sizes = zip(rooms, states, held, strict=True)
        tokens = min((int((room - pool) / per_token) for room, pool, (_, per_token) in sizes if per_token), default=0)
        if setup.max_total_tokens is not None:
            tokens = min(tokens, setup.max_total_tokens)
    totals = tuple(
        weights + round(tokens * per_token) + pool + reserve
        for (weights, per_token), pool in zip(held, states, strict=True)
    )
    stage = max(stages, key=totals.__getitem__)
    weights, per_token = held[stage]
    return ServingMemory(
        weights=weights,
        kv_cache=round(tokens * per_token),
        states=states[stage],
        reserve=reserve,
        cache_bytes_per_token=per_token,
        group_tokens=tokens,
        cache_tokens=tokens * setup.attention_data,
        stage=stage,
        stage_totals=totals,
    )


def require_whole_groups(tensor: int, attention_data: int) -> None:
    """Require that an engine's tensor-parallel ranks can be divided into equal groups of data-parallel attention.

    Raises:
        UserError: they cannot; the message names sizes that would do.
    """
    if tensor % attention_data:
        raise UserError(
            f"--sglang-dp-size {attention_data} does not divide the engine's tensor-parallel size {tensor}; give "
            f"--sglang-dp-size 1 or --sglang-dp-size {tensor}"
        )


def served_bytes(shape: ModelShape, weight_bytes: WeightBytes) -> int:
    """Bytes of all weights of a model as an engine receives them."""
    counts = count_parameters(shape)
    layers = sum(_layer_bytes(layer, weight_bytes, _Ranks()) for layer in counts.layers)
    return round(layers + (counts.embedding + counts.output_head + counts.final_norm) * weight_bytes.rest)


def served_expert_bytes(shape: ModelShape, weight_bytes: WeightBytes) -> int:
    """How many of the `served_bytes` are those of routed experts."""
    return round(sum(layer.routed_experts for layer in count_parameters(shape).layers) * weight_bytes.routed_experts)


def _layers_of(shape: ModelShape, setup: ServingSetup, stage: int) -> range:
    """The layers of a pipeline stage as SGLang divides them: if they do not divide evenly, the last stages have one more."""
    each, more = divmod(shape.num_layers, setup.pipeline)
    starts = [number * each + max(0, number - (setup.pipeline - more)) for number in (stage, stage + 1)]
    return range(*starts)


def _weights(shape: ModelShape, setup: ServingSetup, stage: int) -> int:
    """Bytes of the weights of a rank of `stage`: the first stage has the embedding, the last one final norm and output head."""
    counts = count_parameters(replace(shape, mtp_num_layers=setup.draft_layers))
    attention_ranks, experts = (
        setup.tensor // setup.attention_data,
        shape.moe.num_experts if shape.moe is not None else 1,
    )
    ranks = _Ranks(
        attention_ranks,
        dense_mlp=1 if setup.dense_whole else setup.tensor,
        shared_experts=1 if setup.shared_whole else setup.tensor,
        routed_experts=setup.tensor * experts / (experts + setup.redundant_experts),
    )
    layers = sum(
        _layer_bytes(counts.layers[layer], setup.weight_bytes, ranks) for layer in _layers_of(shape, setup, stage)
    )
    # The projection of a layer that drafts is whole on each rank, and not quantised.
    layers += sum(
        (draft.projection + draft.norms) * setup.weight_bytes.rest
        + _layer_bytes(draft.layer, setup.weight_bytes, ranks)
        for draft in counts.mtp
    )
    vocabulary = 0.0
    if stage == 0:
        # A rank looks up the tokens of its own group.
        vocabulary += counts.embedding / attention_ranks
    if stage == min(setup.pipeline, shape.num_layers) - 1:
        # A tied head needs a copy of the embedding if that is on another stage.
        head = counts.output_head or (counts.embedding if stage > 0 else 0)
        vocabulary += head / (setup.tensor if setup.sharded_head else attention_ranks) + counts.final_norm
    return round(layers + vocabulary * setup.weight_bytes.rest)


@dataclass(frozen=True)
class _Ranks:
    """How many ranks divide each part of a layer; fewer than there are for experts of which there are copies."""

    attention: int = 1
    dense_mlp: int = 1
    shared_experts: int = 1
    routed_experts: float = 1.0


def _layer_bytes(layer: LayerParameters, size: WeightBytes, ranks: _Ranks) -> float:
    whole = layer.attention_replicated + layer.latent_projections + layer.indexer
    attention = (layer.attention / ranks.attention + whole) * size.attention
    linear = layer.linear_attention / ranks.attention * size.linear_attention
    dense, shared = layer.dense_mlp / ranks.dense_mlp, layer.shared_experts / ranks.shared_experts
    routed = layer.routed_experts / ranks.routed_experts * size.routed_experts
    mlp = dense * size.dense_mlp + shared * size.shared_experts + routed
    return attention + linear + mlp + (layer.router + layer.norms) * size.rest


def _cache_bytes_per_token(shape: ModelShape, setup: ServingSetup, stage: int) -> float:
    """Bytes of the keys and values of one token in the layers of one stage. Latent attention keeps its latent vector, on every
    rank, and each indexer a key in FP8 with a float32 scale for 128 channels. Beside an indexer a latent vector in FP8 has such
    scales too, and its part with the position has 16 bits; SGLang's kernels `trtllm`, its choice on Blackwell, keep less."""
    layers = _layers_of(shape, setup, stage)
    count = sum(not shape.has_linear_attention(layer) for layer in layers) + setup.draft_layers
    if shape.mla is not None:
        rank, position = shape.mla.kv_lora_rank, shape.mla.qk_pos_emb_head_dim
        if shape.mla.indexer is None:
            return count * (rank + position) * setup.cache_bytes
        scaled = rank + rank // 128 * 4 + 2 * position
        latent = count * (scaled if setup.cache_bytes == 1 else (rank + position) * setup.cache_bytes)
        choosing = sum(setup.hands_over or shape.has_indexer(layer) for layer in layers) + setup.draft_layers
        return latent + choosing * (shape.mla.indexer.head_dim + shape.mla.indexer.head_dim // 128 * 4)
    ranks = setup.tensor // setup.attention_data
    groups = max(1, -(-shape.num_query_groups // ranks))
    return count * 2 * groups * shape.head_dim * setup.cache_bytes


Config = dict[str, Any]


@dataclass(frozen=True)
class Quantisation:
    """Weights of `bits` bits, of which each `group` shares a scale of `scale_bytes`. A group of None is a whole row or more,
    and its scale does not count."""

    bits: int
    group: int | None = None
    scale_bytes: int = 2

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + (self.scale_bytes / self.group if self.group else 0.0)


_ROWS_OF_8 = Quantisation(8)
_NVFP4 = Quantisation(4, 16, 1)
# Formats whose name determines bits and group.
_FIXED = {
    "nvfp4": _NVFP4, "modelopt_fp4": _NVFP4, "petit_nvfp4": _NVFP4, "nvfp4_online": _NVFP4, "mxfp4": Quantisation(4, 32, 1),
    "mxfp8": Quantisation(8, 32, 1), "modelopt_fp8": _ROWS_OF_8, "w8a8_fp8": _ROWS_OF_8, "w8a8_int8": _ROWS_OF_8,
}  # fmt: skip
# Formats whose config has a number of bits (4 if it is missing) and a group size.
_INTEGERS = ("gptq", "gptq_marlin", "awq", "awq_marlin", "auto-round", "moe_wna16")
# Formats of 8 bits, which may have scales per block.
_BLOCKS = ("fp8", "blockwise_int8")
# How many bits the `format` of a compressed checkpoint means if no config group names a number.
_COMPRESSED_BITS = {"pack-quantized": 4, "int-quantized": 8, "float-quantized": 8, "naive-quantized": 8}
_NVFP4_COMPRESSED = "nvfp4-pack-quantized"
_NOT_QUANTISED = ("", "none", "dense", "unquant")
_LEFT_OUT = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude")
# The name of one projection of each part, in all its spellings: whether a part is quantised shows in it.
_PROJECTIONS = {
    "attention": ("self_attn.o_proj",),
    "linear_attention": ("linear_attn.out_proj",),
    "dense_mlp": ("mlp.down_proj",),
    "shared_experts": ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj"),
    "routed_experts": ("mlp.experts.0.down_proj",),
}


def served_weight_bytes(shape: ModelShape, plain: float, config: Config | None, method: str | None) -> WeightBytes:
    """Bytes of one weight by part, scales included.

    Args:
        plain: bytes of a weight that is not quantised.
        config: the checkpoint's `quantization_config`; None: it has none.
        method: `--sglang-quantization`, which is used if the checkpoint names no method.
    """
    found = quantisation_of(config, method)
    if found is None:
        return WeightBytes.everywhere(plain)
    shares = quantised_shares(shape, config)
    sizes = {part: (1 - share) * plain + share * found.bytes_per_weight for part, share in shares.items()}
    return WeightBytes(**sizes, rest=plain)


def quantised_shares(shape: ModelShape, config: Config | None) -> dict[str, float]:
    """Part of a layer -> the share of the layers in which a quantised checkpoint does not leave it as it is."""
    left_out = tuple(_left_out(config or {}))
    shares = {}
    for part, layers in _layers_by_part(shape).items():
        kept = sum(
            any(_names(entry, f"layers.{layer}.{name}") for entry in left_out for name in _PROJECTIONS[part])
            for layer in layers
        )
        shares[part] = 1 - kept / max(len(layers), 1)
    return shares


def quantisation_of(config: Config | None, method: str | None) -> Quantisation | None:
    """How matrices are stored; None if they are not quantised, or in a format that is not known."""
    config = config or {}
    name = _method(config, method)
    if name in _FIXED:
        return _FIXED[name]
    if name in _INTEGERS:
        return Quantisation(_number(config, "bits", "w_bit") or 4, _group(config, "group_size", "q_group_size"))
    if name in _BLOCKS:
        return _blocks(config.get("weight_block_size"))
    if name == "compressed-tensors":
        return max(_compressed(config), key=lambda group: group.bytes_per_weight, default=None)
    if name == "modelopt":
        return {"FP8": _ROWS_OF_8, "NVFP4": _NVFP4}.get(str(config.get("quant_algo", "FP8")).upper())
    if name == "bitsandbytes":
        return Quantisation(4, 64, 4) if config.get("load_in_4bit") else _ROWS_OF_8
    return None


def unknown_quantisation(config: Config | None, method: str | None) -> str | None:
    """The name of the checkpoint's format, as its config calls it, if it is one that is not known; else None."""
    config = config or {}
    name, form = _method(config, method), config.get("format") or config.get("quant_algo")
    if name in _NOT_QUANTISED or form in _NOT_QUANTISED or quantisation_of(config, method) is not None:
        return None
    return f"{name} ({form})" if form else name


def _method(config: Config, method: str | None) -> str:
    name = str(config.get("quant_method") or method or "").lower().removeprefix("intel/")
    return {"compressed_tensors": "compressed-tensors", "autoround": "auto-round"}.get(name, name)


def _compressed(config: Config) -> Iterator[Quantisation]:
    """How a compressed checkpoint stores weights, for each of its config groups; without groups, by its format and its own
    entries."""
    if config.get("format") == _NVFP4_COMPRESSED:
        yield _NVFP4
        return
    groups = config.get("config_groups")
    described = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else [config]
    for weights in described:
        bits = _number(weights or {}, "num_bits") or _COMPRESSED_BITS.get(str(config.get("format")))
        if weights and bits:
            blocks = weights.get("block_structure")
            yield _blocks(blocks) if blocks else Quantisation(bits, _group(weights, "group_size"))


def _blocks(size: Any) -> Quantisation:
    """8 bits, with a float32 scale for each block of `size` rows and columns, if `size` is a pair."""
    if not isinstance(size, list | tuple) or len(size) != 2:
        return _ROWS_OF_8
    return Quantisation(8, size[0] * size[1], 4)


def _group(config: Config, *names: str) -> int | None:
    """How many weights share a scale; None for a whole row, which configs write as -1 or 0."""
    size = _number(config, *names)
    return size if size is not None and size > 0 else None


def _number(config: Config, *names: str) -> int | None:
    found = (config[name] for name in names if isinstance(config.get(name), int))
    return next(found, None)


def _layers_by_part(shape: ModelShape) -> dict[str, list[int]]:
    layers = range(shape.num_layers)
    experts = [layer for layer in layers if shape.has_experts(layer)]
    linear = [layer for layer in layers if shape.has_linear_attention(layer)]
    return {
        "attention": [layer for layer in layers if layer not in linear],
        "linear_attention": linear,
        "dense_mlp": [layer for layer in layers if layer not in experts],
        "shared_experts": experts,
        "routed_experts": experts,
    }


def _left_out(config: Config) -> Iterator[str]:
    for key in _LEFT_OUT:
        entries = config.get(key)
        if isinstance(entries, list):
            yield from (entry for entry in entries if isinstance(entry, str))


def _names(entry: str, module: str) -> bool:
    """Whether an entry of a list of unquantised modules matches `module`, such as `layers.3.mlp.down_proj`. An entry is `re:`
    with a regular expression, a pattern with `*`, or whole components of the name. Where it names a `language_model`, that is
    the part of a model that also takes images, whose place depends on the version of transformers."""
    in_part = ("model.language_model.", "language_model.model.")
    modules = [prefix + module for prefix in (in_part if "language_model" in entry else ("model.",))]
    if entry.startswith("re:"):
        try:
            return any(re.match(entry.removeprefix("re:"), name) for name in modules)
        except re.error:
            return False
    if "*" in entry:
        return any(fnmatch.fnmatchcase(name, pattern) for name in modules for pattern in (entry, f"{entry}.*"))
    return any(f".{entry}." in f".{name}." for name in modules)
