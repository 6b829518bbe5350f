"""Entry point of a server process: `python -m slime.backends.sglang_utils.server_process --arguments-file FILE`.

Runs the unmodified SGLang HTTP server. Around it: the process ends with its parent; the CPU adapter is installed where
there is no GPU; there, scheduler and detokenizer are forked after sglang was imported, so that its imports are paid
once instead of three times, and without what only other models would need; a server whose scheduler or detokenizer dies
ends and leaves the cause; the API key never reaches the log. The arguments file holds that key, so it is readable by its
owner only and is deleted as soon as it was read.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import logging
import os
import re
import sys
import types
from collections.abc import Sequence
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
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    fields = _known_fields(values, typed, ServerArgs)
    server_args = ServerArgs(**{**fields, **convert_texts({name: fields[name] for name in typed}, ServerArgs)})
    _leave_gc_freeze_to_engine()
    _name_shared_memory_after(cause_path.parent)
    _end_when_a_worker_dies(cause_path, values["node_rank"])
    if (values.get("dp_size") or 1) > 1:
        _care_for_every_group(values["node_rank"])
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
    from sglang.srt.entrypoints import http_server
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
    # Where processes are spawned they find it by this name, and not in `__main__`.
    run = importlib.import_module("slime.backends.sglang_utils.server_process").run_scheduler
    http_server.launch_server = functools.partial(http_server.launch_server, run_scheduler_process_func=run)


def run_scheduler(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, group: int, *further: Any
) -> None:
    """A rank of an engine with data-parallel attention, in its process.

    sglang 0.5.21 gives all groups one seed: of a prompt that several have, each would write the same answer. And where ranks
    sleep while they are idle, each wakes for what comes to its own group, and those that are awake wait for it.
    """
    from sglang.srt.managers import scheduler

    set_random_seed, idle_sleeper = scheduler.set_random_seed, scheduler.IdleSleeper

    def make_idle_sleeper(*arguments: Any, **options: Any) -> Any:
        sleeper = idle_sleeper(*arguments, **options)
        poll = sleeper.poller.poll
        sleeper.poller = types.SimpleNamespace(poll=lambda milliseconds: poll(min(milliseconds, _SLEEP_MILLISECONDS)))
        return sleeper

    scheduler.set_random_seed = lambda seed: set_random_seed(seed + group * _SEEDS_OF_A_GROUP)
    scheduler.IdleSleeper = make_idle_sleeper
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
