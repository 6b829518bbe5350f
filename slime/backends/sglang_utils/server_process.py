"""Entry point of a server process: `python -m slime.backends.sglang_utils.server_process --arguments-file FILE`.

Runs the unmodified SGLang HTTP server, with these additions:
- The process ends with its parent.
- Without a GPU the CPU adapter is installed. There scheduler and detokenizer are forked after sglang was imported, so that its
  imports are paid once instead of three times, and modules that only other models need are not imported.
- A server whose scheduler or detokenizer dies ends, and leaves the cause.
- The API key never reaches the log. The arguments file contains it, so only its owner can read it, and it is deleted as soon as
  it has been read.
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


# A file beside the arguments file, in which the server writes why it ended, if it knows.
CAUSE_FILE = "cause"


def write_arguments_file(path: str | Path, arguments: ServerArguments) -> None:
    """Write `arguments` for `main` to read, readable by the owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"values": arguments.values, "typed": sorted(arguments.typed)}, file)


def main(argv: list[str] | None = None) -> None:
    """Serve until the process is told to end."""
    exit_when_parent_dies()
    # Imports create a million objects that stay; garbage collections among them would take a tenth of the import time.
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
    """Serve without a GPU, by the command-line arguments of this process, as SGLang's own command line does.

    It is not part of a run, and ends by itself or by a signal.
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
            # Formatters make this text from the exception only if it is not set yet.
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
    if max(values.get(size) or 1 for size in ("tp_size", "dp_size", "pp_size")) > 1:
        # Imported under its full name, since spawned processes cannot find it in `__main__`.
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

# Distance between the seeds of two groups, which is larger than between engines.
_SEEDS_OF_A_GROUP = 2**16
# How often a group that sleeps while it is idle looks whether another group has got requests, which would wait for it.
_SLEEP_MILLISECONDS = 20


def _care_for_every_group(node_rank: int) -> None:
    """sglang 0.5.21 reports flushed caches if the first group has flushed. Another group may have refused: it would go on with
    keys and values of older weights, and die when it is told to give its memory back.

    It also requires the ports of the first node's processes to be free on all nodes, although nothing binds them there.
    The changes in the processes of ranks are in `run_scheduler`.
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
    """Lifts assumptions of sglang 0.5.21 in the ranks of a group.

    It gives all groups one seed, so that groups with the same prompt would write the same answer. If ranks sleep while they are
    idle, each wakes only for requests of its own group, although groups that are awake wait for it.

    From the experts that a graph records for all groups, each group takes its own by skipping as many rows as the groups before
    it have requests; but graphs that verify drafts have a row for every token. And ranks of an engine that prefills register
    with its server at the address where they meet each other. On one node that is loopback, whereas the server listens at the
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
# Pipeline stages: the schedulers of all stages go through one loop, step by step. The first stage receives the requests and
# passes them on, computes its part of a batch and passes that on, and gives the answers.

# Requests for which all stages have to wait for each other or for the trainer, or which concern all running requests.
_ALONE = (
    "PauseGenerationReqInput", "FlushCacheReqInput", "InitWeightsUpdateGroupReqInput", "DestroyWeightsUpdateGroupReqInput",
    "BeginWeightUpdateReqInput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromTensorReqInput",
    "UpdateWeightFromDiskReqInput", "EndWeightUpdateReqInput", "CheckWeightsReqInput", "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
)  # fmt: skip
# Methods that carry these out. All but the last answer whether they succeeded.
_CARRIED_OUT_BY_ALL = (
    "init_weights_update_group", "destroy_weights_update_group", "begin_weight_update", "update_weights_from_distributed",
    "update_weights_from_tensor", "update_weights_from_disk", "end_weight_update", "release_memory_occupation",
)  # fmt: skip
# Those of them that ranks of a stage may fail, or end later, without a word.
_CARRIED_OUT_ALONE = (
    "init_weights_update_group", "update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_disk",
    "release_memory_occupation",
)  # fmt: skip
# A mark behind the requests of a step: no stage begins a batch in this step.
_BEGIN_NOTHING = "begin nothing"


class StepsOfStages:
    """Which requests a stage carries out in a step of the loop, and whether it may begin a batch (`begins`).

    Between two steps a batch that was begun may wait for another stage. Stages that then wait for each other because of a
    request would wait for ever. So such a request is kept, with all that came after it, until every batch has ended; meanwhile
    the stages begin none. The first stage decides, and tells the others.

    Args:
        is_first: whether this is the first stage.
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
        """The list that the next stage receives in this step."""
        return requests if self.begins else [*requests, _BEGIN_NOTHING]


