"""Addresses of the routers that serve this run, and of the engines behind them."""

from typing import Any

from slime.utils import http_utils
from slime.utils.errors import RunError


def router_urls(args: Any) -> dict[str, str]:
    """Served model → base URL of its router; the first router of the run has the name `default` if none is given."""
    routers = dict(getattr(args, "sglang_model_routers", None) or {})
    first = (args.sglang_router_ip, args.sglang_router_port)
    if first not in [tuple(address) for address in routers.values()]:
        routers = {"default": first, **routers}
    return {name: f"http://{http_utils.format_host(ip)}:{port}" for name, (ip, port) in routers.items()}


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """URL of `endpoint` at the router of `model_name`; an unknown name gives the first router."""
    urls = router_urls(args)
    return urls.get(model_name, next(iter(urls.values()))) + endpoint


async def list_engine_urls(args: Any) -> list[str]:
    """URLs of the engines of every served model, as its router lists them.

    Raises:
        RunError: a router does not answer, or answers something else.
    """
    urls: list[str] = []
    for name, router in router_urls(args).items():
        answer = await http_utils.get(f"{router}/workers")
        if not isinstance(answer, dict) or "workers" not in answer:
            raise RunError(f"the router of model {name!r} at {router} did not list its workers but answered {answer!r}")
        urls += [worker["url"] for worker in answer["workers"]]
    http_utils.trust_engine_urls(urls)
    return urls
