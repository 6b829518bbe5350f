"""Where devices are found to be: in a real Ray cluster with logical GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOCATE = """
from types import SimpleNamespace
import psutil
import ray
from slime.ray.cluster import ray_cluster
from slime.ray.placement_group import create_placement_groups

args = SimpleNamespace(
    has_trainer=True, has_engines=True, world_size=1, rollout_num_gpus=2, rollout_num_gpus_per_engine=2, log_level="INFO",
    rollout_external=False, colocate={colocate}, rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_context_len=64,
    rollout_max_prompt_len=None, rollout_max_response_len=None, use_opd=False, use_rollout_routing_replay=False,
    use_critic=False, asynchronous=False, tensor_model_parallel_size=1, num_gpus_per_node=8, sglang_config=None,
    prefill_num_servers=None, hf_checkpoint="/model", num_rollout=1, rollout_top_k=-1, vocab_size=None, num_layers=None,
    moe_router_topk=None, rollout_data_transport="object-store",
)
with ray_cluster(args) as args:
    bundles = create_placement_groups(args)
    print("devices", [device for _, device in bundles["actor"].places + bundles["rollout"].places])
    node = ray._private.worker._global_node
    children = psutil.Process(node.all_processes["raylet"][0].process.pid).children()
    print("processes", sorted([*node.all_processes, *(child.cmdline()[0] for child in children)]))
"""


@pytest.mark.parametrize(
    ("colocate", "devices"),
    [
        pytest.param(False, [0, 1, 2], id="apart", marks=pytest.mark.slow),
        pytest.param(True, [0, 0, 1], id="half shared"),
    ],
)
def test_every_device_has_its_own_number_and_ray_starts_nothing_for_nobody(colocate, devices):
    """A rank, and an engine of two devices, of which one may be the rank's.

    Of Ray there are its two servers, what brings logs to the driver and what gives processes their environment: no dashboard,
    no autoscaler, and no process that was asked for devices.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOCATE.format(colocate=colocate)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert f"devices {devices}" in done.stdout, done.stdout
    assert "processes ['cat', 'gcs_server', 'log_monitor', 'ray::RuntimeEnvAgent', 'raylet']" in done.stdout, (
        done.stdout
    )
