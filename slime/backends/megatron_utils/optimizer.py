"""Optimizer and learning-rate schedule of one training rank: how they are built, one update, and the reset of their states.

An update can still be called off when the gradients are known. Megatron's own `step` cannot: it reports no gradient norm if the
loss scale was too high, and updates the weights even with gradients that are not finite. `update_weights` consists of the same
parts, with a question in between.

Adam is Megatron's own if Transformer Engine or Apex is installed, else that of `adam`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.backends.megatron_utils.adam import MAIN, MOMENTS, Adam, HostShare, PrecisionAwareAdam, as_megatrons_adam
from slime.backends.megatron_utils.config_fields import fields_from_args, params_dtype
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.stateless_adam import StatelessAdam
from slime.training.backend import Update
from slime.training.parameter_schedule import schedule_settings
from slime.utils.device import get_accelerator

logger = logging.getLogger(__name__)

_DTYPES = ("store_param_remainders", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def build_optimizer_and_scheduler(
    args: Any, model_chunks: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over all parameters that require a gradient, and its scheduler at 0 rollouts.

    Build it after the weights are loaded, or pass it to `load_checkpoint`, since for 16-bit weights the optimizer keeps float32
    copies.

    Raises:
        UserError: the schedule is empty, or its warmup is as long as the schedule.
    """
    install()
    config, adam = build_optimizer_config(args), contextlib.nullcontext()
    if args.use_stateless_adam:
        adam = as_megatrons_adam(StatelessAdam)
    elif _takes_precision_aware_adam(args):
        adam = as_megatrons_adam(
            PrecisionAwareAdam,
            exp_avg_dtype=config.exp_avg_dtype,
            exp_avg_sq_dtype=config.exp_avg_sq_dtype,
            master_weight_dtype=config.main_params_dtype,
            store_param_remainders=config.store_param_remainders,
            host=_host_share(args),
        )
    with adam:
        optimizer = get_megatron_optimizer(
            config, model_chunks, use_gloo_process_groups=get_accelerator().host_group_backend == "gloo"
        )
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer) and part.optimizer is not None:
            _number_as_updated(part)
    for group in optimizer.param_groups:
        # Megatron distinguishes groups by this mark when it loads their state, but does not set it.
        group["is_decoupled_lr"] = not group["default_config"]
    if args.optimizer == "sgd":
        for part in parts_of(optimizer):
            part.init_state_fn = _start_momentum
    return optimizer, OptimizerParamScheduler(optimizer, **schedule_settings(args))


def takes_both_dtypes(args: Any) -> bool:
    """Whether the optimizer of the flags can train float32 parameters beside those of 16 bits.

    Megatron's non-distributed optimizers save only the states of 16-bit parameters. Transformer Engine's kernels for all
    gradients at once need a single dtype, and with main gradients in bfloat16 there would be two.
    """
    narrow = args.use_precision_aware_optimizer and not args.accumulate_allreduce_grads_in_fp32
    return args.use_distributed_optimizer and not narrow


def _number_as_updated(part: DistributedOptimizer) -> None:
    """Correct the optimizer's index of where each weight stands among those that it updates. In a group the float32 ones come
    first; Megatron's index has the order of its buffers, which differs if a group has both dtypes."""
    groups = zip(part.model_fp32_groups, part.model_float16_groups, strict=True)
    for index, (float32, float16) in enumerate(groups):
        for position, weight in enumerate((*float32, *float16)):
            part.model_param_group_index_map[weight] = (index, position)


def _takes_precision_aware_adam(args: Any) -> bool:
    """Whether the flags ask for features that Megatron has only for Transformer Engine's Adam, or only on CUDA streams."""
    from megatron.core.optimizer.distrib_optimizer import USING_TE_OPTIMIZER

    return args.optimizer_cpu_offload or args.use_precision_aware_optimizer and not USING_TE_OPTIMIZER


def _host_share(args: Any) -> HostShare | None:
    if not args.optimizer_cpu_offload:
        return None
    if get_accelerator().shares_host_memory and torch.distributed.get_rank() == 0:
        logger.info(
            "--optimizer-cpu-offload: the device of this run is the host, where the optimizer's state is anyway"
        )
    return HostShare(
        fraction=args.optimizer_offload_fraction,
        overlaps=args.overlap_cpu_optimizer_d2h_h2d,
        by_torch=args.use_torch_optimizer_for_cpu_offload,
        pins_state=args.pin_cpu_params,
        pins_gradients=args.pin_cpu_grads,
    )


