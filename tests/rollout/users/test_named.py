from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config, changes
from megatron_collab.launch import endpoints
from megatron_collab.launch.play_specs import play_spec, user_directory
from megatron_collab.llm.client import LlmClient
from megatron_collab.rollout import llm_endpoints
from megatron_collab.rollout.scheduler import group_seconds
from megatron_collab.rollout.users import Users
from megatron_collab.settings import ConfigError
from megatron_collab.types import Conversation, Ending, Message, Task
from tests.llm.endpoint import Endpoint, says
from tests.rollout.users.helpers import check_user, dialogue, task


def configured(users: dict[str, Any], **user: Any) -> Config:
    config = Config(users=users)
    for name, value in user.items():
        setattr(config.user, name, value)
    return config


def test_a_named_users_settings_override_those_of_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    (tmp_path / "strict.j2").write_text("Be strict. {{ goal }} {{ persona }} {{ stop }}\n")
    (tmp_path / "people.txt").write_text("a nurse\n")

    async def play() -> tuple[list[dict[str, Any]], list[bool]]:
        async with Endpoint(says({"current_answer": "", "thought": "", "response": "so be it, BYE"})) as endpoint:
            at = endpoint.config()
            strict = {"class": "llm/openai/strict", "prompt": str(tmp_path / "strict.j2"), "stop": "BYE"}
            patient = {"model": "openai/patient", "temperature": 0.25, "personas": str(tmp_path / "people.txt")}
            config = configured({"patient": patient, "strict": strict}, model=at.model, api_base=at.api_base)
            users = Users(user_directory(config), LlmClient())
            done = []
            for name in ("llm", "patient", "strict"):
                done.append((await users.make(task(name, "buy milk"), "s").reply(dialogue("hi", "hello"))).done)
            return endpoint.requests, done

    (plain, patient, strict), done = asyncio.run(play())
    assert [request["model"] for request in (plain, patient, strict)] == ["m", "patient", "strict"]
    assert [request["temperature"] for request in (plain, patient, strict)] == [1.0, 0.25, 1.0]
    systems = [request["messages"][0]["content"] for request in (plain, patient, strict)]
    assert "Who you are" not in systems[0] and "Who you are: a nurse" in systems[1]
    assert systems[2].startswith("Be strict. buy milk  BYE\n\nAnswer with one JSON object")
    assert done == [False, False, True], "each user has its own stop text"


@pytest.mark.seconds
def test_tasks_without_a_user_draw_one_by_weight_and_seed() -> None:
    config = configured({"often": {"weight": 3}, "seldom": {}, "never": {"weight": 0}})
    tasks = [Task(str(i), (), "g", "", "") for i in range(4000)]
    drawn = [*map(user_directory(config).name_of, tasks)]
    assert drawn == [*map(user_directory(config).name_of, tasks)]
    counts = Counter(drawn)
    assert set(counts) == {"often", "seldom"} and abs(counts["often"] / 4000 - 0.75) < 0.03
    config.run.seed = 1
    assert drawn != [*map(user_directory(config).name_of, tasks)]
    assert user_directory(config).name_of(Task("0", (), "g", "", "never")) == "never"
    assert (
        user_directory(configured({"a": {"weight": 0}})).name_of(tasks[0])
        == ""
        == user_directory(Config()).name_of(tasks[0])
    )
    optional_tasks = [Task("0", (), "g", "", f"{name}?") for name in ("never", "collabllm")]
    assert [*map(user_directory(config).name_of, optional_tasks)] == [
        "never",
        user_directory(config).name_of(tasks[0]),
    ], "unknown optional names are ignored"
    config.user.name = "reveal"
    assert user_directory(config).name_of(tasks[0]) == user_directory(config).name_of(optional_tasks[0]) == "reveal"


def test_named_users_see_replaced_servers() -> None:
    users = Users(user_directory(configured({"self": {"model": "policy"}})), LlmClient(), ["http://a/v1"])
    user = users.make(task("self"), "s")
    users.engine = ["http://b/v1"]
    assert list(user.users.engine) == ["http://b/v1"]


