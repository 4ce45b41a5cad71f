"""Calls and their costs: bounds that conversations reach which end as late as they may, and forecasts of a pilot."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_collab import patches
from megatron_collab.config import Config, EndpointConfig, SamplingConfig
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.llm.recording import Call, Taken
from megatron_collab.rollout import cost, meter
from megatron_collab.rollout.conversation import Player
from megatron_collab.rollout.cost import Calls, Cost, RoleCalls
from megatron_collab.rollout.meter import Meter
from megatron_collab.rollout.synthesis import following
from megatron_collab.types import Conversation, Message, Task, Turn
from tests.rollout.fakes import CharacterRenderer, FakePolicy, FakeUsers, config
from tests.rollout.test_group import FakeRewards

TASK = Task("t", (), "goal", "answer", "")


class Counting:
    """A player whose calls are counted by role, with the messages that each reads, and end as late as they may."""

    def __init__(self, options: Config) -> None:
        self.heard: dict[str, list[int]] = {role: [] for role in cost.ROLES}

        class Policy(FakePolicy):
            async def generate(policy, prompt_ids: tuple[int, ...], **asked: Any) -> Turn:
                self.heard["assistant"].append(len(asked["messages"]))
                return await super().generate(prompt_ids, **asked)

        def user(goal: str, messages: Sequence[Message]) -> str:
            self.heard["user"].append(len(messages))
            return "go on"

        def score(conversation: Conversation) -> float:
            self.heard["judge"].append(len(conversation.messages))
            return 1.0

        policy, rewards = Policy(lambda prompt, seed: f"say {seed}"), FakeRewards(score)
        users = FakeUsers(user)
        users.opens = lambda sample: self.heard["user"].append(0) or "hi"  # type: ignore[func-returns-value]
        self.player = Player(policy, CharacterRenderer(), users, rewards, options)  # type: ignore[arg-type]

    def calls(self) -> Calls:
        return Calls(*(RoleCalls(len(heard), sum(heard)) for heard in self.heard.values()))


def options(mode: str = "mr", **rollout: Any) -> Config:
    made = config(**rollout)
    made.reward.mode = mode
    made.reward.weights, made.train.rollouts_per_prompt = {"right": 1.0}, 3
    made.reward.metrics = {"right": {"metric": "generative", "prompt": "How good is {conversation}?"}}
    return made


@pytest.mark.parametrize("mode", ["mr", "single_turn"])
@pytest.mark.parametrize("futures", [0, 1, 3])
@pytest.mark.parametrize("limits", [{}, {"max_messages": 5}, {"max_assistant_turns": 2}])
def test_a_group_that_ends_as_late_as_it_may_makes_as_many_calls(
    mode: str, futures: int, limits: dict[str, int]
) -> None:
    given = options(mode, **{"futures": futures, "max_user_turns": 3, "max_assistant_turns": 4, **limits})
    played = Counting(given)
    asyncio.run(played.player.play(TASK, "s"))
    assert played.calls() == cost.of_group(given) + Calls(user=RoleCalls(1))


def test_so_does_a_conversation_that_is_built() -> None:
    given = options(futures=2, max_messages=7)
    played, task = Counting(given), TASK
    for turn in range(100):
        group = asyncio.run(played.player.play(task, f"s.{turn}"))
        found = following(group, 7, random.Random(0))
        if found is None:
            break
        task = found
    assert turn == 2
    # The messages of the task are the policy's too: of each turn of three candidates, with two futures.
    assert played.calls() == cost.of_building(given, 1)
    assert cost.of_building(given, 5) == cost.of_building(given, 1) * 5
    said = "at most 27 replies, 19 messages of users, 18 judgements"
    assert str(cost.of_building(given, 1)) == said.replace("27", str(played.calls().assistant.calls))


def test_training_and_evaluation_are_groups() -> None:
    given = options()
    given.train.prompts_per_step, given.algo.dynamic_sampling = 4, 1
    opened = cost.of_group(given) + Calls(user=RoleCalls(1))
    assert cost.of_training(given, 10) == opened * 80
    given.train.stage = "dpo"
    assert cost.of_training(given, 10) == Calls()
    one = EvaluationSet("tasks", samples=2, max_assistant_turns=1)
    assert cost.of_evaluation(given, one, 6) == Calls(RoleCalls(12, 12), RoleCalls(6), RoleCalls(12, 24))


def test_at_most_is_the_price_of_the_longest_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Config()
    given.llm.prices = {"openai/a": [1, 10], "openai/b": [2, 5]}
    given.rollout.turn = given.rollout.future = SamplingConfig(300)
    models = {"user": [EndpointConfig("openai/a", max_tokens=100), EndpointConfig("openai/b", max_tokens=100)]}
    calls = Calls(assistant=RoleCalls(9, 9), user=RoleCalls(10, 30), judge=RoleCalls(5, 5))
    prompts = 10 * (cost.INSTRUCTIONS + 76) + 30 * (300 + 100) / 2
    found = cost.at_most(calls, models, given, 76)
    assert found == Cost(pytest.approx((2 * prompts + 5 * 10 * 100) / 1e6))
    monkeypatch.setattr(patches, "apply", lambda *_: None)
    judged = cost.at_most(calls, {**models, "judge": [EndpointConfig("openai/nobody-knows")]}, given, 76)
    assert judged.usd == found.usd and judged.unpriced == ("openai/nobody-knows",)
    assert str(judged).endswith(" USD, and what openai/nobody-knows costs, whose price is not known")


def recorded(name: str, schema: Any, sample: str | None, usd: float | None) -> Call:
    question = {"model": "m", "messages": [], "schema": schema, "sample": sample}
    return Call(name, 0, 0.0, question, {}, None, Taken(100, 10, usd, 2.0, 1))


def test_a_pilot_is_measured_by_role_and_scaled_to_a_plan() -> None:
    draw = random.Random(0)
    pilot = []
    for group in range(400):
        dear = draw.uniform(0.5, 1.5)  # of a task: its calls are not independent
        for number in range(draw.randint(1, 9)):
            pilot.append(recorded(f"t-{group}/{number}/0", {}, None, 0.01 * dear))
    pilot += [recorded("t-1/0/0", {}, "0", None), recorded("t-1/0/0", None, None, 0.5)]
    scorer = Call("t-1/0/0", 0, 0.0, {"model": "reward.metrics.good", "messages": []}, {}, None, Taken(usd=7.0))
    means = cost.measured([*pilot, scorer])
    users = means["user"]
    assert set(means) == {"assistant", "user", "judge"} and users.calls == len(pilot) - 2
    assert (users.prompt_tokens, users.answer_tokens, users.seconds) == (100, 10, 2)
    assert means["judge"].usd is None and users.usd == pytest.approx(0.01, rel=0.1)

    might = Calls(assistant=RoleCalls(10), user=RoleCalls(2 * users.calls), judge=RoleCalls(4))
    plan = Calls(user=RoleCalls(20_000), judge=RoleCalls(4))
    found = cost.forecast(plan, means, might)
    assert found.usd == pytest.approx(10_000 * users.usd) and found.unpriced == ("the judge",)
    assert found.error == pytest.approx(10_000 * users.error)
    # The error is that which other pilots of as many groups show.
    others = []
    for _ in range(200):
        sums = [0.0, 0]
        for _ in range(400):
            dear, calls = draw.uniform(0.5, 1.5), draw.randint(1, 9)
            sums = [sums[0] + 0.01 * dear * calls, sums[1] + calls]
        others.append(sums[0] / sums[1])
    mean = sum(others) / len(others)
    spread = (sum((one - mean) ** 2 for one in others) / (len(others) - 1)) ** 0.5
    assert users.error == pytest.approx(spread, rel=0.2)


def test_what_conversations_still_need_is_as_likely_as_what_they_needed() -> None:
    weights = [1.0, 2.0, 4.0]
    # Of four past the first turn one ended; of the three past the second one; the third is the last.
    assert cost.still_to_play([1, 2, 3], [2], weights) == pytest.approx(4 - 2)
    # Half of the four past the first turn ended there; nothing is known of the second.
    assert cost.still_to_play([1, 1], [1, 0], weights) == pytest.approx(
        (2 + 1 / 3 * 4 - 1) + (1 + 1 / 3 * (2 + 1 / 3 * 4) - 0.5)
    )
    assert cost.still_to_play([3], [], weights) == 0


def test_while_it_builds_a_line_says_what_is_spent_and_what_is_to_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "apply", lambda *_: None)
    monkeypatch.setattr(meter, "SAY_EVERY", 0)
    given = options(futures=1, max_messages=6)
    given.user.model, given.reward.judge.model = "openai/user", "openai/judge"
    given.llm.prices = {"openai/user": [1, 1], "openai/judge": [1, 1]}
    given.llm.budget_usd = 0.01
    spent: Counter[str] = Counter({"calls": 7, "usd": 0.005, "unpriced": 0})  # by an earlier start

    built = Meter(given, [TASK] * 100, "conversations", lambda: Counter(spent))
    first, budget = capsys.readouterr().out.splitlines()
    assert first.startswith("100 conversations: at most 1800 replies, 1000 messages of users, 900 judgements; at most ")
    assert first.endswith(" USD, where every message is as long as it may be")
    assert budget.startswith("llm.budget_usd=0.01: 0.005 USD of it are left, which may not be enough; once it is")

    turns = [number % 3 + 1 for number in range(100)]  # of each conversation
    built._weights = costs = [1.0, 2.0, 3.0]
    price = sum(sum(costs[:each]) for each in turns)
    spent["usd"] += 100 * costs[0] / 2
    for turn in range(3):
        for number in range(100):
            if turns[number] > turn:  # half of a turn is paid before it is finished
                over = turns[number] == turn + 1
                spent["calls"] += 1
                spent["usd"] += (costs[turn] + (0 if over else costs[turn + 1])) / 2
                built.turn(number, over, played=True)
    said = capsys.readouterr().out.splitlines()
    for calls, rel in ((20, 0.3), (100, 0.25), (140, 0.1), (180, 0.1)):
        (line,) = (line for line in said if f"; {calls} calls" in line)
        paid, to_come = (float(text.split()[-1]) for text in line.split(" USD")[:2])
        assert to_come == pytest.approx(price - paid, rel=rel)
    assert said[-1] == f"100 conversations: 100 have ended; {sum(turns)} calls, {price:.4g} USD"

    spent["unpriced"] += 1
    assert built.line().endswith(", and 1 calls whose price is not known")


def test_recorded_answers_are_not_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = options(futures=1, max_messages=6)
    given.user.model, given.llm.replay = "openai/user", str(tmp_path)
    Meter(given, [TASK], "conversations", lambda: Counter())
    assert "USD" not in capsys.readouterr().out
