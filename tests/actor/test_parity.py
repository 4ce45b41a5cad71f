"""Megatron equals Hugging Face: log-probs of random models in every layout, and the weights that come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_collab.sglang_cpu import parts
from tests.actor.parity_worker import LAYOUTS
from tests.helpers import free_port, make_model

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 4
TIMEOUT = 240
TOLERANCE = 2e-5
VOCAB = 301  # odd: no tensor-parallel size divides it
MODELS = [f"{family}-{embedding}" for family in ("qwen3", "qwen2", "llama") for embedding in ("tied", "untied")]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hugging_face_log_probs(folder: Path, token_ids: np.ndarray, swap_norms: bool = False) -> np.ndarray:
    """[b, s - 1] float32; `swap_norms` exchanges the two norms of a layer, as a wrong table would."""
    parts.install_torchvision_operators()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if swap_norms:
        layer = model.model.layers[1]
        layer.input_layernorm, layer.post_attention_layernorm = layer.post_attention_layernorm, layer.input_layernorm
    tokens = torch.from_numpy(token_ids)
    with torch.no_grad():
        scores = torch.log_softmax(model(tokens[:, :-1]).logits, dim=-1)
    return scores.gather(-1, tokens[:, 1:, None])[..., 0].numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, the tokens, and below out/ what the ranks found in every layout."""
    folder = tmp_path_factory.mktemp("parity")
    for seed, name in enumerate(MODELS):
        family, embedding = name.split("-")
        # three layers: two pipeline stages of unequal size
        make_model(folder / name, family=family, seed=seed, vocab=VOCAB, tied=embedding == "tied", layers=3)
        if family == "llama":
            file = folder / name / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": LLAMA3_ROPE}))
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, VOCAB, (2, 25)))
    run_ranks(folder)
    return folder


def run_ranks(folder: Path) -> None:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(Path(__file__).with_name("parity_worker.py")), str(folder)]
    ranks = []
    for rank in range(RANKS):
        log = (folder / f"rank{rank}.log").open("w")
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    deadline = time.monotonic() + TIMEOUT
    try:
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-2000:] for rank in range(RANKS))
    assert codes == [0] * RANKS, logs


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, np.ndarray]:
    tokens = np.load(folder / "tokens.npy")
    return {name: hugging_face_log_probs(folder / name, tokens) for name in MODELS}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_equal_hugging_face(folder: Path, reference: dict[str, np.ndarray], layout: str, name: str) -> None:
    found = np.load(folder / "out" / layout / f"{name}.npy")
    assert found.shape == reference[name].shape
    assert np.abs(found - reference[name]).max() < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_loaded_is_saved_bit_for_bit(folder: Path, layout: str, name: str) -> None:
    source, saved = folder / name, folder / "out" / layout / name
    expected, found = (load_file(path / "model.safetensors") for path in (source, saved))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[tensor], expected[tensor]) for tensor in expected)
    assert json.loads((saved / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert {file.name for file in saved.iterdir()} == {file.name for file in source.iterdir()}


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_norm_would_be_noticed(folder: Path, reference: dict[str, np.ndarray], name: str) -> None:
    swapped = hugging_face_log_probs(folder / name, np.load(folder / "tokens.npy"), swap_norms=True)
    assert np.abs(swapped - reference[name]).max() > 1000 * TOLERANCE
    assert reference[name].std() > 1.0
