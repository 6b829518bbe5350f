"""External engines (`--rollout-external-engine-addrs`), whose servers were not started by the run.

`discover_external_engines` asks each address what it serves before anything of the run starts, and refuses by name what does
not fit. `ExternalEngine` represents one of them: it gets weights and requests like an engine of the run, but the run never ends
its server. At the end the engine is left as it was found: outside of weight groups, and generating. Only one that a push has
left between two versions stays paused.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests

from slime.arguments.flag import flag_of
from slime.arguments.hf_config import read_hf_config
from slime.arguments.rules.not_built import names_of
from slime.arguments.rules.serving import WITH_ROLES
from slime.arguments.server_flags import NOT_YET, ONE_MODEL, REFUSED
from slime.arguments.surface import version_of
from slime.backends.sglang_utils.server_arguments import typed_fields
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.plan.memory import short_cache
from slime.plan.placement import dtype_of_engine
from slime.utils.errors import RunError, UserError
from slime.utils.ports import normalize_external_engine_addr, refuses_connections
from slime.utils.run_values import with_run_values
from slime.weights.transports.process_group import weight_group_name

__all__ = ["ExternalEngine", "ExternalEngineInfo", "discover_external_engines", "normalize_external_engine_addr"]

logger = logging.getLogger(__name__)

_FLAG = "--rollout-external-engine-addrs"
_CONNECT_SECONDS = 10.0
# An engine that is computing answers late.
_ANSWER_SECONDS = 60.0
_ASKED_AT_A_TIME = 64
_POLL_SECONDS = 1.0
# After so many refused connections in a row the server counts as gone. A restart takes longer than that.
_REFUSALS = 3
_FAREWELL_SECONDS = 5.0
# More pipeline stages than any trainer has, each with a weight group.
_MOST_STAGES = 64
# Switches with which a server does what no run works with; `NOT_YET` has the reasons.
_UNUSED_SWITCHES = (
    "enable_lora", "enable_lmcache", "hicache_storage_backend", "enable_pd_role_switch",
    "disaggregation_decode_enable_offload_kvcache",
)  # fmt: skip
# Arguments with which an engine is refused in any case; `REFUSED` has the reasons.
_REFUSED_SWITCHES = (
    "skip_tokenizer_init", "is_embedding", "allow_auto_truncate", "admin_api_key", "encoder_only", "language_only",
    "preferred_sampling_params",
)  # fmt: skip
# Policies by which a router chooses among engines of a role.
_POLICIES = {"router_prefill_policy": "prefill", "router_decode_policy": "decode"}


@dataclass(frozen=True)
class ExternalEngineInfo:
    """An engine that runs already.

    num_gpus: its devices, each of which is a rank of a weight-update group.
    weight_version: that of its weights when it was found; "default": those with which it was started.
    bootstrap_port: the port at which an engine that prefills is asked for its caches.
    transfer_backend: how an engine that prefills or decodes moves caches.
    load_format: how it reads checkpoints; one that loads what is pushed as files may change it.
    dtype: the one that it was started with; auto: as the config of its model says.
    context_length: the one that it was started with; None: that of its model.
    cache_tokens: how many tokens its cache of keys and values holds.
    """

    url: str
    worker_type: str
    num_gpus: int
    tp_size: int
    pp_size: int
    ep_size: int
    moe_dp_size: int
    version: str
    model_path: str
    weight_version: str = field(compare=False)
    bootstrap_port: int | None = None
    transfer_backend: str | None = None
    load_format: str | None = field(default=None, compare=False)
    dtype: str = "auto"
    context_length: int | None = None
    cache_tokens: int | None = field(default=None, compare=False)


def with_external_engines(args: argparse.Namespace) -> argparse.Namespace:
    """A copy of `args` with the engines at `--rollout-external-engine-addrs`, their number and their devices.

    Raises:
        UserError: one line for everything that does not fit: an address where nobody answers, twice the same engine, another
            key, another version of SGLang, another model, settings that the run cannot work with.
    """
    infos = discover_external_engines(args)
    config = read_hf_config(args.hf_checkpoint)
    for info in infos:
        held = (
            "" if info.weight_version == "default" else f", weights of version {info.weight_version} of an earlier run"
        )
        logger.info("engine %s of %d GPUs, SGLang %s%s", info.url, info.num_gpus, info.version, held)
        if held and not args.has_trainer:
            logger.warning("%s: nothing is pushed in this run, so it serves the weights of an earlier one", info.url)
        short = short_cache(args, info.cache_tokens) if info.cache_tokens else None
        if short is not None:
            logger.warning(
                "%s: its KV cache %s; start it with a larger --max-total-tokens or --mem-fraction-static",
                info.url,
                short,
            )
        found = dtype_of_engine(info.dtype, config)
        if args.has_trainer and found != args.params_dtype_name:
            logger.warning(
                "%s computes in %s, and the trainer in %s: every push casts the weights, and log-probs differ by the "
                "rounding; start it with --dtype %s", info.url, found, args.params_dtype_name, args.params_dtype_name,
            )  # fmt: skip
    return with_run_values(
        args,
        rollout_external_engine_infos=infos,
        rollout_num_engines=len(infos),
        rollout_num_gpus=sum(info.num_gpus for info in infos),
    )


def discover_external_engines(args: argparse.Namespace) -> tuple[ExternalEngineInfo, ...]:
    """Ask all engines what they are, and check that a run with `args` can use them. Raises as `with_external_engines`."""
    infos: list[ExternalEngineInfo] = []
    problems: list[str] = []
    if args.update_weight_mode == "delta":
        problems.append(
            f"--update-weight-mode delta: on the machines of {_FLAG} no process of the run applies what changed; give full"
        )
    first_at: dict[tuple[str, int], str] = {}
    addresses = args.rollout_external_engine_addrs
    urls = [normalize_external_engine_addr(address) for address in addresses]
    for address, url, told in zip(addresses, urls, _ask_all(urls, args.router_api_key), strict=True):
        if isinstance(told, RunError):
            problems.append(f"{_FLAG} {address}: {told}")
            continue
        first = first_at.setdefault(_endpoint(url), address)
        if first != address:
            problems.append(f"{_FLAG} {address}: this is the engine of {first}; name each engine once")
        problems += [f"{_FLAG} {address}: {problem}" for problem in misfits(args, told)]
        infos.append(describe_engine(url, told))
    if len(infos) == len(addresses):
        problems += [f"{_FLAG}: {problem}" for problem in misfits_of_roles(args, infos)]
    sizes = {"rollout_num_gpus": sum(info.num_gpus for info in infos)}
    if len({info.num_gpus for info in infos}) == 1:
        sizes["rollout_num_gpus_per_engine"] = infos[0].num_gpus
    for name, found in sizes.items() if not problems else ():
        if name in args.typed_flags and vars(args)[name] != found:
            problems.append(f"{flag_of(name)} {vars(args)[name]}: the engines of {_FLAG} have {found}; drop the flag")
    if problems:
        raise UserError("\n".join(problems))
    return tuple(infos)


def _ask_all(urls: Sequence[str], api_key: str | None) -> list[dict[str, Any] | RunError]:
    """`ask_engine` of each, or its error; many at a time, since a machine that is gone keeps everybody who asks waiting."""

    def ask(url: str) -> dict[str, Any] | RunError:
        try:
            return ask_engine(url, api_key)
        except RunError as error:
            return error

    with ThreadPoolExecutor(_ASKED_AT_A_TIME) as pool:
        return list(pool.map(ask, urls))


def ask_engine(url: str, api_key: str | None) -> dict[str, Any]:
    """The server's own description at `url`: its arguments, and facts about its model. It contains its key: never log it.

    Raises:
        RunError: no answer, not to this key, or not of an SGLang server; ends with the way out.
    """
    answers: list[dict[str, Any]] = []
    for path in ("/model_info", "/server_info"):
        try:
            with requests.Session() as session:
                session.trust_env = False
                headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
                response = session.get(url + path, headers=headers, timeout=(_CONNECT_SECONDS, _ANSWER_SECONDS))
        except requests.RequestException as error:
            raise RunError(
                f"no answer ({_cause(error)}); start the engine, wait until it serves, and name the address it listens on"
            ) from None
        if response.status_code in (401, 403):
            given = "the key of --router-api-key" if api_key else "a request without a key"
            raise RunError(f"the engine refuses {given}; give the key of its --api-key by --router-api-key")
        try:
            answer = response.json() if response.ok else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or "model_path" not in answer:
            raise RunError(f"no SGLang engine there: it answered {response.status_code} to GET {path}")
        answers.append(answer)
    model, server = answers
    # `/server_info` has the arguments from the server's start; `/model_info` has what it serves now.
    return {**model, **server, "weight_version": model.get("weight_version")}


def describe_engine(url: str, told: dict[str, Any]) -> ExternalEngineInfo:
    """The engine in an answer of `ask_engine`. Sizes may have SGLang's short names."""

    def size(*names: str) -> int:
        return next((int(told[name]) for name in names if told.get(name)), 1)

    sizes = {f"{name}_size": size(f"{name}_size", name) for name in ("tp", "pp", "ep", "moe_dp")}
    counted = told.get("num_gpus") or told.get("num_gpus_per_engine")
    role = told.get("disaggregation_mode")
    worker_type = "encoder" if told.get("encoder_only") else role if role in ("prefill", "decode") else "regular"
    return ExternalEngineInfo(
        url=url,
        worker_type=worker_type,
        num_gpus=int(counted or sizes["tp_size"] * sizes["pp_size"]),
        **sizes,
        version=str(told.get("version")),
        model_path=told["model_path"],
        weight_version=str(told.get("weight_version") or "default"),
        bootstrap_port=told.get("disaggregation_bootstrap_port") if worker_type == "prefill" else None,
        transfer_backend=told.get("disaggregation_transfer_backend") if worker_type == role else None,
        load_format=told.get("load_format"),
        dtype=told.get("dtype") or "auto",
        context_length=told.get("context_length"),
        cache_tokens=told.get("max_total_num_tokens"),
    )


