"""Log-probs, entropy and their gradients, on one rank and split over two, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_collab.config import Config
from megatron_collab.trainer import logprobs
from megatron_collab.trainer.logprobs import head_log_probs
from megatron_collab.trainer.losses import apply_head
from tests.ranks import init_parallel, make_config, run_ranks

TOKENS, HIDDEN, VOCAB, PADDED = 7, 6, 13, 20  # the second of two ranks has 3 real entries and 7 of padding
RESULTS = ("log_probs", "entropy", "hidden_grad", "head_grad")
TEMPERATURES = (1.0, 0.7)


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    head = rng.normal(scale=2, size=(PADDED, HIDDEN)).astype(np.float32)
    head[VOCAB:] *= 50.0  # padding would get all the probability
    return {
        "hidden": rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32),
        "head": head,
        "labels": np.array([0, 9, 10, 11, 12, 3, 3]),
        "of_log_prob": rng.normal(size=TOKENS).astype(np.float32),
        "of_entropy": rng.normal(size=TOKENS).astype(np.float32),
        "vocab": np.array(VOCAB),
    }


def expected(arrays: Mapping[str, np.ndarray], temperature: float) -> dict[str, np.ndarray]:
    """The results from full logits in float64, by autograd."""
    hidden, head, of_log_prob, of_entropy = (
        torch.tensor(arrays[name], dtype=torch.float64) for name in ("hidden", "head", "of_log_prob", "of_entropy")
    )
    hidden.requires_grad_()
    head.requires_grad_()
    scores = (hidden @ head[: int(arrays["vocab"])].t() / temperature).log_softmax(-1)
    log_probs = scores.gather(-1, torch.from_numpy(arrays["labels"])[:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    ((log_probs * of_log_prob) + (entropy * of_entropy)).sum().backward()
    results = {"log_probs": log_probs, "entropy": entropy, "hidden_grad": hidden.grad, "head_grad": head.grad}
    return {name: value.detach().numpy() for name, value in results.items()}


def compute(
    arrays: Mapping[str, np.ndarray],
    temperature: float,
    *,
    tokens: int | None = None,
    main_grad: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, np.ndarray]:
    """Log-probs, entropy and the gradients of their weighted sum, of this rank's rows of the head.

    `tokens`: only the first ones. `main_grad`: into a buffer that holds ones.
    """
    here = {name: torch.from_numpy(array).to(device) for name, array in arrays.items() if name != "vocab"}
    hidden = here["hidden"][:tokens].to(dtype).requires_grad_()
    head = here["head"].to(dtype).chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    if main_grad:
        head.main_grad = torch.ones(head.shape)
    log_probs, entropy = head_log_probs(hidden, head, here["labels"][:tokens], temperature, int(arrays["vocab"]))
    loss = (log_probs * here["of_log_prob"][:tokens]).sum() + (entropy * here["of_entropy"][:tokens]).sum()
    loss.backward()
    assert (head.grad is None) == main_grad
    head_grad = head.main_grad - 1 if main_grad else head.grad
    results = {"log_probs": log_probs, "entropy": entropy, "hidden_grad": hidden.grad, "head_grad": head_grad.float()}
    return {name: value.detach().cpu().float().numpy() for name, value in results.items()}


def compare(results: Mapping[str, np.ndarray], references: Mapping[str, np.ndarray], **tolerance: float) -> None:
    for name in RESULTS:
        np.testing.assert_allclose(results[name], references[name], err_msg=name, **tolerance)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_one_rank(arrays: dict, one_rank: Config, temperature: float) -> None:
    results = compute(arrays, temperature)
    compare(results, expected(arrays, temperature), atol=1e-5)
    assert (results["head_grad"][VOCAB:] == 0).all(), "padding must not be trained"


@pytest.mark.parametrize("silent", ["of_log_prob", "of_entropy"])
def test_one_result_alone(arrays: dict, one_rank: Config, silent: str) -> None:
    alone = arrays | {silent: np.zeros(TOKENS, np.float32)}
    compare(compute(alone, 0.7), expected(alone, 0.7), atol=1e-5)

    hidden, head, labels = (torch.from_numpy(arrays[name]) for name in ("hidden", "head", "labels"))
    hidden.requires_grad_()
    log_probs, entropy = head_log_probs(hidden, head, labels, 0.7, VOCAB)
    used, weight = (entropy, "of_entropy") if silent == "of_log_prob" else (log_probs, "of_log_prob")
    (used * torch.from_numpy(arrays[weight])).sum().backward()
    np.testing.assert_allclose(hidden.grad, expected(alone, 0.7)["hidden_grad"], atol=1e-5)


def test_labels_are_predicted_at_their_positions(arrays: dict, one_rank: Config) -> None:
    """By the head inside the model's wrappers; other positions are ignored."""
    at = [5, 0, 3]
    hidden, head, labels = (torch.from_numpy(arrays[name]) for name in ("hidden", "head", "labels"))
    network: Any = SimpleNamespace(module=SimpleNamespace(head=head))
    micro_batch: Any = SimpleNamespace(positions=torch.tensor(at), labels=labels[at])
    results = apply_head(network, 0.7, VOCAB, micro_batch, hidden[None])
    for values, name in zip(results, ("log_probs", "entropy"), strict=True):
        np.testing.assert_allclose(values, expected(arrays, 0.7)[name][at], atol=1e-5)


