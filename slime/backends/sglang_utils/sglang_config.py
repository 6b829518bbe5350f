"""Public import path of what `--sglang-config` describes; only re-exports."""

from slime.scheduling.served_models import ModelServing as ModelConfig, ServerGroup as ServerGroupConfig  # noqa: F401, I001
