"""Attention equals the textbook formula, and a token's result is bitwise the same however it was computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from megatron_collab.inference.cpu.attention import BLOCK, QUERIES, attend, calls_of

LENGTH = 300
# heads, key/value heads, width
SIZES = [(4, 2, 32), (4, 4, 16), (6, 2, 24), (7, 1, 64), (3, 1, 8), (32, 8, 128)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(heads: int, groups: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(LENGTH, count, width, generator=generator) for count in (heads, groups, groups))


def whole_blocks(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` keys, padded to whole blocks with keys that must not be read."""
    return F.pad(tensor[:length], (0, 0, 0, 0, 0, -length % BLOCK), value=7.0)[None]


def read(tensors: tuple[torch.Tensor, ...], first: int, end: int) -> torch.Tensor:
    """The tokens first..end of one request, read in one piece."""
    query, keys, values = tensors
    cache = whole_blocks(keys, end), whole_blocks(values, end)
    return attend(query[None, first:end], *cache, torch.tensor([first]), query.shape[-1] ** -0.5)[0]


@pytest.mark.parametrize("sizes", SIZES)
def test_attention_is_that_of_torch(sizes: tuple[int, int, int]) -> None:
    tensors = draw(*sizes)
    query, keys, values = (tensor.movedim(0, 1)[None] for tensor in tensors)
    expected = F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)[0].movedim(0, 1)
    torch.testing.assert_close(read(tensors, 0, LENGTH), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_token_is_the_same_in_any_piece_of_its_prompt(sizes: tuple[int, int, int]) -> None:
    tensors = draw(*sizes)
    whole = read(tensors, 0, LENGTH)
    for end in (1, 2, 3, 5, 17, 63, 64, 65, 127, 128, 129, LENGTH):
        for first in {0, end // 2, max(end - 5, 0), max(end - 3, 0), end - 1}:
            assert torch.equal(read(tensors, first, end), whole[first:end])


@pytest.mark.parametrize("sizes", SIZES)
def test_a_decoded_token_is_the_same_as_one_that_is_read(sizes: tuple[int, int, int]) -> None:
    query, keys, values = tensors = draw(*sizes)
    whole = read(tensors, 0, LENGTH)
    for batch in (1, 2, 3, 8, 40):
        lengths = torch.randint(1, LENGTH + 1, (batch,), generator=torch.Generator().manual_seed(batch))
        longest = int(lengths.max())
        cache = (whole_blocks(tensor, longest).expand(batch, -1, -1, -1) for tensor in (keys, values))
        decoded = attend(query[lengths - 1][:, None], *cache, lengths - 1, query.shape[-1] ** -0.5)
        assert torch.equal(decoded[:, 0], whole[lengths - 1])


def test_calls_read_every_token_once_and_are_bounded() -> None:
    prefixes, lengths = [0, 5, 70, 0, 3, 9], [1, 7, 600, 256, 5, 4]
    calls = list(calls_of(prefixes, lengths))
    for request, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
        pieces = [piece for call in calls for piece in call if piece.request == request]
        positions = [piece.position + token for piece in pieces for token in range(piece.length)]
        assert positions == list(range(prefix, prefix + length))
    assert all(max(piece.length for piece in call) * len(call) <= QUERIES for call in calls)
    assert [len(call) for call in calls] == [2, 1, 1, 1, 1, 2]
    assert len(list(calls_of([9] * 64, [4] * 64))) == 1


@pytest.mark.parametrize("sizes", SIZES)
def test_prompts_that_one_call_reads_are_the_same_as_alone(sizes: tuple[int, int, int]) -> None:
    query, keys, values = tensors = draw(*sizes)
    whole = read(tensors, 0, LENGTH)
    for prefixes, lengths in ([3, 60, 190, 0], [4, 9, 12, 1]), ([0, 0], [120, 128]), ([299, 298, 1], [1, 1, 1]):
        [pieces] = calls_of(prefixes, lengths)
        longest = max(lengths)
        cache = (whole_blocks(tensor, LENGTH).expand(len(pieces), -1, -1, -1) for tensor in (keys, values))
        padded = torch.stack([F.pad(query, (0, 0, 0, 0, 0, longest))[first:][:longest] for first in prefixes])
        outputs = attend(padded, *cache, torch.tensor(prefixes), query.shape[-1] ** -0.5)
        for output, first, length in zip(outputs, prefixes, lengths, strict=True):
            assert torch.equal(output[:length], whole[first : first + length])
