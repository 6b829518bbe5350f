"""TensorBoard event files, written without torch so that the driver stays light."""

from pathlib import Path


class TensorBoardTracker:
    """Scalars by tag and step in one event file below `directory`."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer

        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._writer = Writer(str(directory))

    def add_scalars(self, values: dict[str, float], step_key: str, step: int) -> None:
        """Write all `values` at `step` and flush: a killed run loses nothing that was logged."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """End the event file, which does not tell how the run went."""
        self._writer.close()
