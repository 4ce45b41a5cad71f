"""Megatron equals Hugging Face in every layout, on packed sequences: log-probs, gradients, exported weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from safetensors.torch import load_file

from megatron_collab.checkpoint import hf
from megatron_collab.config import Config
from megatron_collab.launch.trainer_specs import network_spec
from megatron_collab.trainer.megatron import model as policies
from tests.helpers import make_model
from tests.ranks import init_parallel, run_ranks

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RANKS = 4
TOLERANCE = 2e-5
VOCAB = 301  # odd: no tensor-parallel size divides it
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# Five layers: no number of pipeline stages, virtual or not, divides them.
MODELS: dict[str, dict[str, object]] = {
    "qwen3-tied": {"family": "qwen3", "tied": True, "layers": 5},
    "qwen2-untied": {"family": "qwen2", "tied": False, "layers": 4},
    "llama-tied": {"family": "llama", "tied": True, "layers": 4, "rope_parameters": LLAMA3},
    "mistral-untied": {"family": "mistral", "tied": False, "layers": 5, "rope_parameters": YARN},
    "qwen3_moe-untied": {"family": "qwen3_moe", "tied": False, "layers": 4},
    "qwen3_moe-mixed": {
        "family": "qwen3_moe",
        "tied": True,
        "layers": 5,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
    },
}
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
    "ep2-selective": {"ep": 2, "recompute": "selective"},
    "tp2-sp-ep4-full": {"tp": 2, "sequence_parallel": True, "ep": 4, "recompute": "full"},
    "pp2-vpp2-ep2": {"pp": 2, "vpp": 2, "ep": 2},
}
LAYOUTS = {**DENSE, **EXPERTS}
# AdamW's first step is p - LR * g / (|g| + EPS): a large EPS makes it depend on the size of g, not only on its sign.
LR, EPS = 0.1, 0.1


def layouts_of(model: str) -> dict[str, dict[str, object]]:
    return EXPERTS if "moe" in model else DENSE


CASES = [(model, layout) for model in MODELS for layout in layouts_of(model)]


@dataclass
class Reference:
    """Results of transformers: log-probs of each micro-batch, gradient norm, weights after the step."""

    log_probs: list[np.ndarray]
    norm: float
    trained: dict[str, torch.Tensor]


def hugging_face(folder: Path, micro_batches: np.ndarray) -> Reference:
    """One step of AdamW on the mean log-prob of all tokens, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0, maximize=True)
    all_scores = []
    for sequences in micro_batches:
        scores = []
        for tokens in map(torch.from_numpy, sequences):
            log_probs = torch.log_softmax(model(tokens[None, :-1]).logits[0], dim=-1)
            scores.append(log_probs.gather(-1, tokens[1:, None])[:, 0])
        all_scores.append(torch.cat(scores))
    torch.cat(all_scores).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    model.save_pretrained(folder.with_name(f"{folder.name}.reference"))
    trained = load_file(folder.with_name(f"{folder.name}.reference") / "model.safetensors")
    return Reference([scores.detach().numpy() for scores in all_scores], float(norm), trained)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, the tokens, and below out/ the results of the ranks in every layout."""
    folder = prepare(tmp_path_factory.mktemp("parity"))
    run_ranks(measure_every_layout, RANKS, folder)
    return folder


def prepare(folder: Path) -> Path:
    """Write the models and the tokens."""
    for seed, (name, settings) in enumerate(MODELS.items()):
        make_model(folder / name, seed=seed, vocab=VOCAB, hidden=32, ffn=48, head_dim=8, **settings)
    np.savez(folder / "tokens.npz", micro_batches=random_sequences(VOCAB))
    return folder


def random_sequences(vocab: int) -> np.ndarray:
    """Four micro-batches of three sequences."""
    rng = np.random.default_rng(0)
    packed = np.empty(4, dtype=object)
    for number in range(4):
        packed[number] = [rng.integers(3, vocab, length) for length in rng.integers(3, 24, size=3)]
    return packed


def measure_every_layout(folder: Path) -> None:
    """As one of the ranks: every model in every layout that suits it.

    Below out/LAYOUT they write MODEL.N.npy, the log-probs of micro-batch N; MODEL, what was loaded, exported again;
    MODEL.trained, the same after one optimizer step on the mean log-prob of all tokens; and MODEL.norm.json, the norm
    of its gradient.
    """
    for layout in LAYOUTS:
        with init_parallel(configure(folder, layout)):
            for name in MODELS:
                if layout in layouts_of(name):
                    measure(folder, name, layout)


def configure(folder: Path, layout: str) -> Config:
    config = Config()
    config.launch.device, config.launch.timeout = "cpu", 60.0
    config.model.path, config.model.dtype = str(folder), "float32"
    for name, value in LAYOUTS[layout].items():
        setattr(config.parallel, name, value)
    return config


class Run:
    """The micro-batches of this data-parallel rank through Megatron's schedule."""

    def __init__(self, packed: np.ndarray, multiple: int) -> None:
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        self.numbers = range(rank, len(packed), ranks)
        self.micro_batches = [pack(packed[number], multiple) for number in self.numbers]
        tokens = sum(len(sequence) - 1 for sequences in packed for sequence in sequences)
        # The schedule divides by the micro-batches, the gradient is averaged over the data-parallel ranks.
        self.scale = len(self.numbers) * ranks / tokens

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
            num_microbatches=len(self.numbers),
            seq_length=0,  # each micro-batch has its own
            micro_batch_size=1,
            **options,
        )

    def loss(self, policy: policies.PolicyModel, batch: dict, hidden: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        logits = hidden[0] @ policy.head.t()
        rows = torch.arange(logits.shape[1]) + parallel_state.get_tensor_model_parallel_rank() * logits.shape[1]
        logits = logits.masked_fill(rows >= policy.shape.vocab, -1e9)
        log_probs = -vocab_parallel_cross_entropy(logits, batch["labels"])[batch["real"]]
        return -log_probs.sum() * self.scale, log_probs.detach().numpy()


def pack(sequences: list[np.ndarray], multiple: int) -> dict:
    """One packed micro-batch, padded by one more sequence if its length is no multiple of `multiple`."""
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
    chunks = policies.load(network_spec(config))
    hf.save_hf(chunks, out / name, folder / name)
    run = Run(np.load(folder / "tokens.npz", allow_pickle=True)["micro_batches"], config.parallel.tp)
    twin = policies.frozen_copy(chunks)
    norm = train(chunks, run)  # the twin must not change with it
    assert not any(parameter.requires_grad for chunk in twin for parameter in chunk.parameters())
    with torch.no_grad():
        rows = run(twin, forward_only=True)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for number, log_probs in zip(run.numbers, rows, strict=False):
            np.save(out / f"{name}.{number}.npy", log_probs)
    hf.save_hf(chunks, out / f"{name}.trained", folder / name)
    if torch.distributed.get_rank() == 0:
        (out / f"{name}.norm.json").write_text(json.dumps(norm))


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Reference]:
    micro_batches = np.load(folder / "tokens.npz", allow_pickle=True)["micro_batches"]
    return {name: hugging_face(folder / name, micro_batches) for name in MODELS}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_log_probs_equal_hugging_face(folder: Path, references: dict[str, Reference], layout: str, model: str) -> None:
    for number, expected in enumerate(references[model].log_probs):
        actual = np.load(folder / "out" / layout / f"{model}.{number}.npy")
        assert actual.shape == expected.shape
        assert expected.std() > 0.5
        assert np.abs(actual - expected).max() < TOLERANCE


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gradients_equal_hugging_face(folder: Path, references: dict[str, Reference], layout: str, model: str) -> None:
    """Their norm, and every weight after an optimizer step that depends on its gradient smoothly."""
    norm = json.loads((folder / "out" / layout / f"{model}.norm.json").read_text())
    assert norm == pytest.approx(references[model].norm, rel=2e-6)
    trained = load_file(folder / "out" / layout / f"{model}.trained" / "model.safetensors")
    before = load_file(folder / model / "model.safetensors")
    assert trained.keys() == references[model].trained.keys()
    for name, expected in references[model].trained.items():
        change = (expected - before[name]).abs().max()
        assert change > 0, name
        assert (trained[name] - expected).abs().max() < 2e-4 * change, name


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_was_loaded_is_saved_bit_for_bit(folder: Path, layout: str, model: str) -> None:
    source, saved = folder / model, folder / "out" / layout / model
    expected, exported = (load_file(path / "model.safetensors") for path in (source, saved))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[tensor], expected[tensor]) for tensor in expected)
    assert json.loads((saved / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert {file.name for file in saved.iterdir()} == {file.name for file in source.iterdir()}
