from pathlib import Path

import pytest

from slime.utils import env


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
