"""The trained networks as global tensors: copied to CPU memory for a checkpoint, and restored from one.

Keys are Megatron-Core's (`fully_reshardable`), so a checkpoint can be loaded in any layout. Megatron would gather the
optimizer's state on one rank of each data parallel group before writing; here each rank writes the part that it holds.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from megatron_collab.checkpoint.hf import unwrap, values
from megatron_collab.checkpoint.torch_dist import WriteRequest, rectangles, write_item
from megatron_collab.patches.megatron import load_planner
from megatron_collab.runtime.process import beat

MAIN = "policy"  # its keys in a checkpoint have no prefix
_SHARDING = "fully_reshardable"
_EXTRA = "_extra_state"  # of a module: TransformerEngine's state besides weights, for example FP8 scales


class Checkpointable(Protocol):
    """A network on this rank: its chunks (one per virtual pipeline stage) and their optimizer.

    If its weights never change (`moves` is false), a checkpoint only has TransformerEngine's extra state of it. A
    network without an optimizer does not learn.
    """

    @property
    def chunks(self) -> list[torch.nn.Module]: ...
    @property
    def optimizer(self) -> MegatronOptimizer | None: ...
    @property
    def moves(self) -> bool: ...


def snapshot(networks: Mapping[str, Checkpointable]) -> tuple[list[WriteRequest], dict[str, Any]]:
    """Copy the networks to CPU memory: this rank's write requests, and the state common to all ranks; not collective.

    The copies share no memory with the training.
    """
    items: list[WriteRequest] = []
    common: dict[str, Any] = {}
    for name, network in networks.items():
        prefix = "" if name == MAIN else f"{name}."
        chunks = _sharded_chunks(network.chunks)
        for entry in nested_values(_beside_weights(chunks)):
            if is_main_replica(entry.replica_id):
                content = io.BytesIO()
                torch.save([entry.data], content)
                items.append((WriteItem(MetadataIndex(prefix + entry.unique_key), WriteItemType.BYTE_IO), content))
        if not network.moves:
            continue
        shards = {entry.data: entry for entry in nested_values(chunks) if not isinstance(entry, ShardedObject)}
        optimizers = network.optimizer.chained_optimizers if network.optimizer else []
        for optimizer in optimizers:
            items.extend(_optimizer_blocks(optimizer, shards, prefix))
        for entry in shards.values():
            for part in (part for part in _parts(entry, values(entry.data)) if is_main_replica(part.replica_id)):
                tensor = part.data.detach().to("cpu", copy=True).reshape(_stacked(part, part.local_shape))
                items.append(_block(prefix + part.key, part, part.global_offset, tensor))
        states = [{**optimizer.state_dict(), "param_state_sharding_type": _SHARDING} for optimizer in optimizers]
        if not states:
            continue
        groups = {"optimizer": copy.deepcopy(states[0] if len(states) == 1 else dict(enumerate(states)))}
        common.update(groups if name == MAIN else {name: groups})
    return items, common


def _block(key: str, part: ShardedTensor, offsets: Sequence[int], tensor: Tensor) -> WriteRequest:
    """The request to write `tensor` as the block at `offsets` of a global tensor; `part` gives the global shape."""
    return write_item(key, part.global_shape, offsets, tensor.shape, tensor.dtype), tensor


def _optimizer_blocks(
    optimizer: MegatronOptimizer, shards: Mapping[Tensor, ShardedTensor | ShardedTensorFactory], prefix: str
) -> Iterator[WriteRequest]:
    """This rank's part of the float32 weights and moments: a range of elements of each parameter's shard."""
    buckets = [bucket for buffer in optimizer.gbuf_ranges for same_dtype in buffer.values() for bucket in same_dtype]
    for parameter, ranges in ((parameter, r) for bucket in buckets for parameter, r in bucket["param_map"].items()):
        entry, without_data = shards[parameter], torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        *replica, _ = entry.replica_id  # the last is the data parallel rank: each has another range
        if not is_main_replica(tuple(replica)):
            continue
        start, end = ranges["param"].start, ranges["param"].end
        for kind, state in optimizer._get_main_param_and_optimizer_states(parameter).items():
            if kind == "step":  # torch's AdamW has it here; Megatron stores it with the parameter groups
                continue
            copied = state.detach().to("cpu", torch.float32, copy=True)
            done = 0  # elements of the shard in earlier parts
            for part in _parts(entry, without_data):
                size = part.data.numel()
                first, last = (min(max(at - done, 0), size) for at in (start, end))
                for offsets, sizes in rectangles(first, last, part.local_shape):
                    count = torch.Size(sizes).numel()
                    tensor, copied = copied[:count].reshape(_stacked(part, sizes)), copied[count:]
                    begin = [a + b for a, b in zip(part.global_offset, _stacked(part, offsets, 0), strict=True)]
                    yield _block(f"{prefix}optimizer.state.{kind}.{part.key}", part, begin, tensor)
                done += size


def _parts(entry: ShardedTensor | ShardedTensorFactory, tensor: Tensor) -> list[ShardedTensor]:
    """The global tensors that a parameter consists of, in the order of its rows: gate and up are separate.

    Their data is that of `tensor`, since the parameter itself may be in FP8.
    """
    entry = replace(entry, data=tensor)
    return entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]


def _stacked(part: ShardedTensor, sizes: Sequence[int], stack_size: int = 1) -> tuple[int, ...]:
    """`sizes` with the axes in front along which Megatron stacks layers and experts, each of size `stack_size`."""
    return (stack_size,) * part.prepend_axis_num + tuple(sizes)


def restore(networks: Mapping[str, Checkpointable], read: Callable[[dict[str, Any]], Any]) -> None:
    """Fill networks and optimizers: `read` loads the values of their sharded state; collective."""
    sharded: dict[str, Any] = {}
    for name, network in networks.items():
        parts = _sharded_state(network)
        if name == MAIN:
            sharded |= parts
        else:
            add_prefix_for_sharding(parts, f"{name}.")
            sharded[name] = parts
    loaded = read(sharded)
    for name, network in networks.items():
        parts = loaded if name == MAIN else loaded[name]
        _load(network.chunks, parts, strict=network.moves)
        if network.optimizer is not None:
            _complete_groups(network.optimizer, parts["optimizer"])
            network.optimizer.load_state_dict(parts["optimizer"])


def _sharded_state(network: Checkpointable) -> dict[str, Any]:
    """The sharded state of the network and its optimizer, to be loaded into."""
    chunks = _sharded_chunks(network.chunks)
    if not network.moves:
        return _beside_weights(chunks)
    if network.optimizer is None:
        return _with_room(chunks)
    for optimizer in network.optimizer.chained_optimizers:
        optimizer._init_optimizer_states_with_dummy_values()  # the load needs existing state to fill
    state = network.optimizer.sharded_state_dict(chunks, is_loading=True, metadata=_metadata())
    return {**_with_room(chunks), "optimizer": state}


def _complete_groups(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Add missing settings to parameter groups that another Adam saved (torch's or TransformerEngine's).

    The number of steps becomes an integer, as TransformerEngine's kernel needs it; torch saves a float.
    """
    parts = optimizer.chained_optimizers
    for number, part in enumerate(parts):
        for group in (state if len(parts) == 1 else state[number])["optimizer"]["param_groups"]:
            group |= part.optimizer.defaults | group
            if "step" in group:
                group["step"] = int(group["step"])


