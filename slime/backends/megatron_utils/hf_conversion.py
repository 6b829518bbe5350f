"""Conversion between Hugging Face checkpoints and Megatron models: one engine for all families.

The family (`slime.models`) says which tensors make up which parameter. Loading and exporting again gives the same bits.

Loading: a rank reads just the rows, columns and experts that it holds, and copies them into a parameter before it reads those
of the next one. So beside the model it needs memory only for the largest parameter. Names are compared first, and nothing is
loaded from a checkpoint whose names do not fit.

Exporting: the tensor-parallel ranks of a stage walk through its parameters in the same order, and gather one at a time. Each
of them gets every tensor, and drops it if it has no use for it. Expert-parallel ranks do the same: each walks through its own
experts, and one gather brings one expert of each rank, or of as many ranks as a bucket has room for. All ranks gather in one
order, so experts need neither buckets of their own nor a barrier before them. Tied embeddings are one parameter, which is
exported once, however many stages hold a copy. Layers for multi-token prediction are left out if the family's checkpoints have
none, or have some that are not trained here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments.config_files.role_config import CRITIC
from slime.arguments.hf_config import read_hf_config
from slime.models.families import FAMILIES, FAMILIES_BY_NAME, TRAINED_MODEL_TYPES, family_name
from slime.models.family import HEAD, Family, Rule, next_expert, strip_wrappers
from slime.models.tensor_layouts import Layout, TensorSizes
from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory
from slime.weights.quantised_checkpoint import open_checkpoint
from slime.weights.quantisers import moves_when_read, quantise_by_names

logger = logging.getLogger(__name__)

# (global name of a parameter, its weight, its rule, names of the HF tensors of which it is made).
Plan = list[tuple[str, torch.Tensor, Rule, tuple[str, ...]]]
NamedTensor = tuple[str, torch.Tensor]

_LISTED = 20


@torch.no_grad()
def load_hf_weights(
    args: Any,
    model_chunks: Iterable[torch.nn.Module],
    hf_dir: str | Path,
    put_copy: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> int:
    """Fill the parameters of `model_chunks` from the HF directory `hf_dir`, converted to the parameters' dtype.

    Args:
        put_copy: called with every parameter and its values before they are converted: in the dtype of the checkpoint, or in
            float32 if they are quantised.

    Collective over the ranks that hold one copy of the weights; all of them raise the same error.

    Returns:
        0, the iteration at which such a run starts.

    Raises:
        UserError: unsupported `model_type`; tensors missing or surplus (all are listed); a shape that the flags
        contradict; the weights are quantised in a way that is not known.
    """
    family = family_of_directory(hf_dir)
    source = open_checkpoint(hf_dir)
    if moves_when_read(hf_dir) and _speaks_for_its_stage():
        logger.warning(
            "%s: INT4 weights that are read and rounded again are not the same: the first push moves the largest of a "
            "group by up to a fifteenth; start from the checkpoint that it was made of (--ref-load), if you have it",
            hf_dir,
        )
    plan = _plan(family, model_chunks)
    needed = set().union(*_gather_from_parts({hf_name for *_, hf_names in plan for hf_name in hf_names}))
    _check_names(needed, source, family, hf_dir, args.role == CRITIC)
    untouched = [name for name in source.names() - needed if family.is_exported_as_stored(name, family.num_layers)]
    if untouched and dist.get_rank() == 0:
        logger.info(
            "%s: %d tensors (%s, …) are of parts that are not trained here; exports carry them as they are",
            hf_dir,
            len(untouched),
            min(untouched),
        )
    message = None
    try:
        _fill(plan, source, tensor_sizes(args), hf_dir, put_copy)
    except UserError as error:
        message = str(error)
    # Only ranks that hold a tensor see that it does not fit. All others must raise too, or they would wait for these.
    messages = [found for found in _gather_from_parts(message) if found is not None]
    if messages:
        raise UserError(messages[0])
    return 0


def family_of_directory(hf_dir: str | Path) -> Family:
    """The family of an HF model directory, by `model_type` in its config.json.

    Raises:
        UserError: no config, or the weights of its type are not converted.
    """
    config = read_hf_config(hf_dir, flag="checkpoint")
    model_type = config.get("model_type")
    if model_type not in TRAINED_MODEL_TYPES:
        raise UserError(f"{hf_dir}/config.json: model_type {model_type!r} is not one of {sorted(TRAINED_MODEL_TYPES)}")
    return FAMILIES[model_type].of_model(config["num_hidden_layers"])


def tensor_sizes(args: Any) -> TensorSizes:
    """The sizes of the run's model that the layouts of its tensors need."""
    return TensorSizes.of(vars(args))


