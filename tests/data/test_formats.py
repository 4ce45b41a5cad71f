"""Published rows: recognized by their columns, and read as tasks, conversations and pairs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_collab.data.answers import final_answer
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.data.examples import AUTO, RowFormat, load_conversations, load_tasks
from megatron_collab.data.formats import FORMATS, recognize
from megatron_collab.data.messages import Unfit
from megatron_collab.data.survey import survey
from megatron_collab.environments import gsm8k
from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.reward.metrics.pass_rate import PassRate
from megatron_collab.reward.metrics.rubric import criteria_of
from megatron_collab.settings import ConfigError
from megatron_collab.settings.schema import FORMATS as NAMES
from megatron_collab.types import Conversation, Finish, Message, Task, Turn

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be kind."}
METRICS_PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"
COLLABLLM = {
    "prompt": [USER, ASSISTANT, {"role": "user", "content": "more"}],
    "completion": "Sure.",
    "conv_id": 7,
    "score": 0.5,
    "single_turn_prompt": "What is 2 + 2?",
    "single_turn_completion": "4",
    "single_turn_metadata": {"level": "1"},
    "turn_id": 3,
    "sessions": [[USER]],
    "rewards": {"accuracy": [1.0]},
}
RECIPE = {
    "prompt": [SYSTEM, USER],
    "ground_truth": "4",
    "raw_prompt": [SYSTEM, USER],
    "extra_info": {
        "interaction_kwargs": {"name": "collabllm", "single_turn_prompt": "What is 2 + 2?", "task_desc": "math"},
        "single_turn_metadata": {"test": "assert f() == 4"},
        "sessions": [[USER]],
        "prompt": [SYSTEM, USER],
    },
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "data_source": "collabllm",
    "agent_name": "collabllm_agent",
    "index": "abc",
}
BIG_CODE_BENCH = {
    "task_id": "BigCodeBench/0",
    "complete_prompt": "import math\n\ndef task_func(x):\n    '''Root.'''\n",
    "instruct_prompt": "Write task_func(x), the square root of x.",
    "canonical_solution": "    return math.sqrt(x)\n",
    "code_prompt": "import math\n\ndef task_func(x):\n",
    "test": "import unittest\nclass TestCases(unittest.TestCase):\n"
    "    def test_root(self):\n        self.assertEqual(task_func(9), 3)\n",
    "entry_point": "task_func",
}


def loaded(folder: Path, load, *rows: dict, format: RowFormat = AUTO):
    write_jsonl(folder / "rows.jsonl", rows)
    return load(folder / "rows.jsonl", format=format)


def texts(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


def test_the_formats_are_those_of_the_setting() -> None:
    assert ("auto", *FORMATS) == NAMES


@pytest.mark.parametrize(
    ("format", "row", "goal", "answer"),
    [
        ("collabllm", COLLABLLM, "What is 2 + 2?", "4"),
        ("recipe", RECIPE, "What is 2 + 2?", "4"),
        ("question_answer", {"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004"}, "2 + 2?", "1004"),
        ("problem_solution", {"problem": "P", "solution": r"So $\boxed{\frac{1}{2}}$."}, "P", r"\frac{1}{2}"),
        ("messages", {"messages": [SYSTEM, USER, ASSISTANT]}, "hi", "hello"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "hi", ""),
        ("preference", {"prompt": "hi", "chosen": "hello", "rejected": "no"}, "hi", ""),
        ("bigcodebench", BIG_CODE_BENCH, BIG_CODE_BENCH["instruct_prompt"], None),
        ("prompt", {"prompt": "2 + 2?", "answer": 4}, "2 + 2?", "4"),
        ("prompt", {"prompt": [SYSTEM, USER], "label": "4"}, "hi", "4"),
        ("prompt", {"prompt": [USER], "solution": r"So $\boxed{4}$."}, "hi", "4"),
        ("prompt_completion", {"prompt": "2 + 2?", "completion": "4"}, "2 + 2?", "4"),
        ("task", {"prompt": "hi", "goal": "2 + 2?", "answer": 4}, "2 + 2?", "4"),
        ("messages", {"messages": [{**USER, "content": [{"type": "text", "text": "hi"}]}, ASSISTANT]}, "hi", "hello"),
    ],
)
def test_a_published_row_is_a_task(tmp_path: Path, format: str, row: dict, goal: str, answer: str | None) -> None:
    tasks = loaded(tmp_path, load_tasks, row)
    assert tasks.format == format and all(column in tasks.why for column in FORMATS[format].columns)
    (task,) = tasks
    assert task.goal == goal and task.messages[-1].role == "user"
    assert task.user == ("collabllm?" if format == "recipe" else "")
    if format != "sharegpt" and answer is not None:
        assert task.answer == answer
    forced = loaded(tmp_path, load_tasks, row, format=RowFormat(format))
    assert list(forced) == [task] and forced.why == f"data.format={format}"


@pytest.mark.parametrize(
    ("columns", "metadata", "unread"),
    [
        ({}, {}, ""),
        ({"reward_model": {"ground_truth": "4", "style": "rule"}}, {}, ""),
        ({"reward_model": {"ground_truth": "4", "characters": ["Ann"], "note": None}}, {"characters": ["Ann"]}, ""),
        ({"reward_model": '{"ground_truth": "4", "tests": {"n": 1}}'}, {"tests": {"n": 1}}, ""),
        ({"reward_model": "gpt"}, "gpt", ""),
        ({"ability": "math", "images": []}, {}, "not read: column ability (1)"),
        ({"tools_kwargs": {"f": 1}, "raw_prompt_ids": [1]}, {}, "column raw_prompt_ids (1), column tools_kwargs (1)"),
    ],
)
def test_no_part_of_a_row_of_verl_is_dropped_silently(
    tmp_path: Path, columns: dict[str, Any], metadata: dict[str, Any] | str, unread: str
) -> None:
    """What reward_model holds besides the answer is metadata; other columns are named."""
    row = {"prompt": [USER], "extra_info": {"index": 1}, "data_source": "d", **columns}
    tasks = loaded(tmp_path, load_tasks, row)
    expected = {"index": 1, "data_source": "d"} | ({"reward_model": metadata} if metadata else {})
    assert tasks.format == "recipe" and tasks[0].metadata == expected
    report = survey(tasks, 9, lambda task: 0, lambda task: 0).unread
    assert unread in report and bool(report) == bool(unread)


@pytest.mark.parametrize(
    ("columns", "answer", "unread"),
    [
        ({"label": True}, "", "not read: column label (1)"),
        ({"label": ["a"], "solution": ["4"]}, "", "not read: column label (1), column solution (1)"),
        ({"label": {"a": 1}, "solution": "4"}, "4", "not read: column label (1)"),
        ({"label": None, "solution": []}, "", ""),
        ({"label": 0.5}, "0.5", ""),
    ],
)
def test_labels_and_solutions_that_are_no_texts_are_named_as_unread(
    tmp_path: Path, columns: dict, answer: str, unread: str
) -> None:
    tasks = loaded(tmp_path, load_tasks, {"prompt": "q", **columns})
    assert tasks.format == "prompt" and [task.answer for task in tasks] == [answer]
    assert survey(tasks, 9, lambda task: 0, lambda task: 0).unread == unread


HEALTH_BENCH = {
    "prompt": [USER, ASSISTANT, {"role": "user", "content": "It hurts."}],
    "prompt_id": "a",
    "rubrics": [
        {"criterion": "Asks since when.", "points": 5, "tags": ["level:example"]},
        {"criterion": "Names a dose.", "points": -8, "tags": []},
    ],
    "example_tags": ["theme:x"],
    "canary": "c",
}
RUBRICS_AS_REWARDS = {
    "question": "Which nerve?",
    "reference_answer": "The ulnar nerve.",
    "question_source": "s",
    "rubric": [
        {"title": "Nerve", "description": "Names the ulnar nerve.", "weight": 5},
        {"title": "Other", "description": "Names another nerve.", "weight": -8},
    ],
    "rubric_count": 2,
}
OF_THE_DOCS = next(line for line in METRICS_PAGE.read_text().splitlines() if line.startswith('    {"prompt"'))


@pytest.mark.parametrize(
    ("row", "format", "goal", "points"),
    [
        (HEALTH_BENCH, "prompt", "hi", [5, -8]),
        (HEALTH_BENCH | {"rubrics": json.dumps(HEALTH_BENCH["rubrics"])}, "prompt", "hi", [5, -8]),
        (RUBRICS_AS_REWARDS, "question_reference", "Which nerve?", [5, -8]),
        (json.loads(OF_THE_DOCS), "prompt", "Plan my trip.", [3, -2]),
    ],
    ids=["HealthBench", "JSON text", "Rubrics as Rewards", "docs"],
)
def test_rows_with_a_rubric_are_tasks_that_the_metric_scores(
    tmp_path: Path, row: dict, format: str, goal: str, points: list[int]
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [row])
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    rubric = ScoredMetric("rubric", {})
    for file in ("rows.jsonl", "rows.parquet"):
        tasks = load_tasks(tmp_path / file)
        (task,) = tasks
        assert (tasks.format, task.goal, task.messages[-1].role) == (format, goal, "user")
        assert rubric.lacks(task) is None
        rubric.check_task(task)
        assert [criterion.points for criterion in criteria_of(rubric.options, task)] == points
        assert list(tasks.unread(row)) == []


def test_metadata_is_read_beside_the_columns_of_any_format(tmp_path: Path) -> None:
    (task,) = loaded(tmp_path, load_tasks, {"question": "q", "answer": "a", "metadata": '{"persona": "p"}'})
    assert task.metadata == {"persona": "p"}
    tasks = loaded(tmp_path, load_tasks, {"question": "q", "answer": "a", "metadata": "from a forum"})
    assert [task.metadata for task in tasks] == [{}]
    assert survey(tasks, 9, lambda task: 0, lambda task: 0).unread == "not read: column metadata (1)"


def test_an_answer_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"answer is .*; give a text or a number"):
        list(loaded(tmp_path, load_tasks, {"prompt": "q", "answer": True, "label": "4"}))


def test_what_metrics_and_users_need_is_in_the_metadata(tmp_path: Path) -> None:
    (task,) = loaded(tmp_path, load_tasks, COLLABLLM)
    assert texts(task.messages)[-1] == ("user", "more") and task.metadata == {"level": "1"}
    (task,) = loaded(tmp_path, load_tasks, RECIPE)
    assert (task.id, task.messages[0].role) == ("abc", "system")
    assert task.metadata == {
        "test": "assert f() == 4",
        "interaction_kwargs": RECIPE["extra_info"]["interaction_kwargs"],
        "data_source": "collabllm",
        "task_desc": "math",
    }


@pytest.mark.parametrize(
    ("format", "row", "last"),
    [
        ("collabllm", COLLABLLM, "Sure."),
        ("recipe_sft", {"prompt": [SYSTEM, USER, ASSISTANT]}, "hello"),
        ("messages", {"messages": [USER, ASSISTANT]}, "hello"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "yo"),
        ("question_answer", {"question": "2 + 2?", "answer": "4"}, "4"),
        ("question_answer", {"question": "2 + 2?", "answer": 4}, "4"),
        ("prompt_completion", {"prompt": "hi", "completion": "hello"}, "hello"),
        ("prompt_completion", {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, "hello"),
        ("problem_solution", {"problem": "P", "solution": "S"}, "S"),
        ("preference", {"prompt": "hi", "chosen": "hello", "rejected": "no"}, "hello"),
        ("preference", {"prompt": "hi", "chosen": "hello", "rejected": "no", "messages": [USER, ASSISTANT]}, "hello"),
        ("alpaca", {"instruction": "2 + 2?", "output": "4", "history": []}, "4"),
        ("query_response", {"query": "2 + 2?", "response": "It is 4"}, "It is 4"),
        ("preference", {"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "no"}]}, "hello"),
    ],
)
def test_a_published_row_is_a_conversation(tmp_path: Path, format: str, row: dict, last: str) -> None:
    conversations = loaded(tmp_path, load_conversations, row)
    (messages,) = conversations
    assert conversations.format == format
    assert [message.role for message in messages][-2:] == ["user", "assistant"] and messages[-1].content == last


def test_a_pair_has_the_better_reply_first() -> None:
    pair = FORMATS["preference"].pair
    assert pair is not None
    whole = {"chosen": [USER, ASSISTANT], "rejected": [USER, {**ASSISTANT, "content": "no"}], "prompt": "hi"}
    words = {"chosen": "\n\nHuman: hi\n\nAssistant: hello", "rejected": "\n\nHuman: hi\n\nAssistant: no"}
    columns = {"question": "hi", "chosen": "hello", "rejected": "no", "system": ""}
    apart = {"prompt": [USER], "chosen": [ASSISTANT], "rejected": "no", "score_chosen": 9, "score_rejected": 2.5}
    for row, scores in ((whole, None), (words, None), (columns, None), (apart, (9.0, 2.5))):
        read = pair(row)
        assert texts(read.prompt) == [("user", "hi")] and read.scores == scores
        assert (read.chosen[0].content, read.rejected[0].content) == ("hello", "no")
    assert texts(pair({**columns, "system": "Be kind."}).prompt) == [("system", "Be kind."), ("user", "hi")]
    follow_up = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: more\n\nAssistant: {}"
    read = pair({side: follow_up.format(side) for side in ("chosen", "rejected")})
    assert [message.content for message in read.prompt] == ["hi", "hello", "more"] and read.rejected[0].content == (
        "rejected"
    )
    for row, reason in (
        ({"prompt": [USER, ASSISTANT], "chosen": "a", "rejected": "b"}, "replies of the assistant to the same message"),
        ({**words, "rejected": "\n\nHuman: hi\n\nAssistant:"}, "that have an empty message"),
        ({**words, "rejected": "\n\nHuman: hi\n\nHuman: you\n\nAssistant: no"}, "not user and assistant in turn"),
    ):
        with pytest.raises(Unfit, match=reason):
            pair(row)


def test_an_answer_may_be_a_number_in_some_rows(tmp_path: Path) -> None:
    """The library then reads numbers in all rows."""
    rows = [{"prompt": [USER], "goal": "g", "answer": answer} for answer in ("1", 4, 2.5)]
    assert [task.answer for task in loaded(tmp_path, load_tasks, *rows)] == ["1", "4", "2.5"]


def test_content_that_is_no_text_is_refused_by_its_type(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    rows = {"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
    with pytest.raises(ValueError, match="row 1: messages has content of type 'image_url'; only text can be read"):
        list(loaded(tmp_path, load_conversations, {"messages": list(rows)}))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([("gpt", "yo"), ("human", "hi")], "that are not user and assistant in turn"),
        ([("human", "hi"), ("gpt", "")], "that have an empty message"),
    ],
)
def test_a_shared_conversation_that_teaches_nothing_is_dropped(turns: list[tuple[str, str]], reason: str) -> None:
    row = {"conversations": [{"from": side, "value": text} for side, text in turns]}
    with pytest.raises(Unfit, match=reason):
        FORMATS["sharegpt"].conversation(row)  # type: ignore[misc]


def test_a_candidate_without_words_is_dropped() -> None:
    for change in ({"completion": " "}, {"prompt": [*COLLABLLM["prompt"][:2], {"role": "user", "content": ""}]}):
        with pytest.raises(Unfit, match="empty"):
            FORMATS["collabllm"].conversation({**COLLABLLM, **change})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1 + 1\n#### 1,234", "1234"),
        (r"\boxed{1} and \boxed{\text{a}{b}}", r"\text{a}{b}"),
        (r"\boxed{open", r"\boxed{open"),
        (" 42 ", "42"),
    ],
)
def test_the_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answers", "expected"), [([4], "4"), ([4, None], "4"), ([2.5], "2.5"), (["4"], "4"), ([1e22], "1" + "0" * 22)]
)
def test_a_table_may_have_numbers_for_answers(tmp_path: Path, answers: list[Any], expected: str) -> None:
    """A column of whole numbers with a gap has fractions."""
    table = pa.table({"question": ["2 + 2?"] * len(answers), "answer": answers})
    column = table["answer"].cast(pa.float64()) if None in answers else table["answer"]
    pq.write_table(table.set_column(1, "answer", column), tmp_path / "rows.parquet")
    assert load_tasks(tmp_path / "rows.parquet")[0].answer == expected


def test_columns_of_no_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        loaded(tmp_path, load_tasks, {"a": 1, "b": 2})
    message = str(refusal.value)
    assert message.startswith(f"data.train={tmp_path}/rows.jsonl: the columns a, b match no known format of tasks")
    for load, row, fault in (
        (load_tasks, {"prompt": [USER, ASSISTANT]}, "recipe_sft, which train.stage=sft reads as conversations"),
        (load_conversations, {"prompt": [USER], "goal": "g"}, "task, which train.stage=rl reads as tasks"),
    ):
        with pytest.raises(ValueError, match=f"these are rows of the format {fault}"):
            loaded(tmp_path, load, row)
    with pytest.raises(ConfigError, match=r"data\.format=text: reads no conversations; there are preference, messages"):
        recognize("text", ["text"], {"text": "a"}, "conversation", "data.train=x")


def test_all_of_gsm8k(dataset: Callable[[str], Path]) -> None:
    file = dataset("gsm8k/test.jsonl")
    tasks = load_tasks(file)
    assert tasks.format == "question_answer" and len(tasks) == 1319
    assert [task.answer for task in tasks] == [task.answer for task in gsm8k.tasks(file)]


@pytest.mark.processes
def test_reference_solutions_of_human_eval_pass(dataset: Callable[[str], Path]) -> None:
    """Compressed as published; the sandbox runs the first few of all 164."""
    file = dataset("humaneval/HumanEval.jsonl.gz")
    tasks, conversations = load_tasks(file), load_conversations(file)
    assert tasks.format == conversations.format == "humaneval" and len(list(tasks)) == 164
    assert {passed(task, conversation) for task, conversation in zip(tasks[:6], conversations[:6], strict=True)} == {
        1.0
    }
    assert passed(tasks[0], conversations[1]) == 0.0


@pytest.mark.processes
def test_reference_solutions_of_big_code_bench_pass(tmp_path: Path) -> None:
    """The whole function, and the function without the imports of the task."""
    (task,) = loaded(tmp_path, load_tasks, BIG_CODE_BENCH)
    (conversation,) = loaded(tmp_path, load_conversations, BIG_CODE_BENCH)
    assert passed(task, conversation) == 1.0
    for code, score in (("def task_func(x):\n    return math.sqrt(x)", 1.0), ("def task_func(x):\n    return x", 0.0)):
        assert passed(task, (Message("assistant", f"```python\n{code}\n```"),)) == score


def passed(task: Task, replied: tuple[Message, ...]) -> float:
    """Score of the last of `replied` by the metric pass_rate."""
    turn = Turn((1,), (2,), (-1.0,), (0,), Finish.STOP, replied[-1].content)
    conversation = Conversation(task.messages, (1,)).add_turn(turn)
    score = asyncio.run(PassRate(PassRate.Options(), judge=None).score(task, conversation))  # type: ignore[arg-type]
    assert isinstance(score, float), score
    return score


def test_earlier_turns_beside_an_instruction_are_refused(tmp_path: Path) -> None:
    row = {"instruction": "And 3 + 3?", "output": "6", "history": [["2 + 2?", "4"]]}
    with pytest.raises(ValueError, match="row 1: history has earlier turns, which are not read"):
        list(loaded(tmp_path, load_conversations, row))
