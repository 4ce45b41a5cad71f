"""SGLang's processes spawned, as on GPUs, so that each imports the main module again; on a CPU they are forked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_collab.inference.server import SGLangServer
from megatron_collab.runtime import stacks
from tests.conftest import Served, serving_config
from tests.helpers import policy_servers
from tests.inference.test_server import PROMPTS, sample, wait_until
from tests.inference.test_versions import TOLERANCE, log_probs

# Python runs it before the main module, so it is what the patch that forks calls.
SPAWN = """
import multiprocessing
set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: set_start_method("spawn", force)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_spawned_processes_serve_and_end_as_forked_ones(
    servers: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPAWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    folder = servers["untied"].folder
    with SGLangServer(policy_servers(serving_config(folder)), tmp_path / "log") as server:
        server.wait_healthy(400.0)
        for turn in sample(server, [(prompt, 0) for prompt in PROMPTS[:2]], at_once=True):
            assert np.abs(log_probs(folder, turn) - turn.log_probs).max() < TOLERANCE
        stacks.ask(tmp_path / "stacks", 30.0)

        def spawned() -> int:
            return sum("spawn_main" in file.read_text() for file in (tmp_path / "stacks").iterdir())

        # The scheduler and the detokenizer, whose outermost frames are written last.
        assert wait_until(lambda: spawned() == 2, 60)
        leader = psutil.Process(server.process.pid)
        children = leader.children(recursive=True)
        os.kill(leader.pid, signal.SIGKILL)
        assert len(children) >= 2 and wait_until(lambda: not any(child.is_running() for child in children), 60)
