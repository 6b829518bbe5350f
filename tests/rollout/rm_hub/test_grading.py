"""Which function grades, in which form, within which limits, and what it may return."""

import asyncio
import re
import threading
from collections import Counter

import numpy as np
import pytest

from slime.arguments.paths import load_plug_ins
from slime.rollout.failures import SampleFailed
from slime.rollout.rm_hub import async_rm, batched_async_rm, grading
from slime.rollout.rm_hub.grading import clear_reward_instances
from slime.utils import async_utils
from slime.utils.errors import RunError, UserError
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.processes.waiting import wait_until


@pytest.fixture
def rewards(tmp_path):
    clear_reward_instances()
    file = tmp_path / "rewards.py"
    file.write_text(
        """
import asyncio, functools
calls = []
running = peak = 0

async def single(args, sample, **kwargs):
    calls.append(("single", sample.index, sorted(kwargs)))
    return float(sample.index)

def plain(args, sample):
    return sample.index * 2

async def batch(args, samples):
    calls.append(("batch", [s.index for s in samples]))
    return [s.index + 0.5 for s in samples]

def group(args, whole_group, **kwargs):
    return [len(whole_group)] * len(whole_group)

def sorts(args, samples):
    rewards = [float(s.index) for s in samples]
    samples.sort(key=lambda s: -s.index)
    for sample in samples:
        sample.metadata["graded"] = sample.index
    return rewards

def short(args, samples):
    return [1.0]

class Model:
    made = 0
    def __init__(self, model_path):
        Model.made += 1
        self.model_path = model_path
    def compute_reward(self, prompts, responses, labels):
        calls.append((self.model_path, prompts, responses, labels))
        return [len(r) for r in responses]

class Loads:
    made = []
    def __init__(self, args):
        self.made.append(self)
        args.loads.set()
        assert args.goes_on.wait(60), "nothing else runs meanwhile"
        if args.fails:
            raise OSError("no such weights")
    def compute_reward(self, prompts, responses):
        return [7 for _ in prompts]

class NeverReady(Loads):
    made = []

class AsksTheLoop:
    def __init__(self):
        self.loop = asyncio.get_running_loop()
    async def compute_reward(self, prompts, responses):
        return [7 for _ in prompts]

class Misnamed:
    def compute_rewards(self, prompts, responses):
        return [7 for _ in prompts]

class Bare:
    async def compute_reward(self, prompts, responses):
        return [7 for _ in prompts]

def value(args, sample):
    return args.value

def mars(args, sample):
    setattr(sample, *args.value)
    return 1.0

def mars_all(args, samples):
    return [mars(args, sample) for sample in samples]

async def blocks(args, sample):
    args.release.wait(60)
    return 1.0

async def counting(args, sample):
    global running, peak
    running += 1
    peak = max(peak, running)
    await asyncio.sleep(0.01)
    running -= 1
    return peak

async def own_timeout(args, sample):
    raise TimeoutError("the judge is slow")

async def forever(args, sample):
    await asyncio.Event().wait()

partial = functools.partial(single)
"""
    )
    return lambda name: f"{file}:{name}"


def samples(*indices):
    return [Sample(index=i, prompt=f"p{i}", response="r" * i, label=str(i)) for i in indices]


def grade_one(args, sample, **kwargs):
    return asyncio.run(async_rm(args, sample, **kwargs))


def grade_all(args, batch, **kwargs):
    return asyncio.run(batched_async_rm(args, batch, **kwargs))


def module_of(rewards):
    from slime.utils.plugin_loader import load_function

    return load_function(rewards("single")).__globals__


def test_precedence_sample_path_flag_metadata_type(rewards):
    args = make_args("", custom_rm_path=rewards("plain"), rm_type="math")
    (sample,) = samples(3)
    sample.custom_rm_path = rewards("single")
    assert grade_one(args, sample) == 3.0
    sample.custom_rm_path = None
    assert grade_one(args, sample) == 6.0
    args.custom_rm_path = None
    sample.metadata["rm_type"] = "f1"
    sample.response = "3"
    assert grade_one(args, sample) == 1.0
    sample.metadata.clear()
    assert grade_one(args, sample) == 0.0, "math finds no box"


