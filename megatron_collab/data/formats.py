"""The formats of published data sets: a table, in which a data set is recognized by its columns."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from megatron_collab.data import code_readers, pairs, readers
from megatron_collab.data.messages import Messages, Row
from megatron_collab.data.pairs import Pair
from megatron_collab.data.readers import Candidate
from megatron_collab.settings import nearest, require
from megatron_collab.types import Task

Use = Literal["task", "conversation", "pair"]  # what rows are read as: for rl, sft, dpo
_SHOWN = 400  # characters of the columns in a message
STAGES: dict[str, Use] = {"rl": "task", "sft": "conversation", "dpo": "pair"}


@dataclass(frozen=True)
class Format:
    """How rows with these columns are read; None for a use that they do not have. `fits`: whether a row looks like it.

    `candidate`: rows are scored candidates of a turn, several per prompt. rl takes one row per prompt, sft the best of
    the last turn of each conversation, dpo the best and the worst of each prompt. `unread`: names the columns whose
    values are not read.
    """

    columns: tuple[str, ...]
    task: Callable[[Row, int], Task] | None = None
    conversation: Callable[[Row], Messages] | None = None
    pair: Callable[[Row], Pair] | None = None
    candidate: Callable[[Row], Candidate] | None = None
    fits: Callable[[Row], bool] = lambda row: True
    unread: Callable[[Row], Iterable[str]] = lambda row: ()

    def reads(self, use: Use) -> bool:
        return getattr(self, use) is not None or (use == "pair" and self.candidate is not None)

    def recognizes(self, columns: Collection[str], first: Row) -> bool:
        return set(self.columns) <= set(columns) and self.fits(first)


def _solved(solution: str, *problem: str) -> Format:
    """Rows of a problem in these columns and its solution; an `answer` beside them wins over one in the solution."""
    columns: dict[str, Any] = {"problem": problem, "solution": solution}
    readings = partial(readers.problem_task, **columns), partial(readers.problem_conversation, **columns)
    return Format((problem[0], solution), *readings)


# The first format with the requested use is taken if its columns exist and the first row fits.
FORMATS: dict[str, Format] = {
    "task": Format(("prompt", "goal"), readers.task),
    "preference": Format(("chosen", "rejected"), pairs.preference_task, pairs.preference_conversation, pairs.pair),
    "messages": Format(("messages",), readers.messages_task, readers.messages_conversation),
    "collabllm": Format(
        ("prompt", "completion", "conv_id", "turn_id", "score", "single_turn_prompt"),
        readers.collabllm_task,
        readers.collabllm_conversation,
        candidate=readers.candidate,
    ),
    "recipe": Format(("prompt", "extra_info"), readers.recipe_task, unread=readers.unread_of_recipe),
    "humaneval": Format(
        ("prompt", "test", "entry_point"), code_readers.human_eval_task, code_readers.human_eval_conversation
    ),
    "bigcodebench": Format(
        ("instruct_prompt", "code_prompt", "test", "entry_point"),
        code_readers.big_code_bench_task,
        code_readers.big_code_bench_conversation,
    ),
    "sharegpt": Format(("conversations",), readers.sharegpt_task, readers.sharegpt_conversation),
    "question_answer": _solved("answer", "question"),
    "question_reference": _solved("reference_answer", "question"),
    "problem_solution": _solved("solution", "problem"),
    "problem_answer": _solved("answer", "problem"),
    "query_response": _solved("response", "query"),
    "alpaca": _solved("output", "instruction", "input"),
    "recipe_sft": Format(
        ("prompt",),
        conversation=partial(readers.messages_conversation, column="prompt"),
        fits=readers.prompt_ends_with_assistant,
    ),
    "prompt_completion": Format(("prompt", "completion"), readers.completion_task, readers.completion_conversation),
    "prompt": Format(("prompt",), readers.prompt_task, fits=readers.prompt_is_request, unread=readers.unread_answers),
    "text": Format(("text",), readers.text_task),
}


def recognize(name: str, columns: Collection[str], first: Row, use: Use, where: str) -> tuple[str, str]:
    """The format for `name` (data.format), and the reason for that format. Raises ValueError, ConfigError."""
    known = [format_name for format_name, format in FORMATS.items() if format.reads(use)]
    if name != "auto":
        require(
            name in known, f"data.format={name}: reads no {use}s{nearest(name, known)}; there are {', '.join(known)}"
        )
        return name, f"data.format={name}"
    recognized = [format_name for format_name, format in FORMATS.items() if format.recognizes(columns, first)]
    for format_name in recognized:
        if format_name in known:
            return format_name, f"it has {', '.join(FORMATS[format_name].columns)}"
    for format_name, (stage, other) in itertools.product(recognized, STAGES.items()):
        if use in STAGES.values() and FORMATS[format_name].reads(other):
            fault = f"these are rows of the format {format_name}, which train.stage={stage} reads as {other}s"
            raise ValueError(f"{where}: {fault}; give rows that are read as {use}s, or choose that stage")
    closest = {"task": "task", "conversation": "messages", "pair": "preference"}[use]
    if FORMATS[closest].columns[0] in columns or ("goal" in columns and use != "pair"):
        # Reading its rows then names what they lack.
        return closest, f"it has {FORMATS[closest].columns[0]}"
    shown = textwrap.shorten(", ".join(columns), _SHOWN, placeholder=" …")
    raise ValueError(
        f"{where}: the columns {shown} match no known format of {use}s ({', '.join(known)}); set "
        "data.format to one of them or to a reader package.module:Class, or give other rows"
    )


def natural_use(columns: Collection[str], first: Row) -> Use:
    """What rows with these columns are read as: pairs, else tasks if possible, else conversations."""
    known = [format for format in FORMATS.values() if format.recognizes(columns, first)]
    if known and known[0].pair:
        return "pair"
    if not any(format.reads("task") for format in known) and any(format.reads("conversation") for format in known):
        return "conversation"
    return "task"
