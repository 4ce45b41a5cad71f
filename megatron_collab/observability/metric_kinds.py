"""Which metrics are opinions of a model and which are decided by facts: metric_kinds.json in a run's folder."""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path

from megatron_collab.observability import records
from megatron_collab.runtime import files

FILE = "metric_kinds.json"
MOST_PAIRS = 16  # of an opinion and a ground truth, each a column of the index


def pairs(folder: Path) -> list[tuple[str, str]]:
    """Each metric that a model decides with each that facts decide; none if the run in `folder` recorded no kinds."""
    try:
        kinds = records.parsed(files.read_text(folder / FILE)) or {}
    except (OSError, ValueError):
        return []
    opinions, ground_truths = (kinds.get(kind) for kind in ("opinions", "ground_truths"))
    if not isinstance(opinions, list) or not isinstance(ground_truths, list):
        return []
    return [(str(opinion), str(truth)) for opinion, truth in islice(product(opinions, ground_truths), MOST_PAIRS)]
