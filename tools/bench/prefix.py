"""How many tokens of shared prefixes are computed again: the real SGLang, two servers, the real router and player.

`python tools/bench/prefix.py` makes a random Qwen3 of 0.5 million parameters and plays 4 prompts at once, each with 8
trained turns x 3 futures x 2 user turns. Only the texts are simulated: a system prompt of 64 words that all prompts
share, 32 to 64 words of a task, user messages of 16 to 48 random words, a token each, turns of 48 tokens at most. They
are played twice: users whose replies differ in every future, as language models' do (`prefill_over_tree`), and users
whose replies are the same in all futures of a turn, as scripted ones may be (`same_replies_prefill_over_tree`).

The tree holds every distinct prefix of all token streams once: a node is a token with all tokens before it. If a token
was decoded, it needs no prefill, except the last token of a turn, which was sampled and never read. So

    prefill_over_tree = tokens of prompts that the servers computed / nodes that no decoding step computed

over all prompts and both servers; at best 1. It is larger because of the last token of a prompt, which SGLang computes
again for each request; the start of the user's message if futures start together; and the system prompt, once per
server and again if prompts start together. `without_cache` is the same ratio if every prompt is computed as a whole.
--smoke: one prompt of two trained turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.environments import tiny_model
from megatron_collab.inference.router import Router
from megatron_collab.inference.server import SGLangServer
from megatron_collab.launch import server_specs
from megatron_collab.launch.play_specs import play_spec, reward_spec, user_directory
from megatron_collab.reward.workers import RewardClient
from megatron_collab.rollout.conversation import FuturesPlayer, RolloutPlace
from megatron_collab.rollout.users import User, UserReply, Users
from megatron_collab.types import Conversation, Message, Task

SERVERS, FUTURES, USER_TURNS = 2, 3, 2
COUNTS, SMOKE_COUNTS = (4, 8), (1, 2)  # prompts, trained turns of each
WORDS = [f"word{i}" for i in range(500)]


class RandomUser(User):
    """Says 16 to 48 words that follow from `sample` and the number of its turn."""

    async def reply(self, conversation: Conversation) -> UserReply:
        drawn = random.Random(f"{self.sample}/{len(conversation.turns)}")
        return UserReply(Message("user", words(drawn, drawn.randint(16, 48))), done=False)


class RandomUsers(Users):
    """Users seeded by the name of their conversation, or by that of its trained turn if they are `alike`."""

    def __init__(self, config: Config, alike: bool) -> None:
        super().__init__(user_directory(config), client=None)  # type: ignore[arg-type]  # these users ask nobody
        self.alike = alike

    def make(self, task: Task, sample: str) -> User:
        return RandomUser(task, "", sample.rpartition("/")[0] if self.alike else sample, self)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one prompt: shows that it runs, no figures")
    counts = SMOKE_COUNTS if parser.parse_args().smoke else COUNTS
    with TemporaryDirectory() as folder, ExitStack() as stack:
        config = configure(Path(folder) / "model")
        tiny_model.save(
            Path(config.model.path), tiny_model.word_tokenizer(WORDS), seed=0, context=config.rollout.context_length
        )
        policy = server_specs.training(config).policy
        servers = [stack.enter_context(SGLangServer(policy, policy.log(index), index)) for index in range(SERVERS)]
        for server in servers:
            server.wait_healthy(policy.host.start_timeout)
        endpoints = [(server.url, server.api_key) for server in servers]
        began = time.monotonic()
        values = asyncio.run(measure(config, endpoints, counts, "distinct", alike=False))
        seconds = time.monotonic() - began
        same = asyncio.run(measure(config, endpoints, counts, "same", alike=True))
    values |= {f"same_replies_{name}": value for name, value in same.items()} | {"seconds": seconds}
    print(json.dumps({"name": "prefix", "values": {name: round(value, 4) for name, value in values.items()}}))


def configure(model: Path) -> Config:
    config = Config()
    config.launch.device, config.model.path, config.model.dtype = "cpu", str(model), "float32"
    config.run.dir = str(model.parent)
    config.rollout.futures, config.rollout.max_user_turns, config.rollout.max_assistant_turns = FUTURES, USER_TURNS, 3
    config.rollout.turn.max_new_tokens = config.rollout.future.max_new_tokens = 48
    config.rollout.context_length = 1024
    config.rollout.server.replicas, config.rollout.server.max_total_tokens = SERVERS, 2**16
    return config


async def measure(
    config: Config, endpoints: list[tuple[str, str]], counts: tuple[int, int], name: str, alike: bool
) -> dict[str, float]:
    """Play `counts` (prompts, turns) at once; `name` makes their texts differ from those the servers have seen."""
    router = Router(endpoints, server_specs.training(config).client, unpublished=True)
    rewards = RewardClient([], reward_spec(config.reward))  # nothing is scored
    users = RandomUsers(config, alike)
    player = FuturesPlayer(router, ChatRenderer(config.model.path), users, rewards, play_spec(config))
    prompts, turns = map(range, counts)
    places = [RolloutPlace(f"{name}-{prompt}", turn) for prompt in prompts for turn in turns]
    try:
        played = await asyncio.gather(*(play(player, task(name, place.stream), place) for place in places))
    finally:
        await router.close()
    conversations = [conversation for futures in played for conversation in futures]
    computed = router.take_counters()["prefill_tokens"]
    needed = tree_tokens(conversations)
    generated = {(turn.prompt_ids, turn.token_ids) for conversation in conversations for turn in conversation.turns}
    return {
        "prefill_over_tree": computed / needed,
        "without_cache": sum(len(prompt) for prompt, _ in generated) / needed,
        "tree_tokens": needed,
    }


async def play(player: FuturesPlayer, task: Task, place: RolloutPlace) -> list[Conversation]:
    """A trained turn and its futures."""
    start = await player.trained_turn(task, place)
    places = [RolloutPlace(place.stream, place.rollout, future) for future in range(FUTURES)]
    futures = [player.play_on(start, task, place, player.rollout.future) for place in places]
    played = await asyncio.gather(*futures)
    assert all(len(conversation.turns) == 1 + USER_TURNS for conversation in played), played
    return played


def task(name: str, stream: str) -> Task:
    drawn = random.Random(stream)
    system = Message("system", words(random.Random(name), 64))
    return Task(stream, (system, Message("user", words(drawn, drawn.randint(32, 64)))), "", "", "")


def words(drawn: random.Random, count: int) -> str:
    return " ".join(drawn.choices(WORDS, k=count))


def tree_tokens(conversations: Iterable[Conversation]) -> int:
    """The nodes of the tree of all token streams that no decoding step computed."""
    nodes: set[tuple[int, ...]] = set()
    decoded: set[tuple[int, ...]] = set()
    for conversation in conversations:
        stream = conversation.token_ids
        # What follows the last turn was never sent, nor its last token.
        last = conversation.turns[-1]
        end = len(last.prompt_ids) + len(last.token_ids) - 1
        nodes |= {stream[:length] for length in range(1, end + 1)}
        for turn in conversation.turns:
            tokens = turn.prompt_ids + turn.token_ids
            decoded |= {tokens[:length] for length in range(len(turn.prompt_ids) + 1, len(tokens))}
    return len(nodes - decoded)


if __name__ == "__main__":
    main()
