"""Row readers of code benchmarks; the tests go to the task's metadata. They raise ValueError."""

from __future__ import annotations

from megatron_collab.data.messages import Messages, Row
from megatron_collab.data.readers import text_of
from megatron_collab.types import Message, Task

_ASK_FOR_CODE = "Complete this Python function. Give the whole function in one fenced block.\n\n"


def human_eval_task(row: Row, number: int) -> Task:
    prompt, request = text_of(row, "prompt"), _ASK_FOR_CODE + f"```python\n{text_of(row, 'prompt').strip()}\n```"
    metadata = {"prompt": prompt, "test": text_of(row, "test"), "entry_point": text_of(row, "entry_point")}
    answer = prompt + text_of(row, "canonical_solution", "")
    return Task(text_of(row, "task_id", str(number)), (Message("user", request),), request, answer, "", metadata)


def human_eval_conversation(row: Row) -> Messages:
    return _code_conversation(human_eval_task(row, 0))


def big_code_bench_task(row: Row, number: int) -> Task:
    """`code_prompt` holds imports, constants and the function header; with `pass` as its body it is valid code."""
    request, opening = text_of(row, "instruct_prompt"), text_of(row, "code_prompt")
    prompt = f"{opening.rstrip()}\n    pass\n"
    metadata = {"prompt": prompt, "test": text_of(row, "test"), "entry_point": text_of(row, "entry_point")}
    answer = opening + text_of(row, "canonical_solution", "")
    return Task(text_of(row, "task_id", str(number)), (Message("user", request),), request, answer, "", metadata)


def big_code_bench_conversation(row: Row) -> Messages:
    return _code_conversation(big_code_bench_task(row, 0))


def _code_conversation(task: Task) -> Messages:
    return (*task.messages, Message("assistant", f"```python\n{task.answer.strip()}\n```"))
