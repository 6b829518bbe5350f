"""The arguments of one SGLang server, computed from ours. Pure: no sglang, no torch, no processes.

Order of precedence: values that follow from the run (addresses, sizes, paths) cannot be set by the user; then every
`args.sglang_<field>` that is not None, which means that its flag was given; then our defaults, which depend on the device.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from slime.arguments.rules.serving import engine_sizes
from slime.arguments.server_flags import other_names, tensor_parallel_size
from slime.backends.sglang_utils.flag_surface import CPU_DEFAULTS, NOT_EXPOSED, RUN_DEFAULTS
from slime.utils.child_process import environment_for_python
from slime.utils.errors import UserError

# Attributes `args.sglang_<name>` that configure the router or our client, not the server.
_NOT_SERVER_FIELDS = frozenset(
    {
        "router_ip",
        "router_port",
        "router_request_timeout_secs",
        "server_concurrency",
        "config",
        "model_routers",
    }
)

# Fields that follow from the run. A user's value for one of them is refused or was never accepted, and is not read.
DERIVED_FIELDS = NOT_EXPOSED | {"host", "api_key", "tp_size"}

_ENVIRONMENT = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclasses.dataclass(frozen=True)
class ServerArguments:
    """`values`: field → value for sglang's `ServerArgs`; `typed`: the fields among them that the user set.

    A field that the installed sglang does not know is an error if the user typed it and is left out otherwise.
    """

    values: dict[str, Any]
    typed: frozenset[str]


def compute_server_arguments(
    args: Any,
    rank: int,
    *,
    host: str,
    port: int,
    nccl_port: int,
    base_gpu_id: int = 0,
    on_cpu: bool,
) -> ServerArguments:
    """Arguments of engine `rank`, which lives on one node.

    Raises:
        UserError: `--sglang-tp-size` contradicts `--rollout-num-gpus-per-engine`, or the sizes do not divide.
    """
    for problem in engine_sizes(args):
        raise UserError(problem)
    typed = _typed_fields(args)
    values: dict[str, Any] = {**RUN_DEFAULTS, **(CPU_DEFAULTS if on_cpu else {})}
    if not on_cpu and getattr(args, "fp16", False):
        values["dtype"] = "float16"
    if getattr(args, "use_rollout_routing_replay", False):
        values["enable_return_routed_experts"] = True
    values.update(typed)
    values.update(
        model_path=args.hf_checkpoint,
        trust_remote_code=bool(getattr(args, "trust_remote_code", False)),
        random_seed=args.seed + rank * args.num_gpus_per_node,
        host=host,
        port=port,
        nccl_port=nccl_port,
        nnodes=1,
        node_rank=0,
        # Without a GPU the server takes this for the number of a NUMA node.
        base_gpu_id=0 if on_cpu else base_gpu_id,
        gpu_id_step=1,
        tp_size=tensor_parallel_size(args),
        skip_server_warmup=True,
        api_key=getattr(args, "router_api_key", None),
    )
    return ServerArguments(values, frozenset(typed))


def compute_server_environment(arguments: ServerArguments, on_cpu: bool) -> dict[str, str]:
    """The whole environment of the server process: ours, SGLang's settings where the user did not set them himself.

    The trainer's allocator settings are removed; internal traffic ignores proxies; on CPU every server process computes
    with one thread (more oversubscribe the cores and cost a factor of 20) and tensor-parallel ranks get a core each.
    """
    environment = {**_ENVIRONMENT, **environment_for_python()}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    environment["NO_PROXY"] = environment["no_proxy"] = "*"
    if on_cpu:
        # Also where there are GPUs that the user chose not to use: torch must see what we decided.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["OMP_NUM_THREADS"] = "1"
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        # torch.compile needs a C++ compiler on CPU and half a minute at the first seeded request.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        ranks = arguments.values["tp_size"]
        if ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
    return environment


def _typed_fields(args: Any) -> dict[str, Any]:
    fields = {
        attribute.removeprefix("sglang_"): value
        for attribute, value in vars(args).items()
        if attribute.startswith("sglang_") and value is not None
    }
    not_fields = _NOT_SERVER_FIELDS | DERIVED_FIELDS | other_names(args)
    return {name: value for name, value in fields.items() if name not in not_fields}
