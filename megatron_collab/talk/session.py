"""Serves models of a run and begins chats with them. No user interface."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ray.exceptions import RayActorError, RayTaskError

from megatron_collab.config import recorded_values
from megatron_collab.data.examples import RowFormat, load_tasks
from megatron_collab.data.prefixes import at_every_depth
from megatron_collab.data.sources import Source
from megatron_collab.data.spec import DataSpec
from megatron_collab.inference.served import ModelServers
from megatron_collab.inference.server import SGLangServer
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.launch import validate
from megatron_collab.launch.data_specs import recorded_data
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.users import DEFAULT
from megatron_collab.rollout.workers import start_workers
from megatron_collab.runtime import keys
from megatron_collab.runtime.files import ScratchFolder
from megatron_collab.runtime.process import RunStopped
from megatron_collab.runtime.ray_cluster import ray_session
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import ConfigError, require
from megatron_collab.talk import ChatError
from megatron_collab.talk.models import AFTER, RunModel, find_model, hf_folder
from megatron_collab.talk.settings import WHOLE, GpuShare, run_settings, spec_in
from megatron_collab.talk.worker import MOST_FUTURES, Row, TalkWorker
from megatron_collab.types import Task

logger = logging.getLogger(__name__)


@dataclass
class Chat:
    """The conversation with a served model, which `Talk.act` changes.

    `row`: as in a run's transcripts (docs/reference/run-files.md), None before the first begins; while the model
    writes, its last message grows. Messages are as the user sees them; `turns` has the model's thoughts if it has any,
    `private` notes of the simulated user by message, `ending` is None while it goes on; if a conversation about a task
    has ended, it has `scores` and `judgments`. `prompt`: how many of its messages are the task's; `futures`: rows of
    the continuations that were played last; `fault`: why the last action was refused; `busy`: whether it goes on.
    All texts come from models: show them as text.
    """

    row: Row | None = None
    prompt: int = 0
    futures: list[Row] = field(default_factory=list)
    fault: str = ""
    busy: bool = False


@dataclass(frozen=True)
class TaskSet:
    """Tasks of a set of data.eval or a source of data.train. `user`: who plays them, None: the run's users."""

    name: str
    setting: str
    source: Source
    format: RowFormat
    user: str | None = None
    at_every_depth: bool = False

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """The tasks, each read when it is accessed. Raises ConfigError if the data cannot be read."""
        try:
            tasks = load_tasks(self.source, self.setting, self.format)
            return at_every_depth(tasks) if self.at_every_depth else tasks
        except (ValueError, OSError) as error:
            raise ConfigError(" ".join(str(error).split())) from error


