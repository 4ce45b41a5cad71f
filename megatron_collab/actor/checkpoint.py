"""Checkpoints of the actor: model, optimizer, RNG of every rank, and the caller's state, in step_N folders.

A folder is written as step_N.tmp and renamed when every rank is done, then `latest` names it. So a run that
is killed at any point finds a whole checkpoint, or none. All ranks must see the same file system.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel import random as device_random
from torch.distributed import checkpoint as torch_checkpoint

from megatron_collab.actor.actor import Actor

LATEST = "latest"
# Written last, so that a folder that has it is whole.
STATE = "state.json"
_FOLDER = re.compile(r"step_(\d+)")


class Checkpoints:
    """The checkpoints in `folder`; the newest `keep` stay on disk."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, actor: Actor, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step` finished updates; collective. `state` (JSON) is that of rank 0."""
        final = self.folder / f"step_{step}"
        temporary = final.with_suffix(".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(_sharded(actor, loading=False), str(temporary), _WriteInProcess("torch_dist", 1))
        _random_file(temporary).write_bytes(pickle.dumps(_random_state()))
        dist.barrier()
        if dist.get_rank() == 0:
            _write(temporary / STATE, json.dumps({"step": step, "ranks": dist.get_world_size(), "state": state}))
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            _write(self.folder / LATEST, final.name)
            self._discard(step)
        dist.barrier()

    def load_latest(self, actor: Actor) -> tuple[int, dict[str, Any]] | None:
        """Load the newest whole checkpoint into `actor`: its step and state on every rank, None where there is none.

        Collective. On another number of ranks the checkpoint is loaded all the same, but for the RNG states.
        """
        chosen: list[Path | None] = [self._newest() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(chosen, src=0)
        folder = chosen[0]
        if folder is None:
            return None
        saved = json.loads((folder / STATE).read_text())
        for optimizer in actor.optimizer.chained_optimizers:
            optimizer._init_optimizer_states_with_dummy_values()  # there must be state for the load to fill
        loaded = dist_checkpointing.load(_sharded(actor, loading=True), str(folder))
        actor.policy.load_state_dict(loaded["model"])
        actor.optimizer.load_state_dict(loaded["optimizer"])
        actor.step = saved["step"]
        if saved["ranks"] == dist.get_world_size():
            _restore_random_state(pickle.loads(_random_file(folder).read_bytes()))
        else:
            _say(f"{folder}: was written by {saved['ranks']} ranks; their random states are not restored")
        return saved["step"], saved["state"]

    def _newest(self) -> Path | None:
        """The folder that `latest` names, or else the whole one with most steps."""
        folders = {folder: _step(folder) for folder in self.folder.glob("step_*") if _FOLDER.fullmatch(folder.name)}
        whole = [folder for folder in sorted(folders, key=folders.__getitem__) if (folder / STATE).is_file()]
        for torn in folders.keys() - set(whole):
            _say(f"{torn}: has no {STATE}, so it is not whole; ignored")
        latest = self.folder / LATEST
        named = self.folder / latest.read_text().strip() if latest.is_file() else None
        if named in whole:
            return named
        if named is not None:
            _say(f"{latest}: names {named.name}, which is not there as a whole; taking the newest that is")
        return whole[-1] if whole else None

    def _discard(self, step: int) -> None:
        for leftover in self.folder.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        older = [folder for folder in self.folder.glob("step_*") if _step(folder) < step]
        for folder in sorted(older, key=_step, reverse=True)[self.keep - 1 :]:
            shutil.rmtree(folder)


class _WriteInProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by the rank itself.

    The stock strategy hands the bytes to forked writers and a spawned manager. That costs seconds a save,
    and a fork of a process that holds threads (Ray, gloo) may never come back.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def _sharded(actor: Actor, loading: bool) -> dict[str, Any]:
    """Model and optimizer as Megatron's sharded tensors: any layout can load what another has saved."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = actor.policy.sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": actor.optimizer.sharded_state_dict(model, loading, metadata=metadata)}


def _random_file(folder: Path) -> Path:
    return folder / f"random_{dist.get_rank():05d}.pkl"


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": device_random._get_cuda_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    device_random._set_cuda_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _write(file: Path, text: str) -> None:
    """Replace `file` as a whole: what is read is the old text or the new one, whenever the machine stops."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)


def _step(folder: Path) -> int:
    match = _FOLDER.match(folder.name)
    assert match is not None
    return int(match[1])


def _say(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)
