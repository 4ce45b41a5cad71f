"""The scripted user of a shipped world: `scripted/WORLD` is megatron_collab.environments.WORLD.reply(goal, messages).

It sees what a language model in its place would: no tool calls, no thoughts. Guardrails do not apply to it.
"""

from __future__ import annotations

import importlib

from megatron_collab.config import WORLDS, Config
from megatron_collab.data.transcript import shown
from megatron_collab.rollout.users import User, UserReply, Users
from megatron_collab.types import Conversation, Task


class ScriptedUser(User):
    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self._world = importlib.import_module(f"megatron_collab.environments.{argument}")

    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        worlds = {name: importlib.import_module(f"megatron_collab.environments.{name}") for name in WORLDS}
        known = [name for name, world in worlds.items() if hasattr(world, "reply")]
        return None if argument in known else f"no such world; there is scripted/{', scripted/'.join(known)}"

    async def reply(self, conversation: Conversation) -> UserReply:
        """What the script says to the conversation."""
        self.users.counters["user_replies"] += 1
        return self.says(self._world.reply(self.task.goal, shown(conversation.messages)))
