"""Reads the settings of masked importance sampling from the arguments, where `--custom-config-path` has put them."""

from __future__ import annotations

import argparse
import dataclasses
import difflib

from slime.algorithms.mismatch import MisSettings
from slime.utils.errors import UserError

_NAMES = tuple(field.name for field in dataclasses.fields(MisSettings))
_PREFIXES = ("tis_", "rs_", "use_rs", "use_tis")


def mis_settings_from_args(args: argparse.Namespace) -> MisSettings:
    """The settings as far as `args` has them, else their defaults.

    Raises:
        UserError: a value that cannot be, or a key of the configuration file that is none but looks like one.
    """
    for key in getattr(args, "custom_config", {}):
        if key.startswith(_PREFIXES) and key not in _NAMES:
            near = difflib.get_close_matches(key, _NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_NAMES)}"
            raise UserError(f"masked importance sampling: unknown setting {key}; {hint}")
    return MisSettings(**{name: getattr(args, name) for name in _NAMES if hasattr(args, name)})
