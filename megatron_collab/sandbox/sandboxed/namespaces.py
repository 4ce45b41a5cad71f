"""Isolation of a process: new namespaces, a root with only the interpreter in it, no privileges, resource limits.

If the process runs in a container already, namespaces and root are the container's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any

from .libc import call

NOBODY = 65534
HOME = "/home"
DEVICES = ("null", "full", "random", "urandom")  # not "zero": if shared, it is memory that is not counted

# linux/sched.h
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP

# linux/mount.h, linux/fcntl.h
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 0x1, 0x2
SYS_MOUNT_SETATTR = 442  # the same on every architecture

# linux/prctl.h, linux/capability.h
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CAPABILITY_VERSION_3 = 0x20080522


def enter_namespaces() -> None:
    """Move this process into new namespaces; its next child is process 1 of the new PID namespace.

    If this process is root, NOBODY inside maps to a user other than root outside: the kernel exempts root from the
    limit on processes.
    """
    user, group, launcher = os.geteuid(), os.getegid(), os.getpid()
    entered, failed = os.pipe(), os.pipe()
    helper = os.fork()  # only a process outside can write the user map
    if helper == 0:
        os.close(entered[1])
        if os.read(entered[0], 1):
            try:
                if user != 0:
                    write(f"/proc/{launcher}/setgroups", "deny")
                for kind, outside_id in (("gid", group), ("uid", user)):
                    lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if user == 0 else f"{NOBODY} {outside_id} 1\n"
                    write(f"/proc/{launcher}/{kind}_map", lines)
            except OSError as error:
                os.write(failed[1], f"{error.filename}: {error.strerror}".encode())
        os._exit(0)
    os.close(failed[1])
    call("unshare", NAMESPACES)
    os.write(entered[1], b"x")
    message = os.read(failed[0], 1024)
    os.waitpid(helper, 0)
    for end in (*entered, failed[0]):
        os.close(end)
    if message:
        raise OSError(1, message.decode())


def write(file: str, text: str) -> None:
    """Write in one call, as the maps of a user namespace require. Raises OSError with the file's name."""
    try:
        with open(file, "wb", buffering=0) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error


def new_root(disk: int) -> None:
    """Mount a read-only root, over /proc, with only what Python needs, and a writable /tmp of `disk` bytes."""
    write("/proc/self/oom_score_adj", "1000")  # killed first if memory runs out
    call("unshare", CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID, "size=1m,mode=755")
    os.chdir("/proc")
    os.mkdir("tmp")  # before the folders: the interpreter may lie in /tmp
    os.mkdir(HOME.strip("/"))
    mount("tmpfs", "tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=4096,mode=1777")
    folders = {"/usr", sys.prefix, sys.base_prefix}
    for folder in sorted(path for path in folders if not any(path.startswith(f"{outer}/") for outer in folders)):
        os.makedirs(f".{folder}", exist_ok=True)
        mount(folder, f".{folder}", None, MS_BIND | MS_REC)
    for folder in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), f".{folder}")
        elif os.path.isdir(folder):
            os.makedirs(f".{folder}")
            mount(folder, f".{folder}", None, MS_BIND | MS_REC)
    os.mkdir("dev")
    for device in DEVICES:
        os.close(os.open(f"dev/{device}", os.O_CREAT))
        mount(f"/dev/{device}", f"dev/{device}", None, MS_BIND)
    os.symlink("/tmp", "dev/shm")  # semaphores of multiprocessing
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, b".", AT_RECURSIVE, read_only, len(read_only))
    writable = struct.pack("QQQQ", 0, MOUNT_ATTR_RDONLY, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, b"tmp", 0, writable, len(writable))
    os.mkdir("tmp/run")
    os.chmod("tmp/run", 0o777)  # for the unprivileged user
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp/run")


def mount_home(disk: int) -> None:
    """Mount a home folder that no other process sees, because libraries read settings from it."""
    call("unshare", CLONE_NEWNS)
    mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=1024,mode=777")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    try:
        call("mount", *encoded, ctypes.c_ulong(flags), data.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source} on {target})") from error


def limit(limits: Mapping[str, Any]) -> None:
    """Set the resource limits of this process and its children."""
    sizes = {"CPU": limits["cpu"], "FSIZE": limits["file"], "NOFILE": limits["open_files"]}
    for kind, value in (sizes | {"NPROC": limits["processes"], "CORE": 0}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))


def drop_privileges() -> None:
    """Become NOBODY, without capabilities and without a way to gain any; end with the parent process."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # changing the user resets it


def hide_memory(hidden: bool) -> None:
    """Deny (or allow) processes of the same user access to this process's memory, as by /proc."""
    call("prctl", PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)
