"""What a GPU gives: a training step against the products that it could do, FP8, publishing against a copy.

    .venv/bin/python tools/bench/gpu.py [--smoke]

One GPU; four layers of the size of Qwen3-8B's, bfloat16, TransformerEngine. The parts run one after the other, each in
a process of its own:

- bfloat16: supervised steps of 32,768 tokens in sequences of 4,096, and before them products of 8,192 x 8,192 matrices.
  `mfu` is the arithmetic of a step (6 operations a weight and token, and causal attention, nothing for what is
  recomputed) over its time, divided by the rate of those products, `matmul_tflops`: their ceiling on this GPU today.
- fp8: the same steps with FP8 in blocks. `fp8_over_bf16` is the time of one over that in bfloat16. Left out below
  compute capability 9.0.
- publish: a colocated SGLang takes the weights. `publish_over_copy` is its rate, the bytes of its weights over the time
  from pause to continue, divided by that of a copy from the GPU to itself.

Times are medians. --smoke: small, and on the CPU where there is no GPU, with TransformerEngine over reference kernels:
shows that it runs, its figures mean nothing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import hf_shapes
from megatron_collab.runtime import device, gpu_environment
from megatron_collab.runtime.network import alone
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.types import Batch, Sample

PARTS = ("bfloat16", "fp8", "publish")
HOPPER = (9, 0)
WARM, TIMED = 2, 7


@dataclass(frozen=True)
class Size:
    """Of the model; of a step; of a matrix and of a copy that set the ceilings."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    sequences: int
    length: int
    budget: int
    matrix: int
    copied: int


FULL = Size(4, 4096, 12_288, 32, 8, 128, 32_768, 8, 4096, 8192, 8192, 4 << 30)
SMOKE = Size(2, 256, 512, 4, 2, 64, 512, 2, 128, 256, 256, 1 << 20)


def make_model(folder: Path, size: Size) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_collab.environments import tiny_model

    words = [f"word{number}" for number in range(size.vocab - len(tiny_model.SPECIAL))]
    tiny_model.word_tokenizer(words).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=2 * size.length,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def configure(folder: Path, size: Size, fp8: bool = False) -> Config:
    config = Config()
    config.launch.device = device.GPU if device.probe(device.GPU).found else "cpu"
    config.launch.timeout, config.launch.nproc_per_node = 600.0, 1
    config.model.path, config.model.dtype = str(folder), "bfloat16"
    config.train.stage, config.train.tokens_per_micro_batch = "sft", size.budget
    config.train.steps, config.optim.lr = 1000, 1e-5
    if fp8:
        config.model.fp8, config.model.fp8_recipe = "e4m3", "blockwise"
    return config


def batch_of(size: Size) -> Batch:
    """Random sequences that are trained from the second token on."""
    rng = np.random.default_rng(0)
    mask = (np.arange(size.length) > 0).astype(np.float32)
    rows = (rng.integers(0, size.vocab, size.length) for _ in range(size.sequences))
    return Batch(tuple(Sample(row, mask, np.zeros(size.length, np.float32)) for row in rows))


def arithmetic(shape: ModelShape, size: Size) -> float:
    """Floating-point operations of a step: forward, and twice as many backward.

    Two a weight and token, without the embedding, which is looked up. In causal attention a token meets half of the
    sequence on average: scores and their sum of values take 2 operations each for every one of its numbers.
    """
    weights = sum(prod(sides) for name, sides in hf_shapes(shape).items() if "embed_tokens" not in name)
    attention = shape.layers * 2 * 2 * size.length / 2 * shape.heads * shape.head_dim
    return 3.0 * size.sequences * size.length * (2 * weights + attention)


def timed(act: Callable[[], object], where: str) -> float:
    """Median seconds."""
    times = []
    for _ in range(WARM + TIMED):
        began = time.perf_counter()
        act()
        if where == device.GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[WARM:])


