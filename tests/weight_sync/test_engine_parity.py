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

from megatron_collab.inference.server import SGLangServer
from tests.conftest import Served, serving_config
from tests.helpers import free_port, make_model
from tests.weight_sync.publish_worker import CASES, OTHERS, PROMPT, TURNS, TWO_NODES, UPDATES

pytestmark = [pytest.mark.processes, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 2
TIMEOUT = 300
TOLERANCE = 1e-4
# On CPU SGLang pads experts to multiples of 32 x tp.
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def running(
    servers: dict[str, Served], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[SGLangServer]]]:
    """With another server of the untied model, and one of experts that is cut in two."""
    folder = tmp_path_factory.mktemp("running")
    experts = serving_config(make_model(folder / "experts", **EXPERTS))
    experts.rollout.server.tp = 2
    with (
        SGLangServer(serving_config(servers["untied"].folder), folder / "second.log", index=1) as second,
        SGLangServer(experts, folder / "experts.log") as cut,
    ):
        for server in (second, cut):
            server.wait_healthy(400.0)
        known = {kind: [served.server] for kind, served in servers.items()}
        yield known | {"untied-twice": [*known["untied"], second], "experts": [cut]}


@pytest.fixture(scope="module")
def found(running: dict[str, list[SGLangServer]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("publish")
    for kind, settings in {"untied": {}, "tied": {"tied": True}, "experts": EXPERTS}.items():
        make_model(folder / kind, seed=1, **settings)  # other weights than the server's
    lines = {
        kind: [
            {"url": server.url, "api_key": server.api_key, "tp": server.tp, "pid": server.process.pid}
            for server in alike
        ]
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


@pytest.mark.parametrize("case", ["two-servers", *TWO_NODES])
def test_every_server_samples_the_same(found: dict[str, Any], case: str) -> None:
    assert [measured["alike"] for measured in found[case]["rounds"][1:]] == [True] * (1 + 2 * UPDATES)


@pytest.mark.parametrize("case", TWO_NODES)
def test_a_server_knows_segments_of_its_own_node_only(found: dict[str, Any], case: str) -> None:
    assert found[case]["makers"] == [[0], [1]]


@pytest.mark.parametrize("case", CASES)
def test_the_first_update_starts_from_the_policy_that_was_sampled(found: dict[str, Any], case: str) -> None:
    first = found[case]["stats"][0]
    assert first["ratio_max_deviation"] < 1e-4
    assert abs(first["kl"]) < 1e-6
    assert first["mismatch/max_abs"] < TOLERANCE


@pytest.mark.parametrize(("case", "way"), [(case, f"{way} {k}") for case in OTHERS for way, k in OTHERS[case]])
def test_every_other_way_brings_the_same(found: dict[str, Any], case: str, way: str) -> None:
    version, measured = found[case]["others"][way]
    assert measured["versions"] == [version]
    assert measured["difference"] < TOLERANCE
    assert measured["cached"] < TURNS


@pytest.mark.parametrize(
    ("fault", "said"), [("key", "status 401"), ("absent", "127.0.0.1:9/"), ("killed", "/update_weights_from_tensor")]
)
def test_a_server_that_fails_is_left_out_and_the_other_has_the_version(
    found: dict[str, Any], fault: str, said: str
) -> None:
    """Killed is it when the third bucket is there: it has read the first by then."""
    result = found["two-servers"]["failures"][fault]
    (reason,) = result["told"]
    assert reason.startswith("1: ") and said in reason
    assert result["measured"]["difference"] < TOLERANCE
    number = ["key", "absent", "killed"].index(fault)
    assert result["measured"]["versions"] == [found["two-servers"]["later"] + number]


def test_where_all_fail_it_is_an_error_on_every_rank(found: dict[str, Any]) -> None:
    messages = found["two-servers"]["failures"]["all"]
    assert len(messages) == RANKS and all("127.0.0.1:9/" in message for message in messages)
