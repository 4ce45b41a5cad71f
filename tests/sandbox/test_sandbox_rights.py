"""Out of reach in the sandbox: keys, the network, other processes, privileges, and unnecessary system calls."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.sandbox import Result
from tests.sandbox.sandboxes import changed, nothing_is_left, run, unindented

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures(nothing_is_left.__name__)]

KEY_THIEF = """
import os
for process in ("self", os.getppid(), {parent}):
    try:
        print(open(f"/proc/{{process}}/environ").read())
    except OSError as error:
        print(error)
print(dict(os.environ))
assert False
"""


def test_a_key_in_the_environment_cannot_be_read() -> None:
    code = f"""
        import asyncio, os, subprocess, sys
        from megatron_collab import sandbox
        thief = {KEY_THIEF!r}.format(parent=os.getpid())
        print(subprocess.run([sys.executable, "-c", thief], env={{}}, capture_output=True, text=True).stdout)
        print("sandbox", asyncio.run(sandbox.run(sandbox.Program({{"thief": thief}}), sandbox.Limits())))
    """
    environment = os.environ | {"OPENAI_API_KEY": "sk-secret"}
    command = [sys.executable, "-c", unindented(code)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    outside, inside = output.split("sandbox ")
    assert "sk-secret" in outside  # there is something to steal
    assert "sk-secret" not in inside
    assert "passed=False" in inside


def test_no_socket_can_be_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "PermissionError" in run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))").output
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "PermissionError" in run("import socket\nsocket.socket(socket.AF_UNIX).connect('\\0abstract')").output


def test_without_its_filter_the_network_is_empty_all_the_same(tmp_path: Path) -> None:
    """Second barrier: even with `socket` allowed, nothing is reachable from the network namespace."""
    more = '**{"socket": 41, "connect": 42, '
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        changed(tmp_path, "seccomp.py", '**{"read": 0, ', f'{more}"read": 0, '),
    ):
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))")
    assert "Network is unreachable" in result.output


def test_leaving_before_the_launcher_looks_is_a_failure_of_the_program(tmp_path: Path) -> None:
    """If it counted as a failure of the sandbox, a policy could turn a 0 into a missing score."""
    with changed(tmp_path, "launcher.py", "    why, tail = watch(", "    time.sleep(0.5)\n    why, tail = watch("):
        assert run("import os\nos._exit(0)") == Result(False, "exit 0", "")


def test_other_processes_are_out_of_reach() -> None:
    source = f"""
        import os
        for process in (os.getppid(), {os.getpid()}):
            try:
                os.kill(process, 9)
            except ProcessLookupError:
                continue
            assert process == 0
    """
    assert run(unindented(source)).passed


@pytest.mark.parametrize(
    "source",
    [
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",  # CLONE_NEWUSER
        "import ctypes\nassert ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0) != -1",  # clone
        "import ctypes\nassert ctypes.CDLL(None).syscall(435, bytes(88), 88) != -1",  # clone3
        "import ctypes\nassert ctypes.CDLL(None).mount(b'', b'/tmp', b'tmpfs', 0, None) == 0",
        "import os\nos.setuid(0)",
        "import os\nos.chroot('/tmp')",
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "import ctypes\nassert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 0",  # PR_GET_NO_NEW_PRIVS
        "import os\nos.mknod('x', 0o60666, os.makedev(254, 0))\n",
    ],
)
def test_there_is_no_way_to_gain_rights(source: str) -> None:
    assert run(source).why == "exit 1"


# splice, sendmsg, ptrace, personality, sched_setaffinity, mlock, keyctl, perf_event_open, process_vm_writev, bpf,
# userfaultfd, io_uring_setup, pidfd_send_signal, pidfd_getfd
@pytest.mark.parametrize("number", [275, 46, 101, 135, 203, 149, 250, 298, 311, 321, 323, 425, 424, 438])
def test_a_system_call_that_is_not_listed_is_refused(number: int) -> None:
    source = (
        f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall({number}, 0, 0, 0, 0) == -1\n"
    )
    assert run(source + "assert ctypes.get_errno() == 1, ctypes.get_errno()").passed


def test_a_system_call_newer_than_the_list_does_not_exist() -> None:
    """Otherwise the C library would take the refusal as final and not fall back to an older call."""
    source = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nassert libc.syscall(452, 0, 0, 0, 0) == -1\n"
    assert run(source + "assert ctypes.get_errno() == 38, ctypes.get_errno()").passed


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(-1, 9)",
        "fcntl.fcntl(0, 8, 1)",  # F_SETOWN
        "fcntl.fcntl(0, 10, 9)",  # F_SETSIG
        "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",  # F_SETPIPE_SZ
        "fcntl.ioctl(0, 0x8901, b'1234')",  # FIOSETOWN
        "resource.prlimit(2, resource.RLIMIT_CPU)",
        "socket.socketpair(socket.AF_INET)",
        "mmap.mmap(-1, 4096)",
    ],
)
def test_a_system_call_with_other_arguments_is_refused(call: str) -> None:
    result = run(f"import fcntl, mmap, os, resource, socket\n{call}\n")
    assert "PermissionError" in result.output


def test_what_honest_programs_need_is_allowed() -> None:
    source = """
        import asyncio, multiprocessing, os, signal, socket, subprocess, threading
        async def waited():
            process = await asyncio.create_subprocess_exec("echo", "hi", stdout=-1)
            await asyncio.sleep(0.01)
            return (await process.communicate())[0]
        assert asyncio.run(waited()) == b"hi\\n"
        with multiprocessing.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        timer = threading.Timer(0.3, print)
        timer.start()
        assert subprocess.run(["sleep", "0.1"]).returncode == 0
        timer.join()
        child = subprocess.Popen(["sleep", "100"])
        child.terminate()
        assert child.wait() == -signal.SIGTERM
        os.kill(os.getpid(), 0)
    """
    assert run(unindented(source)) == Result(True, "", "\n")


def test_a_program_leaves_processors_to_the_trainer() -> None:
    processors = sorted(os.sched_getaffinity(0))
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    source = f"""
        import os
        assert sorted(os.sched_getaffinity(0)) == {processors[len(processors) // 2 :]}
        assert os.getpriority(os.PRIO_PROCESS, 0) == {min(19, mine + 10)}
        for act in (lambda: os.sched_setaffinity(0, {set(processors)}), lambda: os.setpriority(os.PRIO_PROCESS, 0, 0)):
            try:
                act()
            except PermissionError:
                continue
            raise SystemExit("could take more")
    """
    assert run(unindented(source)) == Result(True, "", "")
