"""Untrusted Python code, run where it can do no harm: no network, no files, no keys, and an end to everything.

Each run is two processes, of the code and of its tests, that `sandboxed.launcher` isolates by Linux namespaces, as root
in a container and as an ordinary user alike; where it may make none, in a container of bubblewrap's, or in one of a
command that the user gives. Nothing is run where none of these is possible.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_CODE = Path(__file__).with_name("sandboxed")
_START = "sys.path.insert(0, {!r}); from sandboxed import launcher; sys.path.pop(0); launcher.main()"
_COMMAND = (sys.executable, "-I", "-u", "-c", "import sys; " + _START.format(str(_CODE.parent)))
# For a container, which has nothing of ours: the first line of stdin is our code.
_UNPACK = "import base64, sys, tempfile; f = tempfile.NamedTemporaryFile(suffix='.zip'); r = sys.stdin.buffer.raw; "
_UNPACK += "f.write(base64.b64decode(b''.join(iter(lambda: r.read(1).strip(), b'')))); f.flush(); "
_UNPACK += "sys.path.insert(0, f.name); from sandboxed import launcher; launcher.main()"
_UNPACKED = ("python3", "-I", "-u", "-c", _UNPACK)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/home", "LANG": "C.UTF-8"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)  # a thread per core would exceed the limit on processes
# What the command of a container, which runs outside of it, may see of ours.
_OF_CONTAINERS = (
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "DOCKER_HOST",
    "CONTAINER_HOST",
)
_LAUNCHERS_RIGHTS = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_PTRACE")  # in bubblewrap, where we are root
_SLACK = 30.0  # seconds beyond Limits.wall in which the launcher must have answered
_ways: dict[tuple[str, ...], _Way] = {}  # what has passed the trial in this process, by the container asked for


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Each of its processes: `cpu` whole seconds of computing, `memory` bytes of address space, `file` bytes of one file,
    `open_files`. All together: `wall` seconds, `memory` bytes in use, `processes` and threads, `disk` bytes in all
    files, `output` bytes written to stdout and stderr.
    """

    cpu: int = 10
    wall: float = 30.0
    memory: int = 1 << 30
    processes: int = 32
    open_files: int = 128
    file: int = 16 << 20
    disk: int = 64 << 20
    output: int = 1 << 20


@dataclass(frozen=True)
class Program:
    """What is run: `candidate`, sources that run one after the other in one module, which has the name of each.

    `tests` run in another process, after `prompt`, which the task has beside the candidate's code; names that they do
    not define are the candidate's, always so `entry`. With `cases` they must have cases of unittest that run.
    """

    candidate: Mapping[str, str]
    tests: str = ""
    prompt: str = ""
    entry: str = ""
    cases: bool = False


@dataclass(frozen=True)
class Result:
    """How a run ended: `passed` where the candidate ran and its tests passed; `output` is the end of what was printed.

    `why` not: "time", "memory" or "output" for a limit of the whole run, "exit N" (also 0, before the end), "signal N".
    """

    passed: bool
    why: str
    output: str


class SandboxError(RuntimeError):
    """The sandbox itself failed, or the tests are none that it can judge; nothing is known about the code."""


@dataclass(frozen=True)
class _Way:
    """How runs are isolated: by namespaces, or by the container that a command starts."""

    command: tuple[str, ...]
    contained: bool = False
    first: bytes = field(default=b"", repr=False)  # of stdin
    environment: Mapping[str, str] = field(default_factory=lambda: _ENVIRONMENT)


async def run(program: Program, limits: Limits, container: Sequence[str] = ()) -> Result:
    """Run a candidate and its tests, whose folder is an empty temporary one.

    SandboxError where they could not be run, where a trial failed to isolate, or where the tests need what cannot be
    judged from another process, whatever the candidate.
    """
    return await _launch(await _find_way(tuple(container)), program, limits)


