"""The import contract: our own imports only go down the floors, and public import paths that only re-export do only that."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The longest matching prefix decides. Floor 3 holds several rooms side by side that do not know each other.
FLOORS = {
    "slime.utils": 0,
    "slime.observability": 0,
    "slime.algorithms": 1,
    "slime.scheduling": 1,
    "slime.estimates": 1,
    "slime.models": 1,
    "slime.training": 2,
    "slime.weights": 2,
    "slime.arguments": 2,
    "slime.plan": 2,
    "slime.agent": 3,
    "slime.rollout": 3,
    "slime.serving": 3,
    "slime.backends.fsdp_utils": 3,
    "slime.backends.megatron_utils": 3,
    "slime.backends.sglang_utils": 3,
    "slime.rehearsal": 3,
    "slime.ray": 4,
    "slime.doctor": 4,
    "slime.plugins": 4,
}
WORKERS = 3
NEIGHBOURS_ALLOWED = {
    ("slime.serving", "slime.backends.sglang_utils"),
    ("slime.rehearsal", "slime.backends.megatron_utils"),
}

# Public import paths whose things live elsewhere; nothing but a docstring, imports and `__all__` may stand in them.
RE_EXPORT_ONLY = {
    "slime.backends.megatron_utils.arguments",
    "slime.backends.megatron_utils.hf_to_megatron",
    "slime.backends.megatron_utils.megatron_to_hf",
    "slime.backends.sglang_utils.arguments",
    "slime.data",
    "slime.observability.rollout_data_utils",
    "slime.observability.tensorboard_utils",
    "slime.observability.train_data_utils",
    "slime.observability.train_metric_utils",
    "slime.ray.rollout_validation",
    "slime.rollout.forge_load",
    "slime.rollout.sample_hooks",
    "slime.rollout.sglang_streaming_rollout",
    "slime.rollout.sleep_rollout",
    "slime.utils.accelerator",
    "slime.utils.arguments",
    "slime.utils.data",
    "slime.utils.distributed_utils",
    "slime.utils.dp_schedule",
    "slime.utils.flops_utils",
    "slime.utils.health_monitor",
    "slime.utils.memory_utils",
    "slime.utils.ppo_utils",
    "slime.utils.reloadable_process_group",
    "slime.utils.seqlen_balancing",
}
# What a driver or `--help` imports must not pay for these; they are imported inside functions.
HEAVY = {"torch", "transformers", "megatron", "sglang"}
LIGHT_MODULES = (
    "slime.arguments", "slime.models", "slime.utils.types", "slime.utils.misc", "slime.utils.errors", "slime.utils.env",
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """`importer` imports `target` in `line`; `at_module_level` unless inside a function or under TYPE_CHECKING.

    `is_needed`: not under TYPE_CHECKING, nor the package in `from package import module`, whose contents nobody asks for.
    """

    importer: str
    target: str
    line: int
    at_module_level: bool
    is_needed: bool = True

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "slime").rglob("*.py"))}


def room_of(module: str) -> str | None:
    """The entry of FLOORS that `module` belongs to."""
    prefixes = [room for room in FLOORS if module == room or module.startswith(room + ".")]
    return max(prefixes, key=len, default=None)


def imports_of(source: str, importer: str, is_package: bool = False) -> list[Import]:
    """Every import in `source`, those inside functions included; `from package import module` yields both names."""
    found = []

    def visit(node: ast.AST, at_module_level: bool, is_needed: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(importer, alias.name, node.lineno, at_module_level, is_needed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, importer, is_package)
            modules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES]
            base_is_needed = is_needed and len(modules) < len(node.names)
            found.append(Import(importer, base, node.lineno, at_module_level, base_is_needed))
            found.extend(Import(importer, name, node.lineno, at_module_level, is_needed) for name in modules)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            # An import is a statement, and no expression holds one.
            if not isinstance(child, ast.expr):
                visit(
                    child, at_module_level and not is_function and not is_typing_only, is_needed and not is_typing_only
                )

    visit(ast.parse(source), True, True)
    return found


def absolute_base(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = importer.split(".")
    package = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*package, *([node.module] if node.module else [])])


@functools.cache
def all_imports() -> list[Import]:
    return [
        found
        for module, path in MODULES.items()
        for found in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
    ]


def contract_violation(found: Import) -> str | None:
    """Why an import breaks the contract, or None."""
    if found.target.split(".")[0] in ("slime_plugins", "tests", "tools", "train", "train_async", "examples"):
        return f"{found}: slime must not know its users"
    if found.importer in RE_EXPORT_ONLY or not found.target.startswith("slime."):
        return None
    home, goal = room_of(found.importer), room_of(found.target)
    if home is None or goal is None or home == goal:
        return None
    if FLOORS[goal] > FLOORS[home]:
        return f"{found}: floor {FLOORS[home]} must not import floor {FLOORS[goal]}"
    if FLOORS[home] == FLOORS[goal] == WORKERS and (home, goal) not in NEIGHBOURS_ALLOWED:
        return f"{found}: {home} and {goal} stand side by side and must not import each other"
    return None


def test_imports_only_go_down() -> None:
    violations = [message for found in all_imports() if (message := contract_violation(found))]
    assert not violations, "\n".join(violations)


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node: sets in which everyone reaches everyone."""

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reached = {node: reached_from(node) for node in edges}
    found = {frozenset(other for other in reached[node] if node in reached.get(other, ())) for node in edges}
    return sorted(sorted(component) for component in found if len(component) > 1)


