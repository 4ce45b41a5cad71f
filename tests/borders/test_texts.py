"""Texts of models, endpoints and data are read in one pass: four times the text takes about four times as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

from megatron_collab.data import answers, parsing, transcript
from megatron_collab.reward.metrics import code_blocks, stated_answer
from megatron_collab.rollout.users import guardrails
from megatron_collab.runtime.text import one_line
from megatron_collab.settings.documents import parse_json, parse_yaml
from megatron_collab.types import Message, Task, visible

TASK = Task("t", (Message("user", "hi"),), "a table for two people " * 30, "42", "u")


def read_file(text: str) -> list[object]:
    """What is read of a data file that is `text`."""
    with NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return [*parsing.parse(Path(file.name))]


def read_document(parse: Callable[[str], object], text: str) -> None:
    with suppress(ValueError):
        parse(text)


READERS: dict[str, Callable[[str], object]] = {
    "stated answer": lambda text: stated_answer.stated_answer([text]),
    "code": lambda text: code_blocks.merged([text]),
    "thoughts": visible,
    "transcript": lambda text: transcript.render([Message("user", text), Message("assistant", text)]),
    "guardrails": lambda text: guardrails.refusal(text, TASK, "Be brief. " * 50, [Message("assistant", text)]),
    "reason": one_line,
    "file of rows": read_file,
    "true answer": answers.final_answer,
    "JSON": lambda text: read_document(parse_json, text),
    "YAML": lambda text: read_document(parse_yaml, text),
}
UNITS = [" ", "\n", "\r\n", "\t", "\u2028", "\u200b", "a", "9", "so ", "then ", "The answer is ", "wait, ", "1. ", "$"]
UNITS += ["<think>", "</think>", "<", "```", "```python\n", "\\boxed{", "\\[", "**", "{", '"', "\\", "I am an AI "]


def is_slow(reader: Callable[[str], object], beginning: str, unit: str) -> bool:
    """Whether four times the text takes more CPU time than that of a linear scan; a quadratic one takes 16 times."""
    times = []
    for size in (4_000, 16_000):
        text = beginning + unit * (size // len(unit))
        began = time.thread_time()
        reader(text)
        times.append(time.thread_time() - began)
    return times[1] > 8 * times[0] + 0.02


@pytest.mark.processes
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
@pytest.mark.parametrize("beginning", ["", "x "])
def test_texts_are_read_in_time_linear_in_their_length(reader: Callable[[str], object], beginning: str) -> None:
    assert [unit for unit in UNITS if all(is_slow(reader, beginning, unit) for _ in range(3))] == []
