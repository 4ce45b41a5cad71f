"""The player of docs/howto/player.md, in a file outside of the package."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from megatron_collab.algo.credit import CreditSpec, samples_of
from megatron_collab.config import Config
from megatron_collab.config.history import changes, recorded
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.player import Player
from megatron_collab.rollout.scheduler import group_seconds
from megatron_collab.rollout.workers import ConversationWorker
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Conversation, Ending, Group, Message, Missing, Score, Task
from tests.helpers import refused
from tests.rollout.fakes import STOP, CharacterRenderer, FakePolicy, FakeUsers, config
from tests.rollout.test_group import FakeRewards

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "player.md"
TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
FUTURES = 3


@pytest.fixture
def two_turns(tmp_path: Path) -> str:
    """The name of the page's player, as a setting."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "two_turns.py").write_text(code)
    return f"{tmp_path}/two_turns.py:TwoTurns"


def configure(player: str, **rollout: Any) -> Config:
    options = config(**{"player": player, "futures": FUTURES, "max_user_turns": 1} | rollout)
    options.reward.weights, options.reward.metrics = {"right": 1.0}, {"right": {"metric": "accuracy"}}
    options.train.rollouts_per_prompt = 4
    return options


def reply(prompt: str, seed: int) -> str:
    return f"reply {seed % 7}"


def digit(conversation: Conversation) -> Score:
    """Which differs among the futures of a rollout."""
    return float(conversation.replies[-1][-1])


def go_on(goal: str, messages: Sequence[Message]) -> str:
    return "go on"


def make_player(options: Config, policy: Any = reply, user: Any = go_on) -> Player:
    rewards: Any = FakeRewards(digit)
    users: Any = FakeUsers(user)
    spec = play_spec(options)
    return spec.player_class(FakePolicy(policy), CharacterRenderer(), users, rewards, spec)  # type: ignore[arg-type]


def test_both_turns_are_trained_with_the_mean_over_the_futures(two_turns: str) -> None:
    options = configure(two_turns)
    player = make_player(options)
    group = asyncio.run(player.play(TASK, "s"))
    spec = CreditSpec(options.algo, options.reward, options.rollout)
    samples = samples_of(group, spec, 0, player.reward.formula)
    assert len(group.rollouts) == len(samples) == 4
    for rollout, sample in zip(group.rollouts, samples, strict=True):
        first, second = rollout.start.turns
        assert [message.role for message in rollout.start.messages] == ["user", "assistant", "user", "assistant"]
        assert len(rollout.futures) == FUTURES
        for future in rollout.futures:
            assert future.conversation.turns[:2] == (first, second) and len(future.conversation.turns) == 3
            assert future.conversation.ending is Ending.TURN_LIMIT
        scores = [digit(future.conversation) for future in rollout.futures]
        assert rollout.reward.value == pytest.approx(mean(scores))

        assert tuple(sample.token_ids) == second.prompt_ids + second.token_ids, "one sequence has both turns"
        trained = sample.loss_mask == 1
        assert tuple(sample.token_ids[trained]) == first.token_ids + second.token_ids
        assert (sample.log_probs[trained] == -0.5).all() and not sample.log_probs[~trained].any()
        (credit,) = sample.credits
        assert credit.value == rollout.reward.value
        assert sum(stop - start for start, stop in credit.spans) == trained.sum() and len(credit.spans) == 2
    assert len({rollout.reward.value for rollout in group.rollouts}) > 1, "else the test sees no difference"
    assert np.unique([turn.text for rollout in group.rollouts for turn in rollout.start.turns]).size > 2


def test_it_is_played_alike_again(two_turns: str) -> None:
    first, second = (asyncio.run(make_player(configure(two_turns)).play(TASK, "s")) for _ in range(2))
    assert first == second


def test_a_conversation_that_ends_early_is_scored_as_it_is(two_turns: str) -> None:
    """The user is content with the first turn; or the second is malformed."""
    player = make_player(configure(two_turns), user=lambda goal, messages: f"bye {STOP}")
    for rollout in asyncio.run(player.play(TASK, "s")).rollouts:
        (future,) = rollout.futures
        assert rollout.start.ending is Ending.USER_DONE and len(rollout.start.turns) == 1
        assert future.conversation == rollout.start and rollout.reward.value == digit(rollout.start)

    player = make_player(configure(two_turns), policy=lambda prompt, seed: "" if "go on" in prompt else "ok 1")
    for rollout in asyncio.run(player.play(TASK, "s")).rollouts:
        assert rollout.malformed and len(rollout.start.turns) == 2 and rollout.reward.value == -1.0


def test_a_run_waits_for_as_many_phases_as_it_has(two_turns: str) -> None:
    seconds = []
    for player in ("futures", two_turns):
        options = configure(player, deadline=1000.0)
        seconds.append(group_seconds(play_spec(options), 1))
    assert seconds[1] - seconds[0] == pytest.approx(2 * 1000.0, rel=0.1)


