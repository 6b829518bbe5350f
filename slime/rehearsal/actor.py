"""The real ranks of actor and critic, with made-up samples and a transport that keeps nothing."""

from __future__ import annotations

import abc
import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.arguments.checkpoints import REFERENCE, TEACHER, WeightSource, other_model_states
from slime.arguments.hf_config import spelling
from slime.rehearsal.recorder import Recorder
from slime.rehearsal.report import Pushed, Saved, Task
from slime.training.actor_rank import ActorRank
from slime.training.memory_probe import made_up_columns, zeros
from slime.training.model_states import ModelStates, StateSchedule
from slime.training.rollout_data import RolloutData
from slime.training.train_rank import CriticRank, TrainRank
from slime.training.train_step import forward_values
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.run_values import with_run_values
from slime.utils.weight_transports import WEIGHT_TRANSPORTS, WeightTransport
from slime.weights.buckets import BucketFlattener, FlatBucket
from slime.weights.hf_reader import StoredTensor
from slime.weights.transports.transport import Transport

if TYPE_CHECKING:
    from slime.weights.buckets import NamedTensors

_TRANSPORT = "rehearsal"
# A number of rollouts that is beyond the warm-up of any schedule.
_LONGER_THAN_ANY_WARM_UP = 10**9


class SwallowingTransport(Transport):
    """Flattens buckets, as a real transport does, and drops them."""

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        self._flattener = BucketFlattener(max_bytes=args.update_weight_buffer_size)
        self._in_flight: FlatBucket | None = None

    def send(self, bucket: NamedTensors) -> None:
        # As in a real transfer, a bucket is held until the next one has been made; a tensor larger than a bucket is not held.
        flat = self._flattener.flatten(bucket)
        self._in_flight = flat if flat.is_copy else None

    def finish(self) -> None:
        self._in_flight = None
        self._flattener.release()


class SwallowingWriter:
    """Counts the tensors that a rank would write, by kind, and takes the same host memory as the writer of Megatron-Core
    0.16.1.

    Args:
        owns_optimizer: the saved optimizer state is this rank's own, and not shared with its replicas.

    Attributes:
        tensors, sizes: number and bytes of tensors, including those that replicas of the rank hold, too.
        written: bytes that this rank writes. Replicas that share the writing each write the same number of bytes.
    """

    def __init__(self, owns_optimizer: bool) -> None:
        self._owns_optimizer = owns_optimizer
        self.tensors: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        self.written: defaultdict[str, float] = defaultdict(float)

    def __call__(self, state: dict[str, Any], directory: str, strategy: Any, async_sharded_save: bool) -> Any:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        apply_factories(state)
        shared = isinstance(strategy, FullyParallelSaveStrategyWrapper)
        path = Path(directory)
        kind_of_weights = f"weights of {path.name}" if path.parent.name == "states" else "weights"
        due, taken, copies = 0.0, 0, []
        for key, part in state.items():
            kind = "optimizer" if key in ("optimizer", "float32_copies") else kind_of_weights
            is_owned = kind == "optimizer" and self._owns_optimizer
            for tensor in nested_values(part) if isinstance(part, dict) else ():
                # The last number of `replica_id` counts replicas. If another one is not 0, another rank writes this tensor.
                if not isinstance(tensor, ShardedTensor) or any(tensor.replica_id[:-1]):
                    continue
                size = tensor.data.nbytes
                replicas = self._replicas(tensor.key) if shared and not is_owned else 1
                written = size / replicas if replicas > 1 or tensor.replica_id[-1] == 0 else 0
                self.tensors[kind] += 1
                self.sizes[kind] += size
                self.written[kind] += written
                due += written
                if taken < due:
                    taken += size
                    copies.append(_in_host_memory(tensor.data))
        return AsyncRequest(None, (), [])

    def _replicas(self, name: str) -> int:
        from megatron.core import parallel_state

        if ".experts." in name:
            return parallel_state.get_expert_data_parallel_world_size()
        return parallel_state.get_data_parallel_world_size(with_context_parallel=True)


# Flags of features that draw, measure or compare values, wait for other ranks, or run concurrently; with the values that switch
# them off.
_UNTOLD = {
    "moe_input_jitter_eps": None, "moe_router_force_load_balancing": False, "moe_shared_expert_overlap": False,
    "overlap_moe_expert_parallel_comm": False, "ep_overlap_early_attn_memory_release": False,
    "moe_per_layer_logging": False, "log_params_norm": False, "log_throughput": False,
    "check_weight_hash_across_dp_replicas_interval": None, "distributed_timeout_seconds_after_init": None,
    "use_pytorch_profiler": False, "record_memory_history": False,
}  # fmt: skip


