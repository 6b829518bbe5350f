"""The rollout buffer as a server of this process, and generators for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from slime_plugins.rollout_buffer.generators import find_generators
from slime_plugins.rollout_buffer.service import RolloutBuffer, make_app
from slime_plugins.rollout_buffer.store import Store
from tests.support.processes.http_server import serving_app

# A generator that sleeps until it is ended, since items come from the test.
IDLE = """
import time
TASK_TYPE = "idle"
def run_rollout(data):
    time.sleep(600)
"""


def item(uid: str, instance_id: str, **changes: Any) -> dict[str, Any]:
    """An item as a generator sends it."""
    messages = [{"role": "user", "content": f"prompt {instance_id}"}, {"role": "assistant", "content": f"answer {uid}"}]
    return {"uid": uid, "instance_id": instance_id, "messages": messages, "reward": 1.0, "extra_info": {}, **changes}


def group_of(instance_id: str, size: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """`size` items of one instance."""
    return [item(f"{instance_id}.{number}", instance_id, **changes) for number in range(size)]


class Client:
    """A client of one service."""

    def __init__(self, url: str, session: aiohttp.ClientSession, buffer: RolloutBuffer) -> None:
        self.url, self._session, self.buffer = url, session, buffer

    async def post(self, path: str, body: Any = None, status: int = 200, **options: Any) -> Any:
        """Send a request. Returns the answer, which must have `status`."""
        async with self._session.post(self.url + path, json=body, **options) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer

    async def start(self, task: str = "idle", run_id: str = "run", size: int = 2, **more: Any) -> Any:
        """Start a run with a group size."""
        return await self.post(
            "/start_rollout", {"task_type": task, "run_id": run_id, "num_repeat_per_sample": size, **more}
        )

    async def take(self, request_id: str, number: int = 1, status: int = 200, **more: Any) -> Any:
        """Ask for groups. Returns the answer, which must have `status`."""
        body = {"request_id": request_id, "num_groups": number, **more}
        return await self.post("/get_rollout_data", body, status)

    async def status(self) -> dict[str, Any]:
        """The status of the service."""
        async with self._session.get(f"{self.url}/status") as response:
            return await response.json()


@asynccontextmanager
async def buffer_service(
    directory: Path,
    *texts: str,
    state: Path | None = None,
    trust_remote_code: bool = False,
    trajectory_timeout: float | None = None,
    **options: Any,
) -> AsyncIterator[Client]:
    """Runs a service whose generators have these `texts` and `IDLE`; its logs go to `directory`."""
    files = []
    for number, text in enumerate((IDLE, *texts)):
        files.append(str(directory / f"number_{number}_generator.py"))
        Path(files[-1]).write_text(text)
    store = Store(state)
    try:
        buffer = RolloutBuffer(
            store,
            find_generators(files),
            directory / "logs",
            trust_remote_code=trust_remote_code,
            trajectory_timeout=trajectory_timeout,
        )
        async with serving_app(make_app(buffer, **options)) as url, aiohttp.ClientSession() as session:
            yield Client(url, session, buffer)
    finally:
        store.close()
