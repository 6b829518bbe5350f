"""Custom generate functions: forms, precedence, and what is made of their results. What sample hooks may leave behind."""

import asyncio
import logging
import re
import threading

import numpy as np
import pytest

from slime.rollout.custom_generate import apply_rollout_sample_hooks, complete_sample, share_execution_id
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm, generate_and_rm_group
from slime.rollout.generation_call import GenerationCall
from slime.rollout.rm_hub import async_rm
from slime.training.rollout_batch import build_train_batch
from slime.utils.errors import UserError
from slime.utils.sample_fields import held
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import params, run, run_step

pytestmark = pytest.mark.usefixtures("fresh_singletons")

Status = Sample.Status


@pytest.fixture
def make_plugin(tmp_path):
    def make(source, name="fn"):
        file = tmp_path / f"plugin_{name}.py"
        file.write_text("import asyncio\nfrom slime.utils.types import Sample\n" + source)
        return f"{file}:{name}"

    return make


SINGLE = """
async def fn(args, sample, sampling_params, evaluation):
    sample.metadata['seen'] = dict(sampling_params), evaluation
    sampling_params['temperature'] = 99
    sampling_params['stop'].append('mine')
    sample.append_response_tokens(args, tokens=[5, 6], log_probs=[-1.0, -2.0])
    sample.status = Sample.Status.COMPLETED
    return sample
"""


def test_single_form_gets_private_sampling_params_and_evaluation(checkpoint, make_plugin):
    args = make_args(checkpoint, custom_generate_function_path=make_plugin(SINGLE))
    shared = {"temperature": 1.0, "stop": ["."]}
    sample = asyncio.run(generate_and_rm(args, Sample(index=0, tokens=[1]), shared, evaluation=True))
    assert sample.metadata["seen"] == ({"temperature": 1.0, "stop": [".", "mine"]}, True)
    assert shared == {"temperature": 1.0, "stop": ["."]}


@pytest.mark.parametrize("changed", ["temperature=0.5", "top_p=0.9", "top_k=5", "min_p=0.1", "repetition_penalty=1.1"])
def test_a_function_that_samples_otherwise_than_is_trained_is_told_of_once(
    server, checkpoint, make_plugin, caplog, changed
):
    """The trainer's log-probs would be those of another distribution, without a word."""
    path = make_plugin(
        "from slime.rollout.sglang_rollout import generate\n"
        "async def fn(args, sample, sampling_params):\n"
        f"    return await generate(args, sample, {{**sampling_params, **dict({changed}, stop=['x'], min_new_tokens=1)}})\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path)
    told = f"samples with {changed.replace('=', ' ')}, and the trainer computes log-probs by the flags"
    with GenerationCall(evaluation=True).under_way():
        run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args), evaluation=True))
    assert told not in caplog.text, "an evaluation trains nothing"
    for index in range(2):
        run(generate_and_rm(args, Sample(index=index, prompt="p"), params(args)))
    assert caplog.text.count(told) == 1


def test_so_is_one_that_changes_the_parameters_of_all(server, checkpoint, caplog):
    args = make_args(checkpoint, server.port)
    GenerateState(args).sampling_params["temperature"] = 0.5
    run(generate_and_rm(args, Sample(index=0, prompt="p"), params(args)))
    assert "samples with temperature 0.5, and the trainer" in caplog.text


def test_what_changes_no_distribution_is_not_told_of(server, checkpoint, caplog):
    args = make_args(checkpoint, server.port)
    changed = {"stop": ["x"], "max_new_tokens": 2, "sampling_seed": 3, "min_p": 0.0, "top_p": None, "temperature": 1}
    run(generate_and_rm(args, Sample(index=0, prompt="p"), {**params(args), **changed}))
    assert "log-probs by the flags" not in caplog.text


def test_the_samples_own_path_beats_the_flag(checkpoint, make_plugin):
    other = make_plugin("def other(args, sample, sampling_params):\n    raise RuntimeError\n", name="other")
    args = make_args(checkpoint, custom_generate_function_path=other)
    sample = Sample(index=0, tokens=[1], generate_function_path=make_plugin(SINGLE))
    assert asyncio.run(generate_and_rm(args, sample, {"stop": []})).response_length == 2


