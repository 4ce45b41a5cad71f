"""Saving from computing shared prefixes of futures once: an update in packed trees against the plain packing.

`python tools/bench/tree.py [--rounds 3]`: 4 prompts of 2 rollouts each, with 3 futures of 2 later turns, all of whose
turns are trained (rollout.train_turns=all): a sequence for the trained turn and one a future. Lengths are drawn evenly:
prompts of 250 to 350 tokens (system prompt, the user's task), the policy's turns of 60 to 100, the user's of 30 to 50.
A random Qwen3 of 14 million parameters; GRPO without a reference, AdamW; float32, one process, one thread, forward,
backward and the optimizer's step. Both ways take turns.

    tokens_over_tree = computed positions / positions of the trees, in which a shared token counts once;
    time_over_plain = CPU seconds of an update in trees / in the plain packing, medians over the rounds;
    tokens_over_plain = computed positions / those of the plain packing;
    loss_diff, norm_diff = difference of the losses of the first update, relative difference of the gradient norms.

--smoke: one round of one prompt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_collab import patches
from megatron_collab.launch.trainer_specs import network_spec, trainer_spec

patches.apply("megatron")

import torch  # noqa: E402
from random_models import save_qwen3  # noqa: E402

from megatron_collab.algo.advantages import with_advantages  # noqa: E402
from megatron_collab.config import Config  # noqa: E402
from megatron_collab.runtime.network import single_rank  # noqa: E402
from megatron_collab.trainer.megatron import parallel  # noqa: E402
from megatron_collab.trainer.microbatches import Columns, MicroBatch, Pack, make_micro_batches  # noqa: E402
from megatron_collab.trainer.spec import NetworkSpec  # noqa: E402
from megatron_collab.trainer.trainer import PolicyTrainer  # noqa: E402
from megatron_collab.types import Batch, Credit, Sample  # noqa: E402

PROMPTS, ROLLOUTS, FUTURES, LATER = 4, 2, 3, 2
SIZES = {"hidden": 384, "ffn": 1152, "layers": 6, "heads": 6, "kv_heads": 2}
VOCAB, PROMPT, TURN, USER = 4096, (250, 350), (60, 100), (30, 50)


def make_samples(prompts: int) -> tuple[tuple[Sample, ...], int]:
    """The samples, and how many positions their trees have."""
    rng = np.random.default_rng(0)
    samples: list[Sample] = []
    nodes = 0

    def drawn(bounds: tuple[int, int]) -> np.ndarray:
        nonlocal nodes
        nodes += (length := int(rng.integers(*bounds)))
        return rng.integers(0, VOCAB, length)

    def add(parts: list[np.ndarray], trained: set[int], group: str) -> None:
        bounds = np.cumsum([0, *map(len, parts)]).tolist()
        spans = tuple((bounds[number], bounds[number + 1]) for number in sorted(trained))
        mask: np.ndarray = np.zeros(bounds[-1], np.float32)
        for span in spans:
            mask[slice(*span)] = 1.0
        credit = Credit(spans, float(rng.normal()), peers=group, scale=group)
        samples.append(Sample(np.concatenate(parts), mask, np.zeros(bounds[-1], np.float32), (credit,)))

    for number in range(prompts):
        prompt = drawn(PROMPT)
        for rollout in range(ROLLOUTS):
            first = [prompt, drawn(TURN)]
            add(first, {1}, f"{number}")
            for _ in range(FUTURES):
                later = [drawn(bounds) for _ in range(LATER) for bounds in (USER, TURN)]
                add(first + later, {3, 5}, f"{number}/{rollout}")
                nodes -= 1  # the last token of a future predicts nothing
    return tuple(samples), nodes


def plainly(network: NetworkSpec, tokens: int, columns: Columns, device: Any, **options: Any) -> list[MicroBatch]:
    """The plain packing: to the plan each sample begins with a token of its own, so that none share a prefix."""
    rows = columns["token_ids"]
    marked = [np.concatenate([[VOCAB + number], row[1:]]) for number, row in enumerate(rows)]
    first = torch.tensor([row[0] for row in rows])
    micro_batches = make_micro_batches(network, tokens, {**columns, "token_ids": marked}, device, **options)
    for micro_batch in micro_batches:
        ids = micro_batch.token_ids
        ids[ids >= VOCAB] = first[ids[ids >= VOCAB] - VOCAB]
    return micro_batches


class Measured:
    """Updates of its own model, their CPU seconds, and the positions of the last update; `pack` as of PolicyTrainer."""

    def __init__(self, folder: Path, samples: tuple[Sample, ...], pack: Pack = make_micro_batches) -> None:
        self.config = Config()
        self.config.launch.device, self.config.model.dtype, self.config.model.path = "cpu", "float32", str(folder)
        self.config.algo.kl_coef = 0.0
        self.trainer = PolicyTrainer(trainer_spec(self.config), pack=self._counted)
        self._pack = pack
        self.batch = Batch(samples)
        self.seconds: list[float] = []
        self.metrics: list[dict[str, float]] = []
        self.positions = 0

    def _counted(self, *arguments: Any, **options: Any) -> list[MicroBatch]:
        micro_batches = self._pack(*arguments, **options)
        self.positions = sum(micro_batch.token_ids.shape[1] for micro_batch in micro_batches)
        return micro_batches

    def update(self) -> None:
        began = time.process_time()
        batch = with_advantages(self.trainer.score(self.batch), self.config.algo)
        self.metrics.append(self.trainer.update(batch))
        self.seconds.append(time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed updates of each way, after one that is not")
    parser.add_argument("--smoke", action="store_true", help="one round of one prompt: shows that it runs, no figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ |= single_rank("bench")
    config = Config()
    config.launch.device = "cpu"
    with tempfile.TemporaryDirectory() as scratch, parallel.init_parallel(config.launch, network_spec(config)):
        folder = Path(scratch) / "model"
        save_qwen3(folder, **SIZES, vocab=VOCAB, tie_word_embeddings=True)
        samples, nodes = make_samples(1 if arguments.smoke else PROMPTS)
        trees, plain = Measured(folder, samples), Measured(folder, samples, plainly)
        for _ in range(1 + (1 if arguments.smoke else arguments.rounds)):
            trees.update()
            plain.update()
            print(f"{trees.seconds[-1]:.1f} s in trees, {plain.seconds[-1]:.1f} s in the plain packing", flush=True)
    first, other = trees.metrics[0], plain.metrics[0]
    values = {
        "tokens_over_tree": trees.positions / nodes,
        "time_over_plain": median(trees.seconds[1:]) / median(plain.seconds[1:]),
        "tokens_over_plain": trees.positions / plain.positions,
        "loss_diff": abs(first["loss"] - other["loss"]),
        "norm_diff": abs(first["grad_norm"] / other["grad_norm"] - 1),
    }
    print(json.dumps({"name": "tree", "values": {name: round(value, 8) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
