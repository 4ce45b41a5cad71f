"""How much more probable each turn, and what the user or a tool answered to it, made the task's answer for the policy.

The reward of turns of IGPO (Wang et al. 2025, Information Gain-based Policy Optimization, arXiv:2510.14967, section 3),
whose advantages are reward.turn_credit=igpo.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron_collab.reward.metrics import Metric
from megatron_collab.settings import option
from megatron_collab.types import Conversation, Missing, Task

_NOT_COMPUTED = Missing("rollout.player computed no log-probs of the answer; derive it from FuturesPlayer")


class InformationGain(Metric):
    """g_t = p_{t+1} - p_t of turns t < T, p_t = exp(1/L sum_j log pi(a_j | prompt of turn t, lead, a_1 ... a_{j-1})).

    a are the L tokens of the task's answer. The last turn has no next prompt: its gain is 0, and the other metrics
    reward it. The published code has a fixed sentence as `lead`, which closes the thought.
    """

    learned = True

    @dataclass(frozen=True)
    class Options:
        lead: str = option("", "text before the answer in the reply whose probability is measured")

    @classmethod
    def answer_lead(cls, options: Any) -> str | None:
        lead: str = options.lead
        return lead

    @classmethod
    def reads_tokens(cls, options: Any) -> bool:
        return True

    @classmethod
    def lacks(cls, options: Any, task: Task) -> str | None:
        return None if task.answer else "an answer"

    async def score_turns(self, task: Task, conversation: Conversation) -> Sequence[float] | Missing | None:
        if not task.answer:
            return None
        log_probs = conversation.answer_log_probs.get(self.options.lead, _NOT_COMPUTED)
        if isinstance(log_probs, Missing):
            return log_probs
        gains = [math.exp(after) - math.exp(before) for before, after in pairwise(log_probs)]
        return [*gains, *[0.0] * bool(log_probs)]
