"""Does the simulated timeline predict a measured run? Sampling in the quickstart, on CPUs, beside timeline.py's.

`python tools/bench/timeline_check.py [--rounds 3] [--smoke]` trains the quickstart's first stage for 60 steps. Then,
for each round and case (`quickstart`: the second stage for 12 steps; `futures`: with rollout.futures=6), it measures
the costs of a server, trains, and measures the costs again. The costs are those of the real SGLang server alone, with
requests of random tokens through the real client: 1 to 128 at once, of 16 and 64 tokens, of which 1 or 24 are sampled.
What a prefill, a request, a token, a decoding step, and a request in it cost is fitted to the medians, with the
least relative errors: in seconds, and in CPU seconds of the server's processes. Nothing is fitted to a run.

The simulation is that of timeline.py (real RolloutManager, player, router, client and reward worker under a clock that
jumps) with these costs. Its conversations are those of the run, or the bench fails: each turn has the text that the run
sampled with its seed, and the real users answer. It knows nothing of the CPU time of the player and of Ray.

    sampling_over_measured   simulated seconds of a step's sampling over `seconds/rollout` of the run: the median over
                    steps, without the first two; `sampling_least`, `sampling_most`: of the rounds
    step_over_measured   the same of whole steps, of which only sampling is simulated: update and publish are taken as
                    measured, since planning/ has no times of a CPU, which pulls the ratio towards 1
    server_cpu_over_measured   CPU seconds of the server in these steps, simulated with costs in CPU seconds, over those
                    that its processes took in the run; a busy machine changes both less than it changes seconds
    prefill_over_measured   tokens of prompts that the server computed, of all steps
    server_busy     simulated share of sampling in which the server computes; a run does not measure it
    load            processes that waited for a processor or had one, on average over the last minute of a run

Values are medians of the rounds. --smoke: 3 small steps of `quickstart`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import numpy as np
import psutil
import torch.distributed as dist
from scipy.optimize import nnls
from simulated.players import Ledger, Traffic
from simulated.server import FILLER, SEGMENT, Roofline

from megatron_collab import patches

patches.apply("megatron")

from timeline import Simulation  # noqa: E402

from megatron_collab.config import Config  # noqa: E402
from megatron_collab.inference.client import SGLangClient  # noqa: E402
from megatron_collab.inference.server import SGLangServer  # noqa: E402
from megatron_collab.inference.spec import ServingSpec  # noqa: E402
from megatron_collab.launch import server_specs, validate  # noqa: E402
from megatron_collab.launch.play_specs import play_spec  # noqa: E402
from megatron_collab.observability import transcripts  # noqa: E402
from megatron_collab.rollout.conversation import RolloutPlace, seed_of  # noqa: E402
from megatron_collab.types import Message  # noqa: E402

SFT = ["experiment=booking_sft", "train.steps=60", "train.checkpoint_every=60", "optim.warmup_steps=10"]
RL = ["experiment=booking", "data.eval=null", "train.checkpoint_every=1000"]
CASES = {"quickstart": [], "futures": ["rollout.futures=6"]}
BATCHES, PROMPTS, SAMPLED = (1, 4, 16, 64, 128), (16, 64), (1, 24)
WORDS = range(8, 60)  # of the booking world; lower tokens are control tokens
REPEATS = 3
FIRST = 2  # steps that are not compared: processes warm up
SERVER = "megatron_collab.inference.cpu.serve"  # in the commands of a server's processes

Costs = dict[tuple[int, int, int], list[tuple[float, float]]]
Lines = Sequence[Mapping[str, float]]


class Unending(SGLangClient):
    """Samples as many tokens as it may."""

    async def _post(self, path: str, body: dict[str, Any], *arguments: Any) -> Any:
        body["sampling_params"]["ignore_eos"] = True
        return await super()._post(path, body, *arguments)


class Recording:
    """The conversations of a run, for a simulated server: `draw` and `text` are its replies, the others its renderer.

    Equal tokens after equal ones have the same name, as in SGLang's cache.
    """

    thought_end = None

    def __init__(self, config: Config, run: Path) -> None:
        self.renderer = play_spec(config).prompt.renderer([])
        self.replies: dict[int, tuple[str, bool]] = {}  # by seed: text, and whether it was cut at its budget
        self.texts: dict[int, tuple[str, bool]] = {}  # by name
        rows = map(json.loads, Path(str(config.data.train)).read_text().splitlines())
        prompts = {row["id"]: len(row["prompt"]) for row in rows}
        for step in transcripts.step_files(run):
            for number, group in enumerate(transcripts.by_group(transcripts.run_rows(run, step))):
                for row in group:
                    later = row["messages"][prompts[row["task"]] :]
                    turns = [message["content"] for message in later if message["role"] == "assistant"]
                    for at, text in enumerate(turns):
                        future = row["future"] if at else 0
                        place = RolloutPlace(f"train-{step}-{number}", row["rollout"], future)
                        self.replies[seed_of(config.run.seed, place, at)] = text, at in row.get("cut", ())

    def draw(self, seed: int, prompt: Sequence[tuple[int, int]], most: int) -> tuple[int, int]:
        reply, cut = self.replies[seed]
        name = _name(prompt[-1][0], reply)
        self.texts[name] = reply, cut
        return name, most if cut else len(self.renderer.tokens(reply)) + 1

    def text(self, name: int) -> str:
        return self.texts[name][0]

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        tokens = self.renderer.first(messages, thinking)
        return tuple(_name(tokens[: at + 1]) for at in range(len(tokens)))

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        end = () if self.texts[turn[0]][1] else (self.renderer.end_id,)
        tokens = self.renderer.next(messages, end, thinking)
        return (_name(turn[0], tokens), *[FILLER] * (len(tokens) - 1))

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False


def _name(*tokens: object) -> int:
    return SEGMENT + int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=6).digest())


def train(*settings: str) -> None:
    """A run to its end."""
    for _ in watch(*settings):
        pass


def watch(*settings: str) -> Iterator[float]:
    """A run to its end; several times a second, the CPU seconds of its server so far."""
    with TemporaryFile() as log:
        command = [sys.executable, "-m", "megatron_collab.train", *settings]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                yield sum(map(cpu_seconds, psutil.Process(process.pid).children(recursive=True)))
                time.sleep(0.1)
        if process.returncode:
            log.seek(0)
            sys.exit(log.read().decode()[-3000:])


def cpu_seconds(process: psutil.Process) -> float:
    """User and system seconds of a process of a server; 0 of others, and of one that has ended."""
    with suppress(psutil.Error):
        if SERVER in process.cmdline():
            return sum(process.cpu_times()[:2])
    return 0.0


def measure(config: Config, serving: ServingSpec, repeats: int) -> Costs:
    """Seconds and CPU seconds by number of requests, tokens of each prompt, sampled tokens."""
    spec = serving.policy
    with SGLangServer(spec, spec.log(0), 0) as server:
        server.wait_healthy(spec.host.start_timeout)
        processes = [child for child in psutil.Process().children(recursive=True) if SERVER in child.cmdline()]
        client = Unending(server.url, server.api_key, serving.client)
        return asyncio.run(_requests(client, processes, config, repeats))


async def _requests(client: SGLangClient, server: list[psutil.Process], config: Config, repeats: int) -> Costs:
    drawn, costs = random.Random(0), defaultdict[tuple[int, int, int], list[tuple[float, float]]](list)
    sampling = config.rollout.turn
    for repeat in range(-1, repeats):  # the first one warms up
        for batch, length, new in product(BATCHES, PROMPTS, SAMPLED):
            prompts = [tuple(drawn.choices(WORDS, k=length)) for _ in range(batch)]
            began, cpu = time.perf_counter(), sum(map(cpu_seconds, server))
            calls = [client.generate(ids, max_new_tokens=new, sampling=sampling, seed=7) for ids in prompts]
            await asyncio.gather(*calls)
            seconds = time.perf_counter() - began
            if repeat >= 0:
                costs[batch, length, new].append((seconds, sum(map(cpu_seconds, server)) - cpu))
    await client.close()
    return costs


def fit(costs: Costs, unit: int) -> Roofline:
    """The costs of a server in seconds (`unit` 0) or CPU seconds (1), which the kernel counts in hundredths."""
    rows = [(1, batch, batch * (length + new - 1), new - 1, (new - 1) * batch) for batch, length, new in costs]
    medians = [max(0.01, median(pair[unit] for pair in pairs)) for pairs in costs.values()]
    solution, _ = nnls(np.array(rows) / np.array(medians)[:, None], np.ones(len(rows)))
    prefill, begin, token, step, request = map(float, solution)
    return Roofline(0.0, 0.0, 1.0, token, 1.0, step, prefill, request, begin)


def simulate(settings: Sequence[str], serving: ServingSpec, roofline: Roofline, run: Path, lines: Lines) -> np.ndarray:
    """For each step of the run: seconds of sampling, of the server's work, tokens of its prefills."""
    with TemporaryDirectory() as folder:
        config = validate.composed([*settings, f"run.dir={folder}"])
        recording = Recording(config, run)
        simulation = Simulation(config, serving, roofline, recording, recording, Traffic(), Ledger())
        (server,) = simulation.servers
        steps = []
        for line in lines:
            busy, prefilled = server.busy, server.prefilled
            batch, seconds = simulation.sample(int(line["step"]))
            if abs(batch.metrics["reward"] - line["reward"]) > 0.01:  # a special token is no part of a text
                sys.exit(f"step {line['step']}: simulated other conversations than those of the run")
            simulation.rollouts.learned({"step": line["step"]})
            steps.append((seconds, server.busy - busy, server.prefilled - prefilled))
        simulation.close()
    return np.array(steps)


