"""A real engine of two pipeline stages: each has a layer, and all of them are one engine."""

import concurrent.futures
import os
import signal

import pytest

from slime.utils.errors import RunError
from slime.weights.transports import Receiver
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request, response_of
from tests.support.processes.served_engines import (
    LONG,
    PROMPT,
    TOGETHER,
    assert_computed_by,
    flush,
    make_args,
    post,
    pushing,
    requests_of_groups,
    server_tree,
    serving_of,
)
from tests.support.processes.waiting import wait_until

pytestmark = pytest.mark.slow

STAGES = range(2)
ENGINE = {
    "rollout_num_gpus_per_engine": 2, "sglang_pp_size": 2, "sglang_chunked_prefill_size": 64,
    # Of requests that want no log-probs.
    "sglang_enable_mixed_chunk": True,
    # Which would keep no prefixes.
    "sglang_enable_deterministic_inference": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("old"), seed=0)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def serving(old, tmp_path_factory):
    with serving_of(make_args(old, **ENGINE), tmp_path_factory.mktemp("logs")) as serving:
        yield serving


@pytest.fixture
def ask(serving):
    """Sends a request; the answer is a future."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def send(prompt=PROMPT, length=24, **fields):
            request = {**generation_request(prompt, length), **fields}
            return pool.submit(lambda: post(f"{serving.urls[0]}/generate", request).json())

        yield send


def test_log_probs_are_those_of_the_model(ask, old):
    """Of answers, side by side in several batches, and of prompts, one of them in pieces."""
    model = ReferenceModel(old)
    prompts = [PROMPT[: 3 + position] + [7 * position] for position in range(5)] + [[(7 * n) % 250 for n in range(200)]]
    answers = [ask(prompt, 4 + 9 * position) for position, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_computed_by(answer.result(), model, prompt)
    told = ask(prompts[-1], 1, logprob_start_len=0).result()["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in told] == prompts[-1]
    assert [entry[0] for entry in told[1:]] == pytest.approx(
        model.log_probs(prompts[-1][:1], prompts[-1][1:]), abs=1e-4
    )


def test_pieces_of_prompts_go_beside_tokens_of_answers(serving, ask):
    """The likeliest tokens are those of requests that are never mixed: such as want log-probs."""
    long = [[(7 * n + first) % 250 for n in range(400)] for first in range(2)]
    prompts = [*([*PROMPT[: 3 + position], 7 * position] for position in range(4)), *long]
    greedy = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}}
    alone = [response_of(ask(prompt, **greedy).result())[0] for prompt in prompts]
    serving.call_all("flush_cache")
    mixed = [ask(prompt, **greedy, return_logprob=False) for prompt in prompts]
    assert [answer.result()["output_ids"] for answer in mixed] == alone


def test_the_last_stage_tells_among_which_tokens_it_drew(ask):
    params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "top_k": 5}
    found = ask(sampling_params=params, return_sampling_mask=True).result()["meta_info"]
    kept, drawn = found["output_token_sampling_mask"], found["output_token_logprobs"]
    assert len(kept) == len(drawn) == 24
    among_kept = found["output_token_sampling_logprobs"]
    for ids, (log_prob, token, *_), among in zip(kept, drawn, among_kept, strict=True):
        assert len(ids) == 5 and token in ids and log_prob < among <= 0


@pytest.mark.parametrize("placement", [{}, TOGETHER], ids=["group", "handles"])
def test_a_push_reaches_every_stage(serving, ask, old, new, placement):
    """Also while it serves: it joins the group before it is paused."""
    for checkpoint in (new, old):
        model = ReferenceModel(checkpoint)
        serving.call_all("update_weights_from_disk", str(checkpoint))
        (from_disk,) = serving.checksums().values()
        assert {name.partition("/")[0] for name in from_disk} == {"0", "1"}
        serving.call_all("reset_weights")
        (after_reset,) = serving.checksums().values()
        assert not from_disk.items() & after_reset.items()
        aborted = ask(length=LONG)
        wait_until(lambda: requests_of_groups(serving.urls[0]) == [1])
        with pushing(serving, on_disk(checkpoint), **placement) as push:
            report = push([Receiver(0, serving.engines[0], 2, 0)])
        assert (report.version, report.failed) == (1, {})
        assert aborted.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert list(serving.checksums().values()) == [from_disk]
        answer = ask().result()
        assert answer["meta_info"]["weight_version"] == "1"
        assert_computed_by(answer, model)


def on_disk(checkpoint):
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


def test_caches_are_flushed_when_no_batch_has_requests(serving, ask):
    answers = [ask(length=LONG) for _ in range(3)]
    wait_until(lambda: requests_of_groups(serving.urls[0]) == [3])
    assert [flush(serving.urls[0]) for _ in range(5)] == [400] * 5
    assert serving.call_all("has_requests") == [True]
    serving.call_all("pause_generation")
    for answer in answers:
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
    serving.call_all("flush_cache")
    assert serving.call_all("has_requests") == [False]
    serving.call_all("continue_generation")
    assert len(response_of(ask().result())[0]) == 24


def test_requests_of_every_batch_wait_for_new_weights_and_go_on(serving, ask, old, new):
    """They stop, compute anew what they had in the cache, and write the rest with the new weights."""
    serving.call_all("update_weights_from_disk", str(old), "1")
    prompts = [[*PROMPT, position] for position in range(3)]
    answers = [ask(prompt, LONG // 4) for prompt in prompts]
    wait_until(lambda: requests_of_groups(serving.urls[0]) == [3])
    serving.call_all("pause_generation", "retract")
    serving.call_all("flush_cache")
    serving.call_all("update_weights_from_disk", str(new), "7")
    assert not any(answer.done() for answer in answers)
    serving.call_all("continue_generation")
    models = {"1": ReferenceModel(old), "7": ReferenceModel(new)}
    for prompt, answer in zip(prompts, answers, strict=True):
        found = answer.result()
        tokens, log_probs = response_of(found)
        assert len(tokens) == LONG // 4 and found["meta_info"]["finish_reason"]["type"] == "length"
        spans = found["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["1", "7"]
        for span in spans:
            part = slice(span["start"], span["end"])
            expected = models[span["version"]].log_probs(prompt, tokens)[part]
            assert log_probs[part] == pytest.approx(expected, abs=1e-4)


def test_an_abort_reaches_every_batch(serving, ask):
    answers = [ask(length=LONG) for _ in range(3)]
    wait_until(lambda: requests_of_groups(serving.urls[0]) == [3])
    assert post(f"{serving.urls[0]}/abort_request", {"abort_all": True}).ok
    for answer in answers:
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_memory_is_given_back_and_taken_again_by_every_stage(serving, ask):
    serving.call_all("sleep")
    serving.call_all("wake_weights")
    serving.call_all("wake_caches")
    serving.call_all("continue_generation")
    assert len(response_of(ask().result())[0]) == 24


def test_what_the_last_stage_refuses_is_heard_of(serving, old):
    """A tensor of another shape, which the first stage passes over."""
    wrong = {**on_disk(old), "model.norm.weight": on_disk(old)["model.norm.weight"][:5].contiguous()}
    with pushing(serving, wrong) as push:
        report = push([Receiver(0, serving.engines[0], 2, 0)])
    assert "Failed to update parameter online" in report.failed[0]


def test_a_stage_that_died_ends_the_engine(serving):
    (pid,) = serving.call_all("server_pid")
    schedulers = [process for process in server_tree(pid) if "scheduler" in process.cmdline()[0]]
    (last,) = [process for process in schedulers if "PP1" in process.cmdline()[0]]
    assert len(schedulers) == 2
    os.kill(last.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="engine 0 died: its scheduler"):
        serving.owner.ended.result(60)
