"""Runs a program of a model, or a command of a sandbox, within limits that the kernel enforces. It is started as

    python -I -S -B limited.py '{"directory": "/tmp/x", "rlimits": {"CPU": 5}, "readable": ["/usr"]}' [COMMAND ARGUMENT...]

so it uses the standard library alone. Nothing outside of the directory can be changed. Without a command, standard input is a
Python program, which cannot start processes, open connections, or change modes of files. A command can do all that; it is
limited by the namespaces in which it is started, and with `"network": "none"` it gets no sockets whose names are files.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Sequence
from types import TracebackType

# Numbers of system calls per architecture (linux/audit.h, asm/unistd.h).
# `thread`: clone, which may make threads only.
# `absent`: clone3, whose flags a filter cannot read; without it libraries fall back on clone.
# `denied`: other calls that start a process or a program, open a connection, escape from the process group that is ended with
#     the program, or change the rights of files, which Landlock does not watch.
ARCHITECTURES = {
    "x86_64": {
        "audit": 0xC000003E,
        "thread": 56,
        "absent": 435,
        "socket": 41,
        # fork, vfork, execve, execveat, socket, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, unshare, setns;
        # prctl, setpgid, setsid; chmod, fchmod, fchmodat, fchmodat2, chown, fchown, lchown, fchownat
        "denied": (
            57, 58, 59, 322, 41, 101, 310, 311, 425, 272, 308, 157, 109, 112, 90, 91, 268, 452, 92, 93, 94, 260,
        ),
    },
    "aarch64": {
        "audit": 0xC00000B7,
        "thread": 220,
        "absent": 435,
        "socket": 198,
        # execve, execveat, socket, ptrace, process_vm_readv, process_vm_writev, io_uring_setup, unshare, setns; prctl,
        # setpgid, setsid; fchmod, fchmodat, fchmodat2, fchown, fchownat
        "denied": (221, 281, 198, 117, 270, 271, 425, 97, 268, 167, 154, 157, 52, 53, 452, 55, 54),
    },
}  # fmt: skip
CLONE_THREAD = 0x00010000
AF_UNIX, IO_URING_SETUP = 1, 425
CAPABILITY_VERSION = 0x20080522
X32_CALLS = 0x40000000
EPERM, ENOSYS = 1, 38
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
# Landlock (linux/landlock.h): its calls, the same on all architectures; rights of its third version, which knows them all.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION, BENEATH_PATH = 3, 1
ALL_RIGHTS, READ_RIGHTS, FILE_RIGHTS = (1 << 15) - 1, 0b1101, 1 << 1 | 1 << 2 | 1 << 14
# Paths of the interpreter and its libraries, and others that every program may read.
READABLE = (sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/proc", "/dev/urandom")
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Instructions of a filter: load a word of the call's description; compare it (equal, at least, any of the bits); return.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16


def filter_program(architecture: str) -> bytes:
    """The kernel's filter (struct sock_filter of linux/filter.h) for a Python program: no processes, no other programs, no
    connections."""
    numbers = ARCHITECTURES[architecture]
    program = [*_numbers_of(architecture), (EQUAL, 0, 1, numbers["absent"]), (RETURN, 0, 0, ERRNO | ENOSYS)]
    for number in numbers["denied"]:
        program += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | EPERM)]
    program += [
        (EQUAL, 0, 3, numbers["thread"]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (ANY_BIT, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, ERRNO | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def filter_of_named_sockets(architecture: str) -> bytes:
    """The filter for a command: no socket whose name could be a file, not by io_uring either. Socket pairs, which have no
    names, are allowed."""
    program = [
        *_numbers_of(architecture),
        (EQUAL, 0, 1, IO_URING_SETUP),
        (RETURN, 0, 0, ERRNO | ENOSYS),
        (EQUAL, 0, 3, ARCHITECTURES[architecture]["socket"]),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        (EQUAL, 0, 1, AF_UNIX),
        (RETURN, 0, 0, ERRNO | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _numbers_of(architecture: str) -> list[tuple[int, int, int, int]]:
    """The begin of a filter: it kills the process for calls of another architecture, and loads the number of the call."""
    return [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (EQUAL, 1, 0, ARCHITECTURES[architecture]["audit"]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, ERRNO | EPERM),
    ]


def landlock_version() -> int:
    """The kernel's version of Landlock, 0 for none. Below `LANDLOCK_VERSION` it does not watch truncation of files."""
    return max(ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1), 0)


def forbid_files_elsewhere(directory: str, readable: Sequence[str]) -> None:
    """Allow this process, irrevocably, to do anything below `directory`, to read and run files below `readable`, and no more.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handled = ctypes.c_uint64(ALL_RIGHTS)
    rules = libc.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(8), 0)
    allowed = {path: READ_RIGHTS if os.path.isdir(path) else READ_RIGHTS & FILE_RIGHTS for path in readable}
    allowed |= {directory: ALL_RIGHTS, "/dev/null": FILE_RIGHTS}
    for path, rights in allowed.items():
        if os.path.exists(path):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, opened))
            if libc.syscall(ADD_RULE, rules, BENEATH_PATH, rule, 0):
                raise OSError(ctypes.get_errno(), f"the kernel takes no rule for {path}")
            os.close(opened)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no rules for files")
    os.close(rules)


def give_up_capabilities() -> None:
    """Give up all capabilities of this process, irrevocably. With them it could undo its namespaces' read-only mounts.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "the kernel lets nobody give up capabilities")


def filter_calls(program: bytes) -> None:
    """Filter all system calls of this process, irrevocably. Raises OSError if the kernel refuses."""
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    described = Program(len(program) // 8, ctypes.addressof(instructions))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(described), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def tell_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a program's traceback without the two frames of this file, which would only cost a model tokens."""
    own = trace.tb_next.tb_next if trace and trace.tb_next else None
    sys.__excepthook__(kind, error.with_traceback(own), own)


def main() -> None:
    given = json.loads(sys.argv[1])
    command = sys.argv[2:]
    source = "" if command else sys.stdin.buffer.read().decode(errors="replace")
    for name, most in given["rlimits"].items():
        what = getattr(resource, f"RLIMIT_{name}")
        # Only the superuser may raise a hard limit that is set already.
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    os.chdir(given["directory"])
    forbid_files_elsewhere(given["directory"], given["readable"])
    architecture = os.uname().machine
    if command:
        if given.get("network") == "none":
            filter_calls(filter_of_named_sockets(architecture))
        give_up_capabilities()
        os.execvp(command[0], command)
    filter_calls(filter_program(architecture))
    sys.excepthook = tell_error
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
