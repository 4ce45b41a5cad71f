"""Produces the batch of a step: Ray workers play groups of rollouts, which become samples with credits.

Rank 0 calls the workers and broadcasts the batch; the other ranks wait for it in short collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from megatron_collab.algo.credit import CreditSpec
from megatron_collab.data.spec import DataSpec
from megatron_collab.observability.run import Run
from megatron_collab.rollout.collector import Collector
from megatron_collab.rollout.evaluation import Evaluator
from megatron_collab.rollout.journal import WeightDigests
from megatron_collab.rollout.lead import Lead
from megatron_collab.rollout.scheduler import wait
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.step_groups import StepGroups
from megatron_collab.runtime.process import RunStopped, beat
from megatron_collab.runtime.rank0 import from_leader, shared
from megatron_collab.settings import TrainConfig
from megatron_collab.types import Batch, ScoredBatch
from megatron_collab.weight_sync.sync import WeightSync

logger = logging.getLogger(__name__)


class RolloutManager(AbstractContextManager["RolloutManager"]):
    """Produces batches of rollouts by step. Sampling runs up to rollout.max_staleness steps ahead of training.

    Tasks and sampling seeds depend only on (run.seed, slot). The slots of a step depend only on the step, so every
    group is trained once, in its own step, and a resumed run collects the same groups. Groups ahead keep playing while
    the ranks train, or pause if the servers are colocated.
    """

    def __init__(
        self,
        train: TrainConfig,
        credit: CreditSpec,
        data: DataSpec,
        servers: Servers,
        weights: WeightSync,
        run: Run,
        state: Mapping[str, Any],
    ) -> None:
        """`state`: the result of `state()` in an earlier start of the run, or {}."""
        self._train, self._credit = train, credit
        self._servers, self._weights = servers, weights
        self._digests = WeightDigests(credit.rollout.max_staleness + 1, state.get("weights", ()))
        lead = Lead.of(servers, self._digests)
        teacher = credit.algo.teacher
        self._collector = Collector(train, servers.play, teacher, data, run, lead, state) if lead else None
        background = self._collector.flight if self._collector else None
        self._evaluator = Evaluator(servers.play, data, run, self._restore, lead, background)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """If the run was stopped, write finished groups to the journal and stop the workers; always write costs.

        Failures here are printed; they neither skip the remaining steps nor replace the error that ends the run.
        """
        collector, parts = self._collector, list[Callable[[], object]]()
        if collector and kind is None:
            parts = [collector.lead.journal.forget, collector.lead.spend]
        elif collector and issubclass(kind or Exception, RunStopped):
            collect, stop = partial(collector.flight.collect, 0.0), collector.lead.workers.stop
            parts = [collect, self._evaluator.save, stop, collector.lead.spend]
        for part in parts:
            try:
                part()
            except Exception as failure:
                logger.error(f"failed to stop sampling: {' '.join(str(failure).split())}")

    def collect(self, step: int) -> Batch:
        """The batch of `step`, the same on every rank; the servers must have version `step`; collective.

        Raises RunStopped if too many scores are missing or no group can be trained.
        """
        beat(f"the rollouts of step {step}")
        self._digests.begin(step)
        reward = self._servers.play.reward
        step_groups = StepGroups(self._credit, reward, step)  # filled on rank 0
        from_leader(lambda: self._rank_0_collector.begin(step, self._credit.rollout.max_staleness))
        while True:
            wait(self._collector.flight if self._collector else None, self._restore)
            batch: Batch | None = from_leader(lambda: self._rank_0_collector.choose(step_groups))
            if batch is not None:
                return batch

    def evaluation_due(self, step: int) -> bool:
        """Whether a set of data.eval is due at `step` and not recorded yet; collective."""
        return self._evaluator.due(step)

    def evaluate(self, step: int) -> None:
        """Evaluate the due sets; the servers must have version `step`; training groups stay in flight; collective.

        Each task is played to its end `samples` times, as users would see it: malformed turns end no conversation.
        """
        self._digests.begin(step)
        from_leader(lambda: self._rank_0_collector.resume())
        self._evaluator.evaluate(step)

    def learned(self, stats: Mapping[str, float]) -> None:
        """Record that the last batch was trained; `stats` are the metrics of its update."""
        self._digests.learned(stats)

    def record_tokens(self, batch: ScoredBatch, log_probs: Sequence[np.ndarray]) -> None:
        """Record the tokens of the last step's trained turns; collective. `log_probs`: after the update of `batch`."""
        shared(lambda: self._rank_0_collector.record_tokens(batch, log_probs))

    def state(self) -> dict[str, Any]:
        """Checkpoint state as JSON, on rank 0: the sentinels' baselines, weight digests."""
        return {**(self._collector.state if self._collector else {}), "weights": [*self._digests.items()]}

    def forget(self, checkpoint: tuple[int, Mapping[str, Any]]) -> None:
        """Remove what the journal has that a resume from `checkpoint` (step and state) does not need."""
        if self._collector:
            self._collector.lead.journal.forget(checkpoint[0])

    @property
    def _rank_0_collector(self) -> Collector:
        assert self._collector is not None
        return self._collector

    def _restore(self) -> None:
        """No server is available: wait until servers are back, and sync the last weight version to them; collective."""
        self._servers.wait_for_served()
        if from_leader(lambda: self._rank_0_collector.lead.pool.lost_all()):
            assert self._weights.version is not None
            self._weights.sync(self._weights.version)
            from_leader(lambda: self._rank_0_collector.lead.pool.recover())
