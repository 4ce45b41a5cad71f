"""Rank 0's work for the batch of a step: begins groups, takes them when they are finished, and has some replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_collab.algo.teacher_prompts import TeacherPrompts
from megatron_collab.data.datasets import TrainingData
from megatron_collab.data.spec import DataSpec
from megatron_collab.inference.teacher import ServedTeacher
from megatron_collab.observability import sentinels, tokens
from megatron_collab.observability.run import Run
from megatron_collab.rollout.lead import Lead
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.scheduler import GroupRequest, Slot
from megatron_collab.rollout.step_groups import StepGroups
from megatron_collab.rollout.summary import refuse_missing
from megatron_collab.rollout.task_requirements import task_requirements
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import TrainConfig
from megatron_collab.settings.schema import TeacherConfig
from megatron_collab.types import Batch, Group, PausedTurn, ScoredBatch, Task

_COUNTING_SECONDS = 2.0  # for RewardWorkers to return their counters; late ones are skipped


class Collector:
    """Collects the groups of training, on rank 0 only; see RolloutManager for which groups a step has."""

    def __init__(
        self,
        train: TrainConfig,
        play: PlaySpec,
        teacher: TeacherConfig,
        data: DataSpec,
        run: Run,
        lead: Lead,
        state: Mapping[str, Any],
    ) -> None:
        """`state`: the one of an earlier start of the run, or {}."""
        self.lead = lead
        self.flight = lead.flight(play)
        self.state = dict(state)  # JSON: the sentinels' baselines
        self._train, self._play, self._run = train, play, run
        with keys.in_environment():
            tools = play.tools.schemas()
        self._teacher_prompts = None
        if teacher.context:
            limits = play.rollout.turn.enable_thinking, play.rollout.context_length
            self._teacher_prompts = TeacherPrompts(teacher, data.prompt.renderer(tools), *limits)
        served = teacher.server if teacher.place == "server" else None
        self._served_teacher = ServedTeacher(served, play.rollout.turn_timeout) if served else None
        self._tasks = TrainingData[Task](data, tools, partial(task_requirements, play))
        self._next: int | None = None  # the first step of which no group was begun
        self._is_paused = False
        self._spent = lead.spend()
        self._pieces = data.prompt.pieces
        self._played: tuple[int, Sequence[Group]] = (0, ())  # a step with its groups, until its tokens are recorded

    def begin(self, step: int, max_staleness: int) -> None:
        """Begin the groups of `step` and of the steps ahead that have not begun, and wait for those of `step`.

        If an earlier start has paused groups at the end of `step`, those begin one step later, from where they paused.
        """
        if not self.flight:  # an outage while nothing was in flight has no effect
            self.lead.pool.recover()
        self.resume()
        last = min(step + max_staleness, self._train.steps - 1)
        if self.lead.journal.paused(step) is not None:
            last = step
        first = step if self._next is None else self._next
        turns = self.lead.journal.paused(step - 1) or {}
        for later in range(first, last + 1):
            for number in range(self._train.prompts_per_step):
                self._begin(Slot(later, 0, number), turns)
        self._next = max(first, last + 1)
        self.flight.wait_for(self._train.prompts_per_step, f"step {step} rollouts")

    def choose(self, step_groups: StepGroups) -> Batch | None:
        """Take the finished groups; the batch, or None if replacements of some groups must be played first.

        Raises RunStopped if too many scores are missing, no group can be trained, or an alarm stops the run.
        """
        step = step_groups.step
        step_groups.add(self.flight.take(), self._teacher_prompts)
        try:
            refuse_missing(step_groups.played, self._play.reward.max_missing)
        except RunStopped:
            self._run.transcripts(step, step_groups.played)
            raise
        if step_groups.lacking and step_groups.refill < step_groups.refills:
            step_groups.refill += 1
            for number in range(step_groups.lacking):
                self._begin(Slot(step, step_groups.refill, number), {})
            self.flight.wait_for(step_groups.lacking, f"step {step} refill {step_groups.refill}")
            return None
        self._run.transcripts(step, step_groups.played)
        batch = step_groups.batch()
        if self._train.record_tokens:
            self._played = step, step_groups.played
        watch = self._watch(step, step_groups.played)
        metrics = {**batch.metrics, **self._step_metrics(), **watch.metrics}
        if self._teacher_prompts:
            metrics |= self._teacher_prompts.take_metrics()
        if self._served_teacher:
            batch = replace(batch, samples=self._served_teacher.with_log_probs(batch.samples))
        batch = replace(batch, metrics=metrics)
        self.state = {"sentinels": watch.state}
        if step_groups.credit.rollout.server.colocated and self.flight:
            self._pause(step)
        return batch

    def resume(self) -> None:
        """Let the workers request turns again; the servers have the next weights."""
        if self._is_paused:
            if self.lead.pool.lost_all():  # during the pause; another sync would abort the turns that now go on
                self.flight.mark_interrupted()
                self.lead.pool.recover()
            self.lead.workers.resume(self.lead.timeout)
            self._is_paused = False

    def _pause(self, step: int) -> None:
        """Pause the groups ahead where they are, since the servers release their memory, and journal their turns.

        How far they are depends on timing. A run that resumes here continues from the same tokens and therefore trains
        the same batches.
        """
        turns = self.lead.workers.pause(self.lead.pool.pause, self.lead.timeout)
        self._is_paused = True
        self.flight.collect_all_but(turns, self.lead.timeout)  # the others have finished, and may be on their way
        self.lead.journal.pause(step, turns)

    def record_tokens(self, batch: ScoredBatch, log_probs: Sequence[np.ndarray]) -> None:
        """As RolloutManager.record_tokens."""
        (step, groups), self._played = self._played, (0, ())
        self._run.record_tokens(step, tokens.rows_of(groups, batch, log_probs, self._pieces()))

    def _watch(self, step: int, groups: Sequence[Group]) -> sentinels.Watch:
        """What the sentinels of reward hacking see. Raises RunStopped at an alarm, if train.stop_on_alarm is set."""
        reward = self._play.reward
        measured = sentinels.measure(groups, reward.opinions, reward.ground_truths)
        watch = sentinels.watch(self.state.get("sentinels", {}), measured)
        self._run.alarms(step, watch.alarms)
        if watch.alarms and self._train.stop_on_alarm:
            raise RunStopped(f"step {step + 1}: {watch.alarms[0].text()}; to go on, set train.stop_on_alarm=false")
        return watch

    def _begin(self, slot: Slot, turns: Mapping[str, Sequence[PausedTurn]]) -> None:
        """Begin a group for the slot's task; every refill draws tasks in a different order.

        `turns`: those sampled before a pause, by stream.
        """
        seed = self._play.seed
        if slot.refill:
            seed = int(np.random.SeedSequence((seed, slot.refill)).generate_state(1)[0])
        at = slot.step * self._train.prompts_per_step + slot.number
        request = GroupRequest(slot, slot.stream, self._tasks.at(at, seed), turns=turns.get(slot.stream, ()))
        self.flight.begin(request)

    def _step_metrics(self) -> dict[str, float]:
        """Counters of users, tools and servers, and costs of users and judges, since the last step."""
        counts: Counter[str] = Counter()
        players = enumerate(self.lead.workers.conversations)
        calls = {f"the counters of conversation-{n}": player.take_counters.remote() for n, player in players}
        for counters in self.lead.workers.answers(calls, self.lead.timeout):
            counts.update(counters)
        reward_calls = [worker.take_counters.remote() for worker in self.lead.workers.rewards]
        for counters in self.lead.workers.available_results(reward_calls, _COUNTING_SECONDS):
            counts.update(counters)
        if self.flight.from_journal:
            counts["from_journal"], self.flight.from_journal = self.flight.from_journal, 0
        before, self._spent = self._spent, self.lead.spend()
        step = spending(before, self._spent)
        named = {name if name.startswith("llm/") else f"count/{name}": float(n) for name, n in sorted(counts.items())}
        return {**named, **step}


def spending(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The difference of two totals of the limiter, as metrics; without llm/usd if the price of a call is unknown."""
    step = {f"llm/{name}": float(total - before[name]) for name, total in sorted(after.items())}
    if step.get("llm/unpriced"):
        del step["llm/usd"]
    return step
