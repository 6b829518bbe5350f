"""Flags of the SGLang engines (`--sglang-<server argument>`) and of the router (`--router-<router argument>`)."""

import argparse

TITLE = "SGLang engines and router"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_router(group)
    _add_engine(group)


def _add_router(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sglang-router-ip", default=None, help="use a router that already runs: its address")
    group.add_argument("--sglang-router-port", type=int, default=None, help="and its port")
    group.add_argument(
        "--sglang-router-request-timeout-secs", type=int, default=14400, help="router's limit per request, in seconds"
    )
    group.add_argument(
        "--router-policy",
        choices=["cache_aware", "round_robin", "random", "power_of_two", "consistent_hashing"],
        default=None,
        help="how the router chooses an engine; unset: its own default",
    )
    group.add_argument(
        "--router-api-key",
        default=None,
        help="key of router and engines; unset: one is generated per run. Never logged",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sglang-server-concurrency", type=int, default=512, help="requests in flight per engine")
    group.add_argument("--sglang-mem-fraction-static", type=float, default=None, help="share of GPU memory to use")
    group.add_argument("--sglang-context-length", type=int, default=None, help="longest sequence; unset: the model's")
    group.add_argument("--sglang-max-running-requests", type=int, default=None, help="requests decoded together")
    group.add_argument("--sglang-max-total-tokens", type=int, default=None, help="size of the KV cache, in tokens")
    group.add_argument("--sglang-chunked-prefill-size", type=int, default=None, help="tokens of one prefill chunk")
    group.add_argument("--sglang-attention-backend", default=None, help="attention kernels")
    group.add_argument("--sglang-dtype", default=None, help="dtype of the served weights")
    group.add_argument("--sglang-disable-cuda-graph", action="store_true", default=None, help="no CUDA graphs")
    group.add_argument("--sglang-log-level", default=None, help="log level of the server")
    group.add_argument(
        "--sglang-enable-deterministic-inference",
        action="store_true",
        default=None,
        help="seeded sampling: sample i of a group gets seed --rollout-seed + i",
    )
    group.add_argument("--sglang-watchdog-timeout", type=float, default=None, help="seconds before a stuck server ends")
