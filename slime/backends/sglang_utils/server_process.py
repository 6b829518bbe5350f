"""Entry point of a server process: `python -m slime.backends.sglang_utils.server_process --arguments-file FILE`.

Runs the unmodified SGLang HTTP server. Around it: the process ends with its parent; the CPU adapter is installed where
there is no GPU; there, scheduler and detokenizer are forked after sglang was imported, so that its imports are paid
once instead of three times, and without what only other models would need; a server whose scheduler or detokenizer dies
ends and leaves the cause; the API key never reaches the log. The arguments file holds that key, so it is readable by its
owner only and is deleted as soon as it was read.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib
import json
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.child_process import exit_when_parent_dies
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import UserError

if TYPE_CHECKING:
    from slime.backends.sglang_utils.server_arguments import ServerArguments


# Beside the arguments file: why the server ended, where it was the first to know.
CAUSE_FILE = "cause"


def write_arguments_file(path: str | Path, arguments: ServerArguments) -> None:
    """Write `arguments` for `main` to read, readable by the owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"values": arguments.values, "typed": sorted(arguments.typed)}, file)


def main(argv: list[str] | None = None) -> None:
    """Serve until the process is told to end."""
    exit_when_parent_dies()
    # Imports make a million objects that stay: looking through them again and again is a tenth of their time.
    gc.disable()
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--arguments-file", type=Path, required=True)
    arguments_file = parser.parse_args(argv).arguments_file
    arguments = json.loads(arguments_file.read_text())
    arguments_file.unlink()
    hide_from_logs(arguments["values"].get("api_key"))

    from slime.backends.sglang_utils import cpu_runtime

    cpu_runtime.install()
    _serve(arguments["values"], arguments["typed"], arguments_file.with_name(CAUSE_FILE))


def serve_plainly() -> None:
    """Serve what the words of this process say, as SGLang's own command line does, where there is no GPU.

    Nothing of a run is around it: it ends by itself or by a signal.
    """
    from slime.backends.sglang_utils import cpu_runtime

    cpu_runtime.install()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    server_args = prepare_server_args(sys.argv[1:])
    hide_from_logs(server_args.api_key)
    _fork_workers(server_args)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def hide_from_logs(secret: str | None) -> None:
    """Replace `secret` in all log records of this process and of those forked from it (sglang logs its arguments).

    Records that cannot be formatted (`logger.warning("text", Category)`) pass: the handler deals with them.
    """
    if not secret:
        return
    make_record = logging.getLogRecordFactory()
    formatter = logging.Formatter()

    def make_redacted_record(*args, **kwargs) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        try:
            message = record.getMessage()
        except Exception:
            return record
        if secret in message:
            record.msg, record.args = message.replace(secret, "***"), ()
        trace = formatter.formatException(record.exc_info) if record.exc_info else ""
        if secret in trace:
            # Formatters make this text from the exception only where it is not set.
            record.exc_text = trace.replace(secret, "***")
        return record

    logging.setLogRecordFactory(make_redacted_record)


def _serve(values: dict[str, Any], typed: list[str], cause_path: Path) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    fields = _known_fields(values, typed, ServerArgs)
    server_args = ServerArgs(**{**fields, **convert_texts({name: fields[name] for name in typed}, ServerArgs)})
    _leave_gc_freeze_to_engine()
    _name_shared_memory_after(cause_path.parent)
    _end_when_a_worker_dies(cause_path, values["node_rank"])
    if (values.get("dp_size") or 1) > 1:
        _care_for_every_group(values["node_rank"])
    if max(values.get(size) or 1 for size in ("dp_size", "pp_size")) > 1:
        # Where processes are spawned they find it by this name, and not in `__main__`.
        run = importlib.import_module("slime.backends.sglang_utils.server_process").run_scheduler
        http_server.launch_server = functools.partial(http_server.launch_server, run_scheduler_process_func=run)
    if gpus_on_this_machine() == 0:
        _fork_workers(server_args)
    gc.enable()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _known_fields(values: dict[str, Any], typed: list[str], server_args_class: type) -> dict[str, Any]:
    import sglang

    known = set(server_args_class.__struct_fields__)
    unknown = [name for name in typed if name not in known]
    if unknown:
        flags = ", ".join("--sglang-" + name.replace("_", "-") for name in unknown)
        raise UserError(f"{flags}: not known to the installed sglang {sglang.__version__}; remove it")
    return {name: value for name, value in values.items() if name in known}


