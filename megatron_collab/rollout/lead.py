"""What only rank 0 has: the workers that play groups, the servers that these sample from, and the journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_collab.inference.pool import ServerPool
from megatron_collab.rollout.journal import Journal, WeightDigests
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.scheduler import Flight, FollowUp, no_follow_up
from megatron_collab.rollout.servers import Servers
from megatron_collab.rollout.workers import Workers


@dataclass(frozen=True)
class Lead:
    """Rank 0's means of playing groups; the other ranks have none and wait in collectives.

    `timeout`: seconds that a worker may take to answer a call other than to play. `lost_all`: as in Servers.
    """

    workers: Workers
    pool: ServerPool
    journal: Journal
    lost_all: Callable[[], bool]
    timeout: float

    @classmethod
    def of(cls, servers: Servers, digests: WeightDigests) -> Lead | None:
        """The lead of a run, with its journal for weights of these `digests`; None on ranks other than 0."""
        if servers.workers is None or servers.pool is None:
            return None
        journal = Journal(servers.play.run_dir / "journal", digests)
        return cls(servers.workers, servers.pool, journal, servers.lost_all, 2 * servers.timeout)

    @classmethod
    def standalone(cls, servers: Servers, step: int) -> Lead | None:
        """As `of`, in a run without training, whose weights are those of `step`."""
        digests = WeightDigests(keep=1)
        digests.begin(step)
        return cls.of(servers, digests)

    def flight(self, play: PlaySpec, background: Flight | None = None, follow_up: FollowUp = no_follow_up) -> Flight:
        """An empty flight of groups on the workers and in the journal; arguments as in Flight."""
        return Flight(play, self.workers, self.journal, self.lost_all, background, follow_up)

    def spend(self) -> dict[str, float]:
        """The totals of the limiter, including earlier starts."""
        calls = {"the limiter's spending": self.workers.limiter.spend.remote()}
        (spent,) = self.workers.answers(calls, self.timeout)
        return spent