class Talk(ExitStack):
    """Context manager in which models of a run are served side by side, under the run's recorded settings.

    Enter and leave it in the same thread, which must live as long: servers end with the thread that started them.
    `models`: the served ones; `chats`: that with each of them; `task_sets`: the run's tasks, empty if it played no
    conversations (sft, dpo).
    """

    def __init__(
        self,
        run: Path,
        names: Sequence[str] = (AFTER,),
        overrides: Sequence[str] = (),
        progress: Callable[[str], None] = logger.info,
        share: GpuShare = WHOLE,
    ) -> None:
        """`names`: of the models, as `find_model` takes them. `overrides`: settings to change, as on a command line.

        `progress` is called with a line for each phase of the start; `share`: of this node's GPUs. Starts nothing and
        takes about a second. Raises ConfigError for a folder that holds no run, a model that it lacks, or settings that
        cannot work here.
        """
        super().__init__()
        self.run, self._progress = run, progress
        self._worker: Any = None  # the handle of the TalkWorker, within the context
        self.models: list[RunModel] = [find_model(run, name) for name in names]
        self.chats = [Chat() for _ in names]
        self._config, self._first_gpu = run_settings(run, len(self.models), overrides, share)
        spec = spec_in(self._config, run, self.models[0].folder)
        assert spec.play
        self._users = spec.play.users
        self.task_sets: list[TaskSet] = []
        if recorded_values(run)["train.stage"] == "rl":
            validate.check_played(self._config, spec)
            self.task_sets = _task_sets(recorded_data(run, overrides, None))

    def __enter__(self) -> Self:
        """Convert and serve the models; returns once all answer, on CPU after about half a minute.

        Raises ConfigError if a checkpoint is damaged, RunStopped if a server or Ray does not start.
        """
        with ExitStack() as stack:
            self._start(stack)
            self.callback(stack.pop_all().close)
        return self

    def _start(self, stack: ExitStack) -> None:
        began, names = time.monotonic(), ", ".join(model.name for model in self.models)
        folder = stack.enter_context(ScratchFolder())
        folders = [stack.enter_context(hf_folder(model, self._progress)) for model in self.models]
        keys.put_away()
        spec = spec_in(self._config, folder, folders[0])
        assert spec.play and spec.serving
        self._progress(f"{names}: starting SGLang")
        policy = _for_chats(_moved(spec.serving.policy, self._first_gpu))
        replicas = policy.placement.replicas
        servers = [
            stack.enter_context(
                SGLangServer(replace(policy, model=str(path)), folder / f"sglang-{index}.log", index % replicas)
            )
            for index, path in enumerate(folders)
        ]
        by_name = [
            stack.enter_context(ModelServers(_moved(model, self._first_gpu))) for model in spec.serving.by_name.values()
        ]
        timeout = policy.host.start_timeout
        stack.enter_context(ray_session(2, start_timeout=timeout))
        urls = [(server.url, server.api_key) for server in servers]
        served = {model_servers.spec.name: model_servers.model for model_servers in by_name}
        workers = start_workers(_of_chats(spec.play), spec.serving.client, urls, served, TalkWorker)
        stack.callback(workers.stop)
        for model, server in zip(self.models, servers, strict=True):
            server.wait_healthy(timeout)
            server.ask("/update_weight_version", {"new_version": str(model.step), "abort_all_requests": False})
        for model_servers in by_name:
            model_servers.pool.begin()
        (self._worker,) = workers.conversations
        workers.answers({"the worker of chats": self._worker.take_counters.remote()}, timeout)
        self._progress(f"{names}: ready after {time.monotonic() - began:.0f} s")

    def find_task(self, task: str | None = None, index: int = 0, name: str | None = None) -> Task:
        """The task with the id `task`, or number `index` (from 0) of a set, the first if `name` is None.

        Its user is the one who would play it in the run. Raises ConfigError if there is none.
        """
        require(bool(self.task_sets), f"{self.run}: its training played no conversations, so there are no tasks")
        sets = [task_set for task_set in self.task_sets if name in (None, task_set.name)]
        names = ", ".join(task_set.name for task_set in self.task_sets)
        require(bool(sets), f"{self.run}: has no tasks {name}; it has {names}")
        if task is None:
            size = len(sets[0].tasks)
            require(0 <= index < size, f"{sets[0].setting}: has no task number {index}, but 0 to {size - 1}")
            return self._of_run(sets[0].tasks[index], sets[0])
        for task_set in sets:
            for number in range(len(task_set.tasks)):
                try:
                    candidate = task_set.tasks[number]
                except ValueError:  # the run has left it out too
                    continue
                if candidate.id == task:
                    return self._of_run(candidate, task_set)
        raise ConfigError(f"{self.run}: no task has the id {task}; its data may have changed")

    def _of_run(self, task: Task, task_set: TaskSet) -> Task:
        return self.played_by(task, self._users.for_set(task_set.user).name_of(task) or DEFAULT)

    def played_by(self, task: Task, user: str) -> Task:
        """The task, with this user to play it. Raises ConfigError if there is no such user, or it cannot be used."""
        fault = self._users.fault(user)
        require(fault is None, fault or "")
        return replace(task, user=user)

    async def act(self, action: str, show: Callable[[], None], *values: Any) -> None:
        """Do an action of TalkWorker (begin, say, user, futures, undo) in the chats with all models at once.

        `show` is called whenever one of the `chats` has changed. A chat that refuses the action has a `fault` then.
        """
        await asyncio.gather(*(self._act_in(number, action, show, values) for number in range(len(self.chats))))

    async def _act_in(self, number: int, action: str, show: Callable[[], None], values: Sequence[Any]) -> None:
        chat = self.chats[number]
        chat.futures, chat.fault, chat.busy = [], "", True
        show()
        try:
            async for changes in getattr(self._worker, action).remote(number, *values):
                for name, value in (await changes).items():
                    setattr(chat, name, value)
                show()
        except RayTaskError as error:
            if not isinstance(error.cause, ChatError | RunStopped):
                raise
            chat.fault = one_line(str(error.cause))
        except RayActorError:
            chat.fault = "the process that plays the chats has ended; start the command again"
        chat.busy = False
        show()


def _for_chats(policy: ServerSpec) -> ServerSpec:
    """A server with room for the futures of a chat: training needs more, and two models may share a GPU."""
    enough = MOST_FUTURES * policy.context_length
    return replace(policy, max_total_tokens=min(policy.max_total_tokens or enough, enough), memory_share=None)


def _moved(spec: ServerSpec, devices: int) -> ServerSpec:
    """The servers, each moved by that many devices."""
    return replace(spec, placement=replace(spec.placement, first=spec.placement.first + devices))


def _of_chats(play: PlaySpec) -> PlaySpec:
    """How chats are played. Their tasks name the user; a malformed turn ends no future, as in evaluations."""
    users = replace(play.users, user=replace(play.users.user, name=None))
    return replace(play, users=users, reward=play.reward.played_on())


def _task_sets(data: DataSpec) -> list[TaskSet]:
    sets = [
        TaskSet(eval_set.title, eval_set.setting, eval_set, data.format, eval_set.user) for eval_set in data.all_sets
    ]
    sources = [
        TaskSet(source.title, "data.train", source, data.format, at_every_depth=data.prefixes) for source in data.train
    ]
    return [*sets, *sources]
