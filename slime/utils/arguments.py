"""Public import path of the command line; its home is `slime.arguments`."""

from slime.arguments import parse_args
from slime.arguments import validate_args as slime_validate_args
from slime.arguments.config_files.role_config import role_args as parse_megatron_role_args

__all__ = ["parse_args", "parse_megatron_role_args", "slime_validate_args"]
