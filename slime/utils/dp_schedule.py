"""Public import path of the data-parallel schedule; only re-exports."""

from slime.training.schedule import build_dp_schedule as build_dp_schedule
