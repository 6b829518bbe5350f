"""Start and end of a run in the driver: arguments, Ray, trackers, signals, and the exit status.

However a run ends, the way out is the same: trackers are flushed, ranks, engines and router end, Ray is left, and the last
lines tell what was kept and how to go on (`slime.ray.continuation`). The exit status is 0 when the run is done or there is
nothing to do, 2 when the user can mend what is wrong, 1 when a part of the run failed, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from slime.arguments import build_parser, parse_args
from slime.arguments.config_files.role_config import CRITIC, place_in
from slime.observability.console import StartupClock
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, tracking_directory
from slime.observability.run_record import (
    derived_configuration,
    effective_configuration,
    write_run_record,
)
from slime.observability.trackers import new_run_id
from slime.plan import show_plan
from slime.plan.before_start import check_before_start, nothing_left
from slime.ray.continuation import closing_lines, words_of_restart
from slime.ray.driver import RunProgress, StartedRun, probe_memory
from slime.utils import env
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import claim_directory, release_directory, sweep_scratch_directories
from slime.utils.run_values import with_run_values

logger = logging.getLogger(__name__)


# Lock file in `--save`: only the run that holds it writes checkpoints there. Pushes of weights by files may go through the same
# directory, and have a lock of their own.
_CHECKPOINTS_LOCK = ".checkpoints.lock"
# Lock file in the directory of a run's logs and metrics: held by the run that first wrote there, which the text in it names.
_RUN_LOCK = ".run.lock"
# What says where that directory is, for messages.
_RUN_DIRECTORY_FLAGS = "--tensorboard-dir, or TENSORBOARD_DIR"
# Set by SIGTERM, so that it can be told from Ctrl-C: Ray turns whatever a signal handler raises into KeyboardInterrupt.
_terminated = threading.Event()
# Set by Ctrl-C and SIGTERM while the parts of a run end. They do not interrupt that, but the run must not start again.
_told_to_end = threading.Event()


def main(
    train: Callable[[argparse.Namespace, RunProgress], None],
    argv: list[str] | None = None,
    *,
    asynchronous: bool = False,
    add_custom_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
) -> int:
    """Parse the command line, run `train(args, progress)` in a session, and return the exit status.

    Args:
        asynchronous: the loop generates while it trains, which some flags do not go with.
        add_custom_arguments: adds the flags of a driver of the user's own, as `parse_args` takes it.
    """
    # A program may read the plan or the result of a check, so these have the standard output for themselves.
    words = list(sys.argv[1:] if argv is None else argv)
    plans = any(word in ("--check", "--dry-run", "--rehearse") or word.startswith("--dry-run-json") for word in words)
    stream = sys.stderr if plans else sys.stdout
    configure_logger(stream=stream)
    _terminated.clear()
    _told_to_end.clear()
    # `args` is what the words say, `args_of_start` the same for one start (`--max-restarts` starts a run again with other
    # words), and `args_of_run` what a start then runs with: it also has what only Ray and the trackers tell.
    args, args_of_first_start, progress = None, None, RunProgress()
    parse = functools.partial(parse_args, add_custom_arguments=add_custom_arguments, asynchronous=asynchronous)
    try:
        args = args_of_start = parse(argv=words)
        StartupClock().mark("arguments")
        configure_logger(args.log_level, stream)
        for message in env.warnings_about_names():
            logger.warning("%s", message)
        if args.dry_run:
            _show_plan(args, add_custom_arguments)
            return 0
        for restarts_left in range(args.max_restarts, -1, -1):
            # Everything up to the session happens before Ray, trackers or directories are touched.
            args_of_start = _checked_before_start(args_of_start, stream)
            if args_of_start is None:
                # Nothing is to start. This may also be a restart: all was trained before a part of the run failed.
                break
            with _checkpoints_claimed(args), _session(args_of_start, args_of_first_start) as args_of_run:
                args_of_first_start = args_of_first_start or args_of_run
                if _trained_to_the_end(train, args_of_run, progress, restarts_left):
                    break
            args_of_start = parse(argv=words_of_restart(args, progress, words))
        _tell_what_is_kept(args, progress, words, finished=True)
    except (Exception, KeyboardInterrupt) as error:
        if env.debug_enabled() and isinstance(error, UserError | RunError | OSError):
            raise
        exit_status = _tell_why_it_ended(error)
        _tell_what_is_kept(args, progress, words)
        return exit_status
    return 0


def _tell_why_it_ended(error: BaseException) -> int:
    """Say on the standard error what ended the run, and return its exit status. Only an error that nobody expected gets a
    traceback."""
    # The log of the run went to the standard output.
    configure_logger(stream=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        name, exit_status = ("SIGTERM", 143) if _terminated.is_set() else ("Ctrl-C", 130)
        logger.error("stopped by %s", name)
        return exit_status
    is_expected = isinstance(error, UserError | RunError | OSError)
    logger.error("%s", error if is_expected else "the run failed", exc_info=not is_expected)
    return error.exit_status if isinstance(error, UserError | RunError) else 1


def _show_plan(
    args: argparse.Namespace, add_custom_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None
) -> None:
    finished = nothing_left(args)
    if finished is not None:
        logger.warning("%s", finished)
    if args.rehearse:
        from slime.rehearsal.run import show_rehearsal

        show_rehearsal(args)
    else:
        show_plan(args, build_parser(add_custom_arguments))


def _checked_before_start(args: argparse.Namespace, stream: TextIO) -> argparse.Namespace | None:
    """Check all that can be known before a run starts.

    Returns:
        The arguments of the run; None where nothing is to start (`--check`, or all is trained already), which is then told.

    Raises:
        UserError: the run cannot start.
    """
    finished = nothing_left(args)
    if finished is None:
        from slime.ray.cluster import check_machine, refuse_what_would_fail

        refuse_what_would_fail(args)
        check_before_start(args)
        if not args.check:
            _sweep()
        check_machine(args)
        if args.rollout_external:
            from slime.backends.sglang_utils.external import with_external_engines

            args = with_external_engines(args)
    if args.check or finished is not None:
        _tell_result(finished or _needs_of(args), stream)
        return None
    return args


def _trained_to_the_end(
    train: Callable[[argparse.Namespace, RunProgress], None],
    args: argparse.Namespace,
    progress: RunProgress,
    restarts_left: int,
) -> bool:
    """Run `train`. Returns True when it is done, False when a part of the run failed and the run is to start again; the error
    is then logged, not raised."""
    try:
        train(args, progress)
    except UserError:
        raise
    except Exception as error:
        # An error before the loop would only come again at the next start.
        if restarts_left == 0 or progress.rollouts_done is None or _told_to_end.is_set():
            raise
        known = isinstance(error, RunError) and not env.debug_enabled()
        logger.error("%s", error if known else "the run failed", exc_info=not known)
        number = args.max_restarts - restarts_left + 1
        logger.warning("restart %d of %d (--max-restarts)", number, args.max_restarts)
        return False
    return True


def _sweep() -> None:
    """Remove the scratch directories that killed runs left behind.

    They may have filled the very memory or disk that the checks of the machine look at next.
    """
    for left_by_a_killed_run in sweep_scratch_directories():
        logger.debug("removed %s, which a killed run had left", left_by_a_killed_run)


def _needs_of(args: argparse.Namespace) -> str:
    from slime.ray.cluster import plan_cluster

    plan = plan_cluster(args)
    return f"ready to start; of Ray the run needs {plan.gpus} GPUs and {plan.cpus} CPUs"


def _tell_result(line: str, stream: TextIO) -> None:
    """The one line of a run that starts nothing: a check prints it on the standard output, other runs log it."""
    if stream is sys.stderr:
        print(line)
    else:
        logger.info("%s", line)


def _tell_what_is_kept(
    args: argparse.Namespace, progress: RunProgress, words: Sequence[str], *, finished: bool = False
) -> None:
    """Log the last lines of a run; nothing for one that ended before its loop."""
    if progress.rollouts_done is None:
        return
    # The exit status is settled by now, whatever goes wrong with these lines.
    try:
        for line in closing_lines(args, progress, _start_command(words), finished=finished):
            logger.info("%s", line)
    except Exception:
        logger.debug("what was kept could not be told", exc_info=True)


def _start_command(words: Sequence[str]) -> list[str]:
    own = [sys.executable, sys.argv[0], *words]
    try:
        return shlex.split(env.start_command() or "") or own
    except ValueError:  # quotes that do not close
        return own


@contextlib.contextmanager
def started(args: argparse.Namespace) -> Iterator[StartedRun]:
    """Place and start all parts of a run; they end with the block."""
    # Imported late, because it imports Ray, which takes longer than the whole of `--help`.
    from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models

    placement = create_placement_groups(args)
    rollout_manager = create_rollout_manager(args, placement["rollout"])
    with ending(rollout_manager):
        run = create_training_models(args, placement, rollout_manager)
        with ending(run.actor):
            probe_memory(args, run)
            yield run


@contextlib.contextmanager
def ending(part: Any) -> Iterator[None]:
    """End `part` (None: nothing to end) with the block: `part.kill()` after an error where it has that, else `part.dispose()`.

    The first Ctrl-C starts the end; further ones do not interrupt it, so that nothing is left running.
    """
    try:
        yield
    except BaseException:
        _end(getattr(part, "kill", None) or getattr(part, "dispose", None), part)
        raise
    _end(getattr(part, "dispose", None), part)


def _end(end: Callable[[], None] | None, part: Any) -> None:
    if end is None:
        return
    with _uninterrupted():
        try:
            end()
        except Exception as error:
            # The result or the error of the run itself matters more than how its parts ended.
            logger.error("ending %s: %s", type(part).__name__, error)


def _checkpoint_directories(args: argparse.Namespace) -> dict[str, Path]:
    """The directories that the run writes checkpoints into, keyed by what the user gave for each (`--save DIRECTORY`, or the
    line of a file); empty for a run that writes none."""
    if args.save is None or args.save_interval is None or args.num_rollout == 0 or not args.has_trainer:
        return {}
    directories = {f"--save {args.save}": Path(args.save)}
    of_critic = args.role_overrides.get(CRITIC, {}).get("save") if args.use_critic else None
    if of_critic is not None:
        line = place_in(args.megatron_config_path, CRITIC, "save")
        directories[f"{line}: role critic: save {of_critic}"] = Path(of_critic)
    return directories


@contextlib.contextmanager
def _disk_errors_name(given: str) -> Iterator[None]:
    """Where the block cannot write, raise RunError with `given`, the flag and value that say where it writes."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{given}: {error}; make room there, or give a directory elsewhere") from error


