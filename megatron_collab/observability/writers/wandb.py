"""Weights & Biases: one run for all starts; the file `wandb_id` has its id."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_collab.observability.writers import Rows, Writer, cells, run_id
from megatron_collab.settings import RunConfig

logger = logging.getLogger(__name__)

_SECONDS = 30.0  # time for its server to answer


class WandbWriter(Writer):
    package = "wandb"
    key_names = ("WANDB_API_KEY",)

    def __init__(self, options: Any, run: RunConfig, settings: Mapping[str, Any], start: int) -> None:
        super().__init__(options, run, settings, start)
        import wandb

        self._wandb = wandb
        init = partial(
            wandb.init,
            project=run.wandb_project,
            name=run.wandb_name,
            group=run.wandb_group,
            tags=list(run.wandb_tags),
            dir=run.dir,
            config=dict(settings),
            id=run_id(run, "wandb"),
            resume="allow",
            settings=wandb.Settings(init_timeout=_SECONDS),
        )
        try:
            init()
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            logger.warning(f"Weights & Biases: {reason}; continuing offline; upload {run.dir}/wandb with wandb sync")
            wandb.teardown()  # its service still holds the run's id
            init(mode="offline")

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self._wandb.log(dict(metrics), step=step)

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        table_rows = [{"step": step, **cells(row)} for row in rows]
        columns: list[str | int] = [*table_rows[0]]
        table = self._wandb.Table(columns=columns, data=[[*row.values()] for row in table_rows])
        self._wandb.log({f"{name}/conversations": table}, step=step)

    def close(self, failed: bool) -> None:
        self._wandb.finish(exit_code=int(failed))
