from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.inference.client import EngineError
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.tools.toolbox import ConversationTools
from megatron_collab.types import Conversation, Ending, Failed, Future, Group, Message, Missing, Score, Task
from tests.rollout.fakes import STOP, CharacterRenderer, FakePolicy, FakeUsers, config, encode

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")


class FakeRewards:
    """Scores a conversation with `right(conversation)`; keeps the conversations that it scored."""

    def __init__(self, right: Callable[[Conversation], Score]) -> None:
        self.right = right
        self.conversations: list[Conversation] = []

    async def future(self, task: Task, conversation: Conversation) -> Future:
        self.conversations.append(conversation)
        if conversation.ending in (Ending.ERROR, Ending.DEADLINE):
            return Future(conversation, {"right": Missing(conversation.error)})
        return Future(conversation, {"right": self.right(conversation)})


def make_player(
    policy: FakePolicy, rewards: FakeRewards, rollouts: int = 4, mode: str = "mr", **rollout: Any
) -> FuturesPlayer:
    options = config(**rollout)
    options.reward.weights, options.reward.metrics = {"right": 1.0}, {"right": {"metric": "accuracy"}}
    options.reward.mode = mode
    options.train.rollouts_per_prompt = rollouts

    def user(goal: str, messages: Sequence[Message]) -> str:
        return f"bye {STOP}" if messages[-1].content == "end" else "go on"

    return FuturesPlayer(policy, CharacterRenderer(), FakeUsers(user), rewards, play_spec(options))  # type: ignore[arg-type]


def play(policy: FakePolicy, rewards: FakeRewards, **options: Any) -> Group:
    return asyncio.run(make_player(policy, rewards, **options).play(TASK, "s"))


def by_seed(prompt: str, seed: int) -> str:
    return "ok" if seed % 2 else "no"


def last_is_ok(conversation: Conversation) -> Score:
    return float(conversation.replies[-1] == "ok")


def test_every_rollout_has_its_futures_and_the_mean_of_their_scores() -> None:
    group = play(FakePolicy(by_seed), FakeRewards(last_is_ok), futures=5)
    assert len(group.rollouts) == 4
    for rollout in group.rollouts:
        assert len(rollout.futures) == 5
        scores = [future.scores["right"] for future in rollout.futures]
        assert rollout.reward.value == pytest.approx(sum(map(float, scores)) / 5)  # type: ignore[arg-type]
        for future in rollout.futures:
            assert future.conversation.turns[0] == rollout.start.turns[0]
            assert len(future.conversation.turns) == 3


def test_a_malformed_turn_is_penalized_and_has_no_futures() -> None:
    policy = FakePolicy(lambda prompt, seed: "" if seed % 2 else "ok")
    rewards = FakeRewards(last_is_ok)
    group = play(policy, rewards, rollouts=8)
    malformed = [rollout for rollout in group.rollouts if rollout.start.ending is Ending.MALFORMED]
    assert 0 < len(malformed) < 8
    for rollout in malformed:
        assert rollout.reward.value == -1.0
        assert [future.conversation for future in rollout.futures] == [rollout.start]
    assert len(rewards.conversations) == 3 * (8 - len(malformed))


def test_truncation_does_not_win_against_a_long_reply() -> None:
    policy = FakePolicy(lambda prompt, seed: "" if seed % 2 else "ok")
    long = FakeRewards(lambda conversation: -3.0)
    for worst, expected in ((False, -1.0), (True, -3.0)):
        player = make_player(policy, long, rollouts=8)
        player.reward = replace(player.reward, malformed_worst=worst)
        rollouts = asyncio.run(player.play(TASK, "s")).rollouts
        assert {rollout.reward.value for rollout in rollouts if not rollout.malformed} == {-3.0}
        assert {rollout.reward.value for rollout in rollouts if rollout.malformed} == {expected}


def test_without_a_penalty_malformed_turns_are_played_on() -> None:
    player = make_player(FakePolicy(lambda prompt, seed: ""), FakeRewards(last_is_ok))
    player.strict = False
    for rollout in asyncio.run(player.play(TASK, "s")).rollouts:
        assert [len(future.conversation.turns) for future in rollout.futures] == [3, 3, 3]


