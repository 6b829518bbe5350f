"""The routers of a run: each model has one of its own, which the run starts or the user names.

Engines are told to their routers together: one that is slow to answer, or refuses an engine, keeps no other engine waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from slime.serving.fleet import EngineName
from slime.serving.router import REQUEST_SECONDS, EnginesLacking, RouterHandle, Worker, launch_router, session_with
from slime.serving.router_process import NO_PAIRS, compute_router_fields
from slime.serving.topology import Topology
from slime.utils.errors import RunError, UserError
from slime.utils.ports import is_loopback, random_port_start, refuses_connections, reserve_port, service_host
from slime.utils.run_values import with_run_values

logger = logging.getLogger(__name__)

_FIRST_PORT = 3000
# How long a router may take to ask engines that it is told of what they are: some time, and more for each of them.
_REGISTRATION_SECONDS, _REGISTRATION_SECONDS_EACH = 60.0, 0.25
_FAREWELL_SECONDS = 10.0
_CONNECT_SECONDS = 5.0


class ModelRouters(Mapping[str, RouterHandle]):
    """By the name of the model; empty before `start`. The first is that of the model that generates.

    Args:
        api_key: what the engines ask for.
    """

    def __init__(self, args: argparse.Namespace, topology: Topology, log_dir: str | Path, api_key: str) -> None:
        self._args = args
        self._topology = topology
        self._log_dir = log_dir
        self._api_key = api_key
        self._routers: dict[str, RouterHandle] = {}

    def __getitem__(self, model: str) -> RouterHandle:
        return self._routers[model]

    def __iter__(self) -> Iterator[str]:
        return iter(self._routers)

    def __len__(self) -> int:
        return len(self._routers)

    def start(self) -> None:
        """Start the routers, or check the one that was given; does not wait for them."""
        # The user may give a router that already runs. It is asked with the key that was given for it, if any: a router with a
        # key of its own refuses others, and one without ignores ours.
        given = self._args.sglang_router_ip is not None
        ours = [engine.external.url for engine in self._topology.engines if engine.external is not None]
        # In a run without engines of its own, any engine that registers is welcome.
        ours = ours if self._topology.engines else None
        for number, model in enumerate(self._topology.models):
            keyed = given and number == 0
            args = self._args if keyed else with_run_values(self._args, router_api_key=self._api_key)
            router = start_router(args, self._log_dir, ours, number, [g.role for g in model.groups])
            # Another router could not be told of engines that registered by themselves, so then none takes its place.
            router.comes_back = self._args.use_fault_tolerance and router.process is not None and ours is not None
            self._routers[model.name] = router

    def wait_ready(self) -> None:
        """Return when our routers answer; in a run without engines of its own, when one that somebody else has started is
        registered.

        Raises:
            RunError: a router failed to start, or no engine has registered in time.
        """
        for router in self.values():
            if router.process is not None:
                router.wait_ready()
        if not self._topology.engines:
            self._wait_for_foreign_engines()

    def _wait_for_foreign_engines(self) -> None:
        """Wait for engines that register by themselves at the run's one router."""
        (router,) = self.values()
        logger.info('waiting for engines that register at the router: POST %s/workers {"url": …}', router.url)
        if self._args.has_trainer:
            logger.warning("--rollout-num-gpus 0: no push reaches these engines, which keep the weights that they have")
        count = router.wait_for_workers(self._args.engine_start_timeout)
        logger.info(
            "%d engines have registered at the router %s; all together they get --sglang-server-concurrency %d requests "
            "at a time", count, router.url, self._args.sglang_server_concurrency,
        )  # fmt: skip

    def open(self, workers: Mapping[EngineName, Worker]) -> None:
        """Let the routers send requests to the engines of their model, and to no others.

        Raises:
            UserError: a router that was given has other engines.
            RunError: an engine was refused, or did not become healthy in time.
        """
        for model, router in self.items() if workers else ():
            found = [worker for name, worker in workers.items() if self._model_of(name) == model]
            refuse_other_workers(router, [worker.url for worker in found])
            self._tell(router, found)
            shown = "" if len(self) == 1 else f" of model {model}"
            logger.info("%d engines%s are ready behind the router %s", len(found), shown, router.url)

    def register(self, workers: Mapping[EngineName, Worker]) -> dict[EngineName, RunError]:
        """Tell the routers of engines, and wait until they send them requests. Returns why not, for those that they lack."""
        lacking: dict[EngineName, RunError] = {}
        for model, router in self.items():
            found = {name: worker for name, worker in workers.items() if self._model_of(name) == model}
            if not found:
                continue
            try:
                self._tell(router, list(found.values()))
            except EnginesLacking as error:
                lacking |= {name: error.of(worker.url) for name, worker in found.items() if worker.url in error.reasons}
            except RunError as error:
                lacking |= dict.fromkeys(found, error)
        return lacking

    def remove(self, urls: Mapping[EngineName, str], *, at_last: bool = False) -> None:
        """Take engines out of their routers; those that these do not know are ignored.

        `at_last`: nothing holds a router back any more, which otherwise may wait for requests that the engines have.

        Raises:
            RunError: a router still lists one; the engines of other models have been taken out all the same.
        """
        errors: list[RunError] = []
        for model, router in self.items():
            if found := [url for name, url in urls.items() if self._model_of(name) == model]:
                try:
                    router.remove_workers(found, _REGISTRATION_SECONDS if at_last else _FAREWELL_SECONDS)
                except RunError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def leave_given(self, urls: Mapping[EngineName, str]) -> None:
        """Take our engines out of a router that goes on without us; before they end, or it would send them requests."""
        given = next(((model, router) for model, router in self.items() if router.process is None), None)
        if given is None or not urls:
            return
        model, router = given
        ours = [url for name, url in urls.items() if self._model_of(name) == model and url not in router.found]
        try:
            router.remove_workers(ours, _FAREWELL_SECONDS)
        except RunError as error:
            logger.warning("our engines may still be registered: %s", error)

    def shutdown(self) -> None:
        """End the routers that this run started."""
        for router in self.values():
            router.shutdown()

    def _tell(self, router: RouterHandle, workers: Sequence[Worker]) -> None:
        router.add_workers(workers, _REGISTRATION_SECONDS + _REGISTRATION_SECONDS_EACH * len(workers), self._api_key)

    def _model_of(self, name: EngineName) -> str:
        return self._topology.find(name.engine_id)[0].name


