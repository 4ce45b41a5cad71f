"""The launcher that `sandbox` starts: it isolates itself, starts the two processes and watches them until they end.

It runs with `python -I` and an almost empty environment. On stdin it gets three messages (`wire`): the settings, the
candidate's sources and the tests'. It reads the latter two only when both processes exist, so that the candidate's
process holds nothing of the tests. It prints lines of JSON to stdout, the last of which counts: {"passed", "why",
"output"}, or {"missing"} if the tests cannot be judged, or {"error"} if the machine did not permit the isolation. A
failure is printed before the sources run, and counts if the launcher itself fails afterwards.

The tests' process is process 1 of new namespaces and the candidate's is process 1 of a nested PID namespace. So all
their children end with them, and the candidate cannot address the tests' process. Both see the interpreter and /usr,
read-only, a common folder, and no /proc. They have no capability, the user and group 65534, and a filter of system
calls. In a user's container ("contained") both are in its namespaces; there the tests' process hides its memory, and
the filter lets the candidate signal only processes that it started.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from . import candidate, namespaces, tester
from .libc import call
from .memory import Memory
from .seccomp import filter_system_calls
from .wire import read_message, write_message

TICK = 0.02  # seconds between two checks of the processes' memory
TAIL = 4096  # bytes of the output that are kept
READY = b"ready"
PATIENCE = 4  # times the limit on time within which a run ends, however long it waits for processors
SLACK = 15  # seconds after the limit on time; `sandbox` waits longer for the answer
NICE = 10


def main() -> None:
    settings = json.loads(read_message(0))
    limits, contained = settings["limits"], settings["contained"]
    lower_priority()
    output, verdict, code, tests = (os.pipe() for _ in range(4))
    memory = Memory(limits)
    try:
        if contained:
            namespaces.hide_memory(True)
        else:
            namespaces.enter_namespaces()
            call("prctl", namespaces.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != settings["parent"]:  # the parent has ended already
                os.kill(os.getpid(), signal.SIGKILL)
        process = os.fork()
    except OSError as error:
        answer = {"error": error.strerror}
    else:
        if process == 0:
            memory.enter()
            for end in (output[0], verdict[0], code[1], tests[1]):
                os.close(end)
            run_tests(limits, contained, output[1], verdict[1], code[0], tests[0])
        for end in (output[1], verdict[1], code[0], tests[0]):
            os.close(end)
        answer = judge(process, limits, memory, output[0], verdict[0], (code[1], tests[1]))
    memory.close()
    print(json.dumps(answer))


def lower_priority() -> None:
    """Leave the processors to the trainer: use only the upper half of those available, at low priority."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[len(processors) // 2 :])
    os.nice(NICE)


def judge(
    process: int, limits: Mapping[str, Any], memory: Memory, output: int, verdict: int, sources: tuple[int, int]
) -> dict[str, Any]:
    """How the run ended. `sources`: pipes for the candidate's and the tests' sources; `output`, `verdict` are read."""
    message = os.read(verdict, len(READY))
    if message != READY:
        message += os.read(verdict, 1024)
        return {"error": message.decode() or "the processes ended during setup"}
    for pipe in sources:
        with suppress(BrokenPipeError):  # the process was killed, which must not look like a failure of the sandbox
            write_message(pipe, read_message(0))
        os.close(pipe)
    print(json.dumps({"passed": False, "why": "fault", "output": ""}), flush=True)
    signal.alarm(int(PATIENCE * limits["wall"]) + SLACK)  # ends the launcher if the processes cannot be killed
    why, tail = watch(process, output, limits, memory)
    message = b"".join(iter(lambda: os.read(verdict, 1 << 16), b""))
    if not why:
        result = json.loads(message) if message else {"why": "exit 0", "missing": ""}
        if result["missing"]:
            return {"missing": result["missing"]}
        why = result["why"]
    return {"passed": not why, "why": why, "output": tail.decode(errors="replace")}