@contextlib.contextmanager
def _checkpoints_claimed(args: argparse.Namespace) -> Iterator[None]:
    """In the block no other run writes checkpoints where this one does. A run that writes none, say an evaluation, claims
    nothing.

    Raises:
        UserError: another run already does.
        RunError: nothing can be written there.
    """
    with contextlib.ExitStack() as claims:
        for given, directory in _checkpoint_directories(args).items():
            with _disk_errors_name(given):
                is_ours = claim_directory(directory, _CHECKPOINTS_LOCK)
            if not is_ours:
                raise UserError(
                    f"{given}: another run writes its checkpoints into this directory; end that run, or give a directory of "
                    "this one's own"
                )
            claims.callback(release_directory, directory, _CHECKPOINTS_LOCK)
        yield


@contextlib.contextmanager
def _directory_claimed(directory: Path) -> Iterator[None]:
    """In the block, a run that begins in the same directory is warned that this one is here. If another one is here already,
    this run is warned; both may go on."""
    lock = directory / _RUN_LOCK
    with _disk_errors_name(_RUN_DIRECTORY_FLAGS):
        is_ours = claim_directory(directory, _RUN_LOCK)
    if not is_ours:
        name = ""
        with contextlib.suppress(OSError, UnicodeError):
            name = lock.read_text().strip()
        logger.warning(
            "%s: another run%s writes into this directory: both write the same logs and args.json, and their curves mix; give "
            "--tb-experiment-name or TENSORBOARD_DIR of this one's own",
            directory, f" ({name})" if name else "",
        )  # fmt: skip
        yield
        return
    # The name is a courtesy: a full disk, or a file of another user, must not end the run.
    with contextlib.suppress(OSError):
        begun = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        lock.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {begun}\n")
    try:
        yield
    finally:
        release_directory(directory, _RUN_LOCK)


