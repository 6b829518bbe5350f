"""Public import path of the data-parallel schedule; only re-exports."""

from slime.training.schedule import build_dp_schedule

__all__ = ["build_dp_schedule"]