@pytest.mark.parametrize("prefix", ["def", "async def"])
def test_batch_form_gets_the_whole_group(checkpoint, make_plugin, prefix):
    path = make_plugin(
        f"{prefix} fn(args, samples, evaluation):\n"
        "    for number, sample in enumerate(samples):\n"
        "        sample.append_response_tokens(args, tokens=[number], log_probs=[-1.0])\n"
        "        sample.status = Sample.Status.COMPLETED\n"
        "        sample.metadata['size'] = len(samples)\n"
        "    return samples\n"
    )
    args = make_args(checkpoint, custom_generate_function_path=path)
    group = [Sample(index=i, tokens=[9]) for i in range(3)]
    result = asyncio.run(generate_and_rm_group(args, group, {}))
    assert [(s.tokens, s.metadata["size"]) for s in result] == [([9, 0], 3), ([9, 1], 3), ([9, 2], 3)]
    assert all(s.reward is not None for s in result)


TELLS_PARAMS = """
def fn(args, samples, evaluation, sampling_params):
    for sample, params in zip(samples, sampling_params, strict=True):
        sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])
        sample.metadata['seed'], params['sampling_seed'] = params.get('sampling_seed'), 'mine'
        sample.status = Sample.Status.COMPLETED
    return samples
"""


@pytest.mark.parametrize(("deterministic", "seeds"), [(True, [100, 101, 102]), (False, [None] * 3)])
def test_batch_form_gets_private_parameters_and_a_seed_for_each_sample(checkpoint, make_plugin, deterministic, seeds):
    path = make_plugin(TELLS_PARAMS)
    args = make_args(
        checkpoint,
        custom_generate_function_path=path,
        sglang_enable_deterministic_inference=deterministic,
        rollout_seed=100,
    )
    shared = {"temperature": 1.0}
    group = [Sample(index=i, tokens=[9]) for i in range(3)]
    result = asyncio.run(generate_and_rm_group(args, group, shared))
    assert [sample.metadata["seed"] for sample in result] == seeds
    assert shared == {"temperature": 1.0}
    alone = asyncio.run(generate_and_rm(args, group[0], {"sampling_seed": 7}))
    assert alone.metadata["seed"] == 7


TURNS = """
import copy
def fn(args, sample, sampling_params):
    turns = []
    for token in (5, 6):
        sample.append_response_tokens(args, tokens=[token], log_probs=[-1.0])
        sample.status = Sample.Status.COMPLETED
        turns.append(KEPT)
    return turns
"""
GROUP = """
import copy
def fn(args, samples, evaluation):
    samples[0].append_response_tokens(args, tokens=[5], log_probs=[-1.0])
    samples[0].status = Sample.Status.COMPLETED
    sample = samples[0]
    return [KEPT for _ in samples]
"""


@pytest.mark.parametrize(("source", "named"), [(TURNS, "sample 0"), (GROUP, "samples 0, 1")])
def test_one_object_in_the_place_of_several_samples_is_refused(checkpoint, make_plugin, source, named):
    """It would be trained several times, each time as what the last change made of it."""
    group = [Sample(index=i, tokens=[9]) for i in range(2)]
    args = make_args(checkpoint, custom_generate_function_path=make_plugin(source.replace("KEPT", "sample")))
    with pytest.raises(UserError, match=f"fn returned one Sample object several times for {named}, "):
        asyncio.run(generate_and_rm_group(args, group, {}))
    copied = make_plugin(source.replace("KEPT", "copy.deepcopy(sample)").replace("fn", "copies"), name="copies")
    args = make_args(checkpoint, custom_generate_function_path=copied)
    assert len(asyncio.run(generate_and_rm_group(args, group, {}))) == 2


CONTINUES = """
def one(args, sample, sampling_params):
    sample.append_response_tokens(args, tokens=[7], log_probs=[-1.0])
    sample.status = Sample.Status.COMPLETED
    return [sample] if sample.index == 3 else sample

def group(args, samples, evaluation):
    return [one(args, sample, {}) for sample in samples]
"""


