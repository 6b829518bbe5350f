"""Functions whose parameters are not those that their flag gives: told by the source of a plug-in, and where it is loaded."""

import itertools

import pytest

from slime.arguments.flag import flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_to_call
from slime.utils.plugin_points import POINTS
from slime.utils.plugin_source import problem_of_path

GENERATE, REWARD, SOURCE = "--custom-generate-function-path", "--custom-rm-path", "--data-source-path"
ADAPTED = """
import functools
def adapted(fn):
    @functools.wraps(fn)
    def inner({}): return fn(sample)
    return inner
@adapted
def f({}): ...
"""
CALLS = [(flag, call) for flag, point in POINTS.items() for call in point.calls]


def problems(path, flag):
    """(what the source tells, what the loader tells)."""
    try:
        load_to_call(path, flag)
    except UserError as error:
        return problem_of_path(path, flag), str(error)
    return problem_of_path(path, flag), None


@pytest.fixture
def told(tmp_path):
    counts = itertools.count()

    def told(flag, source):
        file = tmp_path / str(next(counts)) / "own.py"
        file.parent.mkdir()
        file.write_text(source)
        return problems(f"{file}:f", flag)

    return told


def source_of(given, named, offered):
    words = [*given, *(["*"] if named or offered else []), *named, *(f"{name}=None" for name in offered)]
    return f"def f({', '.join(words)}): ..."


def test_each_flag_of_a_function_says_how_it_is_called():
    flags = {flag_of(name) for name, flag in OWN_FLAGS.items() if flag.plug_in is not None}
    assert flags <= {flag for flag, _ in CALLS}


@pytest.mark.parametrize(("flag", "call"), CALLS)
def test_the_parameters_of_each_point_are_accepted_and_one_less_is_not(told, flag, call):
    assert told(flag, source_of(call.given, call.named, call.offered)) == (None, None)
    assert told(flag, source_of(call.given, call.named, ())) == (None, None), "what is offered may be left out"
    for less in [(call.given[:-1], call.named), (call.given, call.named[:-1])]:
        if less != (call.given, call.named):
            by_source, by_loader = told(flag, source_of(*less, ()))
            assert by_source == by_loader and by_source is not None and POINTS[flag].call in by_source


@pytest.mark.parametrize(
    ("flag", "source"),
    [
        (GENERATE, "async def f(sample): ..."),
        (GENERATE, "async def f(args, sample, sampling_params, tools: dict): ..."),
        (GENERATE, "def f(args, samples, history): ..."),
        (GENERATE, "def f(args, evaluation, sampling_params): ..."),
        (REWARD, "async def f(args): ..."),
        (REWARD, "def f(prompt, response, label=None, *, extra): ..."),
        (REWARD, "def f(*, args, sample): ..."),
        (REWARD, "class f:\n    def compute_reward(self, prompts): ..."),
        (REWARD, "class f:\n    def compute_reward(self, prompts, responses, answers): ..."),
        (REWARD, "class f:\n    def __init__(self, judge): ...\n    def compute_reward(self, *given): ..."),
        ("--custom-loss-function-path", "def f(args, batch, logits): ..."),
        ("--custom-loss-function-path", "def f(args, batch, logits, reduce, step, /, last=None): ..."),
        ("--custom-tis-function-path", "def f(args, pg_loss, train_log_probs, rollout_log_probs): ..."),
        ("--rollout-function-path", "def f(args, rollout_id, data_source): ..."),
        (SOURCE, "class f:\n    def get_samples(self, n): ..."),
        (SOURCE, "class f:\n    def __init__(self, args, tokenizer): ..."),
        (SOURCE, "class f:\n    def __init__(self, dataset): ..."),
    ],
)
def test_a_function_with_other_parameters_is_told_before_it_is_loaded(told, flag, source):
    by_source, by_loader = told(flag, source)
    assert by_source is not None and by_loader is not None
    for message in (by_source, by_loader):
        assert message.startswith(f"{flag} ") and "own.py:f: " in message and POINTS[flag].call in message
    if not source.startswith("class"):
        # Annotations are written as Python shows them.
        definition = source.partition(":")[0] if "dict" not in source else "async def f("
        assert definition in by_source and definition in by_loader


@pytest.mark.parametrize(
    ("flag", "source"),
    [
        (GENERATE, "async def f(*given, **named): ..."),
        (GENERATE, "async def f(args, sample, sampling_params={'n': [1]}, evaluation=False, extra=sum([1, 2])): ..."),
        (GENERATE, "async def f(args, samples, evaluation, sampling_params): ..."),
        (GENERATE, "def f(a, b, c, /): ..."),
        (GENERATE, "import functools\ndef g(tools, args, sample, sampling_params): ...\nf = functools.partial(g, 1)"),
        (GENERATE, "class Tool:\n    async def __call__(self, args, sample, sampling_params): ...\nf = Tool()"),
        (GENERATE, ADAPTED.format("args, sample, sampling_params", "sample")),
        (GENERATE, "def f(sample): ...\nif True:\n    def f(args, sample, sampling_params): ..."),
        (GENERATE, "def f(sample): ...\nglobals()['f'] = lambda *given: None"),
        (GENERATE, "from builtins import max as f"),
        (REWARD, "def f(args, sample, judge, *, evaluation): ..."),
        (REWARD, "class Base:\n    def __init__(self, args, model_path): ...\n    def compute_reward(self, p, r, labels): ...\n"
                 "class f(Base): ..."),
        (REWARD, "class f:\n    @staticmethod\n    def compute_reward(prompts, responses): ..."),
        (REWARD, "class f:\n    def __init__(self, *, args): ...\n    compute_reward = print"),
        ("--custom-pg-loss-reducer-function-path", "class f:\n    def __init__(self, total, response, masks, per_token): ..."),
        (SOURCE, "class f:\n    def __init__(self, dataset, args): ..."),
        (SOURCE, "from dataclasses import dataclass\n@dataclass\nclass f:\n    args: object"),
        (SOURCE, "class f:\n    def __new__(cls, args): ..."),
    ],
)  # fmt: skip
def test_what_can_be_called_is_no_problem(told, flag, source):
    assert told(flag, source) == (None, None)


def test_a_wrapper_counts_as_what_is_called_where_only_loading_shows_it(told):
    by_source, by_loader = told(GENERATE, ADAPTED.format("sample", "args, sample, sampling_params"))
    assert by_source is None and by_loader is not None and "`def f(sample)`" in by_loader


def test_a_definition_is_described_alike_with_and_without_loading(told):
    by_source, by_loader = told(GENERATE, "async def f(sample, *tools, depth=3, **rest): ...")
    assert by_source is by_loader is None, "what is given fits into the tuple"
    by_source, by_loader = told(GENERATE, "async def f(sample, *, depth=3): ...")
    assert by_source == by_loader and "`async def f(sample, *, depth=3)`" in by_source


def test_nothing_of_the_users_code_runs_to_tell(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"def f(sample, when=open({str(marker)!r}, 'w')): ...")
    assert problem_of_path(f"{tmp_path}/own.py:f", GENERATE) is not None
    assert not marker.exists()