def _fill(
    plan: Plan,
    source: SafetensorsDirectory,
    sizes: TensorSizes,
    hf_dir: str | Path,
    put_copy: Callable[[torch.Tensor, torch.Tensor], None] | None,
) -> None:
    narrowed, has_more_bits = [], False
    for name, parameter, rule, hf_names in plan:
        tensors = [source.tensor(hf_name) for hf_name in hf_names]
        shard = rule.layout.part(tensors, sizes, *tensor_place(rule))
        if shard.shape != parameter.shape:
            raise UserError(
                f"{hf_dir}: {', '.join(hf_names)} of shape {[list(tensor.shape) for tensor in tensors]} give "
                f"{list(shard.shape)} for {name}, but the model flags ask for {list(parameter.shape)}; make the shape flags "
                "agree with the checkpoint's config.json"
            )
        parameter.copy_(shard)
        has_more_bits |= shard.dtype.itemsize > parameter.dtype.itemsize
        if put_copy is not None:
            put_copy(parameter, shard)
        if parameter.dtype.itemsize < 4:
            # Quantised tensors are read as float32, but are not stored in it; they are not counted here.
            stored = ((hf_name, source.parts(hf_name).get(hf_name)) for hf_name in hf_names)
            narrowed += [hf_name for hf_name, tensor in stored if tensor is not None and tensor.dtype == torch.float32]
    if put_copy is not None and not has_more_bits and _speaks_for_its_stage():
        logger.warning(
            "--load-main-params-from-ckpt: %s has no weights in float32, of which the optimizer could make its copies",
            hf_dir,
        )
    elif narrowed and put_copy is None and _speaks_for_its_stage():
        logger.warning(
            "%s: %d tensors (%s, …) are stored in float32 and rounded to the 16 bits that the model is trained in",
            hf_dir,
            len(narrowed),
            min(narrowed),
        )


def keep_float32(args: Any, model: torch.nn.Module) -> None:
    """In a chunk of 16 bits, convert those parameters to float32 that engines and the tensors of `--hf-checkpoint` have in
    float32. They are then trained, pushed and exported without being rounded.

    Call it before the chunk gets its gradient buffers, and only if the optimizer takes both dtypes.
    """
    from slime.backends.megatron_utils.parameter_names import global_named_parameters
    from slime.backends.megatron_utils.value_head import is_value_head

    if args.hf_checkpoint is None:
        return
    family = family_of_run(args)
    # There may be no weights: a rehearsal needs none, nor does a run that continues from a checkpoint of its own.
    if not any(rule.keeps_float32 for rule in family.rules) or not any(Path(args.hf_checkpoint).glob("*.safetensors")):
        return
    source = SafetensorsDirectory(args.hf_checkpoint)
    stored = source.names()
    for name, parameter in global_named_parameters(model):
        if is_value_head(parameter) or family.leaves_out(name):
            continue
        rule, hf_names = family.find(name)
        if rule.keeps_float32 and stored.issuperset(hf_names):
            if all(source.tensor(hf_name).dtype == torch.float32 for hf_name in hf_names):
                parameter.data = parameter.data.float()


