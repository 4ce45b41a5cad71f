"""Users with tools: one world for the assistant and the user, copied at each fork; a copy equals a replay."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_collab.config import Config
from megatron_collab.launch.play_specs import play_spec, tool_spec
from megatron_collab.llm.client import LlmClient
from megatron_collab.llm.recording import Recording, Shard
from megatron_collab.llm.tape import Tape
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.tools.of_user import UserCall, noted_calls
from megatron_collab.rollout.tools.toolbox import ConversationTools, find_tool
from megatron_collab.rollout.users import Users
from megatron_collab.settings import ConfigError, UserConfig
from megatron_collab.settings.schema import CHAT
from megatron_collab.types import Conversation, Ending, Future, Message, Task
from tests.llm.endpoint import Endpoint, Reply
from tests.rollout.fakes import CharacterRenderer, FakePolicy, config

TASK = Task("t", (Message("user", "No data!"),), "get online", "", "")
STEPS = ["status", "reboot", "status"]
WORLD = "\n".join(
    [
        "from megatron_collab.rollout.tools import ToolError, ToolResult",
        "from megatron_collab.rollout.tools.shared import SharedTools",
        "from megatron_collab.rollout.users import User",
        "CLOSED = []",
        "class World(SharedTools):",
        "    FUNCTIONS, USER_FUNCTIONS = ['push'], ['press', 'look']",
        "    def start(self, task):",
        "        self.log = [task.id]",
        "    def push(self, what: str) -> str:",
        "        '''Pushes.\n\n        Args:\n            what: it\n        '''",
        "        self.log.append(f'push {what}')",
        "        return ' '.join(self.log)",
        "    async def press(self, what: str):",
        "        '''Presses.\n\n        Args:\n            what: it\n        '''",
        "        if what == 'bug': raise KeyError(what)",
        "        if what == 'no': raise ToolError('not so')",
        "        self.log.append(f'press {what}')",
        "        return ToolResult('x' * 3000 if what == 'long' else ' '.join(self.log), 0.25)",
        "    def look(self) -> str:",
        "        '''Looks.'''",
        "        return ' '.join(self.log)",
        "    def close(self):",
        "        CLOSED.append(' '.join(self.log))",
        "class Presser(User):",
        "    calls_tools = True",
        "    async def reply(self, conversation):",
        "        turn = sum(message.role == 'user' for message in conversation.messages)",
        "        for what in self.task.goal.split(',')[turn - 1].split():",
        "            await self.tools.call('press', {'what': what})",
        "        return self.says(f'{turn}: {await self.tools.call(\"look\", {})}')",
        "class Closer(Presser):",
        "    async def finish(self, conversation):",
        "        await self.tools.call('press', {'what': 'end'})",
        "        return 2.0",
    ]
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("world") / "world.py"
    file.write_text(WORLD)
    return file


class Scores:
    async def future(self, task: Task, conversation: Conversation) -> Future:
        return Future(conversation, {"m": 1.0})


def player_of(options: Config, users: Users | None = None, reply: Any = None) -> FuturesPlayer:
    options.train.rollouts_per_prompt, options.reward.weights = 1, {"m": 1.0}
    options.reward.metrics = {"m": {"metric": "asks"}}
    spec = play_spec(options)
    users = users or Users(spec.users, LlmClient())
    policy = FakePolicy(lambda prompt, seed: (reply or pushes)(prompt))
    return FuturesPlayer(policy, CharacterRenderer(), users, Scores(), spec)  # type: ignore[arg-type]


def pushes(prompt: str) -> str:
    """The policy pushes the number of the user's message, and says what it reads."""
    before, _, result = prompt.rpartition("<tool>")
    if before and "<user>" not in result:
        return result.removesuffix("<assistant>")
    return f'call push {{"what": "{prompt.count("<user>")}"}}'


def options_of(world: Path, goal_user: str = "Presser", **rollout: Any) -> Config:
    options: Config = config(tools=[f"{world}:World"], **{"max_user_turns": 3, "max_assistant_turns": 9, **rollout})
    options.user = UserConfig(name=f"{world}:{goal_user}", tools=["press", "look"], attempts=1)
    return options


