"""The view of a run on a terminal: what it says, and that texts from outside cannot draw over it."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from megatron_collab.observability.step_view import StepView, small_curve

METRICS = {
    "reward": 0.5,
    "reward_se": 0.125,
    "score/accuracy": 0.75,
    "missing": 2.0,
    "count/user_failed": 0.0,
    "count/user_replies": 40.0,
    "count/user_cut": 3.0,
    "servers/judge_lost": 1.0,
    "servers/judge_back": 1.0,
    "llm/usd": 0.25,
    "llm/calls": 12.0,
    "tokens": 300.0,
    "loss": -0.125,
    "seconds/rollout": 9.0,
    "idle/servers": 0.375,
    "seconds/update": 3.0,
}


def drawn(view: StepView, width: int = 120) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(view)
    return stream.getvalue()


def test_the_view_says_where_the_run_is_and_how_it_does() -> None:
    view = StepView("booking", 200, 10)
    assert "step 10/200" in drawn(view) and "reward" not in drawn(view)
    view.record(10, METRICS)
    view.record(11, METRICS | {"reward": 1.0})
    view.evaluation("before: accuracy 0.20 [0.10, 0.30]")
    view.alarm("step 12: questions 3 (1 at the start)")
    text = drawn(view)
    for part in (
        *("booking", "step 12/200", "1.000 ± 0.125  ▁█", "accuracy 0.750", "loss -0.125"),
        *(
            "before: accuracy 0.20 [0.10, 0.30]",
            "rollout 9.0 s (75 %)",
            "servers idle 38 %",
            "25 trained tokens a second",
        ),
        *(
            "0.5 USD, 12 calls in the last step",
            "missing 2  count/user_cut 3  servers/judge_lost 1",
            "step 12: questions 3 (1 at the start)",
        ),
    ):
        assert part in text, part
    assert not any(name in text for name in ("user_failed", "user_replies", "judge_back")), "these are no faults"


def test_the_last_messages_of_a_conversation_are_text_and_are_cut() -> None:
    view = StepView("booking", 2, 0)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be kind"},
        *({"role": "user", "content": f"number {n}"} for n in range(4)),
        {"role": "assistant", "content": "[bold red]a[/] \x1b[2J\u202e sk-0123456789abcdefghij\nnext " + "x" * 10_000},
    ]
    view.conversation(messages)
    text = drawn(view, 500)
    assert "be kind" not in text and "number 0" not in text and "number 3" in text
    assert "[bold red]a[/] \\x1b[2J\\u202e *** next xxx" in text and "\x1b" not in text and "\u202e" not in text
    assert "…" in text and len(text) < 2000


@pytest.mark.parametrize(
    ("values", "curve"),
    [([], ""), ([1.0], "▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([0.0, math.nan, 1.0], "▁ █"), ([math.inf], " ")],
)
def test_the_curve_of_rewards(values: list[float], curve: str) -> None:
    assert small_curve(values) == curve
