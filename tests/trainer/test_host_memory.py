"""Offloaded storages are placed in pieces that torch does not round up, and that are reused."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_collab.config import Config
from megatron_collab.rehearsal.ledger import PINNED, Ledger
from megatron_collab.trainer import host_memory
from megatron_collab.trainer.host_memory import PIECE, HostMemory, PieceSlice, piece_count, spans


def test_a_piece_is_a_power_of_two() -> None:
    assert PIECE & (PIECE - 1) == 0


@pytest.mark.parametrize(
    "sizes",
    [[], [1], [PIECE], [PIECE + 1], [PIECE - 1, 2], [3 * PIECE], [4, 5 * PIECE // 2, 4, PIECE, 7 * PIECE]],
    ids=str,
)
def test_storages_fill_the_pieces_one_after_another(sizes: list[int]) -> None:
    placed = spans(sizes)
    assert [sum(end - start for _, start, end in storage) for storage in placed] == sizes
    assert all(0 <= start < end <= PIECE for storage in placed for _, start, end in storage)
    linear = [(piece * PIECE + start, piece * PIECE + end) for storage in placed for piece, start, end in storage]
    assert [start for start, _ in linear] == [0, *(end for _, end in linear)][: len(linear)]
    assert piece_count(sum(sizes)) == len({piece for storage in placed for piece, _, _ in storage})


def test_a_storage_is_split_only_at_the_end_of_a_piece() -> None:
    cut = [PieceSlice(0, 10, PIECE), PieceSlice(1, 0, PIECE), PieceSlice(2, 0, 10)]
    assert spans([10, 2 * PIECE]) == [[PieceSlice(0, 0, 10)], cut]


def test_placed_values_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE", 16)
    memory, sizes = HostMemory(pinned=False), [3, 40, 16, 1]
    values = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    placed = memory.place(sizes)
    for value, views in zip(values, placed, strict=True):
        for part, view in zip(value.split([len(view) for view in views]), views, strict=True):
            view.copy_(part)
    assert all(torch.equal(value, torch.cat(views)) for value, views in zip(values, placed, strict=True))
    assert [len(piece) for piece in memory.pieces] == [16] * 4


def test_the_pieces_of_the_masters_serve_all() -> None:
    """A rank of train_8b: 3.74 GiB before the first step, 11.2 after; single tensors took 4 and 16 GiB more."""
    masters = [PIECE * 599 // 10]
    with FakeTensorMode(), Ledger() as ledger:
        memory = HostMemory(pinned=True)
        memory.place(masters)
        first = list(memory.pieces)
        assert ledger.usage.now[PINNED] == 60 * PIECE
        for _ in range(2):
            memory.place(masters * 3)
            assert all(piece is kept for piece, kept in zip(first, memory.pieces, strict=False))
            assert ledger.usage.now[PINNED] == 180 * PIECE
        memory.place(masters)
        assert len(memory.pieces) == 180


@pytest.mark.gpu
def test_torch_pins_no_more_than_the_pieces(one_gpu: Config) -> None:
    memory, before = HostMemory(pinned=True), _reserved()
    for size in (PIECE // 3, 5 * PIECE // 2):
        memory.place([size])
        assert _reserved() - before == piece_count(size) * PIECE == len(memory.pieces) * PIECE
    assert all(piece.is_pinned() for piece in memory.pieces)


def _reserved() -> int:
    """Bytes that torch's allocator of pinned memory has ever given out, as it rounds them."""
    return int(torch.cuda.host_memory_stats()["active_bytes.allocated"])