def convert_texts(typed: dict[str, Any], server_args_class: type) -> dict[str, Any]:
    """`typed` with every text read as sglang's own command line reads it; values of other types stay.

    For the flags whose type only sglang knows; those of plain types were converted when they were parsed.

    Raises:
        UserError: a text that sglang refuses.
    """
    texts = {name: value for name, value in typed.items() if _is_text(value)}
    if not texts:
        return typed
    parser = argparse.ArgumentParser()
    server_args_class.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}
    converted = {}
    for name, value in texts.items():
        try:
            converted[name] = _convert(actions[name], parser, value) if name in actions else value
        except (argparse.ArgumentTypeError, ValueError, AssertionError) as error:
            raise UserError(f"--sglang-{name.replace('_', '-')} {value}: {error}") from None
    return {**typed, **converted}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _convert(action: argparse.Action, parser: argparse.ArgumentParser, value: str | list[str]) -> Any:
    if not isinstance(action, argparse._StoreAction):
        namespace = argparse.Namespace()
        action(parser, namespace, value)
        return getattr(namespace, action.dest)
    if action.type is None:
        return value
    return [action.type(item) for item in value] if isinstance(value, list) else action.type(value)


def _leave_gc_freeze_to_engine() -> None:
    """sglang 0.5.21 posts /freeze_gc to itself; with the warm-up skipped that happens before it listens and leaves a
    traceback in the log. `SGLangEngine` posts it as soon as the server is healthy."""
    from sglang.srt.entrypoints import http_server

    http_server._freeze_gc_after_server_warmup = lambda server_args: None


def _name_shared_memory_after(directory: Path) -> None:
    """sglang 0.5.21 never deletes the file in /dev/shm in which schedulers note their load. Its name holds the id of the
    server, which is random; with the name of our scratch directory in its place the file goes when that does."""
    from sglang.srt.server_args import PortArgs

    init_new = PortArgs.init_new

    def init_new_with_our_id(*args: Any, **kwargs: Any) -> PortArgs:
        port_args = init_new(*args, **kwargs)
        port_args.instance_id = directory.name
        return port_args

    PortArgs.init_new = staticmethod(init_new_with_our_id)


# ---------------------------------------------------------------------------------------------------------------------
# Data-parallel attention: an engine has a scheduler for each group of ranks, with requests and caches of its own.

# Between the seeds of two groups: those of engines are closer to each other.
_SEEDS_OF_A_GROUP = 2**16
# In which a group that sleeps while it is idle looks for what came to another one, and waits for it.
_SLEEP_MILLISECONDS = 20


def _care_for_every_group(node_rank: int) -> None:
    """sglang 0.5.21 calls caches flushed when the first group says so. Another one may have refused: it would go on with keys
    and values of older weights, and die when it is told to give its memory back.

    And it wants the ports of the first node's processes to be free on all nodes, where nobody binds them.
    See `run_scheduler` for what it does in those of ranks.
    """
    from sglang.srt import server_args as their_flags
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    init_communicators = TokenizerControlMixin.init_communicators

    def init_communicators_with_refusals_first(self: Any) -> None:
        init_communicators(self)
        flush = self.flush_cache_communicator

        async def flush_all(request: Any) -> list[Any]:
            return sorted(await flush(request), key=lambda answer: answer.success)

        self.flush_cache_communicator = flush_all

    TokenizerControlMixin.init_communicators = init_communicators_with_refusals_first
    if node_rank > 0:
        their_flags.wait_port_available = lambda port, name: True


def _be_a_group(server_args: Any, group: int) -> None:
    """sglang 0.5.21 gives all groups one seed: of a prompt that several have, each would write the same answer. And where ranks
    sleep while they are idle, each wakes for what comes to its own group, and those that are awake wait for it.

    Of the experts that a graph has noted for all groups, each takes its own: it skips as many rows as those before it have
    requests, where graphs that verify drafts have a row for every token. And ranks of an engine that prefills are listed by
    its server, which they look for where they meet each other. On one node that is loopback, and the server listens at the
    address of the node.
    """
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.managers import scheduler
    from sglang.srt.state_capturer import routed_experts

    set_random_seed, idle_sleeper = scheduler.set_random_seed, scheduler.IdleSleeper
    rows_of_group, register = routed_experts.get_dp_local_slice_cpu, CommonKVManager.register_to_bootstrap

    def make_idle_sleeper(*arguments: Any, **options: Any) -> Any:
        sleeper = idle_sleeper(*arguments, **options)
        poll = sleeper.poller.poll
        sleeper.poller = types.SimpleNamespace(poll=lambda milliseconds: poll(min(milliseconds, _SLEEP_MILLISECONDS)))
        return sleeper

    def rows_of_verified_tokens(batch: Any, by_graph: bool, requests: int | None) -> tuple[int, int]:
        tokens = batch.spec_info.num_tokens_per_req if by_graph and batch.spec_info is not None else 1
        return rows_of_group(batch, by_graph, requests if requests is None else requests * tokens)

    def register_with_the_server(manager: Any) -> None:
        if server_args.nnodes == 1:
            manager.dist_init_addr = None
        register(manager)

    scheduler.set_random_seed = lambda seed: set_random_seed(seed + group * _SEEDS_OF_A_GROUP)
    scheduler.IdleSleeper = make_idle_sleeper
    routed_experts.get_dp_local_slice_cpu = rows_of_verified_tokens
    CommonKVManager.register_to_bootstrap = register_with_the_server


