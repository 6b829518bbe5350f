"""The teacher as a person starts it: its processes, its numbers against transformers', and how it ends."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import requests
import torch

from slime.rollout import on_policy_distillation
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.models.tiny_model import write_tiny_mixture
from tests.support.processes.waiting import wait_until
from tests.support.tables.shell_arrays import ROOT

TOOL = str(ROOT / "tools/serve_megatron_teacher.py")
TOKENS = [3, 77, 140, 9, 200, 55, 301, 18]
START_SECONDS = 240
OF_MEETING = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE")


class Teacher:
    """A server in processes of its own."""

    def __init__(self, directory, model, *words, launcher=(sys.executable,), **environment):
        self.log = directory / "teacher.log"
        self.process = subprocess.Popen(
            [*launcher, TOOL, "--hf-checkpoint", str(model), "--teacher-port", "0", *words],
            stdin=subprocess.DEVNULL, stdout=self.log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "SLIME_ACCELERATOR": "cpu", "TMPDIR": str(directory), **environment},
        )  # fmt: skip

    def text(self):
        return self.log.read_text(errors="replace")[-4000:]

    def wait_until_ready(self):
        wait_until(lambda: self._is_ready() or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, self.text()
        return self

    @property
    def url(self):
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("teacher: http")]
        return lines[0].partition(" ")[2] if lines else None

    def _is_ready(self):
        with contextlib.suppress(requests.RequestException):
            return self.url is not None and self.ask("/detect")[0] == 200
        return False

    def ask(self, path, body=None):
        method = "GET" if body is None else "POST"
        answer = requests.request(method, self.url + path, json=body, timeout=120)
        return answer.status_code, answer.json()

    def log_probs(self, tokens=TOKENS, **fields):
        status, answer = self.ask("/generate", {"input_ids": tokens, **fields})
        assert status == 200, answer
        return np.array(answer["log_probs"])

    def ranks(self):
        """The processes of other ranks."""
        return [child for child in psutil.Process(self.process.pid).children() if TOOL in child.cmdline()]

    def end(self, number=signal.SIGTERM):
        """(exit status, of the ranks that are left)."""
        ranks = self.ranks()
        self.process.send_signal(number)
        status = self.process.wait(60)
        return status, psutil.wait_procs(ranks, timeout=20)[1]

    def kill(self):
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def teacher_of(directory, model, *words, **options):
    teacher = Teacher(directory, model, *words, **options)
    try:
        yield teacher.wait_until_ready()
    finally:
        teacher.kill()


def log_softmax_of(directory, tokens=TOKENS, temperature=1.0):
    """What transformers says, [len − 1, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return torch.log_softmax(logits / temperature, dim=-1).numpy()


def at(log_softmax, ids):
    ids = np.array(ids)
    return np.take_along_axis(log_softmax, ids.reshape(len(log_softmax), -1), axis=1).reshape(ids.shape)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, the same with other weights, and one of other layers, each with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return {
        "first": make_tiny_checkpoint(root / "first", vocab_size=323, tie=False),
        "second": make_tiny_checkpoint(root / "second", seed=1, vocab_size=323, tie=False),
        "damaged": make_tiny_checkpoint(root / "damaged", seed=2, vocab_size=323, tie=False),
    }


@pytest.fixture(scope="module")
def teacher(models, tmp_path_factory):
    """Two ranks; whoever loads other weights puts the first ones back."""
    words = ["--tensor-model-parallel-size", "2", "--megatron-server-max-length", "64"]
    with teacher_of(tmp_path_factory.mktemp("served"), models["first"], *words) as teacher:
        assert len(teacher.ranks()) == 1
        yield teacher
        status, left = teacher.end()
        assert (status, left) == (0, []), teacher.text()
        assert list(teacher.log.parent.iterdir()) == [teacher.log]


def test_log_probs_are_those_of_transformers(teacher, models):
    labels = np.random.default_rng(0).integers(0, 323, (len(TOKENS) - 1, 5)).tolist()
    for temperature in (1.0, 0.6):
        expected = log_softmax_of(models["first"], temperature=temperature)
        fields = {"sample_n": 3, "label_token_ids": labels, "temperature": temperature}
        status, answer = teacher.ask("/generate", {"input_ids": TOKENS, **fields})
        assert status == 200
        for name, ids in (
            ("log_probs", TOKENS[1:]),
            ("label_token_log_probs", labels),
            ("sampled_log_probs", answer["sampled_token_ids"]),
        ):
            np.testing.assert_allclose(answer[name], at(expected, ids), rtol=0, atol=1e-5)


def test_draws_have_the_models_frequencies(teacher, models):
    """Above 53.5 chi-square of up to 24 degrees has a probability of 0.0005."""
    _, answer = teacher.ask("/generate", {"input_ids": TOKENS, "sample_n": 4000, "seed": 5})
    probabilities, ids = np.exp(log_softmax_of(models["first"])), np.array(answer["sampled_token_ids"])
    assert ids.shape == (len(TOKENS) - 1, 4000)
    for drawn, expected in zip(ids, probabilities, strict=True):
        counts = np.bincount(drawn, minlength=len(expected))
        assert len(counts) == len(expected)
        often = np.argsort(expected)[::-1][:24]
        often = often[expected[often] * len(drawn) >= 5]
        rest = 1 - expected[often].sum()
        terms = (counts[often] - expected[often] * len(drawn)) ** 2 / (expected[often] * len(drawn))
        others = (counts.sum() - counts[often].sum() - rest * len(drawn)) ** 2 / max(rest * len(drawn), 5.0)
        assert terms.sum() + others < 53.5
    assert (
        teacher.ask("/generate", {"input_ids": TOKENS, "sample_n": 4000, "seed": 5})[1]["sampled_token_ids"]
        == ids.tolist()
    )


def test_what_it_says_of_itself(teacher, models):
    assert teacher.ask("/healthz") == (200, {"status": "ok"}) and teacher.ask("/get_loads")[0] == 200
    status, info = teacher.ask("/info")
    assert status == 200 and info["model_path"] == info["hf_checkpoint"] == str(models["first"])
    assert (info["vocab_size"], info["max_length"], info["tensor_model_parallel_size"]) == (323, 64, 2)
    assert teacher.ask("/generate", {"input_ids": [1] * 65})[0] == 413
    assert teacher.ask("/generate", {"input_ids": [1, 323]})[0] == 400


def test_a_run_takes_it_as_teacher(teacher, models):
    """`--opd-type sglang` as it is, at the student's temperature; the tokenizers are compared."""
    args = SimpleNamespace(
        rm_url=teacher.url, rollout_temperature=0.7, hf_checkpoint=str(models["first"]), trust_remote_code=False,
        sglang_model_routers=None,
    )  # fmt: skip
    sample = Sample(index=0, tokens=TOKENS, response_length=5)

    async def score():
        try:
            return await on_policy_distillation.reward_func(args, sample)
        finally:
            await close_http_client()

    on_policy_distillation._compared.clear()
    assert asyncio.run(score()) == 0.0
    expected = at(log_softmax_of(models["first"], temperature=0.7), TOKENS[1:])[-5:]
    np.testing.assert_allclose(sample.teacher_log_probs, expected, rtol=0, atol=1e-5)
    assert on_policy_distillation._compared == {f"{teacher.url}/generate"}


def test_other_weights_are_loaded_and_those_that_do_not_fit_leave_the_first(teacher, models):
    path = models["damaged"] / "model.safetensors"
    from safetensors.torch import load_file, save_file

    # The last tensor that is read has another shape, so others are in the model already.
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name][:, :-8].contiguous()}, path, metadata={"format": "pt"})
    before = teacher.log_probs()
    status, answer = teacher.ask("/update_weights_from_disk", {"model_path": str(models["damaged"])})
    assert status == 400 and "the weights that were there before are served" in answer["error"], answer
    assert teacher.log_probs().tolist() == before.tolist()
    assert teacher.ask("/update_weights_from_disk", {"model_path": str(models["second"])})[0] == 200
    np.testing.assert_allclose(teacher.log_probs(), at(log_softmax_of(models["second"]), TOKENS[1:]), rtol=0, atol=1e-5)
    assert teacher.ask("/update_weights_from_disk", {"path": str(models["first"]), "timeout_s": 60})[0] == 200
    assert teacher.log_probs().tolist() == before.tolist()


