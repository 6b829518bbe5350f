"""What is found in the source of a plug-in; each path is loaded as well, so that both say the same."""

import sys

import pytest

from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.plugin_source import problem_of_path

SOURCE = """
import json as js
from os import path
try:
    import no_such_package
except ImportError:
    no_such_package = None
if True:
    def inside(): ...
class Plain:
    def method(self): ...
    inner = print
class Derived(dict):
    pass
left, (right, *rest) = print, (print, print)
def sets_global():
    global made
    made = print
sets_global()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A package with modules, on the search path of this process."""
    package = tmp_path / "plugged_package"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "code.py").write_text(SOURCE)
    (package / "sub" / "deep.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.startswith("plugged_package")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "path",
    ["{p}/code.py:inside", "{p}/code.py:Plain.method", "{p}/code.py:Derived.get", "{p}/code.py:right", "{p}/code.py:made",
     "{p}/code.py:js.dumps", "{p}/code.py:path.join", "plugged_package.code.left", "plugged_package.code:Plain.inner",
     "plugged_package.sub.deep.f", "os.path.join", "math.sqrt", "collections:OrderedDict.fromkeys"],
)  # fmt: skip
def test_what_loads_is_no_problem(module, path):
    path = path.format(p=module)
    assert callable(load_function(path))
    assert problem_of_path(path) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{p}/code.py:insde", "{p}/code.py has no attribute 'insde'; did you mean 'inside'?"),
        ("{p}/code.py:Plain.metod", "Plain has no attribute 'metod'; did you mean 'method'?"),
        ("plugged_package.code.rihgt", "{p}/code.py has no attribute 'rihgt'; did you mean 'right'?"),
        ("nothing", "expected module.attribute, module:attribute, file.py:attribute or file.py"),
    ],
)
def test_a_wrong_name_is_told_in_the_words_of_the_loader(module, path, message):
    path, message = path.format(p=module), message.format(p=module)
    assert problem_of_path(path, "--flag") == f"--flag {path}: {message}"
    with pytest.raises(UserError) as error:
        load_function(path, "--flag")
    assert str(error.value) == f"--flag {path}: {message}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("plugged_package.cod.f", "there is no module 'cod' in {p}"),
        ("plugged_package.sub.depe.f", "there is no module 'depe' in {p}/sub"),
        (
            "plugged_package.code.Plain.method",
            "no package with a 'Plain' in it; write plugged_package.code:Plain...",
        ),
        ("{p}/broken.py:f", "{p}/broken.py:2: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_told(module, path, message):
    (module / "broken.py").write_text("def f(): ...\ndef g(: ...\n")
    path = path.format(p=module)
    assert message.format(p=module) in problem_of_path(path)
    with pytest.raises(UserError):
        load_function(path)


@pytest.mark.parametrize(
    "source", ["from os import *", "globals()['f'] = print", "def __getattr__(name): return print", "exec('f = print')"]
)
def test_what_the_source_leaves_open_is_left_to_the_loader(module, source):
    (module / "open.py").write_text(source + "\n")
    assert problem_of_path(f"{module}/open.py:getcwd_or_f") is None


def test_a_bare_file_is_resolved_as_the_loader_does(module):
    two = module / "two.py"
    two.write_text("def one(): ...\ndef two(): ...\n")
    for flag in ("--custom-rm-path", "--buffer-filter-path"):
        with pytest.raises(UserError) as error:
            load_function(str(two), flag)
        assert problem_of_path(str(two), flag) == str(error.value)
    for name, source in {
        "only": "def any_name(*given): ...",
        "named": "def a(): ...\ndef buffer_filter(*given): ...",
    }.items():
        (module / f"{name}.py").write_text(source + "\n")
        assert callable(load_function(f"{module}/{name}.py", "--buffer-filter-path"))
        assert problem_of_path(f"{module}/{name}.py", "--buffer-filter-path") is None
    (module / "reward.py").write_text("class A: ...\nclass B(A): ...\n")
    assert problem_of_path(f"{module}/reward.py", "--custom-rm-path") is None


def test_a_name_that_is_imported_is_not_taken_for_what_the_file_defines(module):
    """The loader would take it: only the source tells what was imported from what was defined and decorated."""
    flag, file = "--custom-generate-function-path", module / "own.py"
    imported = "from slime.rollout.sglang_rollout import generate\n"
    file.write_text(f"{imported}async def tool_generate(args, sample, sampling_params): ...\n")
    said = problem_of_path(str(file), flag)
    assert said.startswith(f"{flag} {file}: the file imports generate, a conventional name, and defines tool_generate;")
    assert problem_of_path(f"{file}:tool_generate", flag) is problem_of_path(f"{file}:generate", flag) is None
    file.write_text(imported)
    assert problem_of_path(str(file), flag) is None
    file.write_text("from functools import cache\ndef helper(): ...\n@cache\ndef generate(): ...\n")
    assert problem_of_path(str(file), flag) is None


@pytest.mark.parametrize(
    ("source", "flag", "refused"),
    [
        ("async def f(*given): ...", "--buffer-filter-path", True),
        ("async def f(*given): ...", "--custom-rm-path", False),
        ("def f(*given): ...", "--buffer-filter-path", False),
        ("async def f(*given):\n    yield 1", "--buffer-filter-path", False),
        ("def plain(fn): return lambda *given: None\n@plain\nasync def f(*given): ...", "--buffer-filter-path", False),
        ("async def f(*given): ...\nf = print", "--buffer-filter-path", False),
    ],
)
@pytest.mark.parametrize("name", [":f", ""])
def test_a_coroutine_that_nobody_awaits_is_told_as_the_loader_does(tmp_path, source, flag, refused, name):
    (tmp_path / "own.py").write_text(source)
    # What a bare file means is clear where it has this one function.
    path = f"{tmp_path}/own.py{name if source.count('def') == 1 and '=' not in source else ':f'}"
    said = problem_of_path(path, flag)
    assert (said is not None) is refused
    if refused:
        with pytest.raises(UserError) as error:
            load_function(path, flag)
        assert said == str(error.value)
    else:
        load_function(path, flag)


MISSING = "import json\nimport no_such_package.part as part, json\ndef f(*given): ...\n"


@pytest.mark.parametrize("path", ["{p}/own.py:f", "{p}/own.py", "plugged_package.own.f"])
@pytest.mark.parametrize(
    "source", [MISSING, MISSING.replace("import no_such_package.part as", "from no_such_package import")]
)
def test_a_package_that_the_file_imports_and_that_is_nowhere_is_told(module, path, source):
    (module / "own.py").write_text(source)
    path = path.format(p=module)
    said = problem_of_path(path, "--buffer-filter-path")
    assert said.startswith(
        f"--buffer-filter-path {path}: {module}/own.py:2 imports 'no_such_package', and there is no such"
    )
    with pytest.raises(UserError, match="No module named 'no_such_package'"):
        load_function(path, "--buffer-filter-path")
    # The process that loads it may have another search path.
    assert problem_of_path(path, "--buffer-filter-path", imports=False) is None


@pytest.mark.parametrize(
    "source",
    [
        "import os.path, beside, no_such_package",
        "import sys\nsys.path.insert(0, 'elsewhere')\nimport no_such_package",
        "import site\nsite.addsitedir('elsewhere')\nfrom no_such_package import f",
        "import sys, types\nsys.modules['no_such_package'] = types\nimport no_such_package",
        "try:\n    import no_such_package\nexcept ImportError: ...",
        "if False:\n    import no_such_package",
        "def g():\n    import no_such_package",
    ],
)
def test_an_import_that_may_succeed_or_may_fail_is_left_to_the_loader(module, source):
    """`beside` extends the search path."""
    (module / "beside.py").write_text(f"import sys\nsys.path.append({str(module / 'sub')!r})\n")
    (module / "sub" / "no_such_package.py").write_text("f = print\n")
    (module / "own.py").write_text(f"{source}\ndef f(): ...\n")
    assert problem_of_path(f"{module}/own.py:f") is None


def test_a_module_beside_the_file_is_there_for_a_file_alone(module):
    (module / "own.py").write_text("import code_beside\ndef f(): ...\n")
    (module / "code_beside.py").write_text("")
    assert problem_of_path(f"{module}/own.py:f") is None
    assert "own.py:1 imports 'code_beside'" in problem_of_path("plugged_package.own.f")


def test_nothing_is_imported(module):
    problem_of_path("plugged_package.sub.deep.f")
    assert not [name for name in sys.modules if name.startswith("plugged_package")]
