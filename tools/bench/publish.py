"""Publishing 400 MB into a running SGLang, against a copy of the same bytes and against gathering them.

    .venv/bin/python tools/bench/publish.py [--smoke]

A random float32 Qwen3 of 100 million parameters; a trainer of two ranks, TP2 and then PP2, and a real server of one,
all on the CPU. Warm publishes alternate with a copy of the same bytes in one process and one thread (`time_over_copy`,
the worse of both layouts) and with the gathering way (`peer_over_ours`, the worse): for each bucket every rank gathers
all shards and assembles the Hugging Face tensors; rank 0 flattens them into shared memory and has the server load them.
Its buffers are kept too, and are as large as ours. `bytes_over_target`: bytes that all ranks write over those that the
server holds; `scratch_buckets`: memory allocated for buckets, by server rank; `logprob_diff`: between SGLang's and
Megatron's log-probs of sampled tokens after 20 more publishes, each of changed weights.
--smoke: two layers, each way once, one publish.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_collab import patches
from megatron_collab.launch.trainer_specs import network_spec, sync_spec, trainer_spec

warnings.filterwarnings("ignore")
patches.apply("megatron")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from random_models import save_qwen3  # noqa: E402

from megatron_collab.checkpoint.hf import named_shards  # noqa: E402
from megatron_collab.config import Config  # noqa: E402
from megatron_collab.inference.client import SGLangClient  # noqa: E402
from megatron_collab.inference.server import SGLangServer  # noqa: E402
from megatron_collab.launch import server_specs  # noqa: E402
from megatron_collab.models import hf_to_megatron  # noqa: E402
from megatron_collab.models.hf_to_megatron import ModelShape, WeightEntry  # noqa: E402
from megatron_collab.runtime.network import bindable  # noqa: E402
from megatron_collab.trainer.megatron import parallel  # noqa: E402
from megatron_collab.trainer.trainer import PolicyTrainer  # noqa: E402
from megatron_collab.types import Batch, Sample, Turn  # noqa: E402
from megatron_collab.weight_sync.http_protocol import ServerCall  # noqa: E402
from megatron_collab.weight_sync.node_routing import written  # noqa: E402
from megatron_collab.weight_sync.sender import Sender  # noqa: E402
from megatron_collab.weight_sync.sync import WeightSync  # noqa: E402

LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2)}
VOCAB, BUCKET_BYTES = 4608, 110 << 20
SIZES = {"hidden": 1024, "ffn": 3200, "heads": 16, "kv_heads": 8}
LAYERS, WARM, TIMED, CHANGED = 7, 2, 9, 20
PROMPTS, PROMPT, REPLY = 8, 24, 16


class Served(SimpleNamespace):
    """The server as a publisher sees it. It has released no memory, so resume has nothing to do."""

    ask = SGLangServer.ask

    def resume(self, tag: str) -> None: ...


class TimedServer(Served):
    """A server whose calls are timed by `profile`."""

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> str:
        server: Any = super()
        with self.profile.timed(path.removeprefix("/")):
            return str(server.ask(path, body, timeout))


class TimedSender:
    """A sender whose writes are timed by `profile`."""

    def __init__(self, sender: Sender, profile: Profile) -> None:
        self._sender, self._profile = sender, profile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def write(self, *arguments: Any) -> None:
        with self._profile.timed("write"):
            self._sender.write(*arguments)


def configure(folder: Path, tp: int = 1, pp: int = 1) -> Config:
    config = Config()
    config.launch.device, config.launch.timeout, config.launch.nproc_per_node = "cpu", 120.0, tp * pp
    config.model.path, config.model.dtype = str(folder), "float32"
    config.parallel.tp, config.parallel.pp = tp, pp
    config.rollout.server.max_total_tokens = 4096
    config.rollout.server.replicas = len(LAYOUTS)  # the one server is a different replica for each layout
    config.algo.kl_coef = 0.0
    return config


class Gathering:
    """The gathering way. Its buffers are allocated once and kept."""

    def __init__(self, chunks: list[torch.nn.Module], shape: ModelShape, config: Config, line: dict[str, Any]) -> None:
        self.shape, self.tp, self.pp = shape, config.parallel.tp, config.parallel.pp
        self.shards = {name: shard.detach() for name, shard in named_shards(chunks)}
        self.call = ServerCall(Served(**line), config.launch.timeout)  # type: ignore[arg-type]
        self.buckets: list[list[WeightEntry]] = [[]]
        size = 0
        for entry in hf_to_megatron.table(shape):
            nbytes = 4 * sum(map(np.prod, entry.shapes))
            if size + nbytes > BUCKET_BYTES:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(entry)
            size += int(nbytes)
        owners: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(owners, list(self.shards))
        self.owner = {name: rank for rank, names in reversed(list(enumerate(owners))) for name in names}
        self.gathered = torch.zeros(BUCKET_BYTES // 4)
        self.hf_buffer = torch.zeros(BUCKET_BYTES // 4)
        with shared_by_name():
            self.flat = torch.zeros(BUCKET_BYTES, dtype=torch.uint8).share_memory_()

    @torch.no_grad()
    def publish(self, version: int) -> None:
        rank = dist.get_rank()
        if rank == 0:
            self.call.pause("abort")
            self.call.begin()
        for bucket in self.buckets:
            tensors, start = {}, 0
            for name, hf in ((name, hf) for entry in bucket for name, hf in zip(entry.hf, entry.shapes, strict=True)):
                count = int(np.prod(hf))
                tensors[name] = self.hf_buffer[start : start + count].view(hf)
                start += count
            for entry in bucket:
                for tp_rank, shard in enumerate(self.gather(entry)):
                    for piece in hf_to_megatron.pieces(entry, self.shape, self.tp, tp_rank):
                        tensors[piece.hf][piece.hf_index] = shard[piece.shard_index]
            if rank == 0:
                self.flat[: 4 * start].view(torch.float32).copy_(self.hf_buffer[:start])
                self.send(tensors, version)
            dist.barrier()
        if rank == 0:
            self.call.end()
            self.call.resume()
        dist.barrier()

    def gather(self, entry: WeightEntry) -> list[torch.Tensor]:
        """The shards of all tensor-parallel ranks, on every rank."""
        dimensions = hf_to_megatron.shard_shape(entry, self.tp)
        count = int(np.prod(dimensions))
        shards = [self.gathered[place * count : (place + 1) * count].view(dimensions) for place in range(self.tp)]
        if self.pp > 1:
            if self.owner[entry.megatron] == dist.get_rank():
                shards[0].copy_(self.shards[entry.megatron])
            dist.broadcast(shards[0], self.owner[entry.megatron])
        else:
            dist.all_gather(shards, self.shards[entry.megatron])
        return shards

    def send(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        metadata, start = [], 0
        for name, tensor in tensors.items():
            stop = start + 4 * tensor.numel()
            place = {"start_idx": start, "end_idx": stop, "numel": stop - start}
            metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
            start = stop
        buffer = io.BytesIO()
        with shared_by_name():
            ForkingPickler(buffer).dump({"flattened_tensor": self.flat, "metadata": metadata})
        body = {
            "serialized_named_tensors": [base64.b64encode(buffer.getvalue()).decode()],
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": str(version),
        }
        self.call._post("/update_weights_from_tensor", **body)


@contextmanager
def shared_by_name() -> Iterator[None]:
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


class Profile:
    """Milliseconds of a publish by call, measured on rank 0."""

    def __init__(self) -> None:
        self.laps: dict[str, list[float]] = defaultdict(list)
        self.now: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.now[name] += time.perf_counter() - began

    def lap(self) -> None:
        for name, seconds in self.now.items():
            self.laps[name].append(1e3 * seconds)
        self.now.clear()

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.laps.items()}


def run_rank(folder: Path, layout: str, out: Path, smoke: bool) -> None:
    warm, timed, changed = (0, 1, 1) if smoke else (WARM, TIMED, CHANGED)
    line = json.loads(os.environ["SERVER"])
    config = configure(folder, *LAYOUTS[layout])
    profile = Profile()
    server = TimedServer(**line, profile=profile)
    fleet: Any = SimpleNamespace(present=lambda: [server], lost=lambda server, reason: sys.exit(reason))
    with parallel.init_parallel(config.launch, network_spec(config)):
        actor = PolicyTrainer(trainer_spec(config))
        policy, shape = actor.chunks, actor.shape
        rank = dist.get_rank()
        peer = Gathering(policy, shape, config, line)
        spec, pool = server_specs.training(config).policy, fleet if rank == 0 else None
        with WeightSync(sync_spec(config), spec, policy, shape, pool, BUCKET_BYTES) as publisher:
            in_place: Any = publisher._way  # through shared memory
            in_place.transport._writer = TimedSender(in_place.transport._writer, profile)
            size = 4 * sum(int(np.prod(hf)) for hf in hf_to_megatron.hf_shapes(shape).values())
            source, target = (torch.ones(size // 4) for _ in range(2)) if rank == 0 else (torch.ones(1),) * 2
            times: dict[str, list[float]] = defaultdict(list)
            for number in range(warm + timed):
                ways = {"copy": lambda _: target.copy_(source), "peer": peer.publish, "ours": publisher.publish}
                for name, way in ways.items():
                    dist.barrier()
                    profile.now.clear()
                    began = time.perf_counter()
                    way(number)
                    if number >= warm:
                        times[name].append(time.perf_counter() - began)
                        if name == "ours":
                            profile.lap()
            result: dict[str, Any] = {name: 1e3 * statistics.median(durations) for name, durations in times.items()}
            for number in range(changed):
                change(policy, number)
                publisher.publish(100 + number)
            difference = compare(actor, config, line)
            slices = (piece for items in written(in_place.plan, in_place.places, rank) for _, piece in items)
            sent = sum(piece.size for piece in slices)
            kept = in_place.transport._segments.values()
            scratch = sum(len(segment.data) for segments in kept for segment in segments)
            totals = torch.tensor([sent, scratch], dtype=torch.float64)
            dist.all_reduce(totals)
            result |= {
                "bytes_over_target": float(totals[0]) / size,
                "scratch_buckets": float(totals[1]) / BUCKET_BYTES,
                "logprob_diff": difference,
                "profile": profile.medians(),
            }
            if rank == 0:
                out.write_text(json.dumps(result))


@torch.no_grad()
def change(chunks: list[torch.nn.Module], number: int) -> None:
    """Change the weights; a shard that several ranks hold stays equal on all of them."""
    for name, shard in named_shards(chunks):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
        shard.mul_(1 + 0.05 * torch.randn(shard.shape, generator=generator))


def compare(actor: PolicyTrainer, config: Config, line: dict[str, Any]) -> float:
    """Largest difference between the server's log-probs of what it samples and the trainer's; collective."""
    turns: list[Any] = [asyncio.run(sample(config, line)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(turns)
    samples = []
    for turn in turns[0]:
        length = len(turn.prompt_ids) + len(turn.token_ids)
        log_probs, mask = np.zeros((2, length), np.float32)
        log_probs[len(turn.prompt_ids) :], mask[len(turn.prompt_ids) :] = turn.log_probs, 1.0
        samples.append(Sample(np.array(turn.prompt_ids + turn.token_ids, np.int64), mask, log_probs, ()))
    trainer_log_probs = actor.log_probs(actor.chunks, Batch(tuple(samples)))
    pairs = zip(trainer_log_probs, samples, strict=True)
    return max(float(np.abs((ours - sample.log_probs) * sample.loss_mask).max()) for ours, sample in pairs)


async def sample(config: Config, line: dict[str, Any]) -> list[Turn]:
    prompts = np.random.default_rng(0).integers(10, VOCAB, (PROMPTS, PROMPT)).tolist()
    client = SGLangClient(line["url"], line["api_key"], server_specs.training(config).client)
    requests = [
        client.generate(tuple(prompt), max_new_tokens=REPLY, sampling=config.rollout.turn, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    turns = await asyncio.gather(*requests)
    await client.close()
    return turns


def run_layout(folder: Path, layout: str, server: SGLangServer, index: int, smoke: bool) -> dict[str, Any]:
    """Run the ranks of a layout. For them each layout has its own server, with the number `index`."""
    out = folder / f"{layout}.json"
    line = {"url": server.url, "api_key": server.api_key, "tp": 1, "index": index, "generation": 0}
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(bindable("bench", 0)),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "SERVER": json.dumps(line),
    }
    command = [sys.executable, __file__, "--rank", str(folder), layout, str(out), *(["--smoke"] if smoke else [])]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)
    ]
    try:
        if any([rank.wait(600) for rank in ranks]):
            raise SystemExit(f"{layout}: a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a small model, once: shows that it runs, no figures")
    arguments = parser.parse_args()
    if arguments.rank:
        folder, layout, out = arguments.rank
        run_rank(Path(folder), layout, Path(out), arguments.smoke)
        return
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        layers = 2 if arguments.smoke else LAYERS
        save_qwen3(folder, **SIZES, vocab=VOCAB, layers=layers, words=True, initializer_range=0.05)
        with SGLangServer(server_specs.training(configure(folder)).policy, folder / "server.log") as server:
            server.wait_healthy(400)
            results = {
                layout: run_layout(folder, layout, server, index, arguments.smoke)
                for index, layout in enumerate(LAYOUTS)
            }
    print(f"{'':6}{'copy':>8}{'ours':>8}{'peer':>8}  ms, of which rank 0's:")
    for layout, result in results.items():
        profile = ", ".join(f"{name} {ms:.1f}" for name, ms in result["profile"].items())
        print(f"{layout:6}{result['copy']:8.1f}{result['ours']:8.1f}{result['peer']:8.1f}  {profile}")
    values = {
        "time_over_copy": max(result["ours"] / result["copy"] for result in results.values()),
        "peer_over_ours": min(result["peer"] / result["ours"] for result in results.values()),
        **{name: max(result[name] for result in results.values()) for name in ("bytes_over_target", "scratch_buckets")},
        "logprob_diff": max(result["logprob_diff"] for result in results.values()),
    }
    print(json.dumps({"name": "publish", "values": values}))


if __name__ == "__main__":
    main()
