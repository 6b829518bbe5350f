import json
import re
from pathlib import Path

import pytest

from slime.utils import env
from slime.utils.errors import UserError


def test_variables_of_libraries_are_handed_on_and_secrets_are_not(monkeypatch):
    for name in list(env.os.environ):
        monkeypatch.delenv(name)
    handed_on = {
        "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NVTE_DEBUG": "1", "SGLANG_CACHE_DIR": "/cache",
        "UCX_NET_DEVICES": "mlx5_0:1", "NIXL_LOG_LEVEL": "INFO",
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


def test_variables_of_ours_that_nothing_reads_are_named_and_their_values_are_not(monkeypatch):
    for name in [name for name in env.os.environ if name.startswith("SLIME_")]:
        monkeypatch.delenv(name)
    for name in (
        "SLIME_ACCELERATOR",
        "SLIME_HOST_IP",
        "SLIME_PREFER_IPV6",
        "SLIME_AGENT_NODE_TARBALL",
        "SLIME_RM_API_KEY_FILE",
        "MY_SLIME_X",
    ):
        monkeypatch.setenv(name, "value")
    assert env.warnings_about_names() == []
    for name in ("SLIME_RM_APIKEY", "SLIME_GRAD_COALESCE_CHUNK_BYTES", "SLIME_CONTRACT_GENERATE"):
        monkeypatch.setenv(name, "s3cret")
    told = env.warnings_about_names()
    assert [message.split()[3] for message in told] == [
        "SLIME_CONTRACT_GENERATE",
        "SLIME_GRAD_COALESCE_CHUNK_BYTES",
        "SLIME_RM_APIKEY",
    ]
    assert told[2].endswith("did you mean SLIME_RM_API_KEY?") and "s3cret" not in " ".join(told)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("SLIME_DESTROY_WORLD_PROCESS_GROUP", "process groups stay"),
        ("SLIME_GRAD_COALESCE_CHUNK_BYTES", "give --ddp-bucket-size"),
        ("SLIME_CONTRACT_GENERATE_FUNCTION", "`python -m slime.plugins check`"),
        ("SLIME_WHATEVER", "unset it"),
    ],
)
def test_what_there_is_in_the_place_of_a_variable_is_told(monkeypatch, name, instead):
    monkeypatch.setenv(name, "1")
    [told] = [message for message in env.warnings_about_names() if name in message]
    assert (
        told.startswith(f"the environment variable {name} is set and has no effect: nothing reads it; ")
        and instead in told
    )


def test_process_groups_that_are_to_stay_do_stay(monkeypatch):
    monkeypatch.setenv("SLIME_DESTROY_WORLD_PROCESS_GROUP", "0")
    assert "PROCESS_GROUP" not in " ".join(env.warnings_about_names())


def test_every_variable_of_ours_that_is_read_is_known_as_such():
    """The module is the only one that reads the environment."""
    source = Path(env.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r'environ(?:\.get\(|\[)"(SLIME_\w+)', source)) | set(
        re.findall(r'_key\("(SLIME_\w+)', source)
    )
    assert len(read) >= 6 and read <= set(env._READ)


