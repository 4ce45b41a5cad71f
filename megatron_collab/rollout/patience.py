"""How long a group may take by the settings of what it waits for: who waits longer, waits for nothing."""

from __future__ import annotations

from math import ceil

from megatron_collab.config import Config
from megatron_collab.reward import metrics

STARTS = 2  # a group whose worker dies is played again from its beginning


def group_seconds(config: Config, groups: int) -> float:
    """Seconds in which a group of `groups` in flight is finished, unless something hangs.

    A trained turn and its futures have rollout.deadline each, what is scored waits for a place and then has its own
    limit. Never less than it can take: every conversation counts as played to its end, every call as needed as often
    as it may be tried.
    """
    conversations = groups * config.train.rollouts_per_prompt * max(1, config.rollout.futures)
    return STARTS * (2 * config.rollout.deadline + _score_seconds(config, conversations))


def _score_seconds(config: Config, conversations: int) -> float:
    """For the scores of conversations that all end at once, one worker having to be found stuck."""
    reward, judge = config.reward, config.reward.judge
    places = reward.workers * reward.concurrency
    kinds = [metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights]
    judged = sum(kind.judged(options) for kind, options in kinds)
    scoring = ceil(conversations / places) * reward.timeout
    if judged:
        places = min(places, config.llm.max_concurrent)
        scoring = max(scoring, ceil(judged * conversations / places) * judge.deadline)
    return scoring + 2 * reward.timeout + _limiter_seconds(config, judged * conversations, conversations)


def _limiter_seconds(config: Config, judgements: int, conversations: int) -> float:
    """What the limits of llm hold up judgements, and what users say before them."""
    user, judge, llm = config.user, config.reward.judge, config.llm
    said = conversations * config.rollout.max_user_turns * user.attempts
    calls = judgements * judge.attempts + said
    tokens = judgements * judge.attempts * judge.max_tokens + said * user.max_tokens
    tokens += calls * config.rollout.context_length  # prompts
    minutes = calls / (llm.requests_per_minute or float("inf")) + tokens / (llm.tokens_per_minute or float("inf"))
    return 60 * minutes
