from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_collab.environments import gsm8k
from megatron_collab.environments.gsm8k import Gsm8k
from megatron_collab.settings.extension import NoOptions


@pytest.mark.parametrize(
    ("problem", "question", "facts"),
    [
        ("Ann has 2. Bob has 3. How many?", "How many?", ["Ann has 2.", "Bob has 3."]),
        ("Mr. Lee pays $1.50 at 5 p.m. daily. What does Mrs. Lee pay?", "What does Mrs. Lee pay?",
         ["Mr. Lee pays $1.50 at 5 p.m. daily."]),
        ("It is 24 oz. How long? (Round up.)", "How long?", ["It is 24 oz.", "(Round up.)"]),
        ('He said "go!" They went. How far?', "How far?", ['He said "go!"', "They went."]),
        ("She has 5. Calculate her total.", "Calculate her total.", ["She has 5."]),
        ("If Ann has 2 and Bob 3, how many?", "If Ann has 2 and Bob 3, how many?", []),
    ],
)  # fmt: skip
def test_a_problem_is_cut_into_question_and_facts(problem: str, question: str, facts: list[str]) -> None:
    assert gsm8k.cut(problem) == (question, facts)


@pytest.mark.parametrize(("name", "uncut"), [("train", 76), ("test", 16)])
def test_every_row_of_gsm8k_keeps_every_word(name: str, uncut: int, dataset: Callable[[str], Path]) -> None:
    file = dataset(f"gsm8k/{name}.jsonl")
    tasks = gsm8k.tasks(file)
    problems = [json.loads(line)["question"] for line in file.read_text().splitlines()]
    assert len(tasks) == len(problems)
    for task, problem in zip(tasks, problems, strict=True):
        goal = json.loads(task.goal)
        assert goal["question"].strip() and [message.content for message in task.messages] == [goal["question"]]
        assert sorted([*" ".join(goal["facts"]).split(), *goal["question"].split()]) == sorted(problem.split())
        Fraction(task.answer)
        assert task.user == "reveal"
    assert sum(not json.loads(task.goal)["facts"] for task in tasks) == uncut


@pytest.mark.parametrize("source", [None, "/nothing/there"])
def test_a_missing_source_is_named(tmp_path: Path, source: str | None) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"data\.path.*train\.jsonl"):
        Gsm8k(NoOptions()).make(tmp_path, 0, source)
