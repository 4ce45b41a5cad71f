"""A publisher that is killed in the middle leaves no mixture of versions behind: the server waits for the next one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch

from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.launch.trainer_specs import network_spec, sync_spec
from megatron_collab.trainer.megatron import model as policies
from megatron_collab.weight_sync.http_protocol import ServerCall
from megatron_collab.weight_sync.store_protocol import PlaceStore
from megatron_collab.weight_sync.sync import WeightSync
from tests.conftest import Served
from tests.forked import fork
from tests.helpers import make_model, policy_servers
from tests.ranks import init_parallel, run_ranks
from tests.weight_sync.test_engine_parity import Line, configure

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BUCKETS = 5
BUCKET_BYTES = 160_000
MOMENTS = [*(f"bucket {number}" for number in range(BUCKETS)), "end", "resume"]
PROMPTS = [[7, 8, 9, 10], list(range(20, 60))]


@pytest.fixture(scope="module")
def outcomes(servers: dict[str, Served], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_model(tmp_path_factory.mktemp("killed"), seed=2)
    server = servers["untied"].server
    (result,) = run_ranks(kill_at_every_moment, 1, folder, {"url": server.url, "api_key": server.api_key, "tp": 1})
    return result


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_no_request_is_answered_until_a_version_is_whole(
    outcomes: dict[str, Any], moment: str
) -> None:
    result = outcomes[moment]
    assert result["codes"] == [-9, -9]
    assert result["answered"] is None
    for recovered, reference in zip(result["recovered"], outcomes["reference"], strict=True):
        assert recovered["version"] == str(2 + MOMENTS.index(moment))
        assert recovered["log_probs"] == reference["log_probs"]


def kill_at_every_moment(folder: Path, server: dict[str, Any]) -> dict[str, Any]:
    """Two ranks publish other weights and are killed; each time two new ones then publish the model of `folder`.

    All are forks of this process, which imports once.
    """

    def save(version: int) -> list[dict[str, Any] | None]:
        assert fork(publish, 2, folder, server, version, 1.0) == [(0, None)] * 2
        return [sample(server, prompt, 60) for prompt in PROMPTS]

    results: dict[str, Any] = {"reference": save(1)}
    for number, moment in enumerate(MOMENTS):
        results[moment] = {
            "codes": [code for code, _ in fork(publish_and_die, 2, folder, server, moment)],
            "answered": sample(server, PROMPTS[0], 0.5),
            "recovered": save(2 + number),
        }
    return results


def publish_and_die(folder: Path, server: dict[str, Any], moment: str) -> None:
    kill_at(moment, int(os.environ["RANK"]))
    publish(folder, server, 1000, 0.9)


class Fleet:
    def __init__(self, server: dict[str, Any]) -> None:
        self.server = Line(**server, index=0)

    def present(self) -> list[Any]:
        return [self.server]

    def lost(self, server: Any, reason: str) -> None:
        raise AssertionError(reason)


def publish(folder: Path, server: dict[str, Any], version: int, factor: float) -> None:
    """Run on each rank: publish the model of `folder`, all weights times `factor`, as `version`."""
    config = configure(folder, {"tp": 2})
    spec = policy_servers(config)
    with init_parallel(config):
        policy = policies.load(network_spec(config))
        with torch.no_grad():
            for chunk in policy:
                for parameter in chunk.parameters():
                    parameter.mul_(factor)
        fleet = Fleet(server) if os.environ["RANK"] == "0" else None
        with WeightSync(sync_spec(config), spec, policy, unwrap(policy[0]).shape, fleet, BUCKET_BYTES) as publisher:
            assert len(publisher._way.plan) == BUCKETS
            publisher.publish(version)


def kill_at(moment: str, rank: int) -> None:
    """From now on this rank kills its group when the server has read a bucket, or instead of a call to it."""

    def die() -> None:
        os.killpg(0, signal.SIGKILL)

    event, _, number = moment.partition(" ")
    if event == "bucket":
        written = PlaceStore.set_written

        def write_and_die(store: PlaceStore, bucket: int, source: int) -> None:
            written(store, bucket, source)
            if bucket == int(number) and source == rank == bucket % 2:
                assert not store.late(bucket, [(0, 0)], 60)
                die()

        PlaceStore.set_written = write_and_die  # type: ignore[method-assign]
    else:
        setattr(ServerCall, event, lambda link: die())


def sample(server: dict[str, Any], prompt: list[int], timeout: float) -> dict[str, Any] | None:
    """Tokens, log-probs and version of a reply; None if there is none in time."""
    body = {"input_ids": prompt, "return_logprob": True, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    headers = {"Authorization": f"Bearer {server['api_key']}", "Content-Type": "application/json"}
    try:
        with urlopen(
            Request(f"{server['url']}/generate", json.dumps(body).encode(), headers), timeout=timeout
        ) as reply:
            answer = json.load(reply)
    except TimeoutError:
        return None
    meta = answer["meta_info"]
    return {"log_probs": meta["output_token_logprobs"], "version": meta["weight_version"]}
