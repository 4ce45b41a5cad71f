"""Groups in flight: the order in which a run trains them, the workers that play them, and the hang timeout.

Calls of Ray actors run in the background, so sampling runs ahead of training without a thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from math import ceil, inf
from typing import Any, Literal, NamedTuple

from ray.exceptions import RayTaskError

from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.llm.endpoint import token_budget
from megatron_collab.rollout.journal import Journal, failed, scored
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.users import FINISH_SECONDS
from megatron_collab.rollout.workers import Workers
from megatron_collab.runtime import stacks
from megatron_collab.runtime.process import Hung, RunStopped
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.runtime.screen import progress
from megatron_collab.types import Group, PausedTurn, Task

POLL_SECONDS = 1.0  # between two checks of the servers; a request to a dead server fails later than that
STARTS = 2  # if a group's worker dies, the group is played again from its beginning


class Slot(NamedTuple):
    """A group's place in the order of the run: `number` among a step's regular groups (`refill` 0) or a refill's."""

    step: int
    refill: int
    number: int

    @property
    def stream(self) -> str:
        """The name that seeds its sampling."""
        return f"train-{self.step}.{self.refill}-{self.number}" if self.refill else f"train-{self.step}-{self.number}"


@dataclass
class GroupRequest:
    """A request to play `task`, for training or for the evaluation of `eval_set`, and its state, managed by Flight."""

    slot: Slot
    stream: str
    task: Task
    eval_set: EvaluationSet | None = None
    reference: Any = None  # Ray object reference of the call to worker number `worker`
    worker: int = -1
    server: int = 0  # samples the group
    turns: Sequence[PausedTurn] = ()  # sampled by an earlier start, before a pause
    group: Group | None = None  # once the request is finished
    interrupted: bool = False  # was in flight while no server was available
    retried: bool = False  # was played again because a score was missing

    @property
    def key(self) -> str:
        """The name in the journal; it includes the digest of the evaluation set's settings."""
        return f"{self.stream} {self.eval_set.digest}" if self.eval_set else self.stream


def worker_error(error: Exception) -> Exception:
    """The error of a worker; a RunStopped is unwrapped from RayTaskErrors, since its message needs no traceback."""
    cause = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, RunStopped) else error


FollowUp = Callable[[GroupRequest, Group], GroupRequest | None]


def no_follow_up(request: GroupRequest, group: Group) -> None:
    """Requests nothing: every finished group is taken."""


