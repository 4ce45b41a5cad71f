"""Metrics by name, and the checks before a run."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.reward import metrics
from megatron_collab.settings import RewardConfig
from megatron_collab.types import Conversation, Message
from tests.reward.fakes import about, play, score


def test_a_question_mark_is_asking() -> None:
    assert score("asks", about("6"), play(about("6"), "how many?", "so?", "6")) == 1.0
    assert score("asks", about("6"), play(about("6"), "6", "so?", "how many?")) == 0.0


def test_turn_rewards_are_summed_up_from_the_trained_turn_on() -> None:
    about_it = about("5")
    earlier = play(about_it, "one").add_reward(0.5).add_messages([Message("user", "so?")], ())
    later = play(about_it, "one", "so?", "two")
    assert score("turn_rewards", about_it, later) == 0.0
    both = Conversation(earlier.messages, (1,), later.turns, (0.5, -0.25))
    assert score("turn_rewards", about_it, both) == 0.25


def test_every_name_is_that_of_a_metric() -> None:
    for name in metrics.METRICS:
        metric_class = metrics.find_metric(name)
        assert issubclass(metric_class, metrics.Metric)
        defined = {getattr(metric_class, method) for method in ("score", "score_turns")}
        assert defined - {metrics.Metric.score, metrics.Metric.score_turns}
        assert all(map(asyncio.iscoroutinefunction, defined))


def test_a_name_that_no_metric_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"^reward.weights=accurac: no such name; known are .*; the nearest is accurac"
    ):
        metrics.ScoredMetric("accurac")
    with pytest.raises(ValueError, match=r"^reward.metrics.mine.metric=accurac: no such name"):
        metrics.ScoredMetric("mine", {"metric": "accurac"})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("token_amount", {"count": "bytes"}, "count=bytes: choose one of policy, cl100k, seen, words"),
        ("interactivity", {"rubric": "whole"}, "rubric=whole: choose one of holistic, parts"),
        ("bleu", {"level": "word"}, "level=word: choose one of token, character"),
        ("generative", {}, "lacks {conversation}"),
        ("generative", {"prompt": "{conversation} {anwser}"}, "unknown placeholder {anwser}; use {conversation}"),
        ("generative", {"prompt": "{conversation}", "low": 1, "high": 1}, "low must be below high"),
        ("reward_model", {}, "give the address of an SGLang server"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        metrics.ScoredMetric(name, settings)
    assert re.match(rf"reward\.metrics\.{name}[.:]", str(refused.value)) and message in str(refused.value)


def test_metrics_that_need_a_judge_say_so() -> None:
    def judged(name: str, **settings: object) -> bool:
        return metrics.ScoredMetric(name, settings).judged

    assert judged("interactivity") and judged("generative", prompt="{conversation}") and judged("bleu")
    assert not judged("bleu", extract=False) and not judged("accuracy") and not judged("token_amount")
    assert judged("accuracy", judge=True)


@pytest.mark.processes
def test_a_metric_of_a_file_reaches_another_process(tmp_path: Path) -> None:
    """By its path: a class of a file cannot be unpickled by its name."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from megatron_collab.reward.metrics import Metric\n"
        "class Mine(Metric):\n"
        "    @dataclass(frozen=True)\n"
        "    class Options:\n"
        "        words: int = 20\n"
    )
    config = RewardConfig(weights={"mine": 0.5}, metrics={"mine": {"metric": f"{file}:Mine", "words": 3}})
    read = "import pickle, sys; spec = pickle.load(sys.stdin.buffer); print(spec.metrics['mine'].options.words)"
    spec = pickle.dumps(reward_spec(config))
    done = subprocess.run([sys.executable, "-c", read], input=spec, capture_output=True, check=True)
    assert done.stdout == b"3\n"
