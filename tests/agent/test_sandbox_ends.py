"""What a sandbox leaves where its start was cancelled, and how long it waits for what hangs."""

import asyncio
import os
import signal
import threading

import pytest

from slime.agent import sandbox, sandbox_base
from slime.agent.sandbox import DockerSandbox, E2BSandbox, LocalSandbox, SandboxError
from tests.support.processes.clocks import run_in_no_time
from tests.support.processes.waiting import until, wait_until


def test_a_first_process_whose_streams_stay_open_is_not_waited_for(tmp_path, monkeypatch):
    """Another one that it has started has them, in a session of its own."""
    unshare = tmp_path / "unshare"
    unshare.write_text(f"#!/bin/sh\nsetsid sleep 60 & echo $! > {tmp_path}/left\nexec sleep 60\n")
    unshare.chmod(0o755)
    monkeypatch.setattr(sandbox, "require_namespaces", lambda: (str(unshare),))
    monkeypatch.setattr(sandbox, "START_SECONDS", 3.0)
    monkeypatch.setattr(sandbox, "END_SECONDS", 0.2)

    async def main():
        with pytest.raises(SandboxError, match="did not start within 3 s: it said nothing"):
            async with asyncio.timeout(30), LocalSandbox():
                pass

    try:
        asyncio.run(main())
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


def test_a_transfer_over_time_says_so(monkeypatch):
    monkeypatch.setattr(sandbox_base, "TRANSFER_SECONDS", 1.0)

    async def main():
        async with LocalSandbox() as sb:
            await sb.exec("mkfifo pipe", check=True)
            for transfer in (sb.write_file("pipe", "x"), sb.read_file("pipe")):
                with pytest.raises(SandboxError, match="pipe cannot be .*: it was not done within 1 s"):
                    await transfer

    asyncio.run(main())


def test_a_file_of_this_machine_that_is_read_slowly_holds_up_nobody_else(tmp_path):
    os.mkfifo(tmp_path / "slow")
    others_went_on = threading.Event()

    def give():
        with open(tmp_path / "slow", "wb") as pipe:
            others_went_on.wait(20)
            pipe.write(b"content")

    async def main():
        async with LocalSandbox() as sb:
            threading.Thread(target=give, daemon=True).start()
            writing = asyncio.create_task(sb.write_file("file", tmp_path / "slow"))
            # Where the loop itself reads, the file ends before there are so many turns.
            for _ in range(10):
                await asyncio.sleep(0.01)
            assert not writing.done()
            others_went_on.set()
            await writing
            return await sb.read_file("file")

    assert asyncio.run(main()) == "content"


# -- containers -----------------------------------------------------------------------------------------------------------


def test_a_container_that_comes_into_being_after_its_start_was_cancelled_is_removed(docker, monkeypatch):
    monkeypatch.setattr(sandbox, "_LATE_SECONDS", 20.0)

    async def main():
        starting = asyncio.create_task(DockerSandbox("slow").__aenter__())
        await until(lambda: (docker / "ordered").exists())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    wait_until(lambda: (docker / "made").exists(), 30)
    assert list(docker.glob("slime-*")) == []


def test_a_container_that_is_not_removed_is_told_by_its_name(docker, caplog):
    async def main():
        async with DockerSandbox("some/image", lifetime_sec=77) as sb:
            (docker / "away").touch()
            return sb.sandbox_id

    name = asyncio.run(main())
    (message,) = caplog.messages
    assert message.startswith(f"container {name} was not removed (Cannot connect to the Docker daemon)")
    assert message.endswith(f"it ends 77 s after its start, or by: docker rm --force {name}")


def test_one_that_is_gone_already_is_no_news(docker, caplog):
    async def main():
        async with DockerSandbox("some/image") as sb:
            (docker / sb.sandbox_id).rename(docker / "gone")

    asyncio.run(main())
    assert caplog.messages == []


# -- a service ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "ended"), [(20.0, 1), (2000.0, 0)])
def test_a_sandbox_that_a_service_makes_for_nobody_is_ended(service, caplog, seconds, ended):
    service.creation_seconds = seconds

    async def main():
        starting = asyncio.create_task(E2BSandbox("some/image").__aenter__())
        await asyncio.sleep(1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    run_in_no_time(main())
    assert service.killed == ended
    assert [message.startswith("a sandbox of some/image may be left") for message in caplog.messages] == [True] * (
        not ended
    )


def test_a_service_that_never_answers_is_given_up(service, caplog):
    service.events = ["never answers"] * 3

    async def main():
        async with E2BSandbox("some/image", rpc_retries=1) as sb:
            for idempotent in (True, False):
                with pytest.raises(SandboxError, match="E2B sandbox sb-1: `true` failed: no answer within 35 s"):
                    await sb.exec("true", timeout=5, idempotent=idempotent)
            service.ends_none = True

    run_in_no_time(main())
    assert [kind for kind, *_ in service.calls] == ["create", "run", "run", "run", "kill", "kill"]
    assert service.waits("run")[0] == 36
    (message,) = caplog.messages
    assert message.startswith("sandbox sb-1 was not ended; it ends 3600 s after its start") and "30 s" in message


def test_a_sandbox_of_a_service_is_used_in_its_block_alone(service):
    async def main():
        sb = E2BSandbox("some/image")
        for _ in range(2):
            for call in (sb.exec("true"), sb.read_file("x"), sb.write_file("x", "y")):
                with pytest.raises(SandboxError, match="E2BSandbox is used outside"):
                    await call
            async with sb:
                pass

    with asyncio.Runner() as runner:
        runner.run(main())