def tensor_place(rule: Rule) -> tuple[int, int]:
    """(this rank's place among the ranks over which a parameter is cut, their number)."""
    from megatron.core import parallel_state

    if rule.of_experts:
        return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _gather_from_parts(value: Any) -> list[Any]:
    """`value` of all ranks that hold different layers, or different experts. For small values only."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.schedules import gather_from_stages

    size = parallel_state.get_expert_model_parallel_world_size()
    of_experts: list[Any] = [value]
    if size > 1:
        of_experts = [None] * size
        dist.all_gather_object(of_experts, value, group=parallel_state.get_expert_model_parallel_group())
    return [found for of_stage in gather_from_stages(of_experts) for found in of_stage]


def expected_hf_names(hf_dir: str | Path, predictions: int = 0) -> set[str]:
    """Names of the tensors that the export of a model of this directory has: those on disk; a tied head, buffers without
    weights, and layers for multi-token prediction behind the first `predictions` left out.

    Raises:
        UserError: unsupported `model_type`, or no safetensors files.
    """
    names = SafetensorsDirectory(hf_dir).names()
    return names - family_of_directory(hf_dir).left_out(names, read_hf_config(hf_dir), predictions)


def _plan(family: Family, model_chunks: Iterable[torch.nn.Module]) -> Plan:
    from slime.backends.megatron_utils.parameter_names import global_named_weights
    from slime.backends.megatron_utils.value_head import is_value_head

    named = [item for chunk in model_chunks for item in global_named_weights(chunk)]
    # A checkpoint of a language model has no value head, and may have no layers for multi-token prediction. These keep their
    # initial weights.
    kept = [(name, parameter) for name, parameter in named if not is_value_head(parameter)]
    found = [(name, parameter, *family.find(name)) for name, parameter in kept if not family.leaves_out(name)]
    if len(found) < len(kept) and _speaks_for_its_stage():
        logger.info(
            "layers for multi-token prediction are not in this checkpoint and keep their weights, at first random ones"
        )
    return found


def _speaks_for_its_stage() -> bool:
    from megatron.core import parallel_state

    is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return is_first_replica and parallel_state.get_tensor_model_parallel_rank() == 0


def _check_names(
    needed: set[str], source: SafetensorsDirectory, family: Family, hf_dir: str | Path, is_critic: bool
) -> None:
    """Args: is_critic: the model has a head of its own, and predicts no tokens."""
    present = source.names()
    if is_critic:
        present = {name for name in present if name != HEAD and not family.is_prediction(name)}
    missing = sorted(needed - present)
    surplus = present - needed
    surplus = sorted(surplus - family.left_out(surplus, read_hf_config(hf_dir, flag="checkpoint")))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
        for what, names in (("missing", missing), ("not in the model", surplus))
        if names
    ]
    if problems:
        raise UserError(
            f"{hf_dir} does not fit the model flags (layers, tied or untied embeddings, biases, norms): "
            f"{'; '.join(problems)}"
        )


def names_of_stage(args: Any, model_chunks: Iterable[torch.nn.Module]) -> set[str]:
    """Global names of the parameters that this pipeline stage sends: those that it has and that no stage before it has.

    Collective over the pipeline group.
    """
    from megatron.core import parallel_state

    chunks = _named_chunks(model_chunks)
    own_stage = parallel_state.get_pipeline_model_parallel_rank()
    return {name for _, stage, name, _ in _parameters_in_order(chunks, family_of_run(args)) if stage == own_stage}


@torch.no_grad()
def iter_stage_named_tensors(
    args: Any, model_chunks: Iterable[torch.nn.Module], names: set[str]
) -> Iterator[NamedTensor]:
    """Yield (HF name, tensor) for the parameters `names` of this stage, in the order of the model. Collective over the
    tensor-parallel group, and over the ranks that share the experts. All stages together, each with its `names_of_stage`,
    yield the whole model. Experts are gathered in groups of at most `--update-weight-buffer-size` bytes, or one at a time.

    Tensors are whole, contiguous, detached, on the parameters' device and in their dtype, without vocabulary padding.
    They may share memory with the model: use or copy them before the next optimizer step.
    """
    family, sizes = family_of_run(args), tensor_sizes(args)
    for chunk in _named_chunks(model_chunks):
        for name, parameter in chunk.items():
            if name in names:
                yield from _gathered(args, family, sizes, name, parameter.detach())


def names_of_experts(args: Any, names: Iterable[str]) -> set[str]:
    """Those of the global `names` that are of experts."""
    family = family_of_run(args)
    return {name for name in names if family.find(name)[0].of_experts}


@torch.no_grad()
def own_expert_tensors(
    args: Any, model_chunks: Iterable[torch.nn.Module], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """HF name → tensor of this rank's experts among the parameters `names`, if it has them whole. The tensors are views of the
    model's memory, as a rule."""
    family, sizes = family_of_run(args), tensor_sizes(args)
    experts = names_of_experts(args, names)
    return {
        hf_name: tensor
        for chunk in _named_chunks(model_chunks)
        for name, parameter in chunk.items()
        if name in experts
        for hf_name, tensor in _to_hf(family, sizes, name, parameter.detach())
    }


