"""What untrusted code might do to the machine, tried: each is scored as failed, contained, and harms nobody."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_collab.reward import sandbox
from megatron_collab.reward.sandbox import Limits, Result, SandboxError

pytestmark = pytest.mark.processes

PROJECT = Path(__file__).resolve().parents[2]
LIMITS = Limits(cpu=2, wall=10.0)
NEVER = Limits(cpu=60, wall=600.0)


def run(source: str, limits: Limits = LIMITS) -> Result:
    return asyncio.run(sandbox.run({"solution": source}, limits))


def unindented(source: str) -> str:
    return textwrap.dedent(source).strip()


def launchers() -> list[psutil.Process]:
    """Processes below this one that are a sandbox's or run in one; other tests have processes of their own."""
    found = programs(psutil.Process())
    for below in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [below] if any("sandbox_child" in word for word in below.cmdline()) else []
    return found


def programs(process: psutil.Process) -> list[psutil.Process]:
    """Those below `process` that are in a PID namespace of their own."""

    def space(pid: int) -> str:
        return os.readlink(f"/proc/{pid}/ns/pid")

    found = []
    for below in process.children(recursive=True):
        with suppress(FileNotFoundError):  # it has just ended
            found += [below] if space(below.pid) != space(os.getpid()) else []
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After every test no process and no mount is left, and a right program still passes.

    Nothing is tried before the trial of the sandbox has passed, which is harmless: a sandbox that somebody broke
    must not let a fork bomb loose on their machine.
    """
    assert sandbox.unavailable() is None
    mounts = Path("/proc/self/mounts").read_text()
    yield
    assert launchers() == []
    assert Path("/proc/self/mounts").read_text() == mounts
    assert run("print('alive')") == Result(True, "", "alive\n")


def test_a_right_program_passes() -> None:
    source = "import json\nassert json.loads('[1]') == [1]\ndef f(x: int): ...\nassert f.__annotations__ == {'x': int}"
    assert run(source) == Result(True, "", "")


def test_sources_run_one_after_the_other_in_one_module() -> None:
    sources = {"solution": "x = 1\nassert __name__ == 'solution'", "tests": "assert (x, __name__) == (1, 'tests')"}
    assert asyncio.run(sandbox.run(sources, LIMITS)).passed


def test_the_packages_of_the_interpreter_are_there_and_the_project_is_not() -> None:
    assert run("import numpy").passed
    result = run("import megatron_collab.config")
    assert "No module named 'megatron_collab" in result.output


def test_an_exception_is_told() -> None:
    result = run("raise ValueError('odd')")
    assert (result.passed, result.why) == (False, "exit 1")
    assert result.output.endswith("ValueError: odd\n")


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_leaving_before_the_end_is_no_success(code: str) -> None:
    assert run(f"{code}\nassert False") == Result(False, "exit 0", "")


def test_printing_or_writing_everywhere_is_no_success() -> None:
    source = """
        import os
        for descriptor in range(64):
            try:
                os.write(descriptor, b"ready" + bytes(16) + b"passed True")
            except OSError:
                pass
        os._exit(0)
    """
    assert not run(unindented(source)).passed


def test_a_fork_bomb_is_contained() -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    assert run(bomb, Limits(wall=2.0)) == Result(False, "time", "")


def test_the_limit_on_processes_binds() -> None:
    source = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(100)\n"
    result = run(source)
    assert result.why == "exit 1"
    assert "BlockingIOError" in result.output


def test_an_endless_loop_ends() -> None:
    assert run("while True:\n    pass") == Result(False, "time", "")


def test_waiting_for_ever_ends() -> None:
    assert run("import signal\nsignal.pause()", Limits(wall=1.0)) == Result(False, "time", "")


def test_ten_gigabytes_are_refused() -> None:
    result = run("x = bytearray(10 << 30)")
    assert result.why == "exit 1"
    assert "MemoryError" in result.output


def test_the_memory_of_all_processes_together_is_limited() -> None:
    source = """
        import os, signal
        for _ in range(20):
            if os.fork() == 0:
                kept = b"x" * (50 << 20)
                signal.pause()
        signal.pause()
    """
    assert run(unindented(source), Limits(memory=200 << 20)).why == "memory"


@pytest.mark.parametrize("call", ["os.memfd_create('x')", "libc.shmget(0, 1 << 20, 0o1600)"])
def test_memory_that_no_limit_counts_is_refused(call: str) -> None:
    result = run(f"import ctypes, os\nlibc = ctypes.CDLL(None)\nassert {call} != -1\n")
    assert not result.passed
    assert "PermissionError" in result.output or "AssertionError" in result.output


def test_files_are_limited_in_size_and_together() -> None:
    one = "open('x', 'wb').write(bytes(2 << 20))"
    many = "for i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))"
    limits = Limits(file=1 << 20, disk=10 << 20)
    assert "File too large" in run(one, limits).output
    assert "No space left on device" in run(many, limits).output
    assert run("open('x', 'wb').write(bytes(1 << 20))", limits).passed


def test_its_folder_is_empty_and_its_own() -> None:
    name = secrets.token_hex(8)
    source = f"import os\nassert os.listdir() == []\nopen('{name}', 'w').write('1')\nassert os.listdir() == ['{name}']"
    assert [run(source).passed for _ in range(2)] == [True, True]
    assert not Path("/tmp", name).exists()


OUTSIDE = ["/", "/usr", "/etc", "/dev", "/var/tmp", str(Path.home()), str(PROJECT), sys.prefix]


@pytest.mark.parametrize("folder", OUTSIDE)
def test_nothing_can_be_written_outside(folder: str) -> None:
    name = f"{folder}/written-by-a-test-of-the-sandbox"
    assert run(f"open({name!r}, 'w').write('x')").why == "exit 1"
    assert not Path(name).exists()


def test_what_others_keep_in_tmp_is_neither_read_nor_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    secret.chmod(0o666)
    for mode in ("r", "a"):
        assert "FileNotFoundError" in run(f"open({str(secret)!r}, {mode!r}).write('x')").output
    assert secret.read_text() == "mine"


def test_files_of_the_user_cannot_be_read() -> None:
    assert "FileNotFoundError" in run(f"open({str(PROJECT / 'README.md')!r})").output
    assert "FileNotFoundError" in run("open('/etc/passwd')").output


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
        from megatron_collab.reward import sandbox
        thief = {KEY_THIEF!r}.format(parent=os.getpid())
        print(subprocess.run([sys.executable, "-c", thief], env={{}}, capture_output=True, text=True).stdout)
        print("sandbox", asyncio.run(sandbox.run({{"thief": thief}}, sandbox.Limits())))
    """
    environment = os.environ | {"OPENAI_API_KEY": "sk-secret"}
    command = [sys.executable, "-c", unindented(code)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    outside, inside = said.split("sandbox ")
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


def changed_child(folder: Path, old: str, new: str) -> tuple[str, ...]:
    """The sandbox's command with one place of its child changed."""
    child = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    assert child.count(old) == 1
    file = folder / "child.py"
    file.write_text(child.replace(old, new))
    return (*sandbox._COMMAND[:-1], str(file))


def test_without_its_filter_the_network_is_empty_all_the_same(tmp_path: Path) -> None:
    """Two walls: with `socket` allowed, nothing is reached from the network namespace."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_COMMAND", changed_child(tmp_path, '"socket": 41, ', ""))
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))")
    assert "Network is unreachable" in result.output


def test_leaving_before_the_launcher_looks_is_a_failure_of_the_program(tmp_path: Path) -> None:
    """Were it taken for one of the sandbox, a policy could turn a 0 into a missing score."""
    slow = "    secret = secrets.token_bytes(16)\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_COMMAND", changed_child(tmp_path, slow, f"    time.sleep(0.5)\n{slow}"))
        assert run("import os\nos._exit(0)") == Result(False, "exit 0", "")


def test_much_output_ends_the_program_and_only_its_end_is_kept() -> None:
    result = run("while True:\n    print('x' * 1000)")
    assert result.why == "output"
    assert 0 < len(result.output) <= 4096


def test_a_daemon_ends_with_the_program() -> None:
    source = """
        import os, time
        os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for descriptor in range(3):
                    os.close(descriptor)
                time.sleep(600)
            os._exit(0)
        os.wait()
    """
    assert run(unindented(source)).passed  # the fixture sees that it is gone


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


def test_a_run_that_is_cancelled_ends_its_program() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(sandbox.run({"solution": "import signal\nsignal.pause()"}, NEVER))
        while not (started := programs(psutil.Process())):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_ended(started)

    asyncio.run(cancelled())


def test_the_program_ends_with_a_worker_that_is_killed() -> None:
    code = """
        import asyncio
        from megatron_collab.reward import sandbox
        print(sandbox.unavailable(), flush=True)
        asyncio.run(sandbox.run({"x": "import signal\\nsignal.pause()"}, sandbox.Limits(wall=600.0)))
    """
    with subprocess.Popen([sys.executable, "-c", unindented(code)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout and worker.stdout.readline() == "None\n"  # the trial is over
        while not programs(psutil.Process(worker.pid)):
            time.sleep(0.01)
        started = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert_ended(started)


def assert_ended(processes: list[psutil.Process]) -> None:
    _, running = psutil.wait_procs(processes, timeout=60)
    left = [process for process in running if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert left == []


def test_a_sandbox_that_dies_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "_COMMAND", (sys.executable, "-c", "raise RuntimeError('broken')"))
        with pytest.raises(SandboxError, match="RuntimeError: broken"):
            run("pass")


def test_this_machine_isolates() -> None:
    assert sandbox.unavailable() is None


AS_AN_ORDINARY_USER = """
set -e
hidden=$1; shift
for folder in "$@"; do mkdir -p "$PWD$folder"; mount --bind "$folder" "$PWD$folder"; done
for folder in $hidden; do mount -t tmpfs tmpfs "$folder"; done
for folder in "$@"; do mkdir -p "$folder"; mount --bind "$PWD$folder" "$folder"; done
cd "$1"
exec setpriv --reuid 12345 --regid 12345 --clear-groups "$PYTHON" -c "$CODE"
"""


def test_an_ordinary_user_isolates_as_root_does(tmp_path: Path) -> None:
    """Where we are root, another user is tried, who sees the interpreter and the project even in folders of root's."""
    code = "from megatron_collab.reward import sandbox\nprint(sandbox.unavailable())"
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:
        folders = [str(PROJECT), sys.prefix, sys.base_prefix]
        above = (parent for folder in folders for parent in reversed(Path(folder).parents))
        hidden = " ".join({str(parent) for parent in above if not parent.stat().st_mode & 0o001})
        command = ["unshare", "--mount", "sh", "-c", AS_AN_ORDINARY_USER, "sh", hidden, *folders]
    environment = os.environ | {"PYTHON": sys.executable, "CODE": code}
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("None\n", "")


@pytest.mark.parametrize("count", ["user", "pid", "net", "mnt"])
def test_a_machine_without_namespaces_says_so_in_one_line_and_runs_nothing(count: str, tmp_path: Path) -> None:
    """In a user namespace whose own limit on further namespaces is 0."""
    code = (
        "import asyncio, sys\nfrom megatron_collab.reward import sandbox\nprint(sandbox.unavailable())\n"
        "try:\n    asyncio.run(sandbox.run({'x': 'print(1)'}, sandbox.Limits()))\n"
        "except sandbox.SandboxError:\n    print('refused')\n"
    )
    script = f'echo 0 > /proc/sys/user/max_{count}_namespaces && exec {sys.executable} -c "$0"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, code]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT).stdout.splitlines()
    assert len(said) == 2
    assert said[0].startswith("this machine cannot isolate untrusted code (")
    assert "allow user namespaces" in said[0]
    assert said[1] == "refused"