class RehearsedRank(TrainRank, abc.ABC):
    """A rank whose phases are called one by one.

    Attributes:
        vocabulary_columns: columns of its logits; 0: it has no logits.
        pushed: the result of its push; None before it, and on a rank that only helps or has nothing to push.
        saved: its part of a checkpoint; None before it, and in a run that saves none.
        not_rehearsed: descriptions of what was left out.
    """

    def __init__(self, task: Task, recorder: Recorder) -> None:
        # Megatron must not be imported before its adapter is installed, which the caller does.
        from slime.backends.megatron_utils.transformer_config import FUSIONS

        args = task.args
        self._task = task
        self._recorder = recorder
        self.not_rehearsed: list[str] = []
        self.pushed: Pushed | None = None
        self.saved: Saved | None = None
        self.vocabulary_columns = args.padded_vocab_size // args.tensor_model_parallel_size
        changed = {"initial_weights": self._weights(args), "update_weight_transport": _TRANSPORT, "save_hf": None}
        # Nothing comes from a rollout manager.
        changed["rollout_data_transport"] = "object-store"
        if args.save is not None:
            changed["save"] = str(task.answer.with_name("checkpoints"))
        if args.num_rollout is None:
            changed["num_rollout"] = _LONGER_THAN_ANY_WARM_UP
            self.not_rehearsed.append("the length of the learning rate's schedule, which the data set tells")
        if args.use_routing_replay:
            changed["use_routing_replay"] = False
            self.not_rehearsed.append("routing replay: the layers choose their experts freely")
        if asked := [name for name in _UNTOLD if vars(args)[name]]:
            changed |= {name: _UNTOLD[name] for name in asked}
            self.not_rehearsed.append(f"{', '.join(map(spelling, asked))}: the rehearsal goes without")
        if fusions := [name for name in FUSIONS if name in args.typed_flags and vars(args)[name]]:
            changed["typed_flags"] = args.typed_flags - set(fusions)
            self.not_rehearsed.append(f"{', '.join(map(spelling, fusions))}: the layers go without")
        args = with_run_values(argparse.Namespace(**{**vars(args), **changed}), rank=task.rank)
        super().__init__(args, task.rank, args.world_size, 0)

    @abc.abstractmethod
    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases of the rank by name, in order."""

    @abc.abstractmethod
    def brought(self) -> Iterable[str]:
        """Columns with a value per response token that the rank gets from other processes, beside those of every rollout."""

    def kinds(self) -> dict[int, str]:
        """The kinds of the storages that a model and its optimizer hold, by number."""
        found: dict[int, str] = {}

        def note(kind: str, tensors: Iterable[Any]) -> None:
            for tensor in tensors:
                number = self._recorder.note_storage(tensor) if torch.is_tensor(tensor) else None
                if number is not None:
                    found.setdefault(number, kind)

        for chunk in self.backend.model:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                note("gradients", [buffer.grad_data])
                note("weights", [buffer.param_data])
        note("weights", (tensor for _, tensor in self.backend.live_tensors()))
        if self.backend.optimizer is not None:
            from slime.backends.megatron_utils.optimizer import parts_of

            for part in parts_of(self.backend.optimizer):
                if part.optimizer is not None:
                    note("optimizer", (p for group in part.optimizer.param_groups for p in group["params"]))
                    note("optimizer", (value for state in part.optimizer.state.values() for value in state.values()))
        return found

    def _weights(self, args: Any) -> WeightSource:
        """The source of weights. If a checkpoint can be read here only its shapes are read."""
        source = args.initial_weights
        self._has_files = args.hf_checkpoint is not None and any(Path(args.hf_checkpoint).glob("*.safetensors"))
        if source is not None and source.kind == "hf" and any(Path(source.path).glob("*.safetensors")):
            StoredTensor.__getitem__ = _shape_alone
            return source
        self.not_rehearsed.append("loading: no checkpoint that can be read here gives the weights of the model")
        return WeightSource("random")

    def _make_data(self) -> None:
        """Make samples of the task's lengths; their values do not matter."""
        device = get_accelerator().current_device()
        columns, responses = made_up_columns(self._task.micro_batches, device, self.args.data_parallel_size)
        if self.groups.is_last_stage:
            columns.update({name: zeros(responses, torch.float32, device) for name in self.brought()})
        self._data = RolloutData.of_rank(columns, self.groups.cp)

    def _take_first_step(self) -> None:
        """Take a step in which the optimizer creates its state. One micro-batch is enough, or a group of them if
        interleaved."""
        chunks = self.backend.model
        count = 1 if len(chunks) == 1 else chunks[0].config.microbatch_group_size_per_vp_stage
        self._train_steps(0, RolloutData({**self._data, "num_microbatches": [count]}, self._data.cp), [])

    def _take_step(self) -> None:
        self._train_steps(0, self._data, [])

    def _save(self) -> None:
        """Save without writing tensors, if the run saves."""
        from megatron.core import dist_checkpointing

        from slime.backends.megatron_utils.checkpoint import writing

        if self.args.save is None:
            return
        if self._task.args.save_hf is not None:
            self.not_rehearsed.append("the export of --save-hf")
        dist_checkpointing.save = writer = SwallowingWriter(self.args.use_distributed_optimizer)
        writing.save_generators = lambda directory: None
        # In a run rank 0 creates the directory for all ranks; here each rank has its own.
        Path(self.args.save).mkdir()
        self.save(0)
        written = {kind: round(size) for kind, size in writer.written.items()}
        self.saved = Saved(dict(writer.tensors), dict(writer.sizes), written, self._recorder.host_peak or None)


