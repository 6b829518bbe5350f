"""Where the values of an evaluation set come from."""

from argparse import Namespace
from dataclasses import fields

import pytest

from slime.arguments.parser import build_parser
from slime.utils.errors import UserError
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs
from slime.utils.types import Sample

ARGS = build_parser().parse_args(
    [
        "--eval-temperature",
        "0.5",
        "--rollout-top-p",
        "0.9",
        "--rollout-max-response-len",
        "64",
        "--n-samples-per-eval-prompt",
        "3",
        "--input-key",
        "question",
        "--apply-chat-template",
        "--rollout-stop",
        "END",
    ]
)


def test_entry_beats_defaults_beats_eval_flags_beats_rollout_flags():
    entries = [{"name": "a", "path": "a.jsonl", "temperature": 0.1}, {"name": "b", "path": "b.jsonl"}]
    a, b = build_eval_dataset_configs(ARGS, entries, {"temperature": 0.2})
    (c,) = build_eval_dataset_configs(ARGS, [{"name": "c", "path": "c.jsonl"}], {})
    assert (a.temperature, b.temperature, c.temperature) == (0.1, 0.2, 0.5)
    assert (c.top_p, c.max_response_len, c.n_samples_per_eval_prompt, c.input_key) == (0.9, 64, 3, "question")
    assert c.apply_chat_template is True
    assert c.stop == ["END"]


def test_a_type_of_reward_beside_a_function_that_grades_all_sets_is_told_to_have_no_effect(caplog):
    args = Namespace(**{**vars(ARGS), "custom_rm_path": "own.py:reward"})
    entries = [
        {"name": "a", "path": "p", "rm_type": "math"}, {"name": "b", "path": "p"},
        {"name": "c", "path": "p", "rm_type": "math", "custom_rm_path": "other.py:reward"},
    ]  # fmt: skip
    build_eval_dataset_configs(ARGS, entries, {})
    assert not caplog.records
    build_eval_dataset_configs(args, entries, {})
    (told,) = caplog.messages
    assert told.startswith("evaluation set a: its rm_type math has no effect, because --custom-rm-path own.py:reward")


@pytest.mark.parametrize(
    ("key", "flags"),
    [
        *((f"{name}_key", (f"eval_{name}_key", f"{name}_key")) for name in ("input", "label", "tool")),
        *((name, (f"eval_{name}", f"rollout_{name}")) for name in ("temperature", "top_p", "top_k", "max_response_len")),
        *((name, (f"rollout_{name}",)) for name in ("stop", "stop_token_ids", "skip_special_tokens")),
        *((name, (name,)) for name in (
            "metadata_key", "multimodal_keys", "apply_chat_template", "apply_chat_template_kwargs",
            "n_samples_per_eval_prompt")),
        ("min_new_tokens", ("eval_min_new_tokens",)),
    ],
)  # fmt: skip
def test_the_flags_of_a_key_and_which_comes_first(key, flags):
    values = {flag: f"of {flag}" for flag in flags}
    for flag in flags:
        # An entry may say `null`, which is as if it did not have the key.
        for entry in ({}, {key: None}):
            (config,) = build_eval_dataset_configs(Namespace(**values), [{"name": "a", "path": "p", **entry}], {})
            assert vars(config)[key] == f"of {flag}"
        values[flag] = None
    (config,) = build_eval_dataset_configs(Namespace(**values), [{"name": "a", "path": "p"}], {})
    assert vars(config)[key] is None


def test_temperature_zero_is_a_value():
    (config,) = build_eval_dataset_configs(ARGS, [{"name": "a", "path": "p", "temperature": 0.0}], {})
    assert config.sampling_params()["temperature"] == 0.0


