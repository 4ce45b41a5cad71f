"""Serves models of a run and begins chats with them. No user interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ray.exceptions import RayActorError, RayTaskError

from megatron_collab.config import ConfigError, recorded_values, require
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
from megatron_collab.talk import ChatError
from megatron_collab.talk.models import AFTER, RunModel, find_model, hf_folder
from megatron_collab.talk.settings import run_settings, spec_in
from megatron_collab.talk.worker import MOST_FUTURES, Row, TalkWorker
from megatron_collab.types import Task

logger = logging.getLogger(__name__)

__all__ = ["Chat", "Row", "Talk", "TaskSet"]


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

    Enter and leave it in the same thread, which must live as long: servers end with the thread that started them. All
    other methods may be called from any thread, and awaited in any event loop. `models`: the served ones; `task_sets`:
    the run's tasks, empty if it played no conversations (sft, dpo); `users`: names of its users.
    """

    def __init__(
        self,
        run: Path,
        names: Sequence[str] = (AFTER,),
        overrides: Sequence[str] = (),
        progress: Callable[[str], None] = logger.info,
    ) -> None:
        """`names`: of the models, as `find_model` takes them. `overrides`: settings to change, as on a command line.

        `progress` is called with a line for each phase of the start. Starts nothing and takes about a second. Raises
        ConfigError for a folder that holds no run, a model that it lacks, or settings that cannot work here.
        """
        super().__init__()
        self.run, self._progress = run, progress
        self._worker: Any = None  # the handle of the TalkWorker, within the context
        self.models: list[RunModel] = [find_model(run, name) for name in names]
        self._config = run_settings(run, len(self.models), overrides)
        spec = spec_in(self._config, run, self.models[0].folder)
        assert spec.play
        self._users = spec.play.users
        self.users = list(spec.play.users.named)
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
        policy = _for_chats(spec.serving.policy)
        replicas = policy.placement.replicas
        servers = [
            stack.enter_context(
                SGLangServer(replace(policy, model=str(path)), folder / f"sglang-{index}.log", index % replicas)
            )
            for index, path in enumerate(folders)
        ]
        by_name = [stack.enter_context(ModelServers(model)) for model in spec.serving.by_name.values()]
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

    async def begin(self, model: int = 0, task: Task | None = None) -> Chat:
        """A chat with the model of this number in `models`, about a task as `find_task` or `played_by` gives it.

        If the task's conversation begins with messages, the model has answered them. Without a task only a person
        writes. Raises ChatError if the model is lost.
        """
        number, row = await _answered(self._worker.begin.remote(model, task))
        return Chat(self._worker, number, self.models[model], task, row)


class Chat:
    """A conversation with a served model.

    Rows are those of a run's transcripts (docs/reference/run-files.md): messages as the user sees them, `turns` with
    the model's thoughts if it has any, `private` notes of the simulated user by message, `ending` (None while it goes
    on) and `error`; if a conversation about a task has ended, `scores` and `judgments`. All texts come from models:
    show them as text.
    """

    def __init__(self, worker: Any, number: int, model: RunModel, task: Task | None, row: Row) -> None:
        """`row`: the conversation so far."""
        self._worker, self._number = worker, number
        self.model, self.task, self.row = model, task, row

    async def say(self, text: str) -> Row:
        """The conversation after the user's message `text` and the model's answer, with its calls of tools.

        Raises ChatError if the chat has ended, or `text` is blank or too long.
        """
        return await self._moved(self._worker.say.remote(self._number, text))

    async def let_user(self) -> Row:
        """As `say`, with a message of the simulated user, who may also end the conversation.

        Raises ChatError if the chat has ended, or has no task.
        """
        return await self._moved(self._worker.let_user.remote(self._number))

    async def futures(self, count: int) -> list[Row]:
        """`count` continuations of the conversation, played with the simulated user to their endings and scored.

        The conversation itself stays. Rows have the scores of the run's metrics that apply to the task, and the reward
        over all futures. Raises ChatError if the chat has ended, has no task, or the model has not written yet.
        """
        rows: list[Row] = await _answered(self._worker.futures.remote(self._number, count))
        return rows

    async def undo(self) -> Row:
        """The conversation without the last user's message and what followed. Raises ChatError if there is none."""
        return await self._moved(self._worker.undo.remote(self._number))

    async def close(self) -> None:
        """Forget the conversation and close its tools."""
        await _answered(self._worker.close.remote(self._number))

    async def _moved(self, row: Awaitable[Row]) -> Row:
        self.row = await _answered(row)
        return self.row


def _for_chats(policy: ServerSpec) -> ServerSpec:
    """A server with room for the futures of a chat: training needs more, and two models may share a GPU."""
    enough = MOST_FUTURES * policy.context_length
    return replace(policy, max_total_tokens=min(policy.max_total_tokens or enough, enough), memory_share=None)


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


async def _answered(answer: Awaitable[Any]) -> Any:
    """The answer of the worker. Raises ChatError if it refuses, or has ended."""
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, ChatError | RunStopped):
            raise ChatError(str(error.cause)) from None
        raise
    except RayActorError:
        raise ChatError("the process that plays the chats has ended; start the command again") from None