@pytest.mark.parametrize("form", ["one", "group"])
def test_both_forms_train_only_what_was_written_after_a_resumption(checkpoint, make_plugin, form):
    args = make_args(
        checkpoint,
        custom_generate_function_path=make_plugin(CONTINUES, name=form),
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
    )
    fresh = Sample(index=0, tokens=[9])
    interrupted = [
        Sample(index=index, tokens=[9, 5, 6], response_length=2, rollout_log_probs=[-1.0] * 2, status=Status.ABORTED)
        for index in (1, 2, 3)
    ]
    interrupted[1].loss_mask = [0, 1]
    entries = asyncio.run(generate_and_rm_group(args, [fresh, *interrupted], {}))
    samples = [*entries[:3], *entries[3]]
    assert [sample.loss_mask for sample in samples] == [[1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]


ABORTS = """
from slime.rollout.generate_state import GenerateState
async def fn(args, samples, evaluation):
    args.called.append(samples[0].index)
    await asyncio.sleep(0.01)
    GenerateState(args).aborted = True
    for sample in samples:
        sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])
        sample.status = Sample.Status.COMPLETED
    return samples
"""


def test_batch_form_is_not_called_for_a_group_whose_turn_comes_after_the_abort(checkpoint, make_plugin):
    args = make_args(checkpoint, custom_generate_function_path=make_plugin(ABORTS), sglang_server_concurrency=1)
    args.called = []

    async def main():
        groups = [[Sample(index=number, tokens=[1]) for _ in range(2)] for number in range(2)]
        return await asyncio.gather(*[generate_and_rm_group(args, group, params(args)) for group in groups])

    with GenerationCall().under_way():
        first, second = asyncio.run(main())
    assert args.called == [0]
    assert [sample.status for sample in first + second] == [Status.COMPLETED] * 2 + [Status.ABORTED] * 2
    assert [sample.response_length for sample in second] == [0, 0]


def test_batch_form_must_return_as_many(checkpoint, make_plugin):
    path = make_plugin("def fn(args, samples, evaluation):\n    return samples[:1]\n")
    args = make_args(checkpoint, custom_generate_function_path=path)
    with pytest.raises(UserError, match=r"--custom-generate-function-path .* expected a list of 2 entries"):
        asyncio.run(generate_and_rm_group(args, [Sample(index=0), Sample(index=1)], {}))


@pytest.mark.parametrize("result", ["None", "'text'", "[]", "[1]"])
def test_other_results_are_named(checkpoint, make_plugin, result):
    path = make_plugin(f"def fn(args, sample, sampling_params):\n    return {result}\n")
    args = make_args(checkpoint, custom_generate_function_path=path)
    with pytest.raises(
        UserError, match=r"plugin_fn.py:fn returned .* for sample 6; expected Sample or a non-empty list"
    ):
        asyncio.run(generate_and_rm(args, Sample(index=6), {}))


def test_an_existing_reward_is_kept(checkpoint, make_plugin):
    path = make_plugin(
        "def fn(args, sample, sampling_params):\n"
        "    return Sample(tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED, reward=0.125)\n"
    )
    args = make_args(checkpoint, custom_generate_function_path=path, custom_rm_path="no.such_function")
    assert asyncio.run(generate_and_rm(args, Sample(index=6), {})).reward == 0.125


@pytest.mark.parametrize("returned", ["made()", "[made(), made()]"])
def test_a_new_sample_takes_over_what_it_lacks_of_the_prompt(checkpoint, make_plugin, returned):
    source = f"""
def made():
    return Sample(tokens=[1, 2], response_length=1, response="6", status=Sample.Status.COMPLETED)

def fn(args, sample, sampling_params):
    return {returned}
"""
    args = make_args(checkpoint, custom_generate_function_path=make_plugin(source))
    prompt = Sample(index=0, group_index=5, prompt="p", label="6", metadata={"rm_type": "f1"}, train_metadata={"d": 2})
    entry = asyncio.run(generate_and_rm(args, prompt, {}))
    for sample in entry if isinstance(entry, list) else [entry]:
        assert (sample.index, sample.group_index, sample.prompt, sample.label) == (0, 5, "p", "6")
        assert sample.reward == 1.0 and sample.metadata == {"rm_type": "f1"} and sample.metadata is not prompt.metadata
        assert sample.train_metadata == {"d": 2} and sample.train_metadata is not prompt.train_metadata


@pytest.mark.parametrize(
    "given", ["", "prompt=sample.prompt", "prompt='another'", "multimodal_inputs={'images': ['b']}"]
)
def test_a_new_sample_is_trained_with_the_images_of_its_prompt(checkpoint, make_plugin, given):
    source = f"""
def fn(args, sample, sampling_params):
    status = Sample.Status.COMPLETED
    return Sample(tokens=[1, 2], response_length=1, response="6", status=status, reward=1.0, {given})
"""
    args = make_args(checkpoint, custom_generate_function_path=make_plugin(source))
    prompt = Sample(index=7, prompt="<image>?", multimodal_inputs={"images": ["a"]})
    made = asyncio.run(generate_and_rm(args, prompt, {}))
    if "another" in given:
        assert made.multimodal_inputs is None
        return
    assert made.multimodal_inputs == {"images": ["b" if "'b'" in given else "a"]}
    with pytest.raises(UserError, match=r"1 of 1 samples have images and no `multimodal_train_inputs`"):
        build_train_batch([made], [1.0], [1.0])


@pytest.mark.parametrize("reward", ["float('nan')", "'1.0'", "{'a': 1.0}", "[1.0]"])
def test_a_reward_that_a_function_sets_itself_is_checked_by_its_name(checkpoint, make_plugin, reward):
    made = f"Sample(index=3, tokens=[1, 2], response_length=1, status=Sample.Status.COMPLETED, reward={reward})"
    path = make_plugin(f"def fn(args, sample, sampling_params):\n    return {made}\n")
    hook = make_plugin(f"def hook(args, sample):\n    return {made}\n", name="hook")
    generates = make_args(checkpoint, custom_generate_function_path=path)
    with pytest.raises(UserError, match=f"^--custom-generate-function-path {re.escape(path)}: the reward of sample 3 "):
        asyncio.run(generate_and_rm(generates, Sample(index=3), {}))
    with pytest.raises(UserError, match=f"^--rollout-sample-hook-path {re.escape(hook)}: the reward of sample 3 "):
        asyncio.run(apply_rollout_sample_hooks(make_args("", rollout_sample_hook_path=[hook]), Sample(index=3)))
    # A function of the user's that makes the columns knows what a reward means.
    generates.custom_convert_samples_to_train_data_path = "my.columns"
    assert asyncio.run(generate_and_rm(generates, Sample(index=3), {})).reward is not None


def test_what_cannot_be_packed_is_named_with_the_functions_that_made_it(checkpoint, make_plugin):
    path = make_plugin(
        "def fn(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1, 2]\n"
        "    return sample\n"
    )
    hook = make_plugin("def hook(args, sample):\n    pass\n", name="hook")
    args = make_args(checkpoint, custom_generate_function_path=path, rollout_sample_hook_path=[hook])
    made_by = f"--custom-generate-function-path {path}, --rollout-sample-hook-path {hook}"
    with pytest.raises(UserError, match=f"`loss_mask` is 2 at .*; the samples were made by {re.escape(made_by)}$"):
        run_step(args, CountingDataSource(args.n_samples_per_prompt))


def test_failed_by_the_user_is_left_as_returned_and_masked_only_without_response(checkpoint, make_plugin):
    path = make_plugin(
        "def fn(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length = [1, 2], sample.metadata['length']\n"
        "    sample.status, sample.reward = Sample.Status.FAILED, sample.metadata['reward']\n"
        "    return sample\n"
    )
    args = make_args(checkpoint, custom_generate_function_path=path)
    partial = Sample(index=1, metadata={"length": 1, "reward": 0.5})
    partial = asyncio.run(generate_and_rm(args, partial, {}))
    assert (partial.status, partial.remove_sample, partial.reward) == (Status.FAILED, False, 0.5)
    empty = asyncio.run(generate_and_rm(args, Sample(index=1, metadata={"length": 0, "reward": None}), {}))
    assert (empty.status, empty.remove_sample, empty.reward) == (Status.FAILED, True, 0.0)


def test_executions_share_one_rollout_id():
    siblings = [Sample(), Sample()]
    share_execution_id(Sample(index=12), siblings, "f")
    assert [s.rollout_id for s in siblings] == [12, 12]
    share_execution_id(Sample(index=13), siblings, "f")
    assert [s.rollout_id for s in siblings] == [12, 12]
    for ids in ([1, 2], [1, None]):
        with pytest.raises(UserError, match=r"different rollout_id for sample 12"):
            share_execution_id(Sample(index=12), [Sample(rollout_id=i) for i in ids], "f")


def test_text_without_tokens_is_tokenised_with_one_warning(checkpoint, caplog):
    args = make_args(checkpoint)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        sample = Sample(prompt="hello", response="thia")
        complete_sample(args, sample, "f")
        tokenizer = GenerateState(args).tokenizer
        assert sample.tokens == tokenizer.encode("hello") + tokenizer.encode("thia", add_special_tokens=False)
        assert sample.loss_mask == [1] * sample.response_length
        assert sample.rollout_log_probs is None
        assert sample.status is Status.COMPLETED
    assert len([r for r in caplog.records if "tokenised again" in r.message]) == 1


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("use_tis", True),
        ("use_rollout_logprobs", True),
        ("true_on_policy_mode", True),
        ("custom_tis_function_path", "mine.py:weigh"),
    ],
)
def test_text_without_tokens_is_refused_where_engine_log_probs_are_needed(checkpoint, flag, value):
    args = make_args(checkpoint, **{flag: value})
    with pytest.raises(UserError, match="--" + flag.replace("_", "-")):
        complete_sample(args, Sample(prompt="hello", response="thi"), "f")


