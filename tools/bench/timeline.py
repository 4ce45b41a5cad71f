"""Where the GPUs' time goes in a step: the real scheduling under a simulated clock, with simulated GPUs and models.

`python tools/bench/timeline.py [CASE …] [--smoke]` runs the real RolloutManager, players, routers, reward workers,
limiter and journal on one event loop whose clock jumps (tools/bench/simulated/). Simulated are Ray's calls (1 ms each),
the SGLang servers (prefill and decode by a roofline, a prefix cache that fills and retracts), the latencies of users
and judges (lognormal, median 2 s, 99th percentile 15 s), and the phases of the trainer. Tasks have 500
tokens, messages 60; replies have 400 on average, lognormal with sigma 0.6, and tasks differ by sigma 0.3.

A GPU is an H100: 989 TFLOPS of bfloat16, of which 50 % are reached in a prefill; 3.35 TB/s, of which 90 % are reached.
The time of learning, and the bytes of weights, KV cache, offloading and a weight sync, are those of planning/. FP8
counts as bfloat16 in products of a prefill.

For each case (8 GPUs: train_8b; 128: train_70b; 1024: train_70b on eight times the nodes with 8,208 conversations a
step; `cut`: with rollout.max_staleness=1 or 2, so that conversations of later steps pause while the trainer learns;
`ahead`: with rollout.max_staleness=1 on the same GPUs, half of which serve):

    sample, score, update, publish, move, idle   shares of the GPUs' time; move: memory between servers and trainer
    step_seconds, step_over_bound   the bound is the larger of: the longest conversation between its publish and its
                    update, over 1 + max_staleness; the GPUs' work in full batches. llm has no limits per minute here
    busiest_over_mean   sampled tokens of the busiest server of a step
    retracted       requests that a full cache sent back
    cpu_seconds     of the simulation, which has one thread

--latencies FOLDER: the latencies of users and judges are drawn from the calls of a recording (llm.record). --smoke: a
small step of the first two cases. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from simulated.clock import VirtualLoop, VirtualRay
from simulated.players import LanguageModel, Ledger, Policy, Renderer, Traffic, recorded_seconds
from simulated.server import Client, Replies, Roofline, Server

from megatron_collab import patches

patches.apply("megatron")

from megatron_collab.algo.credit import CreditSpec  # noqa: E402
from megatron_collab.commands.plan_sync import BANDWIDTHS, GB  # noqa: E402
from megatron_collab.config import Config  # noqa: E402
from megatron_collab.data.datasets import task_row, write_jsonl  # noqa: E402
from megatron_collab.environments import tiny_model  # noqa: E402
from megatron_collab.inference.router import Router  # noqa: E402
from megatron_collab.inference.spec import ServerSpec, ServingSpec  # noqa: E402
from megatron_collab.launch import server_specs  # noqa: E402
from megatron_collab.launch.data_specs import data_spec  # noqa: E402
from megatron_collab.launch.play_specs import play_spec  # noqa: E402
from megatron_collab.launch.trainer_specs import trainer_layout  # noqa: E402
from megatron_collab.llm.limiter import Limiter  # noqa: E402
from megatron_collab.models import hf_to_megatron  # noqa: E402
from megatron_collab.models.hf_config import ModelShape  # noqa: E402
from megatron_collab.planning import h100  # noqa: E402
from megatron_collab.planning.memory import kv_cache, plan_memory, read_run, server_weights  # noqa: E402
from megatron_collab.planning.step_time import step_samples, step_time  # noqa: E402
from megatron_collab.planning.weight_sync_cost import Bandwidth, sync_cost  # noqa: E402
from megatron_collab.reward.metrics import Judge  # noqa: E402
from megatron_collab.reward.workers import RewardClient, RewardWorker  # noqa: E402
from megatron_collab.rollout.conversation import FuturesPlayer  # noqa: E402
from megatron_collab.rollout.manager import RolloutManager  # noqa: E402
from megatron_collab.rollout.users import Users  # noqa: E402
from megatron_collab.rollout.workers import Workers  # noqa: E402
from megatron_collab.trainer.megatron.config import DTYPES  # noqa: E402
from megatron_collab.types import Batch, Group, Message, PausedTurn, Task  # noqa: E402
from megatron_collab.weight_sync.plan import plan_sync  # noqa: E402

PREFILL_MFU = 0.50
BYTES = h100.HBM * 0.9  # a second, of a GPU
STEP_SECONDS, PREFILL_SECONDS = 0.7e-3, 5e-3  # overhead of a decoding step and of a prefill
REDUCE_SECONDS = 12e-6  # of an all-reduce between the GPUs of a server; two a layer
HOST_BYTES = 50e9  # a second, between a GPU and pinned memory
MAP_SECONDS = 0.3  # to release memory, to resume it, and for the trainer to allocate it again

SEVENTY = ["experiment=train_70b"]
FLEET = ["launch.nodes=128", "rollout.server.replicas=128", "rollout.workers=128", "reward.workers=128"]
CUT = ["rollout.max_staleness=1", "algo.correction=truncated"]
AHEAD = [*CUT, "rollout.server.colocated=false", "parallel.offload=false"]
# Measured steps, settings. With max_staleness=k the seconds of steps recur after k + 1: long after short phases.
CASES: dict[str, tuple[int, list[str]]] = {
    "8": (2, ["experiment=train_8b"]),
    "8_cut": (4, ["experiment=train_8b", *CUT]),
    "8_cut_2": (3, ["experiment=train_8b", *CUT, "rollout.max_staleness=2"]),
    "8_ahead": (4, ["experiment=train_8b", *AHEAD, "launch.nproc_per_node=4", "rollout.server.replicas=4"]),
    "128": (1, SEVENTY),
    "128_cut": (4, [*SEVENTY, *CUT]),
    "128_ahead": (
        4,
        [
            *SEVENTY,
            *AHEAD,
            "launch.nproc_per_node=4",
            "parallel.tp=4",
            "rollout.server.tp=4",
            "rollout.server.max_total_tokens=589824",
        ],
    ),
    "1024": (1, [*SEVENTY, *FLEET, "train.prompts_per_step=342"]),
}


@dataclass(frozen=True)
class Trainer:
    """Seconds of the trainer's phases; `gpus`: of the trainer."""

    config: Config
    shape: ModelShape
    gpus: int
    publish: float
    move: float  # from training to sampling, and back

    def learning(self, tokens: int) -> tuple[float, float]:
        """Seconds of the passes before the update, and of the update, over `tokens` of a step's samples."""
        time = step_time(self.config, self.shape, tokens / step_samples(self.config))
        return time.score, time.seconds - time.score


