"""Public import path of process groups, which here stay while a rank sleeps; only re-exports."""

from slime.utils.process_groups import get_gloo_group, init_gloo_group, init_process_group  # noqa: F401
