"""Measures what a run on a machine with a GPU is planned by, and writes each fact as soon as it is known.

    PYTHONPATH=. python tools/gpu/facts.py PAGE [--dry]

--dry: only those that need no GPU, for instance with a stand-in for the driver's library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from megatron_collab.runtime import device, driver, gpu_environment, gpu_set, toolkit
from megatron_collab.trainer.host_memory import PIECE

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # of the modules that benches share

from tools.bench import gpu as bench

SECONDS = 60.0  # for a process that answers a question


def drivers() -> Iterator[str]:
    installed = driver.driver()
    modes = sorted({visible.compute_mode for visible in installed.devices})
    yield f"driver: {device.probe(device.GPU).detail}; for CUDA {installed.cuda / 1000:g}"
    yield f"compute capability: {device.capability()}; compute mode: {', '.join(modes) or 'unknown'}"
    yield f"torch {torch.__version__}, its CUDA {toolkit.torch_cuda()}"


def hook() -> Iterator[str]:
    """Whether SGLang's schedulers could start."""
    if library := gpu_set.saver_hook():
        started = gpu_set.preload(library)
        yield f"a process with torch-memory-saver's library preloaded: {started.failure or 'started'}"
    else:
        yield f"torch-memory-saver: {device.probe('memory_saver').detail}"


def ceilings() -> Iterator[str]:
    """Rates of matrix products and of copies, in the sizes of tools/bench/gpu.py."""
    side, size = bench.FULL.matrix, bench.FULL.copied
    matrix = torch.randn(side, side, device=device.GPU).bfloat16()
    seconds = bench.median_seconds(lambda: matrix @ matrix, device.GPU)
    yield f"products of matrices of {side} x {side} in bfloat16: {2 * side**3 / seconds / 1e12:.0f} TFLOP/s"
    yield f"a copy on the GPU: {bench.rate_of_copies(bench.FULL, device.GPU) / 1e9:.0f} GB/s, each byte counted once"
    on_gpu = torch.empty(size, dtype=torch.uint8, device=device.GPU)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for name, target, source in (("to the GPU", on_gpu, on_host), ("from the GPU", on_host, on_gpu)):
        seconds = bench.median_seconds(partial(target.copy_, source), device.GPU)
        yield f"a copy {name}, pinned: {size / seconds / 1e9:.1f} GB/s"


def pinned() -> Iterator[str]:
    """What torch pins for a tensor whose size is no power of two."""
    before = torch.cuda.host_memory_stats()["active_bytes.allocated"]
    tensor = torch.empty(5 * PIECE, dtype=torch.uint8, pin_memory=True)
    allocated = torch.cuda.host_memory_stats()["active_bytes.allocated"] - before
    yield f"pinned for a tensor of {tensor.nbytes >> 20} MiB: {allocated >> 20} MiB"


# A kernel that waits is followed by a second one in its stream, then by one in another stream. With one hardware queue
# the third is behind the second.
ORDER = """
import os, sys, torch
if sys.argv[1] == "after":
    torch.cuda.init()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
first, second = torch.cuda.Stream(), torch.cuda.Stream()
tensor, event = torch.zeros(1, device="cuda"), torch.cuda.Event()
for stream in (first, second):  # loads the kernels
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
        tensor.add_(1)
torch.cuda.synchronize()
with torch.cuda.stream(first):
    torch.cuda._sleep(2 * 10**9)  # cycles
    tensor.add_(1)
    waits = torch.cuda.Event()
    waits.record()
with torch.cuda.stream(second):
    torch.cuda._sleep(1)
    event.record()
event.synchronize()
print("in the order of launches" if waits.query() else "at once")
"""


def connections() -> Iterator[str]:
    """The kernels of two streams, with CUDA_DEVICE_MAX_CONNECTIONS=1 set before CUDA starts and after."""
    for when in ("before", "after"):
        environment = dict(os.environ) | ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if when == "before" else {})
        command = [sys.executable, "-c", ORDER, when]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        answer = done.stdout.strip() or (done.stderr.splitlines() or [f"not at all: exit code {done.returncode}"])[-1]
        yield f"CUDA_DEVICE_MAX_CONNECTIONS=1 set {when} CUDA starts: two streams run {answer}"


def main() -> int:
    page, *options = sys.argv[1:]
    gpu_environment.enter()
    failed = False
    with Path(page).open("w") as file:

        def write(fact: str) -> None:
            print(f"- {fact}", file=file, flush=True)
            print(fact, flush=True)

        for facts in (drivers, hook) if options == ["--dry"] else (drivers, hook, ceilings, pinned, connections):
            try:
                for fact in facts():
                    write(fact)
            except Exception as error:  # the others may be known all the same
                failed = True
                write(f"{facts.__name__}: failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
