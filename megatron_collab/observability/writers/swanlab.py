"""SwanLab: one run for all starts; the file `swanlab_id` has its id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_collab.observability.writers import Rows, Writer, plain_text, run_id
from megatron_collab.settings import RunConfig, option


class SwanlabWriter(Writer):
    package = "swanlab"
    key_names = ("SWANLAB_API_KEY",)

    @dataclass(frozen=True)
    class Options:
        project: str = option("megatron-collab", "name of the project")
        mode: str | None = option(
            None, "null: SWANLAB_MODE, else online; offline: only in run.dir", choices=("online", "local", "offline")
        )

    def __init__(self, options: Any, run: RunConfig, settings: Mapping[str, Any], start: int) -> None:
        super().__init__(options, run, settings, start)
        import swanlab

        self._text = swanlab.Text
        folder = Path(run.dir)
        self._run = swanlab.init(
            project=options.project,
            name=folder.name,
            mode=options.mode,
            log_dir=str(folder / "swanlab"),
            config=settings,
            id=run_id(run, "swanlab"),
            resume="allow",
        )

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        self._run.log({f"{name}/conversations": [self._text(plain_text(row)) for row in rows]}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish("crashed" if failed else "success", "the run ended with an error" if failed else None)