def test_r10_one_function_has_one_form_on_both_ways(rewards):
    single = make_args("", custom_rm_path=rewards("single"))
    assert grade_one(single, samples(4)[0]) == 4.0
    assert grade_all(single, samples(1, 2)) == [1.0, 2.0]
    batch = make_args("", custom_rm_path=rewards("batch"))
    assert grade_one(batch, samples(4)[0]) == 4.5
    assert grade_all(batch, samples(1, 2)) == [1.5, 2.5]
    forms = [call[:2] for call in module_of(rewards)["calls"]]
    assert forms == [("single", 4), ("single", 1), ("single", 2), ("batch", [4]), ("batch", [1, 2])]


def test_a_batch_form_may_sort_its_list_and_note_something_on_each_sample(rewards):
    group = samples(1, 2, 3)
    assert grade_all(make_args("", custom_rm_path=rewards("sorts")), group) == [1.0, 2.0, 3.0]
    assert [(sample.index, sample.metadata["graded"]) for sample in group] == [(1, 1), (2, 2), (3, 3)]


def test_r10_group_rm_decides_only_where_the_name_does_not(rewards):
    args = make_args("", custom_rm_path=rewards("group"), group_rm=True)
    assert grade_all(args, samples(1, 2, 3)) == [3.0, 3.0, 3.0]
    args = make_args("", custom_rm_path=rewards("single"), group_rm=True)
    assert grade_all(args, samples(1, 2)) == [1.0, 2.0]


def test_paths_of_samples_are_honoured_in_batches(rewards):
    args = make_args("", custom_rm_path=rewards("batch"))
    group = samples(1, 2, 3)
    group[1].custom_rm_path = rewards("plain")
    assert grade_all(args, group) == [1.5, 4.0, 3.5]
    assert ("batch", [1, 3]) in module_of(rewards)["calls"]


