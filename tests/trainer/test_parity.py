"""Megatron equals Hugging Face in every layout, on packed sequences: log-probs, gradients, exported weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_collab import patches
from tests.helpers import make_model
from tests.ranks import run_ranks
from tests.trainer.parity_worker import EPS, LAYOUTS, LR, layouts_of

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
CASES = [(model, layout) for model in MODELS for layout in layouts_of(model)]


@dataclass
class Reference:
    """What transformers computes: log-probs of each micro-batch, gradient norm, weights after the step."""

    log_probs: list[np.ndarray]
    norm: float
    trained: dict[str, torch.Tensor]


def hugging_face(folder: Path, micro_batches: np.ndarray) -> Reference:
    """One step of AdamW on the mean log-prob of all tokens, sequence by sequence."""
    patches.apply("torchvision")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.0, maximize=True)
    found = []
    for sequences in micro_batches:
        scores = []
        for tokens in map(torch.from_numpy, sequences):
            log_probs = torch.log_softmax(model(tokens[None, :-1]).logits[0], dim=-1)
            scores.append(log_probs.gather(-1, tokens[1:, None])[:, 0])
        found.append(torch.cat(scores))
    torch.cat(found).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    optimizer.step()
    model.save_pretrained(folder.with_name(f"{folder.name}.reference"))
    trained = load_file(folder.with_name(f"{folder.name}.reference") / "model.safetensors")
    return Reference([scores.detach().numpy() for scores in found], float(norm), trained)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, the tokens, and below out/ what the ranks found in every layout."""
    folder = tmp_path_factory.mktemp("parity")
    for seed, (name, settings) in enumerate(MODELS.items()):
        make_model(folder / name, seed=seed, vocab=VOCAB, hidden=32, ffn=48, head_dim=8, **settings)
    rng = np.random.default_rng(0)
    packed = np.empty(4, dtype=object)
    for number in range(4):
        packed[number] = [rng.integers(3, VOCAB, length) for length in rng.integers(3, 24, size=3)]
    np.savez(folder / "tokens.npz", micro_batches=packed)
    run_ranks("tests.trainer.parity_worker", RANKS, [str(folder)], groups=len(LAYOUTS))
    return folder


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Reference]:
    micro_batches = np.load(folder / "tokens.npz", allow_pickle=True)["micro_batches"]
    return {name: hugging_face(folder / name, micro_batches) for name in MODELS}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_log_probs_equal_hugging_face(folder: Path, references: dict[str, Reference], layout: str, model: str) -> None:
    for number, expected in enumerate(references[model].log_probs):
        found = np.load(folder / "out" / layout / f"{model}.{number}.npy")
        assert found.shape == expected.shape
        assert expected.std() > 0.5
        assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gradients_equal_hugging_face(folder: Path, references: dict[str, Reference], layout: str, model: str) -> None:
    """Their norm, and every weight after an optimizer step that depends on its gradient smoothly."""
    norm = json.loads((folder / "out" / layout / f"{model}.norm.json").read_text())
    assert norm == pytest.approx(references[model].norm, rel=2e-6)
    found = load_file(folder / "out" / layout / f"{model}.trained" / "model.safetensors")
    before = load_file(folder / model / "model.safetensors")
    assert found.keys() == references[model].trained.keys()
    for name, expected in references[model].trained.items():
        change = (expected - before[name]).abs().max()
        assert change > 0, name
        assert (found[name] - expected).abs().max() < 2e-4 * change, name


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_what_was_loaded_is_saved_bit_for_bit(folder: Path, layout: str, model: str) -> None:
    source, saved = folder / model, folder / "out" / layout / model
    expected, found = (load_file(path / "model.safetensors") for path in (source, saved))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected)
    assert json.loads((saved / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert {file.name for file in saved.iterdir()} == {file.name for file in source.iterdir()}
