"""Reads and writes Hugging Face folders, to and from the shards of the ranks.

models/hf_to_megatron.py maps the tensors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from itertools import product
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_collab.models import hf_config, hf_to_megatron, hf_weights
from megatron_collab.models.hf_to_megatron import Index, ModelShape, Piece, WeightEntry, hf_shapes
from megatron_collab.models.hf_weights import INDEX, SINGLE
from megatron_collab.runtime.files import read_text, writing
from megatron_collab.runtime.process import beat, global_rank
from megatron_collab.runtime.screen import counted
from megatron_collab.settings import ConfigError
from megatron_collab.settings.documents import parse_settings

FILE_BYTES = 4 << 30
_WEIGHT_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|index\.json)$")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# local_experts.N.linear_fc1.weight, or with TransformerEngine's grouped GEMM linear_fc1.weightN
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.)?(?P<linear>linear_fc[12])\.weight(?P<grouped>\d*)"
)


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in `folder`. Raises ConfigError if there is none or it is not supported."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: contains no config.json; give the folder of a Hugging Face model")
    try:
        return hf_config.read_policy(folder / "config.json")
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}; give another model") from error


class HFTensors:
    """The tensors of a Hugging Face folder, read without mapping files into memory.

    `dtype`: the smallest dtype that holds the values of all of them.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        """Raises ConfigError if a file or tensor is missing or not valid for models/hf_weights.py."""
        try:
            stored = hf_weights.model_tensors(folder, shape)
            files = {tensor.file for tensor in stored.values()}
            opened = {file: safe_open(folder / file, framework="pt", device="cpu", backend="pread") for file in files}
        except (ValueError, SafetensorError) as error:
            raise ConfigError(f"{folder}: {error}") from error
        self._file_of = {name: opened[tensor.file] for name, tensor in stored.items()}
        self.dtype = reduce(torch.promote_types, {_DTYPES[tensor.dtype] for tensor in stored.values()})

    def read(self, tensor: str, index: Index) -> torch.Tensor:
        """The block of the tensor at `index`; only that block is read."""
        return self._file_of[tensor].get_slice(tensor)[index]

    def shard(self, entry: WeightEntry, shape: ModelShape, tp: int, tp_rank: int, dtype: torch.dtype) -> torch.Tensor:
        """A Megatron parameter of one tensor-parallel rank; the padding of the vocabulary is zero."""
        shard = torch.zeros(hf_to_megatron.shard_shape(entry, tp), dtype=dtype)
        for piece in hf_to_megatron.pieces(entry, shape, tp, tp_rank):
            shard[piece.shard_index] = self.read(piece.hf, piece.hf_index)
        return shard


def size_groups[Item](sizes: Iterable[tuple[Item, int]], most: int) -> Iterator[list[Item]]:
    """Items, given with their sizes, in groups of total size at most `most`; a larger item is a group by itself."""
    group: list[Item] = []
    filled = 0
    for item, size in sizes:
        if group and filled + size > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    yield group


