"""The process of one rehearsed rank: `python -m slime.rehearsal.rank FILE`, with a pickled `Task` in the file.

It ends with the process that started it, and writes its findings as JSON to the file that the task names. Nothing here may
import torch before the stand-in for CUDA is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slime.rehearsal.report import Failure, Rehearsed, Task
from slime.utils.child_process import exit_when_parent_dies

if TYPE_CHECKING:
    from slime.rehearsal.actor import RehearsedRank
    from slime.rehearsal.recorder import Recorder


def main(make: Callable[[Task, Recorder], RehearsedRank] | None = None) -> int:
    """Rehearse the rank of the task. `make`: a function that makes the rank, instead of the class of the task's role."""
    exit_when_parent_dies()
    task: Task = pickle.loads(Path(sys.argv[1]).read_bytes())
    prepare(task.library)
    answer(task, make)
    return 0


def prepare(library: Path | None) -> None:
    """Prepare this process, which has not imported torch yet, for the rehearsal of a rank.

    Args:
        library: the stand-in for CUDA; None: the tensors will be fake CPU tensors.
    """
    if library is not None:
        from slime.rehearsal.stand_in import load

        load(library)
    os.environ["SLIME_ACCELERATOR"] = "rehearsal"
    from slime.backends.megatron_utils.cpu_runtime import KERNEL_PACKAGES

    # They cannot run on fake tensors. A module that is None here cannot be imported.
    sys.modules.update(dict.fromkeys(KERNEL_PACKAGES))


def answer(task: Task, make: Callable[[Task, Recorder], RehearsedRank] | None = None) -> None:
    """Rehearse the rank, once in the life of a prepared process, and write the findings."""
    task.answer.write_text(json.dumps(dataclasses.asdict(_rehearse(task, make))))


def _rehearse(task: Task, make: Callable[[Task, Recorder], RehearsedRank] | None) -> Rehearsed:
    import torch

    torch.set_num_threads(1)
    from slime.backends.megatron_utils import cpu_runtime
    from slime.rehearsal.fake_device import enter, lift_experts, lift_megatron, lift_parts, lift_selection, lift_stages

    recorder, fake = enter("cpu" if task.library is None else "cuda", task.rank, task.args.world_size)
    cpu_runtime.install()
    lift_megatron()
    lift_selection()
    if task.args.pipeline_model_parallel_size > 1:
        lift_stages()
    if task.args.pipeline_model_parallel_size * task.args.expert_model_parallel_size > 1:
        lift_parts()
    if task.args.num_experts:
        lift_experts(recorder)
    from slime.rehearsal.actor import RANKS

    seconds: dict[str, float] = {}
    failure = None
    with fake, recorder:
        rehearsed = (make or RANKS[task.args.role])(task, recorder)
        for name, phase in rehearsed.phases().items():
            started = time.monotonic()
            try:
                with recorder.during(name):
                    phase()
            except Exception as error:
                failure = _failure(name, error)
                break
            finally:
                seconds[name] = time.monotonic() - started
        kinds = rehearsed.kinds()
    return Rehearsed(
        rank=task.rank,
        seconds=seconds,
        peaks=recorder.peaks(kinds, rehearsed.vocabulary_columns),
        operations=dict(recorder.operations),
        waits={phase: dict(waits) for phase, waits in recorder.waits.items()},
        collectives={
            phase: [(*key, *entry) for key, entry in entries.items()] for phase, entries in recorder.collectives.items()
        },
        data_dependent=dict(recorder.data_dependent),
        pushed=rehearsed.pushed,
        not_rehearsed=rehearsed.not_rehearsed,
        failure=failure,
        saved=rehearsed.saved,
    )


def _failure(phase: str, error: Exception) -> Failure:
    from slime.rehearsal.recorder import place_of

    frames = [place_of(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    places = [place for place in frames if place is not None]
    # Errors of missing kernels list all kernels that there are.
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Failure(phase, text, places[-1] if places else "", traceback.format_exc())


if __name__ == "__main__":
    sys.exit(main())
