"""A real engine of two servers, each with devices of its own, as if on a node of its own: one engine to everything else."""

import os
import signal

import psutil
import pytest
import ray
from safetensors.torch import load_file

from slime.utils.errors import RunError
from slime.weights.transports import Receiver
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request
from tests.support.processes.served_engines import (
    MIXTURE,
    PROMPT,
    make_args,
    mean_difference,
    post,
    pushing,
    serving_of,
)

# Each of two ranks, which share its attention and its output head.
GROUPS = {"sglang_dp_size": 2, "sglang_enable_dp_attention": True, "sglang_enable_dp_lm_head": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "model", "flags"),
    [(2, {}, {}), (4, MIXTURE, GROUPS), (2, {}, {"sglang_pp_size": 2})],
    ids=["dense", "groups of attention", "pipeline stages"],
)
def test_an_engine_over_two_nodes_serves_gets_weights_and_dies_as_one(tmp_path, ranks, model, flags):
    old = ReferenceModel(make_tiny_checkpoint(tmp_path / "old", seed=0, **model))
    new = ReferenceModel(make_tiny_checkpoint(tmp_path / "new", seed=1, **model))
    sizes = {"num_gpus_per_node": ranks // 2, "rollout_num_gpus": ranks, "rollout_num_gpus_per_engine": ranks}
    args = make_args(tmp_path / "old", **sizes, **flags)
    with serving_of(args, tmp_path / "logs") as serving:
        (engine,) = serving.engines
        generate = f"{serving.urls[0]}/generate"
        request = generation_request(PROMPT)
        assert mean_difference(post(generate, request).json(), old) <= 1e-5
        with pushing(serving, load_file(tmp_path / "new/model.safetensors")) as push:
            report = push([Receiver(0, engine, ranks, 0)])
        assert (report.version, report.failed) == (1, {})
        # Requests go to groups in turn, where there are any.
        for _ in range(2):
            assert mean_difference(post(generate, request).json(), new) <= 1e-5
        # Each server has ranks, and the second one has nobody who answers requests.
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
        assert len(others) == ranks // 2
        os.kill(max(others), signal.SIGKILL)
        with pytest.raises(RunError, match="engine 0 died"):
            serving.owner.ended.result(60)
