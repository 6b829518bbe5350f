import argparse
import json

from slime.observability.run_record import REDACTED, redacted, write_run_record


def test_m1_secrets_are_left_out(tmp_path):
    args = argparse.Namespace(
        router_api_key="very-secret", wandb_key="very-secret", lr=1e-3, train_env_vars={"HF_TOKEN": "very-secret", "A": "1"},
        max_tokens_per_gpu=5, typed_flags={"b", "a"},
    )  # fmt: skip
    write_run_record(args, tmp_path)
    text = (tmp_path / "args.json").read_text()
    assert "very-secret" not in text
    record = json.loads(text)
    assert record["arguments"]["train_env_vars"] == {"HF_TOKEN": REDACTED, "A": "1"}
    assert record["arguments"]["max_tokens_per_gpu"] == 5 and record["arguments"]["typed_flags"] == ["a", "b"]
    assert record["versions"]["torch"]


def test_unset_secrets_stay_visible_as_unset():
    assert redacted({"router_api_key": None}) == {"router_api_key": None}


def test_m1_names_of_environment_variables_are_secret_wherever_they_hold_such_a_word():
    secret = ["AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "GOOGLE_APPLICATION_CREDENTIALS_JSON", "DB_PASSWORD_FILE",
              "GITHUB_TOKEN_V2", "OPENAI_API_KEY_2", "MY_PRIVATE_KEY_PEM"]  # fmt: skip
    shown = ["TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "OMP_NUM_THREADS"]
    variables = redacted({"train_env_vars": dict.fromkeys([*secret, *shown], "x")})["train_env_vars"]
    assert [name for name, value in variables.items() if value == REDACTED] == secret
    plain = {"max_tokens_per_gpu": 5, "rollout_stop_token_ids": [1], "tokenizer_path": "t", "log_probs_max_tokens": 2}
    assert redacted(plain) == plain
