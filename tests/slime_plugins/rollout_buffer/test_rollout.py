"""The side of the run, against a real service and generators in processes of their own."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from slime.rollout.base_types import leaves
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils import async_utils
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import rollout
from slime_plugins.rollout_buffer.rollout import METADATA_KEY, generate_rollout
from slime_plugins.rollout_buffer.service import serving
from tests.support.models.rollout_args import make_args, make_checkpoint
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.waiting import wait_until

# Numbered instances without end, those with an odd number with two different rewards.
COUNTS = """
import json, urllib.error, urllib.request, time
TASK_TYPE = "counts"
LAST = None

def post(url, item):
    while True:
        request = urllib.request.Request(url + "/buffer/write", json.dumps(item).encode(), {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=30).read()
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise RuntimeError(error.read().decode())
            time.sleep(0.01)

def run_rollout(data):
    number = 0
    while LAST is None or number < LAST:
        for copy in range(data["num_repeat_per_sample"]):
            if str(number) in data["skip_instance_ids"]:
                continue
            answer = {"role": "assistant", "content": "because " * (copy + 1), "step_loss_mask": 1}
            messages = [{"role": "user", "content": f"why {number}?"}, answer]
            extra = {"label": str(number), "weight_versions": ["7"], "truncated": copy == 1}
            post(data["remote_buffer_url"], {"uid": f"{number}.{copy}", "instance_id": str(number), "messages": messages,
                 "reward": float(copy * (number % 2)), "extra_info": extra})
        number += 1

def get_group_data_meta_info(groups):
    return {"groups": len(groups), "name": "text"}
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(autouse=True)
def new_process():
    """Every test is a run of its own."""
    SingletonMeta.clear_instances()
    yield
    async_utils.run(close_http_client())
    SingletonMeta.clear_instances()


@pytest.fixture
def generator(tmp_path):
    file = tmp_path / "counts_generator.py"
    file.write_text(COUNTS)
    return file


def arguments(checkpoint, url, **changes):
    own = {
        "rollout_buffer_url": url, "rollout_task_type": "counts", "fetch_trajectory_retry_times": -1, "num_rollout": 100,
        "num_epoch": None, "offload_rollout": False, "prompt_data": ["prompts.jsonl"], "input_key": None, "label_key": None,
        "rollout_shuffle": False, "loss_mask_type": "qwen3", "advantage_estimator": "grpo", "loss_type": "policy_loss",
        "rewards_normalization": True, "grpo_std_normalization": True, "custom_convert_samples_to_train_data_path": None,
        "router_policy": None,
    }  # fmt: skip
    known = vars(make_args(checkpoint))
    return SimpleNamespace(**{**known, **own, **changes})


class Source:
    """Keeps the values of its user."""

    def __init__(self, metadata=None):
        self.metadata = metadata or {}

    def get_metadata(self):
        return self.metadata

    def update_metadata(self, metadata):
        self.metadata.update(metadata)


def numbers(output):
    return [int(group[0].metadata["instance_id"]) for group in output.samples]


def test_groups_become_samples(checkpoint, generator, tmp_path):
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url)
        first = generate_rollout(args, 0, Source())
        second = generate_rollout(args, 1, Source())
    assert numbers(first) == [0, 1] and numbers(second) == [2, 3]
    samples = leaves(first.samples) + leaves(second.samples)
    assert [sample.index for sample in samples] == list(range(8))
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    one, two = first.samples[1]
    assert (
        one.prompt == [{"role": "user", "content": "why 1?"}]
        and one.label == "1"
        and (one.reward, two.reward) == (0, 1)
    )
    assert one.response == "because <|im_end|>\n" and one.loss_mask == [1] * one.response_length
    assert (one.status, two.status) == (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    assert one.weight_versions == ["7"] and one.rollout_log_probs is None
    assert first.metrics["buffer/groups"] == 2.0 and "buffer/name" not in first.metrics
    assert first.metrics["buffer/dropped_groups"] == 0 and first.metrics["failed_samples"] == 0
    batch = convert_samples_to_train_batch(args, samples)
    assert batch["raw_reward"].tolist() == [0, 0, 0, 1, 0, 0, 0, 1]


def test_rollouts_side_by_side_share_no_group(checkpoint, generator, tmp_path):
    source = Source()
    with serving([str(generator)], tmp_path) as (url, _), ThreadPoolExecutor(4) as pool:
        args = arguments(checkpoint, url)
        outputs = list(pool.map(lambda rollout_id: generate_rollout(args, rollout_id, source), range(4)))
    assert sorted(number for output in outputs for number in numbers(output)) == list(range(8))
    remembered = source.metadata[METADATA_KEY]
    assert {name: sorted(map(int, of)) for name, of in remembered.items()} == {
        str(rollout_id): sorted(numbers(output)) for rollout_id, output in enumerate(outputs)
    }


def test_a_run_that_resumes_leaves_out_what_its_checkpoint_was_trained_on(checkpoint, generator, tmp_path):
    """Whatever rollouts behind it have had in the run before."""
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url)
        source = RolloutDataSource([f"prompt {number}" for number in range(4)], args)
        for rollout_id in range(3):
            generate_rollout(args, rollout_id, source)
            if rollout_id == 0:
                state = source.state_dict()
        # As in a loop that is ahead: the state of rollout 0, taken when rollout 1 was over.
        late = source.state_dict()
        for saved in (state, late):
            SingletonMeta.clear_instances()
            resumed = RolloutDataSource([f"prompt {number}" for number in range(4)], args)
            resumed.load_state_dict(saved)
            assert numbers(generate_rollout(args, 1, resumed)) == [2, 3]
            assert sorted(resumed.metadata[METADATA_KEY]) == ["0", "1"]


