"""Groups that are played ahead of the step that trains them: their order, those in flight, how long one may take.

Calls of Ray actors go on by themselves, so sampling runs ahead of training without a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from math import ceil, inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.llm.endpoint import token_budget
from megatron_collab.observability.run import progress
from megatron_collab.reward import metrics
from megatron_collab.rollout.journal import Journal, failed, scored
from megatron_collab.rollout.users import FINISH_SECONDS
from megatron_collab.rollout.users.named import user_settings
from megatron_collab.runtime import stacks
from megatron_collab.runtime.process import Hung, RunStopped
from megatron_collab.runtime.rank0 import from_leader
from megatron_collab.types import Group, Task

POLL_SECONDS = 1.0  # between two checks of the servers; a request to one that has ended fails later than that
STARTS = 2  # a group whose worker dies is played again from its beginning


class Slot(NamedTuple):
    """A group's place in the order of the run: `number` of a step's own groups (`refill` 0) or of a refill."""

    step: int
    refill: int
    number: int

    @property
    def stream(self) -> str:
        """The name that the seeds of its samples follow from."""
        return f"train-{self.step}.{self.refill}-{self.number}" if self.refill else f"train-{self.step}-{self.number}"

    def after(self, prompts: int) -> Slot:
        """The next one of the steps' own groups, of which a step has `prompts`."""
        return Slot(self.step, 0, self.number + 1) if self.number + 1 < prompts else Slot(self.step + 1, 0, 0)


def window(step: int, steps: int, prompts: int, ahead: int) -> int:
    """How many groups may be in flight before step `step` takes its own: what it and the `ahead` next steps train.

    The weights of version `step` sample then; what is begun beyond could only be trained when it is older than
    `ahead` versions. AReaL's bound on what is begun (Fu et al. 2025, arXiv:2505.24298, section 5.1).
    """
    return (min(step + ahead + 1, steps) - step) * prompts


@dataclass
class Asked:
    """A group: `task` played for training or for the evaluation of a set, and its state, which Flight keeps."""

    slot: Slot
    stream: str
    task: Task
    one: EvaluationSet | None = None
    reference: Any = None  # of the call of the worker with the number `worker`
    worker: int = -1
    group: Group | None = None  # once it is finished
    disturbed: bool = False  # in flight while no server was left
    again: bool = False  # played once more, as it lacked a score

    @property
    def key(self) -> str:
        """What the journal calls it: the same conversations of a set under other settings have another name."""
        return f"{self.stream} {self.one.digest}" if self.one else self.stream


def answers(asked: Mapping[str, Any], seconds: float) -> list[Any]:
    """The results of calls of Ray actors, by their descriptions; Hung where one takes longer than `seconds`."""
    _, silent = ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
    if silent:
        names = [name for name, reference in asked.items() if reference in silent]
        raise Hung(f"rank 0 has waited {seconds:g} s (half of launch.timeout) for {'; '.join(names)}")
    return ray.get(list(asked.values()))


def answered(asked: Sequence[Any], seconds: float) -> list[Any]:
    """The results that are there within `seconds`, of calls of Ray actors whose end stops nothing."""
    there = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else []
    found = []
    for reference in there:
        with suppress(RayError):
            found.append(ray.get(reference))
    return found


def raised(error: Exception) -> Exception:
    """What a worker raised; what stops the run without the traces of the workers between, since it says why itself."""
    cause = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, RunStopped) else error


