"""An engine that is started by hand: it belongs to no run, and no run ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import requests

from slime.utils.ports import random_port_start, reserve_port
from tests.support.processes.waiting import wait_until

ROOT = Path(__file__).parents[3]
KEY = "key-of-somebody-else"


class PlainEngine:
    """`tools/serve_on_cpu.py` in a process of its own: a server that knows nothing of runs. `further`: flags of SGLang."""

    def __init__(self, model: Path, log: Path, further: Sequence[str] = ("--enable-deterministic-inference",)) -> None:
        with reserve_port("127.0.0.1", random_port_start(32000)) as reservation:
            self.address = f"127.0.0.1:{reservation.port}"
            words = ["--model-path", str(model), "--port", str(reservation.port), "--api-key", KEY, *further]
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tools/serve_on_cpu.py"), *words],
                stdin=subprocess.DEVNULL, stdout=log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "SLIME_ACCELERATOR": "cpu"},
            )  # fmt: skip
            self._wait(log)

    def _wait(self, log: Path) -> None:
        wait_until(lambda: self._answers() or self.process.poll() is not None, 240)
        assert self.process.poll() is None, log.read_text(errors="replace")[-4000:]

    def _answers(self) -> bool:
        with contextlib.suppress(requests.RequestException):
            return self.ask("GET", "/model_info").ok
        return False

    def ask(self, method: str, path: str, payload=None) -> requests.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return requests.request(method, f"http://{self.address}{path}", json=payload, headers=headers, timeout=60)

    @property
    def weight_version(self) -> str:
        return self.ask("GET", "/model_info").json()["weight_version"]

    def generates(self) -> bool:
        payload = {"input_ids": [5, 9, 77], "sampling_params": {"max_new_tokens": 2}}
        return self.ask("POST", "/generate", payload).json()["meta_info"]["completion_tokens"] > 0

    def is_out_of_all_groups(self) -> bool:
        return not self.ask("POST", "/destroy_weights_update_group", {"group_name": "slime-pp_0"}).ok

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
