"""What a run folder records of the settings of a start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_collab.settings import RunConfig

SETTINGS = "config.json"  # in run.dir: the settings of the run's last start


class Change(NamedTuple):
    """A changed setting; `allowed` if the change extends the run or does not affect its results."""

    setting: str
    before: Any
    after: Any
    allowed: bool


@dataclass(frozen=True)
class RunRecord:
    """`run`: options of the folder and its writers; `settings`: the content of SETTINGS; `changes`: since the last."""

    run: RunConfig
    settings: Mapping[str, Any]
    changes: Sequence[Change]