def test_classes_are_constructed_once_with_what_they_accept(rewards):
    args = make_args("/model", custom_rm_path=rewards("Model"))
    assert grade_all(args, samples(1, 2)) == [1.0, 2.0]
    assert grade_one(args, samples(5)[0]) == 5.0
    module = module_of(rewards)
    assert module["Model"].made == 1
    assert module["calls"][0] == ("/model", ["p1", "p2"], ["r", "rr"], ["1", "2"])
    clear_reward_instances()
    args = make_args("/model", custom_rm_path=rewards("Bare"), rm_model_path="/other")
    assert grade_all(args, samples(1, 2)) == [7.0, 7.0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_constructor_that_loads_holds_up_nothing_and_runs_once(rewards, fails):
    args = make_args("", custom_rm_path=rewards("Loads"))
    args.loads, args.goes_on, args.fails = threading.Event(), threading.Event(), fails

    async def main():
        calls = asyncio.gather(*[async_rm(args, sample) for sample in samples(1, 2, 3)], return_exceptions=True)
        assert await asyncio.to_thread(args.loads.wait, 60)
        # The event loop is free for others, and a further call waits for the same constructor.
        later = asyncio.ensure_future(async_rm(args, samples(4)[0]))
        await asyncio.sleep(0)
        args.goes_on.set()
        return [*(await calls), *(await asyncio.gather(later, return_exceptions=True))]

    found = asyncio.run(main())
    assert len(module_of(rewards)["Loads"].made) == 1
    if fails:
        assert all("(constructor): no such weights" in str(error) for error in found)
    else:
        assert found == [7.0] * 4


def test_a_constructor_that_never_returns_is_named_with_its_limit(rewards):
    path = rewards("NeverReady")
    args = make_args("", custom_rm_path=path, http_request_timeout=0.1)
    args.loads, args.goes_on, args.fails = threading.Event(), threading.Event(), False
    late = f"{path} did not return within --http-request-timeout 0.1 s; it was called for sample 1 (constructor)"
    try:
        with pytest.raises(UserError, match="^" + re.escape(f"--custom-rm-path {late}")):
            grade_one(args, samples(1)[0])
    finally:
        args.goes_on.set()


def test_an_async_reward_that_blocks_is_told_with_its_place(rewards, monkeypatch, caplog):
    monkeypatch.setattr(async_utils, "STALL_S", 0.2)
    monkeypatch.setattr(async_utils, "ASK_EVERY_S", 0.02)
    args = make_args("", custom_rm_path=rewards("blocks"))
    args.release = threading.Event()
    grading_it = asyncio.run_coroutine_threadsafe(async_rm(args, samples(1)[0]), async_utils.get_async_loop())
    try:
        wait_until(lambda: "in blocks" in caplog.text)
        args.release.set()
        assert grading_it.result(60) == 1.0
    finally:
        args.release.set()
        async_utils.stop_async_loop()
    file = rewards("blocks").removesuffix(":blocks")
    (told,) = [message for message in caplog.messages if "in blocks" in message]
    assert f'File "{file}", line ' in told and "the event loop has been held up" in told


def test_a_constructor_of_a_class_with_coroutines_may_ask_for_the_loop(rewards):
    assert grade_one(make_args("", custom_rm_path=rewards("AsksTheLoop")), samples(1)[0]) == 7.0


def test_a_class_without_compute_reward_is_refused_in_one_line(rewards):
    path = rewards("Misnamed")
    args = make_args("", custom_rm_path=path)
    args.typed_flags = {"custom_rm_path"}
    with pytest.raises(UserError) as error:
        load_plug_ins(args, ("custom_rm_path",))
    assert str(error.value) == (
        f"--custom-rm-path {path}: class Misnamed has no method compute_reward (it has compute_rewards); a reward is a class "
        "with compute_reward(prompts, responses[, labels, samples]), a function fn(args, sample) for one sample, or a "
        "function fn(args, samples) for a list"
    )
    with pytest.raises(UserError, match="has no method compute_reward"):
        grade_one(args, samples(1)[0])


def test_plain_functions_that_hand_out_awaitables_and_keywords(rewards):
    args = make_args("", custom_rm_path=rewards("partial"))
    assert grade_one(args, samples(4)[0], extra=1) == 4.0
    assert module_of(rewards)["calls"][-1] == ("single", 4, ["evaluation", "extra"])


@pytest.mark.parametrize("value", [1, 0, 0.5, True, np.float32(0.5), np.int64(3), np.bool_(True), np.array(2.0), -1e30])
def test_w4_numbers_of_every_kind_are_rewards(rewards, value):
    args = make_args("", custom_rm_path=rewards("value"))
    args.value = value
    reward = grade_one(args, samples(1)[0])
    assert type(reward) is float
    assert reward == float(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), None, "1", [1.0], 1j])
def test_w5_other_results_name_sample_and_type(rewards, value):
    args = make_args("", custom_rm_path=rewards("value"))
    args.value = value
    with pytest.raises(UserError, match=r"rewards.py:value: the reward of sample 9 is .*expected a finite number"):
        grade_one(args, samples(9)[0])


def test_w5_dicts_need_the_reward_key(rewards):
    args = make_args("", custom_rm_path=rewards("value"), reward_key="acc", eval_reward_key="strict")
    args.value = {"acc": np.float64(0.5), "strict": 1, "note": "x"}
    assert grade_one(args, samples(1)[0]) == {"acc": 0.5, "strict": 1, "note": "x"}
    assert grade_one(args, samples(1)[0], evaluation=True)["strict"] == 1.0
    args.value = {"strict": 1.0}
    with pytest.raises(UserError, match=r"sample 1 has no entry 'acc'; it has strict"):
        grade_one(args, samples(1)[0])
    args.value = {"acc": float("nan")}
    with pytest.raises(UserError, match="sample 1 is nan"):
        grade_one(args, samples(1)[0])
    args.reward_key = None
    with pytest.raises(UserError, match="--reward-key must say"):
        grade_one(args, samples(1)[0])
    args.custom_reward_post_process_path = "my.function"
    assert np.isnan(grade_one(args, samples(1)[0])["acc"])


