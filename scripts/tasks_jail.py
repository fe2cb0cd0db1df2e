"""Runs one program of a language model, as a process of its own that may read files, compute and print, and no more.

Started by tasks_sandbox.py: `python tasks_jail.py LIMITS`, on standard input the token to print when the program has
ended by itself, a newline, and the program. A seccomp filter, which needs no privileges, ends the process at any other
system call: no second process or thread, no signal, no socket, no file opened for writing, made or removed. It can read
what its user can, and has no way but 64 KiB of print to tell. Linux on x86_64 and aarch64; exits with 97 elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys

UNSUPPORTED = 97
_PURE = {
    # Numbers of what a computing Python calls. Names: asm/unistd.h of the kernel.
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "mmap": 9, "mprotect": 10,
        "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17,
        "writev": 20, "access": 21, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60,
        "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrusage": 98, "sysinfo": 99, "times": 100,
        "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "sigaltstack": 131,
        "gettid": 186, "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217, "restart_syscall": 219,
        "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "newfstatat": 262,
        "readlinkat": 267, "faccessat": 269, "getrandom": 318, "statx": 332, "rseq": 334, "faccessat2": 439,
    },
    "aarch64": {
        "getcwd": 17, "faccessat": 48, "close": 57, "getdents64": 61, "lseek": 62, "read": 63, "write": 64,
        "writev": 66, "pread64": 67, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94,
        "futex": 98, "nanosleep": 101, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115,
        "sched_getaffinity": 123, "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134,
        "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "uname": 160, "getrusage": 165, "gettimeofday": 169,
        "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178,
        "sysinfo": 179, "brk": 214, "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233,
        "getrandom": 278, "statx": 291, "rseq": 293, "faccessat2": 439,
    },
}  # fmt: skip
_IOCTL = {"x86_64": 16, "aarch64": 29}
_OPEN = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}
"""System calls that open files, and which argument holds the flags."""
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_WRITING = 0o3 | 0o100 | 0o1000 | 0o20000000  # O_ACCMODE, O_CREAT, O_TRUNC, __O_TMPFILE
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_ENOTTY = 25  # what `is this a terminal?` answers
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


def limit(*, cpu_s: int, memory_bytes: int) -> None:
    """What holds even where the filter allows the call: processor time, memory, and no bytes in files at all."""
    resource.setrlimit(
        resource.RLIMIT_CPU, (cpu_s, cpu_s + 1)
    )  # a signal that says why, a second before the end
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def filter_program(machine: str) -> bytes:
    """The filter in the kernel's form, a list of (code, jump if true, jump if false, value)."""
    steps = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL)]
    steps.append((_LOAD, 0, 0, _NUMBER_AT))
    for number in _PURE[machine].values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_EQUAL, 0, 1, _IOCTL[machine]), (_RETURN, 0, 0, _REFUSE | _ENOTTY)]
    for number, flags in _OPEN[machine].items():
        steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * flags)]
        steps += [(_ANY_BIT, 0, 1, _WRITING), (_RETURN, 0, 0, _KILL), (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _KILL))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def forbid() -> None:
    """Install the filter; there is no way back."""
    if sys.platform != "linux" or platform.machine() not in _PURE:
        print(
            f"the sandbox needs Linux on {' or '.join(_PURE)}, this is {sys.platform} on {platform.machine()}"
        )
        sys.exit(UNSUPPORTED)
    steps = filter_program(platform.machine())
    held = ctypes.create_string_buffer(steps, len(steps))
    found = _Filter(len(steps) // 8, ctypes.cast(held, ctypes.c_void_p))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(set_seccomp, by_filter, ctypes.byref(found), 0, 0):
        print(f"the kernel takes no seccomp filter: {os.strerror(ctypes.get_errno())}")
        sys.exit(UNSUPPORTED)


def main() -> None:
    token, _, program = sys.stdin.buffer.read().decode().partition("\n")
    os.environ.clear()
    limit(**json.loads(sys.argv[1]))
    forbid()
    try:
        exec(compile(program, "candidate.py", "exec"), {"__name__": "__main__"})
    except Exception as error:  # said in one line: printing a traceback duplicates file descriptors
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    os.write(1, f"\n{token}\n".encode())


if __name__ == "__main__":
    main()
