"""Builds conversations turn by turn, like CollabLLM's data (arXiv:2502.00640).

Of several candidates for a turn the one with the best reward continues, with the user's answer in one of its futures.
"""

from __future__ import annotations

import logging
import random
from typing import Any

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.spec import RunSpec
from megatron_collab.rollout.evaluation import Evaluator
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.scheduler import GroupRequest, Slot
from megatron_collab.rollout.summary import evaluation_summary, refuse_incomplete
from megatron_collab.rollout.task_requirements import applicable_metrics
from megatron_collab.synthesis.built import FOLDER, write
from megatron_collab.synthesis.meter import Meter
from megatron_collab.types import Conversation, Ending, Group, Message, Missing, Rollout, Task

logger = logging.getLogger(__name__)


class Synthesis(Evaluator):
    """Builds a conversation for each task of the sets of data.eval, concurrently, and writes all candidates as rows.

    The metrics of an evaluation are recorded too, over all candidates.
    """

    def __init__(self, config: BuildDatasetConfig, spec: RunSpec, *evaluator: Any, **more: Any) -> None:
        """`spec`: the settled settings, with the language models that are called; the others are those of Evaluator."""
        super().__init__(*evaluator, **more)
        self.config, self.spec = config, spec
        self._conversations: BuiltConversations | None = None  # of the set that was begun last

    def _begin(self, eval_set: EvaluationSet, name: str, step: int) -> None:
        tasks = self._prepared(eval_set)
        title = f"conversations{f' of {eval_set.name}' if eval_set.name else ''}"
        meter = Meter(self.config, self.spec, tasks, title, self._rank_0_lead.spend)
        self._conversations = BuiltConversations(self.play, len(tasks), meter)
        self._flight = self._rank_0_lead.flight(self.play, follow_up=self._conversations.follow_up)
        for index, task in enumerate(tasks):
            self._flight.begin(GroupRequest(Slot(0, 0, index), f"build-{eval_set.name}-{index}.0", task))
        self._flight.wait_for(len(tasks), title)

    def _begin_again(self, eval_set: EvaluationSet, name: str, step: int) -> bool:
        """Never: a later turn depends on the candidates of earlier ones."""
        return False

    def _record(self, eval_set: EvaluationSet, name: str, step: int) -> None:
        assert self._conversations is not None
        conversations, self._flight = self._conversations, None
        logger.info(conversations.meter.line())
        groups = [group for conversation in conversations.groups for group in conversation]
        refuse_incomplete(name, groups, self.play.reward.max_missing)
        write(self.play.run_dir / FOLDER, eval_set.name or "train", conversations.groups, self.play, self.config)
        metrics = evaluation_summary(groups, applicable_metrics(self.play.reward.metrics))
        self.run.evaluation(name, eval_set.name, step, metrics, groups)


class BuiltConversations:
    """The conversations of a set while they are built: groups[n] are the turns of conversation n so far."""

    def __init__(self, play: PlaySpec, count: int, meter: Meter) -> None:
        self.groups: list[list[Group]] = [[] for _ in range(count)]
        self.meter = meter
        self._play = play

    def follow_up(self, request: GroupRequest, group: Group) -> GroupRequest | None:
        """The request for the next turn of a conversation; None if the conversation has ended."""
        self.groups[request.slot.number].append(group)
        draw = random.Random(f"{self._play.seed}/{request.stream}")
        task = next_task(group, self._play.rollout.max_messages or 0, draw)
        self.meter.turn(ended=task is None)
        if task is None:
            return None
        turn = request.slot.step + 1
        stream = f"{request.stream.rpartition('.')[0]}.{turn}"
        return GroupRequest(Slot(turn, 0, request.slot.number), stream, task)


def best_rollout(group: Group) -> Rollout | None:
    """The candidate that continues: the first with the largest reward; None if all are malformed or unscored."""
    scored = [rollout for rollout in group.rollouts if not isinstance(rollout.reward.value, Missing)]
    eligible = [rollout for rollout in scored if not rollout.malformed]
    return max(eligible, key=lambda rollout: float(rollout.reward.value), default=None)  # type: ignore[arg-type]


def reply_of(rollout: Rollout) -> tuple[Message, ...]:
    """The messages of the trained turn: tool calls and their answers, then the reply."""
    messages = rollout.start.messages
    question = max(at for at, message in enumerate(messages) if message.role == "user")
    return messages[question + 1 :]


def next_task(group: Group, longest: int, draw: random.Random) -> Task | None:
    """The task of the next turn; None if the conversation ends. `longest`: most messages of user and policy.

    It ends if the drawn future has no answer of the user, or if that answer ended the future.
    """
    rollout = best_rollout(group)
    if rollout is None:
        return None
    future = draw.choice(rollout.futures).conversation
    after = future.messages[len(rollout.start.messages) :]
    if not after or after[0].role != "user" or (future.ending is Ending.USER_DONE and len(after) == 1):
        return None
    task = group.task.play_on(*reply_of(rollout), after[0])
    return task if Conversation(task.messages, ()).message_count < longest else None
