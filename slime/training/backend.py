"""What the trainer asks of a training engine: the one door between the two.

Ranks, optimizer steps, objectives, passes, model states and metrics are written once, over this protocol. A backend knows the
model, its optimizer, its process groups and its checkpoints; it knows no objective and no rollout. All its methods are
collective over all ranks, unless they say otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from slime.arguments.checkpoints import WeightSource
from slime.training.context_parallel import ContextParallel
from slime.training.rollout_data import Metrics, MicroBatch
from slime.training.routing_replay import RoutingReplay
from slime.utils.plugin_loader import load_function

if TYPE_CHECKING:
    from slime.training.model_states import ModelStates
    from slime.training.resident_memory import Residents
    from slime.training.train_step import MicroBatches

# The classes of `--train-backend`, by path: they are imported in the ranks' processes only.
BACKENDS = {
    "megatron": "slime.backends.megatron_utils.backend.MegatronBackend",
    "fsdp": "slime.backends.fsdp_utils.backend.FSDPBackend",
}

# Takes a micro-batch and its logits to lists with one tensor per sample, by name. Logits are [R, V / tensor-parallel size] for
# the R rows that `rows_of_logits` names; a critic gives its values [T, 1] in their place.
Collect = Callable[[MicroBatch, torch.Tensor], dict[str, list[torch.Tensor]]]
# Gives what a backend's own layers add to the loss of a micro-batch: (un-normalised term, its metrics).
OwnTerm = Callable[[MicroBatch], tuple[torch.Tensor, Metrics]]


class StepLoss(Protocol):
    """The un-normalised loss of a micro-batch and its metrics, from its logits, as `Collect` has them."""

    def __call__(
        self, batch: MicroBatch, logits: torch.Tensor, own_term: OwnTerm | None = None
    ) -> tuple[torch.Tensor, Metrics]: ...


@dataclass(frozen=True)
class RankGroups:
    """This rank's place among the ranks of its model.

    Samples are dealt to data-parallel ranks. The ranks of a context-parallel group share each sample, so what is summed over
    tokens is summed over both.

    Attributes:
        data_rank: which shard of a rollout this rank has.
        sample_group: ranks that together have every sample exactly once (data parallelism).
        token_group: ranks that together have every token exactly once (data and context parallelism).
        host_token_group: the same ranks, for collectives on objects and on tensors of the host.
        replica: which copy of the weights this rank holds a part of; the ranks of one copy together hold all weights.
        tensor_group: ranks that share the vocabulary of the logits; None if each rank has all of it.
        tensor_rank: this rank's place in it.
        stage: place of this rank's pipeline stage among the `num_stages`.
        is_last_stage: whether logits come out on this rank, and with them the loss and all that is computed per token.
        place_group: the ranks in this place on all stages, in the order of the stages; None for a backend without stages.
    """

    data_rank: int
    sample_group: dist.ProcessGroup
    token_group: dist.ProcessGroup
    host_token_group: dist.ProcessGroup
    replica: int
    tensor_group: dist.ProcessGroup | None
    tensor_rank: int
    cp: ContextParallel
    is_last_stage: bool
    stage: int = 0
    num_stages: int = 1
    place_group: dist.ProcessGroup | None = None

    @property
    def speaks_for_its_samples(self) -> bool:
        """Whether this rank reports on its samples: one rank does, of those on a stage that have the same samples."""
        return self.tensor_rank == 0 and self.cp.rank == 0

    @property
    def gives_weights(self) -> bool:
        """Whether this rank hands weights out: one rank of each stage does, and the others of its copy help to make them
        whole."""
        return self.replica == 0 and self.data_rank == 0 and self.speaks_for_its_samples


@dataclass(frozen=True)
class Update:
    """The outcome of an update.

    Attributes:
        taken: whether the weights were changed.
        grad_norm: over all parameters of all ranks, before clipping; infinite or NaN if a gradient is.
        zeros: how many entries of the gradient are zero, over all ranks; None unless `--log-num-zeros-in-grad`.
    """

    taken: bool
    grad_norm: float
    zeros: float | None = None


@dataclass(frozen=True)
class StepResult:
    """What a backend's step gives back.

    Attributes:
        metrics: those of each micro-batch, on the last stage; elsewhere none.
        learning_rates: those of the parameter groups in this update.
        measured: what flags have the backend measure beside that; equal on all ranks.
    """

    metrics: list[Metrics]
    learning_rates: list[float]
    update: Update
    measured: dict[str, float] = field(default_factory=dict)


class UnfinishedSave(Protocol):
    """A checkpoint that is being written, in its hidden directory.

    Attributes:
        bytes_on_host: bytes of it that this rank holds in host memory until it is finished.
    """

    bytes_on_host: int

    def has_ended(self) -> bool:
        """Whether this rank would not wait for its own part in `finish`. Not collective."""

    def finish(self) -> Any:
        """Wait until all parts are on the disk. May be called again before they are published, with the same result.

        Raises:
            RunError: a rank could not write its part, or not in time; on all ranks. The directory is removed then, unless time
                ran out, since its disk may hang.
        """


class Backend(Protocol):
    """One rank of a model that is trained.

    Attributes:
        groups: this rank's place, since `place`.
        routing_replay: what the actor's routers ask for experts to replay; without layers if there is nothing to replay.
    """

    groups: RankGroups
    routing_replay: RoutingReplay

    def __init__(self, args: argparse.Namespace) -> None:
        """`args` are those of the model's role. Touches neither device nor process groups."""

    def place(self) -> None:
        """Join the process groups that the environment names and build the model, with weights that do not count yet."""

    def load(self, source: WeightSource) -> int:
        """Load the weights that are trained and build the optimizer; in a resume, restore everything else too.

        Returns:
            The last finished rollout; −1 at a new start.
        """

    def load_weights(self, source: WeightSource, state: str | None = None) -> bool:
        """Put the weights of a checkpoint into the live model, or another set of weights that it holds under the name `state`.

        Returns:
            False, and nothing is done, if it holds no such state.
        """

    def save(
        self,
        rollout_id: int,
        states: ModelStates | None = None,
        stored: Sequence[str] = (),
        weight_version: int | None = None,
    ) -> UnfinishedSave:
        """Begin to write the checkpoint of `rollout_id`, which `checkpoint_publication` makes the newest when it is finished.

        When this returns, weights and optimizer may change again; errors are raised when the save is finished.

        Args:
            stored: names of sets of weights in `states` that the checkpoint holds too.
            weight_version: the checkpoint's, for `slime.weights.push.read_weight_version`; None: it has none.
        """

    def forward(self, batches: MicroBatches, collect: Collect, prefix: str = "") -> list[dict[str, list[torch.Tensor]]]:
        """A pass without gradient and without dropout.

        Args:
            prefix: what the names of the results will begin with; tells the user's functions whose weights are live.

        Returns:
            On the last stage what `collect` gave, per micro-batch; elsewhere nothing.
        """

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
        """Forward, backward and one update.

        Args:
            denominator: the sum of `loss` over all micro-batches of all ranks is divided by it, and by nothing else.
            accepts: called with the gradient norm, and whether the loss scale of float16 overflowed, when gradients are known
                and the weights have not changed. It gives the same answer on all ranks; if False, no update is taken.
            rollouts: how far an update that is taken moves the learning-rate schedule on.
            place: the rollout, and the number of the step in it, for users' functions.
            followed: another step comes next, and nothing else reads the weights before it. Only then may the update still be
                unfinished when this returns.
        """

    def leaving_no_trace(self) -> contextlib.AbstractContextManager[None]:
        """In the block, passes and steps that are not accepted leave no trace.

        Parameters, the optimizer's state, the schedule, random generators and all counters (of experts and of steps) are as
        they were; there are no gradients; users' functions are not called. After an error in the block none of this holds.
        """

    def optimizer_bytes_to_come(self) -> int:
        """Bytes that the next update will allocate on this rank's device for what the optimizer remembers. Not collective."""

    def bad_gradients(self) -> list[str]:
        """Names of this rank's parameters whose gradient is not finite. Not collective."""

    def reset_optimizer(self) -> None:
        """Let the optimizer forget its history, as before the first update; weights and learning rate stay."""

    def broadcast(self, value: Any) -> Any:
        """`value` of the last stage, on all stages; small picklable things only."""

    def stage_tensors(self) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
        """What walks through the live weights of this pipeline stage, whole, under the names of a Hugging Face checkpoint. All
        stages together give each tensor once, and all ranks of a stage give the same.

        A walk is collective over the ranks of one copy of the stage only. A tensor may share memory with the model, and stays
        as it is until the weights change.
        """

    def tensors_and_own_experts(
        self,
    ) -> tuple[Callable[[], Iterator[tuple[str, torch.Tensor]]], Callable[[], dict[str, torch.Tensor]]]:
        """(`stage_tensors` without experts, what gives the tensors of this rank's experts). An expert's tensors are given if
        this rank has them whole, under the names of a Hugging Face checkpoint. The second is not collective."""

    def expected_names(self) -> set[str]:
        """Names that all stages together must give: those of the checkpoint that the engines started from. Not collective."""

    def live_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's part of the live weights, in the same order at every call; another set of weights takes their place. Not
        collective."""

    def residents(self) -> Residents:
        """What this rank has on its device between two steps, at this moment. Not collective."""

    def close(self) -> None:
        """Leave all process groups."""


def make_backend(args: argparse.Namespace) -> Backend:
    """The backend of `--train-backend`."""
    return load_function(BACKENDS[args.train_backend])(args)
