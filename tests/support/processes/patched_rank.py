"""Runs a rank of an engine with data-parallel attention until it would load its model, and tests our patches of SGLang in it.
Run it in a process of its own, since the CPU adapter changes how sglang is imported."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

from tests.support.processes.waiting import wait_until

TOKENS_OF_A_REQUEST = 4


def rows_of_experts(directory: str) -> dict[str, list[int]]:
    """For each kind of batch, the rows of experts that the second of two groups takes from the buffer of all ranks. Batches are
    two requests that verify drafts of `TOKENS_OF_A_REQUEST` tokens in a graph made for three requests, the same without a
    graph, and requests without drafts."""
    import torch

    verified = SimpleNamespace(num_tokens_per_req=TOKENS_OF_A_REQUEST)
    cases = {
        "verified by a graph": (verified, [4, 8], True),
        "verified": (verified, [4, 8], False),
        "decoded by a graph": (None, [1, 2], True),
    }
    found = {}

    def look(server_args: Any) -> None:
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.layers.moe.utils import initialize_moe_config
        from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

        initialize_moe_config()
        initialize_dp_attention(server_args)
        capturer = RoutedExpertsCapturer.__new__(RoutedExpertsCapturer)
        capturer.topk_size = 1
        capturer.device_cache = SimpleNamespace(buffer=torch.arange(100).view(100, 1, 1))
        for name, (spec_info, counts, by_graph) in cases.items():
            batch = SimpleNamespace(global_num_tokens_cpu=counts, spec_info=spec_info)
            found[name] = capturer._get_local_slice(batch, by_graph, 3 if by_graph else None).flatten().tolist()

    _as_rank(directory, look)
    return found


def registered(directory: str) -> int:
    """The status with which the bootstrap server answers a decode engine after all ranks of a prefill engine registered."""
    import requests

    host = "127.0.0.2"
    with socket.create_server((host, 0)) as holder:
        port = holder.getsockname()[1]
    answers = []

    def register(server_args: Any) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager

        CommonKVBootstrapServer(host, port)
        url = f"http://{host}:{port}"
        wait_until(lambda: answers_at(url))
        for rank in range(2):
            manager = CommonKVManager.__new__(CommonKVManager)
            vars(manager).update(
                dist_init_addr=server_args.dist_init_addr, bootstrap_host=host, bootstrap_port=port, attn_tp_size=1,
                attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0, attn_dp_size=2, attn_dp_rank=rank, pp_size=1, pp_rank=0,
                system_dp_size=1, system_dp_rank=0, local_ip=host, rank_port=1, kv_args=SimpleNamespace(page_size=1),
                kv_cache_dtype_str="auto", dsv41_spec_layout=None,
            )  # fmt: skip
            manager.register_to_bootstrap()
        everything = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        answers.append(requests.get(f"{url}/route?{everything}", timeout=120).status_code)

    def answers_at(url: str) -> bool:
        try:
            return requests.get(f"{url}/health", timeout=60).ok
        except requests.RequestException:
            return False

    _as_rank(directory, register, host=host, disaggregation_mode="prefill")
    return answers[0]


def _as_rank(directory: str, do: Any, **values: Any) -> None:
    """Calls `do` in the place where a server process would start the second rank of an engine."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    from slime.backends.sglang_utils import cpu_runtime

    cpu_runtime.install()
    from sglang.srt.managers import scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from slime.backends.sglang_utils.server_arguments import CPU_DEFAULTS
    from slime.backends.sglang_utils.server_process import run_scheduler

    groups = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "dist_init_addr": "127.0.0.1:1", "nnodes": 1}
    fixed = {"model_path": directory, "skip_tokenizer_init": True}
    server_args = ServerArgs(**{**CPU_DEFAULTS, **fixed, **groups, **values})

    def serve(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *further: Any) -> None:
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, gpu_id=gpu_id))
        do(server_args)

    scheduler.run_scheduler_process = serve
    run_scheduler(server_args, None, 0, 1, 0, 1)
