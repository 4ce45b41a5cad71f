"""The supervised stage: batches of conversations whose assistant messages are learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.datasets import Cursor, load_conversations
from megatron_collab.types import Batch, Finish, Message, Sample, Turn


class SupervisedData:
    """Batches of data.train by step; the same on every rank, from (run.seed, step) alone."""

    def __init__(self, config: Config) -> None:
        self.renderer = ChatRenderer(config.model.path)
        self.conversations = load_conversations(Path(config.data.train))
        self.cursor = Cursor(len(self.conversations), config.run.seed)
        self.size = config.train.prompts_per_step

    def batch(self, step: int) -> Batch:
        rows = self.cursor.batch(step, self.size)
        return Batch(tuple(render(self.renderer, self.conversations[row]) for row in rows))


def render(renderer: ChatRenderer, messages: Sequence[Message]) -> Sample:
    """Token ids of a conversation with a loss on every assistant message, its end-of-turn token included.

    Built from the pieces a rollout is built from, so that training and sampling see the same stream.
    """
    first = next(i for i, message in enumerate(messages) if message.role == "assistant")
    token_ids = renderer.first(messages[:first])
    mask = [0.0] * len(token_ids)
    for i in range(first, len(messages), 2):
        reply = renderer.reply(messages[i].content)
        turn = Turn(token_ids, reply, (0.0,) * len(reply), (0,) * len(reply), Finish.STOP, messages[i].content)
        between = renderer.next(messages[i + 1 : i + 2], turn) if i + 1 < len(messages) else ()
        token_ids += reply + between
        mask += [1.0] * len(reply) + [0.0] * len(between)
    loss_mask = np.array(mask, np.float32)
    return Sample(np.array(token_ids, np.int64), loss_mask, np.zeros_like(loss_mask))