def check(settings: Sequence[str], folder: Path, repeats: int) -> dict[str, float]:
    """The values of a run with these settings in `folder`."""
    config = validate.composed([*settings, f"run.dir={folder}"])
    serving = server_specs.training(config)
    costs = measure(config, serving, repeats)
    readings = dict[int, float]()  # CPU seconds of the server when so many steps were done
    for cpu in watch(*settings, f"run.dir={folder}"):
        with suppress(FileNotFoundError):
            readings.setdefault((folder / "metrics.jsonl").read_bytes().count(b"\n"), cpu)
    load = os.getloadavg()[0]
    for key, pairs in measure(config, serving, repeats).items():
        costs[key] += pairs
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds, busy, prefilled = simulate(settings, serving, fit(costs, 0), folder, lines).T
    _, cpu, _ = simulate(settings, serving, fit(costs, 1), folder, lines).T
    names = ("rollout", "update", "publish")
    rollout, *learning = np.array([[line[f"seconds/{name}"] for name in names] for line in lines]).T
    first = min(FIRST, len(lines) - 1)
    begun, ended = min(number for number in readings if number >= first), max(readings)
    values = {
        "sampling_over_measured": np.median((seconds / rollout)[first:]),
        "step_over_measured": np.median(((seconds + sum(learning)) / (rollout + sum(learning)))[first:]),
        "server_cpu_over_measured": cpu[begun:ended].sum() / (readings[ended] - readings[begun]),
        "prefill_over_measured": prefilled.sum() / sum(line["count/prefill_tokens"] for line in lines),
        "sampling_seconds": np.median(rollout[first:]),
        "server_busy": np.median(busy / seconds),
        "load": load,
    }
    return {name: float(value) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case [%(default)s]")
    parser.add_argument("--smoke", action="store_true", help="3 small steps: shows that it runs, no figures")
    options = parser.parse_args()
    rounds, steps, prompts, cases = options.rounds, 12, 16, [*CASES]
    if options.smoke:
        rounds, steps, prompts, cases = 1, 3, 2, cases[:1]
    values = defaultdict[str, list[float]](list)
    with TemporaryDirectory() as root:
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
        world = f"data.dir={root}/world"
        train(*SFT, world, f"run.dir={root}/sft")
        model = [world, f"model.path={root}/sft/hf", f"train.steps={steps}", f"train.prompts_per_step={prompts}"]
        for number, case in product(range(rounds), cases):
            settings = [*RL, *model, *CASES[case]]
            for name, value in check(settings, Path(f"{root}/{case}{number}"), 1 if options.smoke else REPEATS).items():
                values[f"{case}/{name}"].append(value)
                print(f"{case}/{name}: {value:.4g}", flush=True)
        dist.destroy_process_group()
    medians = {name: median(series) for name, series in values.items()}
    for case in cases:
        ratios = values[f"{case}/sampling_over_measured"]
        medians |= {f"{case}/sampling_least": min(ratios), f"{case}/sampling_most": max(ratios)}
    print(json.dumps({"name": "timeline_check", "values": {name: round(value, 4) for name, value in medians.items()}}))


if __name__ == "__main__":
    main()
