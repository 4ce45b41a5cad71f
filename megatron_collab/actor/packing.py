"""Micro-batches: which samples go through the model together, on which rank, in which padded shape.

`plan` is pure: from lengths alone, so every rank computes the same plan and takes its own part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from megatron_collab.types import Sample

MicroBatch = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """`ranks[d]` are the micro-batches (sample indices) of data parallel rank d, equally many on every rank.

    All have the padded shape [rows, width]; one with fewer samples than `rows` is filled with padding rows.
    Pipeline stages exchange activations of one fixed shape, hence one shape for all.
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
    rows: int
    width: int


def plan(lengths: Sequence[int], data_parallel: int, token_budget: int, multiple: int = 1) -> Plan:
    """Spread samples of `lengths` positions over the data parallel ranks in micro-batches.

    A micro-batch holds at most `token_budget` padded tokens, or a single sequence where one is longer than
    that. The width is the longest length rounded up to a `multiple` (sequence parallelism cuts it evenly).
    """
    width = ceil(max(lengths) / multiple) * multiple
    most = max(1, token_budget // width)
    count = ceil(len(lengths) / (most * data_parallel))
    rows = ceil(len(lengths) / (count * data_parallel))
    chunks = [tuple(range(len(lengths))[start : start + rows]) for start in range(0, len(lengths), rows)]
    chunks += [()] * (count * data_parallel - len(chunks))
    return Plan(tuple(tuple(chunks[rank::data_parallel]) for rank in range(data_parallel)), rows, width)


def positions(sample: Sample) -> int:
    """Positions a sample takes in the model: every token but the last predicts its successor."""
    return max(1, len(sample.token_ids) - 1)


def collate(samples: Sequence[Sample], indices: MicroBatch, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """One micro-batch, padded with zeros to `shape` [b, s].

    `token_ids`, `labels` (the next token) and `position_ids` are int64 [b, s]; `loss_mask`, `advantages` and
    `log_probs` float32 [b, s], shifted so that position i speaks of label i. ValueError where a sequence's
    first token is to be trained: nothing predicts it.
    """
    batch: dict[str, np.ndarray] = {name: np.zeros(shape, np.int64) for name in ("token_ids", "labels")}
    batch |= {name: np.zeros(shape, np.float32) for name in ("loss_mask", "advantages", "log_probs")}
    for row, index in enumerate(indices):
        sample = samples[index]
        if sample.loss_mask[0] != 0:
            raise ValueError(f"sample {index}: its first token is to be trained, but nothing stands before it")
        filled = (row, slice(0, len(sample.token_ids) - 1))
        batch["token_ids"][filled] = sample.token_ids[:-1]
        batch["labels"][filled] = sample.token_ids[1:]
        for name in ("loss_mask", "advantages", "log_probs"):
            batch[name][filled] = getattr(sample, name)[1:]
    batch["position_ids"] = np.broadcast_to(np.arange(shape[1]), shape).copy()
    return batch
