"""A turn of the policy whose thought has a token budget of its own.

The thought is sampled first, up to its end or to its budget. Over the budget it is closed as the chat template writes
it, and the reply is sampled after that (Qwen3's thinking budget, arXiv:2505.09388, section 4.2). A thought that was
closed is seen and not trained at the tokens that closed it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from megatron_collab.config import SamplingConfig
from megatron_collab.inference.assistant import Renderer
from megatron_collab.types import THOUGHT_BEGIN, THOUGHT_END, Finish, Turn

CLOSED = f"\n{THOUGHT_END}\n\n"  # as the templates of Qwen3 and DeepSeek have it


class Ask(Protocol):
    """Assistant.generate without what is the same for all of a turn."""

    async def __call__(
        self,
        prompt_ids: tuple[int, ...],
        *,
        max_new_tokens: int,
        stop: int | None = None,
        routing_from: int | None = None,
    ) -> Turn: ...


async def sampled(
    ask: Ask,
    renderer: Renderer,
    prompt: tuple[int, ...],
    sampling: SamplingConfig,
    room: int,
    routing_from: int | None = None,
) -> Turn:
    """The turn after `prompt`, of at most `room` tokens, within the budgets of `sampling`. Raises EngineError.

    `routing_from`: the first position of which it has the experts, None for none.
    """
    opened = renderer.opens_thought(prompt)
    turn = await _sampled(ask, renderer, prompt, sampling, room, opened, routing_from)
    return replace(turn, text=THOUGHT_BEGIN + turn.text) if opened else turn


async def _sampled(
    ask: Ask,
    renderer: Renderer,
    prompt: tuple[int, ...],
    sampling: SamplingConfig,
    room: int,
    opened: bool,
    routing_from: int | None,
) -> Turn:
    reply, budget = sampling.max_new_tokens, sampling.thinking_budget
    if budget is None:
        return await ask(prompt, max_new_tokens=min(reply, room), routing_from=routing_from)
    thought = await ask(prompt, max_new_tokens=min(budget, room), stop=renderer.thought_end, routing_from=routing_from)
    unread = None if routing_from is None else len(prompt) + len(thought.token_ids) - 1
    if thought.token_ids[-1:] == (renderer.thought_end,):
        thought = replace(thought, text=thought.text + THOUGHT_END, finish=Finish.LENGTH)  # until a reply follows
    elif thought.finish is not Finish.LENGTH:
        return thought
    elif opened or THOUGHT_BEGIN in thought.text:
        closing = renderer.tokens(CLOSED)
        if len(thought.token_ids) + len(closing) >= room:  # it stays cut
            return thought
        thought = _closed(thought, closing)
    else:  # it does not think, and goes on with its reply
        reply -= len(thought.token_ids)
    left = min(reply, room - len(thought.token_ids))
    if left < 1:
        return thought
    rest = await ask(prompt + thought.token_ids, max_new_tokens=left, routing_from=unread)
    parts = [part for part in (thought.routing, rest.routing) if part is not None]
    return replace(
        thought,
        token_ids=thought.token_ids + rest.token_ids,
        log_probs=thought.log_probs + rest.log_probs,
        versions=thought.versions + rest.versions,
        finish=rest.finish,
        text=thought.text + rest.text,
        routing=np.concatenate(parts) if parts else None,
    )


def _closed(thought: Turn, closing: tuple[int, ...]) -> Turn:
    """The thought with the tokens that close it, which count as of the weights that have sampled its last one."""
    start = len(thought.token_ids)
    return replace(
        thought,
        token_ids=thought.token_ids + closing,
        log_probs=thought.log_probs + (0.0,) * len(closing),
        versions=thought.versions + thought.versions[-1:] * len(closing),
        text=thought.text + CLOSED,
        forced=(start, start + len(closing)),
    )