@dataclass
class Step:
    """What a step took, in seconds; `sampled`: GPU seconds of the servers, `sampling`: until the batch is complete."""

    sampling: float
    score: float
    update: float
    publish: float
    move: float
    seconds: float
    sampled: float
    chain: float
    work: float
    busiest: float


class SimulatedRouter(Router):
    """A Router of simulated servers."""

    def __init__(self, servers: Sequence[Server], spec: Any, policy: Replies) -> None:
        super().__init__([("simulated", "")] * len(servers), spec)
        self.clients = [Client(server, spec, policy) for server in servers]


class ConversationWorker:
    """Plays groups as the run's workers do."""

    def __init__(self, player: FuturesPlayer, router: Router) -> None:
        self.player, self.router = player, router

    async def play(self, task: Task, stream: str, eval_set: None, server: int, turns: Sequence[PausedTurn]) -> Group:
        with self.router.group(stream, server, turns):
            return await self.player.play(task, stream)

    async def pause(self) -> None:
        self.router.pause()

    async def paused(self) -> dict[str, list[PausedTurn]]:
        return await self.router.paused()

    async def resume(self) -> None:
        self.router.resume()

    async def take_counters(self) -> dict[str, int]:
        return self.router.take_counters()


class JudgedByModel(RewardWorker):
    """A RewardWorker whose judge is simulated."""

    def __init__(self, model: LanguageModel, *arguments: Any) -> None:
        self._model: Any = model
        super().__init__(*arguments)

    def _judge(self, reward: Any, *arguments: Any) -> Judge:
        return Judge(self._model, reward.judge)


