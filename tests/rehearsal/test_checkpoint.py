"""The ranks of a rehearsal read from a checkpoint only what some rank has written."""

from __future__ import annotations

import pytest

from megatron_collab.rehearsal.checkpoint import Contents

WEIGHT, STATE = "decoder.weight", "optimizer.state.exp_avg.decoder.weight"


@pytest.mark.parametrize("prefix", ["", "critic."])
def test_replicas_that_were_not_taken_write_the_rest_of_the_optimizer(prefix: str) -> None:
    Contents({prefix + WEIGHT: (4, 2)}, {prefix + STATE: ((4, 2), 0)}).check_read()
    with pytest.raises(ValueError, match=rf"^checkpoint: rank 3 reads {prefix}{STATE} as \[4, 2\], of which no rank"):
        Contents({WEIGHT + "s": (4, 2)}, {prefix + STATE: ((4, 2), 3)}).check_read()


def test_another_shape_is_found() -> None:
    with pytest.raises(ValueError, match=r"reads decoder.weight as \[4, 2\], of which ranks write \[8, 2\]"):
        Contents({WEIGHT: (8, 2)}, {WEIGHT: ((4, 2), 0)}).check_read()