# ---------------------------------------------------------------------------------------------------------------------
# Pipeline stages: the schedulers of all stages go through one loop, step by step. The first stage takes the requests and hands
# them on, computes its part of a batch and hands that on, and gives the answers.

# Requests for which all stages have to wait for each other, or for the trainer, or look at all requests that run.
_ALONE = (
    "PauseGenerationReqInput", "FlushCacheReqInput", "InitWeightsUpdateGroupReqInput", "DestroyWeightsUpdateGroupReqInput",
    "BeginWeightUpdateReqInput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromTensorReqInput",
    "UpdateWeightFromDiskReqInput", "EndWeightUpdateReqInput", "CheckWeightsReqInput", "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
)  # fmt: skip
# What carries these out, and answers whether it went well.
_CARRIED_OUT_BY_ALL = (
    "init_weights_update_group", "destroy_weights_update_group", "begin_weight_update", "update_weights_from_distributed",
    "update_weights_from_tensor", "update_weights_from_disk", "end_weight_update",
)  # fmt: skip
# Behind the requests of a step: no stage begins a batch in it.
_BEGIN_NOTHING = "begin nothing"


class StepsOfStages:
    """Which requests a stage carries out in a step of the loop, and whether it may begin a batch (`begins`).

    Between two steps a batch that was begun may wait for another stage. A request for which stages wait for each other would
    then be waited for in vain. So it is kept, with all that came behind it, until every batch has ended; the stages begin none
    meanwhile. The first stage decides, the others hear of it.

    Args:
        is_first: of the stages.
        is_alone: whether a request has to wait for the end of all batches.
    """

    def __init__(self, is_first: bool, is_alone: Callable[[Any], bool]) -> None:
        self._is_first, self._is_alone = is_first, is_alone
        self._kept: list[Any] = []
        self.begins = True

    def take(self, arrived: list[Any], has_batches: bool) -> list[Any]:
        """The requests to carry out now, in their order. `has_batches`: some that were begun have not ended."""
        if not self._is_first:
            self.begins = arrived[-1:] != [_BEGIN_NOTHING]
            return arrived if self.begins else arrived[:-1]
        waiting = [*self._kept, *arrived]
        first = next((place for place, request in enumerate(waiting) if self._is_alone(request)), len(waiting))
        now = first if has_batches else len(waiting)
        self._kept = waiting[now:]
        self.begins = not self._kept
        return waiting[:now]

    def to_hand_on(self, requests: list[Any]) -> list[Any]:
        """What the next stage takes in this step."""
        return requests if self.begins else [*requests, _BEGIN_NOTHING]


def answer_of_all(answers: Sequence[Any]) -> Any:
    """The one answer to a request that every stage has answered: the first that says that it failed; none failed: the first."""
    return next((answer for answer in answers if not answer.success), answers[0])


