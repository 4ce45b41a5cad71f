"""Credit assignment: from rollouts with rewards to samples, each with its trained turns, their credits and peers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from numbers import Integral, Real

import numpy as np

from megatron_collab.algo.advantages import advantage_class, decoupled
from megatron_collab.algo.turn_credit import Episode, Share, make_turn_credit
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import AlgoConfig, RewardConfig, TrainingRewardConfig, TrainingRolloutConfig
from megatron_collab.types import Credit, Future, Group, Missing, Reward, Rollout, Sample, Task, Turn

RewardFormula = Callable[[Sequence[Future]], Reward]  # the reward of a turn from its scored futures
_WHOLE, _MALFORMED = "<reward>", "<malformed>"  # names of reward parts that belong to no metric


@dataclass(frozen=True)
class CreditSpec:
    """How the rollouts of a group become samples."""

    algo: AlgoConfig
    reward: TrainingRewardConfig
    rollout: TrainingRolloutConfig

    @property
    def min_rewards(self) -> int:
        """Smallest number of rewards in a group that can give a gradient."""
        if self.algo.objective != "policy":
            return 2 if self.algo.objective == "dpo" else 1
        return 2 if advantage_class(self.algo.advantage).compares and self.algo.teacher.weight < 1 else 1


def samples_of(group: Group, spec: CreditSpec, number: int, formula: RewardFormula) -> list[Sample]:
    """The trained sequences of a group with their credits; rollouts without a reward are dropped.

    `number` is the group's index in the batch; it tells two groups of the same task apart. If the estimator compares
    rollouts with each other, a group with fewer than two rewards gives no samples. For dpo the samples are a pair, the
    better one first. `formula`: that of reward.mode.
    """
    rollouts = [rollout for rollout in group.rollouts if not isinstance(rollout.reward.value, Missing)]
    if spec.algo.objective != "policy":
        rollouts = select_rollouts(rollouts, spec)
    if len(rollouts) < spec.min_rewards:
        return []
    places = [*map(id, group.rollouts)]
    origins = [(number, places.index(id(rollout))) for rollout in rollouts]
    if spec.algo.objective == "policy" and advantage_class(spec.algo.advantage).decouples:
        rollouts = _decoupled(rollouts, spec.reward)
    name = f"{number}/{group.task.id}"
    if spec.reward.mode != "single_turn" and spec.rollout.futures == 0:
        whole = conversation_samples(group.task, rollouts, spec.reward, name)
        samples = [replace(turns, origin=origin) for turns, origin in zip(whole, origins, strict=True)]
    else:
        samples = _with_futures(rollouts, origins, spec, name, formula)
    overlong = spec.algo.objective == "policy" and spec.algo.overlong
    return [penalize_overlong(sample, spec) for sample in samples] if overlong else samples


def select_rollouts(rollouts: Sequence[Rollout], spec: CreditSpec) -> list[Rollout]:
    """For algo.objective=sft the first of the best rollouts; for dpo also the first of the worst, after it.

    Empty if there is nothing to learn: the best rollout is malformed; or, for dpo, best and worst have equal rewards,
    differ by less than algo.dpo.gap, or have the same tokens.

    sft: RAFT (Dong et al. 2023, arXiv:2304.06767, algorithm 1). dpo: online DPO (Guo et al. 2024, arXiv:2402.04792),
    which compares two replies.
    """
    best, worst = max(rollouts, key=_total_reward, default=None), min(rollouts, key=_total_reward, default=None)
    if best is None or worst is None or best.malformed:
        return []
    if spec.algo.objective == "sft":
        return [best]
    gap = _total_reward(best) - _total_reward(worst)
    differ = [turn.token_ids for turn in best.start.turns] != [turn.token_ids for turn in worst.start.turns]
    return [best, worst] if gap > 0 and gap >= spec.algo.dpo.gap and differ else []


def _total_reward(rollout: Rollout) -> float:
    """The rollout's reward plus the rewards that users and tools gave for its turns."""
    assert not isinstance(rollout.reward.value, Missing)
    return rollout.reward.value + sum(rollout.start.turn_rewards)


