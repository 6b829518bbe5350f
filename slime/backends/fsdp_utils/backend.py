"""The trainer's protocol on PyTorch's FSDP2: a dense model of transformers, sharded over all ranks, which are data-parallel.

What flags may ask of it says `slime.models.fsdp`.

A checkpoint of it is a Hugging Face directory: the weights in float32, as they are trained, with config and tokenizer. Beside
them stand what the optimizer remembers and further sets of weights (`states/`), written by torch.distributed.checkpoint, the
states of generators, and `metadata.json`, the last file, with the schedule. Another number of ranks can go on from it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from slime.arguments.checkpoints import WeightSource
from slime.training.backend import Collect, RankGroups, StepLoss, StepResult, UnfinishedSave, Update
from slime.training.checkpoint_parts import (
    directory_of_state,
    exchange,
    fresh_directory,
    load_generators,
    read_tensors,
    save_generators,
    write_whole,
)
from slime.training.checkpoint_publication import unpublished
from slime.training.context_parallel import NO_CONTEXT_PARALLEL
from slime.training.model_states import ModelStates
from slime.training.parameter_schedule import changed_curves, restore_schedule, schedule_settings, schedule_state
from slime.training.resident_memory import Residents
from slime.training.rollout_data import MicroBatch
from slime.training.routing_replay import RoutingReplay
from slime.training.train_step import MicroBatches
from slime.utils.checkpoint_directory import FSDP2, METADATA, iteration_directory, latest_iteration, require_backend
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.filesystem import write_json_atomically
from slime.utils.process_groups import get_gloo_group, join_world
from slime.weights.hf_reader import SafetensorsDirectory
from slime.weights.hf_writer import write_hf_checkpoint
from slime.weights.quantised_checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

_HEAD = "lm_head.weight"
# What the optimizer remembers, in a checkpoint.
_OPTIMIZER = "optimizer"


class FSDPBackend:
    """A model of transformers, of which each rank keeps a part of every parameter, and AdamW over these parts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.optimizer: torch.optim.AdamW | None = None
        self.scheduler: Any = None
        self.routing_replay = RoutingReplay()

    def place(self) -> None:
        """Join the default group, all of whose ranks are data-parallel, and build the model."""
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
        """Load the weights, build the optimizer over them and, in a resume, put it back where it was.

        Raises:
            UserError: the source is no Hugging Face directory and no checkpoint of this backend, is damaged, or is of another
                model; the schedule of the learning rate is none.
        """
        self.load_weights(source)
        if self.args.num_rollout > 0:
            self.optimizer, self.scheduler = self._make_optimizer()
        if not source.resume:
            return -1
        directory = _directory_of(source)
        stored = json.loads((directory / METADATA).read_text())
        if self.optimizer is not None:
            self._resume(directory, stored)
        return stored["iteration"]

    @torch.no_grad()
    def load_weights(self, source: WeightSource, state: str | None = None) -> bool:
        """Fill this rank's part of every parameter from a Hugging Face directory, a checkpoint of this backend being one, or
        from a state in it; random weights stay as they were drawn."""
        if source.kind == "random":
            return True
        directory, parameters = _directory_of(source), dict(self.model.named_parameters())
        if state is not None:
            place = directory_of_state(directory, state)
            if not place.is_dir():
                return False
            read_tensors(place, {name: parameter.detach() for name, parameter in parameters.items()})
            return True
        files = open_checkpoint(directory)
        further = sorted(files.names() - parameters.keys()) if source.kind == "megatron" else []
        if further:
            raise UserError(f"{directory} is of another model than --hf-checkpoint, which has no {further[0]}")
        for name, parameter in parameters.items():
            shape, start = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            stored = files.tensor(name)
            if stored.shape != parameter.shape:
                raise UserError(
                    f"{directory}: {name} of shape {list(stored.shape)} does not fit the model of --hf-checkpoint, "
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
        """Write the checkpoint of `rollout_id`: nothing is left to wait for."""
        args, final = self.args, iteration_directory(self.args.save, rollout_id)
        directory, has_optimizer = unpublished(final), bool(self.optimizer.state) and not args.no_save_optim

        def write_weights() -> None:
            write_hf_checkpoint(
                directory,
                self._whole_tensors(torch.float32),
                args.hf_checkpoint,
                rank=dist.get_rank(),
                writes=dist.get_rank() == 0,
                exchange=lambda value: exchange(value, None)[0],
            )

        def write_training_state() -> None:
            if has_optimizer:
                dcp.save(self._remembered(), checkpoint_id=directory / _OPTIMIZER)
            for name in stored:
                with states(name):
                    live = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
                    dcp.save(live, checkpoint_id=directory_of_state(directory, name))
            if not args.no_save_rng:
                save_generators(directory, {})

        metadata = {
            "sharded_backend": FSDP2, "format_version": 1, "iteration": rollout_id, "has_optimizer": has_optimizer,
            "world_size": dist.get_world_size(), "scheduler": schedule_state(self.scheduler),
            "parameter_groups": [{name: group[name] for name in ("betas", "eps")} for group in self.optimizer.param_groups],
        }  # fmt: skip
        return write_whole(
            final,
            lambda: fresh_directory(directory, stored, weight_version),
            (write_weights, write_training_state),
            lambda: write_json_atomically(directory / METADATA, metadata),
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
            self.scheduler.step(increment=rollouts)
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
    def _whole_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor().to(dtype or self._compute_dtype)

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.args.bf16 else torch.float32

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

    def _make_optimizer(self) -> tuple[torch.optim.AdamW, Any]:
        """The optimizer, and the schedule of its learning rate and weight decay; biases and norms have no decay."""
        # It brings much of Megatron-Core with it, which other processes that know this class have no use for.
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        args = self.args
        matrices, vectors = [], []
        for parameter in self.model.parameters():
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        groups = [{"params": matrices, "wd_mult": 1.0}, {"params": vectors, "wd_mult": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps)
        return optimizer, OptimizerParamScheduler(optimizer, **schedule_settings(args))

    def _remembered(self) -> dict[str, torch.Tensor]:
        """What the optimizer remembers of each weight, by names for a checkpoint."""
        named = self.model.named_parameters()
        states = ((name, self.optimizer.state.get(parameter, {})) for name, parameter in named)
        return {f"{kind}.{name}": value for name, state in states for kind, value in state.items()}

    def _resume(self, directory: Path, stored: dict[str, Any]) -> None:
        """Put optimizer, schedule and generators back where they were."""
        args, is_first = self.args, dist.get_rank() == 0
        if stored["has_optimizer"] and not args.no_load_optim:
            names = dcp.FileSystemReader(directory / _OPTIMIZER).read_metadata().state_dict_metadata
            for name, parameter in self.model.named_parameters():
                if f"step.{name}" in names:
                    moments = {kind: torch.zeros_like(parameter.detach()) for kind in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
            read_tensors(directory / _OPTIMIZER, self._remembered())
        elif not args.no_load_optim and stored["scheduler"]["num_steps"] and is_first:
            logger.warning(
                "%s was saved without optimizer state: the optimizer starts fresh, its schedule goes on", directory
            )
        if args.use_checkpoint_opt_param_scheduler:
            for group, saved in zip(self.optimizer.param_groups, stored["parameter_groups"], strict=True):
                group.update(saved, betas=tuple(saved["betas"]))
        restore_schedule(self.scheduler, stored["scheduler"])
        for line in changed_curves(args, self.scheduler, stored["scheduler"]) if is_first else ():
            logger.warning(line)
        if not args.no_load_rng and stored["world_size"] == dist.get_world_size():
            load_generators(directory)
        elif not args.no_load_rng:
            logger.warning("another number of ranks saved %s: random generators start from --seed", directory)

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


def _directory_of(source: WeightSource) -> Path:
    """Where the weights of a source are.

    Raises:
        UserError: it is a checkpoint of another backend.
    """
    if source.kind == "hf":
        return Path(source.path)
    require_backend("fsdp", source.kind, source.path, source.step)
    iteration = latest_iteration(source.path) if source.step is None else source.step
    return iteration_directory(source.path, iteration)
