"""Which trackers a run has, and whether they can work."""

import argparse
import importlib.util
import logging
from collections.abc import Iterator

from slime.arguments.plug_ins import flag_of

logger = logging.getLogger(__name__)


def settle_trackers(args: argparse.Namespace) -> None:
    """Fill in `use_tensorboard` where it was not typed: yes, if no other tracker is chosen and the package is there."""
    if args.use_tensorboard is None:
        args.use_tensorboard = not args.use_wandb and importlib.util.find_spec("tensorboard") is not None


def tracker_violations(args: argparse.Namespace) -> Iterator[str]:
    """One message for every tracker whose package is missing or whose flags contradict each other."""
    if args.use_wandb and importlib.util.find_spec("wandb") is None:
        yield "--use-wandb needs the package wandb: pip install wandb"
    if args.use_tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "--use-tensorboard needs the package tensorboard: pip install tensorboard"
    host = args.wandb_host
    if host is not None and not host.startswith(("http://", "https://")):
        yield f"--wandb-host {host}: it must start with http:// or https://, as in https://wandb.example.com"
    idle = sorted(name for name in args.typed_flags if name.startswith("wandb_") and not args.use_wandb)
    if idle:
        logger.warning("%s: no effect without --use-wandb", ", ".join(flag_of(name) for name in idle))
