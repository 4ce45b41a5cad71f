"""Trackio: one run for all starts, in the files of this machine; the file `trackio_id` has the end of its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_collab.observability.writers import Rows, Writer, plain_text, run_id
from megatron_collab.settings import RunConfig, option


class TrackioWriter(Writer):
    package = "trackio"

    @dataclass(frozen=True)
    class Options:
        project: str = option("megatron-collab", "name of the project")

    def __init__(self, options: Any, run: RunConfig, settings: Mapping[str, Any], start: int) -> None:
        super().__init__(options, run, settings, start)
        import trackio

        self._markdown = trackio.Markdown
        self._run = trackio.init(
            project=options.project,
            name=f"{Path(run.dir).name}-{run_id(run, 'trackio')[:6]}",
            config=settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        texts = "\n\n".join(map(plain_text, rows))
        # A fence that the texts lack: what a model wrote is text, never markup.
        fence = "`" * (1 + max(map(len, re.findall("`+", texts)), default=2))
        self._run.log({f"{name}/conversations": self._markdown(f"{fence}\n{texts}\n{fence}")}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()
