"""Tools from classes and functions: valid and refused ones, and the scope of their state. test_mcp_server.py: MCP."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.inference.client import UnreadableCall
from megatron_collab.launch.play_specs import play_spec, tool_spec
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.rollout.tools import ToolFailure
from megatron_collab.rollout.tools.toolbox import Toolbox, check_call, find_tool
from megatron_collab.settings import ConfigError, RolloutConfig
from megatron_collab.types import Ending, Future, Group, Message, Task, ToolCall
from tests.rollout.fakes import CharacterRenderer, FakePolicy, FakeUsers, config, toolbox_of

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
MINE = """
import asyncio, threading
from typing import Any
from megatron_collab.rollout.tools import Tool, ToolError, ToolResult

LOG = []
ALL = threading.Barrier(20)
LATE = threading.Event()


class Notebook(Tool):
    SCHEMA = {
        "name": "note",
        "description": "Notes a word; gives all that is noted.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    }

    def start(self, task):
        self.words = [task.id]
        LOG.append("start")

    def call(self, task, word):
        if word == "bug":
            raise KeyError(word)
        if word == "slow":
            ALL.wait(60)
        self.words.append(word)
        return ToolResult(" ".join(self.words), 0.5 * len(word))

    async def close(self):
        LOG.append("close " + " ".join(self.words))


class Lock(Notebook):
    def start(self, task):
        super().start(task)
        import threading
        self.lock = threading.Lock()


async def forecast(city: str, days: int = 1, unit: str | None = None) -> dict[str, Any]:
    \"\"\"The weather of the coming days.

    Args:
        city: where
        days: how many days
        unit: C or F
    \"\"\"
    if city == "nowhere":
        raise ValueError("no such city")
    await asyncio.sleep(2 if city == "far" else 0)
    return {"city": city, "days": days}


def area(a, b):
    return a * b


area.SCHEMA = {
    "type": "function",
    "function": {
        "name": "area_of",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "minimum": 0}, "b": {"$ref": "#/$defs/side"}},
            "required": ["a", "b"],
            "$defs": {"side": {"type": "number", "enum": [1, 2]}},
        },
    },
}


def bare(x):
    return x


class Starts(Notebook):
    # Hangs in its first start, fails in its second.
    def start(self, task):
        super().start(task)
        LOG.append("")
        if len(LOG) == 2:
            LATE.wait(60)
        if len(LOG) == 4:
            raise ValueError("not yet")


def odd(kind: str, reward: str = "0.5"):
    \"\"\"Gives what no conversation can go on with.

    Args:
        kind: number, or the text
        reward: nan, none, or half a point
    \"\"\"
    return ToolResult(5 if kind == "number" else kind, {"nan": float("nan"), "none": None}.get(reward, 0.5))


def loose(x):
    return x


loose.SCHEMA = {"name": "loose", "parameters": {"type": "object", "properties": {"x": {"type": "strng"}}}}


def older(x, y):
    return [x, y]


older.SCHEMA = {
    "name": "older",
    "parameters": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"x": True, "y": {"type": "array", "items": [{"type": "string"}, {"type": "number"}]}},
    },
}
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tools") / "mine.py"
    file.write_text(MINE)
    return file


def answer(text: str, *names: str, timeout: float = 60.0) -> tuple[list[Message], Toolbox]:
    options = RolloutConfig(tools=list(names or ["calculator"]), tool_timeout=timeout)
    box = toolbox_of(options, FakePolicy(lambda prompt, seed: ""))

    async def conversation() -> list[Message]:
        async with box.open(TASK) as session:
            return (await session.answer(text))[0]

    return asyncio.run(conversation()), box


def test_a_call_is_answered_by_a_tool_message() -> None:
    assert answer('call calculator {"expression": "6*7"}')[0] == [Message("tool", "42")]
    assert answer("nothing to call")[0] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('call oracle {"expression": "1"}', "no tool oracle; there are calculator"),
        ("call calculator {}", "no argument expression"),
        ('call calculator {"expression": "1", "digits": 3}', "unknown argument digits"),
        ('call calculator {"expression": 7}', "argument expression: 7 is not of type 'string'"),
        ('call calculator {"expression": "1/0"}', "cannot compute"),
    ],
)
def test_a_refused_call_tells_the_policy_why_and_is_counted(text: str, why: str) -> None:
    (message,), box = answer(text)
    assert message.role == "tool" and message.content.startswith("error: ") and why in message.content
    assert box.counters == {"tool_calls": 1, "tool_errors": 1}


def test_a_call_at_which_the_parser_fails_is_refused() -> None:
    """The policy's text cannot be parsed, which is not an outage: the conversation goes on."""

    class Parser(FakePolicy):
        async def tool_calls(self, text: str, schemas: Any) -> list[ToolCall]:
            raise UnreadableCall("status 500")

    async def conversation() -> tuple[list[Message], float]:
        async with box.open(TASK) as session:
            return await session.answer('{"name": "{"')

    box = toolbox_of(RolloutConfig(tools=["calculator"]), Parser(lambda prompt, seed: ""))
    assert asyncio.run(conversation()) == ([Message("tool", "error: the call cannot be read")], 0.0)
    assert box.counters == {"tool_calls": 1, "tool_errors": 1}