def start_router(
    args: Any,
    log_dir: str | Path,
    ours: Sequence[str] | None = (),
    number: int = 0,
    roles: Collection[str] = ("regular",),
) -> RouterHandle:
    """Start a router, or check the one that `--sglang-router-ip/port` names. Call `wait_ready` on the result.

    One that runs already may serve engines that are `ours`, and no others (None: any); it is that of the first model.

    The router starts beside whatever the caller does next (engines, usually). Its log is `{log_dir}/router.log`; of model
    `number`, counted from 0, `router_{number}.log`. With engines of the `roles` prefill and decode it asks one of each for
    every request; one that runs already must do so, too.

    Raises:
        UserError: the given address does not answer as a router, or not as one for engines of these roles.
    """
    api_key = getattr(args, "router_api_key", None)
    if number == 0 and getattr(args, "sglang_router_ip", None):
        return _given_router(args, api_key, ours, "prefill" in roles)
    host = service_host()
    port = reserve_port(host, random_port_start(_FIRST_PORT))
    prometheus_port = reserve_port(host, port.port + 1)
    fields = compute_router_fields(args, host, port.port, prometheus_port.port)
    if "prefill" in roles:
        fields["pd_disaggregation"] = True
    if number:
        # One that was given is the first router's.
        fields |= {"prometheus_host": host, "prometheus_port": prometheus_port.port}
    name = f"router_{number}" if number else "router"
    return launch_router(name, Path(log_dir) / f"{name}.log", fields, (port, prometheus_port), api_key)


def refuse_other_workers(router: RouterHandle, ours: Sequence[str] = ()) -> None:
    """Raise UserError when the router sends requests to engines that are not `ours`: they have other weights.

    Where nothing listens at the address of any of them, a killed run has left them there, and they are taken out.
    """
    others = router.other_workers(ours)
    if others and all(_is_gone(url, router) for url in others):
        logger.warning(
            "the router %s still listed engines at whose addresses nothing listens: %s; they are taken out of it",
            router.url, ", ".join(sorted(others)),
        )  # fmt: skip
        router.remove_workers(list(others), _FAREWELL_SECONDS)
    elif others:
        raise UserError(
            f"--sglang-router-ip {router.ip} --sglang-router-port {router.port}: the router already serves engines that "
            f"are not of this run and have other weights: {', '.join(sorted(others))}. Take them out "
            f"(DELETE {router.url}/workers/{next(iter(others.values()))}), or leave both flags out and a router is "
            "started for the run"
        )


def _is_gone(url: str, router: RouterHandle) -> bool:
    # A loopback address of the router's machine is this machine's only if the router itself is reached by one.
    is_near = is_loopback(router.ip) or not is_loopback(urlsplit(url).hostname or "")
    return is_near and refuses_connections(url, _CONNECT_SECONDS)


def require_given_router(args: Any, seconds: float) -> None:
    """Raise UserError unless the router that `--sglang-router-ip/port` names, if they do, answers our key within `seconds`."""
    if args.sglang_router_ip is not None:
        _given_router(args, vars(args).get("router_api_key"), None, False, seconds)


def _given_router(
    args: Any, api_key: str | None, ours: Sequence[str] | None, pairs: bool, seconds: float = REQUEST_SECONDS
) -> RouterHandle:
    ip, port = args.sglang_router_ip, args.sglang_router_port
    address = f"--sglang-router-ip {ip} --sglang-router-port {port}"
    if port is None:
        raise UserError(f"--sglang-router-ip {ip} needs --sglang-router-port")
    handle, session = RouterHandle(ip.strip("[]"), port, api_key, process=None), session_with(api_key)
    try:
        response = session.get(f"{handle.url}/workers", timeout=seconds)
        if response.status_code in (401, 403):
            raise UserError(f"{address}: the router refuses our key; give its key by --router-api-key")
        if response.ok and isinstance(response.json().get("workers"), list):
            if ours is None:
                return handle
            refuse_other_workers(handle, ours)
            listed = {worker["url"] for worker in handle.workers()}
            # One without engines says what it misses; in one that has some they have stood the test.
            lacks = None if listed else session.get(f"{handle.url}/get_model_info", timeout=REQUEST_SECONDS)
            if lacks is not None and (NO_PAIRS in lacks.text) != pairs:
                way_out = f"start it {'with' if pairs else 'without'} --pd-disaggregation"
                raise UserError(f"{address}: it would never ask the engines of this run; {way_out}")
            return dataclasses.replace(handle, found=listed.intersection(ours))
        found = f"answered {response.status_code} to GET /workers"
    except (requests.RequestException, ValueError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        found = f"{type(error).__name__}: {error}"
    raise UserError(
        f"{address}: no SGLang router there ({found}). Start one at that address, or leave both flags out and one is "
        "started for the run"
    )
