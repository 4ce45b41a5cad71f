from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from megatron_collab.algo.credit import conversation_samples, sample
from megatron_collab.inference.client import EngineError
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.llm.limiter import BudgetSpent
from megatron_collab.rollout import conversation as conversation_module
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace, seed_of
from megatron_collab.rollout.users import UserError, UserReply
from megatron_collab.runtime.redact import LONGEST_EXCERPT
from megatron_collab.runtime.time_limit import uncounted
from megatron_collab.settings import TrainingRewardConfig
from megatron_collab.types import (
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Task,
    Turn,
)
from tests.rollout.fakes import STOP, CharacterRenderer, FakePolicy, FakeUser, FakeUsers, config, decode, encode

TASK = Task("t", (Message("user", "hi"),), "goal", "answer", "testing")
NO_REWARDS: Any = None  # nothing is scored here


class Scores:
    """Scores 1 for every conversation that did not fail."""

    async def future(self, task: Task, conversation: Conversation) -> Future:
        failed = conversation.ending is Ending.ERROR
        return Future(conversation, {"asks": Missing(conversation.error) if failed else 1.0})


SCORES: Any = Scores()
PLACE = RolloutPlace("step-0", 0)


def user(goal: str, messages: Sequence[Message]) -> str:
    """Ends the chat after "end", fails after "break", else goes on."""
    last = messages[-1].content
    if "break" in last:
        raise UserError("no usable message")
    return f"bye {STOP}" if "end" in last else "go on"


def play(
    policy: FakePolicy, futures: int = 1, users: FakeUsers | None = None, strict: bool = False, **rollout: Any
) -> list[Conversation]:
    """The futures of one trained turn."""
    options = config(**rollout)
    player = FuturesPlayer(policy, CharacterRenderer(), users or FakeUsers(user), NO_REWARDS, play_spec(options))

    async def future(start: Conversation, number: int) -> Conversation:
        if start.ending:
            return start
        place = RolloutPlace("step-0", 0, number)
        return await player.play_on(start, TASK, place, options.rollout.future, strict, player.tools.open(TASK))

    async def conversations() -> list[Conversation]:
        start = await player.trained_turn(TASK, PLACE, player.tools.open(TASK))
        return await asyncio.gather(*(future(start, number) for number in range(futures)))

    return asyncio.run(conversations())


def says(text: str) -> FakePolicy:
    return FakePolicy(lambda prompt, seed: text)


def test_every_user_turn_is_answered_until_the_turn_limit() -> None:
    (conversation,) = play(says("ok"), max_user_turns=2)
    assert [message.role for message in conversation.messages] == ["user"] + ["assistant", "user"] * 2 + ["assistant"]
    assert conversation.ending is Ending.TURN_LIMIT
    assert conversation.messages[-1].content == conversation.turns[-1].text == "ok"


@pytest.mark.parametrize(("user_turns", "assistant_turns", "turns"), [(5, 3, 3), (1, 9, 2), (2, 1, 1), (2, 3, 3)])
def test_both_limits_hold_and_the_policy_has_the_last_word(user_turns: int, assistant_turns: int, turns: int) -> None:
    (conversation,) = play(says("ok"), max_user_turns=user_turns, max_assistant_turns=assistant_turns)
    assert conversation.ending is Ending.TURN_LIMIT
    assert len(conversation.turns) == turns
    assert conversation.messages[-1].role == "assistant"


@pytest.mark.parametrize(("limit", "messages"), [(2, 2), (3, 2), (4, 4), (7, 6), (14, 8)])
def test_max_messages_counts_task_messages_but_no_tool_messages(limit: int, messages: int) -> None:
    policy = FakePolicy(lambda prompt, seed: "ok" if "<tool>" in prompt else 'call calculator {"expression": "2+3"}')
    (conversation,) = play(policy, max_user_turns=3, max_assistant_turns=4, max_messages=limit, tools=["calculator"])
    assert conversation.message_count == messages and conversation.messages[-1] == Message("assistant", "ok")
    assert conversation.ending is Ending.TURN_LIMIT and len(conversation.messages) == messages + 2


