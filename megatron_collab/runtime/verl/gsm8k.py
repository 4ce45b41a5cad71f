"""verl's score of answers to GSM8K, as its documentation describes it."""

from __future__ import annotations

import re as _re

_NUMBER = _re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_ANSWER = _re.compile(r"#### (-?[\d.,]+)")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number after the last `####` (strict), or the last number (flexible), without commas; None without one."""
    numbers = (_ANSWER if method == "strict" else _NUMBER).findall(solution_str)
    return numbers[-1].replace(",", "").rstrip(".") if numbers else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the number is `ground_truth`, `format_score` if it is another one, 0 without a number."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
