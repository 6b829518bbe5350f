"""Every environment variable that changes this program's behaviour is read here and nowhere else."""

import os


def debug_enabled() -> bool:
    """`SLIME_DEBUG=1`: debug log level and full tracebacks for errors that normally end with one message."""
    return os.environ.get("SLIME_DEBUG", "0") not in ("", "0")


def forced_accelerator() -> str | None:
    """`SLIME_ACCELERATOR`: name of the device backend to use instead of the detected one."""
    return os.environ.get("SLIME_ACCELERATOR") or None


def host_ip_override() -> str | None:
    """`SLIME_HOST_IP`: the address that this node announces to the others."""
    return os.environ.get("SLIME_HOST_IP") or None


def tensorboard_dir() -> str | None:
    """`TENSORBOARD_DIR`: where event files go, in place of `outputs/{project}/{experiment}`."""
    return os.environ.get("TENSORBOARD_DIR") or None


def ray_address() -> str | None:
    """`RAY_ADDRESS`: the cluster to join (set by `ray job submit` and by users); None starts a local one."""
    return os.environ.get("RAY_ADDRESS") or None
