"""Public import path of the checks of engines; only re-exports."""

from slime.serving.fleet import HealthChecks  # noqa: F401
