"""Adapters compared with the whole model, with PEFT, and with servers that have them merged or beside the base.

    .venv/bin/python tools/bench/lora.py [--smoke]

A random float32 Qwen3 of 48 million parameters, adapters of rank 32 on all linear layers (alpha 16), one process on the
CPU. PEFT has the same adapters on the same model in transformers, in its own process (tests/trainer/
peft_reference.py), with the packages of requirements/bench.lock, which are installed in a separate folder.

    state_over_full = bytes of gradients, optimizer and checkpoint with adapters / without, the largest of the three;
    peft_step_diff = the largest difference of an A or a B from PEFT's after three steps of AdamW on the same loss, at a
                     learning rate of 1e-4; if a gradient is only rounding error, so is AdamW's step;
    step_size = the largest change of an A or a B by the steps;
    logprob_diff = the largest difference, in nats, of SGLang's log-probs of tokens that it samples after these steps
                   from the trainer's, once adapters have been merged on their way into the server;
    sync_bytes = what a later weight sync sends, sync_seconds = how long it takes, the shortest of five;
    tokens_per_second = tokens of eight concurrent replies that the server samples in a second of its processes' CPU
                        time, the most of five.

The suffix _adapters after one of the last four: of a server that keeps the adapters beside the base.

--smoke: a model of 700 thousand parameters, whose adapters are a larger share of it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil

from megatron_collab import patches
from megatron_collab.launch.trainer_specs import network_spec, sync_spec, trainer_layout, trainer_spec

warnings.filterwarnings("ignore")
patches.apply("megatron")

import torch  # noqa: E402
from random_models import save_qwen3  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megatron_collab.checkpoint import convert, storage  # noqa: E402
from megatron_collab.checkpoint.adapters import PEFT_WEIGHTS, write_peft  # noqa: E402
from megatron_collab.checkpoint.checkpointer import Checkpoints  # noqa: E402
from megatron_collab.config import Config  # noqa: E402
from megatron_collab.inference.client import SGLangClient  # noqa: E402
from megatron_collab.inference.server import ServerProcess, SGLangServer  # noqa: E402
from megatron_collab.launch import server_specs  # noqa: E402
from megatron_collab.runtime.network import single_rank  # noqa: E402
from megatron_collab.trainer.megatron import parallel  # noqa: E402
from megatron_collab.trainer.trainer import PolicyTrainer  # noqa: E402
from megatron_collab.types import Batch, Sample, Turn  # noqa: E402
from megatron_collab.weight_sync.plan import first_round, plan_sync  # noqa: E402
from megatron_collab.weight_sync.sync import WeightSync  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VOCAB, RANK, LR, STEPS = 4608, 32, 1e-4, 3
SEQUENCES, LONGEST = 16, 96
PROMPTS, PROMPT, REPLY = 8, 24, 16
REPEATS, LONG = 5, 128  # times that something is timed, and tokens of a reply that is
SIZES = {"hidden": 1024, "ffn": 3200, "heads": 16, "kv_heads": 8, "head_dim": 64}
SMOKE_SIZES = {"hidden": 64, "ffn": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}


def configure(folder: Path, rank: int | None, serve: str = "merged") -> Config:
    config = Config()
    config.launch.device, config.launch.timeout = "cpu", 120.0
    config.model.path, config.model.dtype, config.model.lora.rank = str(folder), "float32", rank
    config.model.lora.serve = serve
    config.train.stage, config.optim.lr = "sft", LR
    config.rollout.server.max_total_tokens = 4096
    return config


def make_samples() -> tuple[Sample, ...]:
    """Sequences of which the second half is trained."""
    rng = np.random.default_rng(0)
    samples = []
    for length in rng.integers(LONGEST // 4, LONGEST, SEQUENCES):
        mask = (np.arange(length) >= length // 2).astype(np.float32)
        samples.append(Sample(rng.integers(10, VOCAB, length), mask, np.zeros(length, np.float32)))
    return tuple(samples)


def save(trainer: PolicyTrainer, folder: Path) -> None:
    with Checkpoints(folder, 1, 120.0) as checkpoints:
        checkpoints.save(trainer.step, trainer.checkpointed, {})


@torch.no_grad()
def draw_b(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Every A and B by its key, with a random B: if B is zero, A has no gradient and AdamW scales up rounding."""
    generator, factors = torch.Generator().manual_seed(0), {}
    for parameter in (p for p in trainer.chunks[0].parameters() if p.requires_grad):
        if "lora_B" in parameter.factor.key:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        factors[parameter.factor.key] = parameter.detach().clone()
    trainer.policy.optimizer.reload_model_params()
    return factors


