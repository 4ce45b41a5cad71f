"""The cost of building conversations is printed: a bound first, then what is spent and what is expected to come."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_collab import patches
from megatron_collab.launch.spec import run_spec
from megatron_collab.synthesis import meter
from megatron_collab.synthesis.meter import Meter
from tests.planning.test_llm_cost import TASK, options


def test_progress_lines_show_spent_and_expected_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "apply", lambda *_: None)
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

    turns = [number % 3 + 1 for number in range(100)]  # of each conversation
    built._weights = costs = [1.0, 2.0, 3.0]
    price = sum(sum(costs[:count]) for count in turns)
    spent["usd"] += 100 * costs[0] / 2
    for turn in range(3):
        for number in range(100):
            if turns[number] > turn:  # half of a turn is paid before it is finished
                over = turns[number] == turn + 1
                spent["calls"] += 1
                spent["usd"] += (costs[turn] + (0 if over else costs[turn + 1])) / 2
                built.turn(number, over, played=True)
    printed = capsys.readouterr().out.splitlines()
    for calls, rel in ((20, 0.3), (100, 0.25), (140, 0.1), (180, 0.1)):
        (line,) = (line for line in printed if f"; {calls} calls" in line)
        paid, to_come = (float(text.split()[-1]) for text in line.split(" USD")[:2])
        assert to_come == pytest.approx(price - paid, rel=rel)
    assert printed[-1] == f"100 conversations: 100 done; {sum(turns)} calls, {price:.4g} USD"

    spent["unpriced"] += 1
    assert built.line().endswith(", plus 1 calls of unknown price")


def test_recorded_answers_are_not_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = options(futures=1, max_messages=6)
    settings.user.model, settings.llm.replay = "openai/user", str(tmp_path)
    Meter(settings, run_spec(settings), [TASK], "conversations", lambda: Counter())
    assert "USD" not in capsys.readouterr().out
