"""What commands of a sandbox of this machine cannot reach: modes of other files, sockets in them, memory that is shared."""

import asyncio
import ctypes
import os
import socket
import sys

import pytest

from slime.agent.sandbox import LocalSandbox, SandboxError


def inside(made, work):
    """What the coroutine `work(sandbox)` returns, in `made`."""

    async def main():
        async with made as entered:
            return await work(entered)

    return asyncio.run(main())


def ran(made, cmd):
    return inside(made, lambda sb: sb.exec(cmd))


@pytest.mark.parametrize("network", ["none", "host"])
@pytest.mark.parametrize(
    "cmd", ["chmod 000 {0}", "touch -d 2001-01-01 {0}", "chmod 000 $(dirname {0})", "chown {1} {0}"]
)
def test_modes_owners_and_times_of_files_elsewhere_stay(tmp_path, cmd, network):
    file = tmp_path / "own"
    file.write_text("x")
    before = file.stat(), tmp_path.stat()
    code, _, err = ran(LocalSandbox(network=network), cmd.format(file, f"{os.getuid()}:{os.getgid()}"))
    assert code != 0 and "Read-only file system" in err
    assert (file.stat(), tmp_path.stat()) == before


REMOUNTS = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(442, -100, b"/", 0x8000, struct.pack("=4Q", 0, 1, 0, 0), ctypes.c_size_t(32)), ctypes.get_errno())
"""


def test_commands_have_no_rights_by_which_files_could_be_changed_again():
    async def work(sb):
        await sb.write_file("remounts.py", REMOUNTS)
        plain = await sb.exec(f"{sys.executable} remounts.py; grep CapEff /proc/self/status")
        nested = await sb.exec(f"unshare --user --map-root-user --mount {sys.executable} remounts.py")
        return plain[1].split(), nested[1].split()

    plain, nested = inside(LocalSandbox(), work)
    assert plain[:2] == ["-1", "1"] and int(plain[-1], 16) == 0 and nested[:2] in ([], ["-1", "1"])


def test_in_their_directory_commands_change_modes_and_times():
    cmd = "echo 'echo run' > x; chmod 700 x; touch -d 2001-01-01 x; ./x; stat -c '%a %Y' x; umask; mkdir d; rmdir d"
    _, out, err = ran(LocalSandbox(), f"export TZ=UTC; {cmd}")
    assert out.split()[:3] == ["run", "700", "978307200"] and err == ""


SOCKETS = """
import socket, sys
left, right = socket.socketpair()
left.send(b"pair")
print(right.recv(9))
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


def test_no_socket_of_the_machine_is_reached_without_its_network(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        async def work(sb):
            await sb.write_file("sockets.py", SOCKETS)
            return await sb.exec(f"{sys.executable} sockets.py {tmp_path}/s")

        code, out, err = inside(LocalSandbox(), work)
        assert code == 1 and out.startswith("b'pair'\n") and "Operation not permitted" in err


def test_shared_memory_of_the_machine_is_its_own():
    libc = ctypes.CDLL(None)
    segment = libc.shmget(0, 4096, 0o1600)
    try:
        ran(LocalSandbox(), f"ipcrm -m {segment}")
        assert libc.shmctl(segment, 2, bytes(256)) == 0
    finally:
        libc.shmctl(segment, 0, None)


def test_a_file_with_a_name_that_is_not_utf_8_cannot_be_written_over_its_directory():
    async def work(sb):
        await sb.write_file("d\udcff/file", "x")
        with pytest.raises(SandboxError, match="cannot be written: .*[Dd]irectory"):
            await sb.write_file("d\udcff", "y")
        return await sb.read_file("d\udcff/file")

    assert inside(LocalSandbox(), work) == "x"
