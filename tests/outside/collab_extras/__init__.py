"""A package that knows megatron_collab and that megatron_collab does not know: one extension of every kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_collab.algo.advantages import Advantage, Compared, Estimates, Rows
from megatron_collab.algo.policy_loss import PolicyLoss, PolicyTerms
from megatron_collab.algo.turn_credit import Episode, Share, TurnCredit
from megatron_collab.data.datasets import TaskReader
from megatron_collab.environments import World
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.multiturn import RewardFunction
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.tools import Tool, ToolResult
from megatron_collab.rollout.users import User, UserReply
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Future, Group, Message, Missing, Reward, Sample, Score, Task

if TYPE_CHECKING:
    from torch import Tensor


class Polite(Metric):
    """How often the replies contain the word."""

    @dataclass(frozen=True)
    class Options:
        word: str = option("please", "what is counted")
        most: int = option(100, "largest score", ge=1)

    async def score(self, task: Task, conversation: Conversation) -> Score | None:
        count = sum(reply.count(self.options.word) for reply in conversation.replies)
        return float(min(count, self.options.most))


class TerseUser(User):
    """Says one word and rewards every reply."""

    @dataclass(frozen=True)
    class Options:
        word: str = option("no", "all that the user says", choices=("no", "yes"))

    async def reply(self, conversation: Conversation) -> UserReply:
        return self.says(f"{self.options.word}{self.argument}", reward=0.25)


class Dice(Tool):
    @dataclass(frozen=True)
    class Options:
        sides: int = option(6, "sides of the dice", ge=2)

    SCHEMA: ClassVar[Mapping[str, Any]] = {
        "name": "dice",
        "description": "Throws a dice.",
        "parameters": {"type": "object", "properties": {}},
    }

    async def call(self, task: Task, **arguments: Any) -> ToolResult:
        return ToolResult(f"{self.options.sides} of {self.options.sides}", reward=0.5)


class Counting(FuturesPlayer):
    """Plays like the shipped player, and counts groups."""

    @dataclass(frozen=True)
    class Options:
        name: str = option("groups", "name of the counter")

    async def play(self, task: Task, stream: str) -> Group:
        self.counters[self.options.name] += 1
        return await super().play(task, stream)


class Greetings(World):
    """A random model, and a file of greetings in a custom format."""

    @dataclass(frozen=True)
    class Options:
        tasks: int = option(4, "how many", ge=1)

    result_names: ClassVar[Mapping[str, str]] = {"politeness": "polite"}

    def make(self, folder: Path, seed: int, source: str | None) -> None:
        from megatron_collab.environments import tiny_model

        tokenizer = tiny_model.byte_tokenizer(["hello there"], 300)
        tokenizer.chat_template = f"{{{{ tools | tojson if tools }}}}{tiny_model.CHAT_TEMPLATE}"
        tiny_model.save(folder / "model", tokenizer, seed, 1024)
        (folder / "greetings.txt").write_text("".join(f"hello {number}\n" for number in range(self.options.tasks)))


class Lines(TaskReader):
    """One task for each line."""

    @dataclass(frozen=True)
    class Options:
        user: str = option("", "user of every task; empty: the one of the settings")

    def __call__(self, path: Path) -> Iterator[Task]:
        for number, line in enumerate(path.read_text().splitlines()):
            yield Task(str(number), (Message("user", line),), "to be greeted", "", self.options.user)


def replies_only(path: Path) -> Iterable[Task]:
    """A reader that yields invalid tasks."""
    return [Task("t", (Message("assistant", "hello"),), "g", "", "")]


class Best(RewardFunction):
    """The best future counts, and the longest one earns a bonus."""

    @dataclass(frozen=True)
    class Options:
        bonus: float = option(0.0, "reward of every message of the longest future", ge=0)

    def __call__(self, futures: Sequence[Future], weights: Mapping[str, float]) -> Reward:
        scores = [future.scores[name] for future in futures for name, weight in weights.items() if weight]
        known = [score for score in scores if not isinstance(score, Missing)]
        longest = max(len(future.conversation.messages) for future in futures)
        return Reward(max(known) + self.options.bonus * longest if known else Missing("no future has a score"))


def reward_of_one(futures: Sequence[Future], weights: Mapping[str, float]) -> Reward:
    return Reward(1.0)


class Reinforce(PolicyLoss):
    """REINFORCE, which reports every token as clipped."""

    @dataclass(frozen=True)
    class Options:
        scale: float = option(1.0, "factor of the loss", gt=0)

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, sequence: Tensor, sequences: int
    ) -> PolicyTerms:
        ratio = (log_probs - old_log_probs).detach().exp()
        return PolicyTerms(-self.options.scale * advantages * log_probs, ratio, ratio * 0 + 1)


class WholeSequences(Reinforce):
    whole_sequences = True


class Halved(Compared):
    """A share of the distance to the mean of the peers."""

    @dataclass(frozen=True)
    class Options:
        share: float = option(0.5, "factor", gt=0)

    def compare(self, values: np.ndarray, peers: Sequence[str], scale: Sequence[str]) -> np.ndarray:
        return np.asarray(self.options.share * (values - values.mean()))


class Short(Advantage):
    """An estimator that gives too few numbers."""

    def estimate(self, samples: Sequence[Sample], costs: Rows, values: Rows | None) -> Estimates:
        return Estimates([cost[1:] for cost in costs])


class First(TurnCredit):
    """All rewards for the first turn."""

    def shares(self, episodes: Sequence[Episode]) -> Sequence[Sequence[Share]]:
        return [[Share(sum(episode.rewards), {0: 1.0})] for episode in episodes]


class Unruly(TurnCredit):
    """Lacks the method that every rule has."""