def test_a_user_may_end_the_conversation_and_its_closing_message_stays() -> None:
    (conversation,) = play(says("end"))
    assert conversation.ending is Ending.USER_DONE
    assert conversation.messages[-1] == Message("user", f"bye {STOP}")
    assert len(conversation.turns) == 1


def test_tokens_are_appended() -> None:
    (conversation,) = play(says("ok"), max_user_turns=1)
    first, second = conversation.turns
    assert first.prompt_ids == encode("<user>hi<assistant>")
    assert second.prompt_ids == first.prompt_ids + first.token_ids + encode("<user>go on<assistant>")
    assert conversation.token_ids == second.prompt_ids + second.token_ids


@pytest.mark.parametrize(("settings", "later"), [({}, False), ({"train_turns": "all"}, True)])
def test_trained_turns_have_the_experts_of_positions_that_no_earlier_turn_has(
    settings: dict[str, Any], later: bool
) -> None:
    (conversation,) = play(says("ok"), max_user_turns=1, routing_replay=True, **settings)
    first, second = conversation.turns
    seen = len(first.stream)
    assert first.routing is not None and first.routing[:, 0].tolist() == list(range(seen - 1))
    assert (second.routing is not None) is later
    if second.routing is not None:
        assert second.routing[:, 0].tolist() == list(range(seen - 1, len(second.stream) - 1))
        routing = sample([second], [], before=[first]).routing
        assert routing is not None
        assert routing.tolist() == [[at, 1 + (at >= seen - 1)] for at in range(len(second.stream) - 1)] + [[0, 0]]


def test_turns_without_earlier_thoughts_have_the_experts_of_all_their_tokens() -> None:
    policy = FakePolicy(lambda prompt, seed: "<think>hm</think>ok")
    (conversation,) = play(policy, max_user_turns=1, routing_replay=True, strip_thoughts=True, train_turns="all")
    first, second = conversation.turns
    assert second.prompt_ids[: len(first.stream)] != first.stream
    routing = sample([first, second], []).routing
    assert routing is not None and len(routing) == len(first.stream) + len(second.stream)
    assert routing[:, 0].tolist() == [*range(len(first.stream) - 1), 0, *range(len(second.stream) - 1), 0]
    assert first.routing is not None and second.routing is not None
    assert (first.routing[:, 1] == 1).all() and (second.routing[:, 1] == 2).all()


def test_turn_and_futures_have_budgets_of_their_own() -> None:
    (conversation,) = play(says("abcdef"), turn=3, future=5, max_user_turns=1)
    assert [turn.text for turn in conversation.turns] == ["abc", "abcde"]
    assert conversation.turns[0].finish is Finish.LENGTH
    assert conversation.turns[1].prompt_ids[-len("<user>go on<assistant>") - 1] == 0  # the end that the turn lacked
    assert conversation.ending is Ending.TURN_LIMIT


@pytest.mark.parametrize(
    ("context_length", "turns", "roles"),
    [
        (20, 1, 2),  # the trained turn is cut by the context: 19 tokens of prompt
        (22, 1, 3),  # the user's message does not fit
        (22 + len("<user>go on<assistant>"), 1, 3),  # it fits, but leaves no room for a reply
        (23 + len("<user>go on<assistant>"), 2, 4),  # it leaves room for one token
    ],
)
def test_the_context_length_is_never_exceeded(context_length: int, turns: int, roles: int) -> None:
    (conversation,) = play(says("ok"), context_length=context_length)
    assert conversation.ending is Ending.LENGTH
    assert (len(conversation.turns), len(conversation.messages)) == (turns, roles)
    assert len(conversation.token_ids) <= context_length


