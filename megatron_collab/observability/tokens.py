"""Tokens of trained turns, with train.record_tokens: a file per step, tokens/step_000012.parquet.

It is written after the update, beside the step's transcripts, which are written before it. A row is a trained turn, or
with rollout.train_turns=all a later turn of a future that was trained; its lists have an entry per token. Values are
float16: of a ratio its logarithm is stored, which is near 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_collab.observability.transcripts import TOKENS, readable, step_file
from megatron_collab.runtime import files
from megatron_collab.runtime.redact import HIDDEN, redact
from megatron_collab.types import Group, Sample, ScoredBatch, Turn

Row = Mapping[str, Any]
_PLACE = ("position", "rollout", "future", "turn")  # of the group in the step; future: null, or of a later turn
_SCHEMA = pa.schema(
    {
        **dict.fromkeys(_PLACE, pa.int32()),
        "pieces": pa.list_(pa.string()),
        **dict.fromkeys(("log_prob", "log_ratio", "advantage"), pa.list_(pa.float16())),  # NaN: none
        "trained": pa.list_(pa.bool_()),
        "version": pa.list_(pa.int32()),
    }
)
_NOISE = ("log_prob.list.element", "log_ratio.list.element")
_REPEATED = [*_PLACE, *(f"{name}.list.element" for name in ("pieces", "advantage", "version"))]
_TURNS = 512  # of a row group, which is read as a whole
_LEVEL = 12  # of zstd, as for transcripts


def rows_of(
    groups: Sequence[Group], batch: ScoredBatch, log_probs: Sequence[np.ndarray], piece: Callable[[int], str]
) -> Iterator[Row]:
    """The rows of a step: of its `groups`, the batch that was trained, and its `log_probs` after the update.

    A turn that was not trained has no values of the trainer; advantages only algo.objective=policy has. `piece`: text
    of a token.
    """
    numbers = {sample.origin: number for number, sample in enumerate(batch.samples)}

    def rows(turns: Sequence[Turn], *place: int, first: int = 0) -> Iterator[Row]:
        """Rows of turns of a rollout or future. `place`: that of their sample; `first`: number of the first turn."""
        number, named = numbers.get(place), dict(zip(_PLACE, place, strict=False))
        spans = {} if number is None else _spans(batch.samples[number])
        for at, turn in enumerate(turns):
            row = {**named, "turn": first + at, **_sampled(turn, piece)}
            if number is not None and at in spans:
                row |= _learned(batch, log_probs, number, slice(*spans[at]))
            yield row

    for position, group in enumerate(groups):
        for at, rollout in enumerate(group.rollouts):
            start = rollout.start.turns
            yield from rows(start, position, at)
            for future_number, future in enumerate(rollout.futures):
                if (position, at, future_number) in numbers:
                    later = future.conversation.turns[len(start) :]
                    yield from rows(later, position, at, future_number, first=len(start))


def write(folder: Path, step: int, rows: Iterable[Row]) -> None:
    """Write the tokens of a step of the run in `folder` atomically. Raises RunStopped if they cannot be written."""
    table = pa.Table.from_pylist([*rows], _SCHEMA)
    stream = pa.BufferOutputStream()
    pq.write_table(
        table,
        stream,
        row_group_size=_TURNS,
        compression="zstd",
        compression_level=_LEVEL,
        use_dictionary=_REPEATED,
        column_encoding=dict.fromkeys(_NOISE, "BYTE_STREAM_SPLIT"),
        write_statistics=["position"],  # with them, readers skip row groups
    )
    with files.writing(folder / TOKENS):
        (folder / TOKENS).mkdir(exist_ok=True)
    files.replace(step_file(folder, step, TOKENS), stream.getvalue().to_pybytes())


def read(folder: Path, step: int, position: int, rollout: int) -> list[Row]:
    """The rows of a rollout's trained turns, then of its futures' later turns, if they were trained, in order.

    Empty if none are recorded. Raises ConfigError if the file is damaged.
    """
    file = step_file(folder, step, TOKENS)
    if not file.is_file() or max(position, rollout) >= 1 << 31:  # more than the columns can hold
        return []
    with readable(file):
        table = pq.read_table(file, filters=[("position", "=", position), ("rollout", "=", rollout)])
        if "future" not in table.column_names:  # an earlier version recorded no later turns
            table = table.append_column("future", pa.nulls(len(table), pa.int32()))
        return table.select(_SCHEMA.names).cast(_SCHEMA).to_pylist()


def _spans(sample: Sample) -> dict[int, tuple[int, int]]:
    """The span of each trained turn, by its number in the rollout."""
    spans = sorted({span for credit in sample.credits for span in credit.spans})
    return dict(zip(sample.turns or range(len(spans)), spans, strict=True))


def _sampled(turn: Turn, piece: Callable[[int], str]) -> Row:
    """What the server sampled. If the turn has a key, which may be in several tokens, it has no text."""
    has_key = redact(turn.text) != turn.text
    log_prob = np.array(turn.log_probs, np.float16)
    log_prob[slice(*turn.forced)] = np.nan
    return {
        "pieces": [HIDDEN if has_key else piece(token) for token in turn.token_ids],
        "log_prob": log_prob,
        "version": turn.versions,
    }


def _learned(batch: ScoredBatch, log_probs: Sequence[np.ndarray], number: int, span: slice) -> dict[str, Any]:
    """What the trainer knows of the tokens of a sample in a span."""
    sample = batch.samples[number]
    trained = sample.loss_mask[span] > 0

    def of_trained(values: np.ndarray) -> np.ndarray:
        return np.where(trained, values[span], np.nan).astype(np.float16)

    learned = {"trained": trained, "log_ratio": of_trained(log_probs[number] - sample.log_probs)}
    return learned if batch.advantages is None else {**learned, "advantage": of_trained(batch.advantages[number])}
