"""What a step of the default loop tells while it runs and when it fails: waits, samples, errors."""

import re
import threading

import pytest

from slime.rollout import sglang_rollout
from slime.rollout.base_types import leaves
from slime.rollout.generate_state import GenerateState
from slime.utils.errors import UserError
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import plugin, run_step
from tests.support.models.tokenizer import build_tokenizer


def test_the_step_reports_what_it_waits_for(server, checkpoint, monkeypatch):
    monkeypatch.setattr(sglang_rollout, "REPORT_AFTER_S", 0.01)
    server.hold = lambda payload: True
    told = []

    def info(text, *values):
        line = text % values
        if "0 of 2 groups; waiting for 2 more" in line and "group 0, group 1" in line:
            told.append(line)
            server.release()

    monkeypatch.setattr(sglang_rollout.logger, "info", info)
    run_step(make_args(checkpoint, server.port), CountingDataSource(2))
    assert told


def test_kept_groups_go_to_the_thread_that_packs_them_a_few_at_a_time_and_all_of_them(server, checkpoint, monkeypatch):
    sizes, pack = [], sglang_rollout.pack_groups
    monkeypatch.setattr(sglang_rollout, "GROUPS_PER_THREAD", 2)
    monkeypatch.setattr(sglang_rollout, "pack_groups", lambda groups: sizes.append(len(groups)) or pack(groups))
    args = make_args(checkpoint, server.port, rollout_batch_size=5, over_sampling_batch_size=5)
    assert len(run_step(args, CountingDataSource(2)).samples) == 5
    assert sorted(sizes) == [1, 2, 2]


def test_prompts_of_a_step_are_tokenised_once_in_their_order_while_the_first_are_generated(
    server, checkpoint, monkeypatch
):
    args = make_args(checkpoint, server.port, rollout_batch_size=40, over_sampling_batch_size=40)
    args.sglang_server_concurrency = 1
    SingletonMeta.clear_instances()
    state, encoded, all_are_encoded = GenerateState(args), [], threading.Event()
    encode = state.encoder_tokenizer.encode

    def recorded(text, **options):
        encoded.append((text, threading.current_thread().name))
        if len(encoded) == 40:
            all_are_encoded.set()
        return encode(text, **options)

    monkeypatch.setattr(state.encoder_tokenizer, "encode", recorded)
    server.hold = lambda payload: not all_are_encoded.wait(30)
    samples = leaves(run_step(args, CountingDataSource(2), limit_s=60).samples)
    assert [text for text, _ in encoded] == [f"question {number}" for number in range(40)]
    assert {name.rpartition("_")[0] for _, name in encoded} == {"slime-tokenize"}
    assert all(len(sample.tokens) > sample.response_length for sample in samples)


@pytest.mark.parametrize("applies", [True, False])
def test_a_chat_template_that_ends_turns_where_engines_do_not_stop_is_told_of_once(tmp_path, caplog, applies):
    tokenizer = build_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path)
    SingletonMeta.clear_instances()
    state = GenerateState(make_args(str(tmp_path), apply_chat_template=applies))
    for text in ("hello", "hell"):
        state.encode_text(text, add_special_tokens=False)
    assert caplog.text.count("give --rollout-stop-token-ids 266") == applies
    # Lists of messages are rendered in any case.
    for text in ("hello", "hell"):
        state.prompt_ids(Sample(index=0, prompt=[{"role": "user", "content": text}]))
    assert caplog.text.count("give --rollout-stop-token-ids 266") == 1


@pytest.mark.parametrize("which", ["data source", "filter"])
def test_a_data_source_or_a_filter_that_hangs_is_told_of(server, checkpoint, monkeypatch, caplog, tmp_path, which):
    monkeypatch.setattr(sglang_rollout, "REPORT_AFTER_S", 0.01)
    caplog.set_level("INFO")
    args, source = make_args(checkpoint, server.port), CountingDataSource(2)
    expected = "; waiting for get_samples of tests.support.models.rollout_args.CountingDataSource"
    if which == "filter":
        path = plugin(tmp_path, "def fn(args, samples):\n    args.hang()\n    return True\n")
        args.dynamic_sampling_filter_path = path
        expected = f"; waiting for --dynamic-sampling-filter-path {path}"
    told = threading.Event()
    monkeypatch.setattr(
        sglang_rollout.logger, "info", lambda text, *values: told.set() if expected in text % values else None
    )

    def hang():
        assert told.wait(60), "nothing is said while it hangs"

    args.hang = hang
    draw = source.get_samples
    if which == "data source":
        source.get_samples = lambda size: hang() or draw(size)
    assert len(run_step(args, source).samples) == 2