def test_a_task_that_does_not_fit_is_an_error() -> None:
    (conversation,) = play(says("ok"), context_length=19)
    assert conversation.ending is Ending.ERROR
    assert "rollout.context_length=19" in conversation.error


@pytest.mark.usefixtures("virtual_time")
def test_all_futures_are_played_at_once() -> None:
    class Patient(FakePolicy):
        """Answers a future only once all of them ask."""

        asking = 0

        async def generate(self, prompt_ids: tuple[int, ...], **options: Any) -> Turn:
            if "go on" in decode(prompt_ids):
                self.asking += 1
                async with asyncio.timeout(60):
                    while self.asking < 200:
                        await asyncio.sleep(0.005)
            return await super().generate(prompt_ids, **options)

    assert len(play(Patient(lambda prompt, seed: "ok"), futures=200)) == 200


def test_an_error_in_one_future_leaves_the_others() -> None:
    def reply(prompt: str, seed: int) -> str:
        if prompt.endswith("<user>hi<assistant>"):
            return "start"
        return "break" if seed == unlucky else "ok"

    unlucky = seed_of(0, RolloutPlace("step-0", 0, 2), 1)
    conversations = play(FakePolicy(reply, wait=0.01), futures=5)
    endings = [conversation.ending for conversation in conversations]
    assert endings == [Ending.TURN_LIMIT, Ending.TURN_LIMIT, Ending.ERROR, Ending.TURN_LIMIT, Ending.TURN_LIMIT]
    assert conversations[2].error == "no usable message"
    assert conversations[2].messages[-1] == Message("assistant", "break")


def test_a_failing_engine_ends_the_future_with_the_reason() -> None:
    def reply(prompt: str, seed: int) -> str:
        if "go on" in prompt:
            raise EngineError("connection refused")
        return "ok"

    (conversation,) = play(FakePolicy(reply))
    assert (conversation.ending, conversation.error) == (Ending.ERROR, "connection refused")
    assert len(conversation.turns) == 1


def test_an_aborted_turn_is_an_error() -> None:
    class Aborting(FakePolicy):
        async def generate(self, prompt_ids: tuple[int, ...], **options: Any) -> Turn:
            return Turn(prompt_ids, (), (), (), Finish.ABORT, "")

    (conversation,) = play(Aborting(lambda prompt, seed: ""))
    assert conversation.ending is Ending.ERROR
    assert conversation.turns == ()


@pytest.mark.usefixtures("virtual_time")
def test_a_future_past_its_deadline_keeps_its_messages() -> None:
    class Stuck(FakePolicy):
        async def generate(self, prompt_ids: tuple[int, ...], **options: Any) -> Turn:
            if "go on" in decode(prompt_ids):
                await asyncio.sleep(60)
            return await super().generate(prompt_ids, **options)

    users = FakeUsers(user)
    (conversation,) = play(Stuck(lambda prompt, seed: "ok"), users=users, deadline=0.05)
    assert conversation.ending is Ending.DEADLINE
    assert "rollout.deadline=0.05" in conversation.error
    assert [message.content for message in conversation.messages] == ["hi", "ok", "go on"]
    assert users.by_sample["step-0/0/0"].calls == ["start", "reply", "finish"]


def test_every_user_is_finished_once_whatever_happens() -> None:
    for text, reason in (("ok", Ending.TURN_LIMIT), ("break", Ending.ERROR), ("end", Ending.USER_DONE)):
        users = FakeUsers(user)
        conversations = play(says(text), futures=3, users=users)
        assert {conversation.ending for conversation in conversations} == {reason}
        assert len(users.by_sample) == 3
        for fake_user in users.by_sample.values():
            assert (
                fake_user.calls[0] == "start"
                and fake_user.calls.count("finish") == 1
                and fake_user.calls[-1] == "finish"
            )


