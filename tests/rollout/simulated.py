"""A RolloutManager whose only worker is a function: groups are finished at once, or when the test says so."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_collab.algo.credit import CreditSpec
from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.observability.evaluations import Evaluations
from megatron_collab.observability.sentinels import Alarm
from megatron_collab.rollout.manager import RolloutManager
from megatron_collab.rollout.workers import Workers
from megatron_collab.types import (
    Batch,
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    PausedTurn,
    Reward,
    Rollout,
    Score,
    Task,
    Turn,
)
from tests.helpers import byte_level_tokenizer

TASKS, PROMPTS = 40, 6
EQUAL, DIFFERENT, LOST = [1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, Missing("down"), Missing("down")]
Rewards = Callable[[int], Sequence[Score]]  # by the number of a task


def rollout(value: Score, version: int, ending: Ending = Ending.USER_DONE, reply: str = "x") -> Rollout:
    turn = Turn((1, 2, 3), (10, 11), (-0.25, -0.5), (version, version), Finish.STOP, reply)
    conversation = Conversation((Message("user", "hi"),), (1, 2, 3)).add_turn(turn).end(ending)
    return Rollout(conversation, (Future(conversation, {"right": value}),), Reward(value))


class Reference:
    """What a call of a Ray actor returns."""

    def __init__(self, value: Any, finished: Callable[[], bool] = lambda: True) -> None:
        self.value = value
        self.finished = finished


class Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def remote(self, *arguments: Any) -> Reference:
        answer = self.call(*arguments)
        return answer if isinstance(answer, Reference) else Reference(answer)


class FakeRay:
    """Returns finished calls, the latest first; a value that is an exception is raised."""

    idle = 0

    def get(self, references: Any) -> Any:
        if isinstance(references, list):
            return [self.get(reference) for reference in references]
        if isinstance(references.value, Exception):
            raise references.value
        return references.value

    def wait(
        self, pending: list[Reference], num_returns: int, timeout: float
    ) -> tuple[list[Reference], list[Reference]]:
        assert pending
        finished = [reference for reference in reversed(pending) if reference.finished()][:num_returns]
        self.idle = 0 if finished else self.idle + 1
        assert self.idle < 100, "nothing will ever be finished"
        return finished, [reference for reference in pending if reference not in finished]


class _Workers(Workers):
    def stop(self) -> None:
        """There is no process to stop."""


class World:
    """A run with one worker whose groups have `rewards`, and weights whose version is the step.

    By stream, `played` has the task, `calls` how often it was played, `begun` the version that sampled it and `sets`
    its evaluation set. `written_steps` are the transcripts by step, `tokens` their tokens, `usd` is the money spent,
    `peak` the most groups in flight. Streams in `slow` do not finish; the first time they are played, those in `broken`
    end with errors and those in `unscored` lack their scores, the latter the first `unscored_calls` times. From look
    number `outage` on all servers are lost, until they are revived, which calls `on_revive`; from look number
    `scoring_outage` on those of a reward model, until the run waits for them. `stats` are the metrics of every update,
    `reply` is the text of every turn, `alarms` are those of sentinels. `journal`: keep the journal of an earlier run in
    `folder`. `colocated`: the servers are, so that groups ahead pause: `pauses` has what workers and servers are told
    then, `turns` those that paused groups have sampled, by stream, and `resumed` those with which groups began.
    """

    def __init__(
        self,
        folder: Path,
        rewards: Rewards,
        refills: int = 0,
        state: Mapping[str, Any] | None = None,
        journal: bool = False,
        sets: Any = None,
        colocated: bool = False,
        **rollouts: int,
    ) -> None:
        if not journal:
            shutil.rmtree(folder / "journal", ignore_errors=True)
        self.config = config = Config()
        config.run.dir, config.run.seed, config.data.train = str(folder), 3, str(folder / "tasks.jsonl")
        config.data.eval, config.model.path = sets or config.data.train, str(folder / "model")
        if not (folder / "model").exists():
            byte_level_tokenizer(300).save_pretrained(folder / "model")
        config.train.prompts_per_step, config.train.eval_tasks, config.algo.dynamic_sampling = PROMPTS, 4, refills
        config.reward.max_missing, config.rollout.server.colocated = 0.5, colocated
        for name, value in rollouts.items():
            setattr(config.rollout, name, value)
        rows = [{"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "id": str(i)} for i in range(TASKS)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.rewards = rewards
        self.version = 0
        self.reply = "x"
        self.usd = 0.0
        self.stats = {"loss": 0.25, "grad_norm": 1.5}
        self.played: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        self.sets: dict[str, EvaluationSet | None] = {}
        self.written_steps: dict[int, Sequence[Group]] = {}
        self.evaluated: list[Group] = []
        self.tokens: dict[int, list[Any]] = {}
        self.alarms: list[Alarm] = []
        self.peak = 0
        self.slow: set[str] = set()
        self.broken: set[str] = set()
        self.unscored: set[str] = set()
        self.unscored_calls = 1
        self.calls: Counter[str] = Counter()
        self.looks, self.outage, self.scoring_outage, self.revived = 0, 0, 0, 0
        self.on_revive: Callable[[], None] = lambda: None
        self.pauses: list[str] = []
        self.turns: dict[str, list[PausedTurn]] = {}
        self.resumed: dict[str, list[PausedTurn]] = {}
        self._gone = self._gone_scoring = False
        self.ray = FakeRay()
        actor = SimpleNamespace(
            play=Method(self._play),
            take_counters=Method(lambda: {"asked": 1}),
            spend=Method(lambda: {"usd": self.usd}),
            pause=Method(lambda: self.pauses.append("turns wait")),
            paused=Method(lambda: self.turns),
            resume=Method(lambda: self.pauses.append("turns go on")),
        )
        leader = dist.get_rank() == 0
        servers: Any = SimpleNamespace(
            workers=_Workers([actor], [], actor, ray=self.ray) if leader else None,
            pool=self._pool() if leader else None,
            lost_all=self._lost_all,
            play=play_spec(config),
            wait_for_served=self._wait_for_served,
            timeout=config.launch.timeout / 4,
        )
        weights: Any = SimpleNamespace(version=0, sync=self._sync)
        self.evaluations = Evaluations(folder, config.train.steps)
        run: Any = SimpleNamespace(
            transcripts=lambda step, groups: self.written_steps.update({step: [*groups]}),
            alarms=lambda step, alarms: self.alarms.extend(alarms),
            evaluation_due=lambda set_name, step: self.evaluations.due(set_name, step, config.train.eval_every),
            evaluation=self._record,
            record_metric_kinds=lambda opinions, ground_truths: None,
            record_tokens=lambda step, rows: self.tokens.update({step: [*rows]}),
        )
        data, credit = data_spec(config), CreditSpec(config.algo, config.reward, config.rollout)
        self.manager = RolloutManager(config.train, credit, data, servers, weights, run, state or {})

    @property
    def written(self) -> list[Group]:
        return [group for groups in self.written_steps.values() for group in groups]

    def next(self, step: int) -> Batch:
        """Collect the batch of a step and train on it."""
        self.version = step
        batch = self.manager.collect(step)
        self.manager.learned(self.stats)
        return batch

    def lose_servers(self) -> None:
        """Lose all servers for some time."""
        self._gone = True

    def trained(self, batch: Batch) -> list[int]:
        """The tasks of a batch, in order."""
        return [int(credit.peers.split("/")[1]) for sample in batch.samples[::3] for credit in sample.credits]

    def group(self, task: Task, stream: str) -> Group:
        lost = stream in self.broken and self.calls[stream] == 1
        ending = Ending.ERROR if lost else Ending.USER_DONE
        rewards = self.rewards(int(task.id))
        if stream in self.unscored and self.calls[stream] <= self.unscored_calls:
            rewards = [Missing("no server of the reward model")] * len(rewards)
        return Group(task, tuple(rollout(value, self.version, ending, self.reply) for value in rewards))

    def _pool(self) -> SimpleNamespace:
        pause = lambda: self.pauses.append("servers abort")  # noqa: E731
        return SimpleNamespace(lost_all=lambda: self._gone, recover=self._recover, pause=pause)

    def _play(
        self, task: Task, stream: str, eval_set: EvaluationSet | None, server: int, turns: Sequence[PausedTurn]
    ) -> Reference:
        self.resumed |= {stream: [*turns]} if turns else {}
        self.calls[stream] += 1
        assert self.calls[stream] <= 1 + (stream in self.broken | self.unscored)
        self.played[stream] = int(task.id)
        self.begun[stream] = self.version
        self.sets[stream] = eval_set
        self.peak = max(self.peak, len(self.manager._rank_0_collector.flight))
        return Reference(self.group(task, stream), lambda: stream not in self.slow)

    def _record(
        self,
        name: str,
        set_name: str,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[Group],
        against: str | None,
    ) -> None:
        self.evaluations.records[name] = {"step": step, "set": set_name, **metrics}
        self.evaluated += groups

    def _lost_all(self) -> bool:
        self.looks += 1
        self._gone = self._gone or self.looks == self.outage
        self._gone_scoring = self._gone_scoring or self.looks == self.scoring_outage
        return self._gone or self._gone_scoring

    def _wait_for_served(self) -> None:
        self._gone_scoring = False

    def _sync(self, version: int) -> None:
        self.revived += 1
        self.on_revive()

    def _recover(self) -> None:
        self._gone = False