def test_an_evaluation_sees_what_a_user_would_see() -> None:
    rewards = FakeRewards(lambda conversation: float(len(conversation.turns)))
    of_training = make_player(FakePolicy(lambda prompt, seed: ""), rewards, mode="single_turn").spec
    spec = of_training.for_set(EvaluationSet("tasks.jsonl", samples=2))
    player = make_player(FakePolicy(lambda prompt, seed: ""), rewards)
    player = FuturesPlayer(player.policy, player.renderer, player.users, player.rewards, spec)
    group = asyncio.run(player.play(TASK, "s"))
    for rollout in group.rollouts:
        assert rollout.reward.value == 3.0  # the malformed first turn was answered and played on
        assert len(rollout.futures) == 1
    assert len(group.rollouts) == 2


def test_the_turn_alone_is_scored_without_a_user() -> None:
    group = play(FakePolicy(by_seed), FakeRewards(last_is_ok), mode="single_turn")
    for rollout in group.rollouts:
        (future,) = rollout.futures
        assert future.conversation == rollout.start
        assert len(rollout.start.turns) == 1
        assert rollout.start.ending is Ending.TURN_LIMIT


def test_whole_conversations_are_played_once_to_their_end() -> None:
    group = play(FakePolicy(by_seed), FakeRewards(last_is_ok), futures=0)
    for rollout in group.rollouts:
        (future,) = rollout.futures
        assert future.conversation == rollout.start
        assert len(rollout.start.turns) == 3
        assert rollout.reward.value == last_is_ok(rollout.start)


def test_a_malformed_turn_anywhere_ends_a_whole_conversation_with_the_penalty() -> None:
    policy = FakePolicy(lambda prompt, seed: "" if prompt.count("go on") == 2 else "ok")
    rewards = FakeRewards(last_is_ok)
    group = play(policy, rewards, futures=0)
    assert {rollout.reward.value for rollout in group.rollouts} == {-1.0}
    assert {len(rollout.start.turns) for rollout in group.rollouts} == {3}
    assert rewards.conversations == []


@pytest.mark.usefixtures("virtual_time")
def test_a_future_is_scored_the_moment_it_ends() -> None:
    """A future that ended early is scored while another one is still played."""
    order: list[str] = []

    class Slow(FakePolicy):
        async def generate(self, prompt_ids: tuple[int, ...], **options: Any) -> Any:
            asked_before = len(self.seeds)
            turn = await super().generate(prompt_ids, **options)
            if asked_before == 1:  # the first of the futures
                await asyncio.sleep(0.2)
                order.append("late turn")
            return turn

    def noted(conversation: Conversation) -> Score:
        order.append("score")
        return 1.0

    play(Slow(lambda prompt, seed: "ok"), FakeRewards(noted), rollouts=1, futures=3, max_user_turns=1)
    assert order == ["score", "score", "late turn", "score"]


def test_an_outage_is_missing_and_never_a_number() -> None:
    def reply(prompt: str, seed: int) -> str:
        if seed % 3 == 0:
            raise EngineError("the engine fell over")
        return "ok"

    group = play(FakePolicy(reply), FakeRewards(last_is_ok), rollouts=12)
    unplayed = [rollout for rollout in group.rollouts if not rollout.start.turns]
    assert unplayed
    for rollout in unplayed:
        assert isinstance(rollout.reward.value, Missing)
        assert "the engine fell over" in rollout.reward.value.why
    broken = [r for r in group.rollouts if r.start.turns and r.reward.missing]
    assert broken
    assert {rollout.reward.value for rollout in broken if not isinstance(rollout.reward.value, Missing)} == {1.0}


FUNCTIONS = """
def raises(futures, weights):
    if futures[0].conversation.replies[0] == "ok":
        raise ValueError("no" + chr(10) + "luck")
    from megatron_collab.types import Reward
    return Reward(2.0)
def number(futures, weights):
    return 1.0
def infinite(futures, weights):
    from megatron_collab.types import Reward
    return Reward(float("nan"))
"""


