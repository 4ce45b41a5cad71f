"""Training on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--mount-proc", "--fork"]


def train_on_two_hosts(folder: Path, arguments: Sequence[str], gpus: bool = False, timeout: float = 600) -> str:
    """Console output of the first host of a training over both, which ends with exit code 0; logs are in `folder`."""
    script = [*NAMESPACES, "--kill-child", "bash", str(Path(__file__).with_name("two_hosts.sh")), str(folder)]
    environment = os.environ | {"PYTHON": sys.executable, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= {"GPUS": "1"} if gpus else {}
    done = subprocess.run([*script, *arguments], env=environment, capture_output=True, text=True, timeout=timeout)
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("*.log")))
    assert done.returncode == 0, f"{done.stderr}\n{logs}"
    return (folder / "host0.log").read_text()
