"""Helpers for tests of updates and checkpoints: ranks as processes, a tiny model, samples, a configuration."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_collab.algo.advantages import with_advantages
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.models import hf_to_megatron
from megatron_collab.runtime import gpu_environment
from megatron_collab.types import Batch, Credit, Sample
from tests import gpus
from tests.fork_server import REPOSITORY, fork_server
from tests.forked import Ended
from tests.helpers import configured, free_port

TIMEOUT = 400
HF = {
    "model_type": "qwen3",
    "vocab_size": 301,  # not divisible by 2: with tensor parallelism there is a row of padding
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


def run_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, engine: bool = False, device_type: str = "cpu"
) -> list[Any]:
    """Results of `function(*arguments)` on `ranks` processes, by rank; all of them must return."""
    ended = end_ranks(function, ranks, *arguments, engine=engine, device_type=device_type)
    codes = [code for code, _ in ended]
    assert codes == [0] * ranks, f"exit codes {codes}"
    return [result for _, result in ended]


def run_side_by_side(function: Callable[..., Any], cases: Mapping[str, int], *arguments: Any) -> dict[str, list[Ended]]:
    """How `function(case, *arguments)` ends on each rank of every case; all cases run at the same time."""
    places = []
    for case, ranks in cases.items():
        shared = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
        places += [(case, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    ended = iter(end_ranks(_run_case, len(places), function, places, arguments))
    return {case: list(islice(ended, ranks)) for case, ranks in cases.items()}


def _run_case(function: Callable[..., Any], places: Sequence[tuple[str, dict[str, str]]], arguments: Any) -> Any:
    """As one rank of all cases: set the environment of its own case, then call the function."""
    case, environment = places[int(os.environ["RANK"])]
    os.environ |= environment
    return function(case, *arguments)


def end_ranks(
    function: Callable[..., Any], ranks: int, *arguments: Any, engine: bool = False, device_type: str = "cpu"
) -> list[Ended]:
    """How `function(*arguments)` ends on each of `ranks` processes, which share the output of the test.

    With `engine` they have TransformerEngine: on a CPU over the reference kernels of te_cpu, on GPUs the compiled one.
    Ranks import the module of `function`, so one file can hold a test and the function of its ranks.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if device_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        if lacking := gpus.lacking(ranks, engine=engine):
            pytest.skip(lacking)
        # A function may train in several layouts, but CUDA starts once: set the variables that any layout needs.
        every = {"parallel.tp": 2, "parallel.cp": 2, "model.fp8": "hybrid", "model.fp8_recipe": "delayed"}
        config = configured(Config(), every)
        variables = gpu_environment.rank_variables("cuda", config.parallel, config.model)
        environment = gpu_environment.environment(environment, variables)
    with tempfile.NamedTemporaryFile() as file:
        call = Path(file.name)
        call.write_bytes(pickle.dumps((environment, ranks, pickle.dumps((function, arguments)))))
        if device_type == "cpu":
            fork_server(engine).do(call, TIMEOUT)
        else:
            command = [sys.executable, "-m", "tests.forked", "spawn", call]
            subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=TIMEOUT)  # and its ranks
        return pickle.loads(call.read_bytes())


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 16,
}


def make_model(folder: Path, seed: int = 0, tied: bool = True, experts: bool = False, **sizes: int) -> Path:
    """Write a random Hugging Face folder, weights only; `sizes` are fields of its config.json."""
    hf = HF | {"tie_word_embeddings": tied} | (EXPERTS if experts else {}) | sizes
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    shapes = hf_to_megatron.hf_shapes(hf_to_megatron.ModelShape.from_hf(hf))
    tensors = {name: rng.normal(float(len(s) == 1), 0.2, s).astype(np.float32) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_samples(count: int, seed: int) -> tuple[Sample, ...]:
    """Random sequences of 6 to 24 tokens; the trained part begins anywhere after the first token."""
    rng = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(rng.integers(6, 25, size=count)):
        first = int(rng.integers(1, length))
        mask = (np.arange(length) >= first).astype(np.float32)
        group = str(number % 2)
        samples.append(
            Sample(
                token_ids=rng.integers(0, HF["vocab_size"], size=length),
                loss_mask=mask,
                log_probs=mask * -rng.exponential(size=length).astype(np.float32),
                credits=(Credit(((first, int(length)),), float(rng.normal()), peers=group, scale=group),),
            )
        )
    return tuple(samples)


def make_pairs(count: int, seed: int) -> tuple[Sample, ...]:
    """Pairs of random replies to prompts of 4 to 40 tokens, chosen first; both begin with the same two tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt in rng.integers(4, 41, size=count):
        begun = rng.integers(0, HF["vocab_size"], size=prompt + 2)
        for length in rng.integers(3, 12, size=2):
            ids = np.concatenate([begun, rng.integers(0, HF["vocab_size"], size=length)])
            mask = (np.arange(len(ids)) >= prompt).astype(np.float32)
            samples.append(Sample(ids, mask, np.zeros_like(mask)))
    return tuple(samples)


def make_config(folder: Path, settings: Mapping[str, object]) -> Config:
    """A configuration in which every term of the update matters, changed by `settings` (dotted names)."""
    config = Config()
    config.launch.device, config.launch.timeout = "cpu", 60.0
    config.model.path, config.model.dtype = str(folder), "float32"
    config.train.steps = 10
    config.rollout.turn.temperature = 0.8
    config.optim.lr, config.optim.warmup_steps, config.optim.weight_decay = 1e-3, 2, 0.1
    config.optim.clip_grad, config.algo.kl_coef = 0.5, 0.1
    return configured(config, settings)


@contextmanager
def init_parallel(config: Config) -> Iterator[None]:
    """The process groups and seeds of the run's ranks."""
    from megatron_collab.trainer.megatron import parallel

    with parallel.init_parallel(config.launch, network_spec(config)):
        yield


def learn(trainer: Any, batch: Batch) -> dict[str, float]:
    """One step of a PolicyTrainer, as in train.py."""
    if trainer.objective != "sft":
        batch = trainer.score(batch)
    if trainer.objective == "policy":
        batch = with_advantages(batch, trainer.spec.algo)
    return trainer.update(batch)


def hidden_states(chunk: Any, token_ids: np.ndarray) -> Any:
    """The policy's states [T, h] for one sequence int64 [T] alone, without schedule, packing plan or padding."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    length = len(token_ids)
    bounds = torch.tensor([0, length], dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=length, max_seqlen_kv=length
    )
    return chunk(torch.from_numpy(token_ids)[None], torch.arange(length)[None], None, packed_seq_params=packing)[0]
