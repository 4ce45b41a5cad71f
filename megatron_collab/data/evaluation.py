"""The sets of data.eval: their tasks, how often each is played, by which user and under which budgets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_collab.data.sources import Source, sources
from megatron_collab.settings import option, require

_NAME = re.compile(r"[\w.-]+")  # part of the names of files and metrics
_NOT_IN_NAME = re.compile(r"[^\w.-]+")


@dataclass(frozen=True)
class EvaluationSet(Source):
    """An entry of data.eval. If data.eval is a single source, its set has no name."""

    preferred: ClassVar[tuple[str, ...]] = ("validation", "test", "train")

    name: str = option(
        "", "its name in metrics and files; empty: the last part of source, with its folder if an earlier set has it"
    )
    tasks: int | None = option(None, "number of rows, from the first; null: train.eval_tasks", ge=1)
    samples: int = option(1, "conversations per task", ge=1)
    temperature: float | None = option(None, "sampling temperature, 0: greedy; null: that of training", ge=0)
    user: str | None = option(None, "user of every task, as user.name; null: that of training")
    max_user_turns: int | None = option(None, "as in rollout; null: that of training", ge=1)
    max_assistant_turns: int | None = option(None, "as in rollout; null: that of training", ge=1)
    max_messages: int | None = option(None, "as in rollout; null: that of training", ge=2)
    max_new_tokens: int | None = option(None, "token budget of every turn; null: those of training", ge=1)
    against: str | None = option(None, "earlier set that it is compared with, for the gap of held-out users or tasks")

    @property
    def digest(self) -> str:
        """Digest of the settings under which a task is played, such as samples, user and budgets."""
        return hashlib.sha256(repr(replace(self, name="", tasks=None, against=None)).encode()).hexdigest()[:16]

    @property
    def setting(self) -> str:
        """Its name in messages."""
        return f"data.eval[{self.name}]" if self.name else "data.eval"


def _name(eval_set: EvaluationSet, earlier_sets: Sequence[EvaluationSet]) -> str:
    """Its name, else the last part of its source, after as many folders as tell it from earlier sets with that part.

    Later sets do not change it: records of a run find their set by its name, and a resumed run may have more sets.
    """
    folders = eval_set.folders
    rivals = [other.folders for other in earlier_sets if other.title == eval_set.title]
    depths = range(1, len(folders) + 1) if rivals and not eval_set.name else ()
    depth = next((depth for depth in depths if all(other[-depth:] != folders[-depth:] for other in rivals)), 0)
    return "_".join([*(_NOT_IN_NAME.sub("-", folder) for folder in folders[len(folders) - depth :]), eval_set.title])


def evaluation_sets(entries: Any, tasks: int) -> tuple[EvaluationSet, ...]:
    """The sets of data.eval, each with its number of tasks, by default `tasks`. Raises ConfigError naming the entry."""
    if entries is None:
        return ()
    sets = sources(entries, "data.eval", EvaluationSet)
    if isinstance(entries, list):
        sets = [replace(eval_set, name=_name(eval_set, sets[:number])) for number, eval_set in enumerate(sets)]
    names = [eval_set.name for eval_set in sets]
    for number, name in enumerate(names):
        setting = f"data.eval[{number}]" if isinstance(entries, list) else "data.eval"
        allowed = bool(_NAME.fullmatch(name)) or (not isinstance(entries, list) and not name)
        require(allowed, f"{setting}.name={name}: use letters, digits and - . _ only")
        require(names.count(name) == 1, f"data.eval: two sets are named {name}; rename one")
        against = sets[number].against
        message = f"{setting}.against={against}: no set of this name is before it; list that set first"
        require(against is None or against in names[:number], message)
    return tuple(replace(eval_set, tasks=eval_set.tasks or tasks) for eval_set in sets)
