"""Sandboxes, each by the same questions; what is special to each; and how a service that fails is asked again."""

import asyncio
import errno
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from slime.agent import sandbox, sandbox_base
from slime.agent.sandbox import (
    EXIT_TIMED_OUT,
    CommandFailed,
    DockerSandbox,
    E2BSandbox,
    Limits,
    LocalSandbox,
    SandboxError,
    exec_and_wait,
)
from slime.utils.errors import UserError
from tests.support.processes.clocks import run_in_no_time
from tests.support.processes.fake_sandboxes import CommandExitException, Dropped, NotFoundException, TimeoutException
from tests.support.processes.waiting import until, wait_until


@pytest.fixture(params=["local", "docker"])
def make(request):
    """A sandbox that was not entered yet."""
    if request.param == "local":
        return LocalSandbox
    request.getfixturevalue("docker")
    return lambda: DockerSandbox("some/image")


def inside(made, work):
    """What the coroutine `work(sandbox)` returns, in `made`."""

    async def main():
        async with made as entered:
            return await work(entered)

    return asyncio.run(main())


def ran(made, cmd, **options):
    return inside(made, lambda sb: sb.exec(cmd, **options))


def test_a_command_gives_its_status_and_both_streams(make):
    assert ran(make(), "echo said; echo told >&2; exit 3") == (3, "said\n", "told\n")
    assert ran(make(), "kill -9 $$")[0] == 128 + signal.SIGKILL


def test_a_command_has_its_variables(make):
    assert ran(make(), 'echo "$A-$B"', env={"A": "one two", "B": "'"})[1] == "one two-'\n"


def test_a_status_is_refused_where_it_was_to_be_checked(make):
    with pytest.raises(CommandFailed, match="ended with status 4: no such thing"):
        ran(make(), "echo no such thing >&2; exit 4", check=True)


def test_a_command_over_time_is_ended_with_all_of_its_group(make):
    async def work(sb):
        for seconds in (2, 60):
            code, out, _ = await sb.exec("sleep 1000 & echo $!; sleep 1001", timeout=seconds)
            if out:
                break  # else the machine was too busy for it to come so far
        # Who collects orphans of a container is its own business.
        while "State:\tZ" not in (await sb.exec(f"cat /proc/{out.strip()}/status || printf 'State:\\tZ'"))[1]:
            await asyncio.sleep(0.05)
        return code, out

    code, out = inside(make(), work)
    assert code == EXIT_TIMED_OUT and out.strip().isdigit()


def test_what_a_command_leaves_behind_holds_nobody_up():
    """A server in the background has the streams of the shell that started it."""
    assert ran(LocalSandbox(), "sleep 1000 & echo started", timeout=60)[:2] == (0, "started\n")


def test_files_come_back_as_they_were_written(make, tmp_path):
    (tmp_path / "of_host").write_bytes(b"\xff\x00ok")

    async def work(sb):
        await sb.write_file("a dir/te'xt", "täxt\n")
        await sb.write_file("bytes", b"1\n2")
        await sb.write_file("host", tmp_path / "of_host")
        await sb.write_file("again", await sb.read_file("host"))
        same = await sb.exec("cmp host again && cat 'a dir/te'\"'\"xt")
        return same, await sb.read_file("bytes")

    assert inside(make(), work) == ((0, "täxt\n", ""), "1\n2")


def test_files_that_cannot_be_read_or_written(make):
    with pytest.raises(SandboxError, match="nowhere cannot be read: .*No such file"):
        inside(make(), lambda sb: sb.read_file("nowhere"))
    with pytest.raises(SandboxError, match="/proc/x/y cannot be written"):
        inside(make(), lambda sb: sb.write_file("/proc/x/y", "z"))


def test_a_file_that_is_too_large_is_refused_and_long_output_is_cut(make, monkeypatch):
    monkeypatch.setattr(sandbox_base, "_FILE_BYTES", 1000)
    with pytest.raises(SandboxError, match="has more than 1000 bytes"):
        inside(make(), lambda sb: _written_and_read(sb, "x" * 1001))
    assert inside(make(), lambda sb: _written_and_read(sb, "x" * 1000)) == "x" * 1000
    _, out, _ = ran(LocalSandbox(), "head -c 3000000 /dev/zero | tr '\\0' y")
    assert out == "y" * 2**20 + f"\n[{3_000_000 - 2**20} bytes more were dropped]"


async def _written_and_read(sb, text):
    await sb.write_file("file", text)
    return await sb.read_file("file")


def test_a_long_command_is_waited_for_in_each(make):
    def work(sb):
        return exec_and_wait(
            sb, cmd='echo "$A"; exit 3', env={"A": "x"}, time_budget_sec=60, tag="t", poll_interval_sec=0.05
        )

    assert inside(make(), work) == (3, "x\n")


