"""Facts of a machine with a GPU: one that cannot be found out does not hide the next ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu import facts


def test_a_fact_that_fails_is_a_line_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drivers() -> Iterator[str]:
        yield "driver: 1"
        raise RuntimeError("CUDA error\nfor debugging")

    monkeypatch.setattr(facts, "drivers", drivers)
    monkeypatch.setattr(facts, "hook", lambda: iter(["hook: started"]))
    monkeypatch.setattr(facts.gpu_environment, "enter", lambda: None)
    monkeypatch.setattr(sys, "argv", ["facts.py", str(page := tmp_path / "facts.md"), "--dry"])
    assert facts.main() == 1
    reason = "drivers: failed: RuntimeError: CUDA error for debugging"
    assert page.read_text() == f"- driver: 1\n- {reason}\n- hook: started\n"
