"""From `args` to the model of one training rank.

`build_model` builds the bare model of Megatron's configuration (`slime.backends.megatron_utils.transformer_config`), or has a
function of the user's build it. `setup_model` wraps it for mixed precision and data parallelism. Where no checkpoint gives
weights, random ones are drawn that depend on the seed and on the parameter's global name alone.

Megatron draws one weight after the other from a single generator, so what a layer gets depends on which layers came before
it on the same rank: every pipeline stage would start like the first one. Here every matrix is drawn whole from a seed of its
own, and each tensor-parallel rank keeps its part. The whole matrix is made on the host: for models that are trained on CPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from slime.arguments.config_files.role_config import CRITIC
from slime.backends.megatron_utils.attention import PackedAttention
from slime.backends.megatron_utils.config_fields import fields_from_args
from slime.backends.megatron_utils.hf_conversion import family_of_run, keep_float32
from slime.backends.megatron_utils.initialize import has_contiguous_context
from slime.backends.megatron_utils.layer_spec import (
    get_decoder_spec,
    rotate_by_position,
    rotates_by_position,
)
from slime.backends.megatron_utils.low_precision import multiply_in_fp8, require_fp8_shapes, round_weights_to_int4
from slime.backends.megatron_utils.optimizer import gather_behind_layers, takes_both_dtypes
from slime.backends.megatron_utils.overlapped_experts import run_in_parts
from slime.backends.megatron_utils.parameter_names import EMBEDDING, global_named_parameters
from slime.backends.megatron_utils.parameter_selection import select_trained_parameters
from slime.backends.megatron_utils.prediction_layers import put_prediction_layers
from slime.backends.megatron_utils.transformer_config import build_transformer_config, virtual_stages
from slime.backends.megatron_utils.value_head import put_value_head
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.plugin_loader import accepted_keywords, calling_user_code, load_function, parameters_of

ModelProvider = Callable[..., GPTModel]

# Buffers of routers.
_IN_FLOAT32 = ("expert_bias", "local_tokens_per_expert")
_ROUTES = {"probs", "routing_map", "reversed_local_input_permutation_mapping"}


def get_model_provider_func(args: Any) -> ModelProvider:
    """A function `provider(pre_process=True, post_process=True, vp_stage=None)` that builds this rank's `GPTModel`.

    It is the model of the flags. A provider of one's own may start from it.
    """

    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        config = build_transformer_config(args)
        model = GPTModel(
            config=config,
            transformer_layer_spec=_decoder_spec(args, config, vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            vp_stage=vp_stage,
        )
        if args.spec is not None:
            _check_names(args, f"--spec {' '.join(args.spec)}", "layers", model)
        return _complete(args, model, vp_stage)

    return provider


def build_model(args: Any, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
    """This rank's model chunk as the run has it: that of `--custom-model-provider-path`, or of a `--spec` that names such a
    function, which has a parameter `pre_process`; else that of the flags.

    Raises:
        UserError: the function raises, or returns a model that a run cannot train, export or cut as its flags say.
    """
    place = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    path, flag = args.custom_model_provider_path, "--custom-model-provider-path"
    if _spec_is_provider(args):
        if path is not None:
            raise UserError(f"--spec {_path_of_spec(args)} builds the whole model, and so does {flag} {path}; keep one")
        path, flag = _path_of_spec(args), "--spec"
    if path is None:
        return get_model_provider_func(args)(**place)
    provider = load_function(path, flag=flag)
    keywords = accepted_keywords(
        provider, {"vp_stage": vp_stage, "config": build_transformer_config(args), "args": args}
    )
    subject = f"{flag} {path}"
    if vp_stage is not None and "vp_stage" not in keywords:
        raise UserError(
            f"{subject}: with virtual pipeline stages the function has to take vp_stage, which says whose layers it builds"
        )
    with calling_user_code(flag, path, f"a model chunk with {place}"):
        model = provider(pre_process, post_process, **keywords)
    if not isinstance(model, GPTModel):
        raise UserError(
            f"{subject} returned {type(model).__module__}.{type(model).__qualname__}; expected a GPTModel of Megatron-Core, or "
            "of a class that is derived from it"
        )
    _check_provided(args, subject, model, place)
    return _complete(args, model, vp_stage)


# Messages between stages, gradients and exports follow these, whoever builds the layers.
_FIXED_FIELDS = (
    "num_layers", "hidden_size", "num_moe_experts", "params_dtype", "pipeline_dtype", "fp16", "bf16", "sequence_parallel",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "variable_seq_lengths",
    "calculate_per_token_loss", "use_cpu_initialization", "mtp_num_layers",
)  # fmt: skip


def _check_provided(args: Any, subject: str, model: GPTModel, place: dict[str, Any]) -> None:
    config = build_transformer_config(args)
    expected: dict[str, tuple[Any, Any]] = {
        "pre_process": (model.pre_process, place["pre_process"]),
        "post_process": (model.post_process, place["post_process"]),
        "vocab_size": (model.vocab_size, args.padded_vocab_size),
        "parallel_output": (model.parallel_output, True),
        "share_embeddings_and_output_weights": (
            model.share_embeddings_and_output_weights,
            not args.untie_embeddings_and_output_weights,
        ),
        **{f"config.{name}": (getattr(model.config, name), getattr(config, name)) for name in _FIXED_FIELDS},
    }
    other = [f"{name} {found} (the run: {wanted})" for name, (found, wanted) in expected.items() if found != wanted]
    if other:
        raise UserError(
            f"{subject} returned a model with {', '.join(other)}; build it with what the function is given and "
            "--padded-vocab-size rows of vocabulary, and change nothing but what is inside of its layers"
        )
    _check_names(args, subject, "a model", model)


def _check_names(args: Any, subject: str, what: str, model: GPTModel) -> None:
    """Refuse parameters that exports and pushes have no name for: `what` `subject` returned has them."""
    family = family_of_run(args)
    for name, _ in global_named_parameters(model):
        try:
            family.find(name)
        except KeyError as error:
            raise UserError(
                f"{subject} returned {what} with {name}, which has no tensor in checkpoints of {family.model_types[0]}, so "
                "engines could not be given it; keep to the parameters of the family, or name another by --model-name"
            ) from error


def _complete(args: Any, model: GPTModel, vp_stage: int | None) -> GPTModel:
    """Give a bare model chunk what packed streams, engines and the flags ask for, as far as it lacks that."""
    config = model.config
    # A spec of a family's own may have attention that asks for Megatron's packed format. Latent attention has a rotary
    # embedding of its own in each layer.
    is_local = config.transformer_impl == "local" and all(map(_has_packed_attention, model.decoder.layers))
    is_rotated = config.multi_latent_attention or rotates_by_position(model)
    if not is_rotated and (is_local or has_contiguous_context(args)):
        rotate_by_position(model)
    if model.post_process and args.padded_vocab_size > args.vocab_size:
        # A provider that starts from ours has it already; twice is as once.
        _mask_vocabulary_padding(model.output_layer, args)
    put_prediction_layers(args, model, vp_stage)
    if config.overlap_moe_expert_parallel_comm:
        run_in_parts(model)
    return model


def _has_packed_attention(layer: torch.nn.Module) -> bool:
    attention = layer.self_attention
    rotates = getattr(attention, "rotates", True)
    return not rotates or isinstance(getattr(attention, "core_attention", None), PackedAttention)


def get_family_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The decoder's spec as the family of `--hf-checkpoint` (or `--model-name`) has it, for a `--spec` that starts from it.

    Raises:
        UserError: layers for multi-token prediction are asked for, and only the family's own spec builds them.
    """
    family = family_of_run(args)
    if family.layer_spec is None:
        return get_decoder_spec(config, vp_stage)
    if args.mtp_num_layers:
        module, _, name = family.layer_spec.rpartition(".")
        raise UserError(
            f"--mtp-num-layers {args.mtp_num_layers}: prediction layers of {family.model_types[0]} are built with --spec "
            f"{module} {name} alone; give that, or drop --mtp-num-layers"
        )
    return load_function(family.layer_spec)(args, config, vp_stage)