def module_edges(imports: list[Import]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for found in imports:
        if found.is_needed and found.target in MODULES and found.target != found.importer:
            edges.setdefault(found.importer, set()).add(found.target)
    return edges


def package_edges(imports: list[Import]) -> dict[str, set[str]]:
    """Imports between packages of one room that stand side by side."""
    edges: dict[str, set[str]] = {}
    for importer, targets in module_edges(imports).items():
        for target in targets:
            home, goal = (m if MODULES[m].name == "__init__.py" else m.rpartition(".")[0] for m in (importer, target))
            nested = f"{home}.".startswith(f"{goal}.") or f"{goal}.".startswith(f"{home}.")
            if not nested and room_of(importer) == room_of(target) and importer not in RE_EXPORT_ONLY:
                edges.setdefault(home, set()).add(goal)
    return edges


def test_nothing_imports_itself_by_way_of_others() -> None:
    imports = all_imports()
    assert cycles(module_edges(imports)) == [], "modules"
    assert cycles(package_edges(imports)) == [], "packages"


def test_cycles_are_found() -> None:
    edges = {"a": {"b", "x"}, "b": {"c"}, "c": {"a"}, "x": {"y"}, "p": {"q"}, "q": {"p", "a"}}
    assert cycles(edges) == [["a", "b", "c"], ["p", "q"]]
    lazy = imports_of("def f():\n    from slime.utils import misc", "slime.utils.errors")
    typing = imports_of("if TYPE_CHECKING:\n    import slime.utils.misc", "slime.utils.errors")
    assert module_edges(lazy) == {"slime.utils.errors": {"slime.utils.misc"}} and module_edges(typing) == {}


def test_every_module_has_a_floor() -> None:
    containers = {"slime", "slime.backends"}
    homeless = [m for m in MODULES if room_of(m) is None and m not in RE_EXPORT_ONLY | containers]
    assert not homeless, f"no floor is declared for {homeless}"


@pytest.mark.parametrize("module", sorted(RE_EXPORT_ONLY & set(MODULES)))
def test_public_import_path_only_re_exports(module: str) -> None:
    statements = ast.parse(MODULES[module].read_text(encoding="utf-8")).body
    for statement in statements:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_export_list = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        assert is_docstring or is_export_list or is_import, f"{module}:{statement.lineno} does more than re-export"


def test_modules_that_the_driver_imports_stay_light() -> None:
    heavy = [
        str(found)
        for found in all_imports()
        if found.importer.startswith(LIGHT_MODULES) and found.at_module_level and found.target.split(".")[0] in HEAVY
    ]
    assert not heavy, "\n".join(heavy)


def engines_that_the_trainer_knows(imports: list[Import]) -> list[str]:
    engines = ("megatron", "transformers", "slime.backends")
    return [str(i) for i in imports if i.importer.startswith("slime.training") and i.target.startswith(engines)]


def test_the_trainer_knows_no_backend() -> None:
    assert engines_that_the_trainer_knows(all_imports()) == []
    found = imports_of("def f():\n    from megatron.core import parallel_state", "slime.training.train_step")
    assert engines_that_the_trainer_knows(found) == ["slime.training.train_step:2 imports megatron.core"]


@pytest.mark.parametrize(
    ("importer", "source", "fragment"),
    [
        ("slime.utils.x", "import slime.algorithms.kl", "floor 0 must not import floor 1"),
        (
            "slime.algorithms.x",
            "def f():\n    from slime.ray import placement_group",
            "floor 1 must not import floor 4",
        ),
        ("slime.rollout.x", "from slime.backends import sglang_utils", "side by side"),
        ("slime.serving.x", "import slime.rollout.data_source", "side by side"),
        ("slime.ray.x", "import slime_plugins.models", "must not know its users"),
        ("slime.utils.x", "from ..training import loss", "floor 0 must not import floor 2"),
    ],
)
def test_the_contract_notices(importer: str, source: str, fragment: str) -> None:
    messages = [contract_violation(found) for found in imports_of(source, importer)]
    assert any(message and fragment in message for message in messages)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("slime.ray.x", "import slime.rollout.data_source"),
        ("slime.serving.x", "from slime.backends.sglang_utils import sglang_engine"),
        ("slime.backends.megatron_utils.x", "import megatron.core"),
        ("slime.utils.ppo_utils", "from slime.training.log_probs import calculate_log_probs_and_entropy"),
    ],
)
def test_the_contract_allows(importer: str, source: str) -> None:
    assert not any(contract_violation(found) for found in imports_of(source, importer))