def watch(process: int, output: int, limits: Mapping[str, Any], memory: Memory) -> tuple[str, bytes]:
    """Why the run failed, "" if its verdict tells how it ended, and the end of the printed text.

    The run is killed if it exceeds a limit. The time in which it waits for processors does not count: at its low
    priority it gets few of them beside a busy trainer.
    """
    begin = time.monotonic()
    why, tail, written = "", b"", 0
    ended = os.pidfd_open(process)
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
        elif (seconds := time.monotonic() - begin) > limits["wall"] and (
            seconds > PATIENCE * limits["wall"] or seconds - waiting_seconds(process) > limits["wall"]
        ):
            why = "time"
        elif memory.exceeded():
            why = "memory"
    os.kill(process, signal.SIGKILL)
    _, status, used = os.wait4(process, 0)
    if not why and memory.exceeded():
        why = "memory"
    return why or tester.ending(status, used, limits["cpu"]), tail


def waiting_seconds(process: int) -> float:
    """How long the tests' process and the candidate's, its first child, were ready to run while others were running."""
    nanoseconds = 0
    with suppress(FileNotFoundError, ProcessLookupError):  # one has just ended
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        for number in (process, *children[:1]):
            nanoseconds += int(Path(f"/proc/{number}/schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def run_tests(limits: Mapping[str, Any], contained: bool, output: int, verdict: int, code: int, tests: int) -> NoReturn:
    """The tests' process: isolate it, start the candidate's in a nested PID namespace, and run the tests."""
    to_candidate, to_tests = os.pipe(), os.pipe()
    try:
        if contained:
            os.mkdir(folder := f"/tmp/run-{os.getpid()}")
            os.chmod(folder, 0o777)  # for the unprivileged user
            os.chdir(folder)
        else:
            pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
            namespaces.new_root(limits["disk"])
            call("unshare", namespaces.CLONE_NEWPID)
        process = os.fork()
        if process == 0:
            for end in (to_candidate[1], to_tests[0], tests):
                os.close(end)
            run_candidate(limits, contained, output, verdict, code, to_candidate[0], to_tests[1])
        for end in (to_candidate[0], to_tests[1], code):
            os.close(end)
        if not contained:
            call("setns", pid_namespace, namespaces.CLONE_NEWPID)  # for processes that the tests start
            os.close(pid_namespace)
        confine(limits, contained, output)
        namespaces.hide_memory(True)
        if os.read(to_tests[0], len(READY)) != READY:  # it has reported the reason itself
            os._exit(1)
    except OSError as error:
        fail(verdict, error)
    os.write(verdict, READY)  # fails if the launcher has already ended
    tester.Tester(verdict, process, limits).run(tests, to_tests[0], to_candidate[1])


def run_candidate(
    limits: Mapping[str, Any], contained: bool, output: int, verdict: int, code: int, reading: int, writing: int
) -> NoReturn:
    try:
        os.setsid()
        confine(limits, contained, output)
        namespaces.hide_memory(False)  # the launcher counts its descriptors
        keep = {0, 1, 2, code, reading, writing}
        for end in set(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])) - keep - {verdict}:
            with suppress(OSError):
                os.close(end)
    except OSError as error:
        fail(verdict, error)
    os.close(verdict)
    os.write(writing, READY)
    candidate.run(code, reading, writing)


def confine(limits: Mapping[str, Any], contained: bool, output: int) -> None:
    """Restrict this process; both processes do so before they run any code."""
    if not contained:
        namespaces.mount_home(limits["file"])
    namespaces.limit(limits)
    namespaces.drop_privileges()
    filter_system_calls()
    nothing = os.open("/dev/null", os.O_RDONLY)
    for descriptor, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(output)
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))


def fail(verdict: int, error: OSError) -> NoReturn:
    os.write(verdict, str(error).encode())
    os._exit(1)


if __name__ == "__main__":
    main()
