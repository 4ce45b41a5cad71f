from __future__ import annotations

import numpy as np
import pytest

from megatron_collab.actor.packing import collate, plan
from megatron_collab.types import Sample


def test_plan_over_random_lengths():
    rng = np.random.default_rng(0)
    for _ in range(500):
        lengths = rng.integers(1, rng.integers(2, 300), size=rng.integers(1, 60)).tolist()
        data_parallel, budget = int(rng.integers(1, 5)), int(rng.integers(1, 2000))
        multiple = int(rng.choice([1, 2, 8]))
        made = plan(lengths, data_parallel, budget, multiple)

        indices = [index for rank in made.ranks for micro_batch in rank for index in micro_batch]
        assert sorted(indices) == list(range(len(lengths))), "every sample exactly once"
        assert len(made.ranks) == data_parallel
        assert len({len(rank) for rank in made.ranks}) == 1, "equally many micro-batches on every rank"
        assert max(len(micro_batch) for rank in made.ranks for micro_batch in rank) <= made.rows
        assert made.width % multiple == 0 and max(lengths) <= made.width < max(lengths) + multiple
        assert made.rows * made.width <= budget or made.rows == 1, "the budget holds, or one sequence stands alone"


def test_plan_wastes_no_rows():
    made = plan([10] * 9, data_parallel=2, token_budget=80)
    assert (made.rows, len(made.ranks[0])) == (5, 1), "9 rows of at most 8 on two ranks are 5 + 4, not 8 + 1"


def test_position_i_speaks_of_label_i():
    sample = Sample(
        token_ids=np.array([5, 6, 7], np.int64),
        loss_mask=np.array([0, 0, 1], np.float32),
        advantages=np.array([0, 0, 2.5], np.float32),
        log_probs=np.array([0, 0, -1.5], np.float32),
    )
    batch = collate([sample], (0,), (2, 4))
    assert batch["token_ids"].tolist() == [[5, 6, 0, 0], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, 0, 0], [0, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert batch["advantages"].tolist() == [[0, 2.5, 0, 0], [0, 0, 0, 0]]
    assert batch["log_probs"].tolist() == [[0, -1.5, 0, 0], [0, 0, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert {array.dtype.str for array in batch.values()} == {"<i8", "<f4"}


def test_a_first_token_cannot_be_trained():
    sample = Sample(np.array([5, 6], np.int64), *(np.ones(2, np.float32) for _ in range(3)))
    with pytest.raises(ValueError, match="first token"):
        collate([sample], (0,), (1, 1))