def misfits_of_roles(args: argparse.Namespace, infos: Sequence[ExternalEngineInfo]) -> Iterator[str]:
    """Reasons why engines cannot prefill and decode for each other; none if they can, or if each does both."""
    count = Counter(info.worker_type for info in infos)
    backends = {info.transfer_backend for info in infos} - {None}
    if bool(count["prefill"]) != bool(count["decode"]):
        yield "engines that only prefill and engines that only decode need each other; name some of both"
    elif count["prefill"] and count["regular"]:
        yield "engines that do both would get no requests beside those that only prefill or decode; name one kind"
    elif len(backends) > 1:
        yield (
            f"they move caches by {' and '.join(sorted(backends))}; start all with one --disaggregation-transfer-backend"
        )
    for name, role in _POLICIES.items():
        policy = vars(args)[name]
        if policy is not None and not count[role]:
            yield f"{flag_of(name)} {policy} has no effect: no engine only does {role}; drop it"


def misfits(args: argparse.Namespace, told: dict[str, Any]) -> Iterator[str]:
    """Reasons why a run with `args` cannot use the engine with this answer; none if it can."""
    ours = version_of("sglang")
    if told.get("version") != ours:
        yield f"it is SGLang {told.get('version')}, and the run speaks to engines of SGLang {ours}; start that version"
        # Another version may have other names for its settings.
        return
    if not serves_model(told, args.hf_checkpoint):
        yield (
            f"it serves {told['model_path']} ({_kind_of(told)}), and the run trains --hf-checkpoint {args.hf_checkpoint}; "
            "start it with --model-path of that directory"
        )
    if told.get("is_generation") is False:
        yield "it does not generate; start it without --is-embedding"
    for name in _REFUSED_SWITCHES:
        if told.get(name):
            yield f"it was started with --{name.replace('_', '-')}: {REFUSED[f'sglang_{name}']}"
    if args.has_trainer and told.get("json_model_override_args") not in (None, "{}"):
        yield f"it was started with --json-model-override-args: {ONE_MODEL}"
    yield from _short_contexts(args, told)
    yield from _misfits_of_role(args, told)
    yield from _what_no_run_works_with(told)
    if args.use_rollout_routing_replay and not told.get("enable_return_routed_experts"):
        yield "--use-rollout-routing-replay needs an engine that was started with --enable-return-routed-experts"
    if args.use_rollout_routing_replay and told.get("enable_hierarchical_cache"):
        yield (
            "it was started with --enable-hierarchical-cache, and loses the experts of cached prompts, which "
            "--use-rollout-routing-replay asks for"
        )
    for name, value in typed_fields(args).items():
        if name in told and told[name] != value:
            flag = f"--sglang-{name.replace('_', '-')}"
            yield f"{flag} {value}: the engine was started with {told[name]}; drop the flag, or start the engine with it"


