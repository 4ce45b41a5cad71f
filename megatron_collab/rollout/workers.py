"""ConversationWorkers: Ray processes that play groups of conversations and have them scored."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from megatron_collab import patches
from megatron_collab.config import Config, SamplingConfig
from megatron_collab.config.schema import AssistantConfig
from megatron_collab.data import assistants
from megatron_collab.data.evaluation import EvaluationSet, settings_of
from megatron_collab.reward.workers import RewardClient, RewardWorker
from megatron_collab.rollout.tools.toolbox import make_tools, schemas
from megatron_collab.runtime import gpu_environment, keys, network, stacks
from megatron_collab.runtime.process import imports_done
from megatron_collab.runtime.ray_cluster import start_actor
from megatron_collab.runtime.redact import redact_output
from megatron_collab.types import Group, Task

if TYPE_CHECKING:
    from megatron_collab.inference.assistant import Assistant, Renderer
    from megatron_collab.llm.served import ServedModel
    from megatron_collab.rollout.conversation import Player
    from megatron_collab.rollout.users import Users

_GARBAGE = 50_000  # objects made and not yet gone, after which Python looks for cycles


class ConversationWorker:
    """Players with connections of their own to the SGLang servers; runs as a Ray actor."""

    def __init__(
        self,
        config: Config,
        servers: list[tuple[str, str]],
        reward_workers: list[str],
        name: str,
        served: Mapping[str, ServedModel],
    ) -> None:
        """`servers`: address and key of each SGLang server of the policy; `reward_workers`: Ray actors that score.

        `served`: by name, the models beside the policy that the run serves.
        """
        keys.take()
        gpu_environment.enter()
        beside = [address for model in served.values() for address in model.addresses]
        os.environ |= network.without_proxy(url for url, _ in [*servers, *beside])
        redact_output()
        stacks.register(Path(config.run.dir) / stacks.FOLDER, name)
        gc.disable()  # imports make no garbage, and looking for it takes a quarter of their time
        patches.apply("litellm")
        # Imported here: the process that starts the workers needs neither LiteLLM nor the tokenizer.
        from megatron_collab.data import chat_template
        from megatron_collab.inference import adapters
        from megatron_collab.inference.assistant import LlmAssistant
        from megatron_collab.inference.router import Router
        from megatron_collab.llm import limiter
        from megatron_collab.llm.client import LlmClient
        from megatron_collab.llm.tape import open_tape

        own = {f"{url}/v1": key for url, key in servers}
        self.config, self.endpoints = config, list(own)
        self.tape = open_tape(config)
        self.client = LlmClient(
            ray.get_actor(limiter.NAME), keys=own, served=served, prices=config.llm.prices, tape=self.tape
        )
        self.policy: Assistant
        self.renderer: Renderer
        if config.assistant.model:
            system = chat_template.system_prompt(config)
            self.policy = self.renderer = LlmAssistant(config.assistant, self.client, system)
        else:
            self.policy = Router(servers, config.rollout, adapter=adapters.served(config))
            self.renderer = chat_template.policys(config, schemas(make_tools(config.rollout)))
        self.rewards = RewardClient([ray.get_actor(name) for name in reward_workers], config.reward)
        self.engine = tuple(self.endpoints)
        self.players: dict[EvaluationSet | None, Player] = {}
        self._player(None)  # with what it imports
        # Neither what the imports made nor conversations are garbage: traversing them often costs a third of the time.
        imports_done()
        gc.set_threshold(_GARBAGE)

    async def play(self, task: Task, stream: str, one: EvaluationSet | None = None) -> Group:
        """The group of `task`, for training or under the settings of the set `one`."""
        return await self._player(one).play(task, stream)

    async def use_servers(self, servers: Sequence[int]) -> None:
        """From now on use these servers, by their numbers, and no others."""
        self.policy.use(servers)
        if servers:  # without any, conversations fail before their users are asked
            self.engine = tuple(self.endpoints[index] for index in servers)
            for player in self.players.values():
                player.users.engine = self.engine

    async def take_counters(self) -> dict[str, float]:
        """Counts of users, tools, connections to the servers and replayed calls since the last call."""
        taken: Counter[str] = Counter(self.policy.take_counters())
        taken.update(self.tape.take_counters() if self.tape else {})
        players = [each for player in self.players.values() for each in (player, *player.cast.values())]
        for player in players:  # whose counters are empty the second time
            for counters in (player.users.counters, player.tools.counters, player.counters):
                taken.update(counters)
                counters.clear()
        return dict(taken)

    def _player(self, one: EvaluationSet | None) -> Player:
        """That of training, or of an evaluation's set; they share servers, connections and reward workers."""
        from megatron_collab.rollout.conversation import Player
        from megatron_collab.rollout.users import Users

        if one not in self.players:
            config = self.config if one is None else settings_of(self.config, one)
            users = Users(config, self.client, self.engine)
            self.players[one] = player = Player(self.policy, self.renderer, users, self.rewards, config)
            player.cast = {
                name: self._with(endpoint, config, users) if endpoint else player
                for name, endpoint in assistants.named(config).items()
            }
        return self.players[one]

    def _with(self, endpoint: AssistantConfig, config: Config, users: Users) -> Player:
        """A player with a model of build.assistants in place of the policy, under its own budget and temperature."""
        from megatron_collab.data.chat_template import system_prompt
        from megatron_collab.inference.assistant import LlmAssistant
        from megatron_collab.llm.endpoint import token_budget
        from megatron_collab.rollout.conversation import Player

        sampling = SamplingConfig(token_budget(endpoint))
        sampling.temperature = sampling.temperature if endpoint.temperature is None else endpoint.temperature
        room = 2 * sampling.max_new_tokens * config.rollout.max_assistant_turns  # as launch/evaluation.py says
        rollout = replace(config.rollout, turn=sampling, future=sampling, context_length=room)
        assistant = LlmAssistant(endpoint, self.client, system_prompt(config))
        return Player(assistant, assistant, users, self.rewards, replace(config, rollout=rollout))


@dataclass(frozen=True)
class Workers:
    """The handles of a run's Ray actors, which end with their handles or with the Ray session."""

    conversations: list[Any]
    rewards: list[Any]
    limiter: Any

    def stop(self) -> None:
        """End the workers, and with them what they ask of users and judges."""
        for worker in (*self.conversations, *self.rewards):
            ray.kill(worker)


def start_workers(config: Config, servers: list[tuple[str, str]], served: Mapping[str, ServedModel]) -> Workers:
    """The run's workers, spread over the nodes, and its limiter; does not wait for them.

    `servers`: address and key of each of the policy; `served`: by name, the models beside it that the run serves.
    """
    from megatron_collab.llm import limiter

    bound = limiter.start_limiter(config.llm, Path(config.run.dir) / "spend.json")
    names = [f"reward-{i}" for i in range(config.reward.workers)]
    rewards = [start_actor(RewardWorker, config, name, served, name=name) for name in names]
    players = [
        start_actor(ConversationWorker, config, servers, names, f"conversation-{i}", served)
        for i in range(config.rollout.workers)
    ]
    return Workers(players, rewards, bound)
