"""verl's reward functions as metrics, without an edit of their files."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.reward.metrics import Metric, ScoredMetric
from megatron_collab.runtime import verl
from megatron_collab.types import Task
from tests.reward.fakes import about, play, score

SCORES = '''
import asyncio, threading
from verl.utils.reward_score import gsm8k

GO = threading.Event()


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """verl's, of one answer."""
    if solution_str == "none":
        return None
    if solution_str == "slow":
        GO.wait(60)
    score = gsm8k.compute_score(solution_str, ground_truth, format_score=kwargs.get("format_score", 0.0))
    return {"score": score + 10 * (data_source == "tens") + extra_info["num_turns"] * 100, "format": 1}


async def of_messages(data_source, messages, ground_truth, extra_info, **kwargs):
    """CollabLLM's: words of the messages after the prompt."""
    await asyncio.sleep(0)
    since = messages[len(extra_info["prompt"]) :]
    assert since[0].role == since[0]["role"] == "assistant"
    assert extra_info["interaction_kwargs"]["single_turn_prompt"] == "the goal"
    return kwargs["factor"] * sum(len(message.content.split()) for message in since)


def of_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return []
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "scores.py"
    path.write_text(SCORES)
    return path


def of(file: Path, task: Task, *texts: str, function: str = "compute_score", **arguments: Any) -> Any:
    settings = {"function": f"{file}:{function}", "arguments": arguments}
    return score("verl", task, play(task, *texts), None, **settings)


def test_an_answer_is_scored_from_the_policys_words(file: Path) -> None:
    task = about("1,234".replace(",", ""))
    assert of(file, task, "it is #### 1,234") == 201.0  # two messages
    assert of(file, task, "#### 5", "sure?", "#### 1234.") == 401.0
    assert of(file, task, "#### 5", format_score=0.5) == 200.5
    assert of(file, replace(task, metadata={"data_source": "tens"}), "1234") == 210.0  # no ####


def test_a_conversation_is_scored_by_its_messages(file: Path) -> None:
    task = about("x", "one", "two", "three", goal="the goal")
    assert of(file, task, "a b", "c", "d", function="of_messages", factor=0.5) == 2.0


def test_failures_are_the_metrics_and_a_blocking_function_delays_nothing(file: Path) -> None:
    with pytest.raises(TypeError):
        of(file, about("1"), "none")
    metric: Metric = ScoredMetric("verl", {"function": f"{file}:compute_score"}).make(None)

    go = vars(sys.modules[verl.load(f"{file}:compute_score", "x").__module__])["GO"]

    async def scores() -> float:
        slow = asyncio.create_task(metric.score(about("1"), play(about("1"), "slow")))
        await asyncio.sleep(0)
        fast = await metric.score(about("1"), play(about("1"), "#### 1"))
        assert not slow.done()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return fast

    assert asyncio.run(scores()) == 201.0
    go.set()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("{}:of_batch", "function={}:of_batch: takes neither solution_str nor messages; give one that scores one"),
        ("{}:compute", "function={}:compute: {} has no compute; the nearest is compute_score"),
        ("", "function: is not set; give package.module:NAME or ./file.py:NAME"),
    ],
)
def test_other_functions_are_refused_before_the_run(file: Path, function: str, why: str) -> None:
    metric = ScoredMetric("verl", {"function": function.format(file)})
    try:
        reason = metric.kind.unavailable(metric.options)
    except ValueError as error:
        reason = str(error)
    assert str(reason).startswith(why.format(file, file))
