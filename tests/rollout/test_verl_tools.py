"""verl's tools, without an edit of their files."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.launch.play_specs import tool_spec
from megatron_collab.rollout.tools import ToolFailure
from megatron_collab.rollout.tools.toolbox import Toolbox
from megatron_collab.runtime import verl
from megatron_collab.settings import ConfigError, RolloutConfig
from megatron_collab.settings.extension import make_absolute
from megatron_collab.types import Message, Task
from tests.rollout.fakes import FakePolicy, toolbox_of
from tests.rollout.foreign import TOOLS, WEATHER

TASK = Task("t", (), "goal", "answer", "llm", {"tools_kwargs": {"weather": {"create_kwargs": {"cities": ["Rome"]}}}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign")
    (path / "weather.py").write_text(WEATHER)
    (path / "tools.yaml").write_text(TOOLS.format(module=path / "weather.py"))
    return path


def box(folder: Path, timeout: float = 60.0, **options: bool) -> Toolbox:
    tools = RolloutConfig(tools=[str(folder / "tools.yaml")], tool_options={"weather": options}, tool_timeout=timeout)
    return toolbox_of(tools, FakePolicy(lambda prompt, seed: ""))


def module(folder: Path) -> dict[str, Any]:
    return vars(sys.modules[verl.load(f"{folder}/weather.py:WeatherTool", "x").__module__])


def ask(city: str) -> str:
    return f'call weather {{"city": "{city}"}}'


def test_a_future_continues_from_a_copy_of_the_state_and_rewards_are_credited_once(folder: Path) -> None:
    log = module(folder)["LOG"]
    log.clear()

    async def conversation() -> list[tuple[list[Message], float]]:
        async with box(folder, calc_reward=True).open(TASK) as tools:
            answers = [await tools.answer(ask(city)) for city in ("Paris", "Bonn")]
            async with tools.fork() as future, tools.fork() as other:
                answers += [await future.answer(ask("Oslo")), await other.answer(ask("Bern"))]
            return [*answers, await tools.answer('call clock {"zone": "CET"}')]

    answers = asyncio.run(conversation())
    assert [(messages[0].content, round(reward, 3)) for messages, reward in answers] == [
        ("Rome Paris: 21 degrees", 0.95),  # -0.05 of execute, and calc_reward rises by 1
        ("Rome Paris Bonn: 21 degrees", -0.05),
        ("Rome Paris Bonn Oslo: 21 degrees", -0.05),
        ("Rome Paris Bonn Bern: 21 degrees", -0.05),
        ("noon in CET", 0.0),
    ]
    assert sorted(log) == ["Rome Paris Bonn", "Rome Paris Bonn Bern", "Rome Paris Bonn Oslo"]


@pytest.mark.seconds
def test_failures_are_typed_and_a_blocking_call_times_out(folder: Path) -> None:
    patient, hasty = box(folder), box(folder, timeout=0.5)

    async def answer(city: str) -> str:
        async with (hasty if city == "far" else patient).open(TASK) as tools:
            return (await tools.answer(ask(city)))[0][0].content

    async def answers() -> list[str | BaseException]:
        return await asyncio.gather(*map(answer, ("Atlantis", "bug", "far", "Rome")), return_exceptions=True)

    missing, bug, far, rome = asyncio.run(answers())
    module(folder)["GO"].set()
    assert missing == "error: no such city" and far == "error: weather timed out" and rome == "Rome Rome: 21 degrees"
    assert isinstance(bug, ToolFailure) and str(bug) == "tool weather: KeyError: 'bug'"
    assert hasty.counters["tool_timeouts"] == 1 and patient.counters["tool_timeouts"] == 0


@pytest.mark.parametrize(
    "arguments", [None, {"clock": None}, {"clock": {"create_kwargs": None, "execute_kwargs": None}}]
)
def test_nulls_of_parquet_are_no_arguments_and_the_oldest_interface_has_no_ids(
    folder: Path, tmp_path: Path, arguments: Any
) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: [{{class_name: '{folder}/weather.py:OldestTool'}}]")
    toolbox = toolbox_of(RolloutConfig(tools=[str(file)], tool_timeout=60.0), FakePolicy(lambda prompt, seed: ""))

    async def answer() -> str:
        async with toolbox.open(replace(TASK, metadata={"tools_kwargs": arguments})) as tools:
            return (await tools.answer('call clock {"zone": "CET"}'))[0][0].content

    assert asyncio.run(answer()) == "CETanswer"


def test_the_schema_is_that_of_the_file_or_of_the_class(folder: Path) -> None:
    weather, clock = (schema["function"] for schema in box(folder).schemas)
    assert weather["parameters"]["required"] == ["city"] and weather["description"] == "The weather."
    assert clock["name"] == "clock" and clock["parameters"]["properties"] == {
        "zone": {"type": "string", "maxLength": 3}
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a: [", "cannot be read (while parsing"),
        ("- 1", "verl's file of tools has a list `tools`"),
        (f"'{'[' * 3000}'", "verl's file of tools has a list `tools`"),
        ("tools: !!bool x", "cannot be read (a value does not fit its tag"),
        ("tools: [{class_name: 3}]", "entry 1: verl's file of tools has"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "entry 1: type mcp; use rollout.mcp_servers"),
        ("tools: [{class_name: nowhere.tools.Weather}]", "entry 1=nowhere.tools:Weather: no module nowhere; install"),
        ("tools: [{class_name: 'FILE:NoTool'}]", "entry 1=FILE:NoTool: has no method create; give a class"),
        ("tools: [{class_name: 'FILE:WeatherTool'}]", "config (ValueError: the tool has no tool_schema)"),
        (
            "tools: [{class_name: 'FILE:FailingTool'}]",
            "cannot be constructed with its config (RuntimeError: no server)",
        ),
    ],
)
def test_what_is_no_tool_is_refused_in_one_line(folder: Path, tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(content.replace("FILE", f"{folder}/weather.py"))
    with pytest.raises(ConfigError) as refused:
        tool_spec(RolloutConfig(tools=[str(file)]))
    message = str(refused.value)
    assert message.startswith(f"rollout.tools={file}") and "\n" not in message
    assert why.replace("FILE", f"{folder}/weather.py") in message


def test_a_class_whose_objects_cannot_be_copied_is_refused_if_there_are_futures(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(f"tools: [{{class_name: '{folder}/weather.py:LockedTool'}}]")
    (locked,) = tool_spec(RolloutConfig(tools=[str(file)])).toolsets
    with pytest.raises(
        ConfigError, match=r"^tool clock: futures need a copy .* \(TypeError: cannot pickle '_thread.lo"
    ):
        locked.check_copies()
    for tools in box(folder).toolsets:
        tools.check_copies()


def test_workers_in_other_folders_find_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert make_absolute(["tools.yaml", "calculator"]) == [str(folder / "tools.yaml"), "calculator"]
