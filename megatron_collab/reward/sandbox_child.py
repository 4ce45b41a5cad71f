"""What `sandbox.py` starts: a launcher that isolates itself, forks the program and watches it until it ends.

The file runs on its own with `python -I`, an almost empty environment, JSON on stdin and JSON on stdout:
{"passed", "why", "output"}, or {"error"} where the machine did not let it isolate the program. Standard library only.

The program is process 1 of new namespaces, so all that it started ends with it. It sees the interpreter and /usr,
read-only, and no /proc, and has no capability, the user and group 65534, resource limits and a system call filter.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import secrets
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

NOBODY = 65534
TICK = 0.02  # seconds between two looks at the program's memory
TAIL = 4096  # bytes of the program's output that are kept
READY = b"ready"
DEVICES = ("null", "zero", "full", "random", "urandom")

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

# linux/prctl.h, linux/capability.h, linux/seccomp.h, linux/audit.h, linux/bpf_common.h
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CAPABILITY_VERSION_3 = 0x20080522
SECCOMP_MODE_FILTER = 2
SECCOMP_ALLOW, SECCOMP_ERRNO, SECCOMP_KILL = 0x7FFF0000, 0x00050000, 0x80000000
AUDIT_ARCH_X86_64 = 0xC000003E
BPF_LOAD, BPF_RETURN, BPF_EQUAL, BPF_GREATER_EQUAL, BPF_ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
EPERM, ENOSYS = 1, 38

# Numbers of x86_64. `clone3` hides its flags from a filter, and the C library falls back to `clone`.
CLONE, CLONE3 = 56, 435
# What reaches out of the namespaces, and what takes memory that no limit below counts.
NAMESPACE_CALLS = {"unshare": 272, "setns": 308}
PROCESS_CALLS = {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311}
KEY_CALLS = {"add_key": 248, "request_key": 249, "keyctl": 250}
KERNEL_CALLS = {"socket": 41, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425}
MEMORY_CALLS = {"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68}
DENIED = NAMESPACE_CALLS | PROCESS_CALLS | KEY_CALLS | KERNEL_CALLS | MEMORY_CALLS

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """A function of the C library that returns -1 and sets errno where it fails; then OSError names it."""
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    job = json.load(sys.stdin)
    output, verdict, nonce = os.pipe(), os.pipe(), os.pipe()
    try:
        enter_namespaces()
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != job["parent"]:  # it has ended already
            os.kill(os.getpid(), signal.SIGKILL)
        program = os.fork()
    except OSError as error:
        answer = {"error": error.strerror}
    else:
        if program == 0:
            for end in (output[0], verdict[0], nonce[1]):
                os.close(end)
            play(job["sources"], job["limits"], output[1], verdict[1], nonce[0])
        for end in (output[1], verdict[1], nonce[0]):
            os.close(end)
        answer = judge(program, job["limits"], output[0], verdict[0], nonce[1])
    print(json.dumps(answer))


def judge(program: int, limits: Mapping[str, Any], output: int, verdict: int, nonce: int) -> dict[str, Any]:
    """How the program fared; the last three are our ends of the pipes to it."""
    said = os.read(verdict, len(READY))
    if said != READY:
        said += os.read(verdict, 1024)
        return {"error": said.decode() or "the program's process ended while it was set up"}
    secret = secrets.token_bytes(16)
    with suppress(BrokenPipeError):  # it has left already, which must not look like a failure of ours
        os.write(nonce, secret)
    why, tail = watch(program, output, limits)
    passed = not why and os.read(verdict, len(secret) + 1) == secret
    return {"passed": passed, "why": "" if passed else why or "exit 0", "output": tail.decode(errors="replace")}


def enter_namespaces() -> None:
    """Move this process into new namespaces; its next child is process 1 of the new PID namespace.

    NOBODY in there is another user outside where we are root: the kernel exempts root from the limit on processes.
    """
    user, group, launcher = os.geteuid(), os.getegid(), os.getpid()
    entered, failed = os.pipe(), os.pipe()
    helper = os.fork()  # only a process outside can write the map of users
    if helper == 0:
        os.close(entered[1])
        if os.read(entered[0], 1):
            try:
                if user != 0:
                    write(f"/proc/{launcher}/setgroups", "deny")
                for kind, ours in (("gid", group), ("uid", user)):
                    lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if user == 0 else f"{NOBODY} {ours} 1\n"
                    write(f"/proc/{launcher}/{kind}_map", lines)
            except OSError as error:
                os.write(failed[1], f"{error.filename}: {error.strerror}".encode())
        os._exit(0)
    os.close(failed[1])
    call("unshare", NAMESPACES)
    os.write(entered[1], b"x")
    said = os.read(failed[0], 1024)
    os.waitpid(helper, 0)
    for end in (*entered, failed[0]):
        os.close(end)
    if said:
        raise OSError(EPERM, said.decode())


def write(file: str, text: str) -> None:
    """One write, as the maps of a user namespace need it; OSError with the file's name."""
    try:
        with open(file, "wb", buffering=0) as opened:
            opened.write(text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, file) from error