def test_a_request_has_what_the_set_says():
    own = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 11, "min_new_tokens": 2, "repetition_penalty": 1.5, "stop": ["X"],
        "stop_token_ids": [5], "skip_special_tokens": True, "no_stop_trim": False,
    }  # fmt: skip
    entry = {"name": "a", "path": "p", "max_response_len": 99, **own}
    (config,) = build_eval_dataset_configs(ARGS, [entry], {})
    assert config.sampling_params() == {**own, "max_new_tokens": 99, "spaces_between_special_tokens": False}
    (config,) = build_eval_dataset_configs(ARGS, [{"name": "a", "path": "p"}], {})
    of_nobody = {"no_stop_trim": True, "skip_special_tokens": False, "min_new_tokens": None, "repetition_penalty": None}
    assert of_nobody.items() <= config.sampling_params().items()


def test_a10_every_key_of_the_defaults_applies():
    defaults = {
        "rm_type": "math", "custom_rm_path": "m.reward", "input_key": "q", "label_key": "a", "tool_key": "t",
        "metadata_key": "m", "multimodal_keys": {"image": "i"}, "apply_chat_template": False,
        "apply_chat_template_kwargs": {"thinking": True}, "n_samples_per_eval_prompt": 7, "temperature": 0.25, "top_p": 0.5,
        "top_k": 11, "max_response_len": 99, "stop": ["X"], "stop_token_ids": [5], "min_new_tokens": 2,
        "repetition_penalty": 1.5, "skip_special_tokens": False, "no_stop_trim": False,
        "custom_generate_function_path": "m.generate", "metadata_overrides": {"a": 1}, "eval_task_timeout": 60.0,
        "min_eval_samples": 3, "eval_early_stop_remaining": 1, "eval_early_stop_idle_timeout": 5.0, "app_service": "s",
        "message_processor": "p", "reward_model": "r", "remote_environment": "e",
    }  # fmt: skip
    assert defaults.keys() == {field.name for field in fields(EvalDatasetConfig)} - {"name", "path"}
    (config,) = build_eval_dataset_configs(ARGS, {"aime": {"path": "p"}}, defaults)
    assert config.name == "aime"
    assert {name: getattr(config, name) for name in defaults} == defaults


@pytest.mark.parametrize(("entry", "defaults"), [({"metadata_overrides": None}, {"metadata_overrides": {"a": 1}}),
                                                 ({}, {"metadata_overrides": None})])  # fmt: skip
def test_metadata_that_an_entry_or_the_defaults_leave_empty_stays_as_it_is(entry, defaults):
    (config,) = build_eval_dataset_configs(ARGS, [{"name": "a", "path": "p", **entry}], defaults)
    sample = Sample(metadata={"own": 1})
    config.apply_to(sample)
    assert sample.metadata == {"own": 1}


def test_a_function_that_changes_the_metadata_of_a_sample_changes_that_of_no_other():
    overrides = {"tools": ["search"]}
    (config,) = build_eval_dataset_configs(ARGS, [{"name": "a", "path": "p", "metadata_overrides": overrides}], {})
    first, second = Sample(), Sample()
    config.apply_to(first)
    first.metadata["tools"].append("shell")
    config.apply_to(second)
    assert second.metadata == {"tools": ["search"]} == overrides and first.metadata == {"tools": ["search", "shell"]}