def test_a_client_that_goes_away_in_the_middle_changes_nothing(teacher):
    before = teacher.log_probs()
    host, port = teacher.url.removeprefix("http://").split(":")
    body = json.dumps({"input_ids": TOKENS, "sample_n": 200})
    head = (
        f"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for sent in (head + body[:10], head + body):
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=60) as client:
                client.sendall(sent.encode())
    assert teacher.log_probs().tolist() == before.tolist()
    wait_until(lambda: teacher.ask("/get_loads")[1]["loads"][0]["num_reqs"] == 0)


@pytest.mark.slow
def test_when_a_rank_dies_the_server_ends_and_says_which(models, tmp_path):
    with teacher_of(tmp_path, models["first"], "--tensor-model-parallel-size", "2") as teacher:
        (rank,) = teacher.ranks()
        rank.kill()
        assert teacher.process.wait(60) == 1
        assert "rank 1 ended" in teacher.text() and "SIGKILL" in teacher.text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_server(models, tmp_path, number):
    with teacher_of(tmp_path, models["first"], "--tensor-model-parallel-size", "2") as teacher:
        status, left = teacher.end(number)
        assert (status, left) == (0 if number == signal.SIGINT else -number, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), ("--pipeline-model-parallel-size", "2"), ("--bf16",)], ids=["one", "stages", "bf16"]
)
def test_other_layouts_give_the_same(models, tmp_path, words):
    with teacher_of(tmp_path, models["first"], *words) as teacher:
        expected = at(log_softmax_of(models["first"]), TOKENS[1:])
        np.testing.assert_allclose(teacher.log_probs(), expected, rtol=0, atol=0.5 if "--bf16" in words else 1e-5)
        drawn = teacher.ask("/generate", {"input_ids": TOKENS, "sample_n": 2})[1]["sampled_token_ids"]
        assert np.shape(drawn) == (len(TOKENS) - 1, 2)