class Simulation:
    """A run of `config` under simulated time. `policy` draws its turns, `renderer` makes its prompts."""

    def __init__(
        self,
        config: Config,
        serving: ServingSpec,
        roofline: Roofline,
        policy: Replies,
        renderer: Any,
        traffic: Traffic,
        ledger: Ledger,
    ) -> None:
        self.config, self.spec, self.traffic = config, serving.policy, traffic
        self.roofline, self.policy, self.renderer, self.ledger = roofline, policy, renderer, ledger
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        self.ray = VirtualRay(self.loop)
        placement = self.spec.placement
        self.gpus = config.launch.ranks + (0 if placement.colocated else placement.replicas * placement.tp)
        self.servers = [
            Server(self.roofline, self.spec.cache_tokens, self.spec.max_running_requests)
            for _ in range(placement.replicas)
        ]
        self.play = play_spec(config)
        self.rollouts = self._manager(serving.client)

    def _manager(self, client: Any) -> RolloutManager:
        config, play = self.config, self.play
        limiter = self.ray.actor(Limiter(config.llm, Path(config.run.dir) / "spend.json", self.loop.time))
        rewards = [
            self.ray.actor(JudgedByModel(self._model(limiter), play.reward, config.llm, play.run_dir))
            for _ in range(play.reward.workers)
        ]
        players = []
        for _ in range(play.rollout.workers):
            router = SimulatedRouter(self.servers, client, self.policy)
            users = Users(play.users, self._model(limiter))
            player = FuturesPlayer(router, self.renderer, users, RewardClient(rewards, play.reward), play)
            players.append(self.ray.actor(ConversationWorker(player, router)))
        pool = SimpleNamespace(lost_all=lambda: False, recover=lambda: None, pause=lambda: self._pause(release=True))
        servers: Any = SimpleNamespace(
            workers=Workers(players, rewards, limiter, [*range(len(self.servers))], self.ray),
            pool=pool,
            lost_all=pool.lost_all,
            play=play,
            timeout=1e6,
        )
        run: Any = SimpleNamespace(
            transcripts=lambda step, groups: None,
            alarms=lambda step, alarms: None,
            record_metric_kinds=lambda opinions, ground_truths: None,
        )
        weights: Any = SimpleNamespace()
        credit = CreditSpec(config.algo, config.reward, config.rollout)
        return RolloutManager(config.train, credit, data_spec(config), servers, weights, run, {})

    def _model(self, limiter: Any) -> LanguageModel:
        return LanguageModel(limiter, self.traffic, self.ledger)

    def sample(self, number: int) -> tuple[Batch, float]:
        """The batch of a step from weights of this version, and the seconds until it is complete."""
        for server in self.servers:
            server.resume(number)
        began = self.loop.time()
        return self.rollouts.collect(number), self.loop.time() - began

    def step(self, number: int, trainer: Trainer) -> Step:
        """A step as train.py makes it."""
        began, busy, tokens = self.loop.time(), self._busy(), [server.tokens for server in self.servers]
        work = self._work()
        self._pass(trainer.move)
        self._pause()
        self._pass(trainer.publish)
        batch, sampling = self.sample(number)
        self._pass(trainer.move)
        size = trained_tokens(batch)
        score, update = trainer.learning(size)
        self._pass(score + update)
        self.rollouts.learned({"step": float(number)})
        phases = 2 * trainer.move + trainer.publish + score + update
        sampled = [server.tokens - before for server, before in zip(self.servers, tokens, strict=True)]
        done = (self._work() - work) / len(self.servers)
        return Step(
            sampling=sampling,
            score=score,
            update=update,
            publish=trainer.publish,
            move=2 * trainer.move,
            seconds=self.loop.time() - began,
            sampled=(self._busy() - busy) * self.spec.placement.tp,
            chain=(phases + self.ledger.longest(f"train-{number}-")) / (1 + self.config.rollout.max_staleness),
            work=phases + done if self.spec.placement.colocated else max(phases, done + trainer.publish),
            busiest=max(sampled) / mean(sampled),
        )

    def close(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    def _pause(self, release: bool = False) -> None:
        for server in self.servers:
            server.pause(release)

    def _pass(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def _busy(self) -> float:
        return sum(server.busy for server in self.servers)

    def _work(self) -> float:
        """Seconds of the work of all servers so far in batches as full as a step's conversations allow."""
        train, rollout, count = self.config.train, self.config.rollout, len(self.servers)
        conversations = train.prompts_per_step * train.rollouts_per_prompt * max(1, rollout.futures)
        batch = max(1, min(self.spec.max_running_requests, conversations * (1 + rollout.max_staleness) // count))
        ledger = self.ledger
        context = ledger.context / ledger.decoded * batch if ledger.decoded else 0.0
        return ledger.decoded / batch * self.roofline.decode(batch, context) + self.roofline.prefilled(
            sum(server.prefilled for server in self.servers), 0
        )


def trainer(config: Config, shape: ModelShape, spec: ServerSpec) -> Trainer:
    """The trainer's phases by the plans of memory and weight sync."""
    plan = plan_sync(shape, trainer_layout(config), spec.layout, DTYPES[config.model.dtype].itemsize)
    speeds = {link: GB * speed for link, speed in zip(Bandwidth, BANDWIDTHS, strict=True)}
    publish = sync_cost(config, spec.placement, shape, plan, speeds).seconds
    offloaded = max(sum(part.host for part in parts) for parts in plan_memory(config, shape))
    move = offloaded / HOST_BYTES + 1.5 * MAP_SECONDS if spec.placement.colocated else 0.0
    return Trainer(config, shape, config.launch.ranks, publish, move)


def parameters(shape: ModelShape) -> float:
    """Parameters that take part in a token's products."""
    entries = [entry for entry in hf_to_megatron.table(shape) if not entry.megatron.startswith("embedding")]
    active = shape.experts.per_token / shape.experts.count if shape.experts else 1.0
    return sum(prod(size) * (active if entry.expert else 1.0) for entry in entries for size in entry.shapes)


def roofline(spec: ServerSpec, shape: ModelShape, count: float) -> Roofline:
    tp = spec.placement.tp
    reduces = 2 * shape.layers * REDUCE_SECONDS if tp > 1 else 0.0
    return Roofline(
        weights=server_weights(spec, shape) * tp,
        token_bytes=kv_cache(spec, shape) / spec.cache_tokens * tp,
        bandwidth=BYTES * tp,
        token_flops=2 * count,
        flops=h100.PEAK * PREFILL_MFU * tp,
        step=STEP_SECONDS + reduces,
        prefill=PREFILL_SECONDS + reduces,
    )


def localize(config: Config, steps: int, folder: Path) -> None:
    """Give the run a tokenizer, tasks and a folder of this machine."""
    tiny_model.byte_tokenizer([], 300).save_pretrained(folder / "model")
    count = config.train.prompts_per_step * (steps + 1 + config.rollout.max_staleness)
    tasks = [Task(str(n), (Message("user", f"task {n}"),), "help", "42", "") for n in range(count)]
    write_jsonl(folder / "tasks.jsonl", [task_row(task) for task in tasks])
    config.run.dir, config.model.path = str(folder / "run"), str(folder / "model")
    config.data.train, config.train.steps = str(folder / "tasks.jsonl"), 10**6
    config.reward.metrics["accuracy"]["verify"] = False  # the judge decides all
    config.rollout.deadline = config.reward.judge.deadline = 1e5


def trained_tokens(batch: Batch) -> int:
    """Tokens of the prefix tree of a batch: every group's prompt once, and the trained turns."""
    prompts = {
        sample.origin[0]: len(sample.token_ids) - int(sample.loss_mask.sum())
        for sample in batch.samples
        if sample.origin
    }
    return int(batch.loss_tokens) + sum(prompts.values())


def simulate(settings: Sequence[str], steps: int, traffic: Traffic) -> dict[str, float]:
    """The values of a case."""
    began = time.process_time()
    config, shape = read_run([*settings])
    serving, ledger = server_specs.training(config), Ledger()
    phases = trainer(config, shape, serving.policy)
    costs = roofline(serving.policy, shape, parameters(shape))
    with TemporaryDirectory() as folder:
        localize(config, steps, Path(folder))
        policy, renderer = Policy(traffic, ledger, costs), Renderer(traffic)
        simulation = Simulation(config, serving, costs, policy, renderer, traffic, ledger)
        ahead = config.rollout.max_staleness
        first = ahead + 1 if ahead else 0  # the pipeline fills
        measured = [simulation.step(number, phases) for number in range(first + steps)][first:]
        simulation.close()
    seconds = sum(step.seconds for step in measured)
    total, trainers = seconds * simulation.gpus, phases.gpus
    shares = {
        "sample": sum(step.sampled for step in measured) / total,
        "score": sum(step.score for step in measured) * trainers / total,
        "update": sum(step.update for step in measured) * trainers / total,
        "publish": sum(step.publish for step in measured) * simulation.gpus / total,
        "move": sum(step.move for step in measured) * trainers / total,
    }
    bounds = [max(step.chain, step.work) for step in measured]
    return {
        **shares,
        "idle": 1 - sum(shares.values()),
        "step_seconds": seconds / steps,
        "sampling_seconds": mean(step.sampling for step in measured),
        "chain_seconds": mean(step.chain for step in measured),
        "work_seconds": mean(step.work for step in measured),
        "step_over_bound": mean(step.seconds / bound for step, bound in zip(measured, bounds, strict=True)),
        "busiest_over_mean": mean(step.busiest for step in measured),
        "retracted": sum(server.retracted for server in simulation.servers),
        "cpu_seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} [all]")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="further settings of every case")
    parser.add_argument("--latencies", type=Path, metavar="FOLDER", help="a recording [lognormal]")
    parser.add_argument("--smoke", action="store_true", help="a small step: shows that it runs, no figures")
    options = parser.parse_args()
    gc.set_threshold(200_000)
    traffic = Traffic(recorded=recorded_seconds(options.latencies) if options.latencies else ())
    values = {}
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for case in ["8", "8_cut"] if options.smoke else options.cases or [*CASES]:
            steps, settings = CASES[case]
            if options.smoke:
                steps, settings = 1, [*settings, "train.prompts_per_step=4", "train.rollouts_per_prompt=2"]
            for name, value in simulate([*settings, *options.set], steps, traffic).items():
                values[f"{case}/{name}"] = round(value, 4)
                print(f"{case}/{name}: {value:.4g}", flush=True)
        dist.destroy_process_group()
    print(json.dumps({"name": "timeline", "values": values}))


if __name__ == "__main__":
    main()
