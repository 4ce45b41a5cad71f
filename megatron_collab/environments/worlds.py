"""The shipped worlds as files. Apart from booking.py and gsm8k.py, which need neither torch nor a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from megatron_collab.data.datasets import task_row, write_jsonl
from megatron_collab.environments import World, booking, gsm8k, tiny_model


class Booking(World):
    """A table for N people on a day at a time; the first message says only part of it."""

    result_names: ClassVar[Mapping[str, str]] = {
        "ask_when_missing": "ask_when_missing",
        "needless": "ask_when_complete",
        "accuracy": "booking_right",
    }

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/, sft.jsonl (4,096 conversations), train.jsonl (4,096 tasks), eval.jsonl (256 held-out tasks)."""
        tiny_model.save(folder / "model", tiny_model.word_tokenizer(booking.words()), seed, booking.CONTEXT)
        write_jsonl(folder / "train.jsonl", map(task_row, booking.tasks(seed, 4096)))
        write_jsonl(folder / "eval.jsonl", map(task_row, booking.tasks(seed, 256, held_out=True)))
        conversations = booking.conversations(seed, 4096)
        rows = ({"messages": [message.as_dict() for message in messages]} for messages in conversations)
        write_jsonl(folder / "sft.jsonl", rows)


class Gsm8k(World):
    """GSM8K, from its files train.jsonl and test.jsonl in data.path, with a random model that solves nothing."""

    result_names: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}
    vocabulary = 1024
    context = 2048  # tokens

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        """Write model/ with a tokenizer learned from the problems, train.jsonl and eval.jsonl."""
        if source is None:
            raise ValueError("data.path: not set; give the folder with GSM8K's train.jsonl and test.jsonl")
        for name in ("train.jsonl", "test.jsonl"):
            if not (Path(source) / name).is_file():
                raise FileNotFoundError(f"data.path={source}: no {name} there; give the folder with GSM8K's files")
        train, test = (gsm8k.tasks(Path(source) / name) for name in ("train.jsonl", "test.jsonl"))
        texts = (text for task in train for text in json.loads(task.goal)["facts"] + [task.messages[0].content])
        tiny_model.save(folder / "model", tiny_model.byte_tokenizer(texts, self.vocabulary), seed, self.context)
        write_jsonl(folder / "train.jsonl", map(task_row, train))
        write_jsonl(folder / "eval.jsonl", map(task_row, test))
