"""From `args` to Megatron's configuration of the model, with what this trainer always sets, and what it refuses.

Which fields a kernel makes possible depends on the machine of the rank: Transformer Engine and Apex may be installed or not.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from slime.backends.megatron_utils.config_fields import fields_from_args, params_dtype
from slime.backends.megatron_utils.initialize import has_contiguous_context
from slime.backends.megatron_utils.layer_spec import transformer_engine_available
from slime.estimates.layout import parts_of_layout
from slime.utils import env
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError

# Each needs a kernel of Transformer Engine or Apex: on by default where those are, off with the local layer spec.
FUSIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "moe_router_fusion",
)
# The extension by which Megatron's output layer adds weight gradients into their buffer, also beside the layers of Transformer
# Engine. If the fusion is on and the extension is not there, Megatron raises.
_FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"
_DEEPEP = "deep_ep"


def build_transformer_config(args: Any) -> TransformerConfig:
    """Megatron's model configuration for `args`.

    Every field gets the value that `args` has for it. Dropout is 0 unless a flag says otherwise: log-probs must not depend on
    chance.

    Raises:
        UserError: a kernel of Transformer Engine is asked for and not installed (the local layer spec would ignore it), or not
            known to the version that is; or Megatron refuses the fields.
    """
    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    fields = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **fields_from_args(config_class, args)}
    fields.update(_model_fields(args))
    fields.update(_layer_implementation_fields(args))
    dtype = params_dtype(args)
    fields.update(
        params_dtype=dtype,
        pipeline_dtype=torch.float32 if args.fp32_residual_connection else dtype,
        # Weights then start the same for every tensor-parallel size; on a GPU that would cost host memory for nothing.
        use_cpu_initialization=get_accelerator().name == "cpu" or args.use_cpu_initialization,
        # Packed streams differ in length from micro-batch to micro-batch; Megatron allows that with this dispatcher
        # only, for dense models as well.
        variable_seq_lengths=True,
        moe_token_dispatcher_type=_dispatcher(args),
        # The loss is normalised by the step's own denominator in both reductions; Megatron's must not come on top.
        calculate_per_token_loss=False,
        # No kernel here rounds the scores that it is for, and Transformer Engine wants a variable of the environment with it.
        apply_query_key_layer_scaling=False,
        # Layers of these kinds are the family's own, and do what Megatron's cannot, such as context parallelism.
        experimental_attention_variant=None,
        # The model itself has no such layers; `put_prediction_layers` adds them, and they run in the training step alone.
        mtp_num_layers=None,
    )
    try:
        config = config_class(**fields)
    except (AssertionError, ValueError) as error:
        raise UserError(f"Megatron-Core builds no model of these flags: {error}") from error
    if config.fp8:
        _require_fp8_recipe(config)
    return config


def _require_fp8_recipe(config: TransformerConfig) -> None:
    try:
        get_fp8_recipe(config)
    except (AssertionError, ValueError) as error:
        raise UserError(
            f"--fp8-recipe {config.fp8_recipe} is not known to the Transformer Engine that is installed here: {error}"
        ) from error


def _dispatcher(args: Any) -> str:
    wanted = args.moe_token_dispatcher_type
    if wanted == "flex" and not _imports(_DEEPEP):
        raise UserError(
            f"--moe-token-dispatcher-type flex needs the kernels of DeepEP (module {_DEEPEP}), which do not import here; "
            "install them, or give alltoall"
        )
    return "alltoall" if wanted == "allgather" else wanted


def _model_fields(args: Any) -> dict[str, Any]:
    """Fields that several flags make up."""
    fields: dict[str, Any] = {
        "num_query_groups": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "bias_activation_fusion": (
            args.bias_activation_fusion and (args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion)
        ),
        **_pipeline_fields(args),
        **_initialization_fields(args),
    }
    if isinstance(args.moe_layer_freq, list) and all(args.moe_layer_freq):
        # Megatron keeps layers apart in checkpoints where it is given a pattern, and stacks them else.
        fields["moe_layer_freq"] = 1
    if args.multi_latent_attention:
        # Unset it means that queries have no latent vector; Megatron would take a number of its own.
        fields["q_lora_rank"] = args.q_lora_rank
        # No kernel does that for latent attention here; its layers refuse the flag where somebody gives it.
        fields["apply_rope_fusion"] = args.apply_rope_fusion and "apply_rope_fusion" in args.typed_flags
    if args.swiglu:
        fields.update(gated_linear_unit=True, activation_func=F.silu)
    return fields


def _pipeline_fields(args: Any) -> dict[str, Any]:
    pipelined = args.pipeline_model_parallel_size > 1
    interleaved = virtual_stages(args) > 1
    layout = args.pipeline_model_parallel_layout
    return {
        # The model itself has no layers for multi-token prediction; a stage of nothing else is empty for Megatron.
        "pipeline_model_parallel_layout": layout
        and "|".join(part.replace("m", "") for part in parts_of_layout(layout)),
        # Only the interleaved schedule can overlap messages with computation, and it must: with both directions in one
        # batch of messages, Gloo hands a stage the message that was meant for its other chunk.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved and args.batch_p2p_comm,
        # A stage's output is not needed any more once it is sent; backward asks for its shape only. The interleaved schedule
        # frees it when the sending is merely queued before, which streams on a GPU put in order, and Gloo's threads do not.
        "deallocate_pipeline_outputs": pipelined and not (interleaved and get_accelerator().name == "cpu"),
    }


def _initialization_fields(args: Any) -> dict[str, Any]:
    if torch.get_default_device().type == "meta":
        # There is no memory to draw into, and to go through the motions torch imports its compiler, which takes a second.
        return {"perform_initialization": False}
    if args.perform_initialization:
        return {}
    # Where Megatron is told to draw nothing, it does not mark the parts of tensor-parallel ranks either, and gradient norms
    # then count the first rank's only. So it draws, by functions that do nothing.
    functions = ("init_method", "output_layer_init_method", "embedding_init_method")
    return {"perform_initialization": True, **dict.fromkeys(functions, _leave_as_allocated)}


def _leave_as_allocated(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _layer_implementation_fields(args: Any) -> dict[str, Any]:
    wanted = args.transformer_impl
    if wanted == "transformer_engine" and transformer_engine_available() and get_accelerator().name != "cpu":
        # Latent attention has `PackedAttention` inside of Transformer Engine's layers too.
        if has_contiguous_context(args) and not args.multi_latent_attention:
            raise UserError(
                "--allgather-cp: Transformer Engine's attention knows only zigzag chunks; give --transformer-impl local"
            )
        if args.cp_comm_type is not None and not args.multi_latent_attention:
            raise UserError(
                f"--cp-comm-type {args.cp_comm_type}: Transformer Engine's attention passes the keys of packed samples round; "
                "give --transformer-impl local, or leave the flag out"
            )
        if args.fp32_residual_connection:
            raise UserError(
                "--fp32-residual-connection: the norms of Transformer Engine's layers take one dtype; give --transformer-impl "
                "local, or leave the flag out"
            )
        if args.attention_backend == "flash":
            _require_flash_attention()
        fused, typed = args.gradient_accumulation_fusion, "gradient_accumulation_fusion" in args.typed_flags
        if fused and typed and not _imports(_FUSED_GRADIENTS):
            raise UserError(
                f"--gradient-accumulation-fusion needs the module {_FUSED_GRADIENTS} of Apex, which does not import here; "
                "install Apex with its CUDA extensions, or leave the flag out"
            )
        # The kernel adds into the gradient buffer of the weight that was multiplied, and one that was rounded has none.
        fused = fused and (typed or _imports(_FUSED_GRADIENTS) and env.int4_training_group_size() is None)
        return {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": fused}
    of_engine = {"--fp8-format": args.fp8, "--attention-backend": args.attention_backend == "fused" and "fused"}
    for flag, value in of_engine.items():
        if value:
            raise UserError(f"{flag} {value} needs Transformer Engine; install it or leave the flag out")
    for name in FUSIONS:
        if name in args.typed_flags and getattr(args, name):
            raise UserError(
                f"--{name.replace('_', '-')} needs Transformer Engine and --transformer-impl transformer_engine; install "
                "it or leave the flag out"
            )
    # Model scripts ask for these two, and mean speed: without a kernel experts and their tokens are taken one after the other.
    return {"transformer_impl": "local", **dict.fromkeys((*FUSIONS, "moe_grouped_gemm", "moe_permute_fusion"), False)}


def _require_flash_attention() -> None:
    """Transformer Engine that is told to take flash attention takes nothing else, and some versions of it only."""
    from transformer_engine.pytorch.attention.dot_product_attention.backends import fa_utils

    if not (fa_utils.is_installed or fa_utils.v3_is_installed):
        raise UserError(
            f"--attention-backend flash: Transformer Engine takes flash-attn {fa_utils.version_required} to "
            f"{fa_utils.max_version}, or flash-attn-3, and finds none of these; install one, or leave the flag out: auto takes "
            "the kernels that are there"
        )


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def virtual_stages(args: Any) -> int:
    """Model chunks per rank: 1 unless the pipeline is interleaved."""
    return args.virtual_pipeline_model_parallel_size or 1
