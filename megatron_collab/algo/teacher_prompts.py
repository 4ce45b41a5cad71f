"""The prompts of a teacher that knows more than the policy: the same conversation after a longer system message.

With such prompts the policy can be its own teacher. They contain what it could not know when it answered: the right
result, as in on-policy self-distillation (Zhao et al. 2026, arXiv:2601.18734), the user's goal, or what the user said
next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from megatron_collab.algo.credit import sample as make_sample
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.settings import Prompt, read_prompt
from megatron_collab.settings.schema import TeacherConfig
from megatron_collab.types import Conversation, Group, Message, Sample, Task, Turn

CONTEXT = "algo.teacher.context"
_VARIABLES = ("goal", "answer", "next_message")


def teacher_prompt(teacher: TeacherConfig) -> Prompt:
    """The template of the system message to the teacher. Raises ConfigError if it is not valid."""
    return read_prompt("algo.teacher.prompt", teacher.prompt, "teacher", _VARIABLES)


def lacks(context: str, task: Task) -> str | None:
    """What the task lacks if the teacher is to know `context`, in words; None if it lacks nothing."""
    return {"goal": "a goal", "answer": "an answer"}.get(context) if not getattr(task, context, "x") else None


class TeacherPrompts:
    """Puts algo.teacher.context into the system message of the teacher's prompts; every other token is the policy's.

    The prompt of a turn stays the same if there is nothing to add (the conversation ends without another message of the
    user, the task has no goal), if prompt and turn would be longer than `longest` tokens, or if the player began the
    conversation in another way than by rendering the task.
    """

    def __init__(self, teacher: TeacherConfig, renderer: ChatRenderer, thinking: bool | None, longest: int) -> None:
        """`thinking`: of trained turns, as in ChatRenderer."""
        assert teacher.context is not None
        self._context, self._prompt = teacher.context, teacher_prompt(teacher)
        self._renderer, self._thinking, self._longest = renderer, thinking, longest
        self._counts: Counter[str] = Counter()

    def with_view(self, sample: Sample, group: Group) -> Sample:
        """A sample of the group, of one token sequence, with its `teacher_view`. Raises PromptError."""
        rollouts = group.rollouts if sample.origin is None else [group.rollouts[sample.origin[1]]]
        played = [
            conversation
            for rollout in rollouts
            for conversation in (rollout.start, *(future.conversation for future in rollout.futures))
            if any(np.array_equal(turn.stream, sample.token_ids) for turn in conversation.turns)
        ]
        # The longest one has most messages after the turn.
        conversation = max(played, key=lambda conversation: len(conversation.messages))
        turns = []
        for number, turn in enumerate(conversation.turns):
            begin, end = len(turn.prompt_ids), len(turn.stream)
            if np.array_equal(turn.stream, sample.token_ids[:end]) and sample.loss_mask[begin:end].any():
                turns.append(self._informed(group.task, conversation, number))
        return replace(sample, teacher_view=make_sample(turns, ()))

    def _informed(self, task: Task, conversation: Conversation, number: int) -> Turn:
        """Turn `number` of the conversation with the prompt that the teacher reads."""
        turn = conversation.turns[number]
        self._counts["turns"] += 1
        is_next = self._context == "next_message"
        secret = next_message(conversation, number) if is_next else getattr(task, self._context)
        if not secret.strip():
            return turn
        note = self._prompt.render(**dict.fromkeys(_VARIABLES, "") | {self._context: secret}).strip()
        system = [message.content for message in task.messages if message.role == "system"] or [self._renderer.system]
        task_with_note = task.with_system_prompt("\n\n".join(filter(None, [*system, note])))
        begin, begin_with_note = (
            self._renderer.first(version.messages, self._thinking) for version in (task, task_with_note)
        )
        prompt_ids = begin_with_note + turn.prompt_ids[len(begin) :]
        if turn.prompt_ids[: len(begin)] != begin or len(prompt_ids) + len(turn.token_ids) > self._longest:
            return turn
        self._counts["informed"] += 1
        return replace(turn, prompt_ids=prompt_ids, routing=None)

    def take_metrics(self) -> dict[str, float]:
        """The share of trained turns, since the last call, whose teacher read the context."""
        counts, self._counts = self._counts, Counter()
        return {"teacher/informed": counts["informed"] / counts["turns"]} if counts["turns"] else {}


def next_message(conversation: Conversation, number: int) -> str:
    """The user's message after turn `number` of the policy; empty if there is none."""
    replies = [at for at, message in enumerate(conversation.messages) if message.role == "assistant"]
    at = replies[len(replies) - len(conversation.turns) :][number]
    return next((message.content for message in conversation.messages[at + 1 :] if message.role == "user"), "")


def check_rendered(teacher: TeacherConfig, renderer: ChatRenderer) -> None:
    """Raises ValueError if the chat template cannot show the teacher a system message."""
    try:
        renderer.check_shown([Message("system", "x"), Message("user", "x")])
    except ValueError as error:
        raise ValueError(f"{CONTEXT}={teacher.context}: {error}") from error
