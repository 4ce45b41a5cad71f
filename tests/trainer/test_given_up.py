"""An update that is given up before its first optimizer step leaves no trace, on any rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import make_model, run_ranks
from tests.trainer.given_up_worker import CASES

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_an_update_can_be_given_up_at_every_look(tmp_path: Path) -> None:
    """Looks: before every micro-batch, with pipeline stages before every pass, and before the optimizer step.

    In the end ranks other than 0 leave a run that is stopped after rank 0, which the worker asserts.
    """
    folder, out = make_model(tmp_path / "model"), tmp_path / "found.json"
    run_ranks("tests.trainer.given_up_worker", 2, [str(folder), str(out)], groups=len(CASES))
    found = json.loads(out.read_text())
    assert found["pp2"] == 4  # log-probs of policy and reference, the gradient, the step
    assert found["dp2 gae"] > 5 and found["dp2 sft"] > 2  # values too; several micro-batches a pass