@pytest.mark.slow
def test_experts_may_be_spread(tmp_path):
    write_tiny_mixture(tmp_path / "model", "qwen3_moe")
    tokens = [token % 131 for token in TOKENS]
    with teacher_of(tmp_path, tmp_path / "model", "--expert-model-parallel-size", "2") as teacher:
        expected = at(log_softmax_of(tmp_path / "model", tokens), tokens[1:])
        np.testing.assert_allclose(teacher.log_probs(tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_torchrun_and_a_megatron_checkpoint(models, tmp_path):
    """As on several machines, and with the checkpoint of a run as first weights and as update."""
    for name in ("first", "second"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/convert_hf_to_torch_dist.py"), "--hf-checkpoint", str(models[name]),
             "--save", str(tmp_path / name), "--max-workers", "1"],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ["--tensor-model-parallel-size", "2", "--load", str(tmp_path / "second")]
    with teacher_of(tmp_path, models["first"], *words, launcher=launcher) as teacher:
        for name in ("second", "first"):
            status, answer = teacher.ask("/update_weights_from_disk", {"model_path": str(tmp_path / name)})
            assert status == 200 and ("already" in answer["message"]) is (name == "second"), answer
            expected = at(log_softmax_of(models[name]), TOKENS[1:])
            np.testing.assert_allclose(teacher.log_probs(), expected, rtol=0, atol=1e-5)
        teacher.process.send_signal(signal.SIGTERM)
        teacher.process.wait(60)
        wait_until(lambda: not [child for child in psutil.process_iter(["cmdline"]) if TOOL in (child.info["cmdline"] or ())
                                and str(models["first"]) in child.info["cmdline"]])  # fmt: skip


def test_texts_of_tokens_take_one_tokenizer_however_many_ask(models, tmp_path, monkeypatch):
    from slime.utils import processing_utils
    from tools.serve_megatron_teacher import decoder_of

    loaded, load = [], processing_utils.load_tokenizer
    monkeypatch.setattr(processing_utils, "load_tokenizer", lambda *given: loaded.append(given) or load(*given))
    decode = decoder_of(SimpleNamespace(hf_checkpoint=str(models["first"]), trust_remote_code=False))
    assert [decode([token]) for token in (65, 66)] == [["b"], ["c"]] and len(loaded) == 1
    assert decoder_of(SimpleNamespace(hf_checkpoint=str(tmp_path), trust_remote_code=False))([65]) is None


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["--teacher-host", "0.0.0.0"],
            "--teacher-host 0.0.0.0: everybody on the network could ask; set SLIME_RM_API_KEY",
        ),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size 0: give a number from 1"),
        (["--teacher-port", "70000"], "--teacher-port 70000: give a number from 0 to 65535"),
        (["--teacher-label-reduction-chunk-size", "-1"], "--teacher-label-reduction-chunk-size -1"),
        (["--context-parallel-size", "2"], "--context-parallel-size 2: give --tensor-model-parallel-size"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_rank_starts(models, tmp_path, words, named):
    from slime.utils.errors import UserError
    from tools import serve_megatron_teacher as tool

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SLIME_RM_API_KEY", raising=False)
        patch.setenv("TMPDIR", str(tmp_path))
        # What rank 0 sets for itself.
        for name in (*(f"{scope}{what}" for scope in ("", "LOCAL_") for what in ("RANK", "WORLD_SIZE")), *OF_MEETING):
            patch.setenv(name, "")
            patch.delenv(name)
        patch.setattr(tool, "exit_when_parent_dies", lambda: None)
        patch.setattr(tool, "configure_logger", lambda level: None)
        with pytest.raises(UserError, match=named.replace("[", r"\[")):
            tool.main(["--hf-checkpoint", str(models["first"]), "--teacher-port", "0", *words])


def test_nobody_is_warned_of_flags_that_the_tool_gives(models, caplog):
    from tools import serve_megatron_teacher as tool

    given, words = tool.make_parser().parse_known_args(["--hf-checkpoint", str(models["first"])])
    args = tool.parse_model(given, words, 1, 1)
    assert args.num_rollout == 0 and [record for record in caplog.records if record.levelno >= logging.WARNING] == []