async def _launch(way: _Way, program: Program, limits: Limits) -> Result:
    settings = {"limits": asdict(limits), "parent": os.getpid(), "contained": way.contained}
    tests = {name: value for name, value in asdict(program).items() if name != "candidate"}
    messages = b"".join(map(_message, (settings, dict(program.candidate), tests)))
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*way.command, **pipes, env=way.environment, cwd="/")
    try:
        async with asyncio.timeout(limits.wall + _SLACK):
            answer, errors = await process.communicate(way.first + messages)
    except TimeoutError as error:
        raise SandboxError(f"the sandbox gave no answer within {limits.wall + _SLACK:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()  # what it started ends with it
            await process.wait()
    if not answer:
        raise SandboxError(f"the sandbox ended without an answer: {_last_line(errors.decode(errors='replace'))}")
    fields = json.loads(answer)
    for reason in ("error", "missing"):
        if reason in fields:
            raise SandboxError(fields[reason])
    return Result(**fields)


def _message(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(4, "big") + text


def unavailable(container: Sequence[str] = ()) -> str | None:
    """Why this machine cannot isolate code, in one line with the ways out; None where a trial run shows it can."""
    try:
        asyncio.run(_find_way(tuple(container)))
    except SandboxError as error:
        return (
            f"this machine cannot isolate untrusted code ({error}); allow user namespaces (Linux 5.14 or newer on "
            "x86_64; Ubuntu: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0; a container: a privileged one), "
            "or install bubblewrap, or set reward.metrics.pass_rate.container to a command that starts a container"
        )
    return None


async def _find_way(container: tuple[str, ...]) -> _Way:
    """The first way that passes the trial, which each is put to until one has. SandboxError where none does."""
    if container not in _ways:
        failed = []
        for name, way in _candidates(container).items():
            result = await _tried(way)
            if result is None:
                _ways[container] = way
                break
            failed.append(f"{name}: {result}")
        else:
            raise SandboxError("; ".join(failed))
    return _ways[container]


async def _tried(way: _Way) -> str | None:
    """Why a way does not isolate, or None."""
    limits = Limits()
    try:
        result = await _launch(way, Program({"trial": _TRIAL.format(processes=limits.processes)}), limits)
    except (SandboxError, OSError) as error:
        return str(error)
    return None if result.passed else f"the trial ended with {result.why}: {_last_line(result.output)}"


def _candidates(container: tuple[str, ...]) -> dict[str, _Way]:
    if container:
        seen = {name: os.environ[name] for name in _OF_CONTAINERS if name in os.environ}
        return {container[0]: _Way((*container, *_UNPACKED), True, _packed() + b"\n", seen)}
    ways = {"namespaces": _Way(_COMMAND)}
    if bubblewrap := shutil.which("bwrap"):
        ways["bubblewrap"] = _Way((*_wrapped(bubblewrap), *_COMMAND), contained=True)
    return ways


def _wrapped(bubblewrap: str) -> tuple[str, ...]:
    """bubblewrap's command line before that of the launcher."""
    words = [bubblewrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # who needs no user namespace, and becomes another user in there
        words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        words += [word for right in _LAUNCHERS_RIGHTS for word in ("--cap-add", right)]
    else:
        words += ["--unshare-all"]
    folders = {"/usr", sys.prefix, sys.base_prefix, str(_CODE)}
    above = {str(parent) for folder in (*folders, "/dev/null") for parent in Path(folder).parents} - {"/"}
    for folder in sorted(above):  # which only root could enter if they were left to it
        words += ["--dir", folder]
    for folder in sorted(folders):
        words += ["--ro-bind", folder, folder]
    for folder in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    for device in ("null", "full", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    words += ["--proc", "/proc", "--size", str(Limits.disk), "--perms", "1777", "--tmpfs", "/tmp"]
    words += ["--symlink", "/tmp", "/dev/shm"]
    return (*words, "--remount-ro", "/", "--chdir", "/tmp")


@cache
def _packed() -> bytes:
    """Our code as the text of a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(_CODE.glob("*.py")):
            archive.write(file, f"{_CODE.name}/{file.name}")
    return base64.b64encode(buffer.getvalue())


# What must not be possible, tried. Kernels before 5.14 count the processes of a user over all of the machine.
_TRIAL = """
import os, socket, signal
for folder in ("", "/usr", "/dev"):
    try:
        open(folder + "/trial", "w")
    except OSError:
        continue
    raise SystemExit("could write into " + folder)
if os.path.exists("/proc"):
    assert sum(map(str.isdigit, os.listdir("/proc"))) < 10, "could see processes"
for act in (socket.socket, lambda: os.chroot("/tmp"), lambda: os.kill(-1, 9)):
    try:
        act()
    except PermissionError:
        continue
    raise SystemExit("could open a socket, has capabilities or may signal others")
forked = 0
try:
    while forked <= {processes}:
        if os.fork() == 0:
            signal.pause()
        forked += 1
except BlockingIOError:
    assert forked, "could not start a process"
else:
    raise SystemExit("the limit on processes does not bind")
"""


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