def test_text_without_tokens_is_judged_in_an_evaluation_which_trains_nothing(checkpoint, make_plugin):
    function = "async def fn(args, sample, sampling_params):\n    sample.response = 'thi'\n    return sample\n"
    args = make_args(checkpoint, custom_generate_function_path=make_plugin(function), use_tis=True)
    args.custom_rm_path = make_plugin("def graded(args, sample):\n    return 0.5\n", name="graded")
    with pytest.raises(UserError, match="--use-tis"):
        asyncio.run(generate_and_rm(args, Sample(prompt="hello"), {}))
    with GenerationCall(evaluation=True).under_way():
        judged = asyncio.run(generate_and_rm(args, Sample(prompt="hello"), {}, evaluation=True))
    assert (judged.status, judged.reward) == (Status.COMPLETED, 0.5) and judged.response_length


def test_loss_masks_are_fitted(checkpoint):
    args = make_args(checkpoint)
    whole = Sample(tokens=[1, 2, 3, 4], response_length=2, loss_mask=[0, 0, 1, 0], status=Status.COMPLETED)
    complete_sample(args, whole, "f")
    assert whole.loss_mask == [1, 0]
    empty = Sample(tokens=[1, 2], response_length=1, loss_mask=[], status=Status.COMPLETED)
    complete_sample(args, empty, "f")
    assert empty.loss_mask is None
    wrong = Sample(index=5, tokens=[1, 2, 3, 4], response_length=2, loss_mask=[1] * 3, status=Status.COMPLETED)
    with pytest.raises(UserError, match=r"sample 5: loss_mask has 3 entries, expected 2"):
        complete_sample(args, wrong, "f")


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), None])
@pytest.mark.parametrize("mask", [None, [0, 1, 1]])
def test_a_trained_token_needs_a_finite_log_prob(checkpoint, wrong, mask):
    args = make_args(checkpoint)

    def make(log_probs):
        return Sample(index=7, tokens=[1, 2, 3, 4], response_length=3, loss_mask=mask, rollout_log_probs=log_probs)

    with pytest.raises(
        UserError, match=f"^f returned a sample .*: sample 7: log_prob {wrong} of response token 2 is no"
    ):
        complete_sample(args, make([-1.0, -2.0, wrong]), "f")
    if mask is not None:
        # What stands at a token that is not trained is read by nobody.
        complete_sample(args, make([wrong, -2.0, -1.0]), "f")
        removed = make([-1.0, -2.0, wrong])
        removed.remove_sample = True
        complete_sample(args, removed, "f")
    array = make(np.array([-1.0, -2.0, -3.0], np.float32))
    complete_sample(args, array, "f")
    assert isinstance(held(array, "rollout_log_probs"), np.ndarray)


