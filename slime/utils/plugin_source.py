"""What the source of a plug-in tells about a plug-in path, before any process runs that source.

This is how the driver finds misspelt modules and names. An import would cost it the seconds that torch takes to import, and
run the user's code once more, in a process for which it was not written. What the source leaves open (`from x import *`, names
made by code, compiled modules) is left to the process that loads the plug-in.
"""

from __future__ import annotations

import ast
import copy
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slime.utils.plugin_loader import (
    AWAITED,
    conventional_names,
    no_attribute,
    no_conventional_name,
    nobody_awaits,
    problem_of_call,
    split_path,
    subject_of,
)
from slime.utils.plugin_points import REWARD_CLASS, REWARD_METHOD

# Code that mentions one of these may make names that no statement shows.
_MAKES_NAMES = {"globals", "locals", "vars", "exec", "modules", "__getattr__"}
# Attributes of `sys` and `site` by which code makes modules importable that nobody finds before it runs.
_EXTENDS_SEARCH = {"path", "meta_path", "path_hooks", "modules", "addsitedir"}


@dataclass
class _Names:
    """Names that a module or class binds. `open`: it may bind more names than its statements show."""

    nodes: dict[str, ast.AST] = field(default_factory=dict)
    open: bool = False


def problem_of_path(
    path: str, flag: str | None = None, *, key: str | None = None, batched: bool = False, imports: bool = True
) -> str | None:
    """Why `path` cannot be loaded, in the words of `load_function`; None if nothing is wrong, or if the source does not tell.

    This function does not report a file or a top-level package of `path` itself that does not exist.

    Args:
        path, flag, batched: as for `load_function`.
        key: what the path is given by, for the message; None: the flag.
        imports: whether what the file imports has to be here. It need not if the process that loads it has another search path.
    """
    subject = subject_of(key or flag, path)
    file, module, attribute = split_path(path.strip())
    own_directory = None if file is None else os.path.dirname(os.path.realpath(file))
    if file is None:
        if not module or not attribute:
            return f"{subject}: expected module.attribute, module:attribute, file.py:attribute or file.py"
        file, missing = _file_of_module(module)
        if missing:
            return f"{subject}: {missing}"
    if file is None or not os.path.isfile(file):
        return None
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except SyntaxError as error:
        return f"{subject}: {os.path.realpath(file)}:{error.lineno}: {error.msg}"
    except (OSError, ValueError):
        return None
    real_file = os.path.realpath(file)
    names = _names_of(tree)
    if attribute:
        problem = _problem_of_attribute(attribute, names, real_file, flag, subject)
    else:
        problem = _problem_of_convention(names, flag, batched, subject)
    return problem or (_problem_of_imports(tree, real_file, own_directory, subject) if imports else None)


def _problem_of_imports(tree: ast.Module, file: str, directory: str | None, subject: str) -> str | None:
    """Why a statement of the file certainly fails: it imports a top-level module or package that is nowhere.

    Imports in functions and below `if`, `try` or `with` do not count, since they may never run, or may be allowed to fail.

    Args:
        directory: from where the file may import modules in addition to the search path; None if it is named as a module.
    """
    if any(
        isinstance(node, ast.Attribute)
        and node.attr in _EXTENDS_SEARCH
        and getattr(node.value, "id", None) in ("sys", "site")
        for node in ast.walk(tree)
    ):
        return None
    for statement in tree.body:
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module]
        for top in (name.partition(".")[0] for name in names):
            if directory is not None and importlib.machinery.PathFinder.find_spec(top, [directory]):
                return None  # a module of the user's own may extend the search path
            if top not in sys.modules and find_top(top) is None:
                return (
                    f"{subject}: {file}:{statement.lineno} imports {top!r}, and there is no such module or package; install "
                    "it, or put its directory into PYTHONPATH"
                )
    return None


def _problem_of_attribute(attribute: str, names: _Names, file: str, flag: str | None, subject: str) -> str | None:
    owner, node = file, None
    for part in attribute.split("."):
        if part not in names.nodes:
            beside = os.path.join(os.path.dirname(file), part)
            is_module = os.path.basename(file) == "__init__.py" and (
                os.path.isdir(beside) or os.path.isfile(f"{beside}.py")
            )
            return None if names.open or is_module else no_attribute(subject, owner, part, names.nodes)
        node = names.nodes[part]
        if not isinstance(node, ast.ClassDef) or node.bases or node.keywords or node.decorator_list:
            break
        names, owner = _names_of(node), part
    return _problem_of_definition(node, names, flag, subject) if part == attribute else None


def _problem_of_definition(node: ast.AST, names: _Names, flag: str | None, subject: str) -> str | None:
    """Why what a path names, which the module binds to `node`, is of no use to the flag."""
    problem = _problem_of_coroutine(node, flag, subject)
    is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    # An indented one may be one of several, of which a condition decides.
    if problem is not None or not is_definition or node.decorator_list or node.col_offset or names.open:
        return problem
    if not isinstance(node, ast.ClassDef):
        return problem_of_call(subject, flag, _stub(node.args), _defined(node))
    return None if node.bases or node.keywords else _problem_of_class(node, flag, subject)