@pytest.mark.parametrize("form", ["mars", "mars_all"])
@pytest.mark.parametrize(
    ("name", "left", "message"),
    [
        ("status", "whatever", "sample 2 with status 'whatever'; expected one of Sample.Status"),
        ("metadata", 3, r"sample 2 with metadata 3 \(int\); expected a dict"),
        (
            "loss_mask",
            [1, 1],
            "a sample whose fields do not fit together: sample 2: loss_mask has 2 entries, expected 0",
        ),
    ],
)
def test_what_a_reward_function_breaks_is_named_at_once(rewards, form, name, left, message):
    args = make_args("", custom_rm_path=rewards(form))
    args.value = name, left
    with pytest.raises(UserError, match=f"^--custom-rm-path .*:{form} left {message}"):
        grade_all(args, samples(2))


def test_a_list_of_another_length_is_an_error(rewards):
    args = make_args("", custom_rm_path=rewards("short"))
    with pytest.raises(UserError, match=r"short returned \[1.0\].*samples 1, 2; expected a list of 2 rewards"):
        grade_all(args, samples(1, 2))


def test_calls_are_limited(rewards):
    args = make_args("", custom_rm_path=rewards("counting"), rm_concurrency=3)
    assert max(grade_all(args, samples(*range(20)))) == 3.0


def test_as_many_plain_rewards_run_at_once_as_the_flag_says(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import threading\nmeeting = threading.Barrier(200)\n"
        "def reward(args, sample):\n    meeting.wait(60)\n    return 1.0\n"
    )
    args = make_args("", custom_rm_path=f"{file}:reward", rm_concurrency=200)
    assert grade_all(args, samples(*range(400))) == [1.0] * 400


def test_rewards_that_never_return_make_room_until_they_are_too_many(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def reward(args, sample):\n    if sample.index < 32:\n        args.release.wait(60)\n    return 1.0\n"
    )
    args = make_args("", custom_rm_path=f"{file}:reward", rm_concurrency=32, rm_timeout=0.05)
    args.release = threading.Event()

    async def main():
        # Each is called twice.
        hung = [async_rm(args, sample) for sample in samples(*range(32))]
        results = await asyncio.gather(*hung[:31], return_exceptions=True)
        args.rm_timeout = 60.0
        results.append(await async_rm(args, samples(64)[0]))
        args.rm_timeout = 0.05
        results += await asyncio.gather(hung[31], return_exceptions=True)
        return [*results, *await asyncio.gather(async_rm(args, samples(65)[0]), return_exceptions=True)]

    try:
        *results, last, refused = asyncio.run(main())
    finally:
        args.release.set()
    assert [type(result) for result in results] == [SampleFailed] * 31 + [float]
    assert isinstance(last, SampleFailed)
    with pytest.raises(
        RunError, match=rf"^64 calls of --custom-rm-path {file}:reward were given up and never returned"
    ):
        raise refused


def test_a_plain_reward_may_combine_others(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import copy\nfrom slime.rollout.rm_hub import async_rm, batched_async_rm\nfrom slime.utils import async_utils\n"
        "def outer(args, sample):\n"
        "    inner = copy.copy(sample)\n    inner.custom_rm_path = __file__ + ':inner'\n"
        "    return 1.0 + async_utils.run(async_rm(args, inner))\n"
        "async def inner(args, sample):\n"
        "    last = copy.copy(sample)\n    last.custom_rm_path = __file__ + ':last'\n"
        "    return sum(await batched_async_rm(args, [last, copy.copy(last)]))\n"
        "def last(args, sample):\n    return 0.25\n"
    )
    args = make_args("", custom_rm_path=f"{file}:outer", rm_concurrency=1)

    async def main():
        async with asyncio.timeout(60):
            return await batched_async_rm(args, samples(*range(6)))

    try:
        assert async_utils.run(main()) == [1.5] * 6
    finally:
        async_utils.stop_async_loop()


