"""A checksum notices a changed bit and a moved element, and those of the parts of a parameter add up."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_collab.weight_sync.checksum import checksum, combined


def random_bits(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 2, 3)])
def test_every_single_bit_and_every_swap_changes_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rng = random.Random(len(shape))
    block = random_bits(rng, shape, dtype)
    before = checksum(block, "weight", [0] * len(shape))
    data = block.view(-1).view(torch.uint8)
    for bit in range(8 * data.numel()):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(block, "weight", [0] * len(shape)) != before
        data[bit // 8] ^= 1 << bit % 8
    items = data.view(-1, dtype.itemsize)
    for _ in range(50):
        a, b = rng.sample(range(len(items)), 2)
        if not torch.equal(items[a], items[b]):
            items[[a, b]] = items[[b, a]]
            assert checksum(block, "weight", [0] * len(shape)) != before
            items[[a, b]] = items[[b, a]]
    assert checksum(block, "weight", [0] * len(shape)) == before
    assert checksum(block, "bias", [0] * len(shape)) != before
    assert checksum(block, "weight", [1] * len(shape)) != before


@pytest.mark.parametrize("seed", range(10))
def test_parts_add_up_to_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randint(2, 40), rng.randint(2, 40)
    block = random_bits(rng, (rows, columns), torch.bfloat16)
    row, column = rng.randint(1, rows - 1), rng.randint(1, columns - 1)
    parts = [
        checksum(block[down, across], "weight", [down.start, across.start])
        for down in (slice(0, row), slice(row, rows))
        for across in (slice(0, column), slice(column, columns))
    ]
    assert combined(parts) == checksum(block, "weight", [0, 0])


def test_long_blocks_are_summed_in_steps() -> None:
    block = random_bits(random.Random(0), (5, 1 << 20), torch.bfloat16)
    parts = [checksum(block[row : row + 1], "weight", [row, 0]) for row in range(5)]
    assert combined(parts) == checksum(block, "weight", [0, 0])
