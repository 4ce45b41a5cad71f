"""How probable the policy finds the task's answer before each turn of an ended conversation, for metrics that read it.

Players ask for it, since their requests wait while colocated servers pause, and change servers if one is lost. All
prompts of a conversation are read at once, by the same weights unless a sync falls between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from itertools import takewhile
from statistics import fmean
from typing import TYPE_CHECKING

from megatron_collab.inference.client import EngineError
from megatron_collab.rollout.thinking import CLOSED
from megatron_collab.types import Conversation, Missing

if TYPE_CHECKING:  # with LiteLLM, which takes seconds
    from megatron_collab.inference.assistant import Renderer

Tokens = tuple[int, ...]
LogProbs = Callable[[Tokens, Tokens], Awaitable[tuple[float, ...]]]  # of tokens after a prompt


async def with_answer_log_probs(
    conversation: Conversation, answer: str, leads: Iterable[str], log_probs: LogProbs, renderer: Renderer
) -> Conversation:
    """The conversation with `answer_log_probs` for each of `leads`; Missing if the engine fails."""
    values = {lead: await _by_turn(conversation, answer, lead, log_probs, renderer) for lead in leads}
    return replace(conversation, answer_log_probs=values)


async def _by_turn(
    conversation: Conversation, answer: str, lead: str, log_probs: LogProbs, renderer: Renderer
) -> tuple[float, ...] | Missing:
    """The mean log-prob of a token of `answer` after the prompt of each turn and `lead`.

    A thought that the prompt opens is closed first. A token that has both the end of `lead` and the beginning of
    `answer` belongs to the answer.
    """
    before, reply = renderer.tokens(lead), renderer.tokens(lead + answer)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, reply, strict=False)))
    before, reply = reply[:common], reply[common:]
    if not reply:
        return Missing(f"the answer {answer!r:.80} has no tokens")

    async def mean(prompt: Tokens) -> float:
        thought = renderer.tokens(CLOSED) if renderer.opens_thought(prompt) else ()
        return fmean(await log_probs((*prompt, *thought, *before), reply))

    try:
        return tuple(await asyncio.gather(*(mean(turn.prompt_ids) for turn in conversation.turns)))
    except EngineError as error:
        return Missing(str(error))
