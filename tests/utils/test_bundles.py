"""Where Ray has put a bundle, and where when its node was lost."""

import os
import subprocess
import sys

import pytest

from slime.utils.bundles import are_consecutive
from tests.support.tables.shell_arrays import ROOT

# The first node dies. On the second one somebody has GPU 0, so the ids there are others.
LOST_NODE = """
import ray, time
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from slime.utils.bundles import locate_bundles

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
cluster.connect()
first = cluster.add_node(num_cpus=2, num_gpus=2)
group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2, strategy="PACK")
assert group.wait(60)
before = locate_bundles(group)
second = cluster.add_node(num_cpus=4, num_gpus=3)

@ray.remote(num_gpus=1, num_cpus=0)
class Somebody:
    def gpu(self):
        return ray.get_gpu_ids()

somebody = Somebody.remote()
taken = ray.get(somebody.gpu.remote(), timeout=60)

@ray.remote(num_gpus=0.2, num_cpus=0.2)
class Rank:
    def gpu(self):
        return [int(gpu) for gpu in ray.get_gpu_ids()]

def ranks():
    strategies = [ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index) for index in range(2)]
    return [Rank.options(scheduling_strategy=strategy).remote() for strategy in strategies]

def nodes():
    return placement_group_table(group)["bundles_to_node_id"]

lost, deadline = nodes(), time.monotonic() + 240
cluster.remove_node(first, allow_graceful=False)
while not all(node and node != lost[index] for index, node in nodes().items()):
    assert time.monotonic() < deadline
    time.sleep(0.2)
# They have most of each device: who looks where it is finds room beside them.
others = ranks()
held = ray.get([rank.gpu.remote() for rank in others], timeout=120)
after = locate_bundles(group)
assert locate_bundles(group, [1]) == after[1:]
print([device for _, device in before], [int(gpu) for gpu in taken], held, [device for _, device in after])
"""


@pytest.mark.slow
def test_a_bundle_whose_node_was_lost_is_found_on_the_device_that_it_has_then():
    done = subprocess.run(
        [sys.executable, "-c", LOST_NODE], cwd=ROOT, capture_output=True, text=True, timeout=400,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "[0, 1] [0] [[1], [2]] [1, 2]"


@pytest.mark.parametrize(
    ("devices", "holds"),
    [
        ([("a", 3)], True), ([("a", 3), ("a", 4), ("a", 5)], True), ([("a", 3), ("a", 5)], False),
        ([("a", 4), ("a", 3)], False), ([("a", 3), ("b", 4)], False),
    ],
)  # fmt: skip
def test_devices_of_one_server_follow_each_other_on_one_node(devices, holds):
    assert are_consecutive(devices) is holds
