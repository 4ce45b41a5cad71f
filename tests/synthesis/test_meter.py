"""The cost of building conversations is printed: a bound first, then what is spent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_collab.launch.spec import run_spec
from megatron_collab.synthesis import meter
from megatron_collab.synthesis.meter import Meter
from tests.planning.test_llm_cost import TASK, options


def test_progress_lines_show_the_spent_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meter, "SAY_EVERY", 0)
    settings = options(futures=1, max_messages=6)
    settings.user.model, settings.reward.judge.model = "openai/user", "openai/judge"
    settings.llm.prices = {"openai/user": [1, 1], "openai/judge": [1, 1]}
    settings.llm.budget_usd = 0.01
    spent: Counter[str] = Counter({"calls": 7, "usd": 0.005, "unpriced": 0})  # by an earlier start

    built = Meter(settings, run_spec(settings), [TASK] * 100, "conversations", lambda: Counter(spent))
    first, budget = capsys.readouterr().out.splitlines()
    assert first.startswith("100 conversations: at most 1800 replies, 1000 user messages, 900 judgments; at most ")
    assert first.endswith(" USD if every message has its maximum length")
    assert budget.startswith("llm.budget_usd=0.01: the remaining 0.005 USD may not be enough; the program ends")

    for number in range(1, 4):
        spent["calls"] += 2
        spent["usd"] += 0.25
        built.turn(ended=number > 1)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"100 conversations: {done} done; {2 * done + 2} calls, {(done + 1) / 4} USD" for done in (1, 2)]

    spent["unpriced"] += 1
    assert built.line().endswith(", plus 1 calls of unknown price")


def test_recorded_answers_are_not_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = options(futures=1, max_messages=6)
    settings.user.model, settings.llm.replay = "openai/user", str(tmp_path)
    Meter(settings, run_spec(settings), [TASK], "conversations", lambda: Counter())
    assert "USD" not in capsys.readouterr().out
