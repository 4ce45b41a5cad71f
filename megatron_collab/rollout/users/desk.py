"""Users of the desk world."""

from __future__ import annotations

from megatron_collab.data.transcript import visible_messages
from megatron_collab.environments import desk_user
from megatron_collab.rollout.users import User, UserReply
from megatron_collab.settings import UserConfig
from megatron_collab.types import Conversation, Task


class DeskUser(User):
    """`desk` answers as the kind of user that the task's goal names, at random.

    The draws depend on the conversation's name alone, so that a resumed run gets the same answers.
    """

    @classmethod
    def check_task(cls, task: Task, argument: str, settings: UserConfig) -> None:
        desk_user.read_goal(task.goal)

    async def reply(self, conversation: Conversation) -> UserReply:
        self.users.counters["user_replies"] += 1
        goal = desk_user.read_goal(self.task.goal)
        return self.says(desk_user.reply(goal, visible_messages(conversation.messages), self.sample))
