"""Checkpoints of the networks: weights, optimizers, RNG state of every rank, and the caller's state.

`save` copies to CPU memory and returns; a thread of each rank writes during the next training steps. storage.py
manages files and folders. All ranks must see the same file system.
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel import random as device_random
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_collab.checkpoint import storage
from megatron_collab.checkpoint.hf import unwrap
from megatron_collab.checkpoint.sharded_state import MAIN, Checkpointable, load_weights, read_sharded, restore, snapshot
from megatron_collab.checkpoint.torch_dist import CheckpointWriter, SaveItems, WriteRequest
from megatron_collab.runtime import hang_detector
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import shared

logger = logging.getLogger(__name__)

COMMON = "common.pt"
_RANK_FILE = re.compile(r"(?:__|random_)(\d+)(?:_\d+\.distcp|\.pkl)")  # the number is the rank that wrote the file


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints in `folder`; the newest `keep` stay on disk.

    The constructor and all methods are collective. The writing threads use a separate process group, one save at a
    time, so their collectives cannot mix with those of the training.

    `on_disk`: step and state of the newest checkpoint that is known to be complete on disk.
    """

    def __init__(self, folder: Path, keep: int, timeout: float) -> None:
        """`timeout`: launch.timeout in seconds."""
        self.folder, self._keep = folder, keep
        self._group = dist.new_group(backend="gloo", timeout=hang_detector.collective_timeout(timeout))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[tuple[int, dict[str, Any]]] | None = None
        self.on_disk: tuple[int, dict[str, Any]] = 0, {}

    def __exit__(self, *_: object) -> None:
        """Wait for a save in progress, even after an error."""
        self.finish()
        self._thread.shutdown()

    def save(self, step: int, networks: Mapping[str, Checkpointable], state: dict[str, Any]) -> None:
        """Start writing the checkpoint after `step` updates. Only rank 0's `state` (JSON) is used.

        Waits for the previous save; raises RunStopped if that one failed. Until it is written, a rank keeps what it
        writes in CPU memory: the first rank of a data parallel group the weights of its shard, and every rank its part
        of the optimizer's state (12 bytes per parameter of the shard, divided by the data parallel size).
        """
        self.finish()
        beat(f"saving step {step}")
        items, common = snapshot(networks)
        generators = pickle.dumps({name: get() for name, (get, _) in _generators().items()})
        policy = unwrap(networks[MAIN].chunks[0])
        record = {"state": state, "model": asdict(policy.shape)}
        if policy.lora is not None:
            record["lora"] = asdict(policy.lora)
        self._writing = self._thread.submit(self._write, step, items, common, generators, json.dumps(record))

    def finish(self) -> None:
        """Wait until the last save is on disk. If it failed, its files are removed; RunStopped for a write error."""
        if self._writing is None:
            return
        beat("waiting for the last checkpoint to be written")
        writing, self._writing = self._writing, None
        try:
            self.on_disk = writing.result()
        except CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            if not isinstance(cause, OSError | RunStopped):
                raise
            raise RunStopped(
                f"{self.folder}: rank {rank} could not write the checkpoint: {cause}; free disk space, or lower "
                "train.keep_checkpoints; the same command resumes from the previous checkpoint"
            ) from error

    def load_latest(self, networks: Mapping[str, Checkpointable]) -> tuple[int, dict[str, Any]] | None:
        """Load the newest intact checkpoint into `networks`; its step and state on every rank, None if there is none.

        If a checkpoint has a missing, short or corrupt file, it is reported and the previous one is used; raises
        RunStopped if none is intact. RNG states are not restored if the number of ranks has changed.
        """
        self.finish()
        beat(f"loading from {self.folder}")
        checkpoints = shared(lambda: storage.candidates(self.folder))
        for checkpoint in checkpoints:
            saved = shared(partial(storage.read_state, checkpoint))
            damage: list[list[str]] = [[]] * dist.get_world_size()
            dist.all_gather_object(damage, storage.damage(checkpoint, saved, dist.get_rank(), len(damage)))
            if not any(damage):
                self.on_disk = _load(checkpoint, saved, networks)
                return self.on_disk
            _warn(f"{checkpoint}: is damaged ({'; '.join(chain(*damage))}); using the previous one")
        if checkpoints:
            raise RunStopped(f"{self.folder}: contains no intact checkpoint; restore one, or remove the folder")
        return None

    def _write(
        self, step: int, items: Sequence[WriteRequest], common: Mapping[str, Any], generators: bytes, text: str
    ) -> tuple[int, dict[str, Any]]:
        """In the thread: write this rank's files; rank 0 commits the checkpoint once every rank has written its files.

        Returns the new value of `on_disk`. An error of one rank is raised on all ranks.
        """
        ranks = _DistWrapper(self._group, use_dist=True, coordinator_rank=0)
        temporary, state = self.folder / f"step_{step}.tmp", json.loads(text)["state"]

        def write_other_files() -> storage.Files:
            """Write everything that is not a tensor; return the checksums of all files of this rank."""
            rank = dist.get_rank()
            _random_file(temporary).write_bytes(generators)
            if rank == 0:
                torch.save(common, temporary / COMMON)
                save_config(CheckpointingConfig("torch_dist"), str(temporary))
            return storage.checksums(file for file in temporary.iterdir() if _owner(file.name) == rank)

        def commit(files: list[storage.Files]) -> None:
            saved = {"step": step, "ranks": len(files), **json.loads(text)}
            storage.commit(temporary, saved, {name: sums for part in files for name, sums in part.items()})
            storage.discard(self.folder, step, self._keep)

        try:
            ranks.broadcast("prepare", lambda: storage.begin(self.folder, step))
            torch_checkpoint.save(
                {},  # the planner has all items
                storage_writer=CheckpointWriter(temporary, per_thread_copy_ahead=0),
                planner=SaveItems(items),
                process_group=self._group,
            )
            ranks.all_reduce("commit", write_other_files, commit)
            return step, state
        except CheckpointException:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise


