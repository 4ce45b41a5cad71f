"""Several rewards for the same recorded futures: their merged metrics, the scores, and the resulting rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.reward.multiturn import malformed_last
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.reward.workers import Job, RewardWorker, Scores
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Missing, Reward, Rollout, Score, Turn

_CUT_OFF = (Ending.ERROR, Ending.DEADLINE)
_NOT_PLAYED = Missing("its conversation ended at the malformed turn in this run")
_NO_TOKENS = Missing("transcripts have no token ids, and the run did not count tokens")


@dataclass(frozen=True)
class MergedMetrics:
    """The metrics of several rewards, without duplicates, by name.

    `names`: per reward, its own metric names and the merged names they map to.
    """

    metrics: Mapping[str, ScoredMetric]
    names: Mapping[str, Mapping[str, str]]

    def scores_of(self, title: str, scores: Scores) -> Scores:
        """The scores of a future that the reward `title` uses, by that reward's metric names."""
        return {name: scores[shared] for name, shared in self.names[title].items() if shared in scores}


def merge_metrics(rewards: Mapping[str, RewardSpec]) -> MergedMetrics:
    """The metrics of all rewards; metrics with the same settings are merged."""
    merged: dict[str, ScoredMetric] = {}
    names: dict[str, dict[str, str]] = {title: {} for title in rewards}
    for title, reward in rewards.items():
        for name, metric in reward.metrics.items():
            shared = next((known for known, other in merged.items() if other.same_as(metric)), None)
            if shared is None:
                shared = f"{title}/{name}" if name in merged else name
                merged[shared] = replace(metric, name=shared, settings={"metric": name, **metric.settings})
            names[title][name] = shared
    return MergedMetrics(merged, names)


async def rescore(
    worker: RewardWorker, groups: Sequence[Group], recorded: Mapping[str, ScoredMetric], done: Callable[[int], None]
) -> dict[int, Scores]:
    """Scores of the worker's metrics by the id() of the future; `done` is called with each number of newly scored ones.

    Metrics that read token ids keep the scores that the run recorded with its metrics `recorded`. Raises RunStopped.
    """
    counted = {name: metric for name, metric in worker.scored.items() if metric.reads_tokens}
    rescored = tuple(name for name in worker.scored if name not in counted)
    source = {
        name: next((known for known, other in recorded.items() if other.same_as(metric)), "")
        for name, metric in counted.items()
    }
    scores_by_future: dict[int, Scores] = {}
    jobs: list[tuple[Future, Job]] = []
    for group in groups:
        for future in (future for rollout in group.rollouts for future in rollout.futures):
            conversation = future.conversation
            if conversation.ending in _CUT_OFF:  # half a conversation says nothing about the policy
                scores_by_future[id(future)] = dict.fromkeys(worker.scored, Missing(conversation.error))
                continue
            scores_by_future[id(future)] = {name: future.scores.get(source[name], _NO_TOKENS) for name in counted}
            if conversation.ending is not Ending.MALFORMED:
                jobs.append((future, Job(rescored, group.task, conversation)))
    async for results in worker.score([job for _, job in jobs]):
        for index, scored in results.items():
            scores_by_future[id(jobs[index][0])] |= scored.scores
        done(len(results))
    return scores_by_future


def group_rewards(
    group: Group, scores: Mapping[int, Scores], reward: RewardSpec, *, all_turns: bool = False
) -> list[Reward]:
    """The reward of each rollout of a recorded group; `scores` maps the id() of a future to its scores.

    A malformed turn gets reward.malformed; it has no reward if that is null and the run did not play the turn on.
    `all_turns`: a malformed turn anywhere counts, not only the trained one.
    """
    rollouts, formula = list[Rollout](), reward.formula
    for rollout in group.rollouts:
        if reward.malformed is not None and (rollout.malformed or _faulty(rollout, all_turns)):
            ended = rollout.start.end(Ending.MALFORMED)
            rollouts.append(Rollout(ended, (Future(ended, {}),), Reward(reward.malformed)))
        elif rollout.malformed:
            rollouts.append(Rollout(rollout.start, (), Reward(_NOT_PLAYED)))
        else:
            futures = tuple(replace(future, scores=scores[id(future)]) for future in rollout.futures)
            rollouts.append(Rollout(rollout.start, futures, formula(futures)))
    return [rollout.reward for rollout in (malformed_last(rollouts) if reward.malformed_worst else rollouts)]


def agreement(first: Sequence[Sequence[Reward]], second: Sequence[Sequence[Reward]]) -> float:
    """Share of pairs of trained turns, of one task, that two rewards rank alike; NaN without a pair.

    Pairs with equal rewards do not count. `first` and `second`: per task, the rewards of its rollouts.
    """
    alike = unlike = 0
    for pairs in (zip(*rewards, strict=True) for rewards in zip(first, second, strict=True)):
        for (a, b), (c, d) in combinations(pairs, 2):
            sign = _difference(a.value, c.value) * _difference(b.value, d.value)
            alike, unlike = alike + (sign > 0), unlike + (sign < 0)
    return alike / (alike + unlike) if alike + unlike else float("nan")


def _difference(a: Score, b: Score) -> float:
    return 0.0 if isinstance(a, Missing) or isinstance(b, Missing) else a - b


def _faulty(rollout: Rollout, all_turns: bool) -> bool:
    """Whether the trained turn, or any turn if `all_turns`, is malformed."""
    replies = _replies(rollout.futures[0].conversation)
    return any(map(_malformed, replies if all_turns else replies[:1]))


def _replies(conversation: Conversation) -> list[Turn]:
    """The turns that are not tool calls."""
    roles = [message.role for message in conversation.messages]
    positions = [at for at, role in enumerate(roles) if role == "assistant"]
    turns = zip(positions[len(positions) - len(conversation.turns) :], conversation.turns, strict=True)
    return [turn for at, turn in turns if roles[at + 1 : at + 2] != ["tool"]]


def _malformed(turn: Turn) -> bool:
    return turn.finish is Finish.LENGTH or turn.fault() is not None
