"""FP8 blocks against a float64 account of e4m3; a checksum notices a changed bit and a moved element, and adds up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_collab.weight_sync import encoding
from megatron_collab.weight_sync.encoding import (
    alike,
    checksum,
    fp8_nbytes,
    fp8_scales,
    quantize,
    read,
    read_fp8,
    write_fp8,
)


def dequantize(quantized: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The matrix that the output of `quantize` represents, float32 [n, k]."""
    n, k = quantized.shape
    return quantized.float() * scale_inv.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def at(start: int, shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for size in shape)


SHAPES = [(128, 128), (256, 384), (130, 127), (1, 1), (300, 5)]


def weights(n: int, k: int) -> torch.Tensor:
    """Weights of very different magnitudes, across blocks and within a block."""
    generator = torch.Generator().manual_seed(n * k)
    spread = torch.exp(4 * torch.randn(n, k, generator=generator))
    by_row = torch.logspace(-30, 20, n)[:, None]
    return torch.randn(n, k, generator=generator) * spread * by_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_round_trip_is_off_by_half_a_step_of_e4m3(n: int, k: int, dtype: torch.dtype) -> None:
    weight = weights(n, k).to(dtype)
    quantized, scale_inv = quantize(weight)
    assert quantized.shape == weight.shape and quantized.dtype is torch.float8_e4m3fn
    assert scale_inv.shape == fp8_scales(weight.shape) and scale_inv.dtype is torch.float32
    exact = weight.double()
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            block = exact[row : row + 128, column : column + 128]
            scale = scale_inv[row // 128, column // 128].double()
            assert scale.item() == pytest.approx(block.abs().max().item() / 448, rel=1e-6)
            back = quantized[row : row + 128, column : column + 128].double() * scale
            bound = torch.maximum(block.abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)
            assert ((back - block).abs() <= bound).all()
    assert torch.equal(dequantize(quantized, scale_inv).double().isfinite(), exact.isfinite())


def test_the_largest_element_is_kept_and_zeros_stay_zeros() -> None:
    weight = torch.zeros(256, 128)
    weight[3, 5] = -7.0
    quantized, scale_inv = quantize(weight)
    assert quantized[3, 5].float() == -448 and scale_inv[0, 0] == pytest.approx(7 / 448)
    back = dequantize(quantized, scale_inv)
    assert back[3, 5] == pytest.approx(-7.0) and back.count_nonzero() == 1 and math.isfinite(scale_inv[1, 0])


@pytest.mark.parametrize("step", [1, 1 << 24])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_write_leaves_what_quantize_makes(n: int, k: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any lot size; `read_fp8` gives views, which for experts keep the expert dimension."""
    monkeypatch.setitem(encoding.QUANTIZED_AT_ONCE, "cpu", step)
    weight = weights(n, k)
    data = torch.full((fp8_nbytes((n, k)) + 64,), 170, dtype=torch.uint8)
    write_fp8([(data[:-64], weight)])
    assert (data[-64:] == 170).all()
    quantized, scale_inv = read_fp8(data[:-64], (1, n, k))
    expected, scales = quantize(weight)
    assert torch.equal(quantized[0].view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert torch.equal(scale_inv[0], scales)
    assert fp8_nbytes((1, n, k)) == fp8_nbytes((n, k)) >= n * k + 4 * scales.numel()


def test_every_device_makes_the_same_bytes_and_sums(device_type: str) -> None:
    """A server's checksum is compared with the trainer's, so FP8 blocks made on a GPU must equal those of a CPU."""
    for n, k in SHAPES:
        weight = weights(n, k)
        block = random_bits(random.Random(n), (n, k), torch.bfloat16)
        quantized, scale_inv = quantize(weight)
        data = torch.zeros(fp8_nbytes((n, k)), dtype=torch.uint8, device=device_type)
        write_fp8([(data, weight.to(device_type))])
        values, scales = read_fp8(data, (n, k))
        assert torch.equal(values.cpu().view(torch.uint8), quantized.contiguous().view(torch.uint8))
        assert torch.equal(scales.cpu(), scale_inv)
        on_cpu, on_device = (
            checksum(tensor, "weight", at(0, tensor.shape)) for tensor in (block, block.to(device_type))
        )
        assert read([on_cpu]) == read([on_device])


class Calls(TorchDispatchMode):
    """Counts the operations that a GPU would run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_experts_are_quantized_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert is quantized as it would be alone, in as many operations as one; large ones go in lots."""
    monkeypatch.setitem(encoding.QUANTIZED_AT_ONCE, "cpu", 16 * 130 * 127)
    count = {}
    for experts in (1, 2, 16, 40):
        matrices = [weights(130, 127) * (1 + number) for number in range(experts)] + [weights(300, 5)]
        data = [torch.zeros(fp8_nbytes(weight.shape), dtype=torch.uint8) for weight in matrices]
        with Calls() as calls:
            write_fp8(list(zip(data, matrices, strict=True)))
        count[experts] = calls.count
        for place, weight in zip(data, matrices, strict=True):
            alone = torch.zeros_like(place)
            write_fp8([(alone, weight)])
            assert torch.equal(place, alone)
    assert count[2] == count[16] <= count[1] + 1 and count[40] < 3 * count[16]


def random_bits(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 2, 3)])
def test_every_flipped_bit_and_every_swap_changes_the_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rng = random.Random(len(shape))
    block = random_bits(rng, shape, dtype)
    before = checksum(block, "weight", at(0, shape))
    data = block.view(-1).view(torch.uint8)
    for bit in range(8 * data.numel()):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(block, "weight", at(0, shape)) != before
        data[bit // 8] ^= 1 << bit % 8
    items = data.view(-1, dtype.itemsize)
    for _ in range(50):
        a, b = rng.sample(range(len(items)), 2)
        if not torch.equal(items[a], items[b]):
            items[[a, b]] = items[[b, a]]
            assert checksum(block, "weight", at(0, shape)) != before
            items[[a, b]] = items[[b, a]]
    assert checksum(block, "weight", at(0, shape)) == before
    assert checksum(block, "bias", at(0, shape)) != before
    assert checksum(block, "weight", at(1, shape)) != before


@pytest.mark.parametrize("seed", range(10))
def test_parts_add_up_to_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randint(2, 40), rng.randint(2, 40)
    block = random_bits(rng, (rows, columns), torch.bfloat16)
    row, column = rng.randint(1, rows - 1), rng.randint(1, columns - 1)
    parts = [
        checksum(block[down, across], "weight", (down, across))
        for down in (slice(0, row), slice(row, rows))
        for across in (slice(0, column), slice(column, columns))
    ]
    assert read(parts) == read([checksum(block, "weight", at(0, block.shape))])


@pytest.mark.seconds
def test_long_blocks_are_summed_in_steps() -> None:
    block = random_bits(random.Random(0), (5, 1 << 20), torch.bfloat16)
    parts = [checksum(block[row : row + 1], "weight", (slice(row, row + 1), slice(0, 1 << 20))) for row in range(5)]
    assert read(parts) == read([checksum(block, "weight", at(0, block.shape))])


def test_checksums_do_not_wait_for_the_gpu() -> None:
    """A meta tensor has no values, so the test fails if a number is taken from it before `read`."""
    block = torch.empty(5, 1 << 20, dtype=torch.bfloat16, device="meta")
    digest = checksum(block, "weight", at(0, block.shape))
    assert digest.device.type == "meta" and digest.dtype == torch.int64 and digest.shape == ()
    assert read([torch.tensor(-1), torch.tensor(3), 5]) == 7 and read([torch.tensor(-1)]) == (1 << 64) - 1


def test_copies_of_one_launch_are_grouped() -> None:
    bucket = [torch.arange(6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float32)]
    places = [torch.zeros_like(piece) for piece in bucket]
    places[2] = torch.zeros(6, 2)[:, 0]
    groups = alike(places, bucket)
    assert [len(into) for into, _ in groups] == [2, 1, 1]
    for into, out_of in groups:
        assert len({(tensor.dtype, tensor.is_contiguous()) for tensor in into}) == 1
        torch._foreach_copy_(into, out_of)
    assert all(torch.equal(place, piece) for place, piece in zip(places, bucket, strict=True))
    assert alike([], []) == []
