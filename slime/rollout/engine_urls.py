"""Addresses of the routers that serve this run, and of the engines behind them."""

import functools
import logging
from typing import Any

from slime.utils import http_utils
from slime.utils.errors import RunError
from slime.utils.ports import host_for_url

logger = logging.getLogger(__name__)


def router_urls(args: Any) -> dict[str, str]:
    """Served model → base URL of its router; the first router of the run has the name `default` if none is given."""
    routers = dict(getattr(args, "sglang_model_routers", None) or {})
    first = (args.sglang_router_ip, args.sglang_router_port)
    if first not in [tuple(address) for address in routers.values()]:
        routers = {"default": first, **routers}
    return {name: f"http://{host_for_url(ip)}:{port}" for name, (ip, port) in routers.items()}


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """URL of `endpoint` at the router of `model_name`; an unknown name gives the first router, with a warning.

    The first router answers to `default` as well.
    """
    urls = router_urls(args)
    if model_name in urls:
        return urls[model_name] + endpoint
    name, first = next(iter(urls.items()))
    if model_name != "default":
        _warn_once(f"no model is served under the name {model_name!r}; {name!r} is asked. Known: {', '.join(urls)}")
    return first + endpoint


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


async def list_engine_urls(model_name: str, router_url: str, max_retries: int | None = None) -> list[str]:
    """URLs of the engines of a served model, as its router lists them.

    Raises:
        RunError: the router does not answer, or answers something else.
    """
    answer = await http_utils.get(f"{router_url}/workers", max_retries=max_retries)
    if not isinstance(answer, dict) or "workers" not in answer:
        raise RunError(
            f"the router of model {model_name!r} at {router_url} did not list its workers but answered {answer!r}"
        )
    urls = [worker["url"] for worker in answer["workers"]]
    http_utils.trust_engine_urls(urls)
    return urls