def _short_contexts(args: argparse.Namespace, told: dict[str, Any]) -> Iterator[str]:
    """Why the engine would refuse the longest requests of this run; nothing if the run knows its limit by a flag."""
    limit, positions = told.get("context_length"), read_hf_config(args.hf_checkpoint).get("max_position_embeddings")
    if limit is None or args.sglang_context_length is not None:
        return
    kinds = ["rollout"] if args.eval_interval is None else ["rollout", "eval"]
    for name in (f"{kind}_max_context_len" for kind in kinds):
        wanted = min(filter(None, (vars(args)[name], positions)), default=limit)
        if wanted > limit:
            which = f"{flag_of(name)} {wanted}" if vars(args)[name] else f"the {wanted} positions of the model"
            yield (
                f"it was started with --context-length {limit}, and would refuse the longest requests of the run, whose limit "
                f"is {which}; give {flag_of(name if vars(args)[name] else 'sglang_context_length')} {limit}"
            )
            return


def _misfits_of_role(args: argparse.Namespace, told: dict[str, Any]) -> Iterator[str]:
    """What an engine that only prefills or decodes cannot do for this run."""
    role = told.get("disaggregation_mode")
    if role in ("prefill", "decode"):
        asked = {flag_of(name): reason for name, reason in WITH_ROLES.items() if vars(args)[name]}
        if args.rollout_top_p < 1 or args.rollout_top_k > 0:
            asked["--rollout-top-p, --rollout-top-k"] = "it tells no sets of kept tokens"
        for flags, reason in asked.items():
            yield f"it only does {role}: {flags}: {reason}; drop the flag, or start it without --disaggregation-mode"
        if told.get("disaggregation_transfer_backend") == "fake":
            yield "its --disaggregation-transfer-backend fake moves no caches; start it with another one"