def test_a_service_that_is_started_again_without_its_groups_has_them_made_again(checkpoint, generator, tmp_path):
    source = Source()
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url)
        first = generate_rollout(args, 0, source)
        client = rollout.BufferClient(args, source)
    with serving([str(generator)], tmp_path) as (url, _):
        client.url = args.rollout_buffer_url = url
        second = generate_rollout(args, 1, source)
    assert numbers(first) == [0, 1] and numbers(second) == [2, 3]


def test_what_the_dynamic_filter_drops_is_made_up_for(checkpoint, generator, tmp_path):
    source = Source()
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    with serving([str(generator)], tmp_path) as (url, _):
        output = generate_rollout(arguments(checkpoint, url, dynamic_sampling_filter_path=path), 0, source)
    assert numbers(output) == [1, 3]
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 2
    # Those that were dropped teach nothing next time either.
    assert sorted(source.metadata[METADATA_KEY]["0"]) == ["0", "1", "2", "3"]


def test_a_dynamic_filter_that_does_not_return_ends_the_rollout(checkpoint, generator, tmp_path):
    (tmp_path / "slow_filter.py").write_text(
        "import time\ndef keep(args, samples):\n    time.sleep(5)\n    return True\n"
    )
    path = f"{tmp_path}/slow_filter.py:keep"
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, dynamic_sampling_filter_path=path)
        args.http_request_timeout = 1.0
        with pytest.raises(UserError, match=r"slow_filter.py:keep .*--http-request-timeout 1 s.*group of sample 0"):
            generate_rollout(args, 0, Source())


def test_groups_that_the_filter_kept_are_not_made_again_in_the_middle_of_a_rollout(
    checkpoint, generator, tmp_path, monkeypatch
):
    """The first service has three groups; of another, without them, the rollout takes only what it lacks."""
    monkeypatch.setattr(rollout, "_POLL_S", 0.1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "counts_generator.py").write_text(COUNTS)
    generator.write_text(
        COUNTS.replace("LAST = None", "LAST = 3").replace("number += 1\n", "number += 1\n    time.sleep(600)\n")
    )
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    with ThreadPoolExecutor(1) as pool, serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, dynamic_sampling_filter_path=path)
        source = Source()
        client = rollout.BufferClient(args, source)
        with serving([str(other / "counts_generator.py")], other) as (other_url, _):
            running = pool.submit(generate_rollout, args, 0, source)
            wait_until(lambda: groups_of(url)["handed"] + groups_of(url)["received"] == 3)
            client.url = args.rollout_buffer_url = other_url
            output = running.result(300)
    assert numbers(output) == [1, 3]
    assert sorted(source.metadata[METADATA_KEY]["0"]) == ["0", "1", "2", "3"]
    assert output.metrics["buffer/dropped_groups"] == 0


