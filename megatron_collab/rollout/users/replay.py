"""A recorded user: says the messages of metadata["replay"] one after the other, then ends the conversation."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_collab.rollout.users import User, UserError, UserReply
from megatron_collab.types import Conversation


class ReplayUser(User):
    async def start(self, conversation: Conversation) -> None:
        self._recorded()

    async def reply(self, conversation: Conversation) -> UserReply:
        said = sum(message.role == "user" for message in conversation.messages[len(self.task.messages) :])
        left = self._recorded()[said:]
        return self.says(left[0] if left else self.users.config.user.stop)

    def _recorded(self) -> Sequence[str]:
        """Raises UserError where the task holds no recording."""
        recorded = self.task.metadata.get("replay")
        if not isinstance(recorded, Sequence) or isinstance(recorded, str):
            raise UserError(f"user replay: task {self.task.id} has no list metadata.replay")
        if not all(isinstance(text, str) and text.strip() for text in recorded):
            raise UserError(f"user replay: metadata.replay of task {self.task.id} holds what is no message")
        return recorded
