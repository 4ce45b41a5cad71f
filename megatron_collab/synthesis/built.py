"""Rows of a built data set, with the columns of CollabLLM's published data, and its data set card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.assistants import CandidateAssistant
from megatron_collab.data.datasets import to_parquet, write_jsonl
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.runtime import files
from megatron_collab.types import Group, Missing, Rollout

FOLDER = "built"  # in run.dir
_SUFFIXES = (".jsonl", ".parquet")
CARD = """---
configs:
- config_name: default
  data_files:
{files}
---
# Conversations built turn by turn

{conversations} conversations, {turns} turns, {rows} candidates with their rewards. At each turn {candidates} replies
were sampled, each was played on {futures} times, and the one with the best mean reward went on.

| | |
|---|---|
| assistant | {assistants} |
| user | {user} |
| reward | `{mode}` of {weights} |
| turns of a conversation | {lengths} |
| reward of the candidates, of those that went on | {mean:.3f}, {best:.3f} |

Columns: `prompt` and `completion`; `score`, the reward; `assistant`, who gave the completion and played the futures,
and `proactive`, whether it was asked to involve the user; `conv_id` and `turn_id`; `single_turn_prompt`,
`single_turn_completion` and `single_turn_metadata`, which are the task; `sessions`, the messages of each future;
`rewards`, by metric the score of each future; `user`, where the task names one.
"""


def rows_of(conversation: Sequence[Group], assistants: Sequence[CandidateAssistant]) -> Iterator[dict[str, Any]]:
    """The row of every candidate with a reward, turn by turn; `assistants`: those of the candidates, by number."""
    for turn, group in enumerate(conversation):
        for rollout, assistant in zip(group.rollouts, assistants, strict=True):
            if not isinstance(rollout.reward.value, Missing) and rollout.start.replies:
                yield _row(group, rollout, turn) | assistant._asdict()


def _row(group: Group, rollout: Rollout, turn: int) -> dict[str, Any]:
    task, start_length = group.task, len(rollout.start.messages)
    future_scores = [future.scores for future in rollout.futures]
    names = sorted({name for scores in future_scores for name in scores})
    return {
        "prompt": [message.as_dict() for message in task.messages],
        "completion": rollout.start.replies[-1],
        "conv_id": task.id,
        "turn_id": turn,
        "score": rollout.reward.value,
        "single_turn_prompt": task.goal,
        "single_turn_completion": task.answer,
        "single_turn_metadata": json.dumps(dict(task.metadata)),
        "sessions": [
            [message.as_dict() for message in future.conversation.messages[start_length:]] for future in rollout.futures
        ],
        "rewards": json.dumps({name: [_number(scores.get(name)) for scores in future_scores] for name in names}),
    } | ({"user": task.user} if task.user else {})


def _number(score: Any) -> float | None:
    return None if score is None or isinstance(score, Missing) else float(score)


def _shares(
    assistants: Sequence[CandidateAssistant], rows: Sequence[Mapping[str, Any]], models: Mapping[str, Any]
) -> Iterator[str]:
    """The share of the rows and the mean reward of each assistant, split by `proactive`."""
    for assistant, proactive in sorted(set(assistants)):
        rewards = [row["score"] for row in rows if (row["assistant"], row["proactive"]) == (assistant, proactive)]
        name = f"{assistant} ({models[assistant]})" if assistant in models else assistant
        mean = f", reward {np.mean(rewards):.3f}" if rewards else ""
        share = len(rewards) / max(1, len(rows))
        yield f"{name}{', proactive' * proactive}: {share:.0%} of the candidates{mean}"


def write(
    folder: Path, name: str, conversations: Sequence[Sequence[Group]], play: PlaySpec, config: BuildDatasetConfig
) -> None:
    """Writes NAME.jsonl (NAME.parquet if build.parquet) and README.md, the card that lists all files of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    assistants, policy = play.candidates, Path(config.model.path).name
    entries = play.assistants.items() if config.build.assistants else ()
    models = {name: entry.model if entry else policy for name, entry in entries}
    rows = [row for conversation in conversations for row in rows_of(conversation, assistants)]
    groups = [group for conversation in conversations for group in conversation]
    scores = [[row["score"] for row in rows_of([group], assistants)] for group in groups]
    unfinished = folder / f".{name}.jsonl"
    write_jsonl(unfinished, rows)
    if config.build.parquet and rows:
        unfinished = to_parquet(unfinished)
    for suffix in _SUFFIXES:  # an earlier start may have written the other
        (folder / f"{name}{suffix}").unlink(missing_ok=True)
    unfinished.replace(folder / f"{name}{unfinished.suffix}")
    splits = sorted(file.name for file in folder.glob("[!.]*") if file.suffix in _SUFFIXES)
    lengths = np.bincount([len(conversation) for conversation in conversations])
    tops = [max(candidates) for candidates in scores if candidates]
    card = CARD.format(
        files="\n".join(f"  - split: {Path(file).stem}\n    path: {file}" for file in splits),
        conversations=len(conversations),
        turns=len(groups),
        rows=len(rows),
        candidates=play.rollouts,
        futures=play.rollout.futures,
        assistants="; ".join(_shares(assistants, rows, models)),
        user=config.user.name or config.user.model or "as each task names it",
        mode=play.reward.mode,
        weights=", ".join(f"{name} ({weight:g})" for name, weight in play.reward.weights.items()),
        lengths=", ".join(f"{count} of {turns}" for turns, count in enumerate(lengths) if count),
        mean=float(np.mean([row["score"] for row in rows])) if rows else float("nan"),
        best=float(np.mean(tops)) if tops else float("nan"),
    )
    files.replace(folder / "README.md", card)
