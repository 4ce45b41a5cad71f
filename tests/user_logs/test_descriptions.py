"""What a model tells of a user, and what it does not tell, becomes a task."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_collab.settings import EndpointConfig
from megatron_collab.types import Message, Task
from megatron_collab.user_logs.descriptions import NoDescription, describe_user
from megatron_collab.user_logs.logs import LoggedConversation
from megatron_collab.user_logs.personal import PersonalData, Placeholders

NOTHING = [
    *("none", "None.", "NONE", "n/a", "N/A.", "NA", "unknown", "Unknown", "not given", "Not specified.", "-", "null"),
    *("no names", "There are none.", "nothing", "", " ", "anonymous", "keine", "нет", "неизвестно", "empty", "nobody"),
    *(
        "无",
        "没有",
        "なし",
        "없음",
        "no names mentioned",
        "None provided",
        "not applicable",
        "You are unknown.",
        "none|n/a",
    ),
    "(none)",
]


class Model:
    def __init__(self, **answer: Any) -> None:
        self._answer = answer

    async def ask(self, *question: Any, **settings: Any) -> dict[str, Any]:
        usual = {"goal": "You want a table.", "reached": "no", "gave_up": False, "persona": "", "style": ""}
        return usual | {"names": "", "details": ""} | self._answer


def described(text: str, **answer: Any) -> Task:
    logged = LoggedConversation("p", (Message("user", text),), Placeholders(PersonalData()))
    client: Any = Model(**answer)
    return asyncio.run(describe_user(client, EndpointConfig(model="m"), "?", logged))


@pytest.mark.processes
@pytest.mark.parametrize("nothing", NOTHING)
def test_a_model_that_has_nothing_to_tell_makes_no_person_and_no_persona(nothing: str) -> None:
    text = f"None of it is unknown, no? {nothing}"
    answer = dict.fromkeys(("names", "details"), nothing)
    task = described(text, **answer, **dict.fromkeys(("persona", "style"), nothing.split("|")[0]))
    assert task.messages[0].content == text
    assert task.metadata["persona"].startswith("A message of yours")
    assert task.metadata["reached"] == "no"


@pytest.mark.seconds
@pytest.mark.parametrize("nothing", ["unknown", "n/a", "None."])
def test_a_goal_that_is_not_told_is_no_goal(nothing: str) -> None:
    with pytest.raises(NoDescription, match="an empty goal"):
        described("hi", goal=nothing)


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["Nona Unknownson", "No Yong-ho", "王无", "Nil Ó Néill"])
def test_names_that_look_like_it_are_names(name: str) -> None:
    assert described(f"hi, {name}!", names=name).messages[0].content == "hi, <PERSON_1>!"
