"""What the environment, and what is to run already, keep from starting: told by `--check`, before Ray starts."""

import http.server
import json
import os
import socket
import threading
from types import SimpleNamespace
from unittest import mock

import pytest

from slime.ray import cluster
from slime.ray.session import main
from slime.utils.errors import UserError
from tests.support.models.args import command_line, parse, write_stand_ins

ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    for name in ("RAY_ADDRESS", *ATTENTION):
        monkeypatch.delenv(name, raising=False)


def checked(directory, capsys, *words):
    """(exit status of `--check`, its standard output, its standard error)."""
    own = command_line(directory)
    write_stand_ins(directory / "model")
    status = main(lambda args, progress: None, [*own, *words, "--check"])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", "unfused", "local"])
def test_variables_of_attention_are_refused_where_megatron_asserts(monkeypatch, backend):
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    model = SimpleNamespace(config=SimpleNamespace(attention_backend=AttnBackend[backend]))
    flags = {"has_trainer": True, "train_backend": "megatron", "use_critic": False, "attention_backend": backend}
    refused = []
    for name in ATTENTION:
        for value in ("0", "1", "true", ""):
            with mock.patch.dict(os.environ, {name: value}):
                try:
                    LanguageModule._set_attention_backend(model)
                    asserted = False
                except AssertionError:
                    asserted = True
            for given, typed in (({name: value}, {}), ({}, {name: value}), ({name: "wrong"}, {name: value})):
                with mock.patch.dict(os.environ, given):
                    try:
                        cluster.refuse_attention_variables(SimpleNamespace(**flags, train_env_vars=typed))
                        refused.append(False)
                    except UserError as error:
                        refused.append(True)
                        assert f"{name}={value}" in str(error) and f"--attention-backend {backend}" in str(error)
            assert refused[-3:] == [asserted] * 3, (name, value)
    assert True in refused and False in refused


def test_a_variable_of_attention_matters_to_ranks_of_megatron_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(UserError, match="^NVTE_FUSED_ATTN=0: --attention-backend auto needs NVTE_FUSED_ATTN=1; unset"):
        cluster.refuse_attention_variables(parse(tmp_path))
    cluster.refuse_attention_variables(parse(tmp_path, "--train-env-vars", '{"NVTE_FUSED_ATTN": 1}'))
    cluster.refuse_attention_variables(parse(tmp_path, "--train-backend", "fsdp"))
    cluster.refuse_attention_variables(parse(tmp_path, "--debug-rollout-only"))


def test_a_check_tells_the_variable_of_attention(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    status, _, told = checked(tmp_path, capsys)
    assert status == 2 and "NVTE_FLASH_ATTN=0: --attention-backend auto needs NVTE_FLASH_ATTN=1" in told
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    assert checked(tmp_path, capsys)[0] == 0


def test_a_check_tells_the_parameters_of_a_plug_in(tmp_path, capsys):
    (tmp_path / "own.py").write_text("async def generate(sample): ...\n")
    path = f"{tmp_path}/own.py:generate"
    status, result, told = checked(tmp_path, capsys, "--custom-generate-function-path", path)
    assert status == 2 and result == ""
    assert f"--custom-generate-function-path {path}: is `async def generate(sample)`" in told
    assert "it is called as async fn(args, sample, sampling_params[, evaluation])" in told
    (tmp_path / "own.py").write_text("async def generate(args, sample, sampling_params): ...\n")
    assert checked(tmp_path, capsys, "--custom-generate-function-path", path)[0] == 0


class Router(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/workers" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"workers": []}).encode())

    def log_message(self, *args):
        pass


def test_a_router_that_is_to_run_already_answers_before_a_run_starts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cluster, "_ROUTER_SECONDS", 0.5)
    with http.server.HTTPServer(("127.0.0.1", 0), Router) as server:
        words = ["--sglang-router-ip", "127.0.0.1", "--sglang-router-port", str(server.server_port)]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, result, told = checked(tmp_path, capsys, *words)
        assert status == 0 and result.startswith("ready to start"), told
        server.shutdown()
    status, result, told = checked(tmp_path, capsys, *words)
    assert status == 2 and result == "" and f"{' '.join(words)}: no SGLang router there" in told
    # Without engines nobody asks it.
    assert checked(tmp_path, capsys, *words, "--debug-train-only")[0] == 0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words[-1] = str(silent.getsockname()[1])
        status, _, told = checked(tmp_path, capsys, *words)
    assert status == 2 and f"{' '.join(words)}: no SGLang router there (ReadTimeout" in told
