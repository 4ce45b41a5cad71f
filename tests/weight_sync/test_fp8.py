"""Blocks of FP8 against a float64 account of e4m3, and what write leaves for read."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_collab.weight_sync import fp8

SHAPES = [(128, 128), (256, 384), (130, 127), (1, 1), (300, 5)]


def weights(n: int, k: int) -> torch.Tensor:
    """Of very different sizes, by block and within one."""
    generator = torch.Generator().manual_seed(n * k)
    spread = torch.exp(4 * torch.randn(n, k, generator=generator))
    by_row = torch.logspace(-30, 20, n)[:, None]
    return torch.randn(n, k, generator=generator) * spread * by_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_round_trip_is_off_by_half_a_step_of_e4m3(n: int, k: int, dtype: torch.dtype) -> None:
    weight = weights(n, k).to(dtype)
    quantised, scale_inv = fp8.quantise(weight)
    assert quantised.shape == weight.shape and quantised.dtype is torch.float8_e4m3fn
    assert scale_inv.shape == fp8.scales(weight.shape) and scale_inv.dtype is torch.float32
    exact = weight.double()
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            block = exact[row : row + 128, column : column + 128]
            scale = scale_inv[row // 128, column // 128].double()
            assert scale.item() == pytest.approx(block.abs().max().item() / 448, rel=1e-6)
            back = quantised[row : row + 128, column : column + 128].double() * scale
            bound = torch.maximum(block.abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)
            assert ((back - block).abs() <= bound).all()
    assert torch.equal(fp8.dequantise(quantised, scale_inv).double().isfinite(), exact.isfinite())


def test_dequantise_multiplies_each_block_by_its_scale() -> None:
    quantised, scale_inv = fp8.quantise(weights(130, 257))
    back = fp8.dequantise(quantised, scale_inv)
    for row, column in ((0, 0), (127, 128), (128, 256), (129, 127)):
        assert back[row, column] == quantised[row, column].float() * scale_inv[row // 128, column // 128]


def test_the_largest_element_is_kept_and_zeros_stay_zeros() -> None:
    weight = torch.zeros(256, 128)
    weight[3, 5] = -7.0
    quantised, scale_inv = fp8.quantise(weight)
    assert quantised[3, 5].float() == -448 and scale_inv[0, 0] == pytest.approx(7 / 448)
    back = fp8.dequantise(quantised, scale_inv)
    assert back[3, 5] == pytest.approx(-7.0) and back.count_nonzero() == 1 and math.isfinite(scale_inv[1, 0])


@pytest.mark.parametrize("step", [1, 1 << 24])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_write_leaves_what_quantise_makes(n: int, k: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is quantised at once; read gives views, and those of an expert have its dimension."""
    monkeypatch.setattr(fp8, "_STEP", step)
    weight = weights(n, k)
    data = torch.full((fp8.nbytes((n, k)) + 64,), 170, dtype=torch.uint8)
    fp8.write(data[:-64], weight)
    assert (data[-64:] == 170).all()
    quantised, scale_inv = fp8.read(data[:-64], (1, n, k))
    expected, scales = fp8.quantise(weight)
    assert torch.equal(quantised[0].view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert torch.equal(scale_inv[0], scales)
    assert fp8.nbytes((1, n, k)) == fp8.nbytes((n, k)) >= n * k + 4 * scales.numel()
