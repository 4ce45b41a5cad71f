"""Untrusted Python code, run where it can do no harm: no network, no files, no keys, and an end to everything.

Each run is a process of its own that `sandbox_child.py` isolates by Linux namespaces, as root in a container and as
an ordinary user alike. Nothing is run where that is not possible.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_COMMAND = (sys.executable, "-I", "-B", "-u", str(Path(__file__).with_name("sandbox_child.py")))
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)  # a thread per core would exceed the limit on processes
_SLACK = 30.0  # seconds beyond Limits.wall in which the launcher must have answered
_isolates = False  # whether the trial has passed in this process


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Each of its processes: `cpu` whole seconds of computing, `memory` bytes of address space, `file` bytes of one file,
    `open_files`. All together: `wall` seconds, `memory` bytes resident, `processes` and threads, `disk` bytes in all
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
class Result:
    """How a run ended: `passed` where the sources ran to their end; `output` is the end of what was printed.

    `why` not: "time", "memory" or "output" for a limit of the whole run, "exit N" (also 0, before the end), "signal N".
    """

    passed: bool
    why: str
    output: str


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the code."""


async def run(sources: Mapping[str, str], limits: Limits) -> Result:
    """Run Python sources one after the other in one module, which has the name of each while that runs.

    Their folder is an empty temporary one. SandboxError where they could not be run, or a trial failed to isolate.
    """
    await _try_it()
    return await _launch(sources, limits)


async def _launch(sources: Mapping[str, str], limits: Limits) -> Result:
    job = {"sources": dict(sources), "limits": asdict(limits), "parent": os.getpid()}
    process = await asyncio.create_subprocess_exec(
        *_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_ENVIRONMENT, cwd="/"
    )
    try:
        async with asyncio.timeout(limits.wall + _SLACK):
            answer, errors = await process.communicate(json.dumps(job).encode())
    except TimeoutError as error:
        raise SandboxError(f"the sandbox gave no answer within {limits.wall + _SLACK:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()  # what it started ends with it
            await process.wait()
    if not answer:
        raise SandboxError(f"the sandbox ended without an answer: {_last_line(errors.decode(errors='replace'))}")
    fields = json.loads(answer)
    if "error" in fields:
        raise SandboxError(fields["error"])
    return Result(**fields)


def unavailable() -> str | None:
    """Why this machine cannot isolate code, in one line with the way out; None where a trial run shows it can."""
    try:
        asyncio.run(_try_it())
    except SandboxError as error:
        return (
            f"this machine cannot isolate untrusted code ({error}); allow user namespaces "
            "(Linux 5.14 or newer on x86_64; in a container a privileged one), or take the metric out"
        )
    return None


async def _try_it() -> None:
    """SandboxError where this machine does not isolate the trial, which is run until it has passed once."""
    global _isolates
    limits = Limits()
    if not _isolates:
        result = await _launch({"trial": _TRIAL.format(processes=limits.processes)}, limits)
        if not result.passed:
            raise SandboxError(f"the trial ended with {result.why}: {_last_line(result.output)}")
        _isolates = True


# What must not be possible, tried. Kernels before 5.14 count the processes of a user over all of the machine.
_TRIAL = """
import os, socket, signal
for folder in ("", "/usr", "/dev"):
    try:
        open(folder + "/trial", "w")
    except OSError:
        continue
    raise SystemExit("could write into " + folder)
assert not os.path.exists("/proc"), "could see processes"
for act in (socket.socket, lambda: os.chroot("/tmp")):
    try:
        act()
    except PermissionError:
        continue
    raise SystemExit("could open a socket or has capabilities")
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
