"""The trainer's protocol on PyTorch's FSDP2: a dense model of transformers, sharded over all ranks, which are data-parallel.

What it does not have yet, it refuses by name: checkpoints of its own (so no resume, and no states stored in them), curves of
learning rate and weight decay, other optimizers than AdamW, float16, frozen parameters, recomputation, context parallelism.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from slime.arguments.checkpoints import WeightSource
from slime.arguments.flag import as_typed, flag_of
from slime.training.backend import Collect, RankGroups, StepLoss, StepResult, UnfinishedSave, Update
from slime.training.context_parallel import NO_CONTEXT_PARALLEL
from slime.training.model_states import ModelStates
from slime.training.resident_memory import Residents
from slime.training.rollout_data import MicroBatch
from slime.training.routing_replay import RoutingReplay
from slime.training.train_step import MicroBatches
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.process_groups import get_gloo_group, join_world
from slime.weights.hf_reader import SafetensorsDirectory
from slime.weights.quantised_checkpoint import open_checkpoint

_HEAD = "lm_head.weight"
# The one value that each of these has here.
_FIXED = {
    "fp16": False, "optimizer": "adam", "decoupled_weight_decay": True, "use_stateless_adam": False,
    "optimizer_cpu_offload": False, "use_precision_aware_optimizer": False,
    "start_weight_decay": None, "end_weight_decay": None, "weight_decay_incr_style": "constant", "decoupled_lr": None,
    "only_train_params_name_list": None, "freeze_params_name_list": None, "freeze_indexer": False,
    "log_num_zeros_in_grad": False, "log_params_norm": False, "gradient_checkpointing": False, "context_parallel_size": 1,
    "manual_gc": False, "train_sync_interval": None, "empty_unused_memory_level": 0,
    "distributed_timeout_seconds_after_init": None, "check_weight_hash_across_dp_replicas_interval": None,
}  # fmt: skip


class FSDPBackend:
    """A model of transformers, of which each rank keeps a part of every parameter, and AdamW over these parts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.optimizer: torch.optim.AdamW | None = None
        self.routing_replay = RoutingReplay()

    def place(self) -> None:
        """Join the default group, all of whose ranks are data-parallel, and build the model.

        Raises:
            UserError: a flag asks for something that this backend would not do.
        """
        self._refuse_other_flags()
        timeout = datetime.timedelta(minutes=self.args.distributed_timeout_minutes)
        join_world(get_accelerator().process_group_backend, timeout)
        world = dist.group.WORLD
        self.groups = RankGroups(
            data_rank=dist.get_rank(),
            sample_group=world,
            token_group=world,
            host_token_group=get_gloo_group(),
            replica=0,
            tensor_group=None,
            tensor_rank=0,
            cp=NO_CONTEXT_PARALLEL,
            is_last_stage=True,
        )
        self.model = self._build()

    def load(self, source: WeightSource) -> int:
        """Load the weights and build the optimizer over them.

        Raises:
            UserError: the source is no Hugging Face directory, or the flags ask for a curve of the learning rate.
        """
        self.load_weights(source)
        if self.args.num_rollout > 0:
            self.optimizer = self._make_optimizer()
        return -1

    @torch.no_grad()
    def load_weights(self, source: WeightSource, state: str | None = None) -> bool:
        """Fill this rank's part of every parameter from a Hugging Face directory; random weights stay as they were drawn."""
        if state is not None:
            raise UserError(
                f"{source.path}: --train-backend fsdp takes no state out of a checkpoint yet, and not {state!r}"
            )
        if source.kind == "megatron":
            raise UserError(
                f"{source.path} is a checkpoint of Megatron's: --train-backend fsdp starts from a Hugging Face directory"
            )
        if source.kind == "hf":
            files = open_checkpoint(source.path)
            for name, parameter in self.model.named_parameters():
                shape, start = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                stored = files.tensor(name)
                if stored.shape != parameter.shape:
                    raise UserError(
                        f"{source.path}: {name} of shape {list(stored.shape)} does not fit the model of --hf-checkpoint, "
                        f"which has {list(parameter.shape)}"
                    )
                # Every rank reads its own rows; none are sent.
                own = tuple(slice(first, first + count) for first, count in zip(start, shape, strict=True))
                parameter.to_local().copy_(stored[own])
        return True

    def save(
        self,
        rollout_id: int,
        states: ModelStates | None = None,
        stored: Sequence[str] = (),
        weight_version: int | None = None,
    ) -> UnfinishedSave:
        raise UserError(
            "--save: --train-backend fsdp writes no checkpoints yet; give --save-hf alone, or --train-backend megatron"
        )

    @torch.no_grad()
    def forward(self, batches: MicroBatches, collect: Collect, prefix: str = "") -> list[dict[str, list[torch.Tensor]]]:
        return [collect(batch, self._logits(batch)) for batch in batches]

    def step(
        self,
        batches: MicroBatches,
        loss: StepLoss,
        *,
        denominator: float,
        accepts: Callable[[float, bool], bool],
        rollouts: int,
        place: tuple[int, int],
    ) -> StepResult:
        self.optimizer.zero_grad()
        metrics = []
        for batch in batches:
            value, of_batch = loss(batch, self._logits(batch))
            (value / denominator).backward()
            metrics.append(of_batch)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters]).full_tensor()
        learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        taken = accepts(float(norm), False)
        if taken:
            if self.args.clip_grad > 0:
                clip_grads_with_norm_(parameters, self.args.clip_grad, norm)
            self.optimizer.step()
        return StepResult(metrics, learning_rates, Update(taken, float(norm)))

    def bad_gradients(self) -> list[str]:
        gradients = [(name, parameter.grad) for name, parameter in self.model.named_parameters()]
        return [name for name, grad in gradients if grad is not None and not grad.to_local().isfinite().all()]

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def broadcast(self, value: Any) -> Any:
        return value

    def stage_tensors(self) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
        return self._whole_tensors

    def tensors_and_own_experts(
        self,
    ) -> tuple[Callable[[], Iterator[tuple[str, torch.Tensor]]], Callable[[], dict[str, torch.Tensor]]]:
        return self._whole_tensors, dict

    def expected_names(self) -> set[str]:
        tied = {_HEAD} if self.model.config.tie_word_embeddings else set()
        return SafetensorsDirectory(self.args.hf_checkpoint).names() - tied

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to_local()

    def residents(self) -> Residents:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        states = self.optimizer.state.values() if self.optimizer is not None else ()
        return Residents(
            weights=[*(tensor for _, tensor in self.live_tensors()), *self.model.buffers()],
            optimizer=[_local(value) for state in states for value in state.values() if torch.is_tensor(value)],
            gradients=[_local(gradient) for gradient in gradients],
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @torch.no_grad()
    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor().to(self._compute_dtype)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.args.bf16 else torch.float32

    def _refuse_other_flags(self) -> None:
        given = {name: value for name, value in vars(self.args).items() if name in _FIXED and value != _FIXED[name]}
        if given:
            words = ", ".join(_as_typed(flag_of(name), value) for name, value in given.items())
            raise UserError(
                f"{words}: --train-backend fsdp does not do that yet; drop it, or give --train-backend megatron"
            )

    def _build(self) -> torch.nn.Module:
        """The model with random weights, the same in every layout; sharded layer by layer."""
        from transformers import AutoConfig, AutoModelForCausalLM

        args, device = self.args, get_accelerator().name
        config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        attention = "sdpa" if args.attn_implementation == "auto" else args.attn_implementation
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(args.seed)
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=args.trust_remote_code,
            )
        # No pass has dropout: log-probs must not depend on chance.
        model.to(device).eval()
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)
        layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for module in [*layers, model]:
            # Left whole after a forward pass, as the outermost module would be, it would not see weights that change there.
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            # Gradients are summed; the denominator of the step is the whole normalisation.
            module.set_gradient_divide_factor(1.0)
            # Gloo can only sum; a factor that is part of the collective it refuses.
            module.set_force_sum_reduction_for_comms(True)
        return model

    def _make_optimizer(self) -> torch.optim.AdamW:
        args = self.args
        if args.lr_decay_style != "constant" or args.lr_warmup_iters or args.lr_warmup_fraction:
            raise UserError(
                "--train-backend fsdp keeps the learning rate constant yet: give --lr-decay-style constant without warmup"
            )
        matrices, vectors = [], []
        for parameter in self.model.parameters():
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps)

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        """Logits [T, V] of the stream. Without a mask, transformers takes rows whose positions start anew for another sequence,
        which sees nothing of those before."""
        stream = batch.stream
        output = self.model(
            input_ids=stream.tokens[None], position_ids=stream.position_ids[None], attention_mask=None, use_cache=False
        )
        return output.logits.squeeze(0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_typed(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {as_typed(value)}"