def has_gradient(samples: Sequence[Sample]) -> bool:
    """Whether some credit of trained tokens differs from its peers, so that the loss has a gradient."""
    credits = [credit for sample in samples for credit in sample.credits]
    values: dict[str, set[float]] = defaultdict(set)
    for credit in credits:
        values[credit.peers].add(credit.value)
    return any(credit.spans and len(values[credit.peers]) > 1 for credit in credits)


def comparable(samples: Sequence[Sample], spec: CreditSpec) -> list[Sample]:
    """The samples of a group that have enough peers among them."""
    while True:
        peers = Counter(name for sample in samples for name in {credit.peers for credit in sample.credits})
        enough = {name for name, count in peers.items() if count >= spec.min_rewards}
        kept = [s for s in samples if any(credit.spans and credit.peers in enough for credit in s.credits)]
        if len(kept) == len(samples):
            return kept
        samples = kept


def conversation_samples(
    task: Task, rollouts: Sequence[Rollout], reward: TrainingRewardConfig, name: str
) -> list[Sample]:
    """Complete conversations of the group `name` as one sample each, with the credits of reward.turn_credit.

    Raises RunStopped if a custom rule gives no valid shares for the turns of each conversation.
    """
    episodes = [_episode(task, rollout, reward.weights) for rollout in rollouts]
    shares = make_turn_credit(reward).shares(episodes)
    fault = _share_fault(episodes, shares)
    if fault:
        raise RunStopped(f"reward.turn_credit={reward.turn_credit}: {fault}")
    return [_shared(episode.conversation.turns, parts, name) for episode, parts in zip(episodes, shares, strict=True)]


def _episode(task: Task, rollout: Rollout, weights: Mapping[str, float]) -> Episode:
    """The rewards of a conversation by turn; turn scores count with the weights of their metrics in reward.weights.

    The rest of the conversation's reward comes at its end, so the sum is that of the reward and the turns' rewards.
    """
    value, rewards, turn_scores = rollout.reward.value, [*rollout.start.turn_rewards], rollout.futures[0].turn_scores
    assert not isinstance(value, Missing)
    for metric in rollout.reward.parts.keys() & turn_scores.keys():
        for turn, score in enumerate(turn_scores[metric]):
            rewards[turn] += weights[metric] * score
            value -= weights[metric] * score
    return Episode(task, rollout.start, (*rewards[:-1], rewards[-1] + value), turn_scores)


def _shared(turns: Sequence[Turn], shares: Sequence[Share], name: str) -> Sample:
    """The sample of the turns that have a share, with a credit for each share."""
    trained = sorted({turn for share in shares for turn in share.turns})
    spans = dict(zip(trained, _spans([turns[turn] for turn in trained]), strict=True))
    credits = []
    for share in shares:
        peers, weights = f"{name}/{share.peers}" if share.peers else name, tuple(share.turns.values())
        weights = () if set(weights) == {1.0} else weights
        credits.append(Credit(tuple(spans[turn] for turn in share.turns), share.value, peers, peers, weights))
    return replace(sample([turns[turn] for turn in trained], credits), turns=tuple(trained))


def _share_fault(episodes: Sequence[Episode], shares: object) -> str | None:
    """What is wrong with the shares that a rule gave; None if they are shares of the turns of each conversation."""
    if not isinstance(shares, Sequence):
        return f"gave {shares!r:.80}; give a list of shares for each conversation"
    if len(shares) != len(episodes):
        return f"gave shares of {len(shares)} of {len(episodes)} conversations; give a list for each"
    for episode, parts in zip(episodes, shares, strict=True):
        if not isinstance(parts, Sequence) or not all(map(_is_share, parts)):
            return f"gave {parts!r:.80} for a conversation; give a list of Share(number, {{turn: number}}, label)"
        indices = {turn for share in parts for turn in share.turns}
        if not indices or not indices <= {*range(len(episode.rewards))}:
            return (
                f"gave shares of the turns {sorted(indices)} of {len(episode.rewards)}; give turns of each conversation"
            )
        numbers = [number for share in parts for number in (share.value, *share.turns.values())]
        if not np.isfinite(numbers).all():
            return "gave numbers that are not finite"
    return None


