"""Speed on a GPU: a training step over its matrix products, FP8 over bfloat16, publishing over a copy.

    .venv/bin/python tools/bench/gpu.py [--smoke] [PART…]

One GPU; four layers of the size of Qwen3-8B's, bfloat16, TransformerEngine. The parts, all of them or those that are
named, run one after the other, each in its own process:

- bfloat16: supervised steps of 32,768 tokens in sequences of 4,096, and before them products of 8,192 x 8,192 matrices.
  `mfu` is the arithmetic of a step (6 operations a weight and token, and causal attention; recomputation is not
  counted) over its time, divided by the rate of those products, `matmul_tflops`, the ceiling on this GPU.
- bfloat16_1b: the same, `mfu_1b`, of all 28 layers of the size of Qwen3-1.7B's.
- fp8: the same steps with FP8 in blocks. `fp8_over_bf16` is the time of a step over that in bfloat16. Skipped if the
  compute capability is below 9.0.
- publish: a colocated SGLang takes the weights. `publish_over_copy` is its rate, the bytes of its weights over the time
  from pause to continue, divided by that of a copy from the GPU to itself.

Times are medians. --smoke: small, and on the CPU if there is no GPU, with TransformerEngine over reference kernels; it
shows that the bench runs, and its figures mean nothing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from random_models import save_qwen3

from megatron_collab import patches
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec, sync_spec, trainer_spec
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_megatron import hf_shapes
from megatron_collab.runtime import device, gpu_environment
from megatron_collab.runtime.network import single_rank
from megatron_collab.runtime.process import EXIT_BAD_INPUT
from megatron_collab.types import Batch, Sample

PARTS = ("bfloat16", "bfloat16_1b", "fp8", "publish")
HOPPER = (9, 0)
WARM, TIMED = 2, 7


@dataclass(frozen=True)
class Size:
    """Sizes of the model, of a step, and of the matrix and the copy (bytes) that set the ceilings."""

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


MODEL = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
FULL = Size(4, 4096, 12_288, 32, 8, 128, 32_768, 8, 4096, 8192, 8192, 4 << 30)
WHOLE_1B = replace(FULL, layers=28, hidden=2048, ffn=6144, heads=16)
SMOKE = Size(2, 256, 512, 4, 2, 64, 512, 2, 128, 256, 256, 1 << 20)


def configure(folder: Path, size: Size, fp8: bool = False) -> Config:
    config = Config()
    config.launch.device = device.GPU if device.probe(device.GPU).available else "cpu"
    config.launch.timeout, config.launch.nproc_per_node = 600.0, 1
    config.model.path, config.model.dtype = str(folder), "bfloat16"
    config.train.stage, config.train.tokens_per_micro_batch = "sft", size.budget
    config.train.steps, config.optim.lr = 1000, 1e-5
    if fp8:
        config.model.fp8, config.model.fp8_recipe = "e4m3", "blockwise"
    return config


def batch_of(size: Size) -> Batch:
    """Random sequences; all tokens but the first are trained."""
    rng = np.random.default_rng(0)
    mask = (np.arange(size.length) > 0).astype(np.float32)
    rows = (rng.integers(0, size.vocab, size.length) for _ in range(size.sequences))
    return Batch(tuple(Sample(row, mask, np.zeros(size.length, np.float32)) for row in rows))


def arithmetic(shape: ModelShape, size: Size) -> float:
    """Floating-point operations of a step: forward, and twice as many backward.

    Two a weight and token, without the embedding, which is looked up. In causal attention a token attends to half of
    the sequence on average: scores and the weighted sum of values take 2 operations each per element of the head.
    """
    weights = sum(prod(sides) for name, sides in hf_shapes(shape).items() if "embed_tokens" not in name)
    attention = shape.layers * 2 * 2 * size.length / 2 * shape.heads * shape.head_dim
    return 3.0 * size.sequences * size.length * (2 * weights + attention)


def median_seconds(act: Callable[[], object], device_type: str) -> float:
    """Median seconds."""
    times = []
    for _ in range(WARM + TIMED):
        began = time.perf_counter()
        act()
        if device_type == device.GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[WARM:])


def train(folder: Path, size: Size, fp8: bool) -> dict[str, float]:
    """Seconds of a step, and operations a second of a step and of matrix products."""
    from megatron_collab.trainer.megatron import parallel
    from megatron_collab.trainer.trainer import PolicyTrainer

    config = configure(folder, size, fp8)
    device_type, batch = config.launch.device, batch_of(size)
    with parallel.init_parallel(config.launch, network_spec(config)):
        matrix = torch.randn(size.matrix, size.matrix, device=device_type).bfloat16()
        ceiling = 2 * size.matrix**3 / median_seconds(lambda: matrix @ matrix, device_type)
        trainer = PolicyTrainer(trainer_spec(config))
        seconds = median_seconds(lambda: trainer.update(batch), device_type)
        return {"seconds": seconds, "ceiling": ceiling, "rate": arithmetic(trainer.shape, size) / seconds}


def rate_of_copies(size: Size, device_type: str) -> float:
    """Bytes a second of a copy on the device."""
    source = torch.ones(size.copied, dtype=torch.uint8, device=device_type)
    target = torch.empty_like(source)
    return size.copied / median_seconds(lambda: target.copy_(source), device_type)


def publish(folder: Path, size: Size) -> dict[str, float]:
    """Bytes a second of a publish and of a copy."""
    from megatron_collab.inference.server import SGLangServer
    from megatron_collab.launch import server_specs
    from megatron_collab.trainer.megatron import parallel
    from megatron_collab.trainer.trainer import PolicyTrainer
    from megatron_collab.weight_sync.sync import WeightSync

    config = configure(folder, size)
    config.rollout.server.max_total_tokens = 8192
    device_type = config.launch.device

    def lost(server: Any, reason: str) -> None:
        raise SystemExit(f"the server is lost: {reason}")

    policy = server_specs.training(config).policy
    ranks = parallel.init_parallel(config.launch, network_spec(config))
    with SGLangServer(policy, folder / "server.log") as server, ranks:
        server.wait_healthy(1800)
        trainer = PolicyTrainer(trainer_spec(config))
        pool: Any = SimpleNamespace(present=lambda: [server], lost=lost)
        copied = rate_of_copies(size, device_type)
        device.free_cache()
        with WeightSync(sync_spec(config), policy, trainer.chunks, trainer.shape, pool) as sync:
            versions = iter(range(WARM + TIMED))
            seconds = median_seconds(lambda: sync.publish(next(versions)), device_type)
    weight_bytes = 2 * sum(prod(sides) for sides in hf_shapes(trainer.shape).values())
    return {"publish": weight_bytes / seconds, "copy": copied}


def as_part(part: str, folder: Path, size: Size) -> dict[str, float]:
    """The measurements of a part, which runs in its own process."""
    if part != "publish" and not device.probe(device.GPU).available:
        from megatron_collab.rehearsal.te_cpu.install import install

        install()
    patches.apply("megatron")
    os.environ |= single_rank("bench")
    if not folder.exists():
        sizes = {name: getattr(size, name) for name in MODEL}
        save_qwen3(folder, **sizes, positions=2 * size.length, dtype=torch.bfloat16, words=True)
    return publish(folder, size) if part == "publish" else train(folder, size, fp8=part == "fp8")


def measure(part: str, folder: Path, smoke: bool) -> dict[str, float]:
    model = folder / ("1b" if part == "bfloat16_1b" else "wide")
    command = [sys.executable, __file__, "--part", part, str(model), *(["--smoke"] if smoke else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{part} ended with {done.returncode}")
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{part}: {', '.join(f'{name} {value:.4g}' for name, value in rates.items())}", flush=True)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="small, on any machine: shows that it runs, no figures")
    arguments = parser.parse_args()
    gpu_environment.enter()
    gpu = device.probe(device.GPU)
    if arguments.part:
        part, folder = arguments.part
        size = SMOKE if arguments.smoke else WHOLE_1B if part == "bfloat16_1b" else FULL
        print(json.dumps(as_part(part, Path(folder), size)))
        return 0
    if not (gpu.available or arguments.smoke):
        print(f"tools/bench/gpu.py: needs a GPU: {gpu.detail}; --smoke shows that it runs without", file=sys.stderr)
        return EXIT_BAD_INPUT
    capability = device.capability() or HOPPER  # the reference kernels' if there is no GPU
    print(f"{gpu.detail}, torch {torch.__version__}{': these figures mean nothing' * arguments.smoke}", flush=True)
    parts = [part for part in arguments.parts or PARTS if part != "fp8" or capability >= HOPPER]
    with TemporaryDirectory() as folder:
        results = {part: measure(part, Path(folder), arguments.smoke) for part in parts}
    values = {name: float(f"{value:.4g}") for name, value in values_of(results).items()}
    print(json.dumps({"name": "gpu", "values": values}))
    return 0


def values_of(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Figures of the parts that ran."""
    values: dict[str, float] = {}
    if step := results.get("bfloat16"):
        values |= {"mfu": step["rate"] / step["ceiling"], "matmul_tflops": step["ceiling"] / 1e12}
    if whole := results.get("bfloat16_1b"):
        values |= {"mfu_1b": whole["rate"] / whole["ceiling"]}
    if transfer := results.get("publish"):
        values |= {f"{name}_gb_s": transfer[name] / 1e9 for name in ("publish", "copy")}
        values |= {"publish_over_copy": transfer["publish"] / transfer["copy"]}
    if step and "fp8" in results:
        values |= {"fp8_over_bf16": results["fp8"]["seconds"] / step["seconds"]}
    return values


if __name__ == "__main__":
    sys.exit(main())
