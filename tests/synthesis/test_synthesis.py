"""The best candidate for a turn continues the conversation, with the user's message of one of its futures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.launch.spec import building_spec
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.synthesis.synthesis import best_rollout, next_task, reply_of
from megatron_collab.types import Ending, Group, Message, Missing, Task
from tests.rollout.fakes import STOP, CharacterRenderer, FakePolicy, FakeUsers, config
from tests.rollout.test_group import FakeRewards

TASK = Task("t", (Message("system", "s"), Message("user", "hi")), "goal", "answer", "testing")


def group(says: str = "ok", share: float = 0.0, task: Task = TASK) -> Group:
    """Four candidates, the first of them malformed; the reward is the number at the end of the reply."""
    options = config(BuildDatasetConfig, futures=2, max_messages=14, max_user_turns=1, max_assistant_turns=2)
    options.reward.weights, options.build.candidates = {"right": 1.0}, 4
    options.reward.metrics = {"right": {"metric": "accuracy"}}
    options.build.proactive = share
    numbers = iter(range(4))

    def policy(prompt: str, seed: int) -> str:
        if prompt.count("<user>") > task.played // 2 + 1:
            return "later"
        number = next(numbers)
        return "" if number == 0 else f"{says} {number}"

    def user(goal: str, messages: Sequence[Message]) -> str:
        return STOP if "end" in messages[-1].content else f"and {messages[-1].content}"

    rewards = FakeRewards(lambda conversation: float(conversation.replies[0][-1]))
    player = FuturesPlayer(
        FakePolicy(policy), CharacterRenderer(), FakeUsers(user), rewards, building_spec(options).play
    )  # type: ignore[arg-type]
    return asyncio.run(player.play(task, "s"))


def test_the_best_reply_and_the_users_answer_to_it_are_the_next_prompt() -> None:
    candidates = group()
    chosen = best_rollout(candidates)
    assert chosen is not None and [message.content for message in reply_of(chosen)] == ["ok 3"]
    task = next_task(candidates, 14, random.Random(0))
    texts = ["s", "hi", "ok 3", "and ok 3"]
    assert task is not None and [message.content for message in task.messages] == texts
    assert (task.id, task.goal, task.played) == ("t", "goal", 2) and task.original == TASK
    further = next_task(group(task=task), 14, random.Random(0))
    assert further is not None and [message.content for message in further.messages] == [*texts, "ok 3", "and ok 3"]


def test_a_conversation_ends_when_its_user_ends_it_and_at_its_greatest_length() -> None:
    assert next_task(group("end"), 14, random.Random(0)) is None
    assert next_task(group(), 4, random.Random(0)) is not None and next_task(group(), 3, random.Random(0)) is None


def test_a_conversation_ends_if_every_candidate_is_malformed() -> None:
    candidates = group()
    malformed = Group(
        TASK, tuple(rollout for rollout in candidates.rollouts if rollout.start.ending is Ending.MALFORMED)
    )
    assert len(malformed.rollouts) == 1 and best_rollout(malformed) is None
    assert next_task(malformed, 14, random.Random(0)) is None
    silent = [rollout.reward.value for rollout in candidates.rollouts if isinstance(rollout.reward.value, Missing)]
    assert silent == []


def test_proactive_candidates_have_a_prompt_that_is_not_in_the_conversation() -> None:
    candidates = group(share=0.5)
    first = [rollout.start.messages[0].content for rollout in candidates.rollouts]
    assert first[2:] == ["s", "s"] and first[0] == first[1] and "You help a user over several turns" in first[0]
    task = next_task(candidates, 14, random.Random(0))
    assert task is not None and [message.content for message in task.messages] == ["s", "hi", "ok 3", "and ok 3"]


def test_candidates_are_dealt_to_assistants_that_play_their_own_futures() -> None:
    options = config(BuildDatasetConfig, futures=2, max_messages=14, max_user_turns=1, max_assistant_turns=2)
    options.reward.weights, options.build.candidates = {"right": 1.0}, 5
    options.reward.metrics = {"right": {"metric": "accuracy"}}
    options.build.proactive = 0.4
    options.build.assistants = {"ours": "policy", "m": "openai/m", "n": "served/n"}
    users, rewards = FakeUsers(lambda goal, messages: "go on"), FakeRewards(lambda conversation: 1.0)

    def player(name: str) -> FuturesPlayer:
        policy = FakePolicy(lambda prompt, seed: f"of {name}")
        return FuturesPlayer(policy, CharacterRenderer(), users, rewards, building_spec(options).play)  # type: ignore[arg-type]

    first = player("ours")
    first.candidate_players = {"ours": first, "m": player("m"), "n": player("n")}
    candidates = asyncio.run(first.play(TASK, "s"))
    order = ["ours", "m", "n", "ours", "m"]
    for name, rollout in zip(order, candidates.rollouts, strict=True):
        assert {reply for future in rollout.futures for reply in future.conversation.replies} == {f"of {name}"}
    assert [len(rollout.futures[0].conversation.replies) for rollout in candidates.rollouts] == [2] * 5
    proactive = ["You help a user" in rollout.start.messages[0].content for rollout in candidates.rollouts]
    assert proactive == [True, True, False, False, False]
