"""Writers of metrics and conversations besides the run folder's own files: TensorBoard and Weights & Biases."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol
from uuid import uuid4

from megatron_collab.config import PlayConfig, uses_wandb
from megatron_collab.runtime import files
from megatron_collab.runtime.redact import excerpt, redacted

logger = logging.getLogger(__name__)

_WANDB_SECONDS = 30.0  # time for its server to answer
CONVERSATIONS = 10  # the first ones of each evaluation: the same tasks every time
Rows = Sequence[Mapping[str, Any]]  # of a file of conversations


class Writer(Protocol):
    def scalars(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        """Log some conversations of the evaluation of the set `name` at `step`."""

    def close(self, failed: bool) -> None:
        """End of the run; `failed`: by an error. Returns when everything is written."""


def writers(config: PlayConfig, start: int) -> Iterator[Writer]:
    """Writers of a run that resumes at step `start`: TensorBoard, and Weights & Biases if it is enabled."""
    yield TensorBoard(Path(config.run.dir), start)
    if uses_wandb(config.run):
        yield WeightsAndBiases(config)


class TensorBoard:
    """Events in the folder `tensorboard`; an earlier start's events from step `start` on are dropped."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def conversations(self, step: int, name: str, rows: Rows) -> None:
        for row in rows:
            sections = [f"{part}:\n{value}" for part, value in _cells(row).items() if value not in ("", None)]
            # As a block of code: TensorBoard renders Markdown, also images from addresses that a model wrote.
            self._writer.add_text(f"{name}/{row['task']}", indent("\n\n".join(sections), "    ", lambda _: True), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One Weights & Biases run for all starts of the run; the file `wandb_id` has its id."""

    def __init__(self, config: PlayConfig) -> None:
        import wandb

        self._wandb = wandb
        run = config.run
        file = Path(run.dir) / "wandb_id"
        if not file.exists():
            files.replace(file, uuid4().hex)
        init = partial(
            wandb.init,
            project=run.wandb_project,
            name=run.wandb_name,
            group=run.wandb_group,
            tags=list(run.wandb_tags),
            dir=run.dir,
            config=redacted(asdict(config)),
            id=file.read_text(),
            resume="allow",
            settings=wandb.Settings(init_timeout=_WANDB_SECONDS),
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
        cells = [{"step": step, "task": row["task"], **_cells(row)} for row in rows]
        columns: list[str | int] = [*cells[0]]
        table = self._wandb.Table(columns=columns, data=[[*of_row.values()] for of_row in cells])
        self._wandb.log({f"{name}/conversations": table}, step=step)

    def close(self, failed: bool) -> None:
        self._wandb.finish(exit_code=int(failed))


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a conversation, by name; each text has at most LONGEST_EXCERPT characters."""
    dialogue = [f"{message['role']}: {message['content']}" for message in row["messages"]]
    reasons = [f"{name}: {of['reason'] or of['answer']}" for name, of in row.get("judgments", {}).items()]
    private = [
        f"message {at}, {name}: {note}" for at, of in row.get("private", {}).items() for name, note in of.items()
    ]
    return {
        "conversation": excerpt("\n\n".join(dialogue)),
        "ending": str(row["ending"]),
        "reward": row["reward"],
        "standard_error": row.get("standard_error"),
        "scores": _numbers(row["scores"]),
        "parts": _numbers(row.get("parts", {})),
        "reasons": excerpt("\n\n".join(reasons)),
        "goal": excerpt(str(row.get("goal", ""))),
        "private": excerpt("\n\n".join(private)),
    }


def _numbers(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items() if isinstance(value, int | float))
