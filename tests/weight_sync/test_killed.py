"""A publisher that is killed in the middle leaves no mixture of versions behind: the server waits for the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Served
from tests.helpers import make_model
from tests.weight_sync.kill_worker import MOMENTS

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT = 200


@pytest.fixture(scope="module")
def found(servers: dict[str, Served], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_model(tmp_path_factory.mktemp("killed"), seed=2)
    server = servers["untied"].server
    line = {"url": server.url, "api_key": server.api_key, "tp": 1}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "SERVER": json.dumps(line)}
    worker = Path(__file__).with_name("kill_worker.py")
    subprocess.run([sys.executable, str(worker), str(folder)], env=environment, check=True, timeout=TIMEOUT)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_no_request_is_answered_until_a_version_is_whole(
    found: dict[str, Any], moment: str
) -> None:
    result = found[moment]
    assert result["codes"] == [-9, -9]
    assert result["answered"] is None
    for recovered, reference in zip(result["recovered"], found["reference"], strict=True):
        assert recovered["version"] == str(2 + MOMENTS.index(moment))
        assert recovered["log_probs"] == reference["log_probs"]
