"""The doctor's table says what is there, what it enables and what replaces it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from megatron_collab.device import Probe, probes

DOCTOR = Path(__file__).resolve().parents[2] / "tools" / "doctor.py"


def test_every_probe_has_a_row(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, DOCTOR], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    libraries = ["torch", "Megatron-Core", "TransformerEngine", "apex", "flash-attn", "SGLang", "Ray"]
    titles = ["CUDA device", *libraries, "Slurm"]
    assert [row[: len(title)] for row, title in zip(rows[1:], titles, strict=False)] == titles
    for row, probe in zip(rows[1:], probes(), strict=False):
        assert probe.detail in row and probe.enables in row
        assert ("missing" in row) != probe.found
        assert probe.found or f"-> {probe.fallback}" in row
    assert "launch.device=auto takes" in rows[-1]


def test_what_is_required_and_missing_ends_in_1(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(DOCTOR.parent))
    import doctor

    lacking = [Probe("ray", False, "not installed", "conversations and scoring", "")]
    monkeypatch.setattr(doctor.device, "probes", lambda: lacking)
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "missing: not installed" in printed and "-> nothing: required" in printed
    assert "Required and missing: Ray. Run make setup." in printed
