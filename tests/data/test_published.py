"""`doctor --data` shows the rows of published data sets, and of users, as a person would read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from megatron_collab.commands.__main__ import run


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SOLUTION = r"We move by $\arctan$, so the answer is $\boxed{\left( 3, \frac{\pi}{2} \right)}$."
REPLY = {"from": "gpt", "value": "Hello."}
LIMIT = "Find the limit."
DIALOGUE = "\n\nHuman: What is 2+2?\n\nAssistant: A sum.\n\nHuman: And?\n\nAssistant: "

# name: columns of a row, and the lines that show it
PUBLISHED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "MATH-500": (
        {"problem": "Convert.", "solution": SOLUTION, "answer": r"\left( 3, \frac{\pi}{2} \right)"}
        | {"subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/807.json"},
        ["user: Convert.", r"answer: \left( 3, \frac{\pi}{2} \right)"],
    ),
    "MATH without an answer": (
        {"problem": "Convert.", "level": "Level 2", "type": "Algebra", "solution": SOLUTION},
        ["user: Convert.", r"answer: \left( 3, \frac{\pi}{2} \right)"],
    ),
    "AIME": ({"problem": "Convert.", "answer": 33, "id": 60}, ["user: Convert.", "answer: 33"]),
    "MetaMath": (
        {"type": "GSM_Rephrased", "query": "How many?", "original_question": "How much?"}
        | {"response": "We add 100 and 10.\n#### 110\nThe answer is: 110"},
        ["user: How many?", "answer: 110"],
    ),
    "DeepScaleR": (
        {"problem": LIMIT, "answer": "-\\frac{2}{3}", "solution": "1. We expand.\n2. We get $\\boxed{\\frac{1}{3}}$."},
        ["user: Find the limit.", r"answer: -\frac{2}{3}"],
    ),
    "OpenR1-Math": (
        {"problem": LIMIT, "solution": "## Solution.\n\nIt is 8.", "answer": "8", "problem_type": "Calculus"}
        | {"uuid": "u", "correctness_count": 1, "generations": ["<think>\nHm.\n</think>\n\n\\boxed{9}"]}
        | {"messages": [user(LIMIT), assistant("<think>\nHm, 9?\n</think>\n\nSo \\boxed{9}")]},
        ["user: Find the limit.", "answer: 8"],
    ),
    "UltraFeedback binarized": (
        {"prompt": "Why?", "prompt_id": "p", "chosen": [user("Why?"), assistant("Rain.")], "score_chosen": 8.5}
        | {"rejected": [user("Why?"), assistant("Snow.")], "score_rejected": 2.0}
        | {"messages": [user("Why?"), assistant("Rain.")]},
        ["pair with scores 8.5 and 2:", "user: Why?", "chosen", "assistant: Rain.", "rejected", "assistant: Snow."],
    ),
    "HH-RLHF": (
        {"chosen": DIALOGUE + "Four.", "rejected": DIALOGUE + "Five."},
        ["user: What is 2+2?", "assistant: A sum.", "user: And?", "assistant: Four.", "rejected", "assistant: Five."],
    ),
    "ShareGPT": (
        {"id": "x", "conversations": [{"from": "system", "value": ""}, {"from": "human", "value": "Hi"}, REPLY]},
        ["not read: empty system message (1)", "user: Hi", "answer: Hello."],
    ),
    "Alpaca": (
        {"instruction": "Name the odd word.", "input": "Red, blue, ten", "output": "Ten", "text": "Below is …"},
        ["user: Name the odd word. Red, blue, ten", "answer: Ten"],
    ),
    "Alpaca without input": (
        {"instruction": "Say yes.", "input": "", "output": "Yes"},
        ["user: Say yes.", "answer: Yes"],
    ),
    "verl": (
        {"data_source": "openai/gsm8k", "prompt": [user("How many?")], "ability": "math"}
        | {"reward_model": {"ground_truth": "72", "style": "rule"}}
        | {"extra_info": {"answer": "It is\n#### 72", "index": 0, "question": "How many clips?", "split": "train"}},
        ["user: How many?", "goal: How many clips?", "answer: 72", "metadata.index: 0", "metadata.split: train"],
    ),
    "CollabLLM": (
        {"prompt": [user("Solve it.")], "completion": "Which?", "conv_id": 3, "turn_id": 1, "score": 0.5}
        | {"single_turn_prompt": "Solve x + 1 = 3.", "single_turn_completion": "2"}
        | {"single_turn_metadata": {"level": "Level 1", "type": "Algebra"}, "sessions": [[user("Solve it.")]]},
        ["user: Solve it.", "goal: Solve x + 1 = 3.", "answer: 2", "metadata.level: Level 1", "metadata.type: Algebra"],
    ),
    "chat": (
        {"messages": [{"role": "developer", "content": "Be kind."}, user("Hi"), assistant("Hello.")], "tools": "null"},
        ["system: Be kind.", "user: Hi", "goal: Hi", "answer: Hello."],
    ),
    "Chinese": (
        {"question": "汽车" * 70, "answer": "答案是\n#### 42"},
        ["user: " + "汽车" * 70, "answer: 42"],
    ),
}


def shown(capsys: pytest.CaptureFixture[str], source: Path) -> list[str]:
    """The lines that are printed about a source, with single blanks."""
    assert run("doctor", ["--data", str(source)]) == 0
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_are_shown_as_they_would_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, suffix: str
) -> None:
    row, lines = PUBLISHED[name]
    file = tmp_path / f"rows{suffix}"
    cells = {column: json.dumps(value) if isinstance(value, list | dict) else value for column, value in row.items()}
    match suffix:
        case ".jsonl":
            file.write_text(json.dumps(row, ensure_ascii=False) + "\n")
        case ".json":
            file.write_text(json.dumps([row], indent=1))
        case ".parquet":
            Dataset.from_list([row]).to_parquet(file)
        case ".csv":
            Dataset.from_list([cells]).to_csv(file)
    printed = shown(capsys, file)
    following = iter(printed)
    assert all(line in following for line in lines), "\n".join(printed)


def test_gsm8k_and_human_eval_are_shown_as_they_would_be_read(
    capsys: pytest.CaptureFixture[str], dataset: Callable[[str], Path]
) -> None:
    printed = shown(capsys, dataset("gsm8k/test.jsonl"))
    assert [line for line in printed if line.startswith("answer:")][:3] == ["answer: 18", "answer: 3", "answer: 70000"]
    printed = shown(capsys, dataset("humaneval/HumanEval.jsonl.gz"))
    assert "task HumanEval/0: user llm" in printed and "metadata.entry_point: has_close_elements" in printed
    assert any(line.startswith("metadata.test: METADATA = {") for line in printed)
