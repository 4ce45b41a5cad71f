"""Runs untrusted Python code in isolation: no network, no files, no keys, and a limit on every resource.

Each run is two processes, one for the code and one for its tests. `sandboxed.launcher` isolates them with Linux
namespaces, as root in a container and as an ordinary user alike. If namespaces are not permitted, they run in
bubblewrap, or in a container that a user's command starts. If none of these works, no code is run.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
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

from megatron_collab.sandbox.sandboxed.launcher import PATIENCE

_logger = logging.getLogger(__name__)
_CODE = Path(__file__).with_name("sandboxed")
_START = "sys.path.insert(0, {!r}); from sandboxed import launcher; sys.path.pop(0); launcher.main()"
_COMMAND = (sys.executable, "-I", "-u", "-c", "import sys; " + _START.format(str(_CODE.parent)))
# For a container, which does not have this package: the first line of stdin is the sandbox's code.
_UNPACK = "import base64, sys, tempfile; f = tempfile.NamedTemporaryFile(suffix='.zip'); r = sys.stdin.buffer.raw; "
_UNPACK += "f.write(base64.b64decode(b''.join(iter(lambda: r.read(1).strip(), b'')))); f.flush(); "
_UNPACK += "sys.path.insert(0, f.name); from sandboxed import launcher; launcher.main()"
_UNPACKED = ("python3", "-I", "-u", "-c", _UNPACK)
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/home", "LANG": "C.UTF-8"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)  # a thread per core would exceed the limit on processes
# Environment variables that are passed to a container's command, which itself runs outside the container.
_CONTAINER_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "DOCKER_HOST",
    "CONTAINER_HOST",
)
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYS_PTRACE")  # in bubblewrap, as root
_SLACK = 30.0  # seconds after the longest run by which the launcher must have answered
_ways: dict[tuple[str, ...], _Way] = {}  # by container command: what passed the trial in this process


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run.

    Per process: `cpu` seconds of CPU time (an integer), `memory` bytes of address space, `file` bytes of one file,
    `open_files`. All processes together: `wall` seconds, without the time of waiting for a processor, `memory` bytes
    in use, `processes` and threads, `disk` bytes in all files, `output` bytes written to stdout and stderr.
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
    """The code of a run: `candidate`, sources that are executed in order in one module, which takes the name of each.

    `tests` run in another process, after `prompt`, the code of the task itself. Names that the tests do not define are
    the candidate's; `entry` always is. With `cases` the tests must contain unittest cases that run.
    """

    candidate: Mapping[str, str]
    tests: str = ""
    prompt: str = ""
    entry: str = ""
    cases: bool = False


@dataclass(frozen=True)
class Result:
    """How a run ended: `passed` if the candidate ran and its tests passed; `output` is the end of the printed text.

    `why` it failed: "time", "memory" or "output" for a limit of the run, "exit N" (also 0, if early), "signal N", or
    "fault" if the sandbox failed after the code had begun, since the code may be the cause.
    """

    passed: bool
    why: str
    output: str


class SandboxError(RuntimeError):
    """The sandbox failed before the code began, or it cannot judge these tests; nothing is known about the code."""


@dataclass(frozen=True)
class _Way:
    """How runs are isolated: by namespaces, or by the container that `command` starts."""

    command: tuple[str, ...]
    contained: bool = False
    first: bytes = field(default=b"", repr=False)  # of stdin
    environment: Mapping[str, str] = field(default_factory=lambda: _ENVIRONMENT)


async def run(program: Program, limits: Limits, container: Sequence[str] = ()) -> Result:
    """Run a candidate and its tests in an empty temporary folder.

    Raises SandboxError if they could not be run, if the trial shows no isolation, or if no candidate could be judged
    by these tests from another process.
    """
    return await _launch(await _find_way(tuple(container)), program, limits)


async def _launch(way: _Way, program: Program, limits: Limits) -> Result:
    settings = {"limits": asdict(limits), "parent": os.getpid(), "contained": way.contained}
    tests = {name: value for name, value in asdict(program).items() if name != "candidate"}
    messages = b"".join(map(_message, (settings, dict(program.candidate), tests)))
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*way.command, **pipes, env=way.environment, cwd="/")
    seconds = PATIENCE * limits.wall + _SLACK
    try:
        async with asyncio.timeout(seconds):
            answers, errors = await process.communicate(way.first + messages)
    except TimeoutError as error:
        raise SandboxError(f"the sandbox did not answer within {seconds:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()  # its children end with it
            await process.wait()
    fault = _last_line(errors.decode(errors="replace"))
    if not answers:
        raise SandboxError(f"the sandbox ended without an answer: {fault}")
    fields = json.loads(answers.splitlines()[-1])
    if fields.get("why") == "fault":
        _logger.warning(f"the sandbox failed after a program had begun, which counts as a failure of it: {fault}")
    for reason in ("error", "missing"):
        if reason in fields:
            raise SandboxError(fields[reason])
    return Result(**fields)


def _message(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(4, "big") + text


def unavailable(container: Sequence[str] = ()) -> str | None:
    """Why this machine cannot isolate code, in one line with the remedies; None if a trial run shows that it can."""
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
    """The first way that passes the trial. Raises SandboxError if none does."""
    if container not in _ways:
        failed = []
        for name, way in _candidates(container).items():
            result = await _trial_failure(way)
            if result is None:
                _ways[container] = way
                break
            failed.append(f"{name}: {result}")
        else:
            raise SandboxError("; ".join(failed))
    return _ways[container]


async def _trial_failure(way: _Way) -> str | None:
    """Why a way does not isolate, or None if it does."""
    limits = Limits()
    try:
        result = await _launch(way, Program({"trial": _TRIAL.format(processes=limits.processes)}), limits)
    except (SandboxError, OSError) as error:
        return str(error)
    return None if result.passed else f"the trial ended with {result.why}: {_last_line(result.output)}"


def _candidates(container: tuple[str, ...]) -> dict[str, _Way]:
    if container:
        environment = {name: os.environ[name] for name in _CONTAINER_VARIABLES if name in os.environ}
        return {container[0]: _Way((*container, *_UNPACKED), True, _code_archive() + b"\n", environment)}
    ways = {"namespaces": _Way(_COMMAND)}
    if bubblewrap := shutil.which("bwrap"):
        ways["bubblewrap"] = _Way((*_bubblewrap_command(bubblewrap), *_COMMAND), contained=True)
    return ways


def _bubblewrap_command(bubblewrap: str) -> tuple[str, ...]:
    """bubblewrap's part of the command line, which precedes the launcher's."""
    words = [bubblewrap, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if os.geteuid() == 0:  # root needs no user namespace; the launcher becomes another user inside
        words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        words += [word for right in _CAPABILITIES for word in ("--cap-add", right)]
    else:
        words += ["--unshare-all"]
    folders = {"/usr", sys.prefix, sys.base_prefix, str(_CODE)}
    parents = {str(parent) for folder in (*folders, "/dev/null") for parent in Path(folder).parents} - {"/"}
    for folder in sorted(parents):  # if bubblewrap created them itself, only root could enter
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
def _code_archive() -> bytes:
    """The sandbox's code as a zip archive in base64."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(_CODE.glob("*.py")):
            archive.write(file, f"{_CODE.name}/{file.name}")
    return base64.b64encode(buffer.getvalue())


# Tries what must be impossible. Kernels before 5.14 count a user's processes over the whole machine.
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
