"""Calls and their costs: bounds, which the longest possible conversations reach, and forecasts from a pilot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.llm.recording import Call, Usage
from megatron_collab.planning import llm_cost
from megatron_collab.planning.llm_cost import Calls, Cost, Means, RoleCalls
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.settings import EndpointConfig, SamplingConfig
from megatron_collab.synthesis.synthesis import next_task
from megatron_collab.types import Conversation, Message, Task, Turn
from tests.rollout.fakes import CharacterRenderer, FakePolicy, FakeUsers, config
from tests.rollout.test_group import FakeRewards

TASK = Task("t", (), "goal", "answer", "")


class Counting:
    """A player of the longest possible conversations, which counts by role its calls and the messages they read."""

    def __init__(self, options: Config) -> None:
        self.messages_read: dict[str, list[int]] = {role: [] for role in llm_cost.ROLES}

        class Policy(FakePolicy):
            async def generate(policy, prompt_ids: tuple[int, ...], **request: Any) -> Turn:
                self.messages_read["assistant"].append(len(request["messages"]))
                return await super().generate(prompt_ids, **request)

        def user(goal: str, messages: Sequence[Message]) -> str:
            self.messages_read["user"].append(len(messages))
            return "go on"

        def score(conversation: Conversation) -> float:
            self.messages_read["judge"].append(len(conversation.messages))
            return 1.0

        policy, rewards = Policy(lambda prompt, seed: f"say {seed}"), FakeRewards(score)
        users = FakeUsers(user)
        users.opens = lambda sample: self.messages_read["user"].append(0) or "hi"  # type: ignore[func-returns-value]
        self.player = FuturesPlayer(policy, CharacterRenderer(), users, rewards, play_spec(options))  # type: ignore[arg-type]

    def calls(self) -> Calls:
        return Calls(*(RoleCalls(len(counts), sum(counts)) for counts in self.messages_read.values()))


def options(mode: str = "mr", **rollout: Any) -> Config:
    settings = config(**rollout)
    settings.data.train, settings.reward.mode = "t.jsonl", mode
    settings.reward.weights, settings.train.rollouts_per_prompt = {"right": 1.0}, 3
    settings.reward.metrics = {"right": {"metric": "generative", "prompt": "How good is {conversation}?"}}
    return settings


@pytest.mark.parametrize("mode", ["mr", "single_turn"])
@pytest.mark.parametrize("futures", [0, 1, 3])
@pytest.mark.parametrize("limits", [{}, {"max_messages": 5}, {"max_assistant_turns": 2}])
def test_the_longest_possible_group_makes_as_many_calls_as_the_bound(
    mode: str, futures: int, limits: dict[str, int]
) -> None:
    settings = options(mode, **{"futures": futures, "max_user_turns": 3, "max_assistant_turns": 4, **limits})
    played = Counting(settings)
    asyncio.run(played.player.play(TASK, "s"))
    assert played.calls() == llm_cost.group_calls(play_spec(settings)) + Calls(user=RoleCalls(1))


def test_the_longest_possible_built_conversation_makes_as_many_calls_as_the_bound() -> None:
    settings = options(futures=2, max_messages=7)
    played, task = Counting(settings), TASK
    for turn in range(100):
        group = asyncio.run(played.player.play(task, f"s.{turn}"))
        continuation = next_task(group, 7, random.Random(0))
        if continuation is None:
            break
        task = continuation
    assert turn == 2
    # Messages of the task are replies of the policy too. Each turn has three candidates with two futures.
    assert played.calls() == llm_cost.building_calls(play_spec(settings), 1)
    assert llm_cost.building_calls(play_spec(settings), 5) == llm_cost.building_calls(play_spec(settings), 1) * 5
    bound = "at most 27 replies, 19 user messages, 18 judgments"
    assert str(llm_cost.building_calls(play_spec(settings), 1)) == bound.replace(
        "27", str(played.calls().assistant.calls)
    )


def test_training_and_evaluation_calls_are_those_of_their_groups() -> None:
    settings = options()
    settings.train.prompts_per_step, settings.algo.dynamic_sampling = 4, 1
    play = play_spec(settings)
    opened = llm_cost.group_calls(play_spec(settings)) + Calls(user=RoleCalls(1))
    assert llm_cost.training_calls(settings, play, 10) == opened * 80
    assert llm_cost.training_calls(settings, None, 10) == Calls()
    eval_set = EvaluationSet("tasks", samples=2, max_assistant_turns=1)
    assert llm_cost.evaluation_calls(play, eval_set, 6) == Calls(RoleCalls(12, 12), RoleCalls(6), RoleCalls(12, 24))


def test_the_cost_bound_is_the_price_of_the_longest_messages() -> None:
    settings = Config()
    settings.llm.prices = {"openai/a": [1, 10], "openai/b": [2, 5]}
    settings.rollout.turn = settings.rollout.future = SamplingConfig(300)
    models = {"user": [EndpointConfig("openai/a", max_tokens=100), EndpointConfig("openai/b", max_tokens=100)]}
    calls = Calls(assistant=RoleCalls(9, 9), user=RoleCalls(10, 30), judge=RoleCalls(5, 5))
    prompts = 10 * (llm_cost.INSTRUCTIONS + 76) + 30 * (300 + 100) / 2
    bound = llm_cost.cost_bound(calls, models, settings, 76)
    assert bound == Cost(pytest.approx((2 * prompts + 5 * 10 * 100) / 1e6))
    judged = llm_cost.cost_bound(calls, {**models, "judge": [EndpointConfig("openai/nobody-knows")]}, settings, 76)
    assert judged.usd == bound.usd and judged.unpriced == ("openai/nobody-knows",)
    assert str(judged).endswith(" USD, plus calls of openai/nobody-knows, whose price is unknown")


def recorded(name: str, schema: Any, sample: str | None, usd: float | None) -> Call:
    question = {"model": "m", "messages": [], "schema": schema, "sample": sample}
    return Call(name, 0, 0.0, question, {}, None, Usage(100, 10, usd, 2.0, 1))


def test_a_pilot_is_measured_by_role_and_scaled_to_a_plan() -> None:
    pilot = [recorded(f"t-{number}/0/0", {}, None, 0.002 * number) for number in range(11)]
    pilot += [recorded("t-1/0/0", {}, "0", None), recorded("t-1/0/0", None, None, 0.5)]
    scorer = Call("t-1/0/0", 0, 0.0, {"model": "reward.metrics.good", "messages": []}, {}, None, Usage(usd=7.0))
    means = llm_cost.role_means([*pilot, scorer])
    users = means["user"]
    assert set(means) == {"assistant", "user", "judge"}
    assert users == Means(11, 100, pytest.approx(0.01)) and means["judge"].usd is None

    might = Calls(assistant=RoleCalls(10), user=RoleCalls(22), judge=RoleCalls(4))
    plan = Calls(user=RoleCalls(20_000), judge=RoleCalls(4))
    assert llm_cost.forecast(plan, means, might) == Cost(pytest.approx(10_000 * 0.01), ("the judge",))
