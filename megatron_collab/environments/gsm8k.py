"""Grade-school problems as conversations: the first message is the bare question, and the user knows the facts.

A GSM8K file has rows {question, answer}; the answer ends in "#### number".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.data.examples import load_tasks
from megatron_collab.environments import World, tiny_model
from megatron_collab.types import Message, Task

USER = "reveal"

# A sentence ends at . ? or ! (and what closes a quotation) before white space.
_BOUNDARY = re.compile(r"(?<=[.?!])[\"'\u201d\u2019)]*\s+")
# Points that end no sentence.
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Prof|vs)\.\s*$")


def sentences(text: str) -> list[str]:
    """The sentences of a problem; joined by spaces they are the problem, except for white space."""
    parts: list[str] = []
    begin = 0
    for boundary in _BOUNDARY.finditer(text):
        sentence = text[begin : boundary.end()]
        if not _ABBREVIATION.search(sentence) and not text[boundary.end() :][:1].islower():
            parts.append(sentence)
            begin = boundary.end()
    return [stripped for sentence in [*parts, text[begin:]] if (stripped := " ".join(sentence.split()))]


def cut(problem: str) -> tuple[str, list[str]]:
    """The question, which is the last sentence that asks (else the last), and the facts: all others, if any."""
    parts = sentences(problem)
    at = max((i for i, sentence in enumerate(parts) if "?" in sentence), default=len(parts) - 1)
    return parts[at], parts[:at] + parts[at + 1 :]


def tasks(file: Path) -> list[Task]:
    """A task for each row of a GSM8K file, in its order. Raises ValueError naming the file and a bad row."""
    problems = []
    for i, problem in enumerate(load_tasks(file, "data.path")):
        question, facts = cut(problem.goal)
        goal = json.dumps({"question": question, "facts": facts}, ensure_ascii=False)
        problems.append(Task(f"gsm8k-{file.stem}-{i}", (Message("user", question),), goal, problem.answer, USER))
    return problems


class Gsm8k(World):
    """GSM8K, from its files train.jsonl and test.jsonl in data.path, with a random model that solves nothing."""

    result_names: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}
    vocabulary = 1024
    context = 2048  # tokens

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/ with a tokenizer learned from the problems, train.jsonl and eval.jsonl."""
        if source is None:
            raise ValueError("data.path: not set; give the folder with GSM8K's train.jsonl and test.jsonl")
        files = Path(source) / "train.jsonl", Path(source) / "test.jsonl"
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(f"data.path={source}: no {file.name} there; give the folder with GSM8K's files")
        train, test = map(tasks, files)
        texts = (text for task in train for text in json.loads(task.goal)["facts"] + [task.messages[0].content])
        tiny_model.save(folder / "model", tiny_model.byte_tokenizer(texts, self.vocabulary), seed, self.context)
        write_jsonl(folder / "train.jsonl", map(task_row, train))
        write_jsonl(folder / "eval.jsonl", map(task_row, test))
