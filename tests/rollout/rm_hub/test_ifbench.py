"""Strict instruction following: by checks of an installed library, in a worker process."""

import pytest

from slime.rollout.rm_hub import compute_ifbench_reward, worker_pool
from slime.utils.errors import UserError

# What the registries of IFEval and IFBench look like from outside.
REGISTRY = """
import socket

class Check:
    def __init__(self, instruction_id): self.id = instruction_id
    def build_description(self, **kwargs): self.kwargs = kwargs
    def get_instruction_args(self): return self.kwargs

class Words(Check):
    def build_description(self, *, num_words): self.kwargs = {"num_words": num_words}
    def check_following(self, value): return len(value.split()) >= self.kwargs["num_words"]

class Lower(Check):
    def build_description(self): self.kwargs = None
    def check_following(self, value): return value.islower()

class Repeats(Check):
    def build_description(self, *, prompt="?"): self.kwargs = {"prompt": prompt}
    def check_following(self, value): return value.startswith(self.kwargs["prompt"])

class Raises(Check):
    def check_following(self, value): raise ValueError("cannot read it")

class Endless(Check):
    def check_following(self, value):
        while True: pass

class Hungry(Check):
    def check_following(self, value): return bool(bytes(4 << 30))

class Network(Check):
    def check_following(self, value): socket.create_connection(("127.0.0.1", 9), 1); return True

class NoData(Check):
    def check_following(self, value): raise LookupError("Resource punkt_tab not found. Please use the NLTK Downloader")

print("a library prints")
INSTRUCTION_DICT = {
    "words": Words, "lower": Lower, "repeats": Repeats, "raises": Raises, "endless": Endless, "hungry": Hungry,
    "network": Network, "no_data": NoData,
}
"""


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    directory = tmp_path_factory.mktemp("library")
    (directory / "instructions_registry.py").write_text(REGISTRY)
    # IFEval's are deep in a package whose own imports take long, or fail.
    inner = directory / "lm_eval/tasks/ifeval"
    inner.mkdir(parents=True)
    for package in (directory / "lm_eval", directory / "lm_eval/tasks"):
        (package / "__init__.py").write_text("raise ImportError('a whole framework')")
    (inner / "checks.py").write_text("class Check(__import__('instructions_registry').Lower): pass")
    (inner / "instructions_registry.py").write_text(
        "from lm_eval.tasks.ifeval import checks\nINSTRUCTION_DICT = {'ifeval:lower': checks.Check, 'words': None}"
    )
    worker_pool.close_pools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        yield
        worker_pool.close_pools()


def reward(response, *instructions, **metadata):
    names, kwargs = zip(*instructions, strict=True)
    return compute_ifbench_reward(
        response, None, {"instruction_id_list": list(names), "kwargs": list(kwargs), **metadata}
    )


@pytest.mark.parametrize(
    ("response", "verdict"), [("one two three", 1.0), ("one two", 0.0), ("ONE two three", 0.0), ("", 0.0), (None, 0.0)]
)
def test_all_instructions_are_followed_or_none(response, verdict):
    # A Parquet column gives every row all keywords, null where they are another's.
    assert reward(response, ("words", {"num_words": 3, "relation": None}), ("lower", None)) == verdict


def test_both_libraries_are_asked_and_the_first_wins():
    assert reward("low", ("ifeval:lower", {}), ("words", {"num_words": 1})) == 1.0
    assert reward("HIGH", ("ifeval:lower", {}), ("words", {"num_words": 1})) == 0.0


def test_neither_what_was_thought_nor_the_mark_that_ends_a_turn_counts():
    assert reward("HIGH<|im_end|>", ("lower", {})) == 0.0
    assert reward("<think>LOW</think>low</s>", ("lower", {})) == reward("low<|END|>", ("lower", {})) == 1.0
    assert reward("<think>ONE TWO THREE FOUR</think>low", ("lower", {})) == 1.0


def test_checks_of_the_prompt_are_given_it():
    for keywords in ({}, {"prompt": "other"}):
        assert reward("say x, then", ("repeats", keywords), prompt="say x") == 1.0
    assert reward("say y, then", ("repeats", {}), prompt="say x") == 0.0


@pytest.mark.parametrize("name", ["raises", "hungry", "network"])
def test_w3_checks_that_fail_are_not_followed(name):
    assert reward("text", (name, {})) == 0.0
    assert reward("text", ("lower", {})) == 1.0


def test_w3_a_check_without_an_end_is_given_up():
    pool = worker_pool.WorkerPool("instructions", size=1)
    try:
        assert pool.ask(["text", "", [["endless", {}]]], timeout=0.2) is None
        assert pool.ask(["text", "", [["lower", {}]]]) == [True]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (("count:unknown", {}), r"no check .* count:unknown: .*the extra ifbench \(pip install 'lm-eval\[ifeval\]'\)"),
        (("words", {"number": 3}), "words refuses its kwargs {'number': 3}: TypeError"),
        (
            ("no_data", {}),
            "no_data needs data, once: python -m nltk.downloader punkt_tab .NLTK says: Resource punkt_tab not found",
        ),
    ],
)
def test_w6_what_is_missing_is_told_and_not_fetched(instruction, message):
    with pytest.raises(UserError, match=message):
        reward("text", instruction)


@pytest.mark.parametrize(
    "metadata", [None, {}, {"instruction_id_list": ["lower"]}, {"instruction_id_list": ["a"], "kwargs": []}]
)
def test_a_row_without_instructions(metadata):
    with pytest.raises(UserError, match="the metadata needs instruction_id_list, and kwargs"):
        compute_ifbench_reward("text", None, metadata)


def test_keywords_as_json():
    assert (
        compute_ifbench_reward("a b", None, {"instruction_id_list": ["words"], "kwargs": '[{"num_words": 2}]'}) == 1.0
    )