def train(folder: Path, size: Size, fp8: bool) -> dict[str, float]:
    """Seconds of a step, and how many operations a second it and products of matrices do."""
    from megatron_collab.trainer.megatron import parallel
    from megatron_collab.trainer.trainer import PolicyTrainer

    config = configure(folder, size, fp8)
    where, batch = config.launch.device, batch_of(size)
    with parallel.init_parallel(config):
        matrix = torch.randn(size.matrix, size.matrix, device=where).bfloat16()
        ceiling = 2 * size.matrix**3 / timed(lambda: matrix @ matrix, where)
        trainer = PolicyTrainer(config)
        seconds = timed(lambda: trainer.update(batch), where)
        return {"seconds": seconds, "ceiling": ceiling, "rate": arithmetic(trainer.shape, size) / seconds}


def rate_of_copies(size: Size, where: str) -> float:
    """Bytes a second."""
    source = torch.ones(size.copied, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    return size.copied / timed(lambda: target.copy_(source), where)


def publish(folder: Path, size: Size) -> dict[str, float]:
    """Bytes a second of a publish and of a copy."""
    from megatron_collab.inference.server import SGLangServer
    from megatron_collab.trainer.megatron import parallel
    from megatron_collab.trainer.trainer import PolicyTrainer
    from megatron_collab.weight_sync.sync import WeightSync

    config = configure(folder, size)
    config.rollout.server.max_total_tokens = 8192
    where = config.launch.device

    def lost(server: Any, reason: str) -> None:
        raise SystemExit(f"the server is lost: {reason}")

    with SGLangServer(config, folder / "server.log") as server, parallel.init_parallel(config):
        server.wait_healthy(1800)
        trainer = PolicyTrainer(config)
        pool: Any = SimpleNamespace(present=lambda: [server], lost=lost)
        copied = rate_of_copies(size, where)
        device.free_cache()
        with WeightSync(config, trainer.chunks, trainer.shape, pool) as sync:
            versions = iter(range(WARM + TIMED))
            seconds = timed(lambda: sync.publish(next(versions)), where)
    held = 2 * sum(prod(sides) for sides in hf_shapes(trainer.shape).values())
    return {"publish": held / seconds, "copy": copied}


def as_part(part: str, folder: Path, size: Size) -> dict[str, float]:
    """What a process of its own measures."""
    if part != "publish" and not device.probe(device.GPU).found:
        from megatron_collab.trainer.megatron.te_cpu.install import install

        install()
    patches.apply("megatron")
    os.environ |= alone("bench")
    return publish(folder, size) if part == "publish" else train(folder, size, fp8=part == "fp8")


def measure(part: str, folder: Path, smoke: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", part, str(folder), *(["--smoke"] if smoke else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{part} ended with {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{part}: {', '.join(f'{name} {value:.4g}' for name, value in found.items())}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="small, on any machine: shows that it runs, no figures")
    arguments = parser.parse_args()
    gpu_environment.enter()
    size, here = SMOKE if arguments.smoke else FULL, device.probe(device.GPU)
    if arguments.part:
        part, folder = arguments.part
        print(json.dumps(as_part(part, Path(folder), size)))
        return 0
    if not (here.found or arguments.smoke):
        print(f"tools/bench/gpu.py: needs a GPU: {here.detail}; --smoke shows that it runs without", file=sys.stderr)
        return EXIT_BAD_INPUT
    capability = device.capability() or HOPPER  # of the reference kernels, where there is no GPU
    print(f"{here.detail}, torch {torch.__version__}{': these figures mean nothing' * arguments.smoke}", flush=True)
    parts = [part for part in PARTS if part != "fp8" or capability >= HOPPER]
    with TemporaryDirectory() as folder:
        make_model(Path(folder), size)
        found = {part: measure(part, Path(folder), arguments.smoke) for part in parts}
    step, moved = found["bfloat16"], found["publish"]
    values = {
        "mfu": step["rate"] / step["ceiling"],
        "matmul_tflops": step["ceiling"] / 1e12,
        "publish_over_copy": moved["publish"] / moved["copy"],
        "publish_gb_s": moved["publish"] / 1e9,
        "copy_gb_s": moved["copy"] / 1e9,
    }
    if "fp8" in found:
        values["fp8_over_bf16"] = found["fp8"]["seconds"] / step["seconds"]
    print(json.dumps({"name": "gpu", "values": {name: float(f"{value:.4g}") for name, value in values.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
