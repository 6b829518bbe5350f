"""A rank of the actor: it holds a shard of the policy, trains it and hands its weights out."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments.checkpoints import OLD_ACTOR, TEACHER
from slime.arguments.config_files.serving_config import arguments_of_group, served_groups
from slime.arguments.hf_config import read_hf_config
from slime.models.families import FAMILIES
from slime.models.family import Family
from slime.models.shape_of_flags import SHAPE_FLAGS, calculate_fwd_flops
from slime.observability.logging_utils import LoggedMetrics
from slime.observability.timer import Timer, phase
from slime.scheduling.device_turns import Holds
from slime.training.advantages import compute_advantages_and_returns
from slime.training.checkpoint_publication import publish_checkpoint
from slime.training.column_exchange import ColumnPart, fetch_column, send_columns
from slime.training.custom_functions import copied_masks
from slime.training.metric_reduction import all_reduce_sum
from slime.training.model_states import ACTOR, REFERENCE, ModelStates, StateSchedule
from slime.training.on_policy import expect_proof
from slime.training.profiling import Part
from slime.training.reports import phase_speeds, rollout_data_metrics, save_train_data, worst_token_lines
from slime.training.resident_memory import Residents
from slime.training.rollout_data import RolloutData, put_beside_tokens, refresh_mask_sums, require_entries
from slime.training.step_statistics import needs_log_prob_pass
from slime.training.train_rank import TrainRank
from slime.training.train_step import forward_log_probs
from slime.utils.checkpoint_directory import iteration_directory
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.misc import Box
from slime.utils.plugin_loader import call_plug_in
from slime.utils.process_groups import get_gloo_group, patient_groups
from slime.utils.processing_utils import load_tokenizer
from slime.weights.buckets import loading_order, split_into_buckets
from slime.weights.expert_exchange import ExpertExchange, experts_go_directly
from slime.weights.hf_reader import SafetensorsDirectory, StoredTensor
from slime.weights.push import Opening, read_weight_version
from slime.weights.quantisers import quantiser_of
from slime.weights.source import Connected, Sent, WeightSource
from slime.weights.transports import Receiver, transport_of

logger = logging.getLogger(__name__)

# A sender of weights comes to a gather later than the ranks that help it. This is for its own work, beside its waits for
# engines.
_GATHER_SECONDS = 60.0


class ActorRank(TrainRank):
    """A rank of the actor's group."""

    def init(self, rendezvous: tuple[str, int]) -> int:
        """Join the group, build the model, load the weights. Returns the first rollout id to train.

        Args:
            rendezvous: what rank 0's `rendezvous_address` returned.
        """
        self._join(rendezvous)
        tell = logger.info if self.rank == 0 else lambda line: None
        self.states = ModelStates(self.backend.live_tensors)
        self.state_schedule = StateSchedule(self.args, self.states, tell)
        self.weight_source: WeightSource | None = None
        self.tokenizer: Any = None
        self.state_schedule.load(self.backend.load_weights, self._load_stored)
        iteration = self._load_model()
        source = self.args.initial_weights
        self.weight_version = read_weight_version(iteration_directory(source.path, iteration)) if source.resume else 0
        self.state_schedule.start()
        self._idle_since = time.perf_counter()
        return iteration + 1

    def train(self, rollout_id: int, shards: list[Box]) -> list[LoggedMetrics]:
        """Train on this rank's shard of a rollout. Returns what was logged (the same numbers on every rank)."""
        with self._collected() as logged, self._recorded(Part.OVERALL, rollout_id):
            self._train(rollout_id, shards, (), logged)
        return logged

    def train_on_values(
        self, rollout_id: int, shards: list[Box], values: Sequence[ColumnPart]
    ) -> tuple[list[LoggedMetrics], ColumnPart | None]:
        """`train` with the critic's values of all samples; the first `--num-critic-only-steps` rollouts train nothing here.

        Returns:
            What was logged. From one rank of those that have the same samples also this rank's part of what the critic is to
            learn: the returns, and the masks where `--rollout-data-postprocess-path` has changed them; else None.
        """
        with self._collected() as logged, self._recorded(Part.OVERALL, rollout_id):
            data, masks_are_edited = self._train(rollout_id, shards, values, logged)
        names = ["returns", "loss_masks"] if masks_are_edited else ["returns"]
        return logged, send_columns(data, names, self.groups) if self.groups.is_last_stage else None

    def residents(self) -> Residents:
        """What the model has on the device, and the other sets of weights, which lie there where device and host share
        memory."""
        residents = self.backend.residents()
        return dataclasses.replace(residents, weights=[*residents.weights, *self.states.buffers()])

    def save(self, rollout_id: int) -> None:
        """Write the checkpoint of `rollout_id`, with `--async-save` up to what `finish_save` waits for, and the Hugging Face
        export, if asked for."""
        self.require(Holds.ALL, "a save")
        self.states.require_active(ACTOR)
        self._begin_save(rollout_id, self.states, self.state_schedule.stored(), self.weight_version)
        if not self.args.async_save:
            self.finish_save()
        if self.args.save_hf is not None:
            self.export_hf(self.args.save_hf.format(rollout_id=rollout_id))

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoint of `rollout_id` the newest. Called on rank 0 only, after the data state is on disk."""
        publish_checkpoint(self.args, rollout_id)

    def export_hf(self, directory: str) -> None:
        """Write the live weights as a Hugging Face checkpoint, with config and tokenizer of `--hf-checkpoint`, and with what it
        has of parts that are not trained.

        Every pipeline stage writes its own shards, from the first of the copies that there are.

        Raises:
            RunError: a rank could not write, or was lost; on all ranks that live.
        """
        from slime.weights.hf_writer import write_hf_checkpoint

        self.require(Holds.WEIGHTS, "an export")
        tensors = self._tensors_of_checkpoint()() if self.groups.replica == 0 else ()
        if self.groups.gives_weights and self.groups.stage == 0:
            # Parts of the model that the run does not have (layers for multi-token prediction, say) go along as they are
            # stored.
            stored = self._stored(Family.is_exported_as_stored)
            tensors = itertools.chain(tensors, ((name, tensor[...]) for name, tensor in stored.items()))
        with patient_groups(self.args.checkpoint_write_timeout):
            write_hf_checkpoint(
                directory,
                tensors,
                self.args.hf_checkpoint,
                rank=self.rank,
                writes=self.groups.gives_weights,
                exchange=_of_all_ranks,
            )

    def open_weight_push(self) -> Opening:
        """Make this rank ready for pushes: every pipeline stage is a source, and its first replica makes the buckets."""
        args, groups = self.args, self.groups
        way, transport = transport_of(args), None
        if groups.gives_weights or way.takes_every_rank(args):
            transport = way(args, groups.stage, groups.num_stages)
        if groups.num_stages > 1 and way.takes_every_rank(args):
            transport.relay_over(groups.place_group)
        expected, drafts = self.backend.expected_names(), self._stored_drafts()
        if expected is not None:
            expected |= drafts.keys()
        # They are read, not gathered, so only a rank that sends needs them.
        own = drafts if groups.stage == 0 and transport is not None else {}
        self.weight_source = WeightSource(
            self._buckets(way.bucket_bytes(args), own), transport, expected, groups.gives_weights
        )
        return Opening(groups.num_stages, self.weight_version, expected)

    def continue_weight_pushes(self, version: int, chain: str) -> None:
        """Make this rank ready for pushes, going on where ranks that have ended left off: engines serve the live weights as
        `version`.

        `chain`: what `weights_pushed` of those ranks returned.
        """
        self.open_weight_push()
        self.weight_source.continue_from(version, chain)
        self.weight_version = version

    def connect_engines(self, source: int, engines: Sequence[Receiver]) -> Connected | None:
        """Connect source `source` to `engines`; how that went, if this rank is the one that sends."""
        return self.weight_source.connect(engines) if source == self.groups.stage else None

    def send_weights(self, source: int, version: int, whole: bool = False) -> Sent | None:
        """Send the weights of source `source` to its engines as `version`; what was sent, if this rank is the one that did.

        Args:
            whole: see `Transport.carry_all`.
        """
        self.require(Holds.WEIGHTS, "a weight push")
        self.states.require_active(ACTOR)
        way, is_own = transport_of(self.args), source == self.groups.stage
        # The ranks of other replicas have nothing to do: the gathers are among those of the first one.
        if not (is_own and self.groups.replica == 0) and not way.takes_every_rank(self.args):
            return None
        if is_own and not self.weight_source.only_helps:
            return self.weight_source.send(version, whole)
        # This rank is already in the gather of the next tensor, or waits for the other stage's next bucket, while the sender
        # waits for an engine that it will give up.
        with patient_groups(way.longest_wait(self.args) + _GATHER_SECONDS):
            return self.weight_source.send(version) if is_own else self.weight_source.follow(source)

    def weights_written(self, version: int, engines: Sequence[Any]) -> None:
        """The files of weights `version` are on the disk, and no engine (`engines`: their handles) reads them yet."""
        path, flag = self.args.custom_update_weight_post_write_path, "--custom-update-weight-post-write-path"
        directory = transport_of(self.args).directory(self.args, version)
        call_plug_in(flag, path, f"weights {version}", self.args, str(directory), list(engines))

    def weights_pushed(self, version: int) -> str | None:
        """Engines serve the live weights as `version`. Returns the chain of the files, if this rank publishes them."""
        self.weight_version = version
        chain = self.weight_source.settle()
        self.state_schedule.after_push()
        return chain

    def weights_settled(self) -> None:
        """Engines that had missed the last push have its weights now."""
        self.weight_source.settle()

    def probe_log_probs(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probs of tokens 1 … n−1 of every sequence at temperature 1, under the live weights."""
        self.require(Holds.WEIGHTS, "it computes log-probs")
        columns = {
            "tokens": [torch.tensor(sequence, device=self.device) for sequence in sequences],
            "total_lengths": [len(sequence) for sequence in sequences],
            "response_lengths": [len(sequence) - 1 for sequence in sequences],
            "micro_batch_indices": [list(range(len(sequences)))],
        }
        data = RolloutData(columns, self.groups.cp)
        results = forward_log_probs(self.args, self.backend, data, with_entropy=False, temperature=1.0)
        full = data.gather(results.get("log_probs", ()))
        return self.backend.broadcast([log_probs.tolist() for log_probs in full])

    def dispose(self) -> None:
        """Leave the engines and all process groups."""
        if self.weight_source is not None:
            self.weight_source.close()
        super().dispose()

    def _buckets(self, max_bytes: int, stored: Mapping[str, StoredTensor]) -> Callable[[], Iterable[Any]]:
        """What makes the buckets of a push: the live weights, and tensors that are `stored`, as they are. Collective."""

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            return ((name, tensor[...].to(self.device)) for name, tensor in stored.items())

        if not experts_go_directly(self.args, get_accelerator().shares_host_memory):
            tensors = self._tensors_of_checkpoint()
            return lambda: split_into_buckets(itertools.chain(tensors(), read()), max_bytes)
        others, own_experts = self.backend.tensors_and_own_experts()
        quantise = quantiser_of(self.args.hf_checkpoint) or iter
        experts = ExpertExchange(self.args, own_experts, quantise, max_bytes)
        return lambda: itertools.chain(
            split_into_buckets(itertools.chain(quantise(others()), read()), max_bytes), experts.buckets()
        )

    def _tensors_of_checkpoint(self) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
        """What makes the tensors of this stage in the format of `--hf-checkpoint`: quantised if that is."""
        tensors, quantiser = self.backend.stage_tensors(), quantiser_of(self.args.hf_checkpoint)
        return tensors if quantiser is None else lambda: quantiser(tensors())

    def _stored_drafts(self) -> dict[str, StoredTensor]:
        """The layer for multi-token prediction in `--hf-checkpoint`, if engines draft with it and the trainer does not have it.

        Pushes bring it as it is stored, because engines that were reset have lost it, and engines that slept may have. Empty
        where no engine drafts.

        Raises:
            UserError: the checkpoint has none either.
        """
        trained = (arguments_of_group(self.args, group) for group in served_groups(self.args) if group.update_weights)
        if self.args.mtp_num_layers or all(group.sglang_speculative_algorithm is None for group in trained):
            return {}
        found = self._stored(Family.is_stored_prediction)
        if not found and any(Path(self.args.hf_checkpoint).glob("*.safetensors")):
            raise UserError(
                f"--sglang-speculative-algorithm: engines draft with the layer for multi-token prediction of "
                f"{self.args.hf_checkpoint}, and no file there has its weights; drop the flag, or take a checkpoint with them"
            )
        return {name: found[name] for name in sorted(found, key=loading_order)}

    def _stored(self, is_wanted: Callable[[Family, str, int, int], bool]) -> dict[str, StoredTensor]:
        """The tensors of `--hf-checkpoint` that a method of its family (`is_wanted`) picks, by name; none without weights."""
        directory = Path(self.args.hf_checkpoint)
        config = read_hf_config(directory)
        family, num_layers = FAMILIES.get(config.get("model_type")), config.get("num_hidden_layers")
        if family is None or num_layers is None or not any(directory.glob("*.safetensors")):
            return {}
        source, predictions = SafetensorsDirectory(directory), self.args.mtp_num_layers or 0
        names = [name for name in sorted(source.names()) if is_wanted(family, name, num_layers, predictions)]
        return {name: source.tensor(name) for name in names}

    def _load_stored(self, name: str) -> bool:
        """Load the state `name` out of the checkpoint that the run resumes from; False where there is none."""
        source = self.args.initial_weights
        return source.resume and self.backend.load_weights(source, name)

    def _train(
        self, rollout_id: int, shards: list[Box], values: Sequence[ColumnPart], logged: list[LoggedMetrics]
    ) -> tuple[RolloutData, bool]:
        """`train` and `train_on_values`. Returns the data with all that was computed for it, and whether the user's function
        edited masks of any rank; `logged` gets metrics as they come."""
        self.require(Holds.ALL, "it trains")
        Timer().add("train_wait", time.perf_counter() - self._idle_since)
        self.state_schedule.before_rollout(rollout_id)
        with phase("train"):
            with phase("data_preprocess"):
                data = self._fetch(shards)
                if values and self.groups.is_last_stage:
                    data["values"] = fetch_column(values, "values", data, self.args.http_control_timeout)
                expect_proof(self.args, rollout_id, data, self.weight_version)
            masks_are_edited = self._prepare(rollout_id, data, logged)
            self._dump(rollout_id, data)
            if rollout_id >= self.args.num_critic_only_steps:
                with (
                    self._recorded(Part.STEPS, rollout_id),
                    phase("actor_train"),
                    self.backend.routing_replay.training(),
                ):
                    self._train_steps(rollout_id, data, logged)
            else:
                self.backend.routing_replay.clear()
        self.state_schedule.after_rollout(rollout_id)
        logged.append(self._rollout_metrics(rollout_id, data))
        phases, step_key = self._phase_metrics(rollout_id)
        speeds = phase_speeds(phases, self._tokens_of_all_ranks(data), self._tflops(data))
        logged.append(({**speeds, **phases}, step_key))
        self._idle_since = time.perf_counter()
        return data, masks_are_edited

    def _tokens_of_all_ranks(self, data: RolloutData) -> float:
        """Tokens of all samples that were trained; the last ones of a rollout may fit no whole step. Collective."""
        own = torch.tensor(sum(data["total_lengths"]), dtype=torch.float64)
        # The ranks of a context-parallel group have the same samples.
        return float(all_reduce_sum(own, self.groups.host_token_group)) / self.groups.cp.size

    def _tflops(self, data: RolloutData) -> float | None:
        """10¹² floating-point operations of this rank in a pass forward; None where flags do not tell the model's shape."""
        if not all(vars(self.args)[name] for name in SHAPE_FLAGS):
            return None
        # How many ranks share this rank's samples.
        ranks = self.world_size // dist.get_world_size(self.groups.sample_group)
        return calculate_fwd_flops(data["total_lengths"], self.args) / ranks / 1e12

    def _prepare(self, rollout_id: int, data: RolloutData, logged: list[LoggedMetrics]) -> bool:
        """Compute log-probs and advantages, both on the last pipeline stage; then the user's function may change the data, on
        every rank. Returns whether it edited masks of any rank."""
        args = self.args
        others = [state for state in (REFERENCE, TEACHER) if state in self.states]
        needs_own = needs_log_prob_pass(args, steps=len(data["num_microbatches"]))
        # Without a pass there is nothing to record.
        recorded = self._recorded(Part.LOG_PROBS, rollout_id) if others or needs_own else contextlib.nullcontext()
        with recorded, self.states.turns():
            for state in others:
                with phase(f"{state}_log_probs"), self.states(state):
                    data.update(forward_log_probs(args, self.backend, data, with_entropy=False, prefix=f"{state}_"))
            if needs_own:
                state = OLD_ACTOR if args.keep_old_actor else ACTOR
                with phase("log_probs"), self.states(state), self.backend.routing_replay.log_prob_pass():
                    data.update(forward_log_probs(args, self.backend, data, with_entropy=args.use_rollout_entropy))
        is_imitation = args.loss_type == "sft_loss"
        # Demonstrations have no rewards, but a critic may learn beside the imitation.
        if args.compute_advantages_and_returns and (args.use_critic or not is_imitation):
            self._compute_advantages(rollout_id, data, logged)
        masks_are_edited = False
        if args.rollout_data_postprocess_path is not None:
            # A function may edit them in place.
            masks = copied_masks(data["loss_masks"])
            path, flag = args.rollout_data_postprocess_path, "--rollout-data-postprocess-path"
            returned = call_plug_in(flag, path, f"rollout {rollout_id}", args, rollout_id, data)
            if returned is not None and returned is not data:
                found = f"{flag} {path} returned {type(returned).__name__} for rollout {rollout_id}"
                raise UserError(f"{found}; expected None: it changes the columns of `rollout_data` in place")
            require_entries(data, f"{flag} {path}")
            put_beside_tokens(data)
            masks_are_edited = refresh_mask_sums(data, self.groups.sample_group, masks)
        if args.get_mismatch_metrics and self.groups.is_last_stage and not is_imitation:
            self._tell_worst_tokens(rollout_id, data)
        return masks_are_edited

    def _compute_advantages(self, rollout_id: int, data: RolloutData, logged: list[LoggedMetrics]) -> None:
        """Compute advantages and returns, on the last pipeline stage; all stages log their metrics."""
        metrics, groups = None, self.groups
        if groups.is_last_stage:
            metrics = compute_advantages_and_returns(self.args, data, groups.token_group)
        if self.args.normalize_advantages:
            named = {f"train/{name}": value for name, value in self.backend.broadcast(metrics).items()}
            # At the rollout's last step: trackers that get every Nth step get that one, if N divides the steps of a rollout.
            logged.append(
                ({**named, "train/step": (rollout_id + 1) * self.args.num_steps_per_rollout - 1}, "train/step")
            )

    def _tell_worst_tokens(self, rollout_id: int, data: RolloutData) -> None:
        """Log the tokens on which engine and trainer differ most; from one of the ranks that know all of them."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.args.hf_checkpoint, self.args.trust_remote_code)
        lines = worst_token_lines(data, self.tokenizer.decode, self.groups.token_group)
        if self.groups.data_rank == 0 and self.groups.speaks_for_its_samples:
            logger.info("rollout %d, tokens with the largest mismatch:\n  %s", rollout_id, "\n  ".join(lines))

    def _dump(self, rollout_id: int, data: RolloutData) -> None:
        template, groups = self.args.save_debug_train_data, self.groups
        if template is None or not groups.is_last_stage:
            return
        data = data.with_whole_responses()
        # The ranks of a tensor-parallel and a context-parallel group then hold the same data; one of them is enough.
        if groups.speaks_for_its_samples:
            save_train_data(template, rollout_id, data, groups.sample_group, groups.data_rank)

    def _rollout_metrics(self, rollout_id: int, data: RolloutData) -> LoggedMetrics:
        metrics, groups = None, self.groups
        if groups.is_last_stage:
            metrics = rollout_data_metrics(self.args, data, groups.token_group)
        named = {f"rollout/{name}": value for name, value in self.backend.broadcast(metrics).items()}
        return {**named, "rollout/step": rollout_id}, "rollout/step"


def _of_all_ranks(value: Any) -> list[Any]:
    """`value` of every rank. Exchanged on the host, where the death of a rank is noticed at once."""
    group = get_gloo_group()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
