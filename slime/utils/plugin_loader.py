"""Finds the object that a plug-in path names, and turns errors of users' functions into messages.

Paths have the forms `pkg.mod.attr` (the last dot separates), `pkg.mod:attr.attr`, `dir/file.py:attr.attr` and `dir/file.py`,
for which the flag's conventional names decide. The same path gives the same object for the life of the process. Everything
that can be wrong is a `UserError` that names the flag, the path and, for a failing import, the original traceback and search
path.

The error of a user's function names the flag, the path and what the function was called for, and has the user's part of the
traceback. An exception that would end more than the call, such as that of `sys.exit`, becomes such an error too.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import filecmp
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from slime.utils.errors import RunError, UserError
from slime.utils.plugin_points import POINTS, REWARD_CLASS, REWARD_METHOD, Call

# Without it other threads would find an unfinished module while one runs the file. The file itself may load further ones.
_running_a_file = threading.RLock()
# The directories of the files that were run. Modules that these imported from there stay loaded under their plain names.
_directories: set[str] = set()

_GIVEN_ANOTHER = "and another plug-in has imported {} under that name, which it would be given; rename one of them"
_REWARD_FLAG = "--custom-rm-path"
_REWARD_METHOD = "compute_reward"
_REWARD_NAMES = ("reward_func", "custom_rm", _REWARD_METHOD)
_CONVENTIONAL_NAMES = {
    "custom_rm": _REWARD_NAMES,
    "custom_generate_function": ("custom_generate", "generate"),
    "rollout_function": ("generate_rollout",),
    "eval_function": ("eval_function", "generate_rollout"),
    "dynamic_sampling_filter": ("dynamic_filter", "filter_fn"),
}
# Flags whose functions may be `async`, because `call_user_function` calls them. No other caller awaits what comes back, so
# there a coroutine would never run.
AWAITED = frozenset({
    "--custom-generate-function-path", "--rollout-sample-hook-path", _REWARD_FLAG, "--rollout-all-samples-process-path",
    "--rollout-sample-filter-path", "--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path",
    "--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path",
})  # fmt: skip


def load_function(path: str, flag: str | None = None, *, batched: bool = False) -> Any:
    """The function or class that `path` names.

    `flag` (as in `--custom-rm-path`) is named in messages and chooses the conventional names for a bare `file.py`;
    `batched` says that a reward function for lists is looked for first there (`batched_custom_rm`).

    Raises:
        UserError: malformed path, failing import, missing or ambiguous name, something that is not callable, or a coroutine
            function for a flag whose functions nobody awaits.
    """
    if not isinstance(path, str) or not path.strip():
        raise UserError(
            f"{subject_of(flag, path)}: a plug-in path is a string like pkg.mod.function or file.py:function"
        )
    path = path.strip()
    found = _load_cached(_key_of(path, "" if path.startswith(os.sep) else os.getcwd()), path, flag, batched)
    if _observer is not None:
        found = _observer(flag, path, found)
    if flag is not None and flag not in AWAITED and is_coroutine_function(found):
        raise UserError(nobody_awaits(subject_of(flag, path)))
    return found


def load_to_call(path: str, flag: str, *, batched: bool = False) -> None:
    """`load_function`, for a process that will call what it loads.

    Raises:
        UserError: also if its parameters are others than what functions of the flag are given.
    """
    found, subject = load_function(path, flag, batched=batched), subject_of(flag, path)
    is_reward = flag == _REWARD_FLAG and inspect.isclass(found)
    problem = problem_of_call(subject, flag, found, description_of(found), REWARD_CLASS if is_reward else None)
    method = inspect.getattr_static(found, _REWARD_METHOD) if is_reward else None
    if problem is None and inspect.isfunction(method):
        defined = f"class {found.__name__}, {description_of(method)}"
        problem = problem_of_call(subject, flag, functools.partial(method, None), defined, REWARD_METHOD)
    if problem is not None:
        raise UserError(problem)


def is_coroutine_function(fn: Callable[..., Any]) -> bool:
    """Whether a call of `fn`, which may be an object with an async `__call__`, gives an awaitable."""
    if inspect.isfunction(fn):
        return parameters_of(fn).with_coroutine
    called = getattr(fn, "__call__", None)  # noqa: B004
    return not inspect.isclass(fn) and any(map(inspect.iscoroutinefunction, (fn, called)))


def nobody_awaits(subject: str) -> str:
    """The message about a coroutine function, or a coroutine, of `subject` at a point where none is awaited."""
    return f"{subject} is async, and nobody awaits it here; write `def`, and run coroutines with slime.utils.async_utils.run"


@functools.cache
def _key_of(path: str, directory: str) -> str:
    """Relative files are keyed by their absolute path: the same text may mean another file in another `directory`."""
    file, attribute = _split_file_path(path)
    return path if file is None else os.path.realpath(file) + (f":{attribute}" if attribute else "")


_observer: Callable[[str | None, str, Any], Any] | None = None


@contextlib.contextmanager
def observing_plug_ins(observer: Callable[[str | None, str, Any], Any]) -> Iterator[None]:
    """In the block `load_function` returns `observer(flag, path, found)` instead of what it found, in all threads."""
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@functools.cache
def _load_cached(key: str, path: str, flag: str | None, batched: bool) -> Any:
    subject = subject_of(flag, path)
    file, attribute = _split_file_path(path)
    if file is not None:
        module = _load_file(file, subject)
        found = (
            _resolve(module, attribute, subject)
            if attribute
            else _resolve_by_convention(module, flag, batched, subject)
        )
    else:
        _, module_name, attribute = split_path(path)
        if not module_name or not attribute:
            raise UserError(f"{subject}: expected module.attribute, module:attribute, file.py:attribute or file.py")
        found = _resolve(_import_module(module_name, subject), attribute, subject)
    if not callable(found):
        raise UserError(f"{subject}: is a {type(found).__name__}, expected a function or class")
    if flag == _REWARD_FLAG and inspect.isclass(found) and not callable(getattr(found, _REWARD_METHOD, None)):
        raise UserError(f"{subject}: {_no_reward_class(found)}")
    return found


def load_module(path: str, flag: str | None = None) -> ModuleType:
    """The module that `path` names, which is a file or the name of a module.

    Raises:
        UserError: there is none, or its import fails.
    """
    subject = subject_of(flag, path)
    return _load_file(path, subject) if path.endswith(".py") else _import_module(path, subject)


def file_of_path(path: str) -> str | None:
    """The Python file that a plug-in path names, or None when it names a module."""
    return _split_file_path(path.strip())[0]


def subject_of(flag: str | None, path: Any) -> str:
    """What messages call a plug-in path."""
    return f"{flag} {path!s}" if flag else f"plug-in path {path!s}"


def _split_file_path(path: str) -> tuple[str | None, str]:
    match = re.fullmatch(r"(.+\.py)(?::([\w.]+))?", path)
    return (match[1], match[2] or "") if match else (None, "")


def split_path(path: str) -> tuple[str | None, str, str]:
    """(file, module, attribute) of a plug-in path. The file is None if a module is named; parts that are missing are empty."""
    file, attribute = _split_file_path(path)
    if file is not None:
        return file, "", attribute
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return None, module, attribute


def _import_module(name: str, subject: str) -> ModuleType:
    top = name.partition(".")[0]
    found = getattr(sys.modules.get(top), "__file__", None)
    if any(found in _files_of(top, directory) for directory in _directories):
        spec = importlib.machinery.PathFinder.find_spec(top)
        if spec is not None and spec.has_location and os.path.isfile(spec.origin):
            # Every part is compared, because two packages may have equal files, such as an empty one, and different modules.
            place = os.path.dirname(os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin)
            for part in _with_packages(name):
                own, other = next(filter(os.path.isfile, _files_of(part, place)), None), _given_instead(part, place)
                if own is not None and other is not None and not _are_equal(own, other):
                    raise UserError(f"{subject}: names {own}, {_GIVEN_ANOTHER.format(other)}")
    with _importing(subject):
        return importlib.import_module(name)


def _load_file(file: str, subject: str) -> ModuleType:
    """The module of `file`, registered under a private name that depends on the file's real path only."""
    real_path = os.path.realpath(file)
    if not os.path.isfile(real_path):
        raise UserError(f"{subject}: there is no file {real_path}")
    name = "_slime_plugin_" + hashlib.sha256(real_path.encode()).hexdigest()[:16]
    with _running_a_file:
        if name in sys.modules:
            return sys.modules[name]
        directory = os.path.dirname(real_path)
        for own, other in _taken_for_another(real_path):
            raise UserError(f"{subject}: it imports {own}, {_GIVEN_ANOTHER.format(other)}")
        _directories.add(directory)
        module_spec = importlib.util.spec_from_file_location(name, real_path)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        with _importing(subject):
            try:
                with _importable(directory):
                    module_spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return module