@contextlib.contextmanager
def _session(args: argparse.Namespace, before: argparse.Namespace | None) -> Iterator[argparse.Namespace]:
    """In the block there is a Ray cluster, and metrics reach the trackers. Gives `args` with what is known only now.

    `before`: what an earlier start of this run got here; the run goes on in the same directory, under the same W&B id.
    """
    from slime.ray.cluster import ray_cluster

    if before is None:
        with _disk_errors_name(_RUN_DIRECTORY_FLAGS):
            directory = tracking_directory(args).absolute()
        run_id = new_run_id() if args.use_wandb else None
    else:
        directory, run_id = Path(before.run_dir), before.wandb_run_id
    run_id = args.wandb_run_id or run_id
    args = with_run_values(args, run_dir=str(directory), log_dir=str(directory / "logs"), wandb_run_id=run_id)
    with _disk_errors_name(_RUN_DIRECTORY_FLAGS):
        Path(args.log_dir).mkdir(parents=True, exist_ok=True)
    failed = True
    with _directory_claimed(directory), _sigterm_as_interrupt():
        try:
            # Ray replaces our SIGTERM handler by its own when it starts, so ours is set once more.
            with ray_cluster(args) as args_of_cluster, _sigterm_as_interrupt():
                # These may differ from `args`: some values follow from the devices of the cluster, now that it is joined.
                init_tracking(args_of_cluster, directory, again=before is not None)
                logger.info("%s", effective_configuration(args_of_cluster))
                logger.debug("%s", derived_configuration(args_of_cluster))
                # A directory with checkpoints also tells how they were made.
                place, flags = (
                    (args.save, "--save") if _checkpoint_directories(args) else (directory, _RUN_DIRECTORY_FLAGS)
                )
                with _disk_errors_name(f"{flags}: {place}/args.json"):
                    record = write_run_record(args_of_cluster, place)
                logger.info("every value and where it came from: %s", record)
                StartupClock().mark("Ray")
                yield args_of_cluster
            failed = False
        finally:
            finish_tracking(failed=failed)
            # Ranks and engines that were killed, after an error or at Ctrl-C, have left their scratch directories.
            sweep_scratch_directories()


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(signum: int, frame: Any) -> None:
        _terminated.set()
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: _told_to_end.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
