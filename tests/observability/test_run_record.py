"""What a run leaves beside its checkpoints, and tells of its configuration."""

import argparse
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.arguments.origins import Origin
from slime.observability.run_record import (
    REDACTED,
    derived_configuration,
    effective_configuration,
    is_secret,
    redacted,
    redacted_text,
    shown,
    write_run_record,
)


@dataclasses.dataclass
class EvaluationSet:
    name: str
    remote_environment: dict


def record_of(directory, **values):
    write_run_record(argparse.Namespace(**{"origins": {}, **values}), directory)
    text = (directory / "args.json").read_text()
    return text, json.loads(text)


def test_m1_secrets_are_left_out(tmp_path):
    text, record = record_of(
        tmp_path, router_api_key="very-secret", wandb_key="very-secret", lr=1e-3, max_tokens_per_gpu=5,
        train_env_vars={"HF_TOKEN": "very-secret", "A": "1"}, custom_config={"judge": {"api_key": "very-secret"}},
        eval_datasets=[EvaluationSet("aime", {"password": "very-secret", "url": "u"})],
    )  # fmt: skip
    assert "very-secret" not in text
    values = {name: entry["value"] for name, entry in record["arguments"].items()}
    assert values["train_env_vars"] == {"HF_TOKEN": REDACTED, "A": "1"}
    assert values["eval_datasets"] == [{"name": "aime", "remote_environment": {"password": REDACTED, "url": "u"}}]
    assert values["max_tokens_per_gpu"] == 5
    assert record["versions"]["torch"]


def test_every_value_has_its_origin(tmp_path):
    origins = {"lr": Origin.COMMAND_LINE, "seed": Origin.DEFAULT, "tis_mode": Origin.YAML}
    _, record = record_of(tmp_path, lr=1e-3, seed=1, tis_mode="clip", log_dir="d", origins=origins, typed_flags={"lr"})
    assert record["arguments"] == {
        "log_dir": {"value": "d", "origin": None},
        "lr": {"value": 1e-3, "origin": "command line"},
        "seed": {"value": 1, "origin": "default"},
        "tis_mode": {"value": "clip", "origin": "YAML"},
    }


def test_unset_secrets_stay_visible_as_unset():
    assert redacted({"router_api_key": None}) == {"router_api_key": None}


NAMES_OF_SECRETS = ["AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "GOOGLE_APPLICATION_CREDENTIALS_JSON", "DB_PASSWORD_FILE",
    "GITHUB_TOKEN_V2", "OPENAI_KEY", "OPENAI_API_KEY_2", "MY_PRIVATE_KEY_PEM"]  # fmt: skip
OTHER_NAMES = ["TOKENIZERS_PARALLELISM", "KEYRING", "MONKEY", "NCCL_DEBUG", "OMP_NUM_THREADS"]


def test_m1_names_of_environment_variables_are_secret_wherever_they_hold_such_a_word():
    variables = redacted({"train_env_vars": dict.fromkeys([*NAMES_OF_SECRETS, *OTHER_NAMES], "x")})["train_env_vars"]
    assert [name for name, value in variables.items() if value == REDACTED] == NAMES_OF_SECRETS
    plain = {"max_tokens_per_gpu": 5, "rollout_stop_token_ids": [1], "tokenizer_path": "t", "log_probs_max_tokens": 2}
    assert redacted(plain) == plain


def test_m1_names_of_the_users_own_values_are_secret_like_those_of_variables(tmp_path):
    own = {name.lower(): "SEKRET" for name in [*NAMES_OF_SECRETS, "judge_key", "judge_passwd", "hf_token_read"]}
    counts = {name.lower(): "x" for name in OTHER_NAMES} | {"judge_max_tokens": 5, "sort_by_key": True}
    inner = {"judge": {"judge_key": "SEKRET", "urls": [{"id_of_key": "SEKRET"}]}}
    custom = own | counts | inner
    of_critic = {"critic_key": {"a": "SEKRET"}, "judges": {"its_key_1": "SEKRET"}, "label_key": "answer"}
    text, record = record_of(
        tmp_path, custom_config=custom, **custom, label_key="label", reward_key="score", rollout_max_tokens=7,
        role_overrides={"critic": of_critic}, critic_values=of_critic,
    )  # fmt: skip
    values = {name: entry["value"] for name, entry in record["arguments"].items()}
    assert "SEKRET" not in text
    for place in (values, values["custom_config"]):
        assert {name for name in custom if place[name] == REDACTED} == own.keys()
        assert {name: place[name] for name in counts} == counts
        assert place["judge"] == {"judge_key": REDACTED, "urls": [{"id_of_key": REDACTED}]}
    assert (values["label_key"], values["reward_key"], values["rollout_max_tokens"]) == ("label", "score", 7)
    left = {"critic_key": REDACTED, "judges": {"its_key_1": REDACTED}, "label_key": "answer"}
    assert values["role_overrides"] == {"critic": left} and values["critic_values"] == left


