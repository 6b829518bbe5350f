"""What importing megatron-core brings along."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, tempfile, os
import slime.backends.megatron_utils
import megatron.core.timers
assert megatron.core.timers.wandb is None
assert [name for name in os.listdir(tempfile.gettempdir()) if "wandb" in name] == []
import wandb
assert wandb.__version__
"""


def test_megatron_imports_no_tracker_and_everybody_else_can(tmp_path):
    """wandb makes temporary directories when it is imported, which a killed rank would leave."""
    pytest.importorskip("wandb")
    subprocess.run([sys.executable, "-c", PROGRAM], env={"TMPDIR": str(tmp_path)}, check=True, timeout=120)