def test_pending_with_a_response_is_completed_without_one_is_an_error(checkpoint):
    args = make_args(checkpoint)
    sample = Sample(tokens=[1, 2], response_length=1)
    complete_sample(args, sample, "f")
    assert sample.status is Status.COMPLETED
    with pytest.raises(UserError, match="status PENDING"):
        complete_sample(args, Sample(index=3), "f")


@pytest.mark.parametrize("tokens", ["None", "[]"])
def test_text_alone_is_enough_however_its_function_says_that_there_are_no_tokens(checkpoint, make_plugin, tokens):
    path = make_plugin(
        f"async def fn(args, sample, sampling_params):\n    sample.tokens = {tokens}\n"
        "    sample.response = 'thia'\n    return sample\n"
    )
    args = make_args(checkpoint, custom_generate_function_path=path)
    sample = asyncio.run(generate_and_rm(args, Sample(index=1, prompt="hello"), {}))
    encode = GenerateState(args).tokenizer.encode
    assert sample.tokens == encode("hello") + encode("thia", add_special_tokens=False)
    assert sample.status is Status.COMPLETED


HOOKS = """
def breaks(args, sample):
    sample.loss_mask = [1, 1, 1]

def repairs(args, sample):
    sample.loss_mask = None

async def replaces(args, sample):
    sample.response_length = 5
    return sample
"""