def test_a_sandbox_is_used_in_its_block_alone(make):
    made = make()
    with pytest.raises(SandboxError, match=f"{type(made).__name__} is used outside"):
        asyncio.run(made.exec("true"))
    inside(made, lambda sb: sb.exec("true"))
    with pytest.raises(SandboxError, match="is used outside"):
        asyncio.run(made.exec("true"))


# -- on this machine ------------------------------------------------------------------------------------------------------


def test_what_was_started_ends_with_the_sandbox_and_its_directory_goes():
    # A process of a session of its own, that gives up its streams, and one that ignores signals.
    script = f"trap '' TERM HUP; sleep {SLEEPER} & echo x > there; wait"

    async def work(sb):
        # Until it is in a session of its own, it ends with the command.
        await sb.exec(f"setsid sh -c {script!r} > /dev/null 2>&1 < /dev/null & until [ -f there ]; do sleep 0.02; done")
        # It is there a moment after the file.
        await until(_sleepers)
        return sb.directory, len(_sleepers())

    directory, during = inside(LocalSandbox(), work)
    assert during == 1 and not directory.exists()
    wait_until(lambda: not _sleepers(), 30)


# A word of its own, which no other test has either that runs on this machine.
SLEEPER = str(10_000_000 + os.getpid())


def _sleepers():
    # Whoever runs a program that starts it has it within a word.
    return [process for process in psutil.process_iter(["cmdline"]) if SLEEPER in (process.info["cmdline"] or [])]