def texts(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


@pytest.mark.parametrize("attribute", ["FUNCTIONS", "USER_FUNCTIONS"])
@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("('nope',)", "names nope, which is not a method of the class"),
        ("'look'", "is 'look'; give a list of the names of methods"),
        ("[1]", r"is \[1\]; give a list of the names of methods"),
        ("('fork',)", "names fork, which is not a method of the class"),
        ("('schemas',)", "names schemas, which is not a method of the class"),
        ("('size',)", "names size, which is not a method of the class"),
    ],
)
def test_what_is_no_method_of_shared_tools_is_refused(attribute: str, names: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(f"{WORLD}\nclass Mine(World):\n    size = 3\n    {attribute} = {names}\n")
    with pytest.raises(ConfigError, match=f"tool Mine: {attribute} {reason}"):
        tool_spec(config(tools=[f"{file}:Mine"]).rollout).schemas()


def test_user_and_assistant_see_the_same_world(world: Path) -> None:
    """Both change it and see what the other did; the policy sees neither the user's calls nor their results."""
    task = replace(TASK, goal="a,,b")
    player = player_of(options_of(world, futures=2))
    log = vars(sys.modules[find_tool(f"{world}:World").__module__])["CLOSED"]
    log.clear()
    (rollout,) = asyncio.run(player.play(task, "s")).rollouts
    for future in rollout.futures:
        assert [text for role, text in texts(future.conversation) if role == "tool"] == [
            "t push 1",
            "t push 1 press a push 2",
            "t push 1 press a push 2 push 3",
            "t push 1 press a push 2 push 3 press b push 4",
        ]
        by_user = [message for message in future.conversation.messages if message.role == "user"]
        assert by_user[1] == Message("user", "1: t push 1 press a")
        assert noted_calls(by_user[1]) == [
            UserCall("press", {"what": "a"}, "t push 1 press a"),
            UserCall("look", {}, "t push 1 press a"),
        ]
        # The reward of the user's call is that of the turn before it.
        assert future.conversation.turn_rewards == (0.0, 0.25, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0)
    assert sorted(log) == ["t push 1", *["t push 1 press a push 2 push 3 press b push 4"] * 2]
    assert player.tools.counters == {"tool_calls": 7, "user_tool_calls": 2 * 5}


def test_calls_at_the_end_count_for_the_last_turn(world: Path) -> None:
    player = player_of(options_of(world, "Closer", futures=1, max_user_turns=1))
    (rollout,) = asyncio.run(player.play(replace(TASK, goal="a"), "s")).rollouts
    conversation = rollout.futures[0].conversation
    assert conversation.ending is Ending.TURN_LIMIT and conversation.turn_rewards == (0.0, 0.25, 0.0, 2.25)
    (call,) = json.loads(conversation.messages[-1].private["final_calls"])
    assert call == {"name": "press", "arguments": {"what": "end"}, "result": "t push 1 press a push 2 press end"}


@pytest.mark.parametrize("forks", [1, 2])
def test_a_future_forked_at_any_turn_equals_the_replay_from_the_beginning(forks: int, world: Path) -> None:
    """Also if a fork between, in which nobody called a tool, has no copy: the next one is of the state before it."""
    task, player = replace(TASK, goal="a,b c,,d"), player_of(options_of(world, max_user_turns=4))
    sampling = player.rollout.future

    async def play(k: int | None) -> tuple[list[tuple[str, str]], Sequence[float], list[list[UserCall]]]:
        """The whole conversation; the tools are copied after `k` turns of the user, or never."""
        place = RolloutPlace("s", 0)
        async with player.tools.open(task) as tools:
            conversation = await player.trained_turn(task, place, tools)
            if k is None:
                conversation = await player.play_on(conversation, task, place, sampling, tools=tools)
            else:
                if k:
                    conversation = await player.play_on(conversation, task, place, sampling, tools=tools, user_turns=k)
                conversation = await fork(conversation, tools, forks, 4 - k)
        return (
            texts(conversation),
            conversation.turn_rewards,
            [noted_calls(message) for message in conversation.messages],
        )

    async def fork(conversation: Conversation, tools: ConversationTools, depth: int, turns: int) -> Conversation:
        async with tools.fork() as copies:
            if depth > 1:
                return await fork(conversation, copies, depth - 1, turns)
            place = RolloutPlace("s", 0)
            if not turns:
                return conversation
            return await player.play_on(conversation, task, place, sampling, tools=copies, user_turns=turns)

    replayed = asyncio.run(play(None))
    assert "press d push 5" in replayed[0][-1][1]
    assert [len(calls) for calls in replayed[2] if calls] == [2, 3, 1, 2]
    for k in range(5):
        assert asyncio.run(play(k)) == replayed


@pytest.mark.parametrize(
    ("goal", "ending", "counted"),
    [
        ("no", None, {"user_tool_errors": 1}),
        ("bug", "user .*Presser: ToolFailure: tool press: KeyError: 'bug'", {"user_tool_failures": 1}),
        ("long", None, {}),
        (" ".join(["long"] * 10), r"before one message have more than 18000 characters", {}),
    ],
)
def test_a_users_call_that_fails_is_typed_and_counted(
    goal: str, ending: str | None, counted: dict[str, int], world: Path
) -> None:
    player = player_of(options_of(world, futures=1, max_user_turns=1))
    (rollout,) = asyncio.run(player.play(replace(TASK, goal=goal), "s")).rollouts
    conversation = rollout.futures[0].conversation
    counters = {name: number for name, number in player.tools.counters.items() if "tool_calls" not in name}
    assert counters == counted
    if ending:
        assert conversation.ending is Ending.ERROR and re.search(ending, conversation.error)
        assert player.users.counters["user_failed"] == 1
    else:
        result = next(message for message in conversation.messages[1:] if message.role == "user")
        first = noted_calls(result)[0].result
        assert first == "error: not so" or first.endswith("[cut: 2000 of 3000 characters]")


def called(*calls: tuple[str, str]) -> Reply:
    async def reply(request: web.Request) -> web.Response:
        functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
        tool_calls = [
            {"id": f"c{at}", "type": "function", "function": function} for at, function in enumerate(functions)
        ]
        message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    return reply


def wrote(text: str) -> Reply:
    async def reply(request: web.Request) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
        body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    return reply


def play_model(
    world: Path, *replies: Reply, tape: Tape | None = None, attempts: int = 1, **rollout: Any
) -> tuple[Conversation, list[dict[str, Any]], FuturesPlayer]:
    async def run() -> Any:
        async with Endpoint(*replies) as endpoint:
            at, options = endpoint.config(), options_of(world, futures=0, **{"max_user_turns": 2, **rollout})
            options.user = UserConfig(
                name="llm", model=at.model, api_base=at.api_base, form=CHAT, tools=["press"], attempts=attempts
            )
            spec_users = play_spec(options).users
            player = player_of(options, Users(spec_users, LlmClient(tape=tape)))
            (rollout_,) = (await player.play(TASK, "s")).rollouts
            return rollout_.start, endpoint.requests, player

    return asyncio.run(run())


@pytest.mark.seconds
def test_a_model_calls_its_tools_and_sees_its_calls_again_in_later_turns(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over real LiteLLM. The next request has the calls where they were made; a recording replays them all."""
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    replies = called(("press", '{"what": "a"}'), ("press", "{")), wrote("done"), wrote("thanks")
    record = Tape(None, Shard(tmp_path, "run"), True, 0.0)
    conversation, requests, player = play_model(world, *replies, tape=record)
    assert not conversation.error
    assert [text for role, text in texts(conversation) if role == "user"] == ["No data!", "done", "thanks"]
    assert player.tools.counters == {"tool_calls": 3, "user_tool_calls": 2, "user_tool_errors": 1}
    (function,) = requests[0]["tools"]
    assert function["function"]["name"] == "press" and requests[1]["tools"] == requests[0]["tools"]
    first, second, third = ([row["role"] for row in request["messages"]] for request in requests)
    assert first == ["system", "user", "assistant", "user"]
    assert second == [*first, "assistant", "tool", "assistant", "tool"]
    assert third == [*second, "assistant", "user"]
    assert requests[2]["messages"][: len(second)] == requests[1]["messages"]
    call, result = requests[2]["messages"][4:6]
    (function_call,) = call["tool_calls"]
    assert json.loads(function_call["function"]["arguments"]) == {"what": "a"}
    assert result["content"] == "t push 1 press a" and result["tool_call_id"] == function_call["id"] == "call00000"
    assert requests[2]["messages"][7]["content"].startswith("error: ")

    tape = Tape(Recording(tmp_path), None, False, 0.0)
    replayed, none, _ = play_model(world, tape=tape)
    assert (texts(replayed), none) == (texts(conversation), [])
    assert [message.private for message in replayed.messages] == [message.private for message in conversation.messages]


@pytest.mark.seconds
def test_a_user_that_only_calls_tools_ends_its_conversation(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    conversation, requests, player = play_model(world, called(("press", '{"what": "a"}')), max_tool_calls=2)
    assert player.tools.counters["user_tool_calls"] == 2 and player.users.counters == {"user_endless_calls": 1}
    assert conversation.ending is Ending.ERROR and len(requests) == 3
    assert conversation.error == "user openai/m: wrote nothing after 2 rounds of calls (rollout.max_tool_calls)"


def test_rounds_of_calls_are_those_before_one_message(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused message begins no new count; a message does."""
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    call, refused = called(("press", '{"what": "a"}')), wrote(" ")
    conversation, requests, _ = play_model(world, call, refused, call, refused, max_tool_calls=1, attempts=3)
    assert len(requests) == 3 and "wrote nothing after 1 rounds of calls" in conversation.error
    conversation, requests, _ = play_model(world, *[call, wrote("done")] * 2, max_tool_calls=1)
    assert len(requests) == 4 and not conversation.error


@pytest.mark.parametrize(
    ("tools", "names", "why"),
    [
        (["World"], ["pres"], "user.tools: no function pres for users; there are press, look; the nearest is press"),
        ([], ["press"], "user.tools: no function press for users; name a class with functions for users in rollout.to"),
        (["World"], ["push"], "user.tools: no function push for users; there are press, look"),
    ],
)
def test_functions_that_are_not_there_are_refused(tools: list[str], names: list[str], why: str, world: Path) -> None:
    options = config(tools=[f"{world}:{name}" for name in tools])
    with pytest.raises(ConfigError) as refused:
        tool_spec(options.rollout).check_user_tools(names, "user")
    assert str(refused.value).startswith(why) and "\n" not in str(refused.value)


def test_the_telephone_of_the_how_to_works(tmp_path: Path) -> None:
    """The page's code: the assistant switches roaming on, the user restarts it, and only both together help."""
    page = (Path(__file__).parents[2] / "docs" / "howto" / "tool.md").read_text()
    match = re.search(r"Save this as `telephone.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert match is not None
    (tmp_path / "telephone.py").write_text(match[1])

    def agent(prompt: str) -> str:
        if prompt.endswith("<user>No data!<assistant>"):
            return 'call set_roaming {"on": true}'
        return "Please restart it."

    options = config(tools=[f"{tmp_path}/telephone.py:Telephone"], futures=0, max_user_turns=2)
    options.user = UserConfig(name=f"{tmp_path}/telephone.py:Caller", tools=["status", "restart"])
    player = player_of(options, reply=agent)
    (rollout,) = asyncio.run(player.play(TASK, "s")).rollouts
    assert rollout.start.ending is Ending.USER_DONE and sum(rollout.start.turn_rewards) == 1.0
    calls = [call for message in rollout.start.messages for call in noted_calls(message)]
    assert [(call.name, call.result) for call in calls] == [
        ("status", "no service"),
        ("restart", "the telephone is on again"),
        ("status", "online"),
    ]
