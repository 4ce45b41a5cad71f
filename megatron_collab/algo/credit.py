"""Credit assignment: from rewarded rollouts to samples, with the trained turns, their credits and their peers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from megatron_collab.algo.advantages import GROUPED, decoupled
from megatron_collab.config import Config, RewardConfig
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.types import Credit, Group, Missing, Reward, Rollout, Sample, Turn

_WHOLE, _MALFORMED = "<reward>", "<malformed>"  # parts of rewards, beside those of metrics


def samples_of(group: Group, config: Config, number: int) -> list[Sample]:
    """The trained sequences of a group with their credits; rollouts without a reward are dropped.

    `number` is that of the group in the batch, since the same task may be played twice. Where rollouts are compared
    with each other, a group with fewer than two rewards gives no samples. For dpo they are a pair, the
    better one first.
    """
    rollouts = [rollout for rollout in group.rollouts if not isinstance(rollout.reward.value, Missing)]
    if config.objective != "policy":
        rollouts = chosen(rollouts, config)
    if len(rollouts) < _fewest(config):
        return []
    if config.objective == "policy" and config.algo.advantage == "gdpo":
        rollouts = _decoupled(rollouts, config.reward)
    name = f"{number}/{group.task.id}"
    if config.reward.mode != "single_turn" and config.rollout.futures == 0:
        samples = [whole(rollout, config.reward, name) for rollout in rollouts]
    else:
        samples = _with_futures(rollouts, config, name)
    overlong = config.objective == "policy" and config.algo.overlong
    return [without_overlong(one, config) for one in samples] if overlong else samples


def chosen(rollouts: Sequence[Rollout], config: Config) -> list[Rollout]:
    """The first of the best rollouts for algo.objective=sft, and for dpo after it the first of the worst.

    None where nothing is to be learned: the best one is malformed; or no worse than the worst one, or by less than
    algo.dpo.gap, or word for word the same.

    sft: RAFT (Dong et al. 2023, arXiv:2304.06767, algorithm 1). dpo: online DPO (Guo et al. 2024, arXiv:2402.04792),
    there of two replies.
    """
    best, worst = max(rollouts, key=_worth, default=None), min(rollouts, key=_worth, default=None)
    if best is None or worst is None or best.malformed:
        return []
    if config.objective == "sft":
        return [best]
    gap = _worth(best) - _worth(worst)
    differ = [turn.token_ids for turn in best.start.turns] != [turn.token_ids for turn in worst.start.turns]
    return [best, worst] if gap > 0 and gap >= config.algo.dpo.gap and differ else []


def _worth(rollout: Rollout) -> float:
    """Its reward, with what users and tools gave for its turns."""
    assert not isinstance(rollout.reward.value, Missing)
    return rollout.reward.value + sum(rollout.start.turn_rewards)


def teaches(samples: Sequence[Sample]) -> bool:
    """Whether some credit of trained tokens differs from its peers, so that there is a gradient."""
    credits = [credit for sample in samples for credit in sample.credits]
    values: dict[str, set[float]] = defaultdict(set)
    for credit in credits:
        values[credit.peers].add(credit.value)
    return any(credit.spans and len(values[credit.peers]) > 1 for credit in credits)


def fresh(samples: Sequence[Sample], oldest: int, config: Config) -> list[Sample]:
    """The samples of a group of version `oldest` or newer that still have enough peers among these."""
    kept, fewest = [sample for sample in samples if sample.version >= oldest], _fewest(config)
    while True:
        peers = Counter(name for sample in kept for name in {credit.peers for credit in sample.credits})
        before, kept = kept, [s for s in kept if any(c.spans and peers[c.peers] >= fewest for c in s.credits)]
        if len(kept) == len(before):
            return kept


def whole(rollout: Rollout, reward: RewardConfig, name: str) -> Sample:
    """A whole conversation with its credits, compared with all others of this `name`.

    The turns' own rewards r_t come from users and tools, and the conversation's reward R at its end. `last` gives
    sum_t r_t + R to the last turn alone, `equal` to all turns together, so that conversations are compared (GRPO as
    in verl's multi-turn rollout). `reward_to_go` gives turn t sum_{k >= t} gamma^(k-t) r_k (gamma: reward.turn_gamma),
    where the last r includes R, and all turns of the group are compared (UserRL, arXiv:2509.19736, section 3).
    """
    conversation, value = rollout.start, rollout.reward.value
    assert not isinstance(value, Missing)
    turns, rewards = conversation.turns, [*conversation.turn_rewards[:-1], conversation.turn_rewards[-1] + value]
    if reward.turn_credit != "reward_to_go":
        credited = turns if reward.turn_credit == "equal" else turns[-1:]
        return sample(credited, [Credit(_spans(credited), sum(rewards), name, name)])
    returns = [*accumulate(reversed(rewards), lambda following, own: own + reward.turn_gamma * following)][::-1]
    pairs = zip(_spans(turns), returns, strict=True)
    return sample(turns, [Credit((span,), worth, name, name) for span, worth in pairs])


def without_overlong(sample: Sample, config: Config) -> Sample:
    """The sample with less value where a turn takes the last `algo.overlong` of the tokens that it may have.

    A credit loses what its longest turn of n tokens costs: with the limit L, of which c = overlong L are at its end,
    0 up to L - c, then (n - (L - c)) / c, which is 1 at L (soft overlong punishment of DAPO, arXiv:2503.14476,
    equation 13). The credit alone loses it, not the reward that is recorded.
    """
    limit = (config.rollout.future if sample.later else config.rollout.turn).longest
    cost = config.algo.overlong * limit

    def lowered(credit: Credit) -> Credit:
        longest = max((stop - start for start, stop in credit.spans), default=0)
        return replace(credit, value=credit.value - min(max(longest - limit + cost, 0.0) / cost, 1.0))

    return replace(sample, credits=tuple(map(lowered, sample.credits)))


def sample(turns: Sequence[Turn], credits: Sequence[Credit], *, before: Sequence[Turn] = ()) -> Sample:
    """Trained turns of a conversation, each after the prompt that it saw, with the `credits` of their `_spans`.

    A turn whose prompt goes on from the turn before is in the same token sequence; the others begin sequences of their
    own (rollout.strip_thoughts). `before`: the turns up to the trained one, where these are later.
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
    """The rollouts of a group with rewards that are `decoupled` from their parts; those that are recorded stay.

    A malformed turn has no parts: it has the worst of each metric, and reward.malformed counts as one more metric.
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
    """Its parts by metric; all of it where a reward function of the user's own names none."""
    assert not isinstance(reward.value, Missing)
    return dict(reward.parts) or {_WHOLE: float(reward.value)}


def _with_futures(rollouts: Sequence[Rollout], config: Config, name: str) -> list[Sample]:
    """The trained turn of each rollout, then, with rollout.train_turns=all, the later turns of their futures.

    The later turns of a future have its reward and are compared with its siblings: futures of the same trained turn.
    The scale is that of the whole group: few siblings give no good one, and small differences between them stay small.
    Futures in which nothing is trained (those that end with the trained turn, and those that have no sibling to be
    compared with) give the rollout's sample a credit without spans.
    """
    first, later = [], []
    for number, rollout in enumerate(rollouts):
        assert not isinstance(rollout.reward.value, Missing)
        turns = rollout.start.turns
        credits = [Credit(_spans(turns), rollout.reward.value, name, name)]
        if config.rollout.train_turns == "all" and not rollout.start.ending:
            reward = reward_function(config.reward)
            scored = [(future.conversation, reward([future]).value) for future in rollout.futures]
            known = [(conversation, value) for conversation, value in scored if not isinstance(value, Missing)]
            for conversation, value in known:
                own = conversation.turns[len(turns) :] if len(known) >= _fewest(config) else ()
                credit = Credit(_spans(own), value, f"{name}/later/{number}", f"{name}/later")
                if own:
                    later.append(sample(own, [credit], before=turns))
                else:
                    credits.append(credit)
        first.append(sample(turns, credits))
    return first + later


def _fewest(config: Config) -> int:
    """Fewest rewards of a group that give a gradient."""
    if config.objective != "policy":
        return 2 if config.objective == "dpo" else 1
    return 2 if config.algo.advantage in GROUPED else 1


def _spans(turns: Sequence[Turn]) -> tuple[tuple[int, int], ...]:
    """Where each turn's tokens stand in the sample of these turns."""
    spans, begin = list[tuple[int, int]](), 0
    for before, turn in pairwise([None, *turns]):
        assert turn is not None
        if before is not None and not _goes_on(before, turn):
            begin += len(before.stream)
        start = begin + len(turn.prompt_ids)
        spans.append((start, start + len(turn.token_ids)))
    return tuple(spans)


def _streams(turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """The token sequences of the sample: each up to the last of the turns that go on from one another."""
    ends = [turn for turn, after in pairwise([*turns, None]) if turn and not (after and _goes_on(turn, after))]
    return [turn.stream for turn in ends]


def _routing(stream: tuple[int, ...], turns: Sequence[Turn]) -> np.ndarray | None:
    """The experts of each token of `stream`, as in Sample; of the first of `turns` that has them, None where none has.

    That is the turn that has sampled the token, or was asked with it. A later one reads it again where the engine's
    cache has lost it, and it may then go to other experts.
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
    """Whether the prompt of `turn` begins with all of `before`."""
    return turn.prompt_ids[: len(before.stream)] == before.stream
