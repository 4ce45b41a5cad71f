"""What test_killed.py runs: `kill_worker.py FOLDER`, the server in the environment variable SERVER.

Two ranks publish other weights and are killed at a moment of it, for every moment in turn; each time two new ones then
publish the model of FOLDER. All are forks of this process, which imports once. Writes FOLDER/found.json.
"""

# ruff: noqa: E402 (patches come before Megatron-Core)

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import torch

from megatron_collab import patches

patches.apply("megatron")

from megatron_collab.trainer.megatron import model as policies
from megatron_collab.trainer.megatron import parallel
from megatron_collab.weight_sync.http_protocol import ServerCall
from megatron_collab.weight_sync.store_protocol import Board
from megatron_collab.weight_sync.sync import WeightSync
from tests.helpers import free_port
from tests.weight_sync.publish_worker import configure

BUCKETS = 5
BUCKET_BYTES = 160_000
MOMENTS = [*(f"bucket {number}" for number in range(BUCKETS)), "end", "go_on"]
PROMPTS = [[7, 8, 9, 10], list(range(20, 60))]


class Fleet:
    def __init__(self, server: dict[str, Any]) -> None:
        self.server = SimpleNamespace(**server, index=0, generation=0, resume=lambda tag: None)

    def present(self) -> list[Any]:
        return [self.server]

    def lost(self, server: Any, reason: str) -> None:
        raise AssertionError(reason)


def publish(folder: Path, server: dict[str, Any], version: int, factor: float) -> None:
    """As a rank: the model of `folder`, all weights times `factor`, as `version`."""
    config = configure(folder, {"tp": 2})
    with parallel.init_parallel(config):
        policy, shape = policies.load(config)
        with torch.no_grad():
            for chunk in policy:
                for parameter in chunk.parameters():
                    parameter.mul_(factor)
        fleet = Fleet(server) if os.environ["RANK"] == "0" else None
        with WeightSync(config, policy, shape, fleet, BUCKET_BYTES) as publisher:
            assert len(publisher._plan.rounds) == BUCKETS
            publisher.publish(version)


def kill_at(moment: str, rank: int) -> None:
    """From now on: this rank ends its group when the server has read a bucket, or instead of a call to it."""

    def die() -> None:
        os.killpg(0, signal.SIGKILL)

    what, _, number = moment.partition(" ")
    if what == "bucket":
        written = Board.set_written

        def write_and_die(board: Board, bucket: int, source: int) -> None:
            written(board, bucket, source)
            if bucket == int(number) and source == rank == bucket % 2:
                assert not board.late(bucket, [(0, 0)], 60)
                die()

        Board.set_written = write_and_die  # type: ignore[method-assign]
    else:
        setattr(ServerCall, what, lambda link: die())


def run_pair(work: Callable[[int], None]) -> list[int]:
    """Two forks of this process, ranks of one group, do `work(rank)`; their exit codes, negative for a signal."""
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group, children = 0, []
    for rank in range(2):
        child = os.fork()
        if not child:
            os.setpgid(0, group)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.setpgid(child, group or child)
        group = group or child
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def sample(server: dict[str, Any], prompt: list[int], timeout: float) -> dict[str, Any] | None:
    """Tokens, log-probs and version of a reply; None where there is none in time."""
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


def main(folder: Path) -> None:
    server = json.loads(os.environ["SERVER"])
    found: dict[str, Any] = {}

    def save(version: int) -> list[dict[str, Any] | None]:
        assert run_pair(lambda rank: publish(folder, server, version, 1.0)) == [0, 0]
        return [sample(server, prompt, 60) for prompt in PROMPTS]

    found["reference"] = save(1)
    for number, moment in enumerate(MOMENTS):

        def doomed(rank: int, moment: str = moment) -> None:
            kill_at(moment, rank)
            publish(folder, server, 1000, 0.9)

        codes = run_pair(doomed)
        found[moment] = {
            "codes": codes,
            "answered": sample(server, PROMPTS[0], 0.5),
            "recovered": save(2 + number),
        }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