class Finishing(FakeUsers):
    """Users who end their conversations as `finish` does."""

    def __init__(self, finish: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(user)
        self.finish, self.ends = finish, list[Conversation]()

    def make(self, task: Task, sample: str) -> FakeUser:
        fake_user = super().make(task, sample)
        fake_user.finish = lambda conversation: self.finish()  # type: ignore[method-assign]
        return fake_user

    def ended(self, task: Task, conversation: Conversation) -> None:
        self.ends.append(conversation)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(("deadline", "ending"), [(50.0, Ending.TURN_LIMIT), (30.0, Ending.DEADLINE)])
def test_a_pause_of_the_policy_does_not_count_towards_the_deadline(
    virtual_time: None, deadline: float, ending: Ending
) -> None:
    """The future has two turns of 20 s."""

    class Pausing(FakePolicy):
        async def generate(self, *prompt: Any, **options: Any) -> Turn:
            with uncounted():
                await asyncio.sleep(1000.0)
            await asyncio.sleep(20.0)
            return await super().generate(*prompt, **options)

    (conversation,) = play(Pausing(lambda prompt, seed: "ok"), max_user_turns=2, deadline=deadline)
    assert conversation.ending is ending


@pytest.mark.parametrize(("hangs", "why"), [(False, "the world is gone"), (True, "rollout.deadline=0.05")])
def test_an_error_in_finish_ends_only_that_conversation(monkeypatch: pytest.MonkeyPatch, hangs: bool, why: str) -> None:
    """It has its type and is counted, the messages stay, and so does an earlier error."""
    monkeypatch.setattr(conversation_module, "FINISH_SECONDS", 0.05)

    async def finish() -> float:
        if hangs:
            await asyncio.sleep(60)
        raise UserError("the world is gone")

    for text in ("ok", "end", "break"):
        users = Finishing(finish)
        (conversation,) = play(says(text), users=users, deadline=0.05 if hangs else 60.0, max_user_turns=1)
        before = "no usable message" if text == "break" else ""
        assert (before or why) in conversation.error
        assert conversation.ending is (Ending.DEADLINE if hangs and not before else Ending.ERROR)
        assert len(conversation.turns) == (2 if text == "ok" else 1) and users.ends == [conversation]


@pytest.mark.usefixtures("virtual_time")
def test_a_user_has_time_to_finish_after_the_deadline() -> None:
    """To close what it holds, such as a session with a server; its rewards count."""

    async def finish() -> float:
        await asyncio.sleep(0.1)
        return 8.0

    class Stuck(FakePolicy):
        async def generate(self, prompt_ids: tuple[int, ...], **options: Any) -> Turn:
            await asyncio.sleep(60 if "go on" in decode(prompt_ids) else 0)
            return await super().generate(prompt_ids, **options)

    (conversation,) = play(Stuck(lambda prompt, seed: "ok"), users=Finishing(finish), deadline=0.05)
    assert (conversation.ending, conversation.turn_rewards) == (Ending.DEADLINE, (8.0,))


def test_rewards_of_users_go_to_the_turn_they_answer() -> None:
    def paying(goal: str, messages: Sequence[Message]) -> UserReply:
        return UserReply(Message("user", "go on"), False, reward=float(len(messages)))

    (conversation,) = play(says("ok"), users=FakeUsers(paying), max_user_turns=2)
    assert conversation.turn_rewards == (2.0, 4.0, 0.0)


def test_users_may_credit_earlier_turns() -> None:
    """In a reply and at the end; these rewards reach the journal and the credits of turns."""

    def hindsight(goal: str, messages: Sequence[Message]) -> UserReply:
        late = len(messages) > 2
        return UserReply(Message("user", "go on"), False, 0.5, {0: 2.0} if late else {})

    class Generous(FakeUsers):
        def make(self, task: Task, sample: str) -> FakeUser:
            fake_user = super().make(task, sample)
            fake_user.finish = lambda conversation: finish({1: 8.0, -1: 16.0})  # type: ignore[method-assign]
            return fake_user

    async def finish(rewards: dict[int, float]) -> Any:
        return rewards

    (conversation,) = play(says("ok"), users=Generous(hindsight), max_user_turns=2)
    assert conversation.turn_rewards == (0.5 + 2.0, 0.5 + 8.0, 16.0)
    assert pickle.loads(pickle.dumps(conversation)) == conversation
    reward = TrainingRewardConfig(turn_credit="reward_to_go")
    rollout = Rollout(conversation, (Future(conversation, {}),), Reward(32.0))
    (trained,) = conversation_samples(TASK, [rollout], reward, "g")
    assert [credit.value for credit in trained.credits] == [59.0, 56.5, 48.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_an_error(value: float) -> None:
    """It must not reach the loss, and so every weight."""
    paying = FakeUsers(lambda goal, messages: UserReply(Message("user", "go on"), False, reward=value))
    (conversation,) = play(says("ok"), users=paying)
    why = f"user testing: ValueError: a reward of {value} for turn -1; give a finite number"
    assert (conversation.ending, conversation.error) == (Ending.ERROR, why)
    assert conversation.turn_rewards == (0.0,)


class Deep(FakeUsers):
    """Makes users that fail with the error that the goal of their task names, or cannot be made."""

    def make(self, task: Task, sample: str) -> Any:
        if task.goal == "made":
            raise KeyError("facts")
        return super().make(task, sample)


def fails(goal: str, messages: Sequence[Message]) -> Any:
    faults: dict[str, Callable[[], Any]] = {
        "key": lambda: {}["facts"],
        "json": lambda: json.loads("no JSON"),
        "deep": lambda: json.loads("[" * 100_000),
        "timeout": _late,
        "nothing": lambda: UserReply(None, False),  # type: ignore[arg-type]
        "turn": lambda: UserReply(Message("user", "go on"), False, credits={7: 1.0}),
        "good": lambda: "go on",
    }
    return faults[goal]()


def _late() -> Any:
    raise TimeoutError("of the user's own")


@pytest.mark.parametrize(
    ("goal", "why"),
    [
        ("made", "user testing: KeyError: 'facts'"),
        ("key", "user testing: KeyError: 'facts'"),
        ("json", "user testing: JSONDecodeError: Expecting value"),
        ("deep", "user testing: RecursionError: "),
        ("timeout", "user testing: TimeoutError: of the user's own"),
        ("nothing", "user testing: AttributeError: "),
        ("turn", "user testing: ValueError: a reward for turn 7"),
    ],
)
def test_any_exception_of_a_user_is_an_error_of_its_task_only(goal: str, why: str) -> None:
    users = Deep(fails)
    options = config(max_user_turns=1)
    options.reward.weights = {"asks": 1.0}
    player = FuturesPlayer(says("ok"), CharacterRenderer(), users, SCORES, play_spec(options))
    bad, good = (Task(name, TASK.messages, name, "", "testing") for name in (goal, "good"))

    async def groups() -> list[Group]:
        return list(await asyncio.gather(player.play(bad, "step-0-0"), player.play(good, "step-0-1")))

    failed, played = asyncio.run(groups())
    for rollout in failed.rollouts:
        for future in rollout.futures:
            assert future.conversation.ending is Ending.ERROR and future.conversation.error.startswith(why)
        assert isinstance(rollout.reward.value, Missing) and why in rollout.reward.value.why
    assert users.counters["user_failed"] == sum(len(rollout.futures) for rollout in failed.rollouts)
    assert all(rollout.reward.value == 1.0 for rollout in played.rollouts)


def test_a_spent_budget_is_not_the_error_of_a_task() -> None:
    def spent(goal: str, messages: Sequence[Message]) -> Any:
        raise BudgetSpent("llm.budget_usd=1 is used up")

    with pytest.raises(BudgetSpent):
        play(says("ok"), users=FakeUsers(spent))


@pytest.mark.parametrize("method", ["first", "next", "prompt_without_thoughts"])
def test_messages_that_the_chat_template_refuses_are_the_error_of_their_conversation(method: str) -> None:
    def refuse(*_: Any) -> tuple[int, ...]:
        raise ValueError("no such role")

    options, renderer = config(), CharacterRenderer()
    options.reward.weights = {"asks": 1.0}
    options.rollout.strip_thoughts = method == "prompt_without_thoughts"
    setattr(renderer, method, refuse)
    player = FuturesPlayer(says("ok"), renderer, FakeUsers(user), SCORES, play_spec(options))
    group = asyncio.run(player.play(TASK, "step-0-0"))
    (why,) = {rollout.reward.value.why for rollout in group.rollouts}  # type: ignore[union-attr]
    assert why == "asks: no such role"


def test_tools_answer_within_a_turn_and_the_user_after_it() -> None:
    def reply(prompt: str, seed: int) -> str:
        if prompt.endswith("<user>hi<assistant>"):
            return 'call calculator {"expression": "6*7"}'
        return "it is 42" if prompt.endswith("<tool>42<assistant>") else "ok"

    (conversation,) = play(FakePolicy(reply), tools=["calculator"], max_user_turns=1)
    roles = [message.role for message in conversation.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert conversation.replies == ("it is 42", "ok")
    first, second, _ = conversation.turns
    assert second.prompt_ids == first.prompt_ids + first.token_ids + encode("<tool>42<assistant>")


def test_max_tool_calls_ends_endless_calls_and_the_last_call_is_the_reply() -> None:
    call = 'call calculator {"expression": "1"}'
    (conversation,) = play(says(call), tools=["calculator"], max_tool_calls=3, max_user_turns=1)
    assert len(conversation.turns) == 2 * 4
    assert conversation.replies == (call, call)


def test_without_room_for_a_tool_message_the_call_is_the_reply() -> None:
    call = 'call calculator {"expression": "1"}'
    length = len(encode("<user>hi<assistant>")) + len(call) + 5
    (conversation,) = play(says(call), tools=["calculator"], context_length=length)
    assert conversation.ending is Ending.LENGTH
    assert conversation.replies == (call,)


def test_users_do_not_see_thoughts_which_stay_in_the_tokens() -> None:
    heard = []

    def listening(goal: str, messages: Sequence[Message]) -> str:
        heard.append(messages[-1].content)
        return "go on"

    (conversation,) = play(says("<think>hm</think>said"), users=FakeUsers(listening), max_user_turns=1)
    assert heard == ["said"]
    assert conversation.replies == ("said", "said")
    assert "<think>hm</think>" in decode(conversation.token_ids)


def test_later_turns_see_no_earlier_thoughts_if_they_are_stripped() -> None:
    """Within a turn they stay: the policy has called a tool in the middle of it."""
    texts = iter(['call calculator {"expression": "6*7"}', "<think>hm</think>42", "<think>so</think>bye"])
    policy = FakePolicy(lambda prompt, seed: next(texts))
    (conversation,) = play(policy, tools=["calculator"], strip_thoughts=True, max_user_turns=1)
    call, reply, last = conversation.turns
    assert reply.prompt_ids[: len(call.prompt_ids)] == call.prompt_ids
    assert decode(reply.prompt_ids).endswith("<tool>42<assistant>")
    seen = decode(last.prompt_ids)
    assert "<assistant>42<user>go on<assistant>" in seen and "<think>" not in seen
    assert conversation.token_ids == last.prompt_ids + last.token_ids


def test_the_trained_turn_thinks_and_turns_of_futures_do_not() -> None:
    options = config(max_user_turns=1)
    options.rollout.turn.enable_thinking, options.rollout.future.enable_thinking = True, False
    policy = FakePolicy(lambda prompt, seed: "hm</think>ok" if prompt.endswith("<think>") else "ok")
    options.reward.weights = {"asks": 1.0}
    player = FuturesPlayer(policy, CharacterRenderer(), FakeUsers(user), SCORES, play_spec(options))
    group = asyncio.run(player.play(TASK, "step-0-0"))
    for future in (future for rollout in group.rollouts for future in rollout.futures):
        first, second = future.conversation.turns
        assert first.text == "<think>hm</think>ok", "the opening in the prompt is in the text"
        assert decode(second.prompt_ids).endswith("<user>go on<assistant><think></think>") and second.text == "ok"
        assert future.conversation.replies == ("ok", "ok")


def test_a_tool_call_inside_a_thought_is_not_made() -> None:
    thought = '<think>call calculator {"expression": "1"}</think>it is 1'
    (conversation,) = play(says(thought), tools=["calculator"], max_user_turns=1)
    assert conversation.replies == ("it is 1", "it is 1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "an empty reply"),
        ("<think>hm", "<think> without </think>"),
        ("<think>a<think>b</think></think>c", "nested <think>"),
        ("far too long for the budget of this turn, alas", "cut by its token budget"),
    ],
)
def test_a_malformed_turn_is_refused_with_the_reason(text: str, why: str) -> None:
    player = FuturesPlayer(says(text), CharacterRenderer(), FakeUsers(user), NO_REWARDS, play_spec(config(turn=40)))
    refused = player.refuse_malformed(asyncio.run(player.trained_turn(TASK, PLACE)))
    assert (refused.ending, refused.error) == (Ending.MALFORMED, why)


def test_with_strict_a_malformed_later_turn_ends_the_conversation() -> None:
    policy = FakePolicy(lambda prompt, seed: "" if "go on" in prompt else "ok")
    (conversation,) = play(policy, strict=True)
    assert (conversation.ending, len(conversation.turns)) == (Ending.MALFORMED, 2)


def test_seeds_are_the_same_in_every_process_and_depend_on_every_part() -> None:
    assert seed_of(0, RolloutPlace("train-0-0", 0, 0), 0) == 507381455
    parts = [(r, RolloutPlace(s, g, f), t) for r in range(3) for s in ("train-0-0", "train-0-1") for g in range(4)
             for f in range(4) for t in range(3)]  # fmt: skip
    seeds = {seed_of(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_restarted_run_samples_with_the_same_seeds_on_the_same_server() -> None:
    first, second = (FakePolicy(lambda prompt, seed: "ok", wait=0.01) for _ in range(2))
    play(first, futures=4)
    play(second, futures=4)
    assert sorted(first.seeds) == sorted(second.seeds)
    assert len(set(first.seeds)) == 1 + 4 * 2
    assert first.affinities == {"step-0"}


def test_private_notes_of_the_user_are_kept_and_reach_neither_policy_nor_tools() -> None:
    prompts = []

    def reply(prompt: str, seed: int) -> str:
        prompts.append(prompt)
        return "ok" if "<tool>" in prompt or len(prompts) < 2 else 'call calculator {"expression": "2+3"}'

    def noting(goal: str, messages: Sequence[Message]) -> UserReply:
        return UserReply(
            Message("user", "go on", private={"thought": "a secret", "mood": "", "x": "y" * 30_000}), False
        )

    users = FakeUsers(noting)
    (conversation,) = play(FakePolicy(reply), users=users, max_user_turns=2, tools=["calculator"])
    assert len(conversation.turns) == 4 and not any("secret" in prompt for prompt in prompts)
    assert "secret" not in decode(conversation.token_ids)
    notes = [message.private for message in conversation.messages if message.private]
    assert len(notes) == 2
    assert [(name, len(text)) for name, text in notes[0].items()] == [("thought", 8), ("x", LONGEST_EXCERPT)]