def _is_share(part: object) -> bool:
    """Whether it is a Share with fields of the declared types; the dataclass does not check them."""
    if not isinstance(part, Share) or not isinstance(part.turns, Mapping) or not isinstance(part.peers, str):
        return False
    integers = all(isinstance(turn, Integral) for turn in part.turns)
    return integers and all(isinstance(number, Real) for number in (part.value, *part.turns.values()))


def penalize_overlong(sample: Sample, spec: CreditSpec) -> Sample:
    """The sample with lower credits for turns that reach into the last share `algo.overlong` of their token limit.

    With the limit L, c = overlong L and n tokens in the credit's longest turn, the penalty is 0 up to n = L - c, then
    (n - (L - c)) / c, which is 1 at L (soft overlong punishment of DAPO, arXiv:2503.14476, equation 13). It lowers the
    credit only, not the recorded reward. A turn with several credits lowers the first of them only.
    """
    limit = (spec.rollout.future if sample.later else spec.rollout.turn).longest
    cost = spec.algo.overlong * limit
    credits, charged = list[Credit](), set[tuple[int, int]]()
    for credit in sample.credits:
        longest = max((stop - start for start, stop in credit.spans if (start, stop) not in charged), default=0)
        credits.append(replace(credit, value=credit.value - min(max(longest - limit + cost, 0.0) / cost, 1.0)))
        charged.update(credit.spans)
    return replace(sample, credits=tuple(credits))


def sample(turns: Sequence[Turn], credits: Sequence[Credit], *, before: Sequence[Turn] = ()) -> Sample:
    """Trained turns of a conversation, each after the prompt it was sampled from, with the `credits` of their `_spans`.

    A turn is in the same token sequence as the turn before it if its prompt continues that turn; else it begins a new
    sequence (rollout.strip_thoughts). `before`: the turns up to the trained one, if `turns` are later ones.
    """
    streams = _streams(turns)
    token_ids = np.concatenate([np.array(stream, np.int64) for stream in streams])
    mask: np.ndarray = np.zeros(len(token_ids), np.float32)
    log_probs = np.zeros_like(mask)
    for turn, (start, stop) in zip(turns, _spans(turns), strict=True):
        mask[start:stop], log_probs[start:stop] = 1.0, turn.log_probs
        mask[start + turn.forced[0] : start + turn.forced[1]] = 0.0
    oldest = min((version for turn in turns for version in turn.versions), default=0)
    cuts = tuple(accumulate(len(stream) for stream in streams))[:-1]
    parts = [part for stream in streams if (part := _routing(stream, [*before, *turns])) is not None]
    routing = np.concatenate(parts) if parts else None
    return Sample(token_ids, mask, log_probs, tuple(credits), oldest, bool(before), cuts, routing)


def _decoupled(rollouts: Sequence[Rollout], reward: RewardConfig) -> list[Rollout]:
    """Copies of a group's rollouts with rewards `decoupled` from their parts; the recorded rewards do not change.

    A malformed turn has no parts. It gets the group's worst part of each metric, and reward.malformed counts as one
    more metric.
    """
    scored = [_parts(rollout.reward) for rollout in rollouts if not rollout.malformed]
    names = sorted(set.intersection(*map(set, scored))) if scored else []
    worst = {name: min(parts[name] for parts in scored) for name in names}
    penalty = reward.malformed or 0.0
    rows = [
        {**worst, _MALFORMED: penalty} if rollout.malformed else {**_parts(rollout.reward), _MALFORMED: 0.0}
        for rollout in rollouts
    ]
    weights = {name: reward.weights.get(name, 1.0) for name in names}
    values = decoupled(rows, {**weights, _MALFORMED: penalty})
    pairs = zip(rollouts, values, strict=True)
    return [replace(rollout, reward=replace(rollout.reward, value=float(value))) for rollout, value in pairs]


