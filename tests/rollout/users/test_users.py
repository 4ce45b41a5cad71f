from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.environments import booking
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.rollout.users import UserReply, split_user
from megatron_collab.rollout.workers import ConversationWorker
from megatron_collab.settings import RolloutConfig
from megatron_collab.types import Conversation, Group, Message, Task
from tests.llm.endpoint import Endpoint, says
from tests.rollout.fakes import toolbox_of
from tests.rollout.users.helpers import STOP, check_user, dialogue, make_users, task


def answer(user: str, goal: str, conversation: Conversation) -> UserReply:
    simulated_user = make_users().make(Task("t", conversation.messages[:1], goal, "", user), "s")

    async def play() -> UserReply:
        await simulated_user.start(conversation)
        return await simulated_user.reply(conversation)

    return asyncio.run(play())


def test_one_dataset_mixes_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    booked = booking.tasks(seed=3, n=1)[0]
    tasks = [
        task("llm"),
        task(""),
        booked,
        task("reveal", goal=json.dumps({"question": "How many?", "facts": ["Ann has 2."]})),
        task("replay", replay=["I said this once."]),
    ]

    async def play() -> list[str]:
        async with Endpoint(says({"current_answer": "", "thought": "", "response": "as an llm"})) as endpoint:
            at = endpoint.config()
            users = make_users(model=at.model, api_base=at.api_base)

            async def first_reply(new_task: Task) -> str:
                conversation = Conversation((*new_task.messages, Message("assistant", "which day ?")), ())
                user = users.make(new_task, "s")
                await user.start(conversation)
                return (await user.reply(conversation)).message.content

            return list(await asyncio.gather(*map(first_reply, tasks)))

    day = json.loads(booked.goal)["day"]
    assert asyncio.run(play()) == ["as an llm", "as an llm", f"on {day} .", "Ann has 2.", "I said this once."]


def test_user_name_overrides_the_users_of_tasks() -> None:
    user = make_users(name="replay").make(task("reveal", replay=["recorded"]), "s")
    assert asyncio.run(user.reply(dialogue("hi", "hello"))).message == Message("user", "recorded")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "user llm: user.model is not set; set it"),
        ("llm", "user llm: user.model is not set; set it"),
        (
            "nobody",
            "user=nobody: no such name; known are desk, feedback, llm, replay, reveal, scripted, verl, or package",
        ),
        ("scripted", "scripted=: no such name; known are booking"),
        ("scripted/tiny", "scripted=tiny: no such name; known are booking"),
        ("reveal/all", "user reveal/all: takes no argument, but got 'all'"),
        ("replay/x", "user replay/x: takes no argument"),
    ],
)
def test_an_unavailable_user_is_refused_in_one_line(name: str, reason: str) -> None:
    refusal = check_user(name, Config())
    assert refusal is not None and refusal.startswith(reason) and "\n" not in refusal


@pytest.mark.parametrize("name", ["llm/openai/gpt-4o", "scripted/booking", "reveal", "replay"])
def test_an_available_user_is_not_refused(name: str) -> None:
    assert check_user(name, Config()) is None


def test_user_model_makes_every_llm_user_available() -> None:
    config = Config()
    config.user.model = "openai/gpt-4o"
    assert check_user("llm", config) is None and check_user("", config) is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "no such file, or it has no lines"),
        (b"\n \n", "no such file, or it has no lines"),
        (b"a nurse\n\xe9", "'utf-8' codec can't decode byte 0xe9"),
        ("a nurse\n".encode("utf-16"), "'utf-8' codec can't decode byte 0xff"),
        (b"a nurse\n" + b"x" * ((1 << 16) + 1), "a line has more than 65536 characters; write one persona per line"),
        (b"x\n" * (1 << 25) + b"y", "has more than 67108864 bytes; give a shorter one"),
        (b"x" * (1 << 16), None),
    ],
    ids=["empty", "blank", "latin", "utf-16", "a line", "a file", "a long line"],
)
def test_a_file_that_holds_no_personas_is_refused(tmp_path: Path, content: bytes, fault: str | None) -> None:
    config, file = Config(), tmp_path / "personas.txt"
    config.user.model, config.user.personas = "policy", str(file)
    file.write_bytes(content)
    line = str(check_user("llm", config))
    assert (fault or "None") in line and "\n" not in line


@pytest.mark.parametrize(("setting", "name"), [(None, "scripted/booking"), ("llm/openai/m", "llm/openai/m")])
def test_a_group_has_the_name_of_the_user_who_played_it(setting: str | None, name: str) -> None:
    config = Config()
    config.user.name = setting

    class Idle:
        spec = play_spec(config)

        async def play(self, task: Task, stream: str) -> Group:
            return Group(task, ())

    worker: Any = object.__new__(ConversationWorker)
    worker.play_spec, worker.players = play_spec(config), {None: Idle()}
    worker.router = None
    assert asyncio.run(worker.play(task("scripted/booking"), "s")).user == name


def test_counters_are_reset_when_they_are_taken() -> None:
    worker: Any = object.__new__(ConversationWorker)
    training, evaluation, other = (
        SimpleNamespace(
            users=make_users(),
            tools=toolbox_of(RolloutConfig(), None),  # type: ignore[arg-type]
            counters=Counter(),
            candidate_players={},
        )
        for _ in range(3)
    )
    other.users, training.candidate_players = training.users, {"ours": training, "other": other}  # as build.assistants
    worker.players = {None: training, EvaluationSet("e.jsonl"): evaluation}
    worker.policy, worker.tape = SimpleNamespace(take_counters=lambda: {"servers_lost": 0}), None
    worker._rendered = Counter({"control_tokens_as_text": 1})
    training.users.counters["user_leak"] += 2
    evaluation.users.counters["user_leak"] += 3
    training.tools.counters["tool_calls"] += 1
    training.counters["reward_failed"] += 1
    other.counters["reward_failed"] += 3
    counts = asyncio.run(worker.take_counters())
    assert counts == {
        "user_leak": 5,
        "tool_calls": 1,
        "reward_failed": 4,
        "servers_lost": 0,
        "control_tokens_as_text": 1,
    }
    assert asyncio.run(worker.take_counters()) == {"servers_lost": 0}


def test_the_stop_text_ends_the_conversation_and_stays_in_the_message() -> None:
    user = make_users(stop="BYE").make(task("replay", replay=["that is it, BYE now"]), "s")
    reply = asyncio.run(user.reply(dialogue("hi", "hello")))
    assert reply.done and reply.message.content == "that is it, BYE now"
    assert not make_users(stop=STOP).make(task("replay"), "s").says("that is it, BYE now").done


@pytest.mark.parametrize(
    ("name", "kind", "argument"),
    [
        ("", "llm", ""),
        ("llm/ollama/llama3:8b", "llm", "ollama/llama3:8b"),
        ("scripted/package.module:reply", "scripted", "package.module:reply"),
        ("package.module:MyUser", "package.module:MyUser", ""),
        ("package.module:MyUser/some/thing", "package.module:MyUser", "some/thing"),
        ("./folder/file.py:MyUser/x", "./folder/file.py:MyUser", "x"),
    ],
)
def test_a_name_is_a_kind_and_its_argument(name: str, kind: str, argument: str) -> None:
    assert split_user(name) == (kind, argument)
