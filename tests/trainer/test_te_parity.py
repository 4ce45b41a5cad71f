"""TransformerEngine's layers over reference kernels equal Hugging Face, as the local ones do in test_parity.py.

In float32, so that nothing hides in rounding: the same models, layouts and bounds. What trains is TransformerEngine's
FusedAdam.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_collab.trainer.megatron import config
from tests.ranks import run_ranks
from tests.trainer import test_parity as parity

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = parity.prepare(tmp_path_factory.mktemp("parity"))
    run_ranks(measure_every_layout, parity.RANKS, folder, engine=True)
    return folder


references = parity.references


def measure_every_layout(folder: Path) -> None:
    config._engine = lambda dtype: True
    parity.measure_every_layout(folder)


@pytest.mark.parametrize(("model", "layout"), parity.CASES)
def test_the_engine_equals_hugging_face(
    folder: Path,
    references: dict[str, parity.Reference],
    layout: str,
    model: str,
) -> None:
    parity.test_log_probs_equal_hugging_face(folder, references, layout, model)
    parity.test_gradients_equal_hugging_face(folder, references, layout, model)
    parity.test_what_was_loaded_is_saved_bit_for_bit(folder, layout, model)
