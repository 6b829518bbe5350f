from pathlib import Path

import pytest

from slime.utils import env
from slime.utils.errors import UserError


def test_variables_of_libraries_are_handed_on_and_secrets_are_not(monkeypatch):
    for name in list(env.os.environ):
        monkeypatch.delenv(name)
    handed_on = {
        "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NVTE_DEBUG": "1", "SGLANG_CACHE_DIR": "/cache",
        # Words of secrets, in names of counts and switches.
        "SGLANG_INIT_NEW_TOKEN_RATIO": "0.7", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "256",
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "4096", "SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS": "64",
        "SGLANG_PATCH_TOKENIZER": "1", "SGLANG_USE_AITER_FP8_PER_TOKEN": "1", "NCCL_IB_PKEY": "1",
    }  # fmt: skip
    secrets = [
        "SGLANG_API_KEY", "SGLANG_API_KEYS", "SGLANG_APIKEY", "SGLANG_S3_ACCESS_KEY_ID", "SGLANG_S3_SECRET_ACCESS_KEY",
        "SGLANG_PRECISION_HF_TOKEN", "SGLANG_HF_TOKEN_2", "SGLANG_AUTH_TOKENS", "SGLANG_PASSWORD_OF_A", "NCCL_TOKEN",
    ]  # fmt: skip
    others = {"MY_NCCL_DEBUG": "INFO", "CUDA_HOME": "/cuda", **dict.fromkeys(secrets, "s3cret")}
    for name, value in {**handed_on, **others}.items():
        monkeypatch.setenv(name, value)
    assert env.library_environment() == handed_on


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/scratch/cache", "HOME": "/home/a"}, Path("/scratch/cache")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, Path("/home/a/.cache")),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/a"}, Path("/home/a/.cache")),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_cache_home(monkeypatch, variables, expected):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.cache_home() == expected


def test_the_key_of_a_reward_service(monkeypatch, tmp_path):
    for name in ("SLIME_RM_API_KEY", "SLIME_RM_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert env.reward_service_key() is None
    file = tmp_path / "key"
    monkeypatch.setenv("SLIME_RM_API_KEY_FILE", str(file))
    with pytest.raises(UserError, match="SLIME_RM_API_KEY_FILE .*key: cannot be read: FileNotFoundError"):
        env.reward_service_key()
    for content, problem in ((" \n", "is empty"), ("two\nlines-s3cret", "printable"), ("schlüssel-s3cret", "ASCII")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=problem) as error:
            env.reward_service_key()
        assert "s3cret" not in str(error.value)
    file.write_text("of the file\n")
    assert env.reward_service_key() == "of the file"
    # The path goes to actors, which are started with what stands in Ray's logs, and the key does not.
    monkeypatch.setenv("SLIME_RM_API_KEY", "of the variable")
    assert env.reward_service_key() == "of the variable"
    assert env.actor_environment()["SLIME_RM_API_KEY_FILE"] == str(file)
    assert not {"SLIME_RM_API_KEY"} & {*env.actor_environment(), *env.library_environment()}