class Flight:
    """Groups that are begun and not yet taken: played by the workers, or found in the journal."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[Any],
        journal: Journal,
        servers_lost: Callable[[], bool],
        beside: Flight | None = None,
        after: Callable[[Asked, Group], Asked | None] = lambda asked, group: None,
    ) -> None:
        """`servers_lost`: whether there was a time, since they were last there, when no server of a model was left.

        `beside`: groups that stay in flight, with the same workers and journal, while these are waited for. `after`:
        the group that is begun in place of a finished one, if any; the one after which none is begun is taken.
        """
        self._config, self._beside, self._after = config, beside, after
        self._workers = cycle(enumerate(workers))
        self._servers_lost = servers_lost
        self._journal = journal
        self._progress = time.monotonic()  # when a group was last begun or finished
        self._asked: dict[Slot, Asked] = {}  # in the order in which they were begun
        self.from_journal = 0  # groups found there
        self._wanted, self._taken = 0, dict[Slot, Group]()
        self._bar: Any = None

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def slots(self) -> list[Slot]:
        return sorted(self._asked)

    def begin(self, asked: Asked) -> None:
        """Have a group played, unless an earlier start of the run has finished it."""
        self._asked[asked.slot] = asked
        asked.group = self._journal.find(asked.key, asked.task)
        if asked.group:
            self.from_journal += 1
            return
        asked.worker, worker = next(self._workers)
        asked.reference = worker.play.remote(asked.task, asked.stream, asked.one)
        self._progress = time.monotonic()

    def wait_for(self, count: int, title: str) -> None:
        """From now on `look` takes groups, until there are `count`; `take` then returns them."""
        self._wanted, self._taken = count, {}
        self._progress = time.monotonic()
        self._bar = progress(title, count)

    def look(self) -> Literal["playing", "finished", "servers lost"]:
        """Poll for up to POLL_SECONDS for groups that are finished: those that were begun first are taken.

        "finished" once there are as many as are waited for. "servers lost": to be called again once servers are back;
        finished groups are kept, and those with conversations that failed in the outage are played again, those that
        lack only scores once. Hung where no group is finished within `group_seconds`.
        """
        self.collect(0.0 if any(asked.group for asked in self._asked.values()) else POLL_SECONDS)
        if self._servers_lost():
            self._disturb()
            return "servers lost"
        self._progress = min(self._progress, time.monotonic())  # the wait for servers does not count
        finished = [(asked, asked.group) for asked in self._asked.values() if asked.group]
        self._check_progress(bool(finished))
        for asked, group in finished[: self._wanted - len(self._taken)]:
            del self._asked[asked.slot]
            # Once for a score: it may be what ends the server that scores.
            if asked.disturbed and (failed(group) or not (scored(group) or asked.again)):
                again = asked.again or not failed(group)
                self.begin(Asked(asked.slot, asked.stream, asked.task, asked.one, again=again))
            elif following := self._after(asked, group):
                self.begin(following)
            else:
                self._taken[asked.slot] = group
                self._bar.update(1)
        if len(self._taken) < self._wanted:
            return "playing"
        self._bar.close()
        return "finished"

    def take(self) -> dict[Slot, Group]:
        """The groups that were waited for, in the order of their slots."""
        return dict(sorted(self._taken.items()))

    def collect(self, seconds: float) -> None:
        """Write finished groups to the journal, after up to `seconds` for one; then raises a worker's error, if any."""
        playing = self._playing()
        if not playing:
            return
        references = [asked.reference for asked in playing]
        ray.wait(references, num_returns=1, timeout=seconds)
        found = set(ray.wait(references, num_returns=len(references), timeout=0)[0])
        written: dict[int, dict[str, Group]] = {}
        failures: list[Exception] = []
        for asked in playing:
            if asked.reference in found:
                try:
                    asked.group = ray.get(asked.reference)
                    written.setdefault(asked.slot.step, {})[asked.key] = asked.group
                except Exception as error:
                    failures.append(raised(error))
                    del self._asked[asked.slot]
        for step, groups in written.items():
            self._journal.write(step, groups)
        if failures:
            raise failures[0]

    def _disturb(self) -> None:
        """No server is left: what is in flight may fail for that, and the wait for servers does not count."""
        for asked in self._asked.values():
            asked.disturbed = True
        self._progress = inf
        if self._beside is not None:
            self._beside._disturb()

    def _seconds(self) -> float:
        """Upper bound of the time until one more of these groups is finished, which shares workers with the others."""
        beside = 0.0 if self._beside is None else self._beside._seconds()
        return group_seconds(self._config, len(self._playing())) + beside

    def _playing(self) -> list[Asked]:
        return [asked for asked in self._asked.values() if asked.group is None]

    def _check_progress(self, finished: bool) -> None:
        now, playing = time.monotonic(), self._playing()
        limit = self._seconds()
        if finished:
            self._progress = now
        if now - self._progress <= limit:
            return
        folder = Path(self._config.run.dir) / stacks.FOLDER
        stacks.ask(folder)
        streams = [asked.stream for asked in playing]
        workers = sorted({f"conversation-{asked.worker}" for asked in playing})
        raise Hung(
            f"rank 0 has waited {limit:.0f} s for any of {len(streams)} groups, longer than one can take by "
            f"rollout.deadline, reward.timeout, reward.judge.deadline and the limits of llm: {', '.join(streams[:4])}"
            f"{', …' if len(streams) > 4 else ''}, asked of {', '.join(workers)}; stacks are in {folder}"
        )


def wait(flight: Flight | None, restore: Callable[[], None]) -> None:
    """Until the groups that rank 0's `flight` waits for are finished; collective, a poll at a time: it may take long.

    `restore` (collective) is called where no server is left, and returns once there are some with the weights.
    """
    while (look := from_leader(lambda: flight.look() if flight is not None else None)) != "finished":
        if look == "servers lost":
            restore()


def group_seconds(config: Config, groups: int) -> float:
    """Upper bound, in seconds, after which `groups` in flight without a finished one count as hung.

    A trained turn and its futures have rollout.deadline each, their users FINISH_SECONDS more, and each of their tools
    rollout.tool_timeout to close; a score waits for a place and then has its own limit, one worker having to be found
    stuck; judgements, and the user's messages before them, wait for the limits of llm. Never less than it can take: all
    conversations end at once, every call is needed as often as it may be tried.
    """
    rollout, reward, judge, llm = config.rollout, config.reward, config.reward.judge, config.llm
    conversations = groups * config.train.rollouts_per_prompt * max(1, rollout.futures)
    kinds = [metrics.split(name, reward.metrics.get(name, {})) for name in reward.weights]
    judged = conversations * sum(kind.judged(options) for kind, options in kinds)
    places = reward.workers * reward.concurrency
    scoring = ceil(conversations / places) * reward.timeout
    if judged:
        scoring = max(scoring, ceil(judged / min(places, llm.max_concurrent)) * judge.deadline)
    users = user_settings(config).values()
    said = conversations * (1 + rollout.max_user_turns) * max(user.attempts for user in users)
    calls = judged * judge.attempts + said
    tokens = judged * judge.attempts * token_budget(judge) + said * max(map(token_budget, users))
    tokens += calls * rollout.context_length  # prompts
    closing = FINISH_SECONDS + 2 * rollout.tool_timeout * (len(rollout.tools) + len(rollout.mcp_servers))
    limited = 60 * (calls / (llm.requests_per_minute or inf) + tokens / (llm.tokens_per_minute or inf))
    return STARTS * (2 * rollout.deadline + closing + scoring + 2 * reward.timeout + limited)
