"""A real engine of two servers, each with a device of its own, as if on a node of its own: one engine to everything else."""

import os
import signal

import psutil
import pytest
import ray

from slime.utils.errors import RunError
from slime.weights.transports import Receiver
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request
from tests.support.processes.local_ray import start_ray
from tests.support.processes.served_engines import PROMPT, Serving, make_args, mean_difference, post, pushing


@pytest.mark.slow
def test_an_engine_over_two_nodes_serves_gets_weights_and_dies_as_one(tmp_path):
    old = ReferenceModel(make_tiny_checkpoint(tmp_path / "old", seed=0))
    new = ReferenceModel(make_tiny_checkpoint(tmp_path / "new", seed=1))
    args = make_args(tmp_path / "old", num_gpus_per_node=1, rollout_num_gpus_per_engine=2)
    start_ray(num_cpus=4, num_gpus=2)
    try:
        placement_group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 2)
        assert placement_group.wait(120)
        serving = Serving(args, tmp_path / "logs", placement_group)
        try:
            serving.wait_ready()
            (engine,) = serving.engines
            generate = f"{serving.urls[0]}/generate"
            request = generation_request(PROMPT)
            assert mean_difference(post(generate, request).json(), old) <= 1e-5
            with pushing(serving, new.named_tensors()) as push:
                report = push([Receiver(0, engine, 2, 0)])
            assert (report.version, report.failed) == (1, {})
            assert mean_difference(post(generate, request).json(), new) <= 1e-5
            # Each server has a rank, and the second one has nobody who answers requests.
            logs = sorted(path.name for path in (tmp_path / "logs").glob("engine_*"))
            assert logs == ["engine_0.log", "engine_0_node_1.log"]
            assert not serving.owner.ended.done()
            server = ray.get(engine.server_pid.remote(), timeout=30)
            others = [
                process.pid
                for process in psutil.process_iter(["cmdline"])
                if (process.info["cmdline"] or [""])[0].startswith("sglang::scheduler")
                and server not in [parent.pid for parent in process.parents()]
                and os.getpid() in [parent.pid for parent in process.parents()]
            ]
            (scheduler,) = others
            os.kill(scheduler, signal.SIGKILL)
            with pytest.raises(RunError, match="engine 0 died"):
                serving.owner.ended.result(60)
        finally:
            serving.owner.shutdown()
    finally:
        ray.shutdown()