def test_flags_and_attributes_are_secret_by_their_name():
    secret = ("wandb_key", "--wandb-key", "router_api_key", "--sglang-api-key", "hf_token", "my_secret", "db_password")
    assert all(map(is_secret, secret))
    assert not any(map(is_secret, ("max_tokens_per_gpu", "--input-key", "label_key", "tokenizer_type", "secretary")))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("https://user:SEKRET@host/path", f"https://{REDACTED}@host/path"),
        ("postgres://me:SEK@RET@db:5432/x", f"postgres://{REDACTED}@db:5432/x"),
        ("http://x/?a=1&api_key=SEKRET&b=2", f"http://x/?a=1&api_key={REDACTED}&b=2"),
        ("http://x?key=SEKRET", f"http://x?key={REDACTED}"),
        ("Authorization: Bearer SEKRET", f"Authorization: {REDACTED}"),
        ("http://10.0.0.1:80/reward?monkey=1", "http://10.0.0.1:80/reward?monkey=1"),
        ("data/a@[0:5].jsonl", "data/a@[0:5].jsonl"),
    ],
)
def test_m1_secrets_inside_of_texts(text, left):
    assert redacted_text(text) == left


def test_m1_secrets_inside_of_the_values_of_a_run(tmp_path):
    text, _ = record_of(
        tmp_path, wandb_host="https://me:SEKRET@host", rm_url="http://x/?api_key=SEKRET",
        train_env_vars={"OPENAI_KEY": "SEKRET", "DB_URL": "pg://me:SEKRET@db"},
        custom_config={"headers": ["Authorization: Bearer SEKRET", {"X-Api-Key": "SEKRET"}]},
    )  # fmt: skip
    assert "SEKRET" not in text


def test_m1_secrets_inside_of_sets_and_namespaces(tmp_path):
    text, record = record_of(
        tmp_path, hosts={"https://me:SEKRET@host", "a"}, mixed=frozenset({2, "b"}),
        judge=argparse.Namespace(api_key="SEKRET", urls=("http://x?key=SEKRET",)), other=SimpleNamespace(token="SEKRET"),
        actor_overrides={"inner": argparse.Namespace(wandb_key="SEKRET", lr=1e-3)}, place=Path("http:/x?key=SEKRET"),
    )  # fmt: skip
    assert "SEKRET" not in text
    values = {name: entry["value"] for name, entry in record["arguments"].items()}
    assert values["hosts"] == ["a", f"https://{REDACTED}@host"] and values["mixed"] == ["b", 2]
    assert values["judge"] == {"api_key": REDACTED, "urls": [f"http://x?key={REDACTED}"]}
    assert values["actor_overrides"] == {"inner": {"wandb_key": REDACTED, "lr": 1e-3}}


def test_values_in_messages():
    assert (shown("lr", "a"), shown("wandb_key", ["x"]), shown("a", {"token": "x"})) == (
        "'a'", REDACTED, f"{{'token': '{REDACTED}'}}"
    )  # fmt: skip


ORIGINS = {
    "lr": "command line", "wandb_key": "command line", "seed": "default", "tis_mode": "YAML", "world_size": "derived",
    "role_overrides": "YAML", "prompt": "HF config", "eval_datasets": "derived", "custom_config": "YAML",
    "global_batch_size": "derived", "num_steps_per_rollout": "command line", "params_dtype_name": "derived",
}  # fmt: skip


def make_args():
    args = argparse.Namespace(
        lr=1e-5, seed=1234, wandb_key="very-secret", tis_mode="clip", world_size=8, role_overrides={"critic": {"a": 1}},
        prompt="x" * 500, eval_datasets=[], custom_config={"tis_mode": "clip"}, typed_flags={"lr"},
        global_batch_size=32, num_steps_per_rollout=2, params_dtype_name="float32",
    )  # fmt: skip
    args.origins = ORIGINS
    return args


def test_a_few_lines_tell_what_was_set_and_what_to_check_without_secrets():
    assert effective_configuration(make_args()).splitlines() == [
        "configuration (what differs from the defaults):",
        "  command line: lr 1e-05, num_steps_per_rollout 2, wandb_key <redacted>",
        '  YAML: role_overrides {"critic": {"a": 1}}, tis_mode clip',
        "  so: parameters in float32, global batch size 32",
    ]


def test_the_rest_is_told_apart():
    assert derived_configuration(make_args()).splitlines() == [
        "configuration (what follows):",
        f"  HF config: prompt {'x' * 99}…",
        "  derived: global_batch_size 32, params_dtype_name float32, world_size 8",
    ]