def _parts(reward: Reward) -> dict[str, float]:
    """The reward's parts by metric; one part for all of it if a custom reward function returns no parts."""
    assert not isinstance(reward.value, Missing)
    return dict(reward.parts) or {_WHOLE: float(reward.value)}


def _with_futures(
    rollouts: Sequence[Rollout],
    origins: Sequence[tuple[int, int]],
    spec: CreditSpec,
    name: str,
    formula: RewardFormula,
) -> list[Sample]:
    """The trained turn of each rollout, followed, with rollout.train_turns=all, by the later turns of the futures.

    The later turns of a future get its reward. Their peers are the future's siblings: the futures of the same trained
    turn. Their scale is the group's, because a few siblings give a poor estimate of it, and small differences between
    them stay small. A future without trained tokens (it ends with the trained turn, or has no sibling to compare with)
    adds a credit without spans to the rollout's sample.
    """
    first, later = [], []
    for number, (rollout, origin) in enumerate(zip(rollouts, origins, strict=True)):
        assert not isinstance(rollout.reward.value, Missing)
        turns = rollout.start.turns
        credits = [Credit(_spans(turns), rollout.reward.value, name, name)]
        if spec.rollout.train_turns == "all" and not rollout.start.ending:
            scored = [(future.conversation, formula([future]).value) for future in rollout.futures]
            known = [(at, *future) for at, future in enumerate(scored) if not isinstance(future[1], Missing)]
            for at, conversation, value in known:
                assert not isinstance(value, Missing)
                trained = conversation.turns[len(turns) :] if len(known) >= spec.min_rewards else ()
                credit = Credit(_spans(trained), value, f"{name}/later/{number}", f"{name}/later")
                if trained:
                    later.append(replace(sample(trained, [credit], before=turns), origin=(*origin, at)))
                else:
                    credits.append(credit)
        first.append(replace(sample(turns, credits), origin=origin))
    return first + later


def _spans(turns: Sequence[Turn]) -> tuple[tuple[int, int], ...]:
    """The span of each turn's tokens in the sample of these turns."""
    spans, begin = list[tuple[int, int]](), 0
    for before, turn in pairwise([None, *turns]):
        assert turn is not None
        if before is not None and not _goes_on(before, turn):
            begin += len(before.stream)
        start = begin + len(turn.prompt_ids)
        spans.append((start, start + len(turn.token_ids)))
    return tuple(spans)


def _streams(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """The token sequences of the sample; each ends with the last of a run of turns that continue one another."""
    ends = [turn for turn, after in pairwise([*turns, None]) if turn and not (after and _goes_on(turn, after))]
    return [turn.stream for turn in ends]


def _routing(stream: tuple[int, ...], turns: Sequence[Turn]) -> np.ndarray | None:
    """The experts of each token of `stream`, as in Sample, from the first of `turns` that has them; None if none has.

    The first turn is the one that sampled the token or had it in its prompt. A later turn recomputes the token if the
    engine's cache evicted it, and may then route it to other experts.
    """
    parts, known = list[np.ndarray](), 0
    for turn in turns:
        if turn.routing is not None and turn.stream == stream[: len(turn.stream)]:
            end = len(turn.stream) - 1  # the last token has not been read
            begin = end - len(turn.routing)
            assert begin <= known, f"no turn has the experts of tokens {known} to {begin}"
            parts.append(turn.routing[known - begin :])
            known = max(known, end)
    return np.concatenate([*parts, np.zeros_like(parts[0][:1])]) if parts else None


def _goes_on(before: Turn, turn: Turn) -> bool:
    """Whether the prompt of `turn` begins with the complete stream of `before`."""
    return turn.prompt_ids[: len(before.stream)] == before.stream
