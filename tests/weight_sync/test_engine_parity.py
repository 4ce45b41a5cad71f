"""SGLang equals Megatron after every publish: real server, real trainer on two ranks, in every layout."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_collab.config import Config
from megatron_collab.inference.client import SGLangClient
from megatron_collab.inference.server import SGLangServer
from megatron_collab.launch import server_specs
from megatron_collab.launch.trainer_specs import sync_spec, trainer_spec
from megatron_collab.trainer.trainer import PolicyTrainer
from megatron_collab.types import Batch, Credit, Sample, Turn
from megatron_collab.weight_sync.store_protocol import PlaceStore, SyncStore
from megatron_collab.weight_sync.sync import PublishError, WeightSync
from megatron_collab.weight_sync.transports.shared_memory import SharedMemoryTransport
from tests.conftest import Served, serving_config
from tests.helpers import make_model, policy_servers
from tests.ranks import init_parallel, learn, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RANKS = 2
TOLERANCE = 1e-4
# On CPU SGLang pads experts to multiples of 32 x tp.
EXPERTS: dict[str, Any] = {"family": "qwen3_moe", "moe_intermediate_size": 64}
# name: (servers of this model, layout of the trainer, bytes of a bucket); data parallel is what remains of two ranks
CASES: dict[str, tuple[str, dict[str, int], int]] = {
    "tp2": ("untied", {"tp": 2}, 1 << 20),
    "tp2-many-buckets": ("untied", {"tp": 2}, 1 << 15),
    "pp2": ("untied", {"pp": 2}, 1 << 17),
    "dp2": ("untied", {}, 1 << 20),
    "tied-tp2": ("tied", {"tp": 2}, 1 << 20),
    "tied-pp2": ("tied", {"pp": 2}, 1 << 20),
    "ep2-to-tp2": ("experts", {"ep": 2}, 1 << 17),
    "two-nodes-tp2": ("untied-twice", {"tp": 2}, 1 << 17),
    "two-nodes-pp2": ("untied-twice", {"pp": 2}, 1 << 17),
    "adapters-tp2": ("untied", {"tp": 2}, 1 << 17),
    "adapters-pp2": ("tied", {"pp": 2}, 1 << 20),
    "beside-tp2": ("beside", {"tp": 2, "sequence_parallel": True}, 1 << 17),
    "beside-pp2": ("beside-cut", {"pp": 2}, 1 << 17),
    "beside-experts": ("beside-experts", {"ep": 2}, 1 << 17),
    "two-servers": ("untied-twice", {"tp": 2}, 1 << 17),
}
TWO_NODES = ("two-nodes-tp2", "two-nodes-pp2")  # of one rank and one server each; the others have one node
# Other transports of a case, with the staleness: servers pause by retract if sampling runs ahead.
OTHER_WAYS = {
    "tp2": (("network", 0), ("disk", 0), ("memory", 1)),
    "pp2": (("network", 1),),
    "adapters-tp2": (("disk", 0),),
    "beside-tp2": (("network", 0), ("memory", 1)),
}
UPDATES = 2
TURNS, PROMPT, REPLY = 12, 20, 16


@pytest.fixture(scope="module")
def running(
    servers: dict[str, Served], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[SGLangServer]]]:
    """The shared servers, a second one of the untied model, one of experts with TP 2, and some with adapters."""
    folder = tmp_path_factory.mktemp("running")
    experts, untied = make_model(folder / "experts", **EXPERTS), servers["untied"].folder
    configs = {
        "second": serving_config(untied),
        "experts": serving_config(experts),
        "beside": with_adapters(serving_config(untied), "beside"),
        "beside-cut": with_adapters(serving_config(untied), "beside-cut"),
        "beside-experts": with_adapters(serving_config(experts), "beside-experts"),
    }
    for cut in ("experts", "beside-cut", "beside-experts"):
        configs[cut].rollout.server.tp = 2
    with ExitStack() as stack:
        started = {}
        for index, (kind, config) in enumerate(configs.items(), start=1):
            started[kind] = stack.enter_context(
                SGLangServer(policy_servers(config), folder / f"{kind}.log", index=index)
            )
        for server in started.values():
            server.wait_healthy(400.0)
        known = {kind: [served.server] for kind, served in servers.items()}
        second = started.pop("second")
        alone = {kind: [server] for kind, server in started.items()}
        yield known | {"untied-twice": [*known["untied"], second], **alone}


def with_adapters(config: Config, kind: str) -> Config:
    """Adapters of rank 8; servers hold them beside the base if their `kind` says so."""
    lora = config.model.lora
    lora.rank, lora.serve = 8, "adapters" if kind.startswith("beside") else "merged"
    if kind == "beside-experts":
        lora.targets = ["q_proj", "v_proj", "o_proj"]
    return config


@pytest.fixture(scope="module")
def measurements(running: dict[str, list[SGLangServer]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("publish")
    models: dict[str, dict[str, Any]] = {"untied": {}, "tied": {"tied": True}, "experts": EXPERTS, "beside": {}}
    for kind, settings in (models | {"beside-cut": {}, "beside-experts": EXPERTS}).items():
        make_model(folder / kind, seed=1, **settings)  # other weights than the server's
    lines = {
        kind: [
            {"url": server.url, "api_key": server.api_key, "tp": server.tp, "pid": server.process.pid}
            for server in alike
        ]
        for kind, alike in running.items()
    }
    return run_ranks(publish_in_every_case, RANKS, folder, lines)[0]


@pytest.mark.parametrize("case", CASES)
def test_log_probs_agree_after_every_publish_and_only_then(measurements: dict[str, Any], case: str) -> None:
    rounds, first = measurements[case]["rounds"], measurements[case]["first"]
    stale, published = rounds[0::2], rounds[1::2]
    assert len(published) == 1 + UPDATES
    assert all(measured["difference"] < TOLERANCE for measured in published)
    assert [measured["versions"] for measured in published] == [[first + step] for step in range(1 + UPDATES)]
    assert all(measured["difference"] > 100 * TOLERANCE for measured in stale)


@pytest.mark.parametrize("case", CASES)
def test_the_prefix_cache_keeps_nothing_of_old_weights(measurements: dict[str, Any], case: str) -> None:
    stale, published = measurements[case]["rounds"][2::2], measurements[case]["rounds"][1::2]
    everything = TURNS * (PROMPT - 1)  # the last token of a prompt is always read
    assert all(measured["cached"] == everything for measured in stale)
    assert all(measured["cached"] < TURNS for measured in published)


@pytest.mark.parametrize("case", ["beside-tp2", "beside-pp2"])
def test_a_turn_with_adapters_does_not_depend_on_the_batch(measurements: dict[str, Any], case: str) -> None:
    assert measurements[case]["alone"] == [True, True, True]


@pytest.mark.parametrize("case", ["two-servers", *TWO_NODES])
def test_every_server_samples_the_same(measurements: dict[str, Any], case: str) -> None:
    assert [measured["alike"] for measured in measurements[case]["rounds"][1:]] == [True] * (1 + 2 * UPDATES)


@pytest.mark.parametrize("case", TWO_NODES)
def test_a_server_knows_segments_of_its_own_node_only(measurements: dict[str, Any], case: str) -> None:
    assert measurements[case]["makers"] == [[0], [1]]


@pytest.mark.parametrize("case", CASES)
def test_the_first_update_starts_from_the_policy_that_was_sampled(measurements: dict[str, Any], case: str) -> None:
    first = measurements[case]["stats"][0]
    assert first["ratio_max_deviation"] < 1e-4
    assert abs(first["kl"]) < 1e-6
    assert first["mismatch/max_abs"] < TOLERANCE


@pytest.mark.parametrize(("case", "way"), [(case, f"{way} {k}") for case in OTHER_WAYS for way, k in OTHER_WAYS[case]])
def test_every_other_transport_delivers_the_same_weights(measurements: dict[str, Any], case: str, way: str) -> None:
    version, measured = measurements[case]["others"][way]
    assert measured["versions"] == [version]
    assert measured["difference"] < TOLERANCE
    assert measured["cached"] < TURNS


@pytest.mark.parametrize(
    ("fault", "message"), [("key", "status 401"), ("absent", "127.0.0.1:9/"), ("killed", "/update_weights_from_tensor")]
)
def test_a_server_that_fails_is_left_out_and_the_other_has_the_version(
    measurements: dict[str, Any], fault: str, message: str
) -> None:
    """The killed server dies when the third bucket is written; it has read the first by then."""
    result = measurements["two-servers"]["failures"][fault]
    (reason,) = result["reasons"]
    assert reason.startswith("1: ") and message in reason
    assert result["measured"]["difference"] < TOLERANCE
    number = ["key", "absent", "killed"].index(fault)
    assert result["measured"]["versions"] == [measurements["two-servers"]["later"] + number]


def test_every_rank_raises_if_all_servers_fail(measurements: dict[str, Any]) -> None:
    messages = measurements["two-servers"]["failures"]["all"]
    assert len(messages) == RANKS and all("127.0.0.1:9/" in message for message in messages)


def publish_in_every_case(folder: Path, servers: dict[str, Any]) -> dict[str, Any]:
    """Run on each of two ranks: how far the servers' log-probs differ from the trainer's, each time.

    For every case a model is loaded that the servers have not seen, published, trained twice and published again; in
    some of them then once more over every other transport. The last server of the last case is killed.
    """
    return {name: publish_in(folder, name, servers) for name in CASES}


def publish_in(folder: Path, name: str, servers: dict[str, Any]) -> dict[str, Any]:
    kind, layout, bucket_bytes = CASES[name]
    config = configure(folder / kind.removesuffix("-twice"), layout, servers[kind][0]["tp"])
    if name.startswith(("adapters", "beside")):
        with_adapters(config, kind)
    if name in TWO_NODES:
        config.launch.nodes, config.launch.nproc_per_node = 2, 1
    first = 10 * (1 + list(CASES).index(name))
    with init_parallel(config):
        case = Case(config, servers[kind], bucket_bytes)
        rounds = [case.measure()]
        stats: list[dict[str, float]] = []
        publisher, fleet = case.publisher()
        makers = note_makers()
        with publisher:
            publisher.publish(first)
            rounds.append(case.measure())
            for step in range(1, 1 + UPDATES):
                stats.append(case.update())
                rounds.append(case.measure())
                publisher.publish(first + step)
                rounds.append(case.measure())
        assert fleet is None or not fleet.reasons
        result: dict[str, Any] = {"first": first, "rounds": rounds, "stats": stats, "makers": makers}
        if name.startswith("beside") and dist.get_rank() == 0:
            result["alone"] = [case.alone(count) for count in (1, 2, 3)]
        later = first + UPDATES + 1
        result["others"] = {
            f"{way} {staleness}": [later + number, case.otherwise(way, staleness, later + number)]
            for number, (way, staleness) in enumerate(OTHER_WAYS.get(name, ()))
        }
        if name == "two-servers":
            result |= {"failures": case.failures(later), "later": later}
    return result


def configure(folder: Path, layout: dict[str, int], server_tp: int = 1) -> Config:
    config = Config()
    config.launch.device, config.launch.timeout, config.launch.nproc_per_node = "cpu", 60.0, 2
    config.model.path, config.model.dtype = str(folder), "float32"
    config.run.dir, config.publish.verify, config.rollout.server.replicas = f"{folder}-run", 2, 2
    config.rollout.server.tp = server_tp
    for option, size in layout.items():
        setattr(config.parallel, option, size)
    config.train.steps, config.optim.lr, config.algo.kl_coef = 100, 1e-2, 0.1
    config.rollout.turn.temperature = 1.0 if layout else 0.7
    return config


def sample_turns(server: dict[str, Any], seed: int, config: Config, count: int = TURNS) -> tuple[list[Turn], int]:
    """Turns sampled by the server from the same random prompts each time, and how many prompt tokens it had cached."""
    prompts = np.random.default_rng(0).integers(3, 500, (TURNS, PROMPT)).tolist()[:count]

    async def sample() -> tuple[list[Turn], int]:
        client = SGLangClient(server["url"], server["api_key"], server_specs.training(config).client)
        try:
            requests = [
                client.generate(tuple(prompt), max_new_tokens=REPLY, sampling=config.rollout.turn, seed=seed * 1000 + i)
                for i, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*requests), client.counters["cached_tokens"]
        finally:
            await client.close()

    return asyncio.run(sample())


def to_sample(turn: Turn, value: float) -> Sample:
    length = len(turn.prompt_ids) + len(turn.token_ids)
    log_probs, mask = np.zeros(length, np.float32), np.zeros(length, np.float32)
    log_probs[len(turn.prompt_ids) :], mask[len(turn.prompt_ids) :] = turn.log_probs, 1.0
    credit = Credit(((len(turn.prompt_ids), length),), value, peers="all", scale="all")
    return Sample(np.array(turn.prompt_ids + turn.token_ids, np.int64), mask, log_probs, (credit,))


class Line(SimpleNamespace):
    """What a publisher knows of a server in another process; its memory is not released."""

    generation = 0
    ask = SGLangServer.ask

    def resume(self, tag: str) -> None:
        """Nothing was released."""


class Fleet:
    """Servers; a lost one does not come back."""

    def __init__(self, servers: list[dict[str, Any]]) -> None:
        self.servers = [Line(**server, index=i) for i, server in enumerate(servers)]
        self.reasons: list[str] = []

    def present(self) -> list[Any]:
        return self.servers

    def lost(self, server: Any, reason: str) -> None:
        self.reasons.append(f"{server.index}: {reason}")


class Case:
    """One model in one layout, beside the servers that it is published to."""

    def __init__(self, config: Config, servers: list[dict[str, Any]], bucket_bytes: int) -> None:
        self.servers, self.config, self.bucket_bytes = servers, config, bucket_bytes
        self.actor = PolicyTrainer(trainer_spec(config))
        self.samples: tuple[Sample, ...] = ()
        self.seed = 0

    def publisher(self, **changes: Any) -> tuple[WeightSync, Fleet | None]:
        """A new publisher with its fleet; `changes` apply to the last server."""
        servers = [*self.servers[:-1], self.servers[-1] | changes]
        fleet = Fleet(servers) if dist.get_rank() == 0 else None
        sync, spec = sync_spec(self.config), policy_servers(self.config)
        return WeightSync(sync, spec, self.actor.chunks, self.actor.shape, fleet, self.bucket_bytes), fleet

    def measure(self, servers: int | None = None) -> dict[str, Any]:
        """Sample; return the largest log-prob difference of servers and trainer, the versions and the cached tokens.

        `alike`: whether the (first `servers`) servers gave bitwise equal turns.
        """
        self.seed += 1
        shared: list[Any] = [None]
        if dist.get_rank() == 0:
            sampled = self.servers[:servers]
            shared = [[sample_turns(server, self.seed, self.config) for server in sampled]]
        dist.broadcast_object_list(shared)
        (turns, cached), *remaining = shared[0]
        values = np.random.default_rng(self.seed).normal(size=len(turns))
        self.samples = tuple(to_sample(turn, value) for turn, value in zip(turns, values, strict=True))
        log_probs = self.actor.log_probs(self.actor.chunks, Batch(self.samples))
        pairs = zip(log_probs, self.samples, strict=True)
        difference = max(float(np.abs((ours - sample.log_probs) * sample.loss_mask).max()) for ours, sample in pairs)
        return {
            "difference": difference,
            "versions": sorted({version for turn in turns for version in turn.versions}),
            "cached": cached,
            "alike": all(answer == turns for answer, _ in remaining),
        }

    def alone(self, count: int) -> bool:
        """Whether the first `count` turns of the last measure are bitwise the same in a smaller batch."""
        first, _ = sample_turns(self.servers[0], self.seed, self.config, count)
        samples = [to_sample(turn, 0.0) for turn in first]
        pairs = zip(samples, self.samples, strict=False)
        return all(
            np.array_equal(sample.token_ids, other.token_ids) and np.array_equal(sample.log_probs, other.log_probs)
            for sample, other in pairs
        )

    def update(self) -> dict[str, float]:
        return learn(self.actor, Batch(self.samples))

    def otherwise(self, transport: str, staleness: int, version: int) -> dict[str, Any]:
        """Train once more and publish over another transport."""
        self.config.publish.transport, self.config.rollout.max_staleness = transport, staleness
        self.update()
        with self.publisher()[0] as publisher:
            publisher.publish(version)
            return self.measure()

    def failures(self, first: int) -> dict[str, Any]:
        """The fleet's reasons and the first server's state if the last server fails; the messages if all fail."""
        outcomes: dict[str, Any] = {}
        faults = {"key": {"api_key": "wrong"}, "absent": {"url": "http://127.0.0.1:9"}, "killed": {}}
        for number, (name, changes) in enumerate(faults.items()):
            self.update()
            publisher, fleet = self.publisher(**changes)
            with publisher:
                if name == "killed":
                    publisher.publish(first + number)
                    kill_at_bucket(2, self.servers[-1]["pid"])
                publisher.publish(first + number)
                assert publisher.version == first + number
            outcomes[name] = {"reasons": fleet.reasons if fleet else [], "measured": self.measure(servers=1)}
        return outcomes | {"all": self.nobody_left()}

    def nobody_left(self) -> list[str]:
        """The message on every rank if no server can be reached."""
        self.servers = self.servers[-1:]
        messages: list[Any] = [None] * dist.get_world_size()
        with self.publisher(url="http://127.0.0.1:9")[0] as publisher:
            try:
                publisher.publish(999)
            except PublishError as error:
                dist.all_gather_object(messages, str(error))
            assert publisher.version is None
        return messages


def note_makers() -> list[list[int]]:
    """Record from now on, for every server that receives segment addresses, the ranks that created the segments."""
    processes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    addresses, makers = SharedMemoryTransport.addresses, []

    def note(memory: SharedMemoryTransport, store: SyncStore, peers: Any) -> Any:
        by_server = addresses(memory, store, peers)
        for ranks in by_server.values():
            paths = {path for address in ranks for path, _ in address["handles"]}
            makers.append(sorted({processes.index(int(path.split("/")[2])) for path in paths}))
        SharedMemoryTransport.addresses = addresses
        return by_server

    SharedMemoryTransport.addresses = note
    return makers


def kill_at_bucket(number: int, group: int) -> None:
    """From now on rank 0 kills all processes of a server once it has written that bucket."""
    written = PlaceStore.set_written

    def kill(store: PlaceStore, bucket: int, source: int) -> None:
        written(store, bucket, source)
        if bucket == number and source == 0:
            os.killpg(group, signal.SIGKILL)

    PlaceStore.set_written = kill  # type: ignore[method-assign]
