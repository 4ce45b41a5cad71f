"""Information gain against its formula in float64: by a real server beside transformers, and with log-probs by hand."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_collab.inference.client import EngineError
from megatron_collab.inference.router import Router
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.reward.metrics import ScoredMetric
from megatron_collab.rollout.answer_log_probs import with_answer_log_probs
from megatron_collab.rollout.conversation import FuturesPlayer
from megatron_collab.types import Conversation, Finish, Future, Message, Missing, Task, Turn
from tests.conftest import Served
from tests.rollout.fakes import CharacterRenderer, FakePolicy, FakeUsers, config, decode, encode

TASK = Task("t", (Message("user", "hi"),), "goal", "yes", "testing")
METRIC = ScoredMetric("information_gain", {}, 1.0).make(None)
Renderer: Any = CharacterRenderer


def played(*prompts: Sequence[int]) -> Conversation:
    turns = [Turn(tuple(prompt), (5,), (-0.5,), (0,), Finish.STOP, "x") for prompt in prompts]
    return Conversation(TASK.messages, (), tuple(turns))


def gains(conversation: Conversation, task: Task = TASK) -> Any:
    return asyncio.run(METRIC.score_turns(task, conversation))


def test_gains_by_hand() -> None:
    """The answer has the probability 1/4, 1/2 and 1/8 before the three turns, by token as a geometric mean."""
    conversation = played([1], [1, 2], [1, 2, 3])
    tokens = {1: (1 / 8, 1 / 2), 2: (1 / 2, 1 / 2), 3: (1 / 64, 1)}

    async def log_probs(prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(math.log(p) for p in tokens[len(prompt)])

    read = asyncio.run(with_answer_log_probs(conversation, "yes", [""], log_probs, Renderer()))
    np.testing.assert_allclose(gains(read), [1 / 4, -3 / 8, 0], rtol=1e-12)
    single = asyncio.run(with_answer_log_probs(played([1]), "yes", [""], log_probs, Renderer()))
    assert gains(single) == [0.0]


def test_a_score_that_cannot_be_is_missing_with_the_reason() -> None:
    async def fails(prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
        raise EngineError("no server")

    lost = asyncio.run(with_answer_log_probs(played([1], [2]), "yes", [""], fails, Renderer()))
    assert gains(lost) == Missing("no server")
    blank = asyncio.run(with_answer_log_probs(played([1]), "\n", [""], fails, Words()))
    assert gains(blank) == Missing("the answer '\\n' has no tokens")
    assert "derive it from FuturesPlayer" in gains(played([1])).why
    assert gains(played([1]), Task("t", (), "goal", "", "testing")) is None


class Words(CharacterRenderer):
    """A token for each word with the space before it."""

    def tokens(self, text: str) -> tuple[int, ...]:
        return tuple(hash(word) for word in text.replace(" ", "| ").split("|") if word.strip())


@pytest.mark.parametrize(
    ("renderer", "lead", "opened", "before", "reply"),
    [
        (CharacterRenderer(), "", "", "", "yes"),
        (CharacterRenderer(), "It is: ", "", "It is: ", "yes"),
        (CharacterRenderer(), "", "<think>", "\n}\n\n", "yes"),  # "}" stands for </think>
        (Words(), "It is ", "", "It is", " yes"),
    ],
)
def test_the_answer_is_read_after_its_lead(renderer: Any, lead: str, opened: str, before: str, reply: str) -> None:
    """A thought that the prompt opens is closed; a token of the lead's end and the answer's beginning counts."""
    requests = []

    async def log_probs(*request: tuple[int, ...]) -> tuple[float, ...]:
        requests.append(request)
        return (-1.0, -2.0)

    prompt = encode(f"<assistant>{opened}")
    read = asyncio.run(with_answer_log_probs(played(prompt), "yes", [lead], log_probs, renderer))
    assert requests == [(prompt + renderer.tokens(before), renderer.tokens(reply))]
    assert read.answer_log_probs == {lead: (-1.5,)}


class Knowing(FakePolicy):
    """Finds a character of the answer as probable as 1 - 1 / (messages of the prompt)."""

    async def log_probs(
        self, prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], affinity: str
    ) -> tuple[float, ...]:
        self.affinities.add(affinity)
        roles = decode(prompt_ids).count("<")
        return (math.log(1 - 1 / roles),) * len(token_ids)


@pytest.mark.parametrize(("task", "weight"), [(TASK, 0.0), (TASK, None), (Task("t", TASK.messages, "", "", ""), 1.0)])
def test_a_player_reads_the_answer_if_a_metric_does(task: Task, weight: float | None) -> None:
    options = config(futures=0, max_user_turns=2)
    options.reward.weights = {"asks": 1.0} | ({} if weight is None else {"information_gain": weight})
    scored: list[Conversation] = []

    class Rewards:
        async def future(self, task: Task, conversation: Conversation) -> Future:
            scored.append(conversation)
            return Future(conversation, {})

    policy, rewards = Knowing(lambda prompt, seed: "ok"), Rewards()
    users: Any = FakeUsers(lambda goal, messages: "go on")
    player = FuturesPlayer(policy, Renderer(), users, rewards, play_spec(options))  # type: ignore[arg-type]
    options.train.rollouts_per_prompt = 1
    asyncio.run(player.play(task, "step-0"))
    for conversation in scored:
        if weight is not None and task.answer:
            np.testing.assert_allclose(gains(conversation), [3 / 4 - 1 / 2, 5 / 6 - 3 / 4, 0])
        else:
            assert conversation.answer_log_probs == {}
    assert scored and policy.affinities == {"step-0"}


@pytest.mark.processes
def test_a_real_server_gives_the_gains_of_its_model(servers: dict[str, Served]) -> None:
    """Beside the model in float64, by transformers; each prompt continues the one before, as in a conversation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_collab.data.chat_template import ChatRenderer

    served, answer = servers["tied"], "yes, at seven"
    stream = np.random.default_rng(0).integers(3, 290, 60).tolist()
    conversation = played(stream[:20], stream[:35], stream)
    renderer: Any = ChatRenderer(str(served.folder))

    async def read() -> Conversation:
        address = [(served.server.url, served.server.api_key)]
        router = Router(address, ClientSpec(120.0, "qwen25"), unpublished=True)

        async def log_probs(prompt: tuple[int, ...], reply: tuple[int, ...]) -> tuple[float, ...]:
            return await router.log_probs(prompt, reply, "step-0")

        try:
            return await with_answer_log_probs(conversation, answer, [""], log_probs, renderer)
        finally:
            await router.close()

    model = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float64)
    reply = AutoTokenizer.from_pretrained(served.folder).encode(answer, add_special_tokens=False)
    probabilities = []
    for turn in conversation.turns:
        ids = torch.tensor([*turn.prompt_ids, *reply])
        with torch.no_grad():
            rows = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        probabilities.append(rows[-len(reply) :].mean().exp().item())
    expected = [*np.diff(probabilities), 0.0]
    tolerance = 1e-5 * max(probabilities)
    assert min(map(abs, expected[:-1])) > 1000 * tolerance
    np.testing.assert_allclose(gains(asyncio.run(read())), expected, rtol=0, atol=tolerance)
