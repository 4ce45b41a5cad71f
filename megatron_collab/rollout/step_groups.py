"""The groups of a training step: which are trained, which must be replaced, and the batch of the trained ones."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_collab.algo.credit import CreditSpec, drop_stale, has_gradient, samples_of
from megatron_collab.algo.teacher_prompts import TeacherPrompts
from megatron_collab.reward.spec import RewardSpec
from megatron_collab.rollout.scheduler import Slot
from megatron_collab.rollout.summary import comparison_summary, mean, summary
from megatron_collab.rollout.task_requirements import applicable_metrics
from megatron_collab.runtime.process import RunStopped
from megatron_collab.types import Batch, Group, Sample


class StepGroups:
    """The groups of a step: which are trained, and how many must be replaced.

    Samples older than rollout.max_staleness are dropped, and a group is replaced if no samples remain. Only groups that
    were in flight before the step can be that old, which bounds the number of `refills`. With algo.dynamic_sampling
    groups without a gradient are replaced too, up to that many times (DAPO, arXiv:2503.14476, section 3.2). Groups that
    are not trained stay in the transcripts and in the means.
    """

    def __init__(self, credit: CreditSpec, prompts: int, reward: RewardSpec, step: int) -> None:
        self.credit, self.reward, self.step = credit, reward, step
        self.max_staleness, self.dynamic = credit.rollout.max_staleness, credit.algo.dynamic_sampling
        self.refill, self.refills = 0, self.dynamic + self.max_staleness * prompts
        self.played: list[Group] = []
        self.lacking = 0
        self._trained: dict[Slot, list[Sample]] = {}
        self._idle = self._dropped = self._pairless = 0

    def add(self, groups: Mapping[Slot, Group], prompts: TeacherPrompts | None = None) -> None:
        """Add the groups of a round: the step's regular groups, or a refill.

        `prompts`: of a teacher that knows more than the policy.
        """
        self.lacking = 0
        for slot, group in groups.items():
            samples = samples_of(group, self.credit, len(self.played), self.reward.formula)
            fresh_samples = drop_stale(samples, self.step - self.max_staleness, self.credit)
            self.played.append(group)
            self._pairless += not samples and self.credit.algo.objective == "dpo"
            self._dropped += len(samples) - len(fresh_samples)
            if samples and not fresh_samples:
                self.lacking += 1
            elif self.dynamic and not has_gradient(fresh_samples):
                self._idle += 1
                self.lacking += self.refill < self.dynamic
            elif prompts:
                self._trained[slot] = [prompts.with_view(sample, group) for sample in fresh_samples]
            else:
                self._trained[slot] = fresh_samples

    def batch(self) -> Batch:
        """The trained samples, in slot order, and the metrics. Raises RunStopped if there are no samples."""
        samples = tuple(sample for slot in sorted(self._trained) for sample in self._trained[slot])
        if not samples:
            reason = "different rewards" if self.dynamic or self.credit.algo.objective == "dpo" else "rewards"
            age = f" of version {self.step - self.max_staleness} or newer" if self.max_staleness else ""
            raise RunStopped(f"step {self.step}: no group has enough {reason}{age}; nothing can be trained")
        metrics = summary(self.played, applicable_metrics(self.reward.metrics)) | comparison_summary(self.played)
        trained_groups = float(len(self._trained))
        if self.dynamic:
            metrics |= {"dynamic/kept": trained_groups, "dynamic/dropped": self._idle, "dynamic/refills": self.refill}
        if self.credit.algo.objective == "dpo":
            metrics["dpo/groups_without_pair"] = self._pairless
        if self.max_staleness or self._dropped:
            ages = [float(self.step - sample.version) for sample in samples]
            metrics |= {"staleness/mean": mean(ages), "staleness/max": max(ages), "staleness/dropped": self._dropped}
            replaced = len(self.played) - len(self._trained) - self._idle
            metrics |= {"staleness/groups_dropped": replaced, "staleness/groups_lacking": self.lacking}
        return Batch(samples, {name: float(value) for name, value in metrics.items()})
