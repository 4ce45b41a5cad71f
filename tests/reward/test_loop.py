from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError

from megatron_collab.config import RewardConfig
from megatron_collab.reward.loop import RewardClient, RewardWorker, Scores
from megatron_collab.types import Conversation, Ending, Finish, Message, Missing, Score, Task, Turn

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
WEIGHTS = {"asks": 1.0, "token_amount": -0.1}


def ended(text: str, ending: Ending = Ending.TURN_LIMIT, error: str = "") -> Conversation:
    ids = tuple(range(len(text)))
    turn = Turn((1,), ids, (-1.0,) * len(ids), 0, Finish.STOP, text)
    return Conversation(TASK.messages, (1,)).add_turn(turn).end(ending, error)


def score(worker: RewardWorker, *conversations: Conversation) -> list[Scores]:
    return asyncio.run(worker.score([(TASK, conversation) for conversation in conversations]))


def test_every_conversation_gets_the_scores_of_every_metric_that_applies() -> None:
    worker = RewardWorker(RewardConfig(weights={**WEIGHTS, "booking_right": 1.0}))
    assert score(worker, ended("why?"), ended("so")) == [
        {"asks": 1.0, "token_amount": 4.0},
        {"asks": 0.0, "token_amount": 2.0},
    ]


def test_half_a_conversation_has_no_scores() -> None:
    broken = ended("why?", Ending.ERROR, "user is down")
    down = Missing("user is down")
    assert score(RewardWorker(RewardConfig(weights=WEIGHTS)), broken) == [{"asks": down, "token_amount": down}]


def test_a_metric_that_takes_too_long_is_missing_and_the_others_are_not() -> None:
    async def slow(task: Task, conversation: Conversation, trained_turn: int) -> Score | None:
        await asyncio.sleep(30)
        return 1.0

    worker = RewardWorker(RewardConfig(weights=WEIGHTS, timeout=0.05))
    worker.metrics["slow"] = slow
    (scores,) = score(worker, ended("why?"))
    assert scores == {"asks": 1.0, "token_amount": 4.0, "slow": Missing("no score within reward.timeout=0.05 s")}


class LocalWorker:
    """A RewardWorker's handle without Ray: `worker.score.remote(pairs)` can be awaited."""

    def __init__(self, fault: Exception | None = None, wait: float = 0.0) -> None:
        self.score = self
        self.fault = fault
        self.wait = wait
        self.calls: list[int] = []

    async def remote(self, pairs: Sequence[tuple[Task, Conversation]]) -> list[Scores]:
        self.calls.append(len(pairs))
        await asyncio.sleep(self.wait)
        if self.fault:
            raise self.fault
        return [{"asks": float(len(conversation.turns[0].text))} for _, conversation in pairs]


def ask_all(client: RewardClient, *texts: str) -> list[Scores]:
    async def scores() -> list[Scores]:
        return await asyncio.gather(*(client.score(TASK, ended(text)) for text in texts))

    return asyncio.run(scores())


def test_conversations_that_end_together_share_a_call_and_keep_their_scores() -> None:
    worker = LocalWorker()
    texts = ["x" * n for n in range(1, 40)]
    assert ask_all(RewardClient([worker], RewardConfig(weights=WEIGHTS)), *texts) == [{"asks": n} for n in range(1, 40)]
    assert worker.calls == [39]


def test_scoring_begins_when_a_future_ends() -> None:
    """An early conversation has its score while a later one is still played."""
    worker = LocalWorker()
    client = RewardClient([worker], RewardConfig(weights=WEIGHTS))

    async def play() -> Scores:
        return await client.score(TASK, ended("early"))

    async def early_and_late() -> tuple[Scores, bool]:
        late = asyncio.create_task(asyncio.sleep(5))
        scores = await play()
        running = not late.done()
        late.cancel()
        return scores, running

    assert asyncio.run(early_and_late()) == ({"asks": 5.0}, True)


def test_the_batch_of_a_dead_worker_goes_to_another() -> None:
    dead, alive = LocalWorker(fault=RayActorError()), LocalWorker()
    assert ask_all(RewardClient([dead, alive], RewardConfig(weights=WEIGHTS)), "one") == [{"asks": 3.0}]
    assert (dead.calls, alive.calls) == ([1], [1])


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (LocalWorker(fault=RayActorError()), "the RewardWorkers died"),
        (LocalWorker(wait=30), r"no answer within 0.1 s (twice reward.timeout)"),
    ],
)
def test_without_a_worker_scores_are_missing(worker: Any, why: str) -> None:
    client = RewardClient([worker], RewardConfig(weights=WEIGHTS, timeout=0.05))
    (scores,) = ask_all(client, "one")
    assert set(scores) == set(WEIGHTS)
    assert all(isinstance(score, Missing) and why in score.why for score in scores.values())


def test_a_bug_in_a_metric_is_not_taken_for_an_outage() -> None:
    client = RewardClient([LocalWorker(fault=KeyError("bug"))], RewardConfig(weights=WEIGHTS))
    with pytest.raises(KeyError, match="bug"):
        ask_all(client, "one", "two")
