"""One rank of test_parity.py: every model in every layout that suits it, in one set of processes.

parity_worker.py FOLDER: FOLDER/MODEL is a Hugging Face folder, FOLDER/tokens.npz holds micro-batches, each a
list of sequences. Below FOLDER/out/LAYOUT the ranks write MODEL.N.npy, the log-probs of micro-batch N; MODEL, what
was loaded, exported again; MODEL.trained, the same after one optimizer step on the mean log-prob of all
tokens; and MODEL.norm.json, the norm of its gradient.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from megatron_collab.checkpoint import hf
from megatron_collab.config import Config
from megatron_collab.trainer.megatron import model as policies
from tests.ranks import process_group

# name: settings of parallel.*; data parallel is what remains of four ranks
DENSE = {
    "dp4": {},
    "tp2": {"tp": 2},
    "tp2-sp-selective": {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "pp2": {"pp": 2},
    "pp2-vpp2-full": {"pp": 2, "vpp": 2, "recompute": "full"},
    "tp2-pp2-sp": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
EXPERTS = {
    "dp4": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "ep2": {"ep": 2},
    "tp2-sp-ep4-full": {"tp": 2, "sequence_parallel": True, "ep": 4, "recompute": "full"},
    "pp2-vpp2-ep2": {"pp": 2, "vpp": 2, "ep": 2},
}
LAYOUTS = {**DENSE, **EXPERTS}
# An AdamW step of the update p - LR * g / (|g| + EPS): with so large an EPS it shows the gradient, not its sign.
LR, EPS = 0.1, 0.1


def layouts_of(model: str) -> dict[str, dict[str, object]]:
    return EXPERTS if "moe" in model else DENSE


def configure(folder: Path, layout: str) -> Config:
    config = Config()
    config.launch.device, config.launch.timeout = "cpu", 60.0
    config.model.path, config.model.dtype = str(folder), "float32"
    for name, value in LAYOUTS[layout].items():
        setattr(config.parallel, name, value)
    return config


class Run:
    """The micro-batches of this data-parallel rank through Megatron's schedule."""

    def __init__(self, folder: Path, multiple: int) -> None:
        packed = np.load(folder / "tokens.npz", allow_pickle=True)["micro_batches"]
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        self.own = range(rank, len(packed), ranks)
        self.micro_batches = [pack(packed[number], multiple) for number in self.own]
        tokens = sum(len(sequence) - 1 for sequences in packed for sequence in sequences)
        # The schedule divides by the micro-batches, the gradient is averaged over the data-parallel ranks.
        self.scale = len(self.own) * ranks / tokens

    def __call__(self, chunks: list[torch.nn.Module], **options: bool) -> list[np.ndarray]:
        """Log-probs of each micro-batch; nothing but on the last pipeline stage. Gradients are left in `chunks`."""

        def forward(batches: Iterator[dict], chunk: torch.nn.Module) -> tuple[torch.Tensor, partial]:
            batch = next(batches)
            hidden = chunk(batch["tokens"], batch["positions"], None, packed_seq_params=batch["packing"])
            return hidden, partial(self.loss, hf.unwrap(chunk), batch)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(self.micro_batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(self.own),
            seq_length=0,  # each micro-batch has its own
            micro_batch_size=1,
            **options,
        )

    def loss(self, policy: policies.PolicyModel, batch: dict, hidden: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        logits = hidden[0] @ policy.head.t()
        rows = torch.arange(logits.shape[1]) + parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
        logits = logits.masked_fill(rows >= policy.shape.vocab, -1e9)
        found = -vocab_parallel_cross_entropy(logits, batch["labels"])[batch["real"]]
        return -found.sum() * self.scale, found.detach().numpy()


def pack(sequences: list[np.ndarray], multiple: int) -> dict:
    """One packed micro-batch, with a sequence of padding where its length is no multiple of `multiple`."""
    inputs, labels = [s[:-1] for s in sequences], [s[1:] for s in sequences]
    length = sum(map(len, inputs))
    padding = np.zeros(-length % multiple, int)
    lengths = [len(s) for s in (*inputs, padding) if len(s)]
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return {
        "tokens": torch.from_numpy(np.concatenate([*inputs, padding]))[None],
        "positions": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": torch.from_numpy(np.concatenate([*labels, padding])),
        "real": torch.arange(length + len(padding)) < length,
        "packing": PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)),
    }


def train(chunks: list[torch.nn.Module], run: Run) -> float:
    """One optimizer step that raises the mean log-prob; the norm of its gradient."""
    megatron = hf.unwrap(chunks[0]).config
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = [DistributedDataParallel(megatron, options, chunk) for chunk in chunks]
    adam = OptimizerConfig(lr=LR, adam_eps=EPS, weight_decay=0.0, clip_grad=1e9, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, model)
    megatron.finalize_model_grads_func = finalize_model_grads
    run(model, forward_only=False)
    return float(optimizer.step()[1])


def measure(folder: Path, name: str, layout: str) -> None:
    config = configure(folder / name, layout)
    out = folder / "out" / layout
    chunks, shape = policies.load(config)
    hf.save_hf(chunks, out / name, folder / name, shape)
    run = Run(folder, config.parallel.tp)
    twin = policies.frozen_copy(chunks)
    norm = train(chunks, run)  # the twin must hold weights of its own
    assert not any(parameter.requires_grad for chunk in twin for parameter in chunk.parameters())
    with torch.no_grad():
        found = run(twin, forward_only=True)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for number, log_probs in zip(run.own, found, strict=False):
            np.save(out / f"{name}.{number}.npy", log_probs)
    hf.save_hf(chunks, out / f"{name}.trained", folder / name, shape)
    if torch.distributed.get_rank() == 0:
        (out / f"{name}.norm.json").write_text(json.dumps(norm))


def main(folder: Path) -> None:
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    for layout in LAYOUTS:
        with process_group(configure(folder, layout)):
            for name in names:
                if layout in layouts_of(name):
                    measure(folder, name, layout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
