"""One rank of test_parity.py: every model in every layout, in one set of processes.

parity_worker.py FOLDER: FOLDER/MODEL is a Hugging Face folder,
FOLDER/tokens.npy int64 [b, s]. For every layout the ranks write FOLDER/out/LAYOUT/MODEL.npy, the log-probs
[b, s - 1] of tokens 1..s-1, and the model as they export it, FOLDER/out/LAYOUT/MODEL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_collab.actor import model as policies
from megatron_collab.actor.logprob import token_log_probs
from megatron_collab.config import Config
from megatron_collab.publish.hf_map import ModelShape

LAYOUTS = {
    "tp1": (1, 1, False),
    "tp2": (2, 1, False),
    "tp2-sp": (2, 1, True),
    "pp2": (1, 2, False),
    "tp2-pp2": (2, 2, False),
    "tp2-pp2-sp": (2, 2, True),
}


def configure(folder: Path, layout: str) -> Config:
    config = Config()
    config.launch.device = "cpu"
    config.launch.timeout = 60.0
    config.model.path = str(folder)
    config.model.dtype = "float32"
    config.parallel.tp, config.parallel.pp, config.parallel.sequence_parallel = LAYOUTS[layout]
    return config


def log_probs(model: torch.nn.Module, shape: ModelShape, token_ids: torch.Tensor) -> np.ndarray | None:
    """[b, s - 1] float32 through Megatron's schedule; None where this rank has no logits."""
    inputs, labels = token_ids[:, :-1].contiguous(), token_ids[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)

    def step(batches, policy):
        logits = policy(next(batches), positions, None)
        return logits, lambda logits: (logits.sum(), token_log_probs(logits, labels, 1.0, shape.vocab))

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([inputs]),
        model=model,
        num_microbatches=1,
        seq_length=inputs.shape[1],
        micro_batch_size=inputs.shape[0],
        forward_only=True,
    )
    return results[0].detach().numpy() if results else None


def run(folder: Path, layout: str) -> None:
    token_ids = torch.from_numpy(np.load(folder / "tokens.npy"))
    for source in sorted(path.parent for path in folder.glob("*/config.json")):
        config = configure(source, layout)
        model, shape = policies.load(config)
        out = folder / "out" / layout
        policies.save_hf(model, out / source.name, source, shape)
        twin = policies.frozen_copy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the twin must hold weights of its own
        assert not any(parameter.requires_grad for parameter in twin.parameters())
        found = log_probs(twin, shape, token_ids)
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
        if found is not None and first:
            np.save(out / f"{source.name}.npy", found)


def main(folder: Path) -> None:
    for layout in LAYOUTS:
        with policies.init_parallel(configure(folder, layout)):
            run(folder, layout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