@pytest.mark.parametrize("left", ["", f"sleep {SLEEPER}"], ids=["nothing is left", "a process is left"])
def test_it_ends_with_the_process_that_made_it(left):
    program = textwrap.dedent(
        """
        import asyncio, sys
        from slime.agent.sandbox import LocalSandbox

        async def main():
            async with LocalSandbox() as sb:
                detached = f"setsid sh -c 'touch there; {sys.argv[1]}' > /dev/null 2>&1 < /dev/null &"
                await sb.exec(f"ln -s / link; {detached} until [ -f there ]; do sleep 0.02; done")
                print(sb.directory, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    root = str(Path(__file__).parents[2])
    maker = psutil.Popen(
        [sys.executable, "-c", program, left], stdout=-1, text=True, env={**os.environ, "PYTHONPATH": root}
    )
    directory = Path(maker.stdout.readline().strip())

    # It is there a moment after its file.
    wait_until(lambda: bool(_sleepers()) == bool(left), 30)
    sleepers = _sleepers()
    maker.kill()
    maker.wait(30)
    assert psutil.wait_procs(sleepers, 30)[1] == []
    wait_until(lambda: not directory.exists(), 30)


def test_a_sandbox_that_is_killed_during_a_command_gives_no_status():
    async def work(sb):
        running = asyncio.create_task(sb.exec("touch there; sleep 1000"))
        while not (sb.directory / "there").exists():
            await asyncio.sleep(0.01)
        sb._keeper.kill()
        return await running

    with pytest.raises(SandboxError):
        inside(LocalSandbox(), work)


def test_nobody_elses_processes_end_with_a_sandbox_whose_first_process_ended_before_it(monkeypatch):
    killed = []
    monkeypatch.setattr(sandbox, "kill_group", killed.append)

    async def work(sb):
        sb._keeper.kill()
        await sb._keeper.wait()
        with pytest.raises(SandboxError, match="its first process has ended"):
            await sb.exec("true")

    inside(LocalSandbox(), work)
    assert killed == []


def test_it_sees_no_other_process_and_no_variable_of_ours(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    _, out, _ = ran(LocalSandbox(env={"OWN": "1"}), f"env; kill -0 {os.getpid()} 2>&1; ls /proc | grep -c '^[0-9]'")
    assert "SECRET" not in out and "OWN=1" in out and "No such process" in out
    assert int(out.split()[-1]) < 8


@pytest.mark.parametrize("cmd", ["cat {0}", "echo x > {0}", "rm {0}", "chmod 0 {0}/..", "ln -s {0} link && cat link"])
def test_files_of_the_user_are_out_of_reach(tmp_path, cmd):
    file = tmp_path / "secret"
    file.write_text("x")
    code, out, err = ran(LocalSandbox(), cmd.format(file))
    assert file.read_text() == "x" and (code != 0 or cmd.startswith("chmod")) and "x\n" not in out


def test_neither_reading_nor_writing_goes_by_way_of_a_link_of_the_sandbox(tmp_path):
    (tmp_path / "secret").write_text("x")

    async def work(sb):
        await sb.exec(f"ln -s {tmp_path}/secret file; ln -s {tmp_path} dir", check=True)
        for call in (sb.read_file("file"), sb.write_file("file", "y"), sb.write_file("dir/secret", "y")):
            with pytest.raises(SandboxError, match="Permission denied|Read-only file system"):
                await call

    inside(LocalSandbox(), work)
    assert (tmp_path / "secret").read_text() == "x" and len(list(tmp_path.iterdir())) == 1


def test_more_can_be_made_readable(tmp_path):
    (tmp_path / "given").write_text("x")
    assert ran(LocalSandbox(readable=[tmp_path]), f"cat {tmp_path}/given; echo y > {tmp_path}/given")[:2] == (2, "x")


CONNECTS = f"{sys.executable} -c 'import socket; socket.create_connection((\"127.0.0.1\", {{port}}), 5); print(1)'"


def test_the_network_is_there_where_it_is_asked_for(unused_server):
    cmd = CONNECTS.format(port=unused_server)
    assert ran(LocalSandbox(network="host"), cmd)[1] == "1\n"
    assert "unreachable" in ran(LocalSandbox(), cmd)[2]


@pytest.fixture
def unused_server():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("limits", "cmd", "told"),
    [
        ({"memory_bytes": 2**28}, f"{sys.executable} -c 'bytearray(2**29)'", "MemoryError"),
        ({"file_bytes": 2**16}, "head -c 1000000 /dev/zero > x; echo $?; wc -c x", "65536 x"),
        ({"cpu_seconds": 1}, "while :; do :; done", ""),
        (
            {"open_files": 16},
            f"{sys.executable} -c 'x = [open(\"/dev/null\") for _ in range(32)]'",
            "Too many open files",
        ),
    ],
)
def test_limits_hold(limits, cmd, told):
    code, out, err = ran(LocalSandbox(limits=Limits(**limits)), cmd, timeout=60)
    assert told in out + err and code != EXIT_TIMED_OUT
    assert told or code == 128 + signal.SIGKILL or code == 128 + signal.SIGXCPU


def test_many_at_once_are_apart():
    async def main():
        async def one(number):
            async with LocalSandbox() as sb:
                await sb.write_file("own", str(number))
                await sb.exec("sleep 0.1")
                return (await sb.exec("cat own; ls | wc -l"))[1]

        return await asyncio.gather(*map(one, range(12)))

    assert asyncio.run(main()) == [f"{number}3\n" for number in range(12)]


@pytest.mark.parametrize(("script", "seconds", "error", "told"), [
    ("echo 'Operation not permitted' >&2; exit 1", 60, UserError, "says: Operation not permitted"),
    ("exec sleep 600", 0.2, SandboxError, "no sandbox starts on this machine: .*unshare.* 0.2 seconds"),
])  # fmt: skip
def test_a_machine_without_namespaces_refuses_by_name(tmp_path, monkeypatch, script, seconds, error, told):
    sandbox.require_namespaces.cache_clear()
    monkeypatch.setattr(sandbox, "START_SECONDS", seconds)
    refusing = tmp_path / "unshare"
    refusing.write_text(f"#!/bin/sh\n{script}\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(error, match=told):
        ran(LocalSandbox(), "true")
    sandbox.require_namespaces.cache_clear()


def test_what_this_machine_lacks_is_an_error_of_the_sandbox(make, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    sandbox.require_namespaces()
    monkeypatch.setattr(sandbox.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(sandbox, "run_to_end", refuse)
    with pytest.raises(SandboxError, match="starts.*No space left on device"):
        ran(make(), "true")


# -- containers -----------------------------------------------------------------------------------------------------------


def test_a_container_is_started_by_its_lifetime_and_removed(docker):
    made = DockerSandbox("some/image", run_args=["--memory", "8g"], lifetime_sec=77)
    name = inside(made, lambda sb: _with_its_name(sb, docker))
    calls = [eval(line) for line in (docker / "calls").read_text().splitlines()]
    assert calls[0] == [
        "run", "--detach", "--rm", "--init", "--name", name, "--memory", "8g", "--entrypoint", "sleep", "some/image", "77",
    ]  # fmt: skip
    assert calls[1][:4] == ["exec", "--interactive", "--user", "worker"] and calls[-1][-1] == name
    assert not (docker / name).exists()


def test_no_command_line_shows_what_a_variable_of_a_command_holds(docker):
    variables = {"KEY": "s3cret", "PATH": "/usr/bin:/bin", "EMPTY": ""}
    out = ran(DockerSandbox("some/image"), 'echo "$KEY $PATH ${EMPTY-unset}"', env=variables)[1]
    assert out == "s3cret /usr/bin:/bin \n" and "s3cret" not in (docker / "calls").read_text()


async def _with_its_name(sb, docker):
    assert (await sb.exec('echo "$USER"', user="worker"))[1] == "worker\n"
    assert (docker / sb.sandbox_id).is_dir() and list((docker / sb.sandbox_id / "tmp").iterdir()) == []
    return sb.sandbox_id


def test_an_image_that_is_not_there(docker):
    with pytest.raises(SandboxError, match="no container of absent starts: Unable to find image"):
        ran(DockerSandbox("absent"), "true")


def test_a_machine_without_docker(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="`docker`, which is not on PATH"):
        ran(DockerSandbox("some/image"), "true")


# -- a service ------------------------------------------------------------------------------------------------------------


def served(work, **options):
    async def main():
        async with E2BSandbox("some/image", **options) as sb:
            return await work(sb)

    return run_in_no_time(main())


def test_a_sandbox_of_a_service_is_made_by_its_metadata_and_ended(service):
    service.events = ["said"]
    assert served(lambda sb: sb.exec("ls", user="agent", env={"A": "1"}, timeout=9)) == (0, "said", "")
    (create, run, kill) = service.calls
    assert create[1] == {"template": "md", "timeout": 3600, "metadata": {"image_of": "some/image"}}
    assert run[1] == {"cmd": "ls", "envs": {"A": "1"}, "user": "agent", "timeout": 9} and kill[0] == "kill"


def test_its_settings_are_variables(service, monkeypatch):
    monkeypatch.setenv("SWE_SANDBOX_LIFETIME_SEC", "60")
    monkeypatch.setenv("SWE_E2B_SANDBOX_SIZE", "small")
    monkeypatch.setenv("SLIME_AGENT_E2B_SANDBOX_SIZE", "xl")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "1")
    service.events = [Dropped()] * 9
    with pytest.raises(SandboxError, match="E2B sandbox sb-1: `true` failed: Dropped"):
        served(lambda sb: sb.exec("true"))
    assert service.calls[0][1]["template"] == "xl" and service.calls[0][1]["timeout"] == 60
    assert service.waits("run") == [1] and service.killed == 1


def test_a_transport_that_fails_is_waited_out(service):
    service.events = [Dropped("reset")] * 6 + ["at last"]
    assert served(lambda sb: sb.exec("ls"))[1] == "at last"
    assert service.waits("run") == [1, 2, 4, 8, 16, 32]
    service.events = [Dropped("reset")] * 7
    with pytest.raises(SandboxError, match="Dropped: reset"):
        served(lambda sb: sb.exec("ls"))


def test_waits_get_no_longer_than_32_seconds(service):
    service.events = [Dropped()] * 8
    served(lambda sb: sb.exec("ls"), rpc_retries=8)
    assert service.waits("run")[-3:] == [32, 32, 32]


def test_what_must_not_happen_twice_is_not_repeated(service):
    service.events = [Dropped("reset"), "never"]
    with pytest.raises(SandboxError, match="Dropped: reset"):
        served(lambda sb: sb.exec("git push", idempotent=False))
    assert [kind for kind, *_ in service.calls] == ["create", "run", "kill"]


def test_what_the_service_refuses_is_not_repeated(service):
    service.events = [NotFoundException("no such file")]
    with pytest.raises(SandboxError, match="reading /x failed: NotFoundException: no such file"):
        served(lambda sb: sb.read_file("/x"))
    assert service.waits("read") == []


def test_a_status_is_no_failure_of_the_service(service):
    service.events = [CommandExitException(2, "o", "e")]
    assert served(lambda sb: sb.exec("false")) == (2, "o", "e")
    service.events = [CommandExitException(2, "o", "e")]
    with pytest.raises(CommandFailed, match="status 2: e"):
        served(lambda sb: sb.exec("false", check=True))


def test_a_command_over_time_has_a_status_and_a_slow_way_there_is_repeated(service):
    service.events = ["hangs"]
    assert served(lambda sb: sb.exec("sleep 100", timeout=5)) == (EXIT_TIMED_OUT, "so far", "")
    service.events = [TimeoutException("the request was cancelled"), "then"]
    assert served(lambda sb: sb.exec("ls", timeout=5))[1] == "then"


def test_files_of_a_service(service, tmp_path):
    (tmp_path / "host").write_bytes(b"\xff")

    async def work(sb):
        await sb.write_file("/a", "täxt", user="agent")
        await sb.write_file("/b", tmp_path / "host")
        return await sb.read_file("/a"), await sb.read_file("/b")

    service.events = [Dropped()]
    assert served(work) == ("täxt", "\udcff")
    assert service.files == {"/a": "täxt".encode(), "/b": b"\xff"} and service.waits("write") == [1, 0]


def test_the_package_and_the_key_are_asked_for_by_name(service, monkeypatch):
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(UserError, match="the extra e2b .*: pip install e2b$"):
        served(lambda sb: sb.exec("true"))
    monkeypatch.delenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY")
    with pytest.raises(UserError, match="SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY is not set"):
        served(lambda sb: sb.exec("true"))