GENERATES_AT_ONCE = """
async def fn(args, sample, sampling_params):
    sample.tokens, sample.response_length, sample.status = [1, 2], 1, Sample.Status.COMPLETED
    return sample
"""


@pytest.mark.parametrize("which", ["get_samples", "add_samples", "buffer filter", "filter", "all samples"])
def test_what_never_returns_ends_the_step_by_its_name(server, checkpoint, monkeypatch, caplog, tmp_path, which):
    monkeypatch.setattr(sglang_rollout, "CANCEL_TIMEOUT_S", 0.1)
    generate = plugin(tmp_path, GENERATES_AT_ONCE)
    hangs = plugin(tmp_path, "def hangs(args, *arguments):\n    args.goes_on.wait(60)\n", "hangs")
    sizes = {"http_request_timeout": 0.5, "over_sampling_batch_size": 3}
    args, source = (
        make_args(checkpoint, server.port, custom_generate_function_path=generate, **sizes),
        CountingDataSource(2),
    )
    args.goes_on, late = threading.Event(), hangs
    if which == "filter":
        args.dynamic_sampling_filter_path = hangs
        late = f"--dynamic-sampling-filter-path {hangs}"
    elif which == "all samples":
        args.rollout_all_samples_process_path = hangs
        late = f"--rollout-all-samples-process-path {hangs}"
    else:
        method = "add_samples" if which == "add_samples" else "get_samples"
        late = f"--data-source-path {args.data_source_path}: {method}"
        if which == "buffer filter":
            args.buffer_filter_path = hangs
            late += f", which asks --buffer-filter-path {hangs},"
        setattr(source, method, lambda *arguments: args.goes_on.wait(60))
    try:
        with pytest.raises(
            UserError, match="^" + re.escape(f"{late} did not return within --http-request-timeout 0.5 s")
        ):
            run_step(args, source, limit_s=20)
        assert ("the prompts of rollout 0 are lost" in caplog.text) == (which not in ("filter", "all samples"))
    finally:
        args.goes_on.set()


def test_a_filter_that_drops_everything_is_reported_while_groups_finish(
    server, checkpoint, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(sglang_rollout, "REPORT_AFTER_S", 0.0)
    caplog.set_level("INFO")
    path = plugin(
        tmp_path,
        "from slime.rollout.filter_hub.base_types import DynamicFilterOutput\n"
        "def fn(args, samples):\n    return DynamicFilterOutput(False, 'zero_std_0.0')\n",
    )
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path)
    with pytest.raises(UserError, match="only 1 can still be had .0 kept, 5 dropped by the filter"):
        run_step(args, CountingDataSource(2, limit=6))
    assert "rollout 0: 0 of 2 groups; waiting for" in caplog.text
    assert "; the filter dropped 3 (zero_std_0.0: 3)" in caplog.text


def test_tasks_that_end_with_a_failed_step_are_not_told(server, checkpoint, caplog, tmp_path):
    """The error is; a line about every group that it took along would bury it."""
    path = plugin(
        tmp_path,
        """
async def fn(args, sample, sampling_params):
    if sample.index == 3:
        raise KeyError("lost")
    await asyncio.Event().wait()
""",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)
    with pytest.raises(UserError, match="KeyError"):
        run_step(args, CountingDataSource(2))
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == []


def test_groups_that_fail_alike_are_told_in_one_line(server, checkpoint, caplog, tmp_path):
    path = plugin(
        tmp_path,
        """
waiting = asyncio.Event()
async def fn(args, sample, sampling_params):
    if sample.index < 7:
        await waiting.wait()
    waiting.set()
    raise KeyError(f"lost {sample.index}")
""",
    )
    args = make_args(
        checkpoint, server.port, custom_generate_function_path=path, rollout_batch_size=4, over_sampling_batch_size=4
    )
    with pytest.raises(UserError, match="KeyError"):
        run_step(args, CountingDataSource(2))
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 1 and "3 other groups failed as well, group 0 first: " in told[0]


def test_what_an_all_samples_hook_returns_would_be_used_nowhere(server, checkpoint, tmp_path):
    path = plugin(tmp_path, "def fn(args, groups, data_source):\n    return groups[:1]\n")
    args = make_args(checkpoint, server.port, rollout_all_samples_process_path=path)
    with pytest.raises(UserError, match="^--rollout-all-samples-process-path .* for rollout 0; expected None"):
        run_step(args, CountingDataSource(2))
