"""Samples a turn of the policy with a separate token budget for its thought.

The thought is sampled first, up to its end or its budget. If it exceeds the budget, it is closed with the tokens of the
chat template, and the reply is sampled after them (Qwen3's thinking budget, arXiv:2505.09388, section 4.2). The closing
tokens are part of the context and are not trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_collab.settings import SamplingConfig
from megatron_collab.types import THOUGHT_BEGIN, THOUGHT_END, Finish, Turn

if TYPE_CHECKING:  # with LiteLLM, which takes seconds
    from megatron_collab.inference.assistant import Renderer

CLOSED = f"\n{THOUGHT_END}\n\n"  # as in the templates of Qwen3 and DeepSeek


class Ask(Protocol):
    """Assistant.generate with the arguments bound that are the same for the whole turn."""

    async def __call__(
        self,
        prompt_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        stop: int | None = None,
        routing_from: int | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Turn: ...


async def sample_turn(
    ask: Ask,
    renderer: Renderer,
    prompt: tuple[int, ...],
    sampling: SamplingConfig,
    room: int,
    routing_from: int | None = None,
) -> Turn:
    """Sample the turn after `prompt`: at most `room` tokens, within the budgets of `sampling`. Raises EngineError.

    `routing_from`: the first position whose experts are recorded; None records no experts.
    """
    opened = renderer.opens_thought(prompt)
    turn = await _sample_parts(ask, renderer, prompt, sampling, room, opened, routing_from)
    return replace(turn, text=THOUGHT_BEGIN + turn.text) if opened else turn


async def _sample_parts(
    ask: Ask,
    renderer: Renderer,
    prompt: tuple[int, ...],
    sampling: SamplingConfig,
    room: int,
    opened: bool,
    routing_from: int | None,
) -> Turn:
    reply_tokens, budget = sampling.max_new_tokens, sampling.thinking_budget
    if budget is None:
        return await ask(prompt, max_new_tokens=min(reply_tokens, room), routing_from=routing_from)
    thought = await ask(prompt, max_new_tokens=min(budget, room), stop=renderer.thought_end, routing_from=routing_from)
    reply_routing_from = None if routing_from is None else len(prompt) + len(thought.token_ids) - 1
    if thought.token_ids[-1:] == (renderer.thought_end,):
        thought = replace(thought, text=thought.text + THOUGHT_END, finish=Finish.LENGTH)  # until a reply follows
    elif thought.finish is not Finish.LENGTH:
        return thought
    elif opened or THOUGHT_BEGIN in thought.text:
        closing = renderer.tokens(CLOSED)
        if len(thought.token_ids) + len(closing) >= room:  # no room to close it: the turn stays cut
            return thought
        thought = _close(thought, closing)
    else:  # no thought: continue the reply
        reply_tokens -= len(thought.token_ids)
    max_new_tokens = min(reply_tokens, room - len(thought.token_ids))
    if max_new_tokens < 1:
        return thought
    reply_turn = await ask(prompt + thought.token_ids, max_new_tokens=max_new_tokens, routing_from=reply_routing_from)
    parts = [part for part in (thought.routing, reply_turn.routing) if part is not None]
    return replace(
        thought,
        token_ids=thought.token_ids + reply_turn.token_ids,
        log_probs=thought.log_probs + reply_turn.log_probs,
        versions=thought.versions + reply_turn.versions,
        finish=reply_turn.finish,
        text=thought.text + reply_turn.text,
        routing=np.concatenate(parts) if parts else None,
    )


def _close(thought: Turn, closing: tuple[int, ...]) -> Turn:
    """The thought with its closing tokens, which get the weight version of the last sampled token."""
    start = len(thought.token_ids)
    return replace(
        thought,
        token_ids=thought.token_ids + closing,
        log_probs=thought.log_probs + (0.0,) * len(closing),
        versions=thought.versions + thought.versions[-1:] * len(closing),
        text=thought.text + CLOSED,
        forced=(start, start + len(closing)),
    )