def sizes(trainer: PolicyTrainer, folder: Path) -> np.ndarray:
    """Bytes of the gradients, of the optimizer's state, and of the checkpoint in `folder`."""
    gradients = sum(part.nbytes for part in trainer.policy.gradients())
    optimizer = sum(part.nbytes() for part in trainer.policy.optimizer_storages())
    files = sum(file.stat().st_size for file in folder.rglob("*.distcp"))
    return np.array([gradients, optimizer, files], dtype=np.float64)


def full_sizes(model: Path, folder: Path, batch: Batch) -> np.ndarray:
    trainer = PolicyTrainer(trainer_spec(configure(model, None)))
    trainer.update(batch)
    save(trainer, folder)
    return sizes(trainer, folder)


def peft(folder: Path, model: Path, config: Config, samples: tuple[Sample, ...]) -> dict[str, torch.Tensor]:
    """The adapters in `folder` after PEFT's steps."""
    adamw = {"lr": LR, "betas": [config.optim.beta1, config.optim.beta2], "weight_decay": config.optim.weight_decay}
    case = {"model": str(model), "adapters": str(folder), "adamw": adamw, "steps": STEPS}
    (folder / "case.json").write_text(json.dumps(case | {"clip_grad": config.optim.clip_grad}))
    columns: dict[str, Any] = {name: np.empty(len(samples), dtype=object) for name in ("token_ids", "loss_mask")}
    for name, column in columns.items():
        for number, sample in enumerate(samples):
            column[number] = getattr(sample, name)
    np.savez(folder / "samples.npz", **columns)
    aside = {**os.environ, "PYTHONPATH": str(Path(sys.prefix) / "compared")}
    program = [sys.executable, str(ROOT / "tests" / "trainer" / "peft_reference.py"), str(folder)]
    subprocess.run(program, env=aside, check=True)
    return load_file(folder / "trained.safetensors")


def publish_and_measure(trainer: PolicyTrainer, config: Config, server: SGLangServer) -> dict[str, float]:
    """Publish the weights to `server` as `config` says; difference of log-probs, bytes, seconds, tokens a second."""
    line: Any = SimpleNamespace(
        url=server.url, api_key=server.api_key, tp=1, index=0, generation=0, resume=lambda tag: None
    )
    line.ask = lambda *arguments, **options: SGLangServer.ask(line, *arguments, **options)
    fleet: Any = SimpleNamespace(present=lambda: [line], lost=lambda server, reason: sys.exit(reason))
    policy = server_specs.training(config).policy
    with WeightSync(sync_spec(config), policy, trainer.chunks, trainer.shape, fleet) as publisher:
        publisher.publish(0)
        seconds = min(timed(lambda: publisher.publish(1)) for _ in range(REPEATS))
    plan = plan_sync(trainer.shape, trainer_layout(config), policy.layout, 4)
    rounds = plan[first_round(plan, policy.layout, new=False) :]
    samples = []
    for turn in asyncio.run(sample(config, server)):
        length = len(turn.prompt_ids) + len(turn.token_ids)
        log_probs, mask = np.zeros((2, length), np.float32)
        log_probs[len(turn.prompt_ids) :], mask[len(turn.prompt_ids) :] = turn.log_probs, 1.0
        samples.append(Sample(np.array(turn.prompt_ids + turn.token_ids, np.int64), mask, log_probs))
    trainer_log_probs = trainer.log_probs(trainer.policy.chunks, Batch(tuple(samples)))
    pairs = zip(trainer_log_probs, samples, strict=True)
    fastest = min(cpu_seconds(server, lambda: asyncio.run(sample(config, server, LONG))) for _ in range(REPEATS))
    return {
        "logprob_diff": max(float(np.abs((a - b.log_probs) * b.loss_mask).max()) for a, b in pairs),
        "sync_bytes": sum(piece.size for row in rounds for bucket in row for piece in bucket.slices),
        "sync_seconds": seconds,
        "tokens_per_second": PROMPTS * LONG / fastest,
    }


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cpu_seconds(server: SGLangServer, call: Callable[[], object]) -> float:
    """CPU seconds of a server's processes during a call."""
    assert isinstance(server.process, ServerProcess)
    leader = psutil.Process(server.process.pid)
    processes = [leader, *leader.children(recursive=True)]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    call()
    return sum(sum(process.cpu_times()[:2]) for process in processes) - before