def test_groups_that_are_dropped_are_counted_from_zero_by_a_service_that_is_started_again(
    checkpoint, generator, tmp_path
):
    generator.write_text(COUNTS + "\ndef is_valid_group(group): return int(group[0]) not in (0, 1)\n")
    source, dropped = Source(), []
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url)
        dropped.append(generate_rollout(args, 0, source).metrics["buffer/dropped_groups"])
        client = rollout.BufferClient(args, source)
    generator.write_text(COUNTS + "\ndef is_valid_group(group): return int(group[0]) != 1\n")
    source.metadata[METADATA_KEY]["0"].append("0")
    with serving([str(generator)], tmp_path) as (url, _):
        client.url = args.rollout_buffer_url = url
        dropped.append(generate_rollout(args, 1, source).metrics["buffer/dropped_groups"])
    assert dropped == [2, 1]


def test_a_large_rollout_is_asked_for_in_parts(checkpoint, generator, tmp_path, monkeypatch):
    asked = []
    real = rollout.BufferClient._post

    async def post(self, path, body):
        if path == "/get_rollout_data":
            asked.append((body["request_id"], body["num_groups"]))
        return await real(self, path, body)

    monkeypatch.setattr(rollout.BufferClient, "_post", post)
    with serving([str(generator)], tmp_path) as (url, _):
        output = generate_rollout(arguments(checkpoint, url, rollout_batch_size=20), 0, Source())
    assert numbers(output) == list(range(20)) and set(asked) == {("0.0", 16), ("0.1", 4)}
    # Of 16 groups each, and of 4.
    assert output.metrics["buffer/groups"] == pytest.approx((16 * 16 + 4 * 4) / 20)


def test_a_run_that_waits_says_what_for(checkpoint, generator, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rollout, "_POLL_S", 0.05)
    monkeypatch.setattr(rollout, "_TELL_S", 0.1)
    generator.write_text(COUNTS + "\ndef is_valid_group(group): return False\n")
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, fetch_trajectory_retry_times=20)
        with pytest.raises(RunError, match="after 20 polls"):
            generate_rollout(args, 0, Source())
    (first, *others) = [record.getMessage() for record in caplog.records if "is waited for" in record.getMessage()]
    assert (
        "0 of 2 groups that rollout 0 needs are there (" in first
        and "the generator of --rollout-task-type counts" in first
    )
    # Not at every poll.
    assert 1 <= len(others) <= 12


def test_the_last_rollout_is_kept_when_the_generator_cannot_be_ended(
    checkpoint, generator, tmp_path, monkeypatch, caplog
):
    real = rollout.post_control

    async def refused(url, body, headers=None):
        return await real(url, {"run_id": "another"} if url.endswith("/stop_rollout") else body, headers=headers)

    monkeypatch.setattr(rollout, "post_control", refused)
    with serving([str(generator)], tmp_path) as (url, _):
        output = generate_rollout(arguments(checkpoint, url, num_rollout=1), 0, Source())
    assert numbers(output) == [0, 1]
    assert (
        "the generator of --rollout-task-type counts was not ended" in caplog.text and "not to another" in caplog.text
    )


def test_the_last_rollout_ends_the_generator(checkpoint, generator, tmp_path):
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, num_rollout=2)
        generate_rollout(args, 0, Source())
        assert status(url)["generator"] == "running"
        generate_rollout(args, 1, Source())
        assert status(url)["generator"] == "ended"


def groups_of(url):
    return status(url)["groups"]


def status(url):
    import urllib.request

    return json.loads(urllib.request.urlopen(f"{url}/status", timeout=30).read())


def test_a_generator_that_ends_too_early(checkpoint, generator, tmp_path):
    generator.write_text(COUNTS.replace("LAST = None", "LAST = 3"))
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url)
        generate_rollout(args, 0, Source())
        with pytest.raises(UserError, match="counts has ended, and 1 of 2 groups that rollout 1 needs are there"):
            generate_rollout(args, 1, Source())


def test_a_generator_that_fails(checkpoint, generator, tmp_path):
    generator.write_text(COUNTS.replace("number = 0\n", "raise KeyError('no such tool')\n"))
    with serving([str(generator)], tmp_path) as (url, _):
        with pytest.raises(UserError, match="--rollout-task-type counts failed: (.|\n)*KeyError: 'no such tool'"):
            generate_rollout(arguments(checkpoint, url), 0, Source())