def _start_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Create the momentum of SGD, so that a checkpoint can be loaded into it; Megatron creates states only for Adam. With a
    momentum of 0 the first step is the same that torch takes without one."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def build_optimizer_config(args: Any) -> OptimizerConfig:
    """Megatron's optimizer configuration for `args` (same-named fields)."""
    fields = fields_from_args(OptimizerConfig, args)
    fields.update(
        params_dtype=params_dtype(args),
        min_lr=args.min_lr,
        use_distributed_optimizer=args.use_distributed_optimizer,
        # Layers may multiply in FP8, but weights are never in FP8. If they were, Megatron would hold float32 copies beside the
        # states of a precision-aware optimizer, and their narrow moments would be saved without their scales.
        fp8_recipe=None,
    )
    if not _takes_precision_aware_adam(args):
        return OptimizerConfig(**fields)
    # Set afterwards, because the constructor checks requirements that only Megatron's own implementations have.
    dtypes = {name: fields.pop(name) for name in _DTYPES}
    config = OptimizerConfig(**{**fields, "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False})
    vars(config).update(dtypes)
    # This field makes the distributed optimizer precision-aware; the other one decides about arguments of Transformer Engine.
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return config


# States that depend on earlier steps. Float32 copies of the weights, which may be among an optimizer's states, do not.
_HISTORY = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


@torch.no_grad()
def update_weights(optimizer: ChainedOptimizer, accepts: Callable[[float, bool], bool]) -> Update:
    """Clip the gradients and update the weights. Collective: either all ranks take the update, or none does.

    Args:
        optimizer: as `get_megatron_optimizer` returns it.
        accepts: asked with the gradient norm and whether the loss scale of float16 overflowed (the scale is then lowered
            already, and no update taken, whatever the answer); must answer the same on all ranks.
    """
    overflowed = _prepare_gradients(optimizer)
    grad_norm = float(optimizer.get_grad_norm())
    if not accepts(grad_norm, overflowed) or overflowed:
        return Update(taken=False, grad_norm=grad_norm)
    limit = optimizer.config.clip_grad
    if limit > 0:
        decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for part in parts_of(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, limit, grad_norm, decoupled)
    zeros = float(optimizer.count_zeros()) if optimizer.config.log_num_zeros_in_grad else None
    return Update(optimizer.step_with_ready_grads(), grad_norm, zeros)


def _prepare_gradients(optimizer: ChainedOptimizer) -> bool:
    """Divide the gradients by the loss scale; returns whether any overflowed.

    The loss has one scale, that of the first part. Megatron gives each part one of its own, which follows the overflows of that
    part alone: once they differ, gradients of the others are divided by another scale than the loss was multiplied by. So an
    overflow of one part counts for all of them.
    """
    scalers = scalers_of(optimizer)
    before = [scaler.state_dict() for scaler in scalers]
    overflowed = optimizer.prepare_grads()
    for scaler, state in zip(scalers, before, strict=True):
        scaler.load_state_dict(state)
        scaler.update(overflowed)
    return overflowed


def gather_behind_layers(chunk: DistributedDataParallel, *, together: bool) -> None:
    """With `--overlap-param-gather` an update does not wait until its weights are gathered from data-parallel ranks; make each
    layer wait for its own when it is called.

    In Megatron each module waits for its own parameters when it is called. But some modules are never called, and only hold
    the weights of what another one computes; those weights would silently be old ones. Here a layer waits for all parameters in
    it. Parameters outside of layers are gathered when the pass begins.

    Args:
        together: all stages gather at the same time; otherwise each starts to gather the next weights when it has got the last.
    """
    chunk.disable_forward_pre_hook(param_sync=False)
    model = unwrap_model(chunk)
    late = [*model.decoder.layers, *(model.mtp.layers if hasattr(model, "mtp") else ())]
    late += [
        module for module in (model.decoder.final_layernorm, getattr(model, "output_layer", None)) if module is not None
    ]

    def wait_for(parameters: list[torch.nn.Parameter]) -> Callable[..., None]:
        groups = dict.fromkeys(chunk.param_to_bucket_group[p] for p in parameters if p in chunk.param_to_bucket_group)

        def wait(*_: Any) -> None:
            for group in groups:
                group.finish_param_sync(skip_next_bucket_dispatch=together)

        return wait

    for module in late:
        # A pass in parts never calls a layer, but its first module.
        in_parts = chunk.config.overlap_moe_expert_parallel_comm and hasattr(module, "input_layernorm")
        called = module.input_layernorm if in_parts else module
        called.register_forward_pre_hook(wait_for([*module.parameters()]))
    of_late = {parameter for module in late for parameter in module.parameters()}
    chunk.register_forward_pre_hook(wait_for([p for p in model.parameters() if p not in of_late]))


def gather_weights(model: list[DistributedDataParallel]) -> None:
    """Finish the gather of weights that updates have left to the next pass. Collective over data-parallel ranks."""
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def reset_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Make the next update a first one: step counts and moments become 0 in place; weights and learning rate stay."""
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue  # a rank without trained parameters
        for group in part.optimizer.param_groups:
            _zero(group)
        for state in part.optimizer.state.values():
            _zero(state)


def tensors_of(optimizer: MegatronOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(parameters and states, gradients) of the optimizer that are on the device. The parameters are those that it updates,
    some of which may be the model's own."""
    kept, gradients, device = [], [], get_accelerator().name
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue  # a rank without trained parameters
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            kept.append(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        values = (value for state in part.optimizer.state.values() for value in state.values())
        kept += [value for value in values if torch.is_tensor(value) and value.device.type == device]
    return kept, gradients


def bytes_to_come(optimizer: MegatronOptimizer) -> int:
    """Bytes on the device that the next update allocates for states of parameters that have none yet."""
    inner = (part.optimizer for part in parts_of(optimizer) if part.optimizer is not None)
    return sum(
        _state_bytes(each, group, parameter)
        for each in inner
        for group in each.param_groups
        for parameter in group["params"]
        if not each.state.get(parameter)
    )


def _state_bytes(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    if isinstance(optimizer, PrecisionAwareAdam):
        return optimizer.state_bytes(parameter)
    if isinstance(optimizer, StatelessAdam) or parameter.device.type != get_accelerator().name:
        return 0
    if "momentum" in group:
        return parameter.nbytes if group["momentum"] else 0
    # Transformer Engine's Adam has dtypes of its own for its states, and main parameters for 16-bit parameters.
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    moments = sum(dtypes.get(name, parameter.dtype).itemsize for name in MOMENTS)
    if getattr(optimizer, "master_weights", False) and parameter.dtype != torch.float32:
        remainders = getattr(optimizer, "store_param_remainders", False)
        moments += 2 if remainders else dtypes.get(MAIN, torch.float32).itemsize
    return parameter.numel() * moments


@contextlib.contextmanager
def kept_loss_scales(optimizer: MegatronOptimizer) -> Iterator[None]:
    """After the block the loss scales of float16 are those from before it, whatever gradients occur in it."""
    scalers = scalers_of(optimizer)
    states = [scaler.state_dict() for scaler in scalers]
    yield
    for scaler, state in zip(scalers, states, strict=True):
        scaler.load_state_dict(state)


def scalers_of(optimizer: MegatronOptimizer) -> list[MegatronGradScaler]:
    """What holds the loss scale of float16, for each part of the optimizer, also for one that trains nothing."""
    scalers = (getattr(part, "grad_scaler", None) for part in parts_of(optimizer))
    return [scaler for scaler in scalers if scaler is not None]


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of dense and of expert parameters that Megatron has combined into one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _zero(entries: dict) -> None:
    for name in _HISTORY:
        value = entries.get(name)
        if torch.is_tensor(value):
            value.zero_()
        elif value is not None:
            entries[name] = 0


def l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors together, float32 [1] on their device, with the arguments of Transformer Engine's and Apex's.

    It replaces Megatron's own function, which copies the norm of every tensor to the host.
    """
    (tensors,) = tensor_lists
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, torch.float32)))[None], None


def creating_states_alone(adam: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Transformer Engine's Adam that need not be told of which parameters it keeps remainders when it creates their states:
    Megatron, which creates them before it loads a checkpoint, does not tell."""

    class EngineAdam(adam):
        def keeps_remainder(self, param: torch.Tensor) -> bool:
            return self.store_param_remainders and param.dtype == torch.bfloat16

        def initialize_state(self, param: torch.Tensor, keeps_remainder: bool | None = None) -> None:
            super().initialize_state(param, self.keeps_remainder(param) if keeps_remainder is None else keeps_remainder)

    return EngineAdam


def install() -> None:
    """Make Megatron's optimizers use this Adam, and `l2_norm`, where they would fall back to others, and else an Adam that
    creates its states alone. Idempotent."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if not optimizer.USING_PYTORCH_OPTIMIZER:
        if distrib_optimizer.USING_TE_OPTIMIZER and not hasattr(optimizer.Adam, "keeps_remainder"):
            optimizer.Adam = distrib_optimizer.Adam = creating_states_alone(optimizer.Adam)
        return
    # These names tell Megatron that Adam has the layout of the fused one, by which it saves and loads states.
    optimizer.Adam = distrib_optimizer.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
