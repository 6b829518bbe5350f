"""Public import path of dumps of rollouts: written, read, and where they lie; only re-exports."""

from slime.rollout.rollout_dump import dump_path, load_rollout, save_rollout  # noqa: F401
