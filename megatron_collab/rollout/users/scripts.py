"""Users without a model, whose messages follow from the task: scripted by its world, or recorded in it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_collab import environments
from megatron_collab.config import Config, ConfigError
from megatron_collab.data.transcript import shown
from megatron_collab.rollout.users import User, UserError, UserReply, Users
from megatron_collab.types import Conversation, Task


class ScriptedUser(User):
    """`scripted/WORLD` answers by the environment's script, from the task's goal and the conversation.

    The script sees what an llm user sees: no tool calls, no thoughts. Guardrails do not apply to it.
    """

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self.script = environments.find_script(argument)

    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        try:
            environments.find_script(argument)
        except ConfigError as error:
            return str(error)
        return None

    async def reply(self, conversation: Conversation) -> UserReply:
        self.users.counters["user_replies"] += 1
        return self.says(self.script(self.task.goal, shown(conversation.messages)))


class ReplayUser(User):
    """A recorded user: says the messages of metadata["replay"] one after the other, then ends the conversation."""

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
            raise UserError(f"user replay: metadata.replay of task {self.task.id} holds an entry that is no message")
        return recorded
