"""Memory and time of log-probs without the full logits, over those with the full logits.

`python tools/bench/logprob.py [--rounds 3]`: 2,048 tokens, hidden size 512, a vocabulary of 151,936 (Qwen's), float32,
forward and backward, one thread. Three ways take turns, each time in a fresh process:

- ours: `head_log_probs`, which also gives the entropy; the head's gradient is added to `main_grad`;
- lean: logits = hidden @ head.T, then torch's cross_entropy; no entropy;
- plain: logits / temperature, log_softmax, gather, and the entropy from the same log_softmax without a gradient.

The gradient of the head is added to zeros that exist before, in all of them. A process first does the same with 8
tokens and 64 entries, so that libraries are loaded, then measures one pass:

    memory = its peak resident memory - its resident memory before (what the pass needs beside its inputs and the
             gradient of the head), in bytes of one full float32 tensor of logits: `memory_over_full` is ours;
    time = CPU seconds (user and system) of its one thread, which include the first touch of memory and hardly depend
           on other processes. `time_over_full` is ours / lean.

Medians over the rounds. Ours multiplies matrices four times (it computes the logits twice), the full ways three times:
if fresh memory were free, `time_over_full` would be about 4/3. Ours wins on a CPU because the full ways touch 3.7 GB of
fresh pages (`…_system_seconds`) and go through them several times, while a tile stays in the cache. --smoke: one
round of 256 tokens and 16,384 entries. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_collab import patches

HIDDEN = 512
SIZE, SMOKE_SIZE = (2048, 151_936), (256, 16_384)  # tokens, entries of the vocabulary
TEMPERATURE = 1.0


def ours(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    from megatron_collab.trainer.logprobs import head_log_probs

    log_probs, _ = head_log_probs(hidden, head, labels, TEMPERATURE, len(head))
    return log_probs


def lean(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(hidden @ head.t(), labels, reduction="none")


def plain(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    scores = ((hidden @ head.t()) / TEMPERATURE).log_softmax(-1)
    with torch.no_grad():
        (-(scores.exp() * scores).sum(-1)).mean()
    return scores.gather(-1, labels[:, None])[:, 0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "lean": lean, "plain": plain}


def one_pass(way: str, tokens: int, vocab: int) -> dict[str, float]:
    """Bytes, CPU seconds, system seconds and the sum of the log-probs of one forward and backward pass."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    head = torch.randn(vocab, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    gradient = torch.zeros(head.shape).fill_(0.0)  # zeros alone would touch no page
    if way == "ours":
        head.main_grad = gradient
    else:
        head.grad = gradient
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began = memory("VmRSS"), os.times()
    log_probs = WAYS[way](hidden, head, labels)
    (-log_probs.mean()).backward()
    ended = os.times()
    system = ended.system - began.system
    seconds = ended.user - began.user + system
    peak = memory("VmHWM") - before
    return {"bytes": peak, "seconds": seconds, "system": system, "sum": log_probs.sum().item()}


def memory(name: str) -> int:
    """Bytes of resident memory of this process: current (VmRSS) or peak (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def child(way: str, size: tuple[int, int]) -> None:
    patches.apply("megatron")
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        one_pass(way, 8, 64)
        print(json.dumps(one_pass(way, *size)))
        dist.destroy_process_group()


def measure(way: str, smoke: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, *(["--smoke"] if smoke else [])]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | one_thread)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    seconds = f"{result['seconds']:.2f} s ({result['system']:.2f} s in the system)"
    print(f"{way}: {seconds}, {result['bytes'] / 2**20:.0f} MiB", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=list(WAYS), help="measure one way once, in this process")
    parser.add_argument("--smoke", action="store_true", help="one small round: shows that it runs, no figures")
    arguments = parser.parse_args()
    tokens, vocab = SMOKE_SIZE if arguments.smoke else SIZE
    if arguments.way:
        return child(arguments.way, (tokens, vocab))
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(1 if arguments.smoke else arguments.rounds):
        for way in WAYS:
            results[way].append(measure(way, arguments.smoke))
    sums = [result["sum"] for way in WAYS for result in results[way]]
    assert max(sums) - min(sums) < 1e-5 * abs(sums[0]), f"the ways disagree: {sums}"
    seconds = {way: median(result["seconds"] for result in results[way]) for way in WAYS}
    full = 4 * tokens * vocab
    size = {way: median(result["bytes"] for result in results[way]) / full for way in WAYS}
    values = {
        "memory_over_full": size["ours"],
        "time_over_full": seconds["ours"] / seconds["lean"],
        "time_over_plain": seconds["ours"] / seconds["plain"],
        "lean_memory_over_full": size["lean"],
        "plain_memory_over_full": size["plain"],
        **{f"{way}_seconds": seconds[way] for way in WAYS},
        **{f"{way}_system_seconds": median(result["system"] for result in results[way]) for way in WAYS},
    }
    print(json.dumps({"name": "logprob", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
