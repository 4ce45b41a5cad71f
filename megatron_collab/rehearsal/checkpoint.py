"""Simulates a checkpoint: collects what a rank would write, and what it would read back into its networks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from megatron_collab.checkpoint.sharded_state import restore, snapshot
from megatron_collab.rehearsal.ledger import HOST, Ledger
from megatron_collab.trainer.trainer import PolicyTrainer

_OPTIMIZER_STATE = re.compile(r"(.*?)optimizer\.state\.\w+\.(.+)")  # see checkpoint/sharded_state.py


@dataclass
class Contents:
    """Shapes of global tensors by key: of those that ranks write, and of those that ranks read, with one such rank."""

    written: dict[str, tuple[int, ...]] = field(default_factory=dict)
    read: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def check_read(self) -> None:
        """Raises ValueError if a rank would read a tensor that no rank writes in that shape."""
        for key, (shape, rank) in self.read.items():
            # A rank writes its range of the optimizer state, replicas the other ranges; these may not be simulated.
            state = _OPTIMIZER_STATE.fullmatch(key)
            saved = self.written.get(key) or (self.written.get(state[1] + state[2]) if state else None)
            if saved != shape:
                written = "no rank writes anything" if saved is None else f"ranks write {list(saved)}"
                raise ValueError(f"checkpoint: rank {rank} reads {key} as {list(shape)}, of which {written}")


def save_and_load(trainer: PolicyTrainer, rank: int, contents: Contents, ledger: Ledger) -> int:
    """Take a snapshot of the networks and restore them from it; returns its bytes in host memory."""
    before = ledger.usage.now[HOST]
    with ledger.booking(HOST):
        items, common = snapshot(trainer.checkpointed)
    size = ledger.usage.now[HOST] - before
    for item, _ in items:
        if item.tensor_data is not None:
            contents.written[item.index.fqn] = tuple(item.tensor_data.size)

    def read(state: dict[str, Any]) -> Any:
        prepared, unsharded, factories = load_preprocess(state)
        sharded, _ = extract_sharded_base(prepared)
        for entry in nested_values(sharded):
            if isinstance(entry, ShardedTensor):
                contents.read.setdefault(entry.key, (tuple(entry.global_shape), rank))
        loaded = merge(merge(dict(common), unsharded), dict_list_map_outplace(_value, sharded))
        return apply_factory_merges(loaded, factories)

    restore(trainer.checkpointed, read)
    return size


def _value(entry: Any) -> Any:
    return entry.data if isinstance(entry, ShardedTensor | ShardedObject) else entry