@pytest.mark.parametrize(("name", "field"), [("breaks", "loss_mask has 3 entries"), ("replaces", "response_length 5")])
def test_a_hook_that_breaks_lengths_is_named_at_once(tmp_path, name, field):
    file = tmp_path / "hooks.py"
    file.write_text(HOOKS)
    hooks = [f"{file}:{name}", f"{file}:repairs"]
    args = make_args("", rollout_sample_hook_path=hooks)
    sample = Sample(index=3, tokens=[1, 2, 3], response_length=2)
    with pytest.raises(UserError, match=f"^--rollout-sample-hook-path .*:{name} left a sample .*sample 3: {field}"):
        asyncio.run(apply_rollout_sample_hooks(args, sample))


@pytest.mark.parametrize("status", Status)
def test_the_value_of_a_status_is_that_status(make_plugin, status):
    sample = Sample(index=3, tokens=[1, 2], response_length=1, status=status.value)
    complete_sample(make_args(""), sample, "--flag path")
    assert sample.status is (Status.COMPLETED if status is Status.PENDING else status)
    path = make_plugin(f"def fn(args, sample):\n    sample.status = {status.value!r}\n")
    hooked = asyncio.run(apply_rollout_sample_hooks(make_args("", rollout_sample_hook_path=[path]), sample))
    assert hooked.status is status


@pytest.mark.parametrize("status", ["done", None, 1])
def test_what_is_no_status_is_named(make_plugin, status):
    expected = f"sample 3 with status {status!r}; expected one of Sample.Status: PENDING, COMPLETED, "
    with pytest.raises(UserError, match=f"^--flag path returned {expected}"):
        complete_sample(make_args(""), Sample(index=3, tokens=[1], response_length=1, status=status), "--flag path")
    path = make_plugin(f"def fn(args, sample):\n    sample.status = {status!r}\n")
    with pytest.raises(UserError, match=f"^--rollout-sample-hook-path .* left {expected}"):
        asyncio.run(apply_rollout_sample_hooks(make_args("", rollout_sample_hook_path=[path]), Sample(index=3)))


def test_a_hook_that_never_returns_is_named_with_its_limit(make_plugin):
    path = make_plugin("async def fn(args, sample):\n    await asyncio.Event().wait()\n")
    args = make_args("", rollout_sample_hook_path=[path], http_request_timeout=0.1)
    late = f"--rollout-sample-hook-path {path} did not return within --http-request-timeout 0.1 s; it was called for sample 3"
    with pytest.raises(UserError, match="^" + re.escape(late)):
        asyncio.run(apply_rollout_sample_hooks(args, Sample(index=3)))


def test_a_hook_that_wants_to_end_the_process_is_named(make_plugin):
    path = make_plugin("async def fn(args, sample):\n    raise SystemExit('x')\n")
    args = make_args("", rollout_sample_hook_path=[path])
    with pytest.raises(UserError, match=f"^--rollout-sample-hook-path {path} raised SystemExit for sample 3: x\n"):
        asyncio.run(apply_rollout_sample_hooks(args, Sample(index=3)))


def test_as_many_hooks_run_at_once_as_generations_and_rewards_pass_them(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(
        "def hook(args, sample):\n"
        "    args.running.append(sample.index)\n    args.most.append(len(args.running))\n"
        "    args.waiting.release()\n"
        "    assert args.graded.wait(60)\n    args.running.remove(sample.index)\n"
        "def reward(args, sample):\n    args.graded.set()\n    return 1.0\n"
    )
    args = make_args(
        "",
        rollout_sample_hook_path=[f"{file}:hook"],
        custom_rm_path=f"{file}:reward",
        sglang_server_concurrency=3,
        rollout_num_engines=2,
    )
    args.running, args.most, args.graded, args.waiting = [], [], threading.Event(), threading.Semaphore(0)

    async def main():
        async with asyncio.timeout(60):
            hooks = [asyncio.ensure_future(apply_rollout_sample_hooks(args, Sample(index=i))) for i in range(20)]
            for _ in range(6):
                await asyncio.to_thread(args.waiting.acquire, timeout=60)
            # Every hook waits for this reward.
            await async_rm(args, Sample())
            await asyncio.gather(*hooks)

    asyncio.run(main())
    assert max(args.most) == 6
