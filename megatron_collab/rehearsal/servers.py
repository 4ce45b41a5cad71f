"""Simulates a server of the run: SGLang's model and cache on the meta device receive every slice of the plan.

`python -m megatron_collab.rehearsal.servers ORDER` runs in a separate process: SGLang decides at import that
there is no GPU, and must not see Megatron's patches. ORDER is a pickled Order; the last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_collab import patches
from megatron_collab.inference.adapters import SLOTS
from megatron_collab.models import hf_to_sglang
from megatron_collab.models.hf_config import ModelShape
from megatron_collab.models.hf_to_sglang import ServerLayout
from megatron_collab.runtime import keys
from megatron_collab.weight_sync.receiver import Row, check_parameters, planned_copies


@dataclass(frozen=True)
class Place:
    """A rank of a server: its required parameters by name, and the bytes and rows of every bucket sent to it."""

    rank: int
    parameters: Mapping[str, str]
    buckets: Sequence[tuple[int, Sequence[Row]]]


@dataclass(frozen=True)
class Order:
    """Servers of `layout` for the model with config.json `hf`, in `dtype`; `tokens`: of the KV cache."""

    hf: Mapping[str, Any]
    layout: ServerLayout
    dtype: str
    tokens: int
    places: Sequence[Place]


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on the GPU of a server's rank; `fault`: its first error, if any."""

    rank: int
    weights: int = 0
    adapters: int = 0
    kv_cache: int = 0
    fault: str = ""


def rehearse(order: Order) -> list[ServerMemory]:
    """The memory of each of the places."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps(order))
        # The table of rotary positions is float32 on GPUs.
        environment = keys.without(os.environ) | {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ROPE_CACHE_FP32": "1"}
        command = [sys.executable, "-m", __name__, file.name]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"the simulated SGLang exited with {run.returncode}: {run.stderr[-2000:]}")
    return [ServerMemory(**fields) for fields in json.loads(run.stdout.splitlines()[-1])]


def serve(order: Order, place: Place, folder: Path) -> ServerMemory:
    """Build a rank's model and cache, and load every bucket into the model."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.models.registry import ModelRegistry
    from transformers import AutoConfig

    dtype, fp8 = getattr(torch, order.dtype), order.layout.fp8
    quantization = Fp8Config(True, "dynamic", weight_block_size=[128, 128]) if fp8 else None
    config = AutoConfig.from_pretrained(folder)
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    with as_rank(folder, order.layout, order.dtype, place.rank), torch.no_grad(), torch.device("meta"):
        model = model_class(config, quantization)
        shape = ModelShape.from_hf(order.hf)
        adapter_slots = {
            adapter.name: torch.empty(SLOTS, *adapter.shape, dtype=dtype)
            for adapter in hf_to_sglang.adapters(shape, order.layout, place.rank)
        }
        parameters = dict(model.named_parameters()) | {name: slots[-1] for name, slots in adapter_slots.items()}
        check_parameters(parameters, place.parameters)
        for size, rows in place.buckets:
            bucket = torch.empty(size, dtype=torch.uint8)
            for copies in planned_copies(parameters, rows, bucket, dtype):
                torch._foreach_copy_(*copies)
        heads = max(1, config.num_key_value_heads // order.layout.tp)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = config.num_hidden_layers
        pool = MHATokenToKVPool(order.tokens, 1, dtype, heads, size, layers, "meta", False)
        tensors = [*model.parameters(), *model.buffers()]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        cache = sum(tensor.nbytes for tensor in [*pool.k_buffer, *pool.v_buffer])
        adapters = sum(slots.nbytes for slots in adapter_slots.values())
    return ServerMemory(place.rank, sum(storages.values()), adapters, cache)


@contextmanager
def as_rank(folder: Path, layout: ServerLayout, dtype: str, rank: int) -> Iterator[None]:
    """Run as rank `rank` of a server without the other ranks: layers only read sizes and ranks of their groups."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        tp_size=layout.tp,
        ep_size=layout.ep,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        dtype=dtype,
        skip_tokenizer_init=True,
    )
    place = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank, dp_rank=None)
    runtime_context.publish(arguments, role="scheduler", ranks=place)
    parallel = runtime_context.get_parallel()

    def group(name: str) -> SimpleNamespace:
        size, rank_in_group = getattr(parallel, f"{name}_size"), getattr(parallel, f"{name}_rank")
        return SimpleNamespace(world_size=size, rank_in_group=rank_in_group, cpu_group=None)

    groups: dict[str, Any] = {f"{name}_group": group(name) for name in ("tp", "attn_tp", "moe_tp", "moe_ep")}
    single = SimpleNamespace(world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True)
    try:
        with parallel.override(**groups, pp_group=single):
            yield
    finally:
        runtime_context.reset_context()


def main(file: str) -> None:
    """Simulate every place of an order; faults are printed as results, not raised."""
    patches.apply("sglang")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    order: Order = pickle.loads(Path(file).read_bytes())
    torch.set_default_dtype(getattr(torch, order.dtype))
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[order.hf["model_type"]]  # if config.json does not name it
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **order.hf}))
        for place in order.places:
            try:
                results.append(vars(serve(order, place, folder)))
            except (ValueError, RuntimeError, AssertionError) as error:
                results.append(vars(ServerMemory(place.rank, fault=" ".join(str(error).split()))))
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
