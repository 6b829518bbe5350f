"""What importing the public modules, and megatron-core, brings along: asked in one fresh process, step by step."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, os, sys, tempfile
found = {}
import slime.backends.megatron_utils.cp_utils as cp_utils
cp_utils.slice_log_prob_with_cp([1.0], 3, 1)
found["context parallelism"] = "megatron" in sys.modules
import slime.backends.megatron_utils.loss as loss
from slime.backends.megatron_utils.loss import *
found["functions"] = [vanilla_tis_function.__name__, icepop_function.__name__]
found["losses"] = "megatron" in sys.modules
loss.mpu.get_tensor_model_parallel_rank
found["groups"] = "megatron" in sys.modules
import megatron.core.timers
found["trackers of megatron"] = [name for name in ("wandb", "tensorboard") if name in sys.modules]
found["directories"] = [name for name in os.listdir(tempfile.gettempdir()) if "wandb" in name]
try:
    import wandb
    found["tracker"] = bool(wandb.__version__)
except ImportError:
    found["tracker"] = False
try:
    import torch.utils.tensorboard
    found["event files"] = "tensorboard" in sys.modules
except ImportError:
    found["event files"] = False
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What the program says."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], env={"TMPDIR": str(tmp_path_factory.mktemp("temporary"))},
        stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_context_parallel_helpers_need_no_megatron(found):
    assert not found["context parallelism"]


def test_losses_need_no_megatron_until_its_groups_are_asked_for(found):
    assert found["functions"] == ["vanilla_tis_function", "icepop_function"]
    assert (found["losses"], found["groups"]) == (False, True)


def test_megatron_imports_no_tracker_and_everybody_else_can(found):
    """Their imports take time, and wandb makes temporary directories, which a killed rank would leave."""
    assert found["trackers of megatron"] == found["directories"] == []
    assert found["tracker"] == (importlib.util.find_spec("wandb") is not None)
    assert found["event files"] == (importlib.util.find_spec("tensorboard") is not None)
