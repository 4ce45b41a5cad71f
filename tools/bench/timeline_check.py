"""Does the simulated timeline predict a measured run? Sampling in the quickstart, on CPUs, beside timeline.py's servers.

`python tools/bench/timeline_check.py [--rounds 3] [--smoke]` trains the quickstart's first stage for 60 steps. Then,
for each round and case (`quickstart`: the second stage for 12 steps; `futures`: with rollout.futures=6), it measures
the costs of a server, trains, and measures the costs again. The costs are those of the real SGLang server alone, with
requests of random tokens through the real client: 1 to 128 at once, of 16 and 64 tokens, of which 1 or 24 are sampled.
What a prefill, a request, a token, a decoding step, and a request in it cost is fitted to the medians, with the
least relative errors. Nothing is fitted to a run.

The simulation is that of timeline.py (real RolloutManager, player, router, client and reward worker under a clock that
jumps) with these costs. Its conversations are those of the run: each turn has the text that the run sampled with its
seed, and the real users answer. It knows nothing of the CPU time of the player and of Ray.

    sampling_over_measured   simulated seconds of a step's sampling over `seconds/rollout` of the run: the median over
                    steps, without the first two, and over rounds; `sampling_least`, `sampling_most`: of the rounds
    step_over_measured   the same of whole steps, of which the simulation predicts only sampling: update and publish are
                    taken as measured, since planning/ has no times of a CPU
    prefill_over_measured   tokens of prompts that the server computed, of all steps
    server_busy     simulated share of sampling in which the server computes; a run does not measure it
    load            processes that waited for a processor or had one, on average over the last minute of a run

--smoke: a random model, 3 steps. The last line is one JSON object.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch.distributed as dist
from scipy.optimize import nnls
from simulated.players import Ledger, Traffic
from simulated.server import FILLER, SEGMENT, Roofline

from megatron_collab import patches

patches.apply("megatron")

from megatron_collab.config import Config  # noqa: E402
from megatron_collab.inference.client import SGLangClient  # noqa: E402
from megatron_collab.inference.server import SGLangServer  # noqa: E402
from megatron_collab.inference.spec import ServingSpec  # noqa: E402
from megatron_collab.launch import server_specs, validate  # noqa: E402
from megatron_collab.launch.play_specs import play_spec  # noqa: E402
from megatron_collab.observability import transcripts  # noqa: E402
from megatron_collab.rollout.conversation import RolloutPlace, seed_of  # noqa: E402
from megatron_collab.types import Message  # noqa: E402
from tools.bench.timeline import Simulation  # noqa: E402

SFT = ["experiment=booking_sft", "train.steps=60", "train.checkpoint_every=60", "optim.warmup_steps=10"]
RL = ["experiment=booking", "data.eval=null", "train.checkpoint_every=1000"]
RANDOM = ["train.prompts_per_step=2", "reward.malformed=null", "reward.weights.token_amount=-0.01"]
CASES = {"quickstart": [], "futures": ["rollout.futures=6"]}
BATCHES, PROMPTS, SAMPLED = (1, 4, 16, 64, 128), (16, 64), (1, 24)
REPEATS = 5
FIRST = 2  # steps that are not compared: processes warm up


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
    done = subprocess.run([sys.executable, "-m", "megatron_collab.train", *settings], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-1000:] + done.stderr[-3000:])


def measure(config: Config, serving: ServingSpec, repeats: int) -> dict[tuple[int, int, int], list[float]]:
    """Seconds by number of requests, tokens of each prompt, sampled tokens."""
    spec = serving.policy
    with SGLangServer(spec, spec.log(0), 0) as server:
        server.wait_healthy(spec.host.start_timeout)
        return asyncio.run(_requests(Unending(server.url, server.api_key, serving.client), config, repeats))


async def _requests(client: SGLangClient, config: Config, repeats: int) -> dict[tuple[int, int, int], list[float]]:
    drawn, seconds = random.Random(0), defaultdict[tuple[int, int, int], list[float]](list)
    words, sampling = range(8, 60), config.rollout.turn  # other tokens may be control tokens
    for repeat in range(-1, repeats):  # the first one warms up
        for batch in BATCHES:
            for length in PROMPTS:
                for new in SAMPLED:
                    prompts = [tuple(drawn.choices(words, k=length)) for _ in range(batch)]
                    began = time.perf_counter()
                    calls = [client.generate(ids, max_new_tokens=new, sampling=sampling, seed=7) for ids in prompts]
                    await asyncio.gather(*calls)
                    if repeat >= 0:
                        seconds[batch, length, new].append(time.perf_counter() - began)
    await client.close()
    return seconds


def fit(seconds: dict[tuple[int, int, int], list[float]]) -> tuple[Roofline, float]:
    """The costs of a server, and the root mean square of their relative errors."""
    rows = np.array(
        [(1, batch, batch * (length + new - 1), new - 1, (new - 1) * batch) for batch, length, new in seconds]
    )
    scaled = rows / np.array([[median(times)] for times in seconds.values()])
    costs, error = nnls(scaled, np.ones(len(scaled)))
    prefill, begin, token, step, request = map(float, costs)
    roofline = Roofline(0.0, 0.0, 1.0, token, 1.0, step, prefill, request, begin)
    return roofline, float(error) / len(scaled) ** 0.5


def compare(config: Config, serving: ServingSpec, roofline: Roofline, folder: Path) -> dict[str, float]:
    """The values of a run in config.run.dir; the simulation writes into `folder`."""
    run = Path(config.run.dir)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config.run.dir = str(folder)
    recording = Recording(config, run)
    simulation = Simulation(config, serving, roofline, recording, recording, Traffic(), Ledger())
    sampled, busy, prefilled = [], [], []
    (server,) = simulation.servers
    for line in lines:
        before = server.busy, server.prefilled
        batch, seconds = simulation.sample(line["step"])
        simulation.rollouts.learned({"step": float(line["step"])})
        sampled.append(seconds)
        busy.append((server.busy - before[0]) / seconds)
        prefilled.append(server.prefilled - before[1])
        assert batch.metrics["reward"] == line["reward"], (batch.metrics, line)  # else other conversations
    simulation.close()
    times = [(line["seconds/rollout"], line["seconds/update"] + line["seconds/publish"]) for line in lines]
    pairs = [*zip(sampled, times, strict=True)][min(FIRST, len(lines) - 1) :]
    return {
        "sampling_over_measured": median(seconds / rollout for seconds, (rollout, _) in pairs),
        "step_over_measured": median((seconds + rest) / (rollout + rest) for seconds, (rollout, rest) in pairs),
        "prefill_over_measured": sum(prefilled) / sum(line["count/prefill_tokens"] for line in lines),
        "sampling_seconds": median(rollout for _, (rollout, _) in pairs),
        "server_busy": median(busy),
    }


def check(settings: Sequence[str], folder: Path, repeats: int) -> dict[str, float]:
    """The values of a run with these settings in `folder`."""
    config = validate.composed([*settings, f"run.dir={folder}"])
    serving = server_specs.training(config)
    seconds = measure(config, serving, repeats)
    train(*settings, f"run.dir={folder}")
    load = os.getloadavg()[0]
    for key, times in measure(config, serving, repeats).items():
        seconds[key] += times
    roofline, error = fit(seconds)
    print(roofline, flush=True)
    return compare(config, serving, roofline, Path(f"{folder}-simulated")) | {"fit_error": error, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case [%(default)s]")
    parser.add_argument("--smoke", action="store_true", help="a random model, 3 steps: shows that it runs, no figures")
    options = parser.parse_args()
    rounds, repeats, steps = (1, 1, 3) if options.smoke else (options.rounds, REPEATS, 12)
    values = defaultdict[str, list[float]](list)
    with TemporaryDirectory() as root:
        dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
        world = f"data.dir={root}/world"
        train(*SFT, *(["train.steps=2"] if options.smoke else []), world, f"run.dir={root}/sft")
        model = [world, f"model.path={root}/sft/hf", f"train.steps={steps}", *(RANDOM if options.smoke else [])]
        for number in range(rounds):
            for case, more in CASES.items():
                for name, value in check([*RL, *model, *more], Path(f"{root}/{case}{number}"), repeats).items():
                    values[f"{case}/{name}"].append(value)
                    print(f"{case}/{name}: {value:.4g}", flush=True)
        dist.destroy_process_group()
    medians = {name: median(series) for name, series in values.items()}
    for case in CASES:
        ratios = values[f"{case}/sampling_over_measured"]
        medians |= {f"{case}/sampling_least": min(ratios), f"{case}/sampling_most": max(ratios)}
    print(json.dumps({"name": "timeline_check", "values": {name: round(value, 4) for name, value in medians.items()}}))


if __name__ == "__main__":
    main()