def test_polls_are_limited(checkpoint, generator, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "_POLL_S", 0.05)
    generator.write_text(COUNTS.replace("number = 0\n", "time.sleep(600)\n"))
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, fetch_trajectory_retry_times=3)
        with pytest.raises(RunError, match="0 of 2 groups .* after 3 polls of 0.05 s .--fetch-trajectory-retry-times"):
            generate_rollout(args, 0, Source())


GRADES = "HttpError: POST http://127.0.0.1:9/grade failed: nobody listens"


@pytest.mark.parametrize(("failing", "told"), [(2, "trajectories of the generator"), (1, "after 40 polls")])
def test_a_run_whose_service_of_rewards_is_dead_ends_with_its_address(
    checkpoint, generator, tmp_path, monkeypatch, failing, told
):
    """And not where one trajectory of each prompt fails, which may be its own fault."""
    monkeypatch.setattr(rollout, "_POLL_S", 0.05)
    text = COUNTS.replace('"truncated": copy == 1', f'"error": {GRADES!r}')
    generator.write_text(text.replace("float(copy * (number % 2))", f"None if copy < {failing} else 1.0"))
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, n_samples_per_prompt=3, fetch_trajectory_retry_times=40)
        with pytest.raises(RunError, match=f"{told}(.|\n)*0 of 2 groups|0 of 2 groups(.|\n)*{told}") as failed:
            generate_rollout(args, 0, Source())
    assert GRADES in str(failed.value) and ("start again what they ask for" in str(failed.value)) == (failing == 2)


def test_a_filter_does_not_hide_that_all_samples_failed(checkpoint, generator, tmp_path):
    text = COUNTS.replace('"truncated": copy == 1', f'"failed": {GRADES!r}').replace("LAST = None", "LAST = 20")
    generator.write_text(text.replace("float(copy * (number % 2))", "0.0"))
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, dynamic_sampling_filter_path=path)
        with pytest.raises(RunError, match=f"4 of 4 samples of rollout 0 failed, .* the first was sample: {GRADES}"):
            generate_rollout(args, 0, Source())


def test_items_that_are_refused_are_told_of(checkpoint, generator, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "_POLL_S", 0.2)
    text = COUNTS.replace('"reward": float', '"reward": str').replace(
        "raise RuntimeError(error.read().decode())", "time.sleep(600)"
    )
    generator.write_text(text)
    with serving([str(generator)], tmp_path) as (url, _):
        args = arguments(checkpoint, url, fetch_trajectory_retry_times=1)
        with pytest.raises(RunError, match="0 of 2 groups"):
            generate_rollout(args, 0, Source())
        wait_until(lambda: status(url)["refused"])
        with pytest.raises(RunError, match="an item was refused: item 0.0 of instance 0: `reward` is '0"):
            generate_rollout(args, 0, Source())


@pytest.mark.parametrize(
    ("changes", "evaluation", "message"),
    [
        ({}, True, "slime_plugins.rollout_buffer does not evaluate; give .* --eval-function-path"),
        (
            {"rollout_buffer_url": None},
            False,
            "--rollout-buffer-url is missing: start `python -m slime_plugins.rollout_buffer`",
        ),
        ({"rollout_task_type": "chess"}, False, "task_type 'chess': no generator has this TASK_TYPE"),
        (
            {"use_tis": True},
            False,
            "item 0.0 has messages alone, .* which --use-tis needs; have the generator send tokens",
        ),
    ],
)
def test_what_a_run_cannot_do(checkpoint, generator, tmp_path, changes, evaluation, message):
    with serving([str(generator)], tmp_path) as (url, _):
        with pytest.raises(UserError, match=message):
            generate_rollout(arguments(checkpoint, url, **changes), 0, Source(), evaluation=evaluation)