def _decoder_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """What the function of `--spec` says, which a family names that has layers of its own; without it the layers of all
    decoders. A function that builds the whole model, and starts from ours, finds the family's in it."""
    if args.spec is None:
        return get_decoder_spec(config, vp_stage)
    if _spec_is_provider(args):
        return get_family_spec(args, config, vp_stage)
    path, flag = _path_of_spec(args), "--spec"
    function = load_function(path, flag=flag)
    with calling_user_code(flag, path, f"the layers of a model chunk with vp_stage {vp_stage}"):
        spec = function(args, config, vp_stage)
    if not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        raise UserError(
            f"{flag} {path} returned {type(spec).__name__}; expected a ModuleSpec or TransformerBlockSubmodules of "
            "Megatron-Core, or give the function a parameter `pre_process` where it builds the whole model"
        )
    return spec


def _path_of_spec(args: Any) -> str:
    return ".".join(args.spec)


def _spec_is_provider(args: Any) -> bool:
    """Whether `--spec` names a function that builds the whole model, and not its layers."""
    return args.spec is not None and "pre_process" in parameters_of(load_function(_path_of_spec(args), "--spec")).names


def _mask_vocabulary_padding(output_layer: torch.nn.Module, args: Any) -> None:
    """Keep the padding rows of the vocabulary out of every softmax over the logits.

    The engine knows no padding; a zero logit per padding row would shift each log-prob of the trainer against its own.
    """
    partition = args.padded_vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    start = partition * parallel_state.get_tensor_model_parallel_rank()
    valid = min(max(args.vocab_size - start, 0), partition)
    if valid == partition:
        return

    def mask(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        logits = output[0]
        # Written past autograd: the softmax gives these columns probability 0 and so gradient 0; recorded, the fill
        # would copy the gradient of all logits once more. Finite, so that 0 * logit stays 0 in an entropy.
        logits.detach()[..., valid:].fill_(max(-1e9, torch.finfo(logits.dtype).min / 2))

    output_layer.register_forward_hook(mask)


def build_ddp_config(args: Any, parameters: int) -> DistributedDataParallelConfig:
    """Megatron's data-parallel configuration for `args`; `parameters` is how many of this rank's weights are trained."""
    fields = fields_from_args(DistributedDataParallelConfig, args)
    fields["use_distributed_optimizer"] = args.use_distributed_optimizer
    # `train_one_step` looks at the loss and at the gradient norm, and can say which samples are to blame.
    fields["check_for_nan_in_grad"] = False
    if args.ddp_num_buckets is not None:
        fields["bucket_size"] = -(-parameters // args.ddp_num_buckets)
    return DistributedDataParallelConfig(**fields)


def setup_model(args: Any) -> list[DistributedDataParallel]:
    """Build this rank's model chunks (one without virtual pipeline stages), wrapped and on the device.

    The weights are random, drawn from `args.seed`: equal on ranks that hold the same part of the model, and other ones in every
    part. On CPU, and with `--use-cpu-initialization`, the whole model is the same in every layout.
    """
    count = virtual_stages(args)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(args.seed)
        models = [_build_chunk(args, stage if count > 1 else None) for stage in range(count)]
    select_trained_parameters(args, models)
    trained = sum(p.numel() for model in models for p in model.parameters() if p.requires_grad)
    config, ddp_config = models[0].config, build_ddp_config(args, trained)
    chunks = []
    for index, model in enumerate(models):
        model = model.to(get_accelerator().current_device())
        if config.fp16 or config.bf16:
            model = Float16Module(config, model)
            for name, buffer in model.named_buffers():
                # Routers do that with their biases at the first forward pass; one that is loaded before would be rounded. A
                # count of tokens in bfloat16 has no odd numbers above 256.
                if name.endswith(_IN_FLOAT32):
                    buffer.data = buffer.float()
            if takes_both_dtypes(args):
                keep_float32(args, model)
        # Buckets let the first chunk's gradients travel during backward; those of later chunks have time in any case.
        wrapped = DistributedDataParallel(config, ddp_config, model, disable_bucketing=index > 0)
        if wrapped.use_forward_hook:
            # Stages start at one time in Megatron's interleaved schedule alone.
            gather_behind_layers(wrapped, together=args.align_param_gather and count > 1)
        if args.data_parallel_random_init:
            wrapped.broadcast_params()
        chunks.append(wrapped)
    require_fp8_shapes(chunks)
    round_weights_to_int4(args, chunks)
    multiply_in_fp8(args, chunks)
    return chunks


def _build_chunk(args: Any, vp_stage: int | None) -> GPTModel:
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = build_model(
        args,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=vp_stage,
    )
    if model.config.use_cpu_initialization and args.perform_initialization:
        draw_initial_weights(model, args.seed)
    if args.role == CRITIC:
        put_value_head(model)
    _mark_experts(model)
    for module in model.modules():
        if isinstance(module, MoELayer):
            _let_go_of_routes(module.token_dispatcher)
    return model


def _let_go_of_routes(dispatcher: MoETokenDispatcher) -> None:
    """Have a dispatcher drop what it keeps of a forward pass until the next one, and reads no more: where tokens went, with
    which probabilities. That is 5 bytes per expert of each of the rank's tokens and layers, also of layers that are recomputed.
    No hook of a layer sees when its experts alone are."""
    combine = dispatcher.combine_postprocess

    def combine_and_let_go(tokens: torch.Tensor) -> torch.Tensor:
        output = combine(tokens)
        kept = vars(dispatcher)
        kept.update(dict.fromkeys(_ROUTES & kept.keys()))
        return output

    dispatcher.combine_postprocess = combine_and_let_go


def _mark_experts(model: GPTModel) -> None:
    """Say of experts that their gradients are reduced over ranks of their own, whether or not those are the dense layers' too.

    Megatron's layers say it only with expert parallelism; without the mark, tensor parallelism around whole experts gives
    their gradients the wrong factor. Said always, the optimizer has the same parts in every layout.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


# Layers that write into the residual stream start smaller, by the depth of the model.
_OUTPUT_OF_A_BLOCK = re.compile(r"\.linear_(proj|fc2)\.weight$")


@torch.no_grad()
def draw_initial_weights(chunk: torch.nn.Module, seed: int) -> None:
    """Draw the matrices of `chunk` again, in place. Vectors (norms, biases) start at constants and keep them.

    The state of the default generator is not kept; enclose the call in `fork_rng`.
    """
    dense = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
    expert = (parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size())
    for name, parameter in global_named_parameters(chunk):
        if parameter.ndim < 2:
            continue
        torch.default_generator.manual_seed(_seed_of(seed, name))
        rank, size = expert if ".experts." in name else dense
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        whole = torch.empty([length * size if i == dim else length for i, length in enumerate(parameter.shape)])
        _init_method(chunk.config, name)(whole)
        parameter.copy_(whole if dim is None else _part(whole, dim, parameter.partition_stride, rank, size))


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _init_method(config, name: str):
    if name == EMBEDDING:
        return config.embedding_init_method
    return config.output_layer_init_method if _OUTPUT_OF_A_BLOCK.search(name) else config.init_method


def _part(whole: torch.Tensor, dim: int, stride: int, rank: int, size: int) -> torch.Tensor:
    """One rank's part: of each of the `stride` matrices that are stacked along `dim`, its share."""
    return torch.cat([block.chunk(size, dim)[rank] for block in whole.chunk(stride, dim)], dim)
