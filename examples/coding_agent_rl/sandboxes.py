"""Sandboxes of the example, by what a row of the data says: one to work in, and a fresh one, without a network, to grade in.

A function of one's own is named by `agent_sandbox` in the file of `--custom-config-path`.
"""

from pathlib import Path
from typing import Any, Literal

from slime.agent.sandbox import DockerSandbox, E2BSandbox, LocalSandbox, Sandbox

Purpose = Literal["work", "grade"]

HERE = Path(__file__).parent


def e2b(metadata: dict[str, Any], purpose: Purpose) -> Sandbox:
    """The row's `image` at an E2B service."""
    return E2BSandbox(metadata["image"])


def docker(metadata: dict[str, Any], purpose: Purpose) -> Sandbox:
    """The row's `image` in Docker on the machine of the rollout manager."""
    limits = ["--memory", "8g", "--pids-limit", "4096"]
    return DockerSandbox(metadata["image"], run_args=limits + ["--network", "none"] * (purpose == "grade"))


def local(metadata: dict[str, Any], purpose: Purpose) -> Sandbox:
    """A directory of this machine: for the toy task, whose agent is a file of this directory."""
    return LocalSandbox(network="host" if purpose == "work" else "none", readable=[HERE])