def test_without_a_service(checkpoint, monkeypatch):
    from slime.utils import http_utils

    monkeypatch.setattr(http_utils, "RETRY_DELAY_S", 0.01)
    with pytest.raises(RunError, match="--rollout-buffer-url http://127.0.0.1:9: .*; is the service running"):
        generate_rollout(arguments(checkpoint, "http://127.0.0.1:9"), 0, Source())


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {number}+{number}?", "label": str(2 * number)} for number in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_shipped_generator_asks_the_engine_and_sends_its_tokens(checkpoint, prompts, tmp_path):
    answers = {number: r"\boxed{" + str(number) + "}" for number in (0, 2, 4, 6)}
    with FakeGenerateServer(lambda payload: [ord(c) for c in answers[2]]) as engine, serving([], tmp_path) as (url, _):
        args = arguments(
            checkpoint, url, rollout_task_type="math", prompt_data=[str(prompts)], sglang_router_port=engine.port,
            rollout_batch_size=4, rollout_max_response_len=16, use_tis=True,
        )  # fmt: skip
        output = generate_rollout(args, 0, Source())
    # Those that were answered first: a row of the next pass may come before the last one of this.
    asked_for = [group[0].metadata["instance_id"] for group in output.samples]
    rows = [int(name.split("-")[1]) for name in asked_for]
    assert len(set(asked_for)) == 4 and {name.split("-")[0] for name in asked_for} <= {"0", "1"}
    for row, group in zip(rows, output.samples, strict=True):
        for sample in group:
            assert sample.label == str(list(answers)[row])
            assert sample.reward == float(sample.label == "2") and sample.response_length == len(answers[2])
            assert len(sample.rollout_log_probs) == sample.response_length and sample.weight_versions == ["1"]
            assert sample.tokens[-sample.response_length :] == [ord(c) for c in answers[2]]
    assert output.metrics["buffer/right_answers"] == sum(list(answers)[row] == 2 for row in rows) / 4
    asked = engine.requests[0]
    assert asked["sampling_params"]["max_new_tokens"] == args.rollout_max_response_len and asked["return_logprob"]


@pytest.mark.parametrize(("tolerant", "seconds"), [(True, 120.0), (False, 0.0)])
def test_engines_are_waited_for_where_they_are_brought_back(checkpoint, tolerant, seconds):
    args = arguments(checkpoint, "http://127.0.0.1:9", use_fault_tolerance=tolerant, http_request_timeout=120.0)
    assert rollout.start_request(args, "run", [])["engine_wait_s"] == seconds


def test_a_prompt_that_is_too_long_costs_its_group_alone(checkpoint, prompts, tmp_path):
    """As with engines that refuse what does not fit into the context."""
    rows = prompts.read_text().splitlines()
    prompts.write_text("\n".join([json.dumps({"prompt": "why " * 300, "label": "0"}), *rows]) + "\n")
    with FakeGenerateServer() as engine, serving([], tmp_path) as (url, _):
        engine.context_length = 64
        args = arguments(
            checkpoint, url, rollout_task_type="math", prompt_data=[str(prompts)], sglang_router_port=engine.port,
            rollout_max_response_len=60, sglang_context_length=64, n_samples_per_prompt=40, sglang_server_concurrency=40,
        )  # fmt: skip
        output = generate_rollout(args, 0, Source())
    assert [group[0].metadata["instance_id"] for group in output.samples] == ["0-1", "0-2"]
    assert output.metrics["buffer/dropped_groups"] == 1
    budgets = {len(asked["input_ids"]) + asked["sampling_params"]["max_new_tokens"] for asked in engine.requests}
    assert max(budgets) <= 64


def test_answers_that_a_push_interrupts_are_asked_for_again(checkpoint, prompts, tmp_path):
    held = threading.Event()

    def hold(payload):
        first = not held.is_set()
        held.set()
        return first

    with FakeGenerateServer(hold=hold) as engine, serving([], tmp_path) as (url, _), ThreadPoolExecutor(1) as pool:
        args = arguments(
            checkpoint, url, rollout_task_type="math", prompt_data=[str(prompts)], sglang_router_port=engine.port
        )
        running = pool.submit(generate_rollout, args, 0, Source())
        assert held.wait(60)
        import urllib.request

        request = urllib.request.Request(f"{engine.url}/abort_request", json.dumps({"abort_all": True}).encode())
        urllib.request.urlopen(request, timeout=30).read()
        output = running.result(300)
    assert all(sample.response_length == 3 for sample in leaves(output.samples))