def load_weights(chunks: Sequence[torch.nn.Module], checkpoint: Path) -> None:
    """Fill the chunks of a model from the main network of `checkpoint`; collective.

    TransformerEngine's extra state (FP8 scales) is not changed: a converted checkpoint has none.
    """
    _load(chunks, _read(_with_room(_sharded_chunks(chunks)), checkpoint, lambda entry: True))


class _MovingPlanner(MCoreLoadPlanner):
    """A load planner that gives a heartbeat for every part of a tensor."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        beat()
        return super().resolve_tensor(read_item)


def read_sharded(checkpoint: Path, state: dict[str, Any]) -> Any:
    """The sharded `state` with its values in `checkpoint`; collective.

    The checkpoint may be of a run with or without TransformerEngine.
    """
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    # TransformerEngine's norms have extra state too; Megatron's local layers have none.
    return _read(state, checkpoint, lambda entry: entry.key.endswith(_EXTRA) and entry.unique_key not in stored)


def _read(state: dict[str, Any], checkpoint: Path, keep: Callable[[ShardedObject], bool]) -> Any:
    """The sharded `state` with values of the checkpoint; objects for which `keep` is true keep their current value."""
    current, state = extract_matching_values(state, lambda entry: isinstance(entry, ShardedObject) and keep(entry))
    with load_planner(_MovingPlanner):
        loaded = dist_checkpointing.load(state, str(checkpoint))
    return merge(loaded, dict_list_map_inplace(lambda entry: entry.data, current))


def _load(chunks: Sequence[torch.nn.Module], parts: Mapping[str, Any], strict: bool = True) -> None:
    """`strict`: `parts` must be complete, unless the model has adapters."""
    for key, model in _models(chunks).items():
        model.load_state_dict(parts[key], strict=strict and not _factors(model))


def _sharded_chunks(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """All parameters of the chunks; if a model has adapters (models/lora.py), only these and other trained parameters.

    TransformerEngine's extra state is included.
    """
    by_model = {}
    for key, model in _models(chunks).items():
        state, factors = model.sharded_state_dict(metadata=_metadata()), _factors(model)
        if factors:
            names = (name for name in state if name not in factors)
            base = {n: state[n] for n in names if isinstance(state[n], ShardedObject) or state[n].data.requires_grad}
            state = base | {name: _sharded_factor(parameter) for name, parameter in factors.items()}
        by_model[key] = state
    return by_model


def _factors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The adapters' parameters by their names in `model`."""
    return {name: parameter for name, parameter in model.named_parameters() if hasattr(parameter, "factor")}


def _sharded_factor(parameter: torch.nn.Parameter) -> ShardedTensor:
    """An A or B as part of a global tensor of a single layer, as in PEFT; layers are not stacked."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    cuts, copy = [(parameter.factor.axis, rank, size)], 0
    if parameter.factor.axis is None:
        cuts, copy = [], rank
    return ShardedTensor.from_rank_offsets(parameter.factor.key, parameter, *cuts, replica_id=(0, copy, copies))


def _beside_weights(chunks: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of the sharded `chunks` that are not tensors: TransformerEngine's extra state."""
    return {
        key: {name: entry for name, entry in state.items() if isinstance(entry, ShardedObject)}
        for key, state in chunks.items()
    }


def _with_room(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with FP8 parameters replaced by empty tensors of their unquantized dtype, to load into."""
    for entry in nested_values(state):
        if is_float8tensor(entry.data):
            entry.data = torch.empty(entry.data.shape, dtype=entry.data.dtype, device=entry.data.device)
    return state


def _models(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The GPT models in `chunks` under Megatron's names: `model`, or `model0`, `model1`, …"""
    models = [unwrap(chunk) for chunk in chunks]
    return {"model": models[0]} if len(models) == 1 else {f"model{i}": model for i, model in enumerate(models)}


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": _SHARDING,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