def convert_to_hf(
    args: Any, model_name: str, name: str, param: torch.Tensor, quantization_config: dict[str, Any] | None = None
) -> list[NamedTensor]:
    """Translate one whole Megatron parameter (gathered over tensor-parallel ranks, vocabulary padding or not).

    Args:
        model_name: decides the family ("qwen3", "Qwen3ForCausalLM", ...).
        name: the parameter's global name; `module.` prefixes are allowed.
        quantization_config: that in the `config.json` of a quantised checkpoint: the result is then as in such a checkpoint,
            FP8 or INT4 with scales. Together with the tensors' names it says which ones are quantised: matrices of attention
            and of dense and expert layers.

    Raises:
        UserError: unknown family, or a `quantization_config` that is not known here.
        KeyError: the family has no such parameter.
    """
    converted = _to_hf(_trained_family(model_name).of_model(args.num_layers), tensor_sizes(args), name, param)
    if quantization_config:
        converted = quantise_by_names(converted, quantization_config, "convert_to_hf")
    return list(converted)


def remove_padding(name: str, param: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The parameter without the padding rows of the vocabulary, if `name` is the embedding or the output layer."""
    if strip_wrappers(name) in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return param[:vocab_size]
    return param


def family_of_run(args: Any) -> Family:
    """The family by whose rules weights get their names: that of `--model-name`, else that of `--hf-checkpoint`.

    Raises:
        UserError: nothing names a family, or its weights are not converted.
    """
    if args.model_name:
        return _trained_family(args.model_name).of_model(args.num_layers)
    return family_of_directory(args.hf_checkpoint)


def _trained_family(model_name: str) -> Family:
    name = family_name(model_name)
    if name is None or not FAMILIES_BY_NAME[name].is_trained:
        supported = sorted(TRAINED_MODEL_TYPES)
        raise UserError(f"--model-name {model_name}: no conversion for this family; supported: {supported}")
    return FAMILIES_BY_NAME[name]


def _to_hf(family: Family, sizes: TensorSizes, name: str, whole: torch.Tensor) -> Iterator[NamedTensor]:
    rule, hf_names = family.find(name)
    for hf_name, tensor in zip(hf_names, rule.layout.split(whole, sizes), strict=True):
        yield hf_name, tensor.contiguous()


def _gathered(args: Any, family: Family, sizes: TensorSizes, name: str, local: torch.Tensor) -> Iterator[NamedTensor]:
    """The HF tensors of a whole parameter, gathered from its parts; for an expert's, also those of other ranks' experts."""
    rule, hf_names = family.find(name)
    if rule.of_experts:
        gathers = _gather_experts(rule.layout, name, local, args.num_experts, args.update_weight_buffer_size)
    else:
        gathers = iter([[(name, _gather(rule.layout, local))]])
    for wholes in gathers:
        count = len(wholes) * len(hf_names)
        while wholes:
            whole_name, whole = wholes.pop(0)
            for hf_name, tensor in _to_hf(family, sizes, whole_name, whole):
                # The tensor would keep the memory of all that was gathered with it alive, so it gets memory of its own.
                is_one_of_several = count > 1 and whole is not local
                shares = is_one_of_several and tensor.untyped_storage().nbytes() > tensor.nbytes
                yield hf_name, tensor.clone() if shares else tensor
                del tensor
            del whole


def _named_chunks(model_chunks: Iterable[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    from slime.backends.megatron_utils.parameter_names import global_named_weights

    return [dict(global_named_weights(chunk)) for chunk in model_chunks]


def _parameters_in_order(
    chunks: Sequence[dict[str, torch.Tensor]], family: Family
) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """(chunk, stage, global name, a tensor like it on the meta device) of every parameter that `family` has, in model order.

    Each occurs once, at the first stage that has it. Collective over the pipeline group.
    """
    from slime.backends.megatron_utils.schedules import gather_from_stages

    contents = gather_from_stages([{name: p.detach().to("meta") for name, p in chunk.items()} for chunk in chunks])
    sent = {name for of_stage in contents for chunk in of_stage for name in chunk if family.leaves_out(name)}
    if sent and dist.get_rank() == 0:
        _tell_what_stays(family.model_types)
    # With interleaved stages the first chunks of all stages come before the second chunks.
    for index in range(len(chunks)):
        for stage, of_stage in enumerate(contents):
            for name, like in of_stage[index].items():
                if name not in sent:
                    sent.add(name)
                    yield index, stage, name, like


@functools.cache
def _tell_what_stays(model_types: tuple[str, ...]) -> None:
    logger.info(
        "Hugging Face checkpoints of %s have no layers for multi-token prediction: exports and engines do not get them",
        " and ".join(model_types),
    )


def _gather(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not layout.sharded:
        return local
    return layout.gather(_of_group(local, group))


def _gather_experts(
    layout: Layout, name: str, local: torch.Tensor, num_experts: int, max_bytes: int
) -> Iterator[list[NamedTensor]]:
    """(global name, whole parameter) of the experts at the same place as `name`, one of each expert-parallel rank.

    They come in lists of at most `max_bytes`, or of one expert. Each list has memory of its own.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    if group.size() == 1:
        yield [(name, local)]
        return
    # The ranks over which an expert is cut are neighbours in the group.
    cut = parallel_state.get_expert_tensor_parallel_world_size()
    owners, own = group.size() // cut, parallel_state.get_expert_model_parallel_rank()
    step, at_once = num_experts // owners, max(1, max_bytes // (cut * local.nbytes))
    for first in range(0, owners, at_once):
        last = min(first + at_once, owners)
        all_at_once = last - first == owners
        shards = _of_group(local, group) if all_at_once else _of_ranks(local, group, range(first * cut, last * cut))
        wholes = []
        for owner, of_owner in enumerate(shards.unflatten(0, (-1, cut)), first):
            whole = of_owner[0] if cut == 1 else layout.gather(of_owner)
            wholes.append((next_expert(name, (owner - own) * step), whole))
        del shards, of_owner, whole
        yield wholes


def _of_group(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks of the group, [ranks, …]."""
    shards = local.new_empty(group.size(), *local.shape)
    # Gloo wants the output as one tensor in which the parts of all ranks follow each other.
    dist.all_gather_into_tensor(shards.flatten(0, 1), local.contiguous(), group=group)
    return shards


def _of_ranks(local: torch.Tensor, group: dist.ProcessGroup, ranks: range) -> torch.Tensor:
    """The tensors of these ranks of the group, [ranks, …], on all of its ranks."""
    shards = local.new_empty(len(ranks), *local.shape)
    if group.rank() in ranks:
        shards[ranks.index(group.rank())] = local
    works = [
        dist.broadcast(shard, group=group, group_src=rank, async_op=True)
        for rank, shard in zip(ranks, shards, strict=True)
    ]
    for work in works:
        work.wait()
    return shards
