"""The groups of a training step: which are trained, which must be replaced, and the batch of the trained ones."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_collab.algo.credit import CreditSpec, comparable, has_gradient, samples_of
from megatron_collab.algo.teacher_prompts import TeacherPrompts
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.scheduler import Slot
from megatron_collab.rollout.summary import comparison_summary, mean, summary
from megatron_collab.rollout.task_requirements import applicable_metrics
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Batch, Group, Sample


class StepGroups:
    """The groups of a step: which are trained, and how many must be replaced.

    With algo.dynamic_sampling groups without a gradient are replaced, up to that many times (DAPO, arXiv:2503.14476,
    section 3.2). Groups that are not trained stay in the transcripts and in the means.
    """

    def __init__(self, credit: CreditSpec, reward: RewardSpec, step: int) -> None:
        self.credit, self.reward, self.step = credit, reward, step
        self.refill, self.refills = 0, credit.algo.dynamic_sampling
        self.played: list[Group] = []
        self.lacking = 0
        self._trained: dict[Slot, list[Sample]] = {}
        self._idle = self._pairless = 0

    def add(self, groups: Mapping[Slot, Group], prompts: TeacherPrompts | None = None) -> None:
        """Add the groups of a round: the step's regular groups, or a refill.

        `prompts`: of a teacher that knows more than the policy.
        """
        self.lacking = 0
        for slot, group in groups.items():
            samples = samples_of(group, self.credit, len(self.played), self.reward.formula)
            self.played.append(group)
            self._pairless += not samples and self.credit.algo.objective == "dpo"
            samples = comparable(samples, self.credit)
            if self.refills and not has_gradient(samples):
                self._idle += 1
                self.lacking += self.refill < self.refills
            elif prompts:
                self._trained[slot] = [prompts.with_view(sample, group) for sample in samples]
            else:
                self._trained[slot] = samples

    def batch(self) -> Batch:
        """The trained samples, in slot order, and the metrics. Raises RunStopped if there are no samples."""
        samples = tuple(sample for slot in sorted(self._trained) for sample in self._trained[slot])
        if not samples:
            reason = "different rewards" if self.refills or self.credit.algo.objective == "dpo" else "rewards"
            raise RunStopped(f"step {self.step}: no group has enough {reason}; nothing can be trained")
        metrics = summary(self.played, applicable_metrics(self.reward.metrics)) | comparison_summary(self.played)
        trained_groups = float(len(self._trained))
        if self.refills:
            metrics |= {"dynamic/kept": trained_groups, "dynamic/dropped": self._idle, "dynamic/refills": self.refill}
        if self.credit.algo.objective == "dpo":
            metrics["dpo/groups_without_pair"] = self._pairless
        ages = [float(self.step - sample.version) for sample in samples]
        if self.credit.rollout.max_staleness or any(ages):
            metrics |= {"staleness/mean": mean(ages), "staleness/max": max(ages)}
        return Batch(samples, {name: float(value) for name, value in metrics.items()})
