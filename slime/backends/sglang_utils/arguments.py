"""Public import path of the arguments of an engine's server; only re-exports."""

from slime.backends.sglang_utils.server_arguments import ServerArguments, compute_server_arguments  # noqa: F401
