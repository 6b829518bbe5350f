"""Public import path of the writer of event files."""

from slime.observability.trackers import TensorBoardTracker as TensorBoardTracker