def partial_of(folder: Path) -> Path:
    """The temporary name of `folder` while it is being written."""
    return folder.with_name(f".{folder.name}.partial")


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder that replaces `folder` at the end of the block; it is removed if the block fails."""
    partial, old = partial_of(folder), folder.with_name(f".{folder.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


class HFWriter:
    """Writes a model into an empty folder from its shards; each file as soon as its tensors are complete.

    Incomplete tensors are in memory: at most one file if shards come in the order of `hf_to_megatron.table`. Several
    writers may write one model, each the shards of some of its `stages`.
    """

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        dtype: torch.dtype,
        file_bytes: int,
        stages: Sequence[Collection[str]] | None = None,
    ) -> None:
        """Files have at most `file_bytes`; a larger tensor has a separate file; no file has tensors of two stages."""
        self._folder, self._dtype = folder, dtype
        self._shapes = hf_shapes(shape)
        sizes = {name: prod(sides) * dtype.itemsize for name, sides in self._shapes.items()}
        parts = [[item for item in sizes.items() if item[0] in names] for names in stages or [sizes]]
        groups = [group for part in parts for group in size_groups(part, file_bytes)]
        names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
        self._files = dict(zip(names if len(groups) > 1 else [SINGLE], groups, strict=True))
        self._file_of = {name: file for file, names in self._files.items() for name in names}
        self._missing = {file: sum(prod(self._shapes[name]) for name in names) for file, names in self._files.items()}
        self._open: dict[str, torch.Tensor] = {}

    def fill(self, shard: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Copy the pieces of one shard into their tensors; write the files that they complete."""
        for piece in pieces:
            if piece.hf not in self._open:
                self._open[piece.hf] = torch.empty(self._shapes[piece.hf], dtype=self._dtype)
            part = shard[piece.shard_index]
            self._open[piece.hf][piece.hf_index] = part.cpu()
            self._missing[self._file_of[piece.hf]] -= part.numel()
        for file in {self._file_of[piece.hf] for piece in pieces}:
            if self._missing[file] == 0:
                tensors = {name: self._open.pop(name) for name in self._files[file]}
                with writing(self._folder / file):
                    save_file(tensors, self._folder / file, {"format": "pt"})

    def check(self) -> None:
        """Raises RuntimeError if a tensor is incomplete."""
        if self._open:
            raise RuntimeError(f"{self._folder}: incomplete tensors, the first is {min(self._open)}")

    def finish(self, source: Path) -> None:
        """Add the index, and all files of the folder `source` except weights; config.json gets the dtype."""
        self.check()
        for file in source.iterdir():
            if file.is_file() and not _WEIGHT_FILE.fullmatch(file.name):
                shutil.copy2(file, self._folder)
        content = dict(parse_settings(read_text(source / "config.json")))
        content.pop("torch_dtype", None)  # the name in transformers 4
        content["dtype"] = str(self._dtype).removeprefix("torch.")
        (self._folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        if len(self._files) > 1:
            total = sum(prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": self._file_of}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside the wrappers for precision and data parallelism."""
    while hasattr(model, "module"):
        model = model.module
    return model


def named_shards(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, named as in `hf_to_megatron.table`: layers and experts have global numbers.

    Adapters (trainer/megatron/lora.py) are left out.
    """
    for chunk in chunks:
        policy = unwrap(chunk)
        for name, parameter in policy.named_parameters():
            if hasattr(parameter, "factor"):
                continue
            layer = hf_to_megatron.LAYER.fullmatch(name)
            if layer:
                module, local = policy.decoder.layers[int(layer[1])], layer[2]
                if expert := _EXPERT.fullmatch(local):  # numbered from the rank's first expert
                    number = module.mlp.local_expert_indices[int(expert["local"] or expert["grouped"])]
                    local = f"mlp.experts.{number}.{expert['linear']}.weight"
                local = hf_to_megatron.FUSED_NAMES.get(local, local)
                name = f"decoder.layers.{module.layer_number - 1}.{local}"
            yield name, parameter


def named_factors(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parts of adapters, by their keys (models/lora.py)."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if hasattr(parameter, "factor"):
                yield parameter.factor.key, parameter


def values(shard: torch.nn.Parameter, merge: bool = True) -> torch.Tensor:
    """The values of a parameter, detached, dequantized if it is stored in FP8; `merge`: with its adapters merged."""
    weight = dequantize_fp8_tensor(shard.detach()) if is_float8tensor(shard) else shard.detach()
    return shard.adapters.merged(weight).detach() if merge and hasattr(shard, "adapters") else weight


def is_computed(shard: torch.nn.Parameter, merge: bool = True) -> bool:
    """Whether `values` computes a new tensor instead of returning the parameter itself."""
    return is_float8tensor(shard) or (merge and hasattr(shard, "adapters"))


def load_hf(chunks: Sequence[torch.nn.Module], folder: Path) -> None:
    """Fill this rank's parameters from `folder`; collective. Only the needed slices are read, by one replica of each.

    Raises ConfigError if a tensor is missing, superfluous, or has another shape.
    """
    fill(chunks, HFTensors(folder, unwrap(chunks[0]).shape))


def fill(chunks: Sequence[torch.nn.Module], tensors: HFTensors) -> None:
    """Fill this rank's parameters; collective. Raises ValueError if the table lacks one, or has another shape.

    Replicas take turns in reading; otherwise every data parallel rank would read the full model from the shared file
    system. The padding of the vocabulary becomes zero.
    """
    tp, tp_rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    shape = unwrap(chunks[0]).shape
    entries = {entry.megatron: entry for entry in hf_to_megatron.table(shape)}
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(_counted([*named_shards(chunks)], "loading weights")):
            beat()
            if name not in entries:
                raise ValueError(f"{name}: the table of weights has no such parameter")
            entry = entries[name]
            if parameter.shape != (expected := hf_to_megatron.shard_shape(entry, tp)):
                raise ValueError(f"{name} has shape {tuple(parameter.shape)}, the table says {expected}")
            # Built in full before it is copied, since the FP8 scale depends on the full parameter.
            replicas = experts if entry.expert else dense
            reader = number % replicas.size()
            if replicas.rank() == reader:
                loaded = tensors.shard(entry, shape, tp, tp_rank, parameter.dtype).to(parameter.device)
            else:
                loaded = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            if replicas.size() > 1:
                dist.broadcast(loaded, group=replicas, group_src=reader)
            parameter.copy_(loaded)
            # For an FP8 parameter TransformerEngine keeps a copy on the host that initializes the optimizer's master
            # weights.
            if hasattr(parameter, "get_high_precision_init_val"):
                if parameter.requires_grad:
                    parameter.get_high_precision_init_val().copy_(loaded)
                else:
                    parameter.clear_high_precision_init_val()


def save_hf(chunks: Sequence[torch.nn.Module], folder: Path, source: Path) -> None:
    """Write the model as a Hugging Face folder; collective. `folder` is replaced only after everything is written.

    The first rank of each pipeline stage (only rank 0 if one file is enough) receives the stage's tensors one by one
    and holds one file of them at a time. config.json, tokenizer and other small files come from `source`.
    """
    beat(f"exporting to {folder}")
    tp, tp_rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    expert_replica = parallel_state.get_expert_data_parallel_rank()
    shape, shards = unwrap(chunks[0]).shape, dict(named_shards(chunks))
    table = hf_to_megatron.table(shape)
    example = next(iter(shards.values()))
    exported = (entry for entry in table if hf_to_megatron.exports(entry, tp_rank, replica, expert_replica))
    offers = {entry.megatron: tp_rank for entry in exported if entry.megatron in shards}
    rank, size = dist.get_rank(), sum(map(prod, hf_shapes(shape).values())) * example.dtype.itemsize
    stage = parallel_state.get_pipeline_model_parallel_rank() if size > FILE_BYTES else 0
    by_rank: list[tuple[int, dict[str, int]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(by_rank, (stage, offers))
    peers = {peer: offered for peer, (peer_stage, offered) in enumerate(by_rank) if peer_stage == stage}
    writer_rank = min(peers)
    with replacing(folder) if rank == 0 else nullcontext(partial_of(folder)) as partial:
        dist.barrier()  # the folder exists
        writer = HFWriter(partial, shape, example.dtype, FILE_BYTES, _tensors_of_stages(shape, by_rank))
        if rank != writer_rank:
            for name in offers:  # in the order of the table, like the receives
                dist.send(values(shards[name]).contiguous(), writer_rank)
        else:
            offers_by_peer = [
                (entry, peer, offered[entry.megatron])
                for entry, (peer, offered) in product(table, peers.items())
                if entry.megatron in offered
            ]
            for entry, peer, peer_tp_rank in _counted(offers_by_peer, "exporting weights"):
                beat()
                if peer == rank:
                    shard = values(shards[entry.megatron])
                else:
                    sides = hf_to_megatron.shard_shape(entry, tp)
                    shard = torch.empty(sides, dtype=example.dtype, device=example.device)
                    dist.recv(shard, peer)
                writer.fill(shard, hf_to_megatron.pieces(entry, shape, tp, peer_tp_rank))
            writer.check()
        dist.barrier()  # every stage is written
        if rank == 0:
            writer.finish(source)
    dist.barrier()


def _counted[Item](parameters: Sequence[Item], title: str) -> Iterator[Item]:
    """The parameters one after the other, on rank 0 with a progress bar."""
    return counted(parameters, title, "parameter") if global_rank() == 0 else iter(parameters)


def _tensors_of_stages(shape: ModelShape, by_rank: Sequence[tuple[int, Mapping[str, int]]]) -> list[set[str]]:
    """The tensors of each pipeline stage, from the stage and the parameters of each rank."""
    entries = {entry.megatron: entry for entry in hf_to_megatron.table(shape)}
    by_stage: dict[int, set[str]] = defaultdict(set)
    for stage, offered in by_rank:
        for name in offered:
            by_stage[stage] |= {piece.hf for piece in hf_to_megatron.pieces(entries[name], shape, 1, 0)}
    return [by_stage[stage] for stage in sorted(by_stage)]