def _owner(name: str) -> int:
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) if match else 0


def _load(
    checkpoint: Path, saved: Mapping[str, Any], networks: Mapping[str, Checkpointable]
) -> tuple[int, dict[str, Any]]:
    if saved.get("weights_only"):
        _warn(f"{checkpoint}: contains weights only; training starts with a new optimizer, at step {saved['step']}")
        policy = networks[MAIN]
        if unwrap(policy.chunks[0]).lora is not None:
            raise RunStopped(
                f"{checkpoint}: contains whole weights, and with model.lora.rank a run trains only adapters; give the "
                "Hugging Face folder of these weights as model.path"
            )
        load_weights(policy.chunks, checkpoint)
        assert policy.optimizer is not None
        policy.optimizer.reload_model_params()
    else:
        restore(networks, partial(read_sharded, checkpoint))
    if saved["ranks"] == dist.get_world_size():
        states = pickle.loads(_random_file(checkpoint).read_bytes())
        for name, (_, restore_state) in _generators().items():
            restore_state(states[name])
    elif not saved.get("weights_only"):
        _warn(
            f"{checkpoint}: was written by {saved['ranks']} ranks; "
            "its random states are not restored but derived from run.seed"
        )
    return saved["step"], saved["state"]


def _random_file(folder: Path) -> Path:
    return folder / f"random_{dist.get_rank():05d}.pkl"


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Getter and setter of the state of each random generator."""
    return {
        "python": (random.getstate, random.setstate),
        "numpy": (np.random.get_state, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "device": (device_random._get_cuda_rng_state, device_random._set_cuda_rng_state),
        "megatron": (get_cuda_rng_tracker().get_states, get_cuda_rng_tracker().set_states),
    }


def _warn(message: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(message)
