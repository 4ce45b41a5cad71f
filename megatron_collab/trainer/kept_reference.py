"""Log-probs of the reference for all pairs of a run, computed once and stored in run.dir/reference.

There is a folder per model. Samples are looked up by their tokens, so new data adds to it. It has parts, each of two
files: NUMBER.npy, float32, has the concatenated log-probs of its samples' trained tokens, and NUMBER.json maps each
sample's key to its start offset. A part with NUMBER.json is complete. `known-DIGEST` marks that all samples of the
data with this digest are stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_collab.data.datasets import SupervisedData
from megatron_collab.models import hf_weights
from megatron_collab.runtime import files, hub
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.rank0 import shared
from megatron_collab.runtime.screen import progress
from megatron_collab.settings import TrainingModelConfig
from megatron_collab.types import Batch, Sample

FOLDER = "reference"  # in run.dir
Compute = Callable[[Batch], list[np.ndarray]]
PART = 512  # pairs whose log-probs are computed and written together


class KeptReference:
    """The log-probs of every sample of the data, on every rank."""

    def __init__(self, run_dir: Path, model: TrainingModelConfig, data: SupervisedData, compute: Compute) -> None:
        """Compute and store the missing log-probs; collective. `compute`: like PolicyTrainer.log_probs.

        Raises Preempted if `compute` does; finished parts remain. Raises RunStopped if a file is damaged or cannot be
        written.
        """
        self.folder = run_dir / FOLDER / model_digest(model)
        self._known: dict[str, tuple[np.ndarray, int]] = {}  # key -> (values of its part, start offset)
        known = self.folder / f"known-{_digest(data.fingerprint)}"
        parts: list[int] = shared(self._parts)
        for part in parts:
            self._read(part)
        if shared(known.exists):
            return
        bar = progress("log-probs of the reference", len(data), unit="pair") if dist.get_rank() == 0 else None
        for batch in data.all_batches(PART):
            pairs = [batch.samples[at : at + 2] for at in range(0, len(batch.samples), 2)]
            samples = tuple(sample for pair in pairs if not all(map(self._knows, pair)) for sample in pair)
            if samples:
                parts.append(parts[-1] + 1 if parts else 0)
                rows = compute(Batch(samples))
                shared(partial(self._write, parts[-1], samples, rows))
                self._read(parts[-1])
            if bar:
                bar.update(len(pairs))
        if bar:
            bar.close()
        shared(partial(files.replace, known, ""))

    def log_probs(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs of the trained tokens, 0 elsewhere, float32 [S] per sample. Raises RunStopped if one is missing."""
        rows = []
        for sample in batch.samples:
            if not self._knows(sample):
                raise self._damaged(self.folder)
            values, start = self._known[_key(sample)]
            trained, row = sample.loss_mask > 0, np.zeros_like(sample.loss_mask)
            row[trained] = values[start : start + np.count_nonzero(trained)]
            rows.append(row)
        return rows

    def _knows(self, sample: Sample) -> bool:
        return _key(sample) in self._known

    def _parts(self) -> list[int]:
        self.folder.mkdir(parents=True, exist_ok=True)
        return sorted(int(file.stem) for file in self.folder.glob("*.json"))

    def _write(self, part: int, samples: tuple[Sample, ...], rows: list[np.ndarray]) -> None:
        trained = [row[sample.loss_mask > 0] for sample, row in zip(samples, rows, strict=True)]
        starts = np.cumsum([0, *map(len, trained)]).tolist()
        with files.writing(self.folder / f"{part}.npy"):
            np.save(self.folder / f"{part}.npy", np.concatenate(trained))
        index = {_key(sample): start for sample, start in zip(samples, starts[:-1], strict=True)}
        files.replace(self.folder / f"{part}.json", json.dumps(index))

    def _read(self, part: int) -> None:
        file = self.folder / f"{part}.npy"
        try:
            values = np.load(file, mmap_mode="r")
            index: dict[str, int] = json.loads(file.with_suffix(".json").read_text())
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(file) from error
        self._known |= {key: (values, start) for key, start in index.items()}

    def _damaged(self, path: Path) -> RunStopped:
        return RunStopped(f"{path}: lacks log-probs of the reference; remove {self.folder} to recompute them")


def model_digest(model: TrainingModelConfig) -> str:
    """Digest of config.json, of the names, sizes and times of the weight files, and of the dtype."""
    folder = hub.folder(model.path)
    weights = [folder / name for name in sorted({tensor.file for tensor in hf_weights.read(folder).values()})]
    file_stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    return _digest([(folder / "config.json").read_text(), file_stats, model.dtype, model.fp8])


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def _key(sample: Sample) -> str:
    """Key of a sample: a hash of its tokens and of its loss mask."""
    content = sample.token_ids.astype(np.int64).tobytes() + (sample.loss_mask > 0).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