def test_unknown_keys_are_named():
    with pytest.raises(ValueError, match="eval.defaults: unknown key temprature"):
        build_eval_dataset_configs(ARGS, [], {"temprature": 1})
    with pytest.raises(TypeError, match="temprature"):
        build_eval_dataset_configs(ARGS, [{"name": "a", "path": "p", "temprature": 1}], {})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "a"}], "path missing"),
        ([{"name": "math/500", "path": "p"}], "evaluation set math/500: .* give a name without /"),
        ([{"name": "step", "path": "p"}], "evaluation set step: .* and not step"),
        ([{"name": "a", "path": "p"}, {"name": "a", "path": "q"}], "repeated: a"),
        (
            [{"name": "a", "path": "p", "n_samples_per_eval_prompt": 0}],
            "n_samples_per_eval_prompt is 0, must be above 0",
        ),
        ([{"name": "a", "path": "p", "min_eval_samples": 0}], "min_eval_samples is 0, must be above 0"),
        ([{"name": "a", "path": "p", "temperature": "hot"}], "temperature is 'hot', must be a number"),
        ([{"name": "a", "path": "p", "temperature": -1}], "temperature is -1, must not be negative"),
        ([{"name": "a", "path": "p", "max_response_len": 1.5}], "max_response_len is 1.5, must be a whole number"),
        ([{"name": "a", "path": "p", "max_response_len": True}], "must be a whole number"),
        ([{"name": "a", "path": "p", "apply_chat_template": 1}], "must be true or false"),
        ([{"name": "a", "path": "p", "stop": "END"}], "stop is 'END', must be a list of text"),
        ([{"name": "a", "path": "p", "stop_token_ids": ["a"]}], "must be a list of a whole number"),
        ([{"name": "a", "path": "p", "multimodal_keys": {"image": 1}}], "must be a mapping of text"),
        ([{"name": "a", "path": "p", "top_p": 0}], "top_p is 0, must be a share of the probability"),
    ],
)
def test_bad_entries(entries, message):
    with pytest.raises(UserError, match=message):
        build_eval_dataset_configs(ARGS, entries, {})


def test_apply_to_writes_overrides_into_its_own_copy_of_the_metadata():
    entry = {"name": "a", "path": "p", "rm_type": "f1", "metadata_overrides": {"k": 2}, "custom_rm_path": "m.f"}
    (config,) = build_eval_dataset_configs(ARGS, [entry], {})
    shared = {"k": 1, "other": 0}
    sample = Sample(metadata=shared)
    config.apply_to(sample)
    assert sample.metadata == {"k": 2, "other": 0, "rm_type": "f1"}
    assert shared == {"k": 1, "other": 0}
    assert sample.custom_rm_path == "m.f"


def test_the_generate_function_of_a_sample_beats_that_of_its_set():
    entry = {"name": "a", "path": "p", "custom_generate_function_path": "m.of_set"}
    (config,) = build_eval_dataset_configs(ARGS, [entry], {})
    samples = [Sample(), Sample(generate_function_path="m.of_sample")]
    for sample in samples:
        config.apply_to(sample)
    assert [sample.generate_function_path for sample in samples] == ["m.of_set", "m.of_sample"]


@pytest.mark.parametrize("rendered", [True, False])
def test_a_sample_knows_whether_the_template_of_its_set_rendered_it(rendered):
    entry = {"name": "a", "path": "p", "apply_chat_template": rendered}
    (config,) = build_eval_dataset_configs(ARGS, [entry], {})
    sample = Sample()
    config.apply_to(sample)
    assert sample.prompt_is_rendered is rendered


def test_sets_that_load_the_same_share_a_cache_key():
    def key(**entry):
        return build_eval_dataset_configs(ARGS, [{"name": "n", "path": "p", **entry}], {})[0].cache_key

    assert key() == key(temperature=0.3)
    other = {name: "other" for name in ("path", "input_key", "label_key", "tool_key", "metadata_key")}
    other |= {"multimodal_keys": {"image": "i"}, "apply_chat_template": False, "apply_chat_template_kwargs": {"x": 1}}
    keys = [key(), *(key(**{name: value}) for name, value in other.items())]
    assert len(set(keys)) == len(keys)


def test_keys_for_functions_of_ones_own_pass_through():
    entry = {"name": "a", "path": "p", "app_service": {"url": "u"}, "reward_model": "m", "message_processor": "f"}
    (config,) = build_eval_dataset_configs(ARGS, [entry], {"remote_environment": [1], "eval_task_timeout": 60})
    assert (config.app_service, config.reward_model, config.message_processor) == ({"url": "u"}, "m", "f")
    assert (config.remote_environment, config.eval_task_timeout) == ([1], 60)