def _problem_of_class(node: ast.ClassDef, flag: str | None, subject: str) -> str | None:
    names, method = _names_of(node), "compute_reward"
    is_reward = method in conventional_names(flag, batched=False)
    nothing = ast.arguments([], [ast.arg("self")], None, [], [], None, [])
    for name, call in [("__init__", REWARD_CLASS if is_reward else None), (method, REWARD_METHOD)][: 1 + is_reward]:
        bound = names.nodes.get(name)
        known = bound is None or (
            isinstance(bound, ast.FunctionDef | ast.AsyncFunctionDef) and not bound.decorator_list
        )
        if names.open or "__new__" in names.nodes or not known:
            continue
        given = nothing if bound is None else bound.args
        defined = f"class {node.name}" + (f", {_defined(bound)}" if bound is not None else "")
        problem = problem_of_call(subject, flag, _stub(given, skipped=1), defined, call)
        if problem is not None:
            return problem
    return None


def _defined(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{kind} {node.name}({ast.unparse(node.args)})"


def _stub(given: ast.arguments, skipped: int = 0) -> Callable[..., None]:
    """A function with these parameters, but the first `skipped` ones, and without the user's code: defaults are None."""
    given = copy.deepcopy(given)
    for _ in range(skipped):
        del (given.posonlyargs or given.args)[:1]
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    for name in names:
        name.annotation = None
    positional = len(given.posonlyargs) + len(given.args)
    given.defaults = [ast.Constant(None) for _ in given.defaults][:positional]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    function = ast.Expression(ast.Lambda(given, ast.Constant(None)))
    return eval(compile(ast.fix_missing_locations(function), "<parameters of a plug-in>", "eval"))


def _problem_of_coroutine(node: ast.AST | None, flag: str | None, subject: str) -> str | None:
    """Why the function of the module that a path names is of no use to a flag whose functions nobody awaits."""
    if flag is None or flag in AWAITED or not isinstance(node, ast.AsyncFunctionDef) or node.decorator_list:
        return None
    is_generator = any(isinstance(inner, ast.Yield) for inner in ast.walk(node))
    return None if is_generator else nobody_awaits(subject)


def _problem_of_convention(names: _Names, flag: str | None, batched: bool, subject: str) -> str | None:
    tried = conventional_names(flag, batched)
    public = {name: node for name, node in names.nodes.items() if not name.startswith("_")}
    own = [
        name for name, node in public.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    found = next((name for name in tried if name in names.nodes), None)
    if own and found is not None and isinstance(names.nodes[found], ast.alias):
        # Nobody can tell which one is meant, and the wrong one would run without an error.
        return (
            f"{subject}: the file imports {found}, a conventional name, and defines {', '.join(sorted(own))}; name the one "
            "that you mean after a colon (file.py:name)"
        )
    assigned = any(isinstance(node, ast.Name) for node in public.values())
    # Only loading shows which class is a reward, because the method may be inherited.
    classes = "compute_reward" in tried and any(isinstance(public[name], ast.ClassDef) for name in own)
    if found is not None or (len(own) == 1 and not (names.open or assigned or classes)):
        return _problem_of_definition(names.nodes[found or own[0]], names, flag, subject)
    if names.open or assigned or classes:
        return None
    return no_conventional_name(subject, own, tried)


def _file_of_module(module: str) -> tuple[str | None, str | None]:
    """(source file of a dotted module, why there is certainly none), either None; the packages are not imported."""
    top, *parts = module.split(".")
    spec = find_top(top)
    if spec is None:
        return None, None
    file, directories, outer = spec.origin, spec.submodule_search_locations, top
    for part in parts:
        name = f"{outer}.{part}"
        known = sys.modules.get(name)
        if known is not None:
            # A loaded module counts wherever it lies: `os` is not a package, and yet there is `os.path`.
            file, directories = getattr(known, "__file__", None), getattr(known, "__path__", None)
        elif directories is None:
            return None, f"{outer!r} is a module ({file}), no package with a {part!r} in it; write {outer}:{part}..."
        else:
            places = [os.path.join(directory, part) for directory in directories]
            found = next((place for place in places if os.path.isdir(place) or os.path.isfile(f"{place}.py")), None)
            if found is None:
                missing = f"there is no module {part!r} in {', '.join(directories)}"
                return None, None if _may_hold(directories, part) else missing
            package = os.path.join(found, "__init__.py")
            if os.path.isdir(found) and (os.path.isfile(package) or not os.path.isfile(f"{found}.py")):
                file, directories = package, [found]
            else:
                file, directories = f"{found}.py", None
        outer = name
    return (file if file and file.endswith(".py") else None), None


def _may_hold(directories: Iterable[str], part: str) -> bool:
    """Whether something other than Python source may provide the module `part`."""
    for directory in directories:
        if not os.path.isdir(directory) or any(name.startswith(f"{part}.") for name in os.listdir(directory)):
            return True
    return False


def find_top(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of the top-level module or package `name`, found without importing anything; None if there is none."""
    try:
        # Ray puts the directory in which the command was typed on the search path of its workers.
        here = importlib.machinery.PathFinder.find_spec(name, [os.getcwd()])
        return here or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _names_of(scope: ast.Module | ast.ClassDef) -> _Names:
    names = _Names()
    _collect(scope.body, names)
    for node in ast.walk(scope):
        if isinstance(node, ast.Global):
            names.nodes.update(dict.fromkeys(node.names, node))
        mentioned = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        if mentioned in _MAKES_NAMES:
            names.open = True
    return names


def _collect(nodes: Sequence[ast.AST], names: _Names) -> None:
    """Collect the names that statements of this scope bind; names inside its functions and classes belong to those."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.nodes[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names.open |= alias.name == "*"
                names.nodes[alias.asname or alias.name.partition(".")[0]] = alias
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.nodes[node.id] = node
        elif not isinstance(node, ast.Lambda):
            _collect(list(ast.iter_child_nodes(node)), names)