def watch(program: int, output: int, limits: Mapping[str, Any]) -> tuple[str, bytes]:
    """Why the program failed ("" after exit code 0) and the end of its output; it is ended where it exceeds a limit."""
    deadline = time.monotonic() + limits["wall"]
    why, tail, written = "", b"", 0
    ended = os.pidfd_open(program)
    poll = select.poll()
    for descriptor in (ended, output):
        poll.register(descriptor, select.POLLIN)
    while not why:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * TICK)]
        if output in ready:
            chunk = os.read(output, 1 << 16)
            written += len(chunk)
            tail = (tail + chunk)[-TAIL:]
            if not chunk:
                poll.unregister(output)
        elif ended in ready:
            break
        if written > limits["output"]:
            why = "output"
        elif time.monotonic() > deadline:
            why = "time"
        elif resident(os.getpid()) > limits["memory"]:
            why = "memory"
    os.kill(program, signal.SIGKILL)
    _, status, used = os.wait4(program, 0)
    code = os.waitstatus_to_exitcode(status)
    if not why and code < 0:
        computed = used.ru_utime + used.ru_stime
        # The limit counts by samples, which overrate a program on busy cores.
        why = "time" if computed > 0.5 * limits["cpu"] else f"signal {-code}"
    return why or (f"exit {code}" if code else ""), tail


def resident(root: int) -> int:
    """Bytes of memory of all processes below `root`; what several share counts for each."""
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if process != root:
                with open(f"/proc/{process}/statm") as file:
                    total += int(file.read().split()[1]) * resource.getpagesize()
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
    return total


def play(sources: Mapping[str, str], limits: Mapping[str, Any], output: int, verdict: int, nonce: int) -> NoReturn:
    """Be the program: isolate, run the sources, then pass the nonce from one pipe to the other.

    The nonce stays in its pipe until the sources have run to their end, so neither an exit nor anything that they print
    passes for success. Code that searches the descriptors of its own process for the pipes could still forge it.
    """
    try:
        new_root(limits["disk"])
        sizes = {"CPU": limits["cpu"], "FSIZE": limits["file"], "NOFILE": limits["open_files"]}
        for kind, value in (sizes | {"NPROC": limits["processes"], "CORE": 0}).items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (value, value))
        drop_privileges()
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # changing the user resets it
        filter_system_calls()
        nothing = os.open("/dev/null", os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        os.close(nothing)
        os.close(output)
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    except OSError as error:
        os.write(verdict, f"{error.strerror}".encode())
        os._exit(1)
    os.write(verdict, READY)  # fails where the launcher ended before it could take us along
    sys.argv = [""]
    read, write, leave = os.read, os.write, os._exit  # the sources may replace them
    run(sources)
    write(verdict, read(nonce, 16))
    leave(0)


def run(sources: Mapping[str, str]) -> None:
    """Execute the sources one after the other in one module, which is known by the name of each.

    The last one judges the others, so what they replaced must not decide whether it runs: all are compiled before the
    first runs, each finds the first one's builtins, and the last one the modules loaded before, with a unittest that no
    other has imported. Only local names are used once the first has run.
    """
    codes = tuple((name, compile(source, f"<{name}>", "exec", dont_inherit=True)) for name, source in sources.items())
    *_, last = sources
    if "unittest" in sources[last]:
        import unittest  # noqa: F401  # 40 ms of CPU time, for those alone who need it
    execute, settrace, setprofile = exec, sys.settrace, sys.setprofile
    modules, names = sys.modules, vars(builtins)
    modules_before, names_before = modules.copy(), names.copy()
    module = types.ModuleType("sandbox")
    namespace = vars(module)
    for name, code in codes:
        settrace(None)  # a tracer can skip lines
        setprofile(None)
        names.update(names_before)
        for loaded in [*modules]:
            if loaded.partition(".")[0] == "unittest":
                del modules[loaded]
        if name == last:
            modules.update(modules_before)
        modules[name] = module
        namespace.update(__name__=name, __builtins__=names)
        execute(code, namespace)


def new_root(disk: int) -> None:
    """A root with nothing in it but what Python needs, read-only, over /proc; /tmp of `disk` bytes to write into."""
    write("/proc/self/oom_score_adj", "1000")  # where memory is short, this goes first
    call("unshare", CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID, "size=1m,mode=755")
    os.chdir("/proc")
    os.mkdir("tmp")  # before the folders: the interpreter may lie in /tmp
    mount("tmpfs", "tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=4096,mode=1777")
    folders = {"/usr", sys.prefix, sys.base_prefix}
    for folder in sorted(each for each in folders if not any(each.startswith(f"{outer}/") for outer in folders)):
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
    os.chmod("tmp/run", 0o777)  # for the user that it will run as
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp/run")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    try:
        call("mount", *encoded, ctypes.c_ulong(flags), data.encode())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({source} on {target})") from error


def drop_privileges() -> None:
    """Become NOBODY, without capabilities, and without a way to gain any."""
    if os.geteuid() == 0:
        os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_system_calls() -> None:
    """Refuse the system calls of DENIED, and new namespaces; end what calls by another architecture's numbers."""
    if os.uname().machine != "x86_64":
        raise OSError(0, f"no table of system calls for {os.uname().machine}")
    steps = [(BPF_LOAD, 0, 0, 4), (BPF_EQUAL, 1, 0, AUDIT_ARCH_X86_64), (BPF_RETURN, 0, 0, SECCOMP_KILL)]
    steps += [(BPF_LOAD, 0, 0, 0), (BPF_GREATER_EQUAL, 0, 1, 0x40000000), (BPF_RETURN, 0, 0, SECCOMP_KILL)]
    for number, errno in (*((number, EPERM) for number in DENIED.values()), (CLONE3, ENOSYS)):
        steps += [(BPF_EQUAL, 0, 1, number), (BPF_RETURN, 0, 0, SECCOMP_ERRNO | errno)]
    steps += [(BPF_EQUAL, 0, 3, CLONE), (BPF_LOAD, 0, 0, 16), (BPF_ANY_BIT, 0, 1, NAMESPACES | CLONE_NEWNS)]
    steps += [(BPF_RETURN, 0, 0, SECCOMP_ERRNO | EPERM), (BPF_RETURN, 0, 0, SECCOMP_ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", op, yes, no, k) for op, yes, no, k in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


if __name__ == "__main__":
    main()
