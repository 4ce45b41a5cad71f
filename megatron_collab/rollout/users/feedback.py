"""A user who compares the policy's answer with the task's, like the metric accuracy, and says when it is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_collab.reward.metrics.accuracy import compare
from megatron_collab.reward.metrics.equality import Verdict
from megatron_collab.rollout.users import User, UserError, UserReply, Users
from megatron_collab.settings import SUFFIX, ConfigError, PromptError, UserConfig, option, read_prompt
from megatron_collab.types import Conversation, Missing, Task

RIGHT = "That is right."
VARIABLES = ("attempt", "question", "reply")  # of options.text; attempt is the number of wrong answers, from 1


class FeedbackUser(User):
    """Says that an answer is wrong until it is right, then ends the conversation; a reply without an answer is wrong.

    math-verify compares the answer stated in the reply with the task's. Each turn gets the reward `right` or `wrong`.
    """

    @dataclass(frozen=True)
    class Options:
        text: str | None = option(None, "reply to a wrong answer: a text, or FILE.j2; null: the built-in one")
        right: float = option(0.0, "reward of a turn with the right answer")
        wrong: float = option(0.0, "reward of a turn without it")

    def __init__(self, task: Task, argument: str, sample: str, users: Users) -> None:
        super().__init__(task, argument, sample, users)
        self.attempt = 0
        self.checked = 0  # number of the policy's turns that have been rewarded

    @classmethod
    def unavailable(cls, argument: str, settings: UserConfig) -> str | None:
        text = settings.options.get("text")
        try:
            if text is None or text.endswith(SUFFIX):
                read_prompt("text", text, "feedback", VARIABLES)
        except ConfigError as error:
            return str(error)
        return super().unavailable(argument, settings)

    @classmethod
    def lacks(cls, task: Task) -> str | None:
        return None if task.answer.strip() else "an answer"

    async def start(self, conversation: Conversation) -> None:
        if self.lacks(self.task):
            raise UserError(f"user feedback: task {self.task.id} has no answer to check against")

    async def reply(self, conversation: Conversation) -> UserReply:
        self.users.counters["user_replies"] += 1
        if await self._right(conversation):
            return self.says(f"{RIGHT} {self.users.settings.stop}", self.options.right)
        self.attempt += 1
        return self.says(self._correction(conversation), self.options.wrong)

    async def finish(self, conversation: Conversation) -> float:
        """The reward of a last turn that got no reply, e.g. at the turn limit."""
        if conversation.ending or len(conversation.turns) == self.checked:
            return 0.0
        try:
            return self.options.right if await self._right(conversation) else self.options.wrong
        except UserError:  # keep the conversation; only count that this turn has no reward
            self.users.counters["user_failed"] += 1
            return 0.0

    async def _right(self, conversation: Conversation) -> bool:
        self.checked = len(conversation.turns)
        verdict = await compare(self.task.answer, [conversation.messages[-1].content])
        if isinstance(verdict, Missing):
            raise UserError(f"user feedback: {verdict.why}")
        if verdict is Verdict.NO_TRUTH:
            raise UserError(f"user feedback: math-verify cannot read the answer of task {self.task.id}")
        return verdict is Verdict.EQUAL

    def _correction(self, conversation: Conversation) -> str:
        text = self.options.text
        if text is not None and not text.endswith(SUFFIX):
            return text
        question, reply = self.task.messages[-1].content, conversation.messages[-1].content
        try:
            prompt = read_prompt("text", text, "feedback", VARIABLES)
            return prompt.render(attempt=self.attempt, question=question, reply=reply)
        except PromptError as error:
            raise UserError(f"user feedback: {error}") from error