def test_conversations_are_counted_by_the_name_of_their_user() -> None:
    users = Users(user_directory(configured({"calm": {"class": "replay"}})), LlmClient())
    users.make(task("calm", replay=["x"]), "s").users.counters["user_replies"] += 1
    played = Conversation((Message("user", "hi"), Message("assistant", "a"), Message("user", "x")), ())
    users.ended(task("calm"), played.end(Ending.USER_DONE))
    users.ended(task("calm"), played.end(Ending.ERROR, "down"))
    users.ended(task("replay"), played.end(Ending.USER_DONE))
    assert users.counters == {
        "user_replies": 1,
        "user/calm/turns": 2,
        "user/calm/user_done": 1,
        "user/calm/error": 1,
    }


@pytest.mark.parametrize(
    ("users", "name", "expected"),
    [
        (
            {"strict": {}},
            "strct",
            "user=strct: no such name; known are desk, feedback, llm, replay, reveal, scripted, strict, verl, or",
        ),
        ({"strict": {}}, "strct", "the nearest is strict"),
        ({"strict": {"modl": "x"}}, "strict", "users.strict.modl: no such setting; the nearest is model; there are "),
        ({"strict": {"temperature": -1}}, "strict", "users.strict.temperature=-1.0: must be at least 0"),
        (
            {"strict": {"class": "nobody"}},
            "strict",
            "users.strict.class=nobody: no such name; known are desk, feedback, llm, ",
        ),
        ({"strict": {}}, "strict", "user strict: user.model is not set; set it"),
        ({"strict": {"weight": -1}}, "strict", "users.strict.weight=-1: must be a number of at least 0"),
        ({"replay": {}}, "replay", "users.replay: is the name of a built-in user; choose another name"),
        ({"strict": {"class": "replay", "options": {"a": 1}}}, "strict", "users.strict.options: replay has no options"),
        ({"strict": {"model": "m", "prompt": "none.j2"}}, "strict", "user strict: prompt=none.j2: no such file"),
    ],
)
def test_invalid_named_users_are_refused_in_one_line(users: dict[str, Any], name: str, expected: str) -> None:
    refusal = check_user(name, configured(users))
    assert refusal is not None and expected in refusal and "\n" not in refusal


def test_an_invalid_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"users\.a/b: name it with letters"):
        user_directory(configured({"a/b": {}}))


def test_limits_prices_and_settings_know_every_user(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured({"slow": {"attempts": 30, "max_tokens": 5000, "model": "openai/o3", "class": "llm"}}, model="m")
    config.llm.requests_per_minute = 1
    plain = Config(user=config.user, llm=config.llm)
    assert group_seconds(play_spec(config), 1) > 5 * group_seconds(play_spec(plain), 1)
    user_endpoints = llm_endpoints.user_endpoints(
        user_directory(config), ["llm", "slow", "llm/openai/gpt-4o", "replay"]
    )
    settings = [(entry.setting, entry.group, entry.endpoint.model) for entry in user_endpoints]
    assert settings == [
        ("user.model", "user", "m"),
        ("users.slow.model", "users.slow", "openai/o3"),
        ("user=llm/openai/gpt-4o: the model", "user", "openai/gpt-4o"),
    ]
    config.users["slow"]["extra"] = {"stream": True}
    with pytest.raises(ConfigError, match=r"users\.slow\.extra\.stream: is not passed on"):
        endpoints.check_settings(config, user_directory(config).settings)
    assert user_directory(config).settings["users.slow"].timeout == config.user.timeout


def test_a_resumed_run_may_change_a_named_users_endpoint_but_not_its_model(tmp_path: Path) -> None:
    config = configured({"a": {"model": "m", "api_base": "http://old"}})
    config.run.dir = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    config.users["a"] |= {"api_base": "http://new", "timeout": 5.0}
    assert all(change.allowed for change in changes(config)) and len(changes(config)) == 2
    config.users["a"]["model"] = "n"
    assert [change.setting for change in changes(config) if not change.allowed] == ["users.a.model"]
