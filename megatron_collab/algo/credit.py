"""From rewarded rollouts to samples: which turns are trained, and what each of them is credited with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_collab.algo.advantage import EPSILON, grpo
from megatron_collab.config import Config, future_range, reward_to_go_gamma
from megatron_collab.reward.mr import turn_reward
from megatron_collab.types import Conversation, Group, Missing, Rollout, Sample


def samples_of(group: Group, config: Config) -> list[Sample]:
    """The trained sequences of a group with their advantages; what has no reward leaves its group.

    A group with fewer than two rewards has nothing to compare and gives no samples.
    """
    rollouts = [rollout for rollout in group.rollouts if not isinstance(rollout.reward.value, Missing)]
    if len(rollouts) < 2:
        return []
    if config.reward.mode != "single_turn" and future_range(config.rollout.futures) == (0, 0):
        return _whole(rollouts, config.reward.turn_credit)
    samples = _first(rollouts)
    return samples + _later(rollouts, config) if config.rollout.train_turns == "all" else samples


def _first(rollouts: Sequence[Rollout]) -> list[Sample]:
    """The trained turn of each rollout, compared with those of the others (GRPO)."""
    advantages_G = grpo(np.array([rollout.reward.value for rollout in rollouts], dtype=np.float64))
    return [
        sample(rollout.start, [float(advantage)] * len(rollout.start.turns))
        for rollout, advantage in zip(rollouts, advantages_G, strict=True)
    ]


def _whole(rollouts: Sequence[Rollout], turn_credit: str) -> list[Sample]:
    """Whole conversations: every turn of the policy, by its credit, compared with the credits of the group.

    With `last` and `equal` a conversation has one credit, and conversations are compared (GRPO as in verl's
    multi-turn rollout); with reward_to_go each turn has its own, and all turns of the group are (UserRL, arXiv
    2509.19736, section 3).
    """
    credits = [turn_credits(rollout, turn_credit) for rollout in rollouts]
    gamma = reward_to_go_gamma(turn_credit)
    if gamma is None:
        per_rollout = grpo(np.array([credit[-1] for credit in credits], dtype=np.float64))
        advantages = [
            [None if value is None else float(advantage) for value in credit]
            for credit, advantage in zip(credits, per_rollout, strict=True)
        ]
    else:
        flat = grpo(np.array([value for credit in credits for value in credit], dtype=np.float64))
        ends = np.cumsum([len(credit) for credit in credits])[:-1]
        advantages = [[float(value) for value in part] for part in np.split(flat, ends)]
    return [sample(rollout.start, values) for rollout, values in zip(rollouts, advantages, strict=True)]


def turn_credits(rollout: Rollout, turn_credit: str) -> list[float | None]:
    """What each turn of a whole conversation is credited with; None where it is not trained.

    The turns' own rewards r_t come from users and tools, and the conversation's reward R at its end. `last` gives
    sum_t r_t + R to the last turn alone, `equal` to every turn; reward_to_go(gamma) gives turn t
    sum_{k >= t} gamma^(k-t) r_k, where the last r includes R.
    """
    conversation, value = rollout.start, rollout.reward.value
    assert not isinstance(value, Missing)
    rewards = [*conversation.turn_rewards[:-1], conversation.turn_rewards[-1] + value]
    if turn_credit == "equal":
        return [sum(rewards)] * len(rewards)
    if turn_credit == "last":
        return [*[None] * (len(rewards) - 1), sum(rewards)]
    gamma = reward_to_go_gamma(turn_credit)
    assert gamma is not None
    returns: list[float | None] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.insert(0, following)
    return returns


def _later(rollouts: Sequence[Rollout], config: Config) -> list[Sample]:
    """The turns of the futures after the trained one, each with the mean over the futures that run through it.

    Futures part at the trained turn, so through a later turn runs its own alone. It is compared with its siblings,
    the futures of the same trained turn, which had the same to go on from; the scale is that of the whole group,
    since few siblings give no good one, and a small difference between them is a small one.
    """
    reward = config.reward
    values = [
        [turn_reward([future.scores], reward.weights, reward.mode, reward.clamp).value for future in rollout.futures]
        for rollout in rollouts
        if not rollout.start.ending
    ]
    numbers = [value for siblings in values for value in siblings if not isinstance(value, Missing)]
    scale = float(np.std(numbers)) + EPSILON if numbers else 1.0
    made = []
    for rollout, siblings in zip([r for r in rollouts if not r.start.ending], values, strict=True):
        known = [value for value in siblings if not isinstance(value, Missing)]
        for future, value in zip(rollout.futures, siblings, strict=True):
            trained, conversation = len(rollout.start.turns), future.conversation
            if isinstance(value, Missing) or len(known) < 2 or len(conversation.turns) == trained:
                continue
            advantage = (value - float(np.mean(known))) / scale
            later = len(conversation.turns) - trained
            made.append(sample(conversation, [None] * trained + [advantage] * later))
    return made


def sample(conversation: Conversation, advantages: Sequence[float | None]) -> Sample:
    """The sequence up to the policy's last turn with one advantage a turn; turns with None are not trained.

    What users and tools said is never trained.
    """
    last = conversation.turns[-1]
    token_ids = np.array(last.prompt_ids + last.token_ids, np.int64)
    mask: np.ndarray = np.zeros(len(token_ids), np.float32)
    advantage_S, log_probs = np.zeros_like(mask), np.zeros_like(mask)
    for turn, advantage in zip(conversation.turns, advantages, strict=True):
        if advantage is not None:
            span = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids))
            mask[span], advantage_S[span], log_probs[span] = 1.0, advantage, turn.log_probs
    return Sample(token_ids, mask, advantage_S, log_probs)