class Flight:
    """Groups in flight: requested and not yet taken, played by the workers or read from the journal."""

    def __init__(
        self,
        play: PlaySpec,
        workers: Workers,
        journal: Journal,
        servers_lost: Callable[[], bool],
        background: Flight | None = None,
        follow_up: FollowUp = no_follow_up,
    ) -> None:
        """`play`: how the groups are played.

        `servers_lost`: whether some model has had no server since the last recovery.
        `background`: groups that stay in flight, with the same workers and journal, while this one is waited for.
        `follow_up`: the request to begin when a group finishes; if it returns None, the finished group is taken.
        """
        self._play, self._background, self._follow_up = play, background, follow_up
        self._workers, self._ray = cycle(enumerate(workers.conversations)), workers.ray
        self._servers = workers.servers
        self._dealt = dict[int, int]()  # by server, the groups begun before its last
        self._begun = count()
        self._servers_lost = servers_lost
        self._journal = journal
        self._progress = time.monotonic()  # when a group was last begun or finished
        self._requests: dict[Slot, GroupRequest] = {}  # in the order in which they were begun
        self.from_journal = 0  # groups read from the journal
        self._target, self._collected = 0, dict[Slot, Group]()
        self._bar: Any = None

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def slots(self) -> list[Slot]:
        return sorted(self._requests)

    def begin(self, request: GroupRequest) -> None:
        """Have a group played, or read it from the journal if an earlier start of the run finished it."""
        self._requests[request.slot] = request
        request.group = self._journal.find(request.key, request.task)
        if request.group:
            self.from_journal += 1
            return
        request.worker, worker = next(self._workers)
        request.server = self._least_loaded()
        request.reference = worker.play.remote(
            request.task, request.stream, request.eval_set, request.server, request.turns
        )
        self._progress = time.monotonic()

    def _least_loaded(self) -> int:
        """The server in use with the fewest groups in flight: servers take turns, and a slow one gets fewer."""
        groups = Counter(request.server for request in self._playing() if request.reference is not None)
        servers = self._servers or [0]  # without any, the group fails and is played again
        server = min(servers, key=lambda index: (groups[index], self._dealt.get(index, -1)))
        self._dealt[server] = next(self._begun)
        return server

    def wait_for(self, count: int, title: str) -> None:
        """From now on `poll` collects the first `count` groups in the order of slots; `take` then returns them."""
        self._target, self._collected = count, {}
        self._progress = time.monotonic()
        self._bar = progress(title, count)

    def poll(self) -> Literal["playing", "finished", "servers lost"]:
        """Wait up to POLL_SECONDS for an awaited group, and collect those that are finished.

        Returns "finished" when the target count is reached. After "servers lost", call it again when servers are back:
        finished groups are kept, groups with conversations that failed in the outage are played again, and groups that
        only lack scores are played again once. Raises Hung if no group finishes within `group_seconds`.
        """
        self.collect(0.0 if any(request.group for request in self._awaited()) else POLL_SECONDS)
        if self._servers_lost():
            self.mark_interrupted()
            return "servers lost"
        self._progress = min(self._progress, time.monotonic())  # time spent waiting for servers does not count
        self._check_progress()
        for request, group in [(request, request.group) for request in self._awaited() if request.group]:
            del self._requests[request.slot]
            # Only once for a missing score: the group itself may crash the server that scores it.
            if request.interrupted and (failed(group) or not (scored(group) or request.retried)):
                retried = request.retried or not failed(group)
                self.begin(GroupRequest(request.slot, request.stream, request.task, request.eval_set, retried=retried))
            elif next_request := self._follow_up(request, group):
                self.begin(next_request)
            else:
                self._collected[request.slot] = group
                self._bar.update(1)
        if len(self._collected) < self._target:
            return "playing"
        self._bar.close()
        return "finished"

    def _awaited(self) -> list[GroupRequest]:
        """The requests that `poll` is to collect next: groups are trained in the order of the run, however long."""
        return [self._requests[slot] for slot in self.slots[: self._target - len(self._collected)]]

    def take(self) -> dict[Slot, Group]:
        """The collected groups, in the order of their slots."""
        return dict(sorted(self._collected.items()))

    def collect(self, seconds: float) -> None:
        """Wait up to `seconds` for a finished group, journal all finished ones, then raise a worker's error, if any."""
        playing = self._playing()
        if not playing:
            return
        references = [request.reference for request in playing]
        self._ray.wait(references, num_returns=1, timeout=seconds)
        ready = set(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
        written: dict[int, dict[str, Group]] = {}
        failures: list[Exception] = []
        for request in playing:
            if request.reference in ready:
                try:
                    request.group = self._ray.get(request.reference)
                    self._progress = max(self._progress, time.monotonic())
                    if request.eval_set is None or scored(request.group):  # an evaluation plays the others again
                        written.setdefault(request.slot.step, {})[request.key] = request.group
                except Exception as error:
                    failures.append(worker_error(error))
                    del self._requests[request.slot]
        for step, groups in written.items():
            self._journal.write(step, groups)
        if failures:
            raise failures[0]

    def collect_all_but(self, streams: Collection[str], seconds: float) -> None:
        """Wait up to `seconds` for the groups in flight whose streams are not in `streams`, and collect them."""
        references = [request.reference for request in self._playing() if request.stream not in streams]
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=seconds)
        self.collect(0.0)

    def mark_interrupted(self) -> None:
        """No server is available: mark the groups in flight, which may fail, and stop the progress timer."""
        for request in self._requests.values():
            request.interrupted = True
        self._progress = inf
        if self._background is not None:
            self._background.mark_interrupted()

    def _seconds(self) -> float:
        """Upper bound, in seconds, until one more group finishes; background groups share the workers."""
        background = 0.0 if self._background is None else self._background._seconds()
        return group_seconds(self._play, len(self._playing())) + background

    def _playing(self) -> list[GroupRequest]:
        return [request for request in self._requests.values() if request.group is None]

    def _check_progress(self) -> None:
        playing, limit = self._playing(), self._seconds()
        if time.monotonic() - self._progress <= limit:
            return
        folder = self._play.run_dir / stacks.FOLDER
        stacks.ask(folder)
        streams = [request.stream for request in playing]
        workers = sorted({f"conversation-{request.worker}" for request in playing})
        raise Hung(
            f"rank 0 has waited {limit:.0f} s for any of {len(streams)} groups, longer than allowed by "
            f"rollout.deadline, reward.timeout, reward.judge.deadline and the limits of llm: {', '.join(streams[:4])}"
            f"{', …' if len(streams) > 4 else ''} on {', '.join(workers)}; stacks are in {folder}"
        )


def wait(flight: Flight | None, restore: Callable[[], None]) -> None:
    """Return when the groups that rank 0's `flight` waits for are finished; collective, with one collective per poll.

    `restore` (collective) is called if no server is available, and returns once servers have the weights again.
    """
    while (status := from_leader(lambda: flight.poll() if flight is not None else None)) != "finished":
        if status == "servers lost":
            restore()


def group_seconds(play: PlaySpec, groups: int) -> float:
    """Upper bound, in seconds, after which `groups` in flight without a finished one count as hung.

    Each of the player's phases (a trained turn and its futures are two) takes up to rollout.deadline, their users
    FINISH_SECONDS more, and each of their tools rollout.tool_timeout to close. A score waits for a free slot and then
    has its own timeout, plus the time to detect one stuck worker. Judge calls and user messages wait for the rate
    limits of llm; a judge of turns is asked about one after another, so the last score may begin with its first turn
    when all others are done. The bound assumes the worst case: all conversations end at the same time, and every call
    uses all its attempts.
    """
    rollout, reward, judge, llm = play.rollout, play.reward, play.reward.judge, play.llm
    conversations = groups * play.rollouts * max(1, rollout.futures)
    judged = conversations * play.judge_calls()
    places = reward.workers * reward.concurrency
    scoring = ceil(conversations / places) * reward.timeout
    if judged:
        by_turns = any(metric.judged and metric.scores_turns for metric in reward.metrics.values())
        rounds = ceil(judged / min(places, llm.max_concurrent or inf)) + by_turns * play.later_turns()
        scoring = max(scoring, rounds * judge.deadline)
    users = play.users.settings.values()
    phases = play.player_class.phases
    messages = conversations * (phases - 1 + rollout.max_user_turns) * max(user.attempts for user in users)
    calls = judged * judge.attempts + messages
    tokens = judged * judge.attempts * token_budget(judge) + messages * max(map(token_budget, users))
    tokens += calls * rollout.context_length  # prompts
    closing = FINISH_SECONDS + 2 * rollout.tool_timeout * (len(rollout.tools) + len(rollout.mcp_servers))
    limited = 60 * (calls / (llm.requests_per_minute or inf) + tokens / (llm.tokens_per_minute or inf))
    return STARTS * (phases * rollout.deadline + closing + scoring + 2 * reward.timeout + limited)