def _what_no_run_works_with(told: dict[str, Any]) -> Iterator[str]:
    """Features that the engine was started with, and that no run uses in engines of others."""
    if told.get("speculative_algorithm"):
        yield (
            f"it was started with --speculative-algorithm {told['speculative_algorithm']}: the run's own --sglang-speculative "
            "flags say what a push sends to the draft, and they are for engines that the run starts; start it without"
        )
    for name in filter(told.get, _UNUSED_SWITCHES):
        feature = next(row.feature for row in NOT_YET if names_of(row, {f"sglang_{name}"}))
        yield f"it was started with --{name.replace('_', '-')}: no run works with {feature}; start it without"
    groups = told.get("dp_size") or told.get("dp") or 1
    if groups > 1:
        yield (
            f"it was started with --dp-size {groups}: it calls its caches flushed when one of its {groups} schedulers has done "
            "so, and others would go on with keys and values of older weights; start it with --dp-size 1"
        )
    stages = told.get("pp_size") or told.get("pp") or 1
    if stages > 1:
        yield (
            f"it was started with --pp-size {stages}: its stages would take the same places in a weight group, and go on where "
            "it is paused; start it with --pp-size 1"
        )
    for row in NOT_YET:
        value = told.get(row.name.removeprefix("sglang_"))
        if row.works and value is not None and value is not False and value not in row.works:
            option = row.name.removeprefix("sglang_").replace("_", "-")
            yield f"it was started with --{option} {value}: no run works with {row.feature}; start it without"