class RehearsedActor(RehearsedRank, ActorRank):
    """A rank of the actor."""

    def __init__(self, task: Task, recorder: Recorder) -> None:
        WEIGHT_TRANSPORTS[_TRANSPORT] = WeightTransport(f"{__name__}.SwallowingTransport", _TRANSPORT)
        super().__init__(task, recorder)

    def phases(self) -> dict[str, Callable[[], None]]:
        return {
            "model": lambda: self._join(("localhost", 0)),
            "load": self._load,
            "data": self._make_data,
            "log-probs": lambda: self._prepare(0, self._data, []),
            "first step": self._take_first_step,
            "step": self._take_step,
            "metrics": lambda: self._rollout_metrics(0, self._data),
            "push": self._push,
            "save": self._save,
        }

    def brought(self) -> Iterable[str]:
        if self.args.use_critic:
            yield "values"
        if self.args.use_opd and self.args.opd_type != "megatron":
            yield "teacher_log_probs"

    def _load(self) -> None:
        self.states = ModelStates(self.backend.live_tensors)
        self.state_schedule = StateSchedule(self.args, self.states, lambda line: None)
        self.weight_source, self.tokenizer, self.weight_version = None, None, 0
        # The states are captured as if they had been loaded; which weights they have does not matter.
        for name in (REFERENCE, TEACHER):
            if name in other_model_states(self.args):
                self.states.capture(name)
        self._load_model()
        self.state_schedule.start()

    def _push(self) -> None:
        if not self.args.has_engines:
            self.not_rehearsed.append("a weight push: the run has no engines")
            return
        from slime.backends.megatron_utils.hf_conversion import family_of_run

        try:
            family_of_run(self.args)
        except UserError as error:
            self.not_rehearsed.append(f"a weight push, because nothing names its tensors: {error}")
            return
        if not self._has_files:
            self.backend.expected_names = lambda: None
            self.not_rehearsed.append("the names of the push: --hf-checkpoint has no weights to compare with")
        expected = self.open_weight_push().expected_names
        sent = self.send_weights(self.groups.stage, 1)
        if sent is None:
            return
        self.pushed = Pushed(sent.names, sent.num_buckets, None if expected is None else sorted(expected))
        if sent.refusal is not None:
            raise RuntimeError(sent.refusal)


class RehearsedCritic(RehearsedRank, CriticRank):
    """A rank of the critic."""

    def __init__(self, task: Task, recorder: Recorder) -> None:
        super().__init__(task, recorder)
        self.vocabulary_columns = 0

    def phases(self) -> dict[str, Callable[[], None]]:
        return {
            "model": lambda: self._join(("localhost", 0)),
            "load": self._load_model,
            "data": self._make_data,
            "values": lambda: self._data.update(forward_values(self.args, self.backend, self._data)),
            "first step": self._take_first_step,
            "step": self._take_step,
            "save": self._save,
        }

    def brought(self) -> Iterable[str]:
        return ["returns"]


# The class of a rehearsed rank, by the role in its arguments.
RANKS: dict[str, type[RehearsedRank]] = {"actor": RehearsedActor, "critic": RehearsedCritic}


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The copy of a tensor that the writer makes before it writes; a view is copied, too."""
    if tensor.device.type != "cpu":
        return tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.detach().clone() if is_view else tensor


def _shape_alone(stored: StoredTensor, index: slice | tuple[slice, ...]) -> torch.Tensor:
    """The indexed part, with the shape and the dtype in the file; no values are read."""
    return torch.empty(stored.shape, dtype=stored.dtype)[index]
