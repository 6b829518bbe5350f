"""Public import path of the command line; its home is `slime.arguments`."""

from slime.arguments import parse_args
from slime.arguments import validate_args as slime_validate_args

__all__ = ["parse_args", "slime_validate_args"]