def serves_model(told: dict[str, Any], hf_checkpoint: str) -> bool:
    """Whether the engine was started on the model at `hf_checkpoint`.

    It may have read a copy on another machine. Then only the types of both models are compared; its log-probs after the first
    push show whether it serves the trainer's weights.
    """
    path = told["model_path"]
    if os.path.isdir(path):
        return os.path.samefile(path, hf_checkpoint)
    config = read_hf_config(hf_checkpoint)
    return told.get("model_type") == config.get("model_type") and told.get("architectures") == config.get(
        "architectures"
    )


def _kind_of(told: dict[str, Any]) -> str:
    return ", ".join(told.get("architectures") or [str(told.get("model_type"))])


def _cause(error: Exception) -> str:
    if isinstance(error, requests.Timeout):
        return f"within {_ANSWER_SECONDS:g} s"
    return "nobody listens there" if "refused" in str(error) else type(error).__name__


def _endpoint(url: str) -> tuple[str, int]:
    """IP address and port of `url`, by which two names of one machine are recognised as the same engine."""
    parts = urlsplit(url)
    try:
        host = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        host = parts.hostname
    return host, parts.port


class ExternalEngine(SGLangEngine):
    """Engine `rank` of a run, with the external server `info`, which the run neither starts nor ends."""

    def __init__(self, args: Any, rank: int, log_dir: str, info: ExternalEngineInfo) -> None:
        super().__init__(args, rank, log_dir, info.worker_type)
        # No keep-alive: a server may close an idle connection just when the next order is on its way, which would be lost.
        self._connections.headers["Connection"] = "close"
        self._info = info
        self._load_format = info.load_format
        self._groups: set[str] = set()
        self._paused = self._changing = False
        # The version of the last push; None before the first, and while one is under way.
        self._pushed: str | None = None

    def init(self) -> str:
        """Check from this node that the engine is still the one that was found, and undo what a killed run has left there.

        Returns:
            The server's URL.

        Raises:
            RunError: the engine does not answer, is another one, or stands between two weights and gets none.
        """
        try:
            found = describe_engine(self._info.url, ask_engine(self._info.url, self._api_key))
        except RunError as error:
            raise RunError(f"engine {self.rank} ({self._info.url}): {error}") from None
        if found != self._info:
            raise RunError(
                f"engine {self.rank} ({self._info.url}) is another one than at the start of the run: {found}"
            )
        self._url = self._info.url
        # This may take long, since weights are put in place, if a killed run has left an update open.
        if self._undo("/end_weight_update", {}, self._args.engine_load_timeout) and not self._args.has_trainer:
            raise RunError(
                f"engine {self.rank} ({self._url}) was left in the middle of a weight update, and this run pushes nothing; "
                "start the engine again"
            )
        for stage in range(_MOST_STAGES):
            self._undo("/destroy_weights_update_group", {"group_name": weight_group_name(stage)})
        if not self._args.has_trainer:
            self._undo("/continue_generation", {})
        return self._url

    def bootstrap_port(self) -> int | None:
        """The port at which engines that decode ask for its caches, if it prefills."""
        return self._info.bootstrap_port

    def wait_for_end(self) -> None:
        """Return when `shutdown` is called; until then check that the server listens.

        Raises:
            RunError: nothing listens at its address any more.
        """
        refusals = 0
        while not self._ending.wait(_POLL_SECONDS):
            refusals = refusals + 1 if refuses_connections(self._url, _CONNECT_SECONDS) else 0
            if refusals == _REFUSALS:
                raise RunError(
                    f"engine {self.rank} died: nobody listens at {self._url} any more; it was started outside of this run, "
                    "and so is its log"
                )

    def makes_progress(self, timeout: float) -> bool:
        """Whether the server generates a token within `timeout` seconds; False if it listens but generates none. Whether it is
        computing something else cannot be seen from here.

        Raises:
            RunError: nothing listens at its address; or it has lost the weights of the last push, since it was started again
                behind a tunnel or a proxy, which takes connections meanwhile.
        """
        if self._answers("/health_generate", timeout):
            pushed = self._pushed
            try:
                found = self.get_weight_version(_CONNECT_SECONDS) if pushed else None
            except RunError:
                return False
            if found != pushed == self._pushed:
                raise RunError(
                    f"engine {self.rank} died: {self._url} serves weights of version {found}, and was sent {pushed}; it was "
                    "started again outside of this run"
                )
            return True
        if refuses_connections(self._url, _CONNECT_SECONDS):
            raise RunError(f"engine {self.rank} died: nobody listens at {self._url}")
        return False

    def shutdown(self) -> None:
        """Leave the engine as it was found, as far as it answers. Its server keeps running."""
        self._ending.set()
        if self._url is None:
            return
        for name in sorted(self._groups):
            self._undo("/destroy_weights_update_group", {"group_name": name})
        if self._changing:
            logger.warning(
                "%s was left between two weight versions, and paused: the next run that pushes to it makes it whole, or a "
                "restart",
                self._url,
            )
        elif self._paused:
            self._undo("/continue_generation", {})

    # -- memory: it is not the run's, which does not touch it ---------------------------------------------------------

    def sleep(self) -> None:
        """Does nothing: the engine keeps its memory."""

    def wake_weights(self) -> None:
        """Does nothing."""

    def wake_caches(self) -> None:
        """Does nothing."""

    # -- orders that are noted, because they have to be undone --------------------------------------------------------

    def pause_generation(self, mode: str = "abort") -> None:
        """As of every engine."""
        self._paused, self._pushed = True, None
        super().pause_generation(mode)

    def continue_generation(self) -> None:
        """As of every engine."""
        super().continue_generation()
        self._paused = self._changing = False

    def prove_weight_version(self, version: str) -> None:
        """As of every engine."""
        super().prove_weight_version(version)
        self._pushed = version

    def begin_weight_update(self) -> None:
        """As of every engine."""
        self._changing = True
        super().begin_weight_update()

    def update_weights_from_disk(self, path: str, weight_version: str | None = None) -> None:
        """As of every engine."""
        self._changing = True
        super().update_weights_from_disk(path, weight_version)
        # The server answers when its first rank has loaded. This question, about no tensor (each has "" in its name), is
        # answered by all ranks: until then the files have to stay.
        self._call("POST", "/weights_checker", {"action": "checksum", "skip_tensor_list": [""]})
        self._changing = False

    def reset_weights(self) -> None:
        """As of every engine."""
        self._changing = True
        super().reset_weights()

    def init_weights_update_group(self, *arguments: Any, **options: Any) -> None:
        """As of every engine."""
        self._groups.add(options["group_name"] if "group_name" in options else arguments[4])
        super().init_weights_update_group(*arguments, **options)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """As of every engine."""
        self._groups.discard(group_name)
        super().destroy_weights_update_group(group_name)

    def _undo(self, path: str, payload: dict[str, Any], timeout: float = _FAREWELL_SECONDS) -> bool:
        """Send an order that undoes something. Returns whether the engine accepted it; it may have nothing to undo, or be
        gone."""
        with contextlib.suppress(RunError):
            self._call("POST", path, payload, timeout=timeout)
            return True
        return False