@pytest.mark.parametrize(
    ("kind", "value", "fits"),
    [
        ("integer", 3, True),
        ("integer", True, False),
        ("integer", 3.5, False),
        ("number", 3, True),
        ("boolean", True, True),
        ("boolean", 1, False),
        ("string", "x", True),
        ("array", [1], True),
        ("object", {}, True),
        ("object", [], False),
    ],
)
def test_arguments_have_the_types_of_the_schema(kind: str, value: Any, fits: bool) -> None:
    parameters = {"f": {"type": "object", "properties": {"x": {"type": kind}}}}
    if fits:
        check_call(ToolCall("f", {"x": value}), parameters)
    else:
        with pytest.raises(ValueError, match=r"^argument x: "):
            check_call(ToolCall("f", {"x": value}), parameters)


def test_functions_are_tools_by_their_docstring_or_their_schema(mine: Path) -> None:
    forecast, area = f"{mine}:forecast", f"{mine}:area"
    (message,), box = answer('call forecast {"city": "Bonn", "unit": null}', forecast, area, "calculator")
    assert message == Message("tool", '{"city": "Bonn", "days": 1}')
    assert [schema["function"]["name"] for schema in box.schemas] == ["forecast", "area_of", "calculator"]
    assert box.schemas[0]["type"] == "function"
    assert box.functions["forecast"].schema["parameters"]["required"] == ["city"]
    days = box.functions["forecast"].schema["parameters"]["properties"]["days"]
    assert days == {"type": "integer", "description": "how many days"}
    assert answer('call area_of {"a": 1.5, "b": 2}', area)[0] == [Message("tool", "3.0")]
    for call, why in {
        '{"a": -1, "b": 1}': "-1 is less than the minimum",
        '{"a": 1, "b": 3}': "not one of [1, 2]",
    }.items():
        assert why in answer(f"call area_of {call}", area)[0][0].content
    (message,), box = answer('call forecast {"city": "nowhere"}', forecast)
    assert message.content == "error: no such city" and box.counters["tool_errors"] == 1
    (message,), box = answer('call forecast {"city": "far"}', forecast, timeout=0.05)
    assert message.content == "error: forecast timed out"
    assert box.counters == {"tool_calls": 1, "tool_timeouts": 1}


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["{mine}:bare"], r"mine.py:bare: Cannot generate JSON schema for bare .*; give it type hints and a docstring"),
        (["{mine}:LOG"], "must be a subclass of megatron_collab.rollout.tools.Toolset or a function"),
        (["{mine}:area", "{mine}:area"], "two tools have the same name"),
        (["{mine}:aria"], "has no aria; the nearest is area"),
        (["{mine}:loose"], "tool loose: parameters are not a JSON schema .*strng.*; correct them, or leave the tool"),
    ],
)
def test_invalid_tools_are_refused_in_one_line(names: list[str], why: str, mine: Path) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        tool_spec(RolloutConfig(tools=[name.format(mine=mine) for name in names])).schemas()
    assert "\n" not in str(error.value)


def test_arguments_fit_the_version_of_json_schema_that_a_tool_names(mine: Path) -> None:
    assert answer('call older {"x": [1], "y": ["a", 2]}', f"{mine}:older")[0] == [Message("tool", '[[1], ["a", 2]]')]
    assert "argument y: 3 is not of type 'string'" in answer('call older {"y": [3]}', f"{mine}:older")[0][0].content


@pytest.mark.parametrize(
    "call", ['{"kind": "number"}', '{"kind": "text", "reward": "nan"}', '{"kind": "text", "reward": "none"}']
)
def test_an_unusable_result_is_a_failure_of_the_tool(call: str, mine: Path) -> None:
    """It does not end the run, as a message without text or a reward that is not a number would do later."""
    with pytest.raises(ToolFailure, match=r"^tool odd: TypeError: a ToolResult needs a "):
        answer(f"call odd {call}", f"{mine}:odd")


def test_half_a_surrogate_pair_in_a_call_is_replaced(mine: Path) -> None:
    """No tokenizer accepts it, so the conversation could not go on."""
    (echoed,), _ = answer('call odd {"kind": "a\\ud83d"}', f"{mine}:odd")
    (refused,), _ = answer('call odd {"kind": "a", "\\ud83d": 1}', f"{mine}:odd")
    assert echoed.content == "a?" and "unknown argument ?" in refused.content


@pytest.mark.seconds
def test_tools_whose_start_fails_are_started_again_at_the_next_call_and_closed(mine: Path) -> None:
    box = toolbox_of(RolloutConfig(tools=[f"{mine}:Starts"], tool_timeout=0.5), FakePolicy(lambda prompt, seed: ""))
    module = vars(sys.modules[find_tool(f"{mine}:Starts").__module__])
    log = module["LOG"]
    log.clear()

    async def three() -> list[str]:
        async with box.open(TASK) as session:
            answers = []
            for _ in range(3):
                answers.append((await session.answer('call note {"word": "a"}'))[0][0].content)
                box.timeout = 60.0
                module["LATE"].set()
            return answers

    assert asyncio.run(three()) == ["error: note timed out", "error: not yet", "t a"]
    assert log == ["start", ""] * 3 + ["close t", "close t", "close t a"]