UNUSABLE = """
from dataclasses import dataclass

from megatron_collab.settings import option
from megatron_collab.rollout.player import Player
from megatron_collab.types import Conversation, Future, Group, Missing, Reward, Rollout


class Neither:
    pass


class Idle(Player):
    pass


@dataclass(frozen=True)
class Options:
    wrong: str = option("", "what is returned")


class Wrong(Player):
    Options = Options

    async def play(self, task, stream):
        start = Conversation(task.messages, ())
        future = Future(start, {"right": 1.0})
        return {
            "none": None,
            "empty": Group(task, ()),
            "futures": Group(task, (Rollout(start, (), Reward(1.0)),)),
            "nan": Group(task, (Rollout(start, (future,), Reward(float("nan"))),)),
            "turns": Group(task, (Rollout(start, (future,), Reward(1.0)),)),
            "missing": Group(task, (Rollout(start, (future,), Reward(Missing("nothing to reward"))),)),
        }[self.options.wrong]
"""


@pytest.fixture
def unusable(tmp_path: Path) -> str:
    (tmp_path / "unusable.py").write_text(UNUSABLE)
    return f"{tmp_path}/unusable.py"


@pytest.mark.processes
def test_what_is_no_player_is_refused_before_a_run(unusable: str) -> None:
    message = refused(f"rollout.player={unusable}:Neither")
    assert message == f"rollout.player={unusable}:Neither: must be a subclass of megatron_collab.rollout.player.Player"
    message = refused(f"rollout.player={unusable}:Idle")
    assert message.endswith("the class has no play; define what is missing")
    message = refused(f"rollout.player={unusable}:Wrong", "rollout.player_options.wron=empty")
    assert message.startswith("rollout.player_options.wron: no such setting; the nearest is wrong")
    assert refused("rollout.player=future").endswith("the nearest is futures")
    assert refused("rollout.player_options.wrong=empty").startswith(
        "rollout.player_options: rollout.player=futures has"
    )


def worker(options: Config) -> Any:
    """A conversation worker with the fakes."""
    actor: Any = object.__new__(ConversationWorker)
    actor.router = None
    actor.config, actor.play_spec, actor.adapter = options, play_spec(options), None
    actor.players, actor.client, actor.engine = {}, None, ()
    actor.policy, actor.renderer, actor.rewards = FakePolicy(reply), CharacterRenderer(), FakeRewards(digit)
    return actor


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("none", "returned NoneType; return a Group"),
        ("empty", "returned a group without rollouts"),
        ("futures", "returned a rollout without futures"),
        ("nan", "returned a reward of nan"),
        ("turns", "returned a reward without a trained turn"),
    ],
)
def test_a_group_that_cannot_be_trained_on_ends_the_run(wrong: str, fault: str, unusable: str) -> None:
    options = configure(f"{unusable}:Wrong", player_options={"wrong": wrong})
    with pytest.raises(RunStopped, match=f"^rollout.player={unusable}:Wrong: {fault}"):
        asyncio.run(worker(options).play(TASK, "s"))


def test_a_worker_plays_with_the_runs_player(unusable: str, two_turns: str) -> None:
    """Also the sets of data.eval, with their settings."""
    group: Group = asyncio.run(
        worker(configure(f"{unusable}:Wrong", player_options={"wrong": "missing"})).play(TASK, "s")
    )
    assert isinstance(group.rollouts[0].reward.value, Missing)
    playing = worker(configure(two_turns))
    player = playing._player(EvaluationSet("tasks.jsonl", samples=2))
    assert type(player).__name__ == "TwoTurns" and player.rollout.futures == 1
    assert (player.spec.rollouts, playing.play_spec.rollouts) == (2, 4)
    assert type(worker(configure("futures"))._player(None)) is FuturesPlayer


def test_a_player_of_a_file_reaches_other_processes_by_its_path(two_turns: str) -> None:
    spec = play_spec(configure(two_turns))
    received = pickle.loads(pickle.dumps(spec))
    assert "player_class" not in vars(received), "the class itself is not pickled"
    assert received.player_class is spec.player_class and received.player == two_turns


def test_runs_of_earlier_versions_resume(tmp_path: Path) -> None:
    """They recorded neither this option nor that of the transport's settings; another player is another run."""
    options = Config()
    options.run.dir = str(tmp_path)
    settings = recorded(options)
    for group, name in (("rollout", "player"), ("rollout", "player_options"), ("publish", "transport_options")):
        del settings[group][name]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert changes(options) == []
    options.rollout.player = "package.module:Other"
    (change,) = changes(options)
    assert change.setting == "rollout.player" and change.before == "futures" and not change.allowed
