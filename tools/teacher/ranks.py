"""A rank of the teacher: it holds a part of the model, and does what rank 0 says, together with all other ranks.

Ranks wait for rank 0 as long as nothing fails, and rank 0 says something at least every `BEAT_SECONDS`. So the time limit of
collectives (`--distributed-timeout-minutes`) finds a rank that is gone or hangs, even while no client asks anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.arguments.checkpoints import WeightSource
from slime.arguments.paths import LOADED_BY_RANKS, load_plug_ins
from slime.scheduling.device_turns import Holds
from slime.training.backend import make_backend
from slime.training.model_states import HostCopy
from slime.training.resident_memory import ResidentMemory
from slime.training.rollout_data import MicroBatch, RolloutData
from slime.training.train_step import micro_batches
from slime.utils import env
from slime.utils.checkpoint_directory import latest_iteration
from slime.utils.device import get_accelerator
from slime.utils.misc import no_garbage_collection
from slime.utils.process_groups import get_gloo_group, patient_groups
from tools.teacher.scoring import Question, score

BEAT_SECONDS = 10.0


def fixed(source: WeightSource) -> WeightSource:
    """`source` with the iteration that is the newest of its checkpoint now. A run that still trains may have saved another one
    by the time that the weights are read, or the next rank looks."""
    is_newest = source.kind == "megatron" and source.step is None
    return dataclasses.replace(source, step=latest_iteration(source.path)) if is_newest else source


class TeacherRank:
    """One rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as torch.distributed expects.

    Args:
        args: the arguments of a run with this model. No optimizer is ever built, whatever they say.
        local_rank, local_world_size: this rank's number among the ranks of this machine, and how many they are.
        sample_rows, label_rows: see `score`.

    Attributes:
        source: the source of the weights that it starts with; that of rank 0 counts for all.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        local_rank: int,
        local_world_size: int,
        sample_rows: int,
        label_rows: int,
    ) -> None:
        self.args, self.source = args, fixed(args.initial_weights)
        self._local_rank, self._local_world_size = local_rank, local_world_size
        self._chunks = {"sample_rows": sample_rows, "label_rows": label_rows}

    def start(self) -> None:
        """Join the others and load the model, in the thread that will compute. Collective.

        Raises:
            UserError: flags and checkpoint do not fit.
        """
        threads = env.threads_of_user() or max(len(os.sched_getaffinity(0)) // self._local_world_size, 1)
        torch.set_num_threads(threads)
        get_accelerator().set_device(self._local_rank)
        # Most of its time are imports.
        with no_garbage_collection():
            self.backend = make_backend(self.args)
            # Behind the backend, without which some of them cannot be imported.
            load_plug_ins(self.args, LOADED_BY_RANKS)
            self.backend.place()
        # Nothing is trained: the room that Megatron has made for gradients goes back.
        ResidentMemory(self.backend.residents, ends=True).hold(Holds.WEIGHTS)
        told = [self.source]
        dist.broadcast_object_list(told, src=0, group=get_gloo_group())
        self.backend.load_weights(*told)
        get_accelerator().keep_freed_memory()

    def lead(self, name: str, *arguments: Any) -> Any:
        """On rank 0: have all ranks do `name`, one of the methods below. What it gives here."""
        dist.broadcast_object_list([(name, arguments)], src=0, group=get_gloo_group())
        return getattr(self, name)(*arguments)

    def follow(self) -> None:
        """On the other ranks: do what rank 0 says until it says `leave`."""
        name = None
        while name != "leave":
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0, group=get_gloo_group())
            name, arguments = told[0]
            getattr(self, name)(*arguments)

    def answer(self, question: Question) -> dict[str, np.ndarray]:
        """What the model says; see `score`."""
        tokens = torch.from_numpy(question.tokens).to(get_accelerator().current_device())
        length = len(tokens)
        columns = {"tokens": [tokens], "total_lengths": [length], "response_lengths": [length - 1]}
        data = RolloutData({**columns, "sample_indices": [0]})

        def collect(batch: MicroBatch, logits: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            group = self.backend.groups.tensor_group
            found = score(logits, batch.stream.predicting_rows.within(logits), question, group, **self._chunks)
            return {name: [values.cpu()] for name, values in found.items()}

        outputs = self.backend.forward(micro_batches(self.args, data, [[0]]), collect, "teacher_")
        found = self.backend.broadcast(outputs[0] if outputs else None)
        return {name: values.numpy() for name, (values,) in found.items()}

    @torch.no_grad()
    def update(self, source: WeightSource, seconds: float) -> str | None:
        """Load the weights of `source`, waiting up to `seconds` for other ranks; None, or why they cannot be loaded. Then the
        weights that were there before are there again. Meanwhile they have a copy in host memory."""
        before, problem = HostCopy(self.backend.live_tensors()), None
        before.fill(self.backend.live_tensors())
        with patient_groups(seconds):
            try:
                self.backend.load_weights(source)
            # Whatever it is: either all ranks hear of it, or the exchange fails as well.
            except Exception as error:
                problem = f"{error}" or type(error).__name__
            problems: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(problems, problem, group=get_gloo_group())
        problem = next((found for found in problems if found is not None), None)
        if problem is not None:
            before.put_into(self.backend.live_tensors())
        return problem

    def beat(self) -> None:
        """Meet the other ranks."""
        dist.barrier(group=get_gloo_group())

    def leave(self) -> None:
        """Leave all groups."""
        self.backend.close()
