"""Several rewards of the same recorded futures: the metrics they need, the scores, and what each makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from megatron_collab.config import RewardConfig
from megatron_collab.reward import metrics
from megatron_collab.reward.multiturn import malformed_last, reward_function
from megatron_collab.reward.workers import Job, RewardWorker, Scores
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Missing, Reward, Rollout, Score, Turn

_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_PLAYED_ON = Missing("its malformed turn was not played on in this run")
_NO_TOKENS = Missing("transcripts hold no token ids, and the run has not counted them")


@dataclass(frozen=True)
class Together:
    """The metrics of several rewards, each once: `reward` names them all, and `names` says by reward what it calls
    which of them."""

    reward: RewardConfig
    names: Mapping[str, Mapping[str, str]]

    def of(self, title: str, scores: Scores) -> Scores:
        """Of the scores of a future those of a reward, by its own names."""
        return {name: scores[shared] for name, shared in self.names[title].items() if shared in scores}


def together(rewards: Mapping[str, RewardConfig]) -> Together:
    """The metrics of all rewards; those with the same settings are one. Raises ConfigError."""
    known: list[tuple[Any, str]] = []
    settings: dict[str, dict[str, Any]] = {}
    names: dict[str, dict[str, str]] = {title: {} for title in rewards}
    for title, reward in rewards.items():
        for name in reward.weights:
            given = reward.metrics.get(name, {})
            kind = metrics.split(name, given)
            shared = next((other for same, other in known if same == kind), None)
            if shared is None:
                shared = f"{title}/{name}" if name in settings else name
                settings[shared] = {"metric": name, **given}
                known.append((kind, shared))
            names[title][name] = shared
    first = next(iter(rewards.values()))
    return Together(replace(first, weights=dict.fromkeys(settings, 0.0), metrics=settings), names)


async def scored_again(
    worker: RewardWorker, groups: Sequence[Group], own: RewardConfig, done: Callable[[int], None]
) -> dict[int, Scores]:
    """By the id() of each future the scores by the worker's metrics; `done` is told how many more futures have them.

    Metrics that read token ids have what the run has recorded by its reward `own`. Raises RunStopped.
    """
    kinds = {name: (type(metric), metric.options) for name, metric in worker.metrics.items()}
    counted = [name for name, (kind, options) in kinds.items() if kind.reads_tokens(options)]
    again = tuple(name for name in kinds if name not in counted)
    known = {name: metrics.split(name, own.metrics.get(name, {})) for name in own.weights}
    source = {name: next((other for other, kind in known.items() if kind == kinds[name]), "") for name in counted}
    found: dict[int, Scores] = {}
    jobs: list[tuple[Future, Job]] = []
    for group in groups:
        for future in (future for rollout in group.rollouts for future in rollout.futures):
            conversation = future.conversation
            if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
                found[id(future)] = dict.fromkeys(kinds, Missing(conversation.error))
                continue
            found[id(future)] = {name: future.scores.get(source[name], _NO_TOKENS) for name in counted}
            if conversation.ending is not Ending.MALFORMED:
                jobs.append((future, Job(again, group.task, conversation)))
    async for some in worker.score([job for _, job in jobs]):
        for index, scores in some.items():
            found[id(jobs[index][0])] |= scores
        done(len(some))
    return found


def rewarded(group: Group, scores: Mapping[int, Scores], reward: RewardConfig, *, whole: bool = False) -> list[Reward]:
    """The reward of each rollout of a recorded group; `scores` are those of the reward's metrics by a future's id().

    A malformed turn gets reward.malformed, and no reward where that is none and the run has not played it on. `whole`:
    a malformed turn anywhere counts, not only the trained one.
    """
    found, formula = list[Rollout](), reward_function(reward)
    for rollout in group.rollouts:
        if reward.malformed is not None and (rollout.malformed or _faulty(rollout, whole)):
            ended = rollout.start.end(Ending.MALFORMED)
            found.append(Rollout(ended, (Future(ended, {}),), Reward(reward.malformed)))
        elif rollout.malformed:
            found.append(Rollout(rollout.start, (), Reward(_PLAYED_ON)))
        else:
            futures = tuple(replace(future, scores=scores[id(future)]) for future in rollout.futures)
            found.append(Rollout(rollout.start, futures, formula(futures)))
    return [rollout.reward for rollout in (malformed_last(found) if reward.malformed_worst else found)]


def agreement(first: Sequence[Sequence[Reward]], second: Sequence[Sequence[Reward]]) -> float:
    """Of the pairs of trained turns of one task that both rewards tell apart, the share that they rank alike; NaN where
    there is none. `first` and `second`: by task the rewards of its rollouts.
    """
    alike = unlike = 0
    for pairs in (zip(*both, strict=True) for both in zip(first, second, strict=True)):
        for (a, b), (c, d) in combinations(pairs, 2):
            sign = _difference(a.value, c.value) * _difference(b.value, d.value)
            alike, unlike = alike + (sign > 0), unlike + (sign < 0)
    return alike / (alike + unlike) if alike + unlike else float("nan")


def _difference(one: Score, other: Score) -> float:
    return 0.0 if isinstance(one, Missing) or isinstance(other, Missing) else one - other


def _faulty(rollout: Rollout, whole: bool) -> bool:
    """Whether the trained turn, or with `whole` any turn, is one that no user should see."""
    replies = _replies(rollout.futures[0].conversation)
    return any(map(_malformed, replies if whole else replies[:1]))


def _replies(conversation: Conversation) -> list[Turn]:
    """The turns that are no calls of tools."""
    roles = [message.role for message in conversation.messages]
    mine = [at for at, role in enumerate(roles) if role == "assistant"]
    own = zip(mine[len(mine) - len(conversation.turns) :], conversation.turns, strict=True)
    return [turn for at, turn in own if roles[at + 1 : at + 2] != ["tool"]]


def _malformed(turn: Turn) -> bool:
    return turn.finish is Finish.LENGTH or turn.fault() is not None
