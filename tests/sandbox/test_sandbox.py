"""Hostile programs against the sandbox: each scores as failed, stays contained and harms nothing outside."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_collab import sandbox
from megatron_collab.sandbox import Limits, Program, Result, SandboxError
from tests.sandbox.sandboxes import (
    LIMITS,
    PROJECT,
    assert_ended,
    changed,
    nothing_is_left,
    programs,
    run,
    unindented,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures(nothing_is_left.__name__)]
NEVER = Limits(cpu=60, wall=600.0)


def test_a_right_program_passes() -> None:
    source = "import json\nassert json.loads('[1]') == [1]\ndef f(x: int): ...\nassert f.__annotations__ == {'x': int}"
    assert run(source) == Result(True, "", "")


def test_sources_run_one_after_the_other_in_one_module() -> None:
    sources = {"prompt": "x = 1\nassert __name__ == 'prompt'", "solution": "assert (x, __name__) == (1, 'solution')"}
    assert asyncio.run(sandbox.run(Program(sources), LIMITS)).passed


def test_the_packages_of_the_interpreter_are_there_and_the_project_is_not() -> None:
    assert run("import numpy").passed
    result = run("import megatron_collab.config")
    assert "No module named 'megatron_collab" in result.output


def test_an_exception_is_reported() -> None:
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


def test_files_are_limited_in_size_and_together() -> None:
    large = "open('x', 'wb').write(bytes(2 << 20))"
    many = "for i in range(100):\n    open(str(i), 'wb').write(bytes(1 << 20))"
    limits = Limits(file=1 << 20, disk=10 << 20)
    assert "File too large" in run(large, limits).output
    assert "No space left on device" in run(many, limits).output
    assert run("open('x', 'wb').write(bytes(1 << 20))", limits).passed


def test_a_program_starts_in_an_empty_private_folder() -> None:
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


def test_a_run_that_is_cancelled_ends_its_program() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(sandbox.run(Program({"solution": "import signal\nsignal.pause()"}), NEVER))
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
        from megatron_collab import sandbox
        print(sandbox.unavailable(), flush=True)
        program = sandbox.Program({"x": "import signal\\nsignal.pause()"})
        asyncio.run(sandbox.run(program, sandbox.Limits(wall=600.0)))
    """
    with subprocess.Popen([sys.executable, "-c", unindented(code)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout and worker.stdout.readline() == "None\n"  # the trial is over
        while not programs(psutil.Process(worker.pid)):
            time.sleep(0.01)
        started = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
    assert_ended(started)


def test_a_sandbox_that_dies_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        broken = (sys.executable, "-c", "raise RuntimeError('broken')")
        patch.setitem(sandbox._ways, (), sandbox._Way(broken))
        with pytest.raises(SandboxError, match="RuntimeError: broken"):
            run("pass")


def test_a_launcher_that_fails_while_the_code_runs_is_a_failure_of_the_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The code may be the cause: it must not be able to choose a missing score."""
    with changed(tmp_path, "launcher.py", "        elif memory.exceeded():", "        elif 1 / 0:"):
        assert run("import time; time.sleep(9)") == Result(False, "fault", "")
    assert "ZeroDivisionError" in caplog.text


def test_the_name_of_a_process_is_no_fault_of_the_sandbox() -> None:
    named = "import ctypes, time\nctypes.CDLL(None).prctl(15, {}, 0, 0, 0)\ntime.sleep(0.3)"
    for name in (rb"\xff", rb"a\rVmRSS:\n\x85"):
        assert run(named.format(f'b"{name.decode()}"')).passed


def test_this_machine_isolates() -> None:
    assert sandbox.unavailable() is None
