"""The trainer's protocol on PyTorch's FSDP2: a dense model of transformers, sharded over all ranks.

Ranks are data-parallel, or `--context-parallel-size` of them share each sample: they hold zigzag chunks of its sequence, and
attention gathers keys and values. Parameters are sharded over all ranks either way, and gradients are summed over them.

Parameters and optimizer state are float32; with `--bf16` a pass computes in bfloat16. `slime.models.fsdp` says which flags this
backend supports.

A checkpoint is a Hugging Face directory: the weights in float32, as they are trained, with config and tokenizer. Beside them
are optimizer state and further sets of weights (`states/`), written by torch.distributed.checkpoint, the states of generators,
and `metadata.json` with the schedule, which is written last. A run with another number of ranks can continue from it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from slime.arguments.checkpoints import WeightSource
from slime.arguments.hf_config import read_hf_config
from slime.backends.fsdp_utils.attention import attend_to_streams, kernel_of
from slime.models.families import FAMILIES
from slime.models.family import Family
from slime.training.backend import Collect, RankGroups, StepLoss, StepResult, UnfinishedSave, Update
from slime.training.checkpoint_parts import (
    directory_of_state,
    exchange,
    fresh_directory,
    kept_generators,
    load_generators,
    read_tensors,
    save_generators,
    write_whole,
)
from slime.training.checkpoint_publication import unpublished
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, tell_place
from slime.training.loss import rows_of_logits
from slime.training.model_states import ModelStates
from slime.training.parameter_schedule import restore_schedule, schedule_settings, schedule_state
from slime.training.resident_memory import Residents
from slime.training.rollout_data import MicroBatch
from slime.training.routing_replay import RoutingReplay
from slime.training.train_step import MicroBatches
from slime.utils.checkpoint_directory import (
    FSDP2,
    FSDP_OPTIMIZER,
    METADATA,
    iteration_directory,
    latest_iteration,
    require_backend,
)
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.filesystem import write_json_atomically
from slime.utils.plugin_loader import accepted_keywords
from slime.utils.process_groups import get_gloo_group, join_world
from slime.weights.hf_reader import SafetensorsDirectory
from slime.weights.hf_writer import write_hf_checkpoint
from slime.weights.quantised_checkpoint import open_checkpoint

logger = logging.getLogger(__name__)

# The directory of the optimizer state in a checkpoint.


class FSDPBackend:
    """A model of transformers, of which each rank keeps a part of every parameter, and AdamW over these parts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.optimizer: torch.optim.AdamW | None = None
        self.scheduler: Any = None
        self.routing_replay = RoutingReplay()

    def place(self) -> None:
        """Join the default group, split it into those of data and context parallelism, and build the model.

        Raises:
            UserError: a flag asks for a package that is not there, or for what the model does not do; or the ranks cannot be
                divided into context-parallel groups.
        """
        self._kernel = kernel_of(self.args)
        timeout = datetime.timedelta(minutes=self.args.distributed_timeout_minutes)
        join_world(get_accelerator().process_group_backend, timeout)
        sample_group, cp = _split_world(self.args.context_parallel_size, timeout)
        tell_place(cp)
        self.groups = RankGroups(
            data_rank=dist.get_rank(sample_group),
            sample_group=sample_group,
            token_group=dist.group.WORLD,
            host_token_group=get_gloo_group(),
            replica=0,
            tensor_group=None,
            tensor_rank=0,
            cp=cp,
            is_last_stage=True,
        )
        self.model = self._build()
        # No pass draws; a function of the user's may.
        torch.manual_seed(self.args.seed)

    def load(self, source: WeightSource) -> int:
        """Load the weights, build the optimizer over them and, in a resume, restore its state.

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
        from a state in it; or with random weights."""
        parameters = dict(self.model.named_parameters())
        if source.kind == "random":
            # Every rank draws all weights and keeps its own part, so they are the same in every layout.
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(self.args.seed)
                drawn = dict(self._make_model().named_parameters())
            for name, parameter in parameters.items():
                parameter.to_local().copy_(drawn[name][_own_rows(parameter)])
            return True
        directory = _directory_of(source)
        if state is not None:
            place = directory_of_state(directory, state)
            if not place.is_dir():
                return False
            read_tensors(place, {name: parameter.detach() for name, parameter in parameters.items()})
            return True
        files = open_checkpoint(directory)
        names, is_own = files.names(), directory == Path(self.args.hf_checkpoint)
        no_fit = "does not fit its own config.json" if is_own else "is of another model than --hf-checkpoint"
        if further := sorted(_of_model(names, directory) - parameters.keys()):
            raise UserError(f"{directory} {no_fit}, which has no {further[0]}")
        if missing := sorted(parameters.keys() - names):
            raise UserError(f"{directory} {no_fit}: it has no {missing[0]}")
        for name, parameter in parameters.items():
            stored = files.tensor(name)
            if stored.shape != parameter.shape:
                raise UserError(
                    f"{directory}: {name} of shape {list(stored.shape)} does not fit the model of --hf-checkpoint, "
                    f"which has {list(parameter.shape)}"
                )
            # Every rank reads just its own rows from the file.
            parameter.to_local().copy_(stored[_own_rows(parameter)])
        return True

    def save(
        self,
        rollout_id: int,
        states: ModelStates | None = None,
        stored: Sequence[str] = (),
        weight_version: int | None = None,
    ) -> UnfinishedSave:
        """Write the checkpoint of `rollout_id` completely; the result has nothing left to wait for."""
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
                dcp.save(self._remembered(), checkpoint_id=directory / FSDP_OPTIMIZER)
            for name in stored:
                with states(name):
                    live = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
                    dcp.save(live, checkpoint_id=directory_of_state(directory, name))
            if not args.no_save_rng:
                save_generators(directory, {})

        metadata = {
            "sharded_backend": FSDP2, "format_version": 1, "iteration": rollout_id, "has_optimizer": has_optimizer,
            "world_size": dist.get_world_size(), "scheduler": schedule_state(self.args, self.scheduler),
            "parameter_groups": [{name: group[name] for name in ("betas", "eps")} for group in self.optimizer.param_groups],
            "without_gradient": [name for name, p in self.model.named_parameters() if p not in self.optimizer.state],
        }  # fmt: skip
        return write_whole(
            final,
            lambda: fresh_directory(directory, stored, weight_version),
            (write_weights, write_training_state),
            lambda: write_json_atomically(directory / METADATA, metadata),
        )

    @torch.no_grad()
    def forward(self, batches: MicroBatches, collect: Collect, prefix: str = "") -> list[dict[str, list[torch.Tensor]]]:
        found = [collect(batch, self._logits(batch)) for batch in batches]
        if self.args.fsdp_cpu_offload:
            # Parameters on the host would change at once, even while the device still reads them.
            get_accelerator().synchronize()
        return found

    def step(
        self,
        batches: MicroBatches,
        loss: StepLoss,
        *,
        denominator: float,
        accepts: Callable[[float, bool], bool],
        rollouts: int,
        place: tuple[int, int],
        followed: bool = False,
    ) -> StepResult:
        self.optimizer.zero_grad()
        metrics = []
        for batch in batches:
            value, of_batch = loss(batch, self._logits(batch))
            (value / denominator).backward()
            metrics.append(of_batch)
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = self._norm([_local(parameter.grad) for parameter in parameters])
        learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        taken = accepts(float(norm), False)
        if taken:
            if self.args.clip_grad > 0:
                clip_grads_with_norm_(parameters, self.args.clip_grad, norm)
            self._update()
            self.scheduler.step(increment=rollouts)
        return StepResult(metrics, learning_rates, Update(taken, float(norm)))

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        with kept_generators():
            yield
        self.optimizer.zero_grad()

    def optimizer_bytes_to_come(self) -> int:
        # Moments that live on the host come to the device only when activations are gone.
        on_host, known = self.args.fsdp_cpu_offload or self.args.optimizer_cpu_offload, self.optimizer.state
        return 0 if on_host else sum(2 * _local(p).nbytes for p in self.model.parameters() if not known.get(p))

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
        return _of_model(SafetensorsDirectory(self.args.hf_checkpoint).names(), self.args.hf_checkpoint)

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
        tell_place(NO_CONTEXT_PARALLEL)
        if dist.is_initialized():
            dist.destroy_process_group()

    @torch.no_grad()
    def _whole_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        device, dtype = get_accelerator().current_device(), dtype or self._compute_dtype
        for name, parameter in self.model.named_parameters():
            # Converted before the gather, since 16 bits are half the bytes.
            yield name, parameter.to(device, dtype).full_tensor()

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The 2-norm over all ranks of gradients of which this rank has parts; on the device, where groups can reduce it."""
        square = get_total_norm(gradients).to(get_accelerator().current_device()).square()
        dist.all_reduce(square)
        return square.sqrt()

    def _update(self) -> None:
        """Take the optimizer's step. With `--optimizer-cpu-offload` its moments are on the device meanwhile, when the
        activations that need most of it are gone."""
        if not self.args.optimizer_cpu_offload:
            self.optimizer.step()
            return
        self._put_moments(next(self.model.parameters()).device)
        self.optimizer.step()
        self._put_moments(torch.device("cpu"))

    def _put_moments(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            # The host does not wait for single copies, since the memory that they go to is pinned,
            state.update({name: value.to(device, non_blocking=True) for name, value in state.items() if value.ndim})
        # but for all of them together, before it reads the results.
        get_accelerator().synchronize()

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.args.bf16 else torch.float32

    def _make_model(self) -> torch.nn.Module:
        """The model of the config with random weights, on whatever device is in force."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self.args.hf_checkpoint, trust_remote_code=self.args.trust_remote_code)
        return AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager" if self.args.attn_implementation == "eager" else "sdpa",
            trust_remote_code=self.args.trust_remote_code,
        )

    def _build(self) -> torch.nn.Module:
        """The model, sharded layer by layer, so that no rank needs memory for all of it. Its weights have no values yet."""
        args, device = self.args, get_accelerator().name
        with torch.device("meta"):
            model = self._make_model()
        # No pass has dropout: log-probs must not depend on chance.
        model.eval()
        self._attends_to_streams = attend_to_streams(model, args)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self._compute_dtype, reduce_dtype=torch.float32)
        layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for layer in layers if args.gradient_checkpointing else ():
            # Inside FSDP's hooks, which gather the layer's parameters, so they are there when it is recomputed.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        offload = self._offload_policy()
        for module in [*layers, model]:
            # By default the outermost module stays gathered after a forward pass, and would not see weights that change then.
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)
            # Gradients are summed; the denominator of the step is the whole normalisation.
            module.set_gradient_divide_factor(1.0)
            # Gloo can only sum, and refuses a collective with a factor.
            module.set_force_sum_reduction_for_comms(True)
        self._give_memory(model)
        return model

    def _give_memory(self, model: torch.nn.Module) -> None:
        """Allocate this rank's parts of a model that has been made on the meta device, and compute its buffers."""
        device = get_accelerator().current_device()
        model.to_empty(device=torch.device("cpu") if self.args.fsdp_cpu_offload else device)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # Buffers are on the device that computes, even if parameters are on the host.
                setattr(module, name, buffer.to(device))
        # The mark tells transformers that a parameter has its value. It then computes the rest, the rotary frequencies.
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        model.initialize_weights()

    def _offload_policy(self) -> OffloadPolicy:
        if not self.args.fsdp_cpu_offload:
            return OffloadPolicy()
        device_is_host = get_accelerator().shares_host_memory
        if device_is_host and dist.get_rank() == 0:
            logger.info("--fsdp-cpu-offload: the device of this run is the host, where parameters are anyway")
        return CPUOffloadPolicy(pin_memory=not device_is_host)

    def _make_optimizer(self) -> tuple[torch.optim.AdamW, Any]:
        """The optimizer, and the schedule of its learning rate and weight decay; biases and norms have no decay."""
        # Imported late: it loads much of Megatron-Core, which other processes that import this file do not need.
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        args = self.args
        parameters = list(self.model.parameters())
        groups = [{"params": [p for p in parameters if p.ndim > 1], "wd_mult": 1.0}]
        groups.append({"params": [p for p in parameters if p.ndim <= 1], "wd_mult": 0.0})
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps)
        return optimizer, OptimizerParamScheduler(optimizer, **schedule_settings(args))

    def _remembered(self) -> dict[str, torch.Tensor]:
        """The optimizer's state of each weight, by names for a checkpoint."""
        states = ((name, self.optimizer.state.get(weight, {})) for name, weight in self.model.named_parameters())
        return {f"{kind}.{name}": value for name, state in states for kind, value in state.items()}

    def _resume(self, directory: Path, stored: dict[str, Any]) -> None:
        """Restore optimizer, schedule and generators."""
        args, is_first = self.args, dist.get_rank() == 0
        if stored["has_optimizer"] and not args.no_load_optim:
            never = stored.get("without_gradient", [])
            for parameter in (p for name, p in self.model.named_parameters() if name not in never):
                moments = {kind: torch.zeros_like(parameter.detach()) for kind in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
            read_tensors(directory / FSDP_OPTIMIZER, self._remembered())
            if args.optimizer_cpu_offload:
                self._put_moments(torch.device("cpu"))
        elif not args.no_load_optim and stored["scheduler"]["num_steps"] and is_first:
            logger.warning(
                "%s was saved without optimizer state: the optimizer starts fresh, its schedule goes on", directory
            )
        if args.use_checkpoint_opt_param_scheduler:
            for group, saved in zip(self.optimizer.param_groups, stored["parameter_groups"], strict=True):
                group.update(saved, betas=tuple(saved["betas"]))
        for line in restore_schedule(args, self.scheduler, stored["scheduler"]):
            if is_first:
                logger.warning(line)
        if not args.no_load_rng and stored["world_size"] == dist.get_world_size():
            load_generators(directory)
        elif not args.no_load_rng and is_first:
            logger.warning("another number of ranks saved %s: random generators start from --seed", directory)

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        """Logits [rows, V]. Transformers' own attention takes a row whose position starts anew for that of a new sequence."""
        stream, rows = batch.stream, rows_of_logits(self.args, batch.stream)
        attention = {"packed_stream": stream, "stream_kernel": self._kernel} if self._attends_to_streams else {}
        # The model may be code of the checkpoint that can only compute logits of all rows.
        chosen = accepted_keywords(type(self.model).forward, {} if rows is None else {"logits_to_keep": rows.index})
        return self.model(
            input_ids=stream.tokens[None],
            position_ids=stream.position_ids[None],
            attention_mask=None,
            use_cache=False,
            **attention,
            **chosen,
        ).logits.squeeze(0)


def _split_world(size: int, timeout: datetime.timedelta) -> tuple[dist.ProcessGroup, ContextParallel]:
    """The group of ranks, with this one, that together have all samples, and its place among the `size` that share samples.

    Raises:
        UserError: the ranks cannot be divided into groups of that size.
    """
    ranks = dist.get_world_size()
    if size == 1:
        return dist.group.WORLD, NO_CONTEXT_PARALLEL
    if ranks % size:
        raise UserError(f"{ranks} training ranks cannot be divided into groups of --context-parallel-size {size}")
    sharing = [list(range(first, first + size)) for first in range(0, ranks, size)]
    group, _ = dist.new_subgroups_by_enumeration(sharing, timeout=timeout)
    sample_group, _ = dist.new_subgroups_by_enumeration(
        [list(place) for place in zip(*sharing, strict=True)], timeout=timeout
    )
    return sample_group, ContextParallel(size, dist.get_rank(group), group)


def _of_model(names: set[str], directory: str | Path) -> set[str]:
    """The tensors of a Hugging Face directory that its model needs: without buffers, and without a tied head."""
    config = read_hf_config(directory)
    # Which types are trained is decided elsewhere.
    family = FAMILIES.get(config["model_type"], Family(model_types=(), names=()))
    return names - family.left_out(names, config)


def _own_rows(parameter: DTensor) -> tuple[slice, ...]:
    """Which part of the whole parameter this rank has."""
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(first, first + count) for first, count in zip(start, shape, strict=True))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _directory_of(source: WeightSource) -> Path:
    """The directory with the weights of a source.

    Raises:
        UserError: it is a checkpoint of another backend.
    """
    if source.kind == "hf":
        return Path(source.path)
    require_backend("fsdp", source.kind, source.path, source.step)
    iteration = latest_iteration(source.path) if source.step is None else source.step
    return iteration_directory(source.path, iteration)