@pytest.mark.parametrize(("value", "threads"), [(None, None), ("", None), ("3", 3), ("4,2", 4)])
def test_how_many_threads_compute_is_the_users_to_say(monkeypatch, value, threads):
    for name in ("OMP_NUM_THREADS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert env.threads_of_user() == threads


@pytest.mark.parametrize(
    ("job", "value", "threads"),
    [
        ({"runtime_env": {"env_vars": {"MINE": "7"}}}, "1", None),
        ({"runtime_env": None}, "1", None),
        ({}, "1", None),
        ({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}, "1", 1),
        # Ray does not give that: the command of the job does.
        ({}, "4", 4),
    ],
)
def test_the_thread_that_ray_gives_a_job_is_not_the_users_word(monkeypatch, job, value, threads):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert env.threads_of_user() == threads


@pytest.mark.parametrize("value", ["many", "0", "-2"])
def test_threads_that_are_no_number_are_refused(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS={value}: give a whole number, 1 or more"):
        env.threads_of_user()


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


@pytest.mark.parametrize(
    ("variable", "key"),
    [("SLIME_RM_API_KEY", env.reward_service_key), ("SLIME_BUFFER_API_KEY", env.buffer_service_key)],
)
def test_the_key_of_a_service(monkeypatch, tmp_path, variable, key):
    for name in (variable, f"{variable}_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert key() is None
    file = tmp_path / "key"
    monkeypatch.setenv(f"{variable}_FILE", str(file))
    with pytest.raises(UserError, match=f"{variable}_FILE .*key: cannot be read: FileNotFoundError"):
        key()
    for content, problem in ((" \n", "is empty"), ("two\nlines-s3cret", "printable"), ("schlüssel-s3cret", "ASCII")):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=problem) as error:
            key()
        assert "s3cret" not in str(error.value)
    file.write_text("of the file\n")
    assert key() == "of the file"
    # The path goes to actors, which are started with what stands in Ray's logs, and the key does not.
    monkeypatch.setenv(variable, "of the variable")
    assert key() == "of the variable"
    assert env.actor_environment()[f"{variable}_FILE"] == str(file)
    assert not {variable} & {*env.actor_environment(), *env.library_environment()}


@pytest.fixture
def without_agents(monkeypatch):
    for name in list(env.os.environ):
        if name.startswith(("SLIME_AGENT_", "SWE_", "ADAPTER_")):
            monkeypatch.delenv(name)


def test_settings_of_sandboxes_have_an_older_name_as_second_choice(monkeypatch, without_agents):
    assert (env.sandbox_lifetime_sec(), env.sandbox_rpc_retries(), env.e2b_sandbox_size()) == (3600, 6, "md")
    monkeypatch.setenv("SWE_SANDBOX_LIFETIME_SEC", "60")
    monkeypatch.setenv("SWE_SANDBOX_RPC_RETRIES", "0")
    monkeypatch.setenv("SWE_SANDBOX_IMAGE_METADATA_KEY", "older")
    assert (env.sandbox_lifetime_sec(), env.sandbox_rpc_retries()) == (60, 0)
    assert env.sandbox_image_metadata_key() == "older"
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "90")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image")
    assert env.sandbox_lifetime_sec() == 90 and env.sandbox_image_metadata_key() == "image"


@pytest.mark.parametrize(
    ("variable", "value", "read", "told"),
    [
        ("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "0", env.sandbox_lifetime_sec, "give a whole number, 1 or more"),
        ("SWE_SANDBOX_RPC_RETRIES", "-1", env.sandbox_rpc_retries, "SWE_SANDBOX_RPC_RETRIES=-1: give a whole"),
        ("ADAPTER_PORT", "http", lambda: env.whole_number("ADAPTER_PORT", 1), "ADAPTER_PORT=http: give a whole number"),
        ("SLIME_AGENT_NODE_TARBALL", "/no/file", env.node_tarball, "there is no such file"),
        (
            "SWE_CC_EXTRA_ARGS",
            "'open",
            lambda: env.agent_program("CC"),
            "SWE_CC_EXTRA_ARGS='open: cannot be read as words",
        ),
        ("SLIME_AGENT_CC_EXTRA_ENVS", '{"A": s3cret}', lambda: env.agent_program("CC"), "give a JSON object of texts"),
        (
            "SLIME_AGENT_CODEX_EXTRA_ENVS",
            '["s3cret"]',
            lambda: env.agent_program("CODEX"),
            "give a JSON object of texts",
        ),
    ],
)
def test_settings_of_agents_that_cannot_be_read(monkeypatch, without_agents, variable, value, read, told):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=told) as error:
        read()
    assert variable in str(error.value) and "s3cret" not in str(error.value)


def test_settings_of_agents_are_handed_on_and_what_may_hold_keys_is_not(monkeypatch, without_agents):
    handed_on = {
        "SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY": "image", "SWE_AGENT_TIME_BUDGET_SEC": "9", "ADAPTER_PORT": "1",
        "SWE_BOOT_RETRIES": "3", "SLIME_AGENT_NODE_TARBALL": "node.tar", "SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS": "0",
    }  # fmt: skip
    kept = {
        "SLIME_AGENT_CC_EXTRA_ENVS": '{"API_KEY": "s3cret"}', "SLIME_AGENT_CC_EXTRA_ARGS": "--api-key s3cret",
        **dict.fromkeys(("SWE_API_KEY", "SWE_API_KEYS", "SWE_API_KEY_ID", "SWE_HF_TOKEN_1", "SWE_PASSWD"), "s3cret"),
        "SLIME_AGENT_CREDENTIALS": "s3cret",
    }  # fmt: skip
    for name, value in {**handed_on, **kept}.items():
        monkeypatch.setenv(name, value)
    given = env.actor_environment()
    assert handed_on.items() <= given.items() and not set(kept) & set(given)
    assert env.agent_program("CC").extra_env == {"API_KEY": "s3cret"}


def test_whether_addresses_of_ipv6_are_announced(monkeypatch):
    monkeypatch.delenv("SLIME_PREFER_IPV6", raising=False)
    assert not env.prefers_ipv6() and "SLIME_PREFER_IPV6" not in env.actor_environment()
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("SLIME_PREFER_IPV6", value)
        assert env.prefers_ipv6() is expected and env.actor_environment()["SLIME_PREFER_IPV6"] == value
    monkeypatch.setenv("SLIME_PREFER_IPV6", "maybe")
    with pytest.raises(UserError, match="^SLIME_PREFER_IPV6=maybe: give 1 for addresses of IPv6, or 0$"):
        env.prefers_ipv6()
