"""How the sandbox isolates: as root or another user; with namespaces, bubblewrap or a container, or not at all."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab import sandbox
from megatron_collab.sandbox import Limits, Program, Result
from tests.sandbox.attacks import ATTACKS, FORMS, RIGHT
from tests.sandbox.sandboxes import LIMITS, PROJECT

pytestmark = pytest.mark.processes
bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

AS_AN_ORDINARY_USER = """
set -e
hidden=$1; shift
for folder in "$@"; do mkdir -p "$PWD$folder"; mount --bind "$folder" "$PWD$folder"; done
for folder in $hidden; do mount -t tmpfs tmpfs "$folder"; done
for folder in "$@"; do mkdir -p "$folder"; mount --bind "$PWD$folder" "$folder"; done
cd "$1"
exec setpriv --reuid 12345 --regid 12345 --clear-groups "$PYTHON" -c "$CODE"
"""


def as_an_ordinary_user(code: str, folder: Path) -> str:
    """Output of a program of the project; if this process is root, another user runs it, who sees the interpreter and
    the project even in root's folders."""
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:
        folders = [str(PROJECT), sys.prefix, sys.base_prefix]
        above = (parent for folder in folders for parent in reversed(Path(folder).parents))
        hidden = " ".join({str(parent) for parent in above if not parent.stat().st_mode & 0o001})
        command = ["unshare", "--mount", "sh", "-c", AS_AN_ORDINARY_USER, "sh", hidden, *folders]
    environment = os.environ | {"PYTHON": sys.executable, "CODE": code}
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert ran.stderr == ""
    return ran.stdout


def test_an_ordinary_user_isolates_as_root_does(tmp_path: Path) -> None:
    code = "from megatron_collab import sandbox\nprint(sandbox.unavailable())"
    assert as_an_ordinary_user(code, tmp_path) == "None\n"


IN_BUBBLEWRAP = """
import asyncio
from megatron_collab import sandbox
from megatron_collab.reward.metrics.pass_rate import program
from tests.sandbox.attacks import ATTACKS, FORMS, RIGHT
way = sandbox._candidates(())["bubblewrap"]
assert asyncio.run(sandbox._trial_failure(way)) is None
for name in [*NAMES, None]:
    code = ATTACKS[name] if name else RIGHT
    result = asyncio.run(sandbox._launch(way, program(code, FORMS["check"]), sandbox.Limits(cpu=2, wall=10.0)))
    print(name, result.passed)
"""
# Those that reach for other processes: in a container they share its namespaces with the tests.
REACHING = [name for name in ATTACKS if any(word in name for word in ("kill", "signal", "another process", "pipe"))]


@bubblewrap
def test_bubblewrap_isolates_root_and_another_user(tmp_path: Path) -> None:
    code = IN_BUBBLEWRAP.replace("NAMES", repr(REACHING))
    expected = "".join(f"{name} False\n" for name in REACHING) + "None True\n"
    assert len(REACHING) > 8
    assert as_an_ordinary_user(code, tmp_path) == expected
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT).stdout == expected


@bubblewrap
def test_bubblewrap_is_taken_where_namespaces_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = sandbox._candidates(()) | {"namespaces": sandbox._Way(("/bin/false",))}
    monkeypatch.setattr(sandbox, "_ways", {})
    monkeypatch.setattr(sandbox, "_candidates", lambda container: ways)
    result = asyncio.run(sandbox.run(Program({"solution": RIGHT}, "assert twice(2) == 4"), LIMITS))
    assert result == Result(True, "", "")
    assert sandbox._ways[()] == ways["bubblewrap"]


@bubblewrap
@pytest.mark.skipif(not shutil.which("python3.11", path="/usr/bin"), reason="there is no Python 3.11 in /usr/bin")
def test_a_command_may_start_a_container() -> None:
    """Such as podman run --rm -i --network=none IMAGE; here bubblewrap, with a root like that of an image."""
    isolated = [word for word in sandbox._bubblewrap_command("bwrap") if "unshare" in word]
    rights = [word for right in sandbox._CAPABILITIES for word in ("--cap-add", right)] if os.geteuid() == 0 else []
    words = "--die-with-parent --ro-bind / / --dev-bind /dev/null /dev/null --perms 1777 --tmpfs /tmp --proc /proc"
    container = ["bwrap", *isolated, *words.split(), "--cap-drop", "ALL", *rights, "--setenv", "PATH", "/usr/bin:/bin"]
    assert sandbox.unavailable(container) is None
    for code, passed in ((RIGHT, True), (ATTACKS["builtins.exec"], False)):
        result = asyncio.run(sandbox.run(Program({"solution": code}, FORMS["asserts"]["tests"]), Limits(), container))
        assert result.passed == passed, result


@pytest.mark.parametrize("command", [["false"], ["no-such-command"], ["sh", "-c", 'exec "$@"', "sh"]])
def test_a_command_that_starts_no_container_is_refused(command: list[str]) -> None:
    assert f"({command[0]}: " in str(sandbox.unavailable(command))


@pytest.mark.parametrize("count", ["user", "pid", "net", "mnt"])
def test_a_machine_without_namespaces_says_so_in_one_line_and_runs_nothing(count: str, tmp_path: Path) -> None:
    """In a user namespace with a limit of 0 further namespaces."""
    code = (
        "import asyncio, sys\nfrom megatron_collab import sandbox\nprint(sandbox.unavailable())\n"
        "try:\n    asyncio.run(sandbox.run(sandbox.Program({'x': 'print(1)'}), sandbox.Limits()))\n"
        "except sandbox.SandboxError:\n    print('refused')\n"
    )
    script = f'echo 0 > /proc/sys/user/max_{count}_namespaces && exec {sys.executable} -c "$0"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, code]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT).stdout.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("this machine cannot isolate untrusted code (")
    for way_out in ("allow user namespaces", "install bubblewrap", "reward.metrics.pass_rate.container"):
        assert way_out in lines[0]
    assert "kernel.apparmor_restrict_unprivileged_userns=0" in lines[0]
    assert lines[1] == "refused"