@pytest.mark.parametrize(
    ("name", "failed", "why"),
    [
        ("raises", 3, "ValueError: no luck"),
        ("number", 4, "TypeError: returned float; return a Reward"),
        ("infinite", 4, "ValueError: a reward of nan; give a finite number, or Missing"),
    ],
)
def test_a_reward_function_that_fails_is_missing_for_that_rollout_alone(
    tmp_path: Path, name: str, failed: int, why: str
) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    mode = f"{tmp_path}/own.py:{name}"
    player = make_player(FakePolicy(by_seed), FakeRewards(last_is_ok), mode=mode, futures=2)
    values = [rollout.reward.value for rollout in asyncio.run(player.play(TASK, "s")).rollouts]
    missing = [value for value in values if isinstance(value, Missing)]
    assert missing == [Failed(f"reward.mode={mode}: {why}")] * len(missing)
    assert len(missing) == player.counters["reward_failed"] == failed
    assert [value for value in values if not isinstance(value, Missing)] == [2.0] * (4 - failed)


UNOPENED = Task("t", (Message("system", "s"),), "goal", "answer", "testing")


def test_if_the_user_opens_all_rollouts_begin_with_the_same_message() -> None:
    player = make_player(FakePolicy(by_seed), FakeRewards(last_is_ok), futures=2)
    group = asyncio.run(player.play(UNOPENED, "s"))
    assert group.task.messages == (*UNOPENED.messages, Message("user", "opened by s/opening"))
    assert group.task.played == 1 and group.task.original == UNOPENED
    for rollout in group.rollouts:
        for future in rollout.futures:
            assert future.conversation.messages[:2] == group.task.messages
            assert future.conversation.turns[0].prompt_ids == encode("<system>s<user>opened by s/opening<assistant>")


def test_the_opening_message_keeps_the_users_notes() -> None:
    player = make_player(FakePolicy(by_seed), FakeRewards(last_is_ok), futures=2)
    opening = Message("user", "hello", private={"thought": "I begin", "persona": ""})
    player.users.opens = lambda sample: opening  # type: ignore[attr-defined]
    group = asyncio.run(player.play(UNOPENED, "s"))
    first = [future.conversation.messages[1] for rollout in group.rollouts for future in rollout.futures]
    assert first == [Message("user", "hello")] * 8
    assert [message.private for message in (*group.task.messages[1:], *first)] == [{"thought": "I begin"}] * 9


def test_tools_do_not_see_the_notes_of_the_opening_message() -> None:
    player, tasks = make_player(FakePolicy(by_seed), FakeRewards(last_is_ok), futures=1), list[Task]()
    opening = Message("user", "hello", private={"thought": "I begin"})
    player.users.opens = lambda sample: opening  # type: ignore[attr-defined]
    open_tools = player.tools.open

    def opened(task: Task, *state: ConversationTools) -> ConversationTools:
        tasks.append(task)
        return open_tools(task, *state)

    player.tools.open = opened  # type: ignore[method-assign]
    asyncio.run(player.play(UNOPENED, "s"))
    assert {message.content: dict(message.private) for task in tasks for message in task.messages[1:]} == {"hello": {}}


def fails(text: str) -> str:
    raise ValueError("no idea")


@pytest.mark.parametrize(
    ("opens", "why"), [(fails, "ValueError: no idea"), (lambda sample: " ", "opens the conversation with ' '")]
)
def test_a_user_that_fails_to_open_fails_only_its_group(opens: Callable[[str], str], why: str) -> None:
    player = make_player(FakePolicy(by_seed), FakeRewards(last_is_ok), futures=2)
    player.users.opens = opens  # type: ignore[attr-defined]
    group = asyncio.run(player.play(UNOPENED, "s"))
    assert group.task == UNOPENED and len(group.rollouts) == 4
    for rollout in group.rollouts:
        (future,) = rollout.futures
        assert future.conversation.ending is Ending.ERROR and why in future.conversation.error
        assert isinstance(rollout.reward.value, Missing)
