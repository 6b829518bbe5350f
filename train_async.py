"""Asynchronous reinforcement learning: generate the next rollouts while the trainer learns from the last ones.

python train_async.py --help
python train_async.py ... --dry-run
"""

import argparse
import sys

from slime import installed_packages

with installed_packages():
    from slime.ray.driver import RunProgress
    from slime.ray.session import main
    from slime.utils.errors import UserError


def train(args: argparse.Namespace, progress: RunProgress | None = None) -> None:
    """The whole run. Its loop is not built yet: parsing refuses every run of it, and only plans pass."""
    raise UserError("the asynchronous loop is not built yet; run train.py")


if __name__ == "__main__":
    sys.exit(main(train, asynchronous=True))