def _taken_for_another(file: str) -> Iterator[tuple[str, str]]:
    """(module's file, file that Python would give instead) for each module below the directory of `file` that `file` or one of
    these modules imports, and for which Python would give one of the same name from another plug-in's directory."""
    directory, files = os.path.dirname(file), [file]
    # The list grows during the loop.
    for importing in files:
        for name in _names_imported_by(importing, directory):
            own = next(filter(os.path.isfile, _files_of(name, directory)), None)
            if own is None or own in files:
                continue
            files.append(own)
            other = _given_instead(name, directory)
            if other is not None and not _are_equal(own, other):
                yield own, other


def _are_equal(one: str, other: str) -> bool:
    return os.path.samefile(one, other) or filecmp.cmp(one, other, shallow=False)


def _files_of(name: str, directory: str) -> tuple[str, str]:
    """The files that may be the module `name` below `directory`, in the order in which Python tries them."""
    place = os.path.join(directory, *name.split("."))
    return os.path.join(place, "__init__.py"), f"{place}.py"


def _given_instead(name: str, directory: str) -> str | None:
    """The file, below the directory of another plug-in, from which Python has loaded the module `name` or would load it; None
    if there is none."""
    found = getattr(sys.modules.get(name), "__file__", None)
    # Python looks for a module that is not imported yet in the directory of its package.
    package = name.partition(".")[0]
    file_of_package = getattr(sys.modules.get(package), "__file__", None)
    # The working directory counts too, because paths that name modules are looked for there.
    for place in {*_directories, os.getcwd()} - {directory}:
        files = _files_of(name, place)
        if found in files:
            return found
        if file_of_package == _files_of(package, place)[0]:
            return next(filter(os.path.isfile, files), None)
    return None


