"""Counted communication of one update, over the formula of its layout.

    .venv/bin/python tools/bench/layouts.py [--smoke]

Every layout is run by real ranks (gloo); each counts the bytes that its collectives put on the wire: a ring's
2 (n-1)/n of the tensor for an all-reduce, (n-1)/n of the whole for an all-gather or a reduce-scatter, all of it for a
send, a broadcast and an all-to-all. The formula, summed over all ranks, with T the tokens of all micro-batches of all
data-parallel ranks, N those of them that are trained, a = 4 h bytes an activation, L layers, t = tp, d = dp and P
parameters of the model:

    tensor parallel         2 (t-1) T a (4 L + 2)  an all-reduce after attention and MLP, forward and backward, one
                                                   for the embedding, one for the gradient before the head
    with sequence parallel  (t-1) T a (10 L + 4)   a gather and a scatter in place of each all-reduce, and 2 gathers
                                                   of the inputs of qkv and fc1 for the gradient of their weights
    vocabulary              t (t-1) 16 N           four statistics of the log-probs, gathered by every rank
    pipeline                2 (p v - 1) T a s      activations and gradients over p v - 1 boundaries; s = t ranks send
                                                   the same tokens, with sequence parallel s = 1
    data parallel           2 (d-1) 4 P'           float32 gradients scattered, parameters gathered; P': parameters of
                                                   a data-parallel rank, over all t p, without spread experts
    experts                 2 T k (2 a + 4) L      tokens sent to k experts and back, and their gradients the same way;
                                                   routing weights once each way

`bytes_over_formula` is the ratio farthest from 1 of all layouts, by its logarithm. --smoke: one layout.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_collab.launch.trainer_specs import network_spec, trainer_spec

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "dp2": {},
    "ep2": {"ep": 2},
    "tp2-pp2-sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "tp2-dp2": {"tp": 2},
}
RANKS = {"tp2-pp2-sp": 4, "tp2-dp2": 4}
EXPERTS, CHOSEN = 4, 2
HF = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}
MOE = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32}
SEQUENCES, LENGTH, BUDGET = 16, 129, 512


def rank_main(layout: str, out: Path) -> None:
    """Main function of a rank: count an update; rank 0 writes counted and expected bytes."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from megatron_collab import patches

    patches.apply("megatron")

    from megatron.core import parallel_state

    from megatron_collab.algo.advantages import with_advantages
    from megatron_collab.config import Config
    from megatron_collab.models.hf_to_megatron import ModelShape
    from megatron_collab.trainer.megatron import model as policies
    from megatron_collab.trainer.megatron import parallel
    from megatron_collab.trainer.trainer import PolicyTrainer
    from megatron_collab.types import Batch, Credit, Sample

    config = Config()
    config.launch.device, config.model.dtype, config.algo.kl_coef = "cpu", "float32", 0.0
    config.train.tokens_per_micro_batch = BUDGET
    for name, value in LAYOUTS[layout].items():
        setattr(config.parallel, name, value)
    hf = HF | (MOE if config.parallel.ep > 1 else {})
    rng = np.random.default_rng(0)
    mask = (np.arange(LENGTH) >= LENGTH // 2).astype(np.float32)
    samples = tuple(
        Sample(
            rng.integers(0, hf["vocab_size"], LENGTH),
            mask,
            np.zeros(LENGTH, np.float32),
            (Credit(((LENGTH // 2, LENGTH),), float(rng.normal()), "group", "group"),),
        )
        for _ in range(SEQUENCES)
    )
    with parallel.init_parallel(config.launch, network_spec(config)):
        shape = ModelShape.from_hf(hf)
        chunks = policies.build(network_spec(config), shape)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.normal_(0, 0.02)
        actor = PolicyTrainer(trainer_spec(config), lambda _: chunks)
        with counted() as counts:
            actor.update(with_advantages(actor.score(Batch(samples)), config.algo))
        dp = parallel_state.get_data_parallel_world_size()
        local_parameters = sum(
            parameter.numel()
            for chunk in chunks
            for parameter in chunk.parameters()
            if getattr(parameter, "allreduce", True)  # False: an expert, spread over the data-parallel ranks
        )
        total = torch.tensor([float(sum(counts.values())), local_parameters / dp])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            tokens = SEQUENCES * (LENGTH - 1)
            expected = formula(config.parallel, dp, shape, tokens, int(mask.sum()) * SEQUENCES, total[1].item())
            out.write_text(json.dumps({"counted": total[0].item(), "expected": expected, "by": dict(counts)}))


def formula(parallel: Any, dp: int, shape: Any, tokens: int, trained: int, parameters: float) -> dict[str, float]:
    """Bytes by part, as in the docstring of the module."""
    t, a, layers = parallel.tp, 4 * shape.hidden, shape.layers
    if parallel.sequence_parallel:
        tensor = (t - 1) * tokens * a * (10 * layers + 4)
    else:
        tensor = 2 * (t - 1) * tokens * a * (4 * layers + 2)
    parts = {
        "tensor": tensor,
        "vocabulary": t * (t - 1) * 16 * trained,
        "pipeline": 2 * (parallel.pp * parallel.vpp - 1) * tokens * a * (1 if parallel.sequence_parallel else t),
        "data": 2 * (dp - 1) * 4 * parameters,
        "experts": 2 * tokens * CHOSEN * (2 * a + 4) * layers if parallel.ep > 1 else 0,
    }
    return {name: float(size) for name, size in parts.items() if size}


def counted() -> Any:
    """A context that counts the bytes that this rank's collectives put on the wire, by kind."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.bytes: Counter[str] = Counter()

        def __enter__(self) -> Counter[str]:
            super().__enter__()
            return self.bytes

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                name = func.overloadpacket.__name__
                self.bytes[name] += on_the_wire(name, args)
            return func(*args, **(kwargs or {}))

    def size(tensors: Any) -> int:
        if torch.is_tensor(tensors):
            return tensors.nbytes
        return sum(size(tensor) for tensor in tensors) if isinstance(tensors, list | tuple) else 0

    def on_the_wire(name: str, args: Any) -> int:
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        ranks = torch.distributed.ProcessGroup.unbox(group).size()
        ring = (ranks - 1) / ranks
        match name:
            case "allreduce_" | "allreduce_coalesced_":
                return int(2 * ring * size(args[0]))
            case "_allgather_base_" | "allgather_" | "allgather_into_tensor_coalesced_":
                return int(ring * size(args[0]))
            case "_reduce_scatter_base_" | "reduce_scatter_" | "reduce_scatter_tensor_coalesced_":
                return int(ring * size(args[1]))
            case "alltoall_base_" | "alltoall_":
                return size(args[1])
            case "send" | "broadcast_":
                return size(args[0])
            case "recv_" | "barrier" | "monitored_barrier_":
                return 0
        raise ValueError(f"the collective {name} is not counted yet")

    return Count()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=2, metavar=("LAYOUT", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="one layout: shows that it runs, no figures")
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank[0], Path(arguments.rank[1]))
        return
    ratios = {}
    with tempfile.TemporaryDirectory() as scratch:
        for layout in list(LAYOUTS)[: 1 if arguments.smoke else None]:
            out = Path(scratch) / f"{layout}.json"
            command = [sys.executable, "-m", "megatron_collab.launch.torchrun"]
            command += [f"--nproc-per-node={RANKS.get(layout, 2)}", __file__, "--rank", layout, str(out)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
            result = json.loads(out.read_text())
            ratios[layout] = result["counted"] / sum(result["expected"].values())
            print(
                f"{layout}: {result['counted'] / 1e6:.2f} MB, {ratios[layout]:.3f} of the formula {result}", flush=True
            )
    worst = max(ratios.values(), key=lambda ratio: abs(math.log(ratio)))
    values = {"bytes_over_formula": worst, **ratios}
    print(json.dumps({"name": "layouts", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
