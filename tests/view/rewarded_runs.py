"""Groups with everything that a reward depends on, and a run whose rewards follow from its settings."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.observability import folder, transcripts
from megatron_collab.observability.folder import rows_of
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.reward.comparison import group_rewards
from megatron_collab.settings import RewardConfig
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Missing, Reward, Rollout, Score, Turn
from tests.reward.fakes import about

TASK = about("18")
GROUPS = 20  # of the run that `rewarded_site` shows
DOWN = Missing("the judge is down")
WEIGHTS = {"accuracy": 1.0, "interactivity": 0.5, "token_amount": -5e-4, "bleu": 0.0}


def settings(
    mode: str = "mr", malformed: float | None = -1.0, worst: bool = False, clamp: Mapping[str, float] = {}
) -> RewardConfig:
    return RewardConfig(
        mode=mode,
        weights=WEIGHTS,
        clamp=dict(clamp),
        malformed=malformed,
        malformed_worst=worst,
        metrics={"bleu": {"level": "character"}},
    )


def made_groups(reward: RewardConfig, count: int = 14, seed: int = 0) -> list[Group]:
    """Groups of up to 5 rollouts with up to 4 futures: scores may be missing, or not apply to a group or a future."""
    chance = random.Random(seed)
    return [rewarded(_group(chance), reward) for _ in range(count)]


def _group(chance: random.Random) -> Group:
    applicable = [name for name in WEIGHTS if chance.random() < 0.8]
    share = chance.choice([0.0, 0.2, 0.7])  # of scores that are missing
    futures = chance.randint(1, 4)
    rollouts = [_rollout(chance, applicable, share, futures) for _ in range(chance.randint(1, 5))]
    return Group(TASK, tuple(rollouts))


def _rollout(chance: random.Random, applicable: Sequence[str], share: float, futures: int) -> Rollout:
    if chance.random() < 0.15:
        malformed = _conversation("", Ending.MALFORMED)
        return Rollout(malformed, (Future(malformed, {}),), Reward(0.0))
    played = _conversation("a reply", Ending.TURN_LIMIT)
    return Rollout(
        played, tuple(Future(played, dict(_scores(chance, applicable, share))) for _ in range(futures)), Reward(0.0)
    )


def _conversation(reply: str, ending: Ending) -> Conversation:
    return Conversation(TASK.messages, ()).add_turn(Turn((), (), (), (), Finish.STOP, reply)).end(ending)


def _scores(chance: random.Random, applicable: Sequence[str], share: float) -> Iterator[tuple[str, Score]]:
    for name in applicable:
        if chance.random() < 0.05:
            continue  # it does not apply to this future
        value = chance.uniform(50, 4000) if name == "token_amount" else chance.uniform(-0.5, 2)
        yield name, DOWN if chance.random() < share else value


def rewards_of(group: Group, reward: RewardConfig) -> list[Reward]:
    """By rollout, from the scores in the group."""
    scores = {id(future): dict(future.scores) for rollout in group.rollouts for future in rollout.futures}
    return group_rewards(group, scores, reward_spec(reward))


def rewarded(group: Group, reward: RewardConfig) -> Group:
    rewards = zip(group.rollouts, rewards_of(group, reward), strict=True)
    return replace(group, rollouts=tuple(replace(rollout, reward=value) for rollout, value in rewards))


def rows(group: Group) -> list[dict[str, Any]]:
    """The group's rows as the page gets them."""
    return list(json.loads(json.dumps([*rows_of([group])])))


def write_run(run: Path, reward: RewardConfig, groups: Sequence[Group]) -> None:
    """A run with a step of `groups`."""
    run.mkdir(parents=True)
    folder.replace(run / SETTINGS, {"program": "train", "run": {"dir": str(run)}, "reward": asdict(reward)})
    transcripts.write_step(run, 0, [rows(group) for group in groups])
    folder.append(run / "metrics.jsonl", [{"step": 0, "reward": 0.5}])
