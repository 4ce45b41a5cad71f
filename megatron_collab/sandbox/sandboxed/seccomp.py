"""Allowlist of the system calls of code in the sandbox, some only with certain arguments, on x86_64.

Calls that reach other processes, the network, the machine or other namespaces are not allowed, nor are those that take
memory that is not counted. Numbers are those of x86_64's table.
"""

from __future__ import annotations

import ctypes
import os
import struct

from .libc import call

# linux/prctl.h, linux/seccomp.h, linux/audit.h, linux/bpf_common.h
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
AUDIT_ARCH_X86_64, X32 = 0xC000003E, 0x40000000
LOAD, RETURN, EQUAL, GREATER, GREATER_EQUAL, ANY_BIT = 0x20, 0x06, 0x15, 0x25, 0x35, 0x45
EPERM, ENOSYS = 1, 38

FILES = {
    **{"read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "pread64": 17},
    **{"pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "dup": 32, "dup2": 33, "sendfile": 40, "flock": 73},
    **{"fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80},
    **{"fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88},
    **{"readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "umask": 95, "utime": 132},
    **{"statfs": 137, "fstatfs": 138, "sync": 162, "readahead": 187, "getxattr": 191, "lgetxattr": 192},
    **{"fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "getdents64": 217, "fadvise64": 221},
    **{"utimes": 235, "openat": 257, "mkdirat": 258, "fchownat": 260, "futimesat": 261, "newfstatat": 262},
    **{"unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268},
    **{"faccessat": 269, "utimensat": 280, "fallocate": 285, "dup3": 292, "preadv": 295, "pwritev": 296, "syncfs": 306},
    **{"renameat2": 316, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332, "close_range": 436},
    **{"openat2": 437, "faccessat2": 439},
}
WAITING = {
    **{"poll": 7, "select": 23, "pipe": 22, "epoll_create": 213, "epoll_wait": 232, "epoll_ctl": 233, "pselect6": 270},
    **{"ppoll": 271, "epoll_pwait": 281, "signalfd": 282, "timerfd_create": 283, "eventfd": 284, "signalfd4": 289},
    **{"timerfd_settime": 286, "timerfd_gettime": 287, "eventfd2": 290, "epoll_create1": 291, "pipe2": 293},
    **{"epoll_pwait2": 441, "sendto": 44, "recvfrom": 45, "shutdown": 48, "getsockname": 51, "getpeername": 52},
    **{"getsockopt": 55},
}
MEMORY = {"mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28}
PROCESSES = {
    **{"rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "pause": 34, "getpid": 39},
    **{"fork": 57, "vfork": 58, "execve": 59, "exit": 60, "wait4": 61, "getrlimit": 97, "getrusage": 98, "times": 100},
    **{"getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "setpgid": 109, "getppid": 110, "getpgrp": 111},
    **{"setsid": 112, "getgroups": 115, "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124},
    **{"rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "getpriority": 140},
    **{"sched_getparam": 143, "sched_getscheduler": 145, "sched_get_priority_max": 146, "sched_get_priority_min": 147},
    **{"prctl": 157, "arch_prctl": 158, "setrlimit": 160, "gettid": 186, "futex": 202, "sched_getaffinity": 204},
    **{"set_tid_address": 218, "exit_group": 231, "get_mempolicy": 239, "waitid": 247, "set_robust_list": 273},
    **{"restart_syscall": 219},
    **{"get_robust_list": 274, "getcpu": 309, "sched_getattr": 315, "membarrier": 324, "rseq": 334, "pidfd_open": 434},
    **{"futex_waitv": 449},
}
TIME = {
    **{"nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "gettimeofday": 96, "time": 201},
    **{"timer_create": 222, "timer_settime": 223, "timer_gettime": 224, "timer_getoverrun": 225, "timer_delete": 226},
    **{"clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230},
}
SYSTEM = {"uname": 63, "sysinfo": 99, "getrandom": 318}
ALLOWED = FILES | WAITING | MEMORY | PROCESSES | TIME | SYSTEM

# `clone3` hides its flags from a filter, so it fails as on an older kernel; the C library falls back to `clone`.
CLONE3, NEWEST = 435, 451
CLONE, CLONE_NAMESPACES = 56, 0x7E020080  # time namespaces too
MMAP, MAP_SHARED, MAP_ANONYMOUS = 9, 0x1, 0x20  # shared memory without a file is not counted after it is unmapped
SOCKETPAIR, AF_UNIX = 53, 1
PRLIMIT = 302  # for this process only
FCNTL, SIGNALS_AND_PIPES = 72, (8, 10, 15, 1031)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETPIPE_SZ
IOCTL, TERMINALS = 16, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, …
SIGNALS = {"kill": 62, "tkill": 200, "tgkill": 234}  # to this process and its children


def argument(index: int) -> int:
    """Offset of the low half of an argument in `struct seccomp_data`."""
    return 16 + 8 * index


def filter_system_calls() -> None:
    """Allow only the calls above from now on; others fail with EPERM. Raises OSError on another architecture."""
    if os.uname().machine != "x86_64":
        raise OSError(0, f"no table of system calls for {os.uname().machine}")
    steps = program(os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    call(
        "prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)), 0, 0
    )


def program(process: int) -> list[tuple[int, int, int, int]]:
    """The filter of the process with this id: (operation, steps to skip if true, steps to skip if false, operand)."""
    refuse, allow = (RETURN, 0, 0, ERRNO | EPERM), (RETURN, 0, 0, ALLOW)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL)]
    steps += [(LOAD, 0, 0, 0), (GREATER_EQUAL, 0, 1, X32), (RETURN, 0, 0, KILL)]
    steps += [(EQUAL, 1, 0, CLONE3), (GREATER, 0, 1, NEWEST), (RETURN, 0, 0, ERRNO | ENOSYS)]
    for number in ALLOWED.values():
        steps += [(EQUAL, 0, 1, number), allow]
    bodies = [([CLONE], [(LOAD, 0, 0, argument(0)), (ANY_BIT, 0, 1, CLONE_NAMESPACES), refuse, allow])]
    shared = [(LOAD, 0, 0, argument(3)), (ANY_BIT, 0, 2, MAP_SHARED), (ANY_BIT, 0, 1, MAP_ANONYMOUS), refuse, allow]
    bodies += [([MMAP], shared)]
    bodies += [([SOCKETPAIR], [(LOAD, 0, 0, argument(0)), (EQUAL, 1, 0, AF_UNIX), refuse, allow])]
    bodies += [([PRLIMIT], [(LOAD, 0, 0, argument(0)), (EQUAL, 1, 0, 0), refuse, allow])]
    fcntl = [(EQUAL, len(SIGNALS_AND_PIPES) - at, 0, command) for at, command in enumerate(SIGNALS_AND_PIPES)]
    bodies += [([FCNTL], [(LOAD, 0, 0, argument(1)), *fcntl, allow, refuse])]
    ioctl = [(EQUAL, len(TERMINALS) - at, 0, request) for at, request in enumerate(TERMINALS)]
    bodies += [([IOCTL], [(LOAD, 0, 0, argument(1)), *ioctl, refuse, allow])]
    # Process groups and "all processes" are negative, i.e. large unsigned numbers; 0 is the process's own group.
    to_children = [(EQUAL, 3, 0, 0), (GREATER_EQUAL, 0, 1, process), (GREATER_EQUAL, 0, 1, 1 << 31), refuse, allow]
    bodies += [([*SIGNALS.values()], [(LOAD, 0, 0, argument(0)), *to_children])]
    for numbers, body in bodies:
        for number in numbers:
            steps += [(EQUAL, 0, len(body), number), *body]
    return [*steps, refuse]
