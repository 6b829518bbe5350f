"""The trainer's protocol of backends (`slime.training.backend`), on Megatron-Core.

Nothing of megatron.core may be imported before `initialize.prepare` has prepared the process. So modules of this folder that
import it are themselves imported inside the methods.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from slime.arguments.checkpoints import WeightSource
from slime.backends.megatron_utils import initialize
from slime.training.backend import Collect, StepLoss, StepResult, UnfinishedSave
from slime.training.model_states import ModelStates
from slime.training.resident_memory import Residents
from slime.training.routing_replay import RoutingReplay
from slime.training.train_step import MicroBatches
from slime.utils.errors import RunError
from slime.utils.plugin_loader import call_plug_in

# Flags that call users' functions or count real steps. Each is None where passes and steps must leave no trace.
_OF_REAL_STEPS = dict.fromkeys(
    ("custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path",
     "check_weight_hash_across_dp_replicas_interval", "distributed_timeout_seconds_after_init", "timing_log_level")
)  # fmt: skip


class MegatronBackend:
    """Megatron-Core's model chunks, optimizer and learning-rate schedule of one rank.

    Attributes:
        model: the wrapped chunks, one without virtual pipeline stages.
        optimizer, scheduler: None in a run without training.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        # This early, because plug-ins may import Megatron, and are imported before the rank is placed.
        initialize.prepare()
        self.args = args
        self.model: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.routing_replay = RoutingReplay()
        self.housekeeping = initialize.Housekeeping(args)

    def place(self) -> None:
        """Join Megatron's groups and build the model."""
        initialize.init(self.args)
        from slime.backends.megatron_utils.model_provider import setup_model
        from slime.backends.megatron_utils.replaying_router import attach_routing_replay

        self.groups = initialize.rank_groups(self.args)
        self.model = setup_model(self.args)
        self.routing_replay = attach_routing_replay(self.args, self.model)

    def load(self, source: WeightSource) -> int:
        """Load the weights and build the optimizer.

        The optimizer is built on the weights, so usually these are loaded first. A resume, and `--load-main-params-from-ckpt`,
        fill an optimizer that is there already, so then they are loaded after it is built.
        """
        from slime.backends.megatron_utils.checkpoint import load_checkpoint, putting_copies
        from slime.backends.megatron_utils.hf_conversion import load_hf_weights
        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

        takes_copies = self.args.load_main_params_from_ckpt and self.args.num_rollout > 0
        if not source.resume and not takes_copies:
            self.load_weights(source)
        if self.args.num_rollout > 0:
            self.optimizer, self.scheduler = build_optimizer_and_scheduler(self.args, self.model)
        iteration = -1
        if source.resume:
            iteration = load_checkpoint(self.args, source, self.model, self.optimizer, self.scheduler)
        elif takes_copies and source.kind == "hf":
            with putting_copies(self.optimizer) as put_copy:
                load_hf_weights(self.args, self.model, source.path, put_copy)
        elif takes_copies and source.kind == "megatron":
            load_checkpoint(self.args, source, self.model, self.optimizer)
        self.housekeeping.begin()
        return iteration

    def load_weights(self, source: WeightSource, state: str | None = None) -> bool:
        from slime.backends.megatron_utils.checkpoint import load_checkpoint, load_stored_state
        from slime.backends.megatron_utils.hf_conversion import load_hf_weights

        if state is not None:
            return load_stored_state(self.args, source, state, self.model)
        if source.kind == "hf":
            load_hf_weights(self.args, self.model, source.path)
        elif source.kind == "megatron":
            load_checkpoint(self.args, source, self.model)
        return True

    def save(
        self,
        rollout_id: int,
        states: ModelStates | None = None,
        stored: Sequence[str] = (),
        weight_version: int | None = None,
    ) -> UnfinishedSave:
        from slime.backends.megatron_utils.checkpoint import begin_checkpoint

        of_model = self.model, self.optimizer, self.scheduler
        return begin_checkpoint(self.args, rollout_id, *of_model, states, stored, weight_version)

    def forward(self, batches: MicroBatches, collect: Collect, prefix: str = "") -> list[dict[str, list[torch.Tensor]]]:
        from slime.backends.megatron_utils.schedules import forward_only

        flag, path = "--custom-megatron-before-log-prob-hook-path", self.args.custom_megatron_before_log_prob_hook_path
        call_plug_in(flag, path, f"the pass for {prefix}log_probs", self.args, self.model, prefix)
        return forward_only(self.args, self.model, batches, collect)

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
        from slime.backends.megatron_utils.indexer_loss import mean_divergence
        from slime.backends.megatron_utils.optimizer import gather_weights, update_weights
        from slime.backends.megatron_utils.parameter_names import global_named_biases, norm_of_weights
        from slime.backends.megatron_utils.parameter_selection import is_trained
        from slime.backends.megatron_utils.prediction_layers import PredictionStep, trains_prediction_layers
        from slime.backends.megatron_utils.routers import take_losses
        from slime.backends.megatron_utils.schedules import forward_backward, timed

        prediction, during = None, contextlib.nullcontext
        if trains_prediction_layers(self.args):
            own = PredictionStep(self.args, self.model, batches.samples, denominator)
            prediction, during = own.loss, own.forward
        # Megatron moves the biases of experts when it reduces gradients, before anybody asks whether the step is accepted.
        # It moves frozen ones, too.
        named_biases = [pair for chunk in self.model for pair in global_named_biases(chunk)]
        biases = [(bias, bias.clone(), is_trained(self.args, name)) for name, bias in named_biases]
        with timed(self.args, self.model, self.optimizer, place):
            metrics = forward_backward(
                self.args,
                self.model,
                self.optimizer,
                batches,
                lambda batch, logits: loss(batch, logits, prediction),
                denominator,
                before=lambda: self._call_step_hook(*place),
                during=during,
            )
            self.housekeeping.before_update()
            learning_rates = [group["lr"] for group in self.optimizer.param_groups]
            update = update_weights(self.optimizer, accepts)
        if update.taken:
            self.scheduler.step(increment=rollouts)
        for bias, before, trained in biases:
            if not (update.taken and trained):
                bias.copy_(before)
        if self.args.overlap_param_gather and not (followed and self._looks_at_weights_in_layers_alone()):
            gather_weights(self.model)
        self._compare_replicas(self.housekeeping.after_step(), place)
        measured = take_losses(self.model, len(batches)) | mean_divergence(self.model)
        if self.args.log_params_norm:
            measured["params_norm"] = norm_of_weights(self.model)
        return StepResult(metrics, learning_rates, update, measured)

    def _looks_at_weights_in_layers_alone(self) -> bool:
        """Whether only passes through the model read the weights between this step and the next one."""
        args = self.args
        return not (
            args.log_params_norm
            or args.check_weight_hash_across_dp_replicas_interval
            or args.custom_megatron_before_train_step_hook_path
            or args.enable_mtp_training
        )

    def _compare_replicas(self, steps: int, place: tuple[int, int]) -> None:
        from slime.backends.megatron_utils.parameter_names import differing_weights

        interval = self.args.check_weight_hash_across_dp_replicas_interval
        if not initialize.is_due(interval, steps):
            return
        differing = differing_weights(self.model)
        if differing:
            name, ranks = next(iter(differing.items()))
            raise RunError(
                f"--check-weight-hash-across-dp-replicas-interval {interval}: after rollout {place[0]}, step {place[1]} "
                f"{len(differing)} weights are not the same on all data-parallel ranks; {name} differs on ranks "
                f"{', '.join(map(str, ranks))}. Resume from a checkpoint; the machines of these ranks may be broken"
            )

    def _call_step_hook(self, rollout_id: int, step: int) -> None:
        flag, path = (
            "--custom-megatron-before-train-step-hook-path",
            self.args.custom_megatron_before_train_step_hook_path,
        )
        given = self.args, rollout_id, step, self.model, self.optimizer, self.scheduler
        call_plug_in(flag, path, f"rollout {rollout_id}, step {step}", *given)

    @contextlib.contextmanager
    def leaving_no_trace(self) -> Iterator[None]:
        from megatron.core import parallel_state

        from slime.backends.megatron_utils.generator_states import kept_generators
        from slime.backends.megatron_utils.optimizer import kept_loss_scales

        args, housekeeping = self.args, self.housekeeping
        self.args = argparse.Namespace(**{**vars(args), **_OF_REAL_STEPS})
        self.housekeeping = initialize.Housekeeping(self.args)
        # The counts and biases of experts are buffers.
        buffers = [(buffer, buffer.clone()) for chunk in self.model for _, buffer in chunk.named_buffers()]
        with kept_generators(), kept_loss_scales(self.optimizer):
            yield
        self.args, self.housekeeping = args, housekeeping
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron keeps this buffer as large as the longest stream needed; the next pass makes what it needs itself.
        parallel_state.get_global_memory_buffer().buffer.clear()

    def optimizer_bytes_to_come(self) -> int:
        from slime.backends.megatron_utils.optimizer import bytes_to_come

        return bytes_to_come(self.optimizer)

    def bad_gradients(self) -> list[str]:
        from slime.backends.megatron_utils.parameter_names import parameters_with_bad_gradient

        return parameters_with_bad_gradient(self.model)

    def reset_optimizer(self) -> None:
        from slime.backends.megatron_utils.optimizer import reset_optimizer_states

        reset_optimizer_states(self.optimizer)

    def broadcast(self, value: Any) -> Any:
        from slime.backends.megatron_utils.schedules import broadcast_from_last_stage

        return broadcast_from_last_stage(value)

    def stage_tensors(self) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
        from slime.backends.megatron_utils.hf_conversion import iter_stage_named_tensors, names_of_stage

        names = names_of_stage(self.args, self.model)
        return lambda: iter_stage_named_tensors(self.args, self.model, names)

    def tensors_and_own_experts(
        self,
    ) -> tuple[Callable[[], Iterator[tuple[str, torch.Tensor]]], Callable[[], dict[str, torch.Tensor]]]:
        from slime.backends.megatron_utils import hf_conversion

        args, model = self.args, self.model
        names = hf_conversion.names_of_stage(args, model)
        others = names - hf_conversion.names_of_experts(args, names)
        return (
            lambda: hf_conversion.iter_stage_named_tensors(args, model, others),
            lambda: hf_conversion.own_expert_tensors(args, model, names),
        )

    def expected_names(self) -> set[str]:
        from slime.backends.megatron_utils.hf_conversion import expected_hf_names

        return expected_hf_names(self.args.hf_checkpoint, self.args.mtp_num_layers or 0)

    def live_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self.model):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                yield f"{index}.{name}", tensor

    def residents(self) -> Residents:
        from megatron.core import parallel_state
        from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

        from slime.backends.megatron_utils.optimizer import tensors_of
        from slime.backends.megatron_utils.parameter_names import unwrap_model

        buffers = [buffer for chunk in self.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        optimizer, gradients = tensors_of(self.optimizer) if self.optimizer is not None else ([], [])
        # A model that takes images has a part that is not trained, and that is no module of the model.
        sights = [chunk.sight for chunk in map(unwrap_model, self.model) if hasattr(chunk, "sight")]
        constants = [tensor for sight in sights for tensor in sight.constants()]
        return Residents(
            weights=[*(tensor for _, tensor in self.live_tensors()), *constants],
            optimizer=optimizer,
            gradients=[*gradients, *(buffer.grad_data for buffer in buffers)],
            # A buffer as large as the longest stream, and angles for each of the last 32 lengths of a longest sequence.
            caches=[
                parallel_state.get_global_memory_buffer().buffer.clear,
                RotaryEmbedding.forward.cache_clear,
                YarnRotaryEmbedding.forward.cache_clear,
            ],
        )

    def close(self) -> None:
        self.housekeeping.close()
        initialize.destroy()
