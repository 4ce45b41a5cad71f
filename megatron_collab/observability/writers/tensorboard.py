"""Events for TensorBoard in the folder `tensorboard` of the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from megatron_collab.observability.writers import Rows, Writer, plain_text
from megatron_collab.settings import RunConfig


class TensorBoardWriter(Writer):
    """An earlier start's events from step `start` on are dropped."""

    def __init__(self, options: Any, run: RunConfig, settings: Mapping[str, Any], start: int) -> None:
        super().__init__(options, run, settings, start)
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(run.dir) / "tensorboard"), purge_step=start)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        for number, row in enumerate(rows):  # as a tag, so that their count has a bound however long a run is
            # As a block of code: TensorBoard renders Markdown, also images from addresses that a model wrote.
            text = indent(plain_text(row), "    ", lambda _: True)
            self._writer.add_text(f"{name}/{number}", text, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()