def _names_imported_by(file: str, directory: str) -> list[str]:
    """The names of the modules that `file` imports, and of their packages. A name that it imports from a module counts as a
    module, since it may be one."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # the import says what is wrong
    packages = Path(file).relative_to(directory).parts[:-1]
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Each dot after the first one goes up one package.
            near = packages[: len(packages) + 1 - node.level] if node.level else ()
            module = [*near, *filter(None, [node.module])]
            imported |= {".".join([*module, alias.name]) for alias in node.names}
    return sorted({part for name in imported for part in _with_packages(name)})


def _with_packages(name: str) -> Iterator[str]:
    """The names of the packages that a module is in, outermost first, and then its own."""
    return itertools.accumulate(name.split("."), "{}.{}".format)


@contextmanager
def _importing(subject: str) -> Iterator[None]:
    try:
        with containing_endings():
            yield
    except Exception as error:
        search_path = "\n  ".join(sys.path)
        text = f"{subject}: the import failed{_elsewhere(error)}\n{traceback.format_exc()}module search path:\n  {search_path}"
        raise UserError(text) from error


def _elsewhere(error: Exception) -> str:
    """The part of a message that tells, about a missing module of this package, where there is one of that name."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if not name or not name.startswith(f"{__package__.partition('.')[0]}."):
        return ""
    package = Path(_PACKAGE)
    files = package.rglob(f"{name.rpartition('.')[2]}.py")
    found = sorted(".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files)
    return f": there is no {name}{'; did you mean ' + ' or '.join(found) + '?' if found else ''}"


@contextmanager
def _importable(directory: str) -> Iterator[None]:
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        if directory in sys.path:
            sys.path.remove(directory)


def _resolve(module: ModuleType, attribute: str, subject: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = vars(found) if hasattr(found, "__dict__") else ()
            raise UserError(no_attribute(subject, _name_of(found), part, names))
        found = getattr(found, part)
    return found


def no_attribute(subject: str, owner: str, part: str, names: Iterable[str]) -> str:
    """The message that `owner`, whose attributes are `names`, lacks the attribute `part`."""
    public = [name for name in names if not name.startswith("_")]
    near = difflib.get_close_matches(part, public, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(sorted(public)) or 'nothing public'}"
    return f"{subject}: {owner} has no attribute {part!r}{hint}"


def _no_reward_class(found: type) -> str:
    methods = [name for name in dir(found) if not name.startswith("_") and callable(getattr(found, name))]
    has = f" (it has {', '.join(methods)})" if methods else ""
    return (
        f"class {found.__name__} has no method {_REWARD_METHOD}{has}; a reward is a class with "
        f"{_REWARD_METHOD}(prompts, responses[, labels, samples]), a function fn(args, sample) for one sample, or a function "
        "fn(args, samples) for a list"
    )


def _name_of(found: Any) -> str:
    return getattr(found, "__file__", None) or getattr(found, "__qualname__", None) or repr(found)


def _resolve_by_convention(module: ModuleType, flag: str | None, batched: bool, subject: str) -> Any:
    names = conventional_names(flag, batched)
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }
    if _kind_of(flag) == "custom_rm":
        reward_classes = [value for value in own.values() if hasattr(value, _REWARD_METHOD)]
        if len(reward_classes) == 1:
            return reward_classes[0]
    if len(own) == 1:
        return next(iter(own.values()))
    raise UserError(no_conventional_name(subject, own, names))


def conventional_names(flag: str | None, batched: bool) -> tuple[str, ...]:
    """The names that are looked for in a bare `file.py`, in this order."""
    kind = _kind_of(flag)
    names = _CONVENTIONAL_NAMES.get(kind, (kind.removeprefix("custom_"),))
    if kind == "custom_rm" and batched:
        names = ("batched_custom_rm", *names)
    return tuple(filter(None, names))


def no_conventional_name(subject: str, own: Iterable[str], tried: Iterable[str]) -> str:
    """The message about a bare file that defines the names `own`, and none of those that were `tried`."""
    return (
        f"{subject}: the file defines {', '.join(sorted(own)) or 'no public function or class'}; name one after a colon "
        f"(file.py:name), or use a conventional name ({', '.join(tried) or 'none'})"
    )


def _kind_of(flag: str | None) -> str:
    return flag.removeprefix("--").replace("-", "_").removesuffix("_path") if flag else ""


def problem_of_call(
    subject: str, flag: str | None, function: Callable[..., Any], defined: str, call: Call | None = None
) -> str | None:
    """Why `function` cannot be given what functions of `flag` are given; None if it can, or if its signature is unknown.

    Args:
        defined: how it is defined, for the message.
        call: what it is given; unset, what the table of plug-in points says.
    """
    point = POINTS.get(flag)
    if point is None:
        return None
    names = parameters_of(function).names
    call = call or next((call for call in point.calls if call.fits(names)), None)
    try:
        # What a decorator puts around a function is called, whatever is in it.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    if call is None:
        return None
    named = dict.fromkeys(call.named) | accepted_keywords(function, dict.fromkeys(call.offered))
    try:
        (signature.bind_partial if call.takes_more else signature.bind)(*call.given, **named)
    except TypeError as error:
        return f"{subject}: is `{defined}` ({error}), and it is called as {point.call}; write it with these parameters"
    return None


def description_of(found: Any) -> str:
    """How a function or a class is defined: its kind, its name and its parameters, as far as they are known."""
    kind = "class" if inspect.isclass(found) else "async def" if is_coroutine_function(found) else "def"
    try:
        return f"{kind} {getattr(found, '__name__', 'function')}{inspect.signature(found, follow_wrapped=False)}"
    except (TypeError, ValueError):
        return kind


class Parameters(NamedTuple):
    """The parameters of a callable, and whether a call gives a coroutine.

    Attributes:
        names: the names of its parameters, in order and without self.
        by_name: those that can be given by name.
        takes_any_name: whether any other name can be given as well.
        with_coroutine: whether it is a coroutine function.
    """

    names: tuple[str, ...]
    by_name: frozenset[str]
    takes_any_name: bool
    with_coroutine: bool


def parameters_of(fn: Callable[..., Any]) -> Parameters:
    """The parameters of `fn`; none if the callable has no signature."""
    try:
        return _parameters_of(fn)
    except TypeError:  # `fn` is not hashable
        return _parameters_of.__wrapped__(fn)


# Cached, because it is asked at every call of a plug-in, and is slow.
@functools.lru_cache(maxsize=256)
def _parameters_of(fn: Callable[..., Any]) -> Parameters:
    with_coroutine = inspect.iscoroutinefunction(fn)
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return Parameters((), frozenset(), False, with_coroutine)
    kinds = [parameter.kind for parameter in parameters.values()]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = frozenset(name for name, kind in zip(parameters, kinds, strict=True) if kind in by_name)
    return Parameters(tuple(parameters), named, inspect.Parameter.VAR_KEYWORD in kinds, with_coroutine)


def accepted_keywords(fn: Callable[..., Any], candidates: dict[str, Any]) -> dict[str, Any]:
    """The entries of `candidates` that `fn` can be given by name."""
    parameters = parameters_of(fn)
    if parameters.takes_any_name:
        return dict(candidates)
    return {name: value for name, value in candidates.items() if name in parameters.by_name}


_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"


class EndingRaised(RuntimeError):
    """The user's code raised an exception that would end more than its call; it is the `__cause__`."""


class containing_endings:
    """Raise EndingRaised if the block, which runs the user's code, raises anything that is not an `Exception`.

    Such are SystemExit and KeyboardInterrupt, which would end the event loop or the actor around it; a CancelledError, which
    would make its caller look cancelled; and exceptions that are meant to pass every `except Exception`, ours too, such as
    time limits of graders.

    A cancellation of the task that the block runs in, a GeneratorExit, and an interruption of the main thread by Ctrl-C pass
    unchanged.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Exception | GeneratorExit):
            return
        interrupted = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
        if not interrupted and not (isinstance(error, asyncio.CancelledError) and _is_being_cancelled()):
            raise EndingRaised(f"the function raised {error!r}") from error


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def calling_user_code(flag: str, path: str, subject: str) -> Iterator[None]:
    """Turn an exception of the block into the error that `user_function_error` makes of it.

    Args:
        subject: what the function was called for, for example `rollout 3`.
    """
    try:
        with containing_endings():
            yield
    except Exception as error:
        raise user_function_error(flag, path, subject, error) from error


def call_plug_in(flag: str, path: str | None, subject: str, *given: Any) -> Any:
    """The result of the user's function at `path`, for callers that do not await it; None without a path.

    Args:
        subject: see `calling_user_code`.

    Raises:
        UserError: the function cannot be loaded, raised, or returned a coroutine; the message names the flag, the path and, if
            it was called, the subject.
    """
    if path is None:
        return None
    function = load_function(path, flag=flag)
    with calling_user_code(flag, path, subject):
        result = function(*given)
        if inspect.iscoroutine(result):
            # A plain function that returns the call of an async one is noticed only here.
            result.close()
            raise UserError(nobody_awaits(f"{flag} {path}, called for {subject},"))
    return result


def user_function_error(flag: str, path: str, subject: str, error: Exception) -> Exception:
    """The error to raise for a plug-in that raised: it names flag, path and subject, and holds the original traceback.

    Errors that already carry a message for the user pass unchanged.
    """
    if isinstance(error, UserError | RunError):
        return error
    error = error.__cause__ if isinstance(error, EndingRaised) else error
    text = "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))).rstrip()
    return UserError(f"{flag} {path} raised {type(error).__name__} for {subject}: {error}\n{text}")


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame outside this package on; the whole one if all frames are inside."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        part = part.tb_next
    return part or trace
