"""Log-probs of the reference on disk: computed once, extended for new data, resumed after a stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab.config import Config
from megatron_collab.runtime.process import Preempted, RunStopped
from megatron_collab.trainer import kept_reference
from megatron_collab.trainer.kept_reference import KeptReference
from megatron_collab.types import Batch, Sample
from tests.ranks import make_config, make_model, make_pairs

PAIRS = make_pairs(7, seed=2)


class Data:
    """The part of SupervisedData that KeptReference uses."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples, self.fingerprint = tuple(samples), [len(samples)]

    def __len__(self) -> int:
        return len(self.samples) // 2

    def all_batches(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self.samples), 2 * size):
            yield Batch(self.samples[start : start + 2 * size])


@pytest.fixture
def keep(tmp_path: Path, one_rank: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[int]]]:
    """Builds the reference of some samples; returns it and the sizes of computed batches, `most` at most."""
    config = make_config(make_model(tmp_path / "model"), {})
    monkeypatch.setattr(kept_reference, "PART", 3)

    def build(samples: Sequence[Sample], most: int = 9) -> tuple[Any, list[int]]:
        computed: list[int] = []

        def compute(batch: Batch) -> list[np.ndarray]:
            if len(computed) == most:
                raise Preempted("SIGUSR1")
            computed.append(len(batch.samples))
            return [values(sample) for sample in batch.samples]

        data: Any = Data(samples)
        return KeptReference(tmp_path / "run", config.model, data, compute), computed

    return build


def values(sample: Sample) -> np.ndarray:
    return (sample.loss_mask * -np.sqrt(sample.token_ids)).astype(np.float32)


def check(kept: KeptReference, samples: Sequence[Sample]) -> None:
    for row, sample in zip(kept.log_probs(Batch(tuple(samples))), samples, strict=True):
        np.testing.assert_array_equal(row, values(sample))


def test_they_are_computed_once_and_extended_for_other_data(keep: Callable[..., Any]) -> None:
    kept, computed = keep(PAIRS[:8])
    assert computed == [6, 2]
    check(kept, PAIRS[:8][::-1])
    reopened, computed = keep(PAIRS[:8])
    assert computed == []
    check(reopened, PAIRS[:8])
    more, computed = keep(PAIRS)
    assert computed == [4, 2], "what is known of the second part is not computed again"
    check(more, PAIRS)


def test_a_stopped_run_resumes_where_it_was(keep: Callable[..., Any]) -> None:
    with pytest.raises(Preempted):
        keep(PAIRS, most=1)
    kept, computed = keep(PAIRS)
    assert computed == [6, 2]
    check(kept, PAIRS)


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_a_damaged_file_is_named_with_a_remedy(keep: Callable[..., Any], tmp_path: Path, damage: str) -> None:
    keep(PAIRS)
    (file,) = tmp_path.glob("run/reference/*/0.npy")
    file.write_bytes(file.read_bytes()[:50]) if damage == "cut" else file.unlink()
    with pytest.raises(RunStopped, match=r"0\.npy: lacks log-probs of the reference; remove .*/reference/\w+ to"):
        keep(PAIRS)


def test_missing_log_probs_stop_the_run(keep: Callable[..., Any]) -> None:
    kept, _ = keep(PAIRS[:8])
    with pytest.raises(RunStopped, match="lacks log-probs"):
        kept.log_probs(Batch(PAIRS))