async def sample(config: Config, server: SGLangServer, tokens: int = REPLY) -> list[Turn]:
    prompts = np.random.default_rng(1).integers(10, VOCAB, (PROMPTS, PROMPT)).tolist()
    client = SGLangClient(server.url, server.api_key, server_specs.training(config).client)
    requests = [
        client.generate(tuple(prompt), max_new_tokens=tokens, sampling=config.rollout.turn, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    turns = await asyncio.gather(*requests)
    await client.close()
    return turns


def measure(folder: Path, smoke: bool) -> dict[str, float]:
    model, samples = folder / "model", make_samples()
    save_qwen3(model, **(SMOKE_SIZES if smoke else SIZES), vocab=VOCAB, layers=3, words=True, initializer_range=0.05)
    config, adapter_config = configure(model, RANK), configure(model, RANK, "adapters")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(SGLangServer(server_specs.training(served).policy, folder / f"server-{number}.log"))
            for number, served in enumerate((config, adapter_config))
        ]
        stack.enter_context(parallel.init_parallel(config.launch, network_spec(config)))
        full = full_sizes(model, folder / "full", Batch(samples))
        trainer = PolicyTrainer(trainer_spec(config))
        first = draw_b(trainer)
        (folder / "peft").mkdir()
        write_peft(folder / "peft", config.model.lora, first, str(model))
        for _ in range(STEPS):
            trainer.update(Batch(samples))
        save(trainer, folder / "adapters")
        convert.to_peft(storage.find_checkpoint(folder / "adapters"), folder / "trained", model, str(model), None)
        peft_weights = peft(folder / "peft", model, config, samples)
        before, after = (load_file(folder / name / PEFT_WEIGHTS) for name in ("peft", "trained"))
        assert after.keys() == peft_weights.keys()
        for server in servers:
            server.wait_healthy(400)
        merged, adapted = (
            publish_and_measure(trainer, config, servers[0]),
            publish_and_measure(trainer, adapter_config, servers[1]),
        )
        return {
            "state_over_full": float((sizes(trainer, folder / "adapters") / full).max()),
            "peft_step_diff": largest_difference(after, peft_weights),
            "step_size": largest_difference(after, before),
            **merged,
            **{f"{name}_adapters": value for name, value in adapted.items()},
        }


def largest_difference(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(float((weights[name] - reference[name]).abs().max()) for name in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small model: shows that it runs, no figures")
    smoke = parser.parse_args().smoke
    os.environ |= single_rank("bench")
    with TemporaryDirectory() as temporary:
        print(json.dumps({"name": "lora", "values": measure(Path(temporary), smoke)}))


if __name__ == "__main__":
    main()