def _go_through_steps_together(is_first: bool, is_last: bool) -> None:
    """sglang 0.5.21, pipeline stages: a stage hands requests on when it has carried them out, so that one for which stages wait
    for each other is never heard of by the next. And a paused engine goes on with all its batches.

    Here a request is handed on first. A paused stage begins no batch, and gives back the requests of all of them.
    """
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.schedule_batch import NextBatchPlan
    from sglang.srt.managers.scheduler import Scheduler

    alone = tuple(getattr(io_struct, name) for name in _ALONE)
    steps = StepsOfStages(is_first, lambda request: isinstance(request, alone))
    carry_out, hand_on = Scheduler.process_input_requests, Scheduler._pp_send_pyobj_to_next_stage
    plan, pause, idle = Scheduler.get_next_batch_to_run, Scheduler.pause_generation, Scheduler.on_idle
    load, have_ended = Scheduler.init_load_inquirer, Scheduler._pp_microbatches_drained
    on_the_way: list[Any] = []

    def hand_on_and_carry_out(self: Any, requests: list[Any]) -> None:
        requests = steps.take(requests, any(batch is not None for batch in self.mbs))
        if not is_last:
            self._pp_commit_comm_work(on_the_way)
            on_the_way.extend(hand_on(self, steps.to_hand_on(requests), async_send=True))
        carry_out(self, requests)

    def begin_batch(self: Any, running_batch: Any, last_batch: Any) -> Any:
        if self._engine_paused or not steps.begins:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return plan(self, running_batch=running_batch, last_batch=last_batch)

    def give_back_requests(self: Any, request: Any) -> None:
        if request.mode == "in_place":
            return pause(self, request)
        current, running = self.running_batch, _unfinished(self)
        for batch in self.running_mbs:
            batch.reqs, batch.batch_is_full = [], False
        self.last_mbs = [None] * len(self.last_mbs)
        # It gives back those of the batch that it takes for the only one.
        self.running_batch, self.last_batch = types.SimpleNamespace(reqs=running, batch_is_full=False), None
        pause(self, request)
        self.running_batch = current

    def be_idle(self: Any) -> None:
        # Requests that it has not begun again have caches, which it would take for lost.
        if not self._engine_paused and steps.begins:
            idle(self)
        elif steps.begins:
            self.maybe_sleep_on_idle()

    def count_all_batches(self: Any) -> None:
        load(self)
        of_all = {"get_running_batch": lambda: types.SimpleNamespace(reqs=_unfinished(self))}
        self.load_inquirer = dataclasses.replace(self.load_inquirer, **of_all)

    Scheduler.process_input_requests = hand_on_and_carry_out
    Scheduler._pp_send_pyobj_to_next_stage = lambda self, data, async_send=False: []
    Scheduler.get_next_batch_to_run = begin_batch
    Scheduler.pause_generation = give_back_requests
    Scheduler.on_idle = be_idle
    Scheduler.init_load_inquirer = count_all_batches
    # Between two steps requests may be in a batch that is none of these: their prompts were computed, and nothing else.
    Scheduler._pp_microbatches_drained = lambda self: have_ended(self) and not _unfinished(self)


def _unfinished(scheduler: Any) -> list[Any]:
    """The requests of all batches that were begun and not given back, each once, in an order that all stages have."""
    batches = [*scheduler.running_mbs, *scheduler.mbs, *scheduler.last_mbs]
    found = dict.fromkeys(request for batch in batches if batch is not None for request in batch.reqs)
    return [request for request in found if not request.finished()]


def _be_ranks_of_one_engine(stage: int, tp_size: int) -> None:
    """sglang 0.5.21 counts the ranks of a weight group, and the handles of an order, within a stage; and answers what the first
    stage says of itself."""
    import torch.distributed as dist
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.managers.tp_worker import BaseTpWorker
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.runtime_context import get_parallel

    first_rank = stage * tp_size
    join, open_handles = WeightUpdater.init_weights_update_group, BaseTpWorker.deserialize_own_rank

    def join_behind(self: Any, address: str, port: int, rank_offset: int, *further: Any) -> Any:
        return join(self, address, port, rank_offset + first_rank, *further)

    def answers_of_stages(answer: Any) -> list[Any]:
        group = get_parallel().pp_group
        answers: list[Any] = [None] * group.world_size
        dist.all_gather_object(answers, answer, group=group.cpu_group)
        return answers

    def carried_out_by_all(carry_out: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda self, request: answer_of_all(answers_of_stages(carry_out(self, request)))

    def check_all(self: Any, request: Any) -> Any:
        answers = answers_of_stages(check(self, request))
        answer = answer_of_all(answers)
        if answer.payload is not None:
            answer.payload = [rank for of_stage in answers for rank in of_stage.payload or []]
        return answer

    WeightUpdater.init_weights_update_group = join_behind
    BaseTpWorker.deserialize_own_rank = lambda self, handles: open_handles(self, handles[first_rank:])
    check = SchedulerWeightUpdaterManager.check_weights
    SchedulerWeightUpdaterManager.check_weights = check_all
    for name in _CARRIED_OUT_BY_ALL:
        carry_out = getattr(SchedulerWeightUpdaterManager, name)
        setattr(SchedulerWeightUpdaterManager, name, carried_out_by_all(carry_out))


def run_scheduler(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, group: int | None, *further: Any
) -> None:
    """A rank of an engine with groups of attention or pipeline stages, in its process. `group`: of attention, or None."""
    from sglang.srt.managers import scheduler

    if group is not None:
        _be_a_group(server_args, group)
    if server_args.pp_size > 1:
        _go_through_steps_together(is_first=pp_rank == 0, is_last=pp_rank == server_args.pp_size - 1)
        _be_ranks_of_one_engine(pp_rank, server_args.tp_size)
    scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, group, *further)


