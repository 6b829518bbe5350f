"""Public import path of the models and groups of engines that `--sglang-config` describes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from slime.arguments.config_files.serving_config import load_serving_config
from slime.scheduling.served_models import ModelServing as ModelConfig
from slime.scheduling.served_models import ServerGroup as ServerGroupConfig  # noqa: F401
from slime.utils.errors import UserError


@dataclass(frozen=True)
class SglangConfig:
    """The models of a file, in the order of the file."""

    models: tuple[ModelConfig, ...]

    @classmethod
    def from_yaml(
        cls, path: str | Path, *, hf_checkpoint: str | None = None, num_gpus_per_engine: int = 1
    ) -> SglangConfig:
        """Read a file as a run with `--sglang-config path` does, whatever its `--rollout-num-gpus` is.

        Args:
            hf_checkpoint: `--hf-checkpoint`, the model if the file names none.
            num_gpus_per_engine: `--rollout-num-gpus-per-engine`, used if the file names none.

        Raises:
            UserError: something in the file is wrong; one line for each thing, with its place. A run may refuse more of it,
                such as engines that prefill where none decode.
        """
        args = argparse.Namespace(
            sglang_config=str(path),
            hf_checkpoint=hf_checkpoint,
            rollout_num_gpus=None,
            rollout_num_gpus_per_engine=num_gpus_per_engine,
        )
        models, problems = load_serving_config(args)
        if problems:
            raise UserError("\n".join(problems))
        return cls(tuple(models))
