"""Every storage is counted once, while it lives, under the part that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_collab.rehearsal.ledger import HOST, PASSING, PINNED, Ledger


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger() as ledger:
        yield ledger


def test_a_storage_counts_once_while_it_lives(ledger: Ledger) -> None:
    with ledger.booking("weights"):
        weights = torch.empty(1000)
    view = weights.view(10, 100).t()
    assert ledger.usage.now["weights"] == ledger.usage.total == 4000
    del weights
    assert ledger.usage.total == 4000
    del view
    assert ledger.usage.total == 0 and ledger.usage.peak == ledger.usage.most["weights"] == 4000


def test_claimed_storages_change_their_part(ledger: Ledger) -> None:
    first, second = torch.empty(10), torch.empty(20)
    ledger.claim("kept", [first.view(5, 2)], booked=PASSING)
    assert (ledger.usage.now["kept"], ledger.usage.now[PASSING]) == (40, 80)
    ledger.claim("other", [first], booked=PASSING)  # no longer booked as PASSING
    ledger.claim_all("kept", booked=PASSING)
    assert (ledger.usage.now["kept"], ledger.usage.now[PASSING]) == (120, 0)
    del second
    ledger.reset()
    assert ledger.usage.peak == 40


def test_host_memory_is_not_the_devices(ledger: Ledger) -> None:
    with ledger.booking(HOST):
        pageable = torch.empty(100, dtype=torch.uint8)
    assert (ledger.usage.now[HOST], ledger.usage.total) == (100, 0)
    del pageable
    assert ledger.usage.now[HOST] == 0


def test_pinned_memory_is_rounded_up_and_kept(ledger: Ledger) -> None:
    """Like torch's allocator."""
    first, second = (torch.empty(100, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    assert (ledger.usage.now[PINNED], ledger.usage.total) == (256, 0)
    del first
    reused = torch.empty(65, dtype=torch.uint8, pin_memory=True)  # in the block of the first
    assert ledger.usage.now[PINNED] == 256
    exact = torch.empty(64, dtype=torch.uint8, pin_memory=True)
    assert ledger.usage.now[PINNED] == 256 + 64
    del second, reused, exact
    assert ledger.usage.now[PINNED] == 256 + 64


def test_a_resized_storage_is_booked_again(ledger: Ledger) -> None:
    buffer = torch.empty(100)
    buffer.untyped_storage().resize_(0)
    assert ledger.usage.total == 400
    assert ledger.update_sizes().total == 0
    buffer.untyped_storage().resize_(400)
    assert ledger.update_sizes().total == 400


def test_numbers_are_never_read_off_the_device(ledger: Ledger) -> None:
    numbers = torch.empty(3)
    assert numbers.sum().item() == 1.0 and bool(numbers.any()) and numbers.tolist() == [1.0] * 3


def test_a_mask_picks_its_share() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), Ledger(picked=0.25):
        scores = torch.empty(8, 4, requires_grad=True)
        picked = scores.masked_select(scores > 0)
        assert picked.shape == (8,)
        picked.sum().backward()
        assert scores.grad is not None and scores.grad.shape == scores.shape