def _end_when_a_worker_dies(cause_path: Path, node_rank: int) -> None:
    """sglang 0.5.21 does not notice that a scheduler below a data-parallel controller dies before all are ready, nor that one
    on a further node of an engine dies later, unless it is the first there. Who waits for it waits long, and hears no cause.
    """
    from sglang.srt.entrypoints import engine

    from slime.backends.sglang_utils.worker_watch import WorkerWatch

    engine.SubprocessWatchdog = functools.partial(WorkerWatch, cause_path)
    wait_for_ready = engine._wait_for_scheduler_ready

    def wait_and_watch(readers: Sequence[Any], schedulers: Sequence[Any]) -> Any:
        names = [f"scheduler_{number}" for number in range(len(schedulers))]
        while_starting = WorkerWatch(cause_path, schedulers, names)
        while_starting.start_early()
        try:
            ready = wait_for_ready(readers, schedulers)
            if node_rank > 0:
                WorkerWatch(cause_path, schedulers, names).start()
            return ready
        finally:
            # Where this fails, schedulers are ended next, and the reason is in the log.
            while_starting.stop()

    engine._wait_for_scheduler_ready = wait_and_watch


def _fork_workers(server_args: Any) -> None:
    """sglang 0.5.21 selects the start method "spawn" for its subprocesses in its set-up; select "fork" after that."""
    import multiprocessing

    from sglang.srt.entrypoints import engine

    _import_for_workers(server_args)
    set_up = engine._set_envs_and_config

    def set_up_and_fork(server_args: Any) -> None:
        set_up(server_args)
        multiprocessing.set_start_method("fork", force=True)
        # What is there now stays. A collection in a child would touch, and so copy, all that the parent imported.
        gc.freeze()

    engine._set_envs_and_config = set_up_and_fork


def _import_for_workers(server_args: Any) -> None:
    """Import before the fork what the children need, and keep from them what takes most of their start and serves nothing.

    sglang 0.5.21 imports Megatron where it is installed, for a dump that nobody asked for, and every model that it knows to
    find the one to be served. Models are found when one is asked for that is not there yet; a package of the user's
    (`SGLANG_EXTERNAL_MODEL_PACKAGE`) changes that, and is left to it.
    """
    sys.modules["megatron"] = None  # type: ignore[assignment]  its import fails, as where it is not installed
    try:
        import sglang.srt.debug_utils.dumper
        import sglang.srt.managers.scheduler  # noqa: F401  the children have it then
    finally:
        del sys.modules["megatron"]
    from sglang.srt.environ import envs

    if envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get():
        return
    nothing = types.ModuleType("_no_models")
    nothing.__path__ = []
    sys.modules[nothing.__name__] = nothing
    with envs.SGLANG_EXTERNAL_MODEL_PACKAGE.override(nothing.__name__):
        from sglang.srt.models.registry import ModelRegistry
    config = Path(server_args.model_path, "config.json")
    if not config.is_file():
        return
    for name in json.loads(config.read_text()).get("architectures") or []:
        ModelRegistry.models.update(_models_beside(name))


def _models_beside(architecture: str) -> dict[str, type]:
    """The models of the module of sglang that offers `architecture`, by name; {} where none does, or it cannot be imported."""
    import sglang.srt.models

    definition = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    for path in sorted(Path(sglang.srt.models.__path__[0]).glob("*.py")):
        if not definition.search(path.read_text()):
            continue
        try:
            entries = importlib.import_module(f"sglang.srt.models.{path.stem}").EntryClass
        except Exception as error:
            # As sglang does, which may have another way to serve it.
            logging.getLogger(__name__).warning("%s: %s: %s", path.name, type(error).__name__, error)
            continue
        models = {entry.__name__: entry for entry in (entries if isinstance(entries, list) else [entries])}
        if architecture in models:
            return models
    return {}


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
