"""Values of the engines' and the router's flags that follow from other flags, and the names that one of them has."""

import argparse

from slime.arguments.origins import Origin
from slime.utils.ports import host_for_url

# Server fields that are known by other names too: field → those, all without `sglang_`.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "cuda_graph_bs_decode": ("cuda_graph_bs",),
    "cuda_graph_max_bs_decode": ("cuda_graph_max_bs",),
    "dp_size": ("dp", "data_parallel_size"),
    "ep_size": ("ep", "expert_parallel_size"),
    "pp_size": ("pp", "pipeline_parallel_size"),
    "tp_size": ("tp", "tensor_parallel_size"),
}


def bracket_router_address(args: argparse.Namespace) -> None:
    """Write an IPv6 `--sglang-router-ip` as URLs need it, in brackets."""
    ip = getattr(args, "sglang_router_ip", None)
    if ip is not None and ip.count(":") > 1:
        args.sglang_router_ip = host_for_url(ip)


def keep_names_equal(args: argparse.Namespace) -> None:
    """Give every other name of a server field the value of the field, for functions of the user that read it there."""
    for field, names in OTHER_NAMES.items():
        attribute = f"sglang_{field}"
        for name in names if hasattr(args, attribute) else ():
            setattr(args, f"sglang_{name}", getattr(args, attribute))
            args.origins[f"sglang_{name}"] = args.origins.get(attribute, Origin.DEFAULT)


def other_names(args: argparse.Namespace) -> set[str]:
    """The names without `sglang_` under which `keep_names_equal` repeated a field: no fields themselves."""
    return {name for field, names in OTHER_NAMES.items() if hasattr(args, f"sglang_{field}") for name in names}


def tensor_parallel_size(args: argparse.Namespace) -> int:
    """Ranks that share each layer of an engine: its GPUs over its pipeline stages."""
    return args.rollout_num_gpus_per_engine // (getattr(args, "sglang_pp_size", None) or 1)
