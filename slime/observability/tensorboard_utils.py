"""TensorBoard event files, written without torch so that the driver stays light."""

import os
from collections.abc import Mapping
from pathlib import Path

from slime.observability.wandb_utils import AXES


class TensorBoardTracker:
    """Scalars by tag and step in one event file below `directory`."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer

        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._older = sorted(directory.glob("events.out.tfevents.*"))
        self._writer = Writer(str(directory))

    def add_scalars(self, values: dict[str, float], step_key: str, step: int) -> None:
        """Write all `values` at `step` and flush: a killed run loses nothing that was logged."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def forget(self, lost: Mapping[str, range]) -> None:
        """Take the values at the steps `lost[axis]` out of the event files that were here before this one."""
        for path in self._older:
            _drop_values(path, lost)

    def close(self, *, failed: bool = False) -> None:
        """End the event file, which does not tell how the run went."""
        self._writer.close()


def _drop_values(path: Path, lost: Mapping[str, range]) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    kept, dropped = [], 0
    # A killed run's file may end within a record; what comes before it is read.
    for record in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(record)
        values = list(event.summary.value)
        axes = [AXES.get(value.tag.partition("/")[0], "") for value in values]
        left = [value for value, axis in zip(values, axes, strict=True) if event.step not in lost.get(axis, ())]
        dropped += len(values) - len(left)
        if len(left) == len(values):
            kept.append(record)
        elif left:
            del event.summary.value[:]
            event.summary.value.extend(left)
            kept.append(event.SerializeToString())
    if dropped:
        temporary = path.with_name(f".{path.name}.writing")
        with open(temporary, "wb") as file:
            writer = RecordWriter(file)
            for record in kept:
                writer.write(record)
            writer.flush()
        os.replace(temporary, path)