@pytest.mark.parametrize(
    "rm_type, at_once",
    [("math", 2), ("deepscaler", 2), ("boxed_math", 2), ("f1", 6), ("boxed_f1", 6), ("dapo", 6), ("random", 6)],
)
def test_types_that_need_a_worker_run_no_more_at_once_than_there_are_workers(monkeypatch, rm_type, at_once):
    running, most, lock, full = [], [], threading.Lock(), threading.Event()

    def compute(args, sample):
        with lock:
            running.append(sample.index)
            most.append(len(running))
            if len(running) >= at_once:
                full.set()
        assert full.wait(60)
        with lock:
            running.remove(sample.index)
        return 1.0

    monkeypatch.setattr(grading, "compute_builtin_reward", compute)
    monkeypatch.setattr(grading, "pool_size", lambda: 2)
    batch = samples(*range(20))
    for sample in batch[::2]:
        sample.metadata["rm_type"] = rm_type
    args = make_args("", rm_concurrency=6, rm_type=rm_type, rm_timeout=600.0)
    assert grade_all(args, batch) == [1.0] * 20
    assert max(most) == at_once, "the others do not wait within their time limit"


@pytest.mark.parametrize("form", ["sample", "samples"])
def test_only_the_attempt_that_answered_changes_the_sample(tmp_path, form):
    file = tmp_path / "mine.py"
    one = "samples[0]" if form == "samples" else "sample"
    file.write_text(
        f"def reward(args, {form}):\n    sample = {one}\n    args.given.append(sample)\n"
        "    number = len(args.given)\n    sample.metadata['asked'].append(number)\n"
        "    sample.loss_mask[0] = 0\n    del sample.rollout_log_probs\n"
        "    if number == 1:\n"
        # The limit of the second attempt is none.
        "        args.rm_timeout = 60.0\n"
        "        sample.metadata['only'] = 'first'\n        args.release.wait(60)\n"
        "        sample.metadata['asked'].append('late')\n        sample.loss_mask[1] = 0\n"
        "        sample.remove_sample, sample.label = True, 'late'\n        args.woke.set()\n"
        f"    return {'[1.0]' if form == 'samples' else '1.0'}\n"
    )
    args = make_args("", custom_rm_path=f"{file}:reward", rm_timeout=1.0)
    args.given, args.release, args.woke = [], threading.Event(), threading.Event()
    (sample,) = samples(3)
    sample.metadata |= {"asked": [], "counts": Counter(a=1)}
    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1, 1]
    sample.rollout_log_probs = [-1.0, -1.0]
    try:
        assert grade_one(args, sample) == 1.0
    finally:
        args.release.set()
    assert args.woke.wait(60)
    assert (sample.metadata, sample.loss_mask) == ({"asked": [2], "counts": Counter(a=1)}, [0, 1])
    assert isinstance(sample.metadata["counts"], Counter)
    assert (sample.remove_sample, sample.label, sample.rollout_log_probs) == (False, "3", None)


def test_our_time_limit_fails_the_sample_and_the_functions_own_stops_the_run(rewards):
    args = make_args("", custom_rm_path=rewards("forever"), rm_timeout=0.05)
    with pytest.raises(SampleFailed, match="no reward for sample 1 within --rm-timeout 0.05 s"):
        grade_one(args, samples(1)[0])
    args = make_args("", custom_rm_path=rewards("own_timeout"))
    with pytest.raises(UserError, match=r"(?s)raised TimeoutError for sample 1: the judge is slow.*Traceback"):
        grade_one(args, samples(1)[0])