def answer_of_all(answers: Sequence[Any]) -> Any:
    """The one answer to a request that every rank or stage has answered: the first that failed, else the first."""
    return next((answer for answer in answers if not getattr(answer, "success", True)), answers[0])


def answer_for_all_ranks(updater: type) -> None:
    """sglang 0.5.21 answers when the first rank of a stage is done, and with what came of it there. So the files of weights, or
    the buffers that devices read them from, might change while another rank still reads; one that could not load would serve
    the old weights in silence; and a trainer might take memory that is not free yet.

    Here the ranks of a stage wait for each other, and any that failed is told. `updater`: `SchedulerWeightUpdaterManager`.
    """
    import torch.distributed as dist

    def carried_out_together(carry_out: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def carry_out_and_wait(self: Any, request: Any) -> Any:
            answers: list[Any] = [None] * dist.get_world_size(self.tp_cpu_group)
            dist.all_gather_object(answers, carry_out(self, request), group=self.tp_cpu_group)
            return answer_of_all(answers)

        return carry_out_and_wait

    for name in _CARRIED_OUT_ALONE:
        setattr(updater, name, carried_out_together(getattr(updater, name)))


def _go_through_steps_together(is_first: bool, is_last: bool) -> None:
    """sglang 0.5.21, pipeline stages: a stage passes requests on after it has carried them out, so that a request for which
    stages wait for each other never reaches the next stage. And a paused engine goes on with all its batches.

    Here a request is passed on first. A paused stage begins no batch, and gives back the requests of all batches.
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
        # SGLang's `pause` gives back the requests of one batch, so it is given one with all requests.
        self.running_batch, self.last_batch = types.SimpleNamespace(reqs=running, batch_is_full=False), None
        pause(self, request)
        self.running_batch = current

    def be_idle(self: Any) -> None:
        # Requests that were given back and not begun again still have caches, which SGLang would report as leaked.
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
    # Between two steps requests may be in a batch of another kind: one whose prompts have been computed, and nothing else.
    Scheduler._pp_microbatches_drained = lambda self: have_ended(self) and not _unfinished(self)


def _unfinished(scheduler: Any) -> list[Any]:
    """The requests of all batches that were begun and not given back, each once, in an order that all stages have."""
    batches = [*scheduler.running_mbs, *scheduler.mbs, *scheduler.last_mbs]
    found = dict.fromkeys(request for batch in batches if batch is not None for request in batch.reqs)
    return [request for request in found if not request.finished()]


def _be_ranks_of_one_engine(stage: int, tp_size: int) -> None:
    """sglang 0.5.21 counts the ranks of a weight group, and the handles of an order, within one stage, and answers for the
    first stage alone. Here all stages count as ranks of one engine."""
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
    """Run a rank of an engine of several ranks, in its process. `group`: its group of attention, or None."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    answer_for_all_ranks(SchedulerWeightUpdaterManager)
    if group is not None:
        _be_a_group(server_args, group)
    if server_args.pp_size > 1:
        _go_through_steps_together(is_first=pp_rank == 0, is_last=pp_rank == server_args.pp_size - 1)
        _be_ranks_of_one_engine(pp_rank, server_args.tp_size)
    scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, group, *further)


def _end_when_a_worker_dies(cause_path: Path, node_rank: int) -> None:
    """sglang 0.5.21 does not notice if a scheduler below a data-parallel controller dies before all are ready, nor if one on a
    further node of an engine dies later, unless it is the first there. Others would wait for it for long, without a cause.
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
            # If waiting fails the schedulers are ended next, and the reason is in the log already.
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
        # All present objects stay. A collection in a child would touch, and so copy, everything that the parent imported.
        gc.freeze()

    engine._set_envs_and_config = set_up_and_fork


def _import_for_workers(server_args: Any) -> None:
    """Import before the fork what the children need, and prevent imports that take most of their start and are not needed.

    sglang 0.5.21 imports Megatron if it is installed, for a dump that nobody asks for, and all models that it knows in order to
    find the one to be served. Here a model is imported when it is looked up. With a user's package of models
    (`SGLANG_EXTERNAL_MODEL_PACKAGE`) SGLang's own way stays.
    """
    from slime.backends.sglang_utils.cpu_delta_net import provide_delta_net

    provide_delta_net()
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
    """By name, the models of sglang's module that has `architecture`; {} if none has it, or if it cannot be imported."""
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
