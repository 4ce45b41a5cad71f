"""SGLang equals Megatron after every publish: real server, real trainer on two ranks, in every layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.rollout.sglang import SGLangServer
from tests.conftest import Served, serving_config
from tests.helpers import free_port, make_model
from tests.publish.publish_worker import CASES, PROMPT, TURNS, UPDATES

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 2
TIMEOUT = 200
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def second(servers: dict[str, Served], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Another server of the untied model."""
    config = serving_config(servers["untied"].folder)
    with SGLangServer(config, tmp_path_factory.mktemp("second") / "log", index=1) as server:
        server.wait_healthy(400.0)
        yield server


@pytest.fixture(scope="module")
def found(servers: dict[str, Served], second: SGLangServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("publish")
    for kind in servers:
        make_model(folder / kind, tied=kind == "tied", seed=1)  # other weights than the server's
    running = {kind: [served.server] for kind, served in servers.items()}
    running["untied-twice"] = [*running["untied"], second]
    lines = {
        kind: [{"url": server.url, "api_key": server.api_key, "tp": 1} for server in alike]
        for kind, alike in running.items()
    }
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "SERVERS": json.dumps(lines),
    }
    command = [sys.executable, str(Path(__file__).with_name("publish_worker.py")), str(folder)]
    ranks = []
    for rank in range(RANKS):
        with (folder / f"rank{rank}.log").open("w") as log:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment | own, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(TIMEOUT) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * RANKS, "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(RANKS))
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_log_probs_agree_after_every_publish_and_only_then(found: dict[str, Any], case: str) -> None:
    rounds, first = found[case]["rounds"], found[case]["first"]
    stale, published = rounds[0::2], rounds[1::2]
    assert len(published) == 1 + UPDATES
    assert all(measured["difference"] < TOLERANCE for measured in published)
    assert [measured["versions"] for measured in published] == [[first + step] for step in range(1 + UPDATES)]
    assert all(measured["difference"] > 100 * TOLERANCE for measured in stale)


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_old_weights_stays_in_the_prefix_cache(found: dict[str, Any], case: str) -> None:
    stale, published = found[case]["rounds"][2::2], found[case]["rounds"][1::2]
    everything = TURNS * (PROMPT - 1)  # the last token of a prompt is always read
    assert all(measured["cached"] == everything for measured in stale)
    assert all(measured["cached"] < TURNS for measured in published)


def test_every_server_samples_the_same(found: dict[str, Any]) -> None:
    assert [measured["alike"] for measured in found["two-servers"]["rounds"][1:]] == [True] * (1 + 2 * UPDATES)


@pytest.mark.parametrize("case", CASES)
def test_the_first_update_starts_from_the_policy_that_was_sampled(found: dict[str, Any], case: str) -> None:
    first = found[case]["stats"][0]
    assert first["ratio_max_deviation"] < 1e-4
    assert abs(first["kl"]) < 1e-6
    assert first["mismatch/max_abs"] < TOLERANCE


def test_a_failed_publish_is_an_error_on_every_rank_and_commits_nothing(found: dict[str, Any]) -> None:
    """One server of two fails; the other keeps its weights and their version."""
    refused, absent = found["two-servers"]["failures"]
    assert all("status 401" in message for message in refused)
    assert all("127.0.0.1:9/" in message for message in absent)
    after, first = found["two-servers"]["after_failures"], found["two-servers"]["first"]
    assert after["versions"] == [first + UPDATES] and after["difference"] < TOLERANCE and after["alike"]


@pytest.mark.parametrize("case", CASES)
def test_no_shared_memory_is_left(found: dict[str, Any], case: str) -> None:
    assert not list(Path("/dev/shm").glob(f"torch_{found[case]['pid']}_*"))
