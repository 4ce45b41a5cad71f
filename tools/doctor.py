"""What this machine has, what that enables, and what is used where something is missing.

`python tools/doctor.py` prints one row a probe, the same probes that decide at run time. Exit code 1 where
something is missing that nothing replaces.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_collab import device

TITLES = {
    "cuda": "CUDA device",
    "torch": "torch",
    "megatron": "Megatron-Core",
    "transformer_engine": "TransformerEngine",
    "apex": "apex",
    "flash_attn": "flash-attn",
    "sglang": "SGLang",
    "ray": "Ray",
    "slurm": "Slurm",
}


def main() -> int:
    found = device.probes()
    print(table(found))
    lacking = [TITLES[probe.name] for probe in found if not probe.found and not probe.fallback]
    if lacking:
        print(f"\nRequired and missing: {', '.join(lacking)}. Run make setup.")
        return 1
    selected = device.select("auto")
    print(f"\nlaunch.device=auto takes {selected.type}, torch.distributed {selected.backend}.")
    return 0


def table(found: Sequence[device.Probe]) -> str:
    """The probes as a table of text; the last column says what is used where one is missing."""
    rows = [("", "found", "enables", "without it")]
    for probe in found:
        used = "-" if probe.found else f"-> {probe.fallback or 'nothing: required'}"
        state = probe.detail if probe.found else f"missing: {probe.detail}"
        rows.append((TITLES[probe.name], state, probe.enables, used))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
