"""200 answers that a model might give, by accident or to win, through every reward: each ends within its limit."""

import asyncio
import functools
import itertools
import threading
import time

import pytest
from aiohttp import web

from slime.rollout.rm_hub import batched_async_rm, grading, worker_pool
from slime.utils.reward_types import BOXED, REMOTE, REWARD_TYPES
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.processes.http_server import serving

PIECES = {
    "towers": ["9^{9^{9^{9}}}", "2**3**4**5**6", "(((9^9)^9)^9)", "10^{1000000}", "e^{e^{e^{e^{99}}}}", "99999!", "9!!!!!!"],
    "nesting": ["(" * 5000 + "1" + ")" * 5000, "{" * 5000, r"\frac{1}{" * 2000, r"\sqrt{" * 3000 + "2", "[" * 100_000,
                r"\left(" * 4000, "((1)," * 3000],
    "megabytes": ["9" * 1_200_000, "x+" * 90_000, "Answer: " * 40_000, r"\boxed{" * 200_000, "{" * 300_000, " " * 1_200_000,
                  "a " * 90_000, "**A" * 90_000, "\n" * 300_000],
    "characters": ["\x00" * 2000, "\ud800" * 500, "\udfff\ud800", "‮​‍" * 3000, "١٢٣", "Ａ" * 2000, "e\u0301" * 5000,
                   "😀" * 9000, "\x1b[2J\x07\r\b", "\ufeff\u2028\u2029", "İ" * 999, "ß" * 999],
    "code": ["__import__('os').system('touch slime_was_here')", "`touch slime_was_here`", "$(touch slime_was_here)",
             "; touch slime_was_here", "{{7*7}}${7*7}%s%n", "().__class__.__bases__[0].__subclasses__()",
             r"\input{/etc/passwd}", r"\write18{touch slime_was_here}", "exec('1')", "lambda: 0", "'; DROP TABLE samples; --"],
    "bombs": [r"\def\a{\a\a}\a" * 200, r"\newcommand{\x}{\x\x}\x", r"\begin{matrix}" * 900, r"\\" * 9000, "&" * 9000, "$" * 999,
              r"\text{" * 900, r"\int" * 900, r"\sum_{i=1}^{10^{99}} i", r"\prod_{k=1}^{999999} k", "-" * 9000, "=" * 9000,
              "," * 9000, r"\frac" * 900],
}  # fmt: skip
WRAPPERS = ["{}", r"</think> so \boxed{{{}}}", "Answer: {}", "the answer is ({}"]
# Between two turns of the loop: what its own thread computes, and how long others may keep it from its turn.
MOST_COMPUTED_S, LONGEST_STOP_S = 0.5, 10.0
LABELS = {
    "math": "x+1",
    "deepscaler": "x+1",
    "dapo": "x+1",
    "f1": "the cat",
    "gpqa": "B",
    "random": None,
    REMOTE: "1",
    "ifbench": "x",
}


@functools.cache
def hostile_answers():
    pieces = list(itertools.chain.from_iterable(PIECES.values()))
    wrapped = [wrapper.format(piece) for piece in pieces for wrapper in WRAPPERS]
    # Every piece in at least one form, and every form with most pieces.
    return [wrapped[position] for position in range(len(wrapped)) if position % 6 != 5][:200]


def test_there_are_200_of_every_kind():
    answers = hostile_answers()
    assert len(answers) == len(set(answers)) == 200
    assert all(any(piece in answer for answer in answers) for pieces in PIECES.values() for piece in pieces)


@pytest.fixture(scope="module", autouse=True)
def checks(tmp_path_factory):
    """A library of instructions that looks at every character."""
    directory = tmp_path_factory.mktemp("library")
    (directory / "instructions_registry.py").write_text(
        "class Check:\n"
        "    def __init__(self, name): pass\n"
        "    def build_description(self): pass\n"
        "    def get_instruction_args(self): pass\n"
        "    def check_following(self, text): return len(text.encode()) > 3 and text.split()[-1] == 'x'\n"
        "INSTRUCTION_DICT = {'check': Check}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(directory))
        worker_pool.close_pools()
        yield
        worker_pool.close_pools()


@pytest.mark.slow
@pytest.mark.parametrize("rm_type", ["math", "deepscaler"])
def test_w3_200_hostile_answers_and_the_library_of_formulas(rm_type, tmp_path, monkeypatch):
    """Those that reach the library end its workers, one by one."""
    monkeypatch.setattr(worker_pool, "are_equal", functools.partial(worker_pool.are_equal, timeout=0.2))
    grade_all(rm_type, tmp_path, monkeypatch)


@pytest.mark.parametrize("rm_type", [*REWARD_TYPES, BOXED + "f1", BOXED + "gpqa", BOXED + REMOTE])
def test_w3_200_hostile_answers_through_every_reward(rm_type, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(worker_pool, "are_equal", lambda *pair: asked.append(pair) or False)
    grade_all(rm_type, tmp_path, monkeypatch)
    assert len(asked) < 20 and max((len(text) for pair in asked for text in pair), default=0) < 1000


def grade_all(rm_type, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Workers of another case work in its directory, and would make their files there.
    worker_pool.close_pools()
    name = rm_type.removeprefix(BOXED)
    metadata = {"instruction_id_list": ["check"], "kwargs": [None]} if name == "ifbench" else {}
    samples = [
        Sample(index=i, group_index=i, response=text, label=LABELS[name], metadata=dict(metadata))
        for i, text in enumerate(hostile_answers())
    ]

    computing, compute = set(), grading.compute_builtin_reward

    def computed(args, sample):
        computing.add(threading.current_thread())
        return compute(args, sample)

    monkeypatch.setattr(grading, "compute_builtin_reward", computed)

    async def service(request):
        body = await request.json(loads=lambda text: len(text))
        return web.json_response(body > 0)

    async def main():
        async with serving(service) as url:
            # What takes longer than this for one answer fails the test: its sample has no reward.
            args = make_args("", rm_type=rm_type, rm_timeout=60.0, reward_key="score" if name == "dapo" else None)
            args.rm_url = url
            stops = []
            ticks = asyncio.create_task(ticking(stops))
            rewards = await batched_async_rm(args, samples)
            ticks.cancel()
            return rewards, stops

    started = time.process_time()
    rewards, stops = asyncio.run(main())
    # The loop goes on meanwhile: it computes nothing itself, and no single step of a grader holds it up for long.
    assert (threading.current_thread() in computing) == (rm_type == REMOTE)
    assert max(own for own, _ in stops) < MOST_COMPUTED_S and max(whole for _, whole in stops) < LONGEST_STOP_S
    numbers = [reward["score"] if name == "dapo" else reward for reward in rewards]
    if name not in ("random", REMOTE):
        assert set(numbers) <= {-1.0 if name == "dapo" else 0.0}, [
            samples[i].response[:60] for i, n in enumerate(numbers) if n > 0
        ]
    # Of this process, for all 200 together: texts of megabytes are read a few times, and never powers of their length.
    assert time.process_time() - started < 30
    assert list(tmp_path.iterdir()) == []


async def ticking(stops):
    """Note how much processor time of the loop's thread, and how much time, lies between two turns of the loop, in seconds."""
    while True:
        before = time.thread_time(), time.monotonic()
        await asyncio.sleep(0.01)
        stops.append((time.thread_time() - before[0], time.monotonic() - before[1]))