@pytest.fixture(scope="module")
def cut(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return run_ranks(compute_all, 2, arrays)


def compute_all(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As one of two ranks: at every temperature, and for no tokens."""
    with init_parallel(make_config(Path("unused"), {"parallel.tp": 2})):
        results = {f"{name} {t}": value for t in TEMPERATURES for name, value in compute(arrays, t).items()}
        return results | {f"{name} empty": value for name, value in compute(arrays, 1.0, tokens=0).items()}


@pytest.mark.processes
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_two_ranks(arrays: dict, cut: list[dict], temperature: float) -> None:
    ranks = [{name: rank[f"{name} {temperature}"] for name in RESULTS} for rank in cut]
    for name in ("log_probs", "entropy"):
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name], "the same on every rank")
    joined = ranks[0] | {
        "hidden_grad": ranks[0]["hidden_grad"] + ranks[1]["hidden_grad"],
        "head_grad": np.concatenate([rank["head_grad"] for rank in ranks]),
    }
    compare(joined, expected(arrays, temperature), atol=1e-5)
    assert (joined["head_grad"][VOCAB:] == 0).all(), "padding must not be trained"


@pytest.mark.processes
def test_no_tokens(arrays: dict, one_rank: Config, cut: list[dict]) -> None:
    for results in (
        compute(arrays, 1.0, tokens=0),
        *({name: rank[f"{name} empty"] for name in RESULTS} for rank in cut),
    ):
        assert results["log_probs"].shape == results["entropy"].shape == (0,)
        assert results["hidden_grad"].shape == (0, HIDDEN)
        assert (results["head_grad"] == 0).all()


@pytest.mark.parametrize("size", [1, 5, 12, 16, 30])
def test_tiles_of_any_size(arrays: dict, one_rank: Config, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.TILE, "cpu", size)
    compare(compute(arrays, 0.7), expected(arrays, 0.7), atol=1e-5)


def test_main_grad_receives_the_gradient_of_autograd(arrays: dict, one_rank: Config) -> None:
    compare(compute(arrays, 0.7, main_grad=True), compute(arrays, 0.7), atol=1e-6)


def test_bfloat16_is_computed_in_float32(arrays: dict, one_rank: Config) -> None:
    rounded = {name: array for name, array in arrays.items()}
    for name in ("hidden", "head"):
        rounded[name] = torch.from_numpy(arrays[name]).bfloat16().float().numpy()
    references = expected(rounded, 0.7)
    results = compute(arrays, 0.7, dtype=torch.bfloat16)
    for name in ("log_probs", "entropy"):
        np.testing.assert_allclose(results[name], references[name], atol=1e-5)
    for name in ("hidden_grad", "head_grad"):  # returned in bfloat16: half a unit in the last place is 2**-9
        np.testing.assert_allclose(results[name], references[name], rtol=2**-8, atol=1e-5)
    main_grad = compute(arrays, 0.7, dtype=torch.bfloat16, main_grad=True)["head_grad"]
    np.testing.assert_allclose(main_grad, references["head_grad"], atol=1e-5, err_msg="added up in float32")


def test_extreme_logits(arrays: dict, one_rank: Config) -> None:
    """Logits of +-10,000, exact in float32, beside slightly different ones."""
    head = np.zeros((PADDED, HIDDEN), np.float32)
    head[:VOCAB, 0] = [1e4, 1e4 - 1, 1e4 - 3, -1e4, -1e4, 0, 1, 2, 9990, -5, 1e4 - 2, 100, -1e4]
    hidden = np.zeros((TOKENS, HIDDEN), np.float32)
    hidden[:, 0] = [1, 1, 1, -1, -1, 0, 1]
    extreme = arrays | {"head": head, "hidden": hidden, "labels": np.array([0, 1, 3, 3, 4, 5, 10])}
    results, references = compute(extreme, 1.0), expected(extreme, 1.0)
    for name in ("log_probs", "entropy", "head_grad"):
        np.testing.assert_allclose(results[name], references[name], rtol=1e-5, atol=1e-5, err_msg=name)
    # A sum of probabilities times 10,000, whose last place in float32 is 1e-3.
    np.testing.assert_allclose(results["hidden_grad"], references["hidden_grad"], atol=4e-3)


def test_without_gradients(arrays: dict, one_rank: Config) -> None:
    hidden, head, labels = (torch.from_numpy(arrays[name]) for name in ("hidden", "head", "labels"))
    with torch.no_grad():
        results = head_log_probs(hidden.clone().requires_grad_(), head, labels, 0.7, VOCAB)
    for result, name in zip(results, ("log_probs", "entropy"), strict=True):
        assert result.dtype == torch.float32 and not result.requires_grad
        np.testing.assert_allclose(result, expected(arrays, 0.7)[name], atol=1e-5)


class Unread(TorchDispatchMode):
    """Fails if a number is read: on a GPU the host would wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_host_reads_no_number(arrays: dict, one_rank: Config) -> None:
    hidden, head = (torch.from_numpy(arrays[name]).requires_grad_() for name in ("hidden", "head"))
    with Unread():
        log_probs, entropy = head_log_probs(hidden, head, torch.from_numpy(arrays["labels"]), 0.7, VOCAB)
        (log_probs + entropy).sum().backward()


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_no_kernel(arrays: dict, one_gpu: Config) -> None:
    """The head's log-probs, entropy and gradients are queued without a synchronization."""
    here = {name: torch.from_numpy(arrays[name]).cuda() for name in ("hidden", "head", "labels")}
    for mode in ("default", "error"):  # first what is loaded and allocated once
        hidden, head = (here[name].clone().requires_grad_() for name in ("hidden", "head"))
        torch.cuda.set_sync_debug_mode(mode)
        try:
            log_probs, entropy = head_log_probs(hidden, head, here["labels"], 0.7, VOCAB)
            (log_probs + entropy).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor created under this mode."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.seconds
def test_full_logits_are_never_made(one_rank: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.TILE, "cpu", 256)
    hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    with Largest() as largest:
        log_probs, entropy = head_log_probs(hidden, head, torch.arange(64), 1.0, 500)
        (log_probs + entropy).sum().backward()
    assert largest.elements == head.numel(), "nothing is larger than the gradient of the head"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_gpu_gives_log_probs_entropy_and_gradients(arrays: dict, one_gpu: Config, dtype: torch.dtype) -> None:
    """Of the head: products of 16 bits into float32, against the formula in float64."""
    rounded = {name: array for name, array in arrays.items()}
    for name in ("hidden", "head"):
        rounded[name] = torch.from_numpy(arrays[name]).to(dtype).float().numpy()
    results, references = compute(arrays, 0.7, dtype=dtype, device="cuda"), expected(rounded, 0.7)
    for name in ("log_probs", "entropy"):
        np.testing.assert_allclose(results[name], references[name], atol=1e-4)
    for name in ("hidden_grad", "head_grad"):
        np.testing.assert_allclose(
            results[name], references[name], rtol=2**-7, atol=2**-7 * np.abs(references[name]).max()
        )