class Scores:
    async def future(self, task: Task, conversation: Any) -> Future:
        return Future(conversation, {"m": 1.0})


def play(reply: Callable[[str], str], tool: str, **rollout: Any) -> tuple[Group, FuturesPlayer, list[str]]:
    """A group of one rollout with two futures, whose policy says `reply(prompt)`; its player and its tool's log."""
    options = config(tools=[tool], max_user_turns=1, **{"futures": 2, **rollout})
    options.train.rollouts_per_prompt, options.reward.weights = 1, {"m": 1.0}
    options.reward.metrics = {"m": {"metric": "asks"}}
    users = FakeUsers(lambda goal, messages: "go on")
    policy = FakePolicy(lambda prompt, seed: reply(prompt))
    player = FuturesPlayer(policy, CharacterRenderer(), users, Scores(), play_spec(options))  # type: ignore[arg-type]
    log = vars(sys.modules[find_tool(tool).__module__])["LOG"]
    log.clear()
    return asyncio.run(player.play(TASK, "s")), player, log


def notes(prompt: str) -> str:
    """Notes "a" before the trained turn's reply and "b" before a future's."""
    if prompt.endswith("<user>hi<assistant>"):
        return 'call note {"word": "a"}'
    return 'call note {"word": "b"}' if prompt.endswith("<user>go on<assistant>") else "ok"


def test_a_future_continues_with_a_copy_of_the_trained_turns_tool_state(mine: Path) -> None:
    """Each future has "a", but not the other's "b"; each instance has its own state and is closed once."""
    group, player, log = play(notes, f"{mine}:Notebook")
    (rollout,) = group.rollouts
    for future in rollout.futures:
        texts = [message.content for message in future.conversation.messages if message.role == "tool"]
        assert texts == ["t a", "t a b"]
        assert future.conversation.turn_rewards == (0.5, 0.0, 0.5, 0.0)
    assert sorted(log) == ["close t a", "close t a b", "close t a b", "start"]
    assert player.tools.counters == {"tool_calls": 3}


def test_a_tool_that_is_never_called_is_neither_created_nor_copied(mine: Path) -> None:
    _, _, log = play(lambda prompt: "ok", f"{mine}:Lock")
    assert log == []
    _, _, log = play(lambda prompt: notes(prompt) if "go on" not in prompt else "ok", f"{mine}:Lock")
    assert log == ["start", "close t a"]


def test_without_futures_the_whole_conversation_has_one_instance(mine: Path) -> None:
    group, _, log = play(notes, f"{mine}:Notebook", futures=0)
    assert log == ["start", "close t a b"]
    assert group.rollouts[0].start.ending is Ending.TURN_LIMIT


@pytest.mark.parametrize(
    ("tool", "word", "why"),
    [("Notebook", "bug", "tool note: KeyError: 'bug'"), ("Lock", "b", "tool note: TypeError: cannot pickle")],
)
def test_a_tool_that_fails_ends_its_conversation_and_is_closed(tool: str, word: str, why: str, mine: Path) -> None:
    """With a bug of the tool, or a state that cannot be copied, there is no score: neither is the policy's fault."""
    group, player, log = play(lambda prompt: notes(prompt).replace('"b"', f'"{word}"'), f"{mine}:{tool}")
    for future in group.rollouts[0].futures:
        assert future.conversation.ending is Ending.ERROR and future.conversation.error.startswith(why)
    assert player.tools.counters == {"tool_calls": 3, "tool_failures": 2}
    assert log.count("close t a") == (3 if tool == "Notebook" else 1)


def test_synchronous_tools_do_not_delay_other_conversations(mine: Path) -> None:
    """Calls of 20 conversations wait for each other, outside the event loop's thread."""
    box = toolbox_of(RolloutConfig(tools=[f"{mine}:Notebook"]), FakePolicy(lambda prompt, seed: ""))

    async def conversation() -> None:
        async with box.open(TASK) as session:
            await session.answer('call note {"word": "slow"}')

    async def together() -> None:
        await asyncio.gather(*(conversation() for _ in range(20)))

    asyncio.run(together())


def test_the_tools_of_the_how_to_work(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "tool.md").read_text()
    files = re.findall(r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```", page, re.DOTALL)
    for name, code in files:
        (tmp_path / name).write_text(code)
    names = [f"{tmp_path}/days_between.py:days_between", f"{tmp_path}/cart.py:Cart"]
    call = 'call days_between {"first": "2026-01-01", "second": "2026-02-01"}'
    assert answer(call, *names)[0] == [Message("tool", "31")]
    assert answer(call.replace("02-01", "02-31"), *names)[0][0].content.startswith("error: day ")
    assert answer('call add {"thing": "apples"}', *names)[0] == [Message("tool", "apples")]
