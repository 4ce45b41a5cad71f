"""ConversationWorkers: Ray processes that play groups of conversations and send them to reward workers."""

from __future__ import annotations

import gc
import os
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from megatron_collab import patches
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.reward.workers import RewardClient, RewardWorker
from megatron_collab.rollout.player import Player, PlaySpec, check_group
from megatron_collab.rollout.users import DEFAULT
from megatron_collab.runtime import console, gpu_environment, keys, network, stacks
from megatron_collab.runtime.process import Hung, imports_done
from megatron_collab.runtime.ray_cluster import start_actor
from megatron_collab.settings import SamplingConfig
from megatron_collab.settings.schema import PLAYERS, AssistantConfig
from megatron_collab.types import Group, PausedTurn, Task

if TYPE_CHECKING:
    from megatron_collab.inference.assistant import Assistant, Renderer
    from megatron_collab.inference.router import Router
    from megatron_collab.inference.spec import ClientSpec
    from megatron_collab.llm.busy import Spans
    from megatron_collab.llm.served import ServedModel
    from megatron_collab.rollout.llm_assistant import LlmAssistant
    from megatron_collab.rollout.users import Users

_GARBAGE = 50_000  # net allocations before Python's cyclic garbage collector runs


class ConversationWorker:
    """A Ray actor that plays groups, with its own connections to the SGLang servers."""

    def __init__(
        self,
        play: PlaySpec,
        client: ClientSpec,
        servers: list[tuple[str, str]],
        reward_workers: list[str],
        name: str,
        served: Mapping[str, ServedModel],
    ) -> None:
        """`play`: how groups are played; `client`: how turns are requested from `servers`, address and key of each
        SGLang server of the policy.

        `reward_workers`: Ray actors that score; `served`: the other models that the run serves, by name.
        """
        keys.take()
        gpu_environment.enter()
        model_urls = [address for model in served.values() for address in model.addresses]
        os.environ |= network.without_proxy(url for url, _ in [*servers, *model_urls])
        console.begin(name)
        stacks.register(play.run_dir / stacks.FOLDER, name)
        gc.disable()  # imports create no cycles, and collecting takes a quarter of the import time
        patches.apply("litellm")
        # Imported here: the process that starts the workers needs neither LiteLLM nor the tokenizer.
        from megatron_collab.inference.router import Router
        from megatron_collab.llm import limiter
        from megatron_collab.llm.client import LlmClient
        from megatron_collab.llm.tape import open_tape

        api_keys = {f"{url}/v1": key for url, key in servers}
        self.play_spec, self.adapter, self.endpoints = play, client.adapter, list(api_keys)
        self.tape = open_tape(play.llm, play.run_dir)
        self.client = LlmClient(
            ray.get_actor(limiter.NAME), keys=api_keys, served=served, prices=play.llm.prices, tape=self.tape
        )
        self.policy: Assistant
        self.router: Router | None = None
        self.renderer: Renderer
        self._rendered = Counter[str]()
        if play.assistant:
            self.policy = self.renderer = self._assistant(play.assistant)
        else:
            renderer = play.prompt.renderer(play.tools.schemas())
            self.policy = self.router = Router(servers, client, decode=renderer.text)
            self.renderer, self._rendered = renderer, renderer.counters
        self.rewards = RewardClient([ray.get_actor(name) for name in reward_workers], play.reward)
        self.engine = tuple(self.endpoints)
        self.players: dict[EvaluationSet | None, Player] = {}
        self._player(None)  # imports what players need
        # Objects of imports and conversations are no garbage; traversing them often would cost a third of the time.
        imports_done()
        gc.set_threshold(_GARBAGE)

    async def play(
        self,
        task: Task,
        stream: str,
        eval_set: EvaluationSet | None = None,
        server: int = 0,
        turns: Sequence[PausedTurn] = (),
    ) -> Group:
        """Play a group of `task`, for training or under the settings of `eval_set`, on the server of this number.

        `turns`: those that an earlier start sampled before a pause.
        """
        player = self._player(eval_set)
        with self.router.group(stream, server, turns) if self.router else nullcontext():
            group = await player.play(task, stream)
        if self.play_spec.player not in PLAYERS:
            check_group(group, self.play_spec.player)
        return replace(group, user=player.spec.users.name_of(task) or DEFAULT)

    async def pause(self) -> None:
        """From now on turns of the policy wait for `resume`; users, tools and scores go on."""
        assert self.router
        self.router.pause()

    async def paused(self) -> dict[str, list[PausedTurn]]:
        """Once servers have aborted their requests: the turns so far of each group in flight, by stream."""
        assert self.router
        return await self.router.paused()

    async def resume(self) -> None:
        """Let turns of the policy go on."""
        assert self.router
        self.router.resume()

    async def use_servers(self, servers: Sequence[int]) -> None:
        """From now on use only these servers, by index."""
        self.policy.use(servers)
        if servers:  # if empty, conversations fail before their users are called
            self.engine = tuple(self.endpoints[index] for index in servers)
            for player in self.players.values():
                player.users.engine = self.engine

    async def take_counters(self) -> dict[str, float]:
        """Counters of users, tools, prompts, connections to servers and replayed calls since the last call."""
        totals: Counter[str] = Counter(self.policy.take_counters())
        totals.update(+self._rendered)
        self._rendered.clear()
        totals.update(self.tape.take_counters() if self.tape else {})
        players = [player for base in self.players.values() for player in (base, *base.candidate_players.values())]
        for player in players:  # shared counters are empty the second time
            for counters in (player.users.counters, player.tools.counters, player.counters):
                totals.update(counters)
                counters.clear()
        return dict(totals)

    async def busy_since(self, begin: float) -> list[Spans]:
        """When calls to the policy's servers were in flight since `begin`: turns, and users that it plays."""
        return [part.busy.since(begin) for part in (self.router, self.client) if part]

    def _player(self, eval_set: EvaluationSet | None) -> Player:
        """The player of training (None) or of an evaluation set; players share connections and reward workers."""
        from megatron_collab.rollout.users import Users

        if eval_set not in self.players:
            play = self.play_spec if eval_set is None else self.play_spec.for_set(eval_set)
            users = Users(play.users, self.client, self.engine, self.adapter)
            player = play.player_class(self.policy, self.renderer, users, self.rewards, play)
            self.players[eval_set] = player
            player.candidate_players = {
                name: self._candidate_player(endpoint, play, users) if endpoint else player
                for name, endpoint in play.assistants.items()
            }
        return self.players[eval_set]

    def _candidate_player(self, endpoint: AssistantConfig, play: PlaySpec, users: Users) -> Player:
        """A player that samples from a model of build.assistants, with its budget and temperature."""
        from megatron_collab.llm.endpoint import token_budget

        temperature = SamplingConfig.temperature if endpoint.temperature is None else endpoint.temperature
        sampling = SamplingConfig(token_budget(endpoint), temperature=temperature)
        room = 2 * sampling.max_new_tokens * play.rollout.max_assistant_turns  # as in launch/evaluation.py
        rollout = replace(play.rollout, turn=sampling, future=sampling, context_length=room)
        assistant = self._assistant(endpoint)
        return play.player_class(assistant, assistant, users, self.rewards, replace(play, rollout=rollout))

    def _assistant(self, endpoint: AssistantConfig) -> LlmAssistant:
        from megatron_collab.rollout.llm_assistant import LlmAssistant

        return LlmAssistant(endpoint, self.client, self.play_spec.prompt.system)


@dataclass(frozen=True)
class Workers:
    """The handles of a run's Ray actors; an actor ends when its handle is deleted or the Ray session ends.

    `servers`: those that sample for them, by index; `use_servers` changes it. `ray` waits for their calls; a simulated
    run (tools/bench/timeline.py) has another one.
    """

    conversations: list[Any]
    rewards: list[Any]
    limiter: Any
    servers: list[int] = field(default_factory=lambda: [0])
    ray: Any = ray

    def use_servers(self, servers: Sequence[int], seconds: float) -> None:
        """Have only these servers sample from now on. Raises Hung if a worker takes longer than `seconds`."""
        self.servers[:] = servers
        calls = {
            f"conversation-{number} to switch servers": player.use_servers.remote(servers)
            for number, player in enumerate(self.conversations)
        }
        self.answers(calls, seconds)

    def pause(self, stop: Callable[[], None], seconds: float) -> dict[str, list[PausedTurn]]:
        """Pause all turns of the policy; `stop` makes the servers abort them. Returns the turns so far, by stream.

        Raises Hung if a worker takes longer than `seconds`.
        """
        self._of_players("pause", seconds)
        stop()
        return dict(ChainMap(*self._of_players("paused", seconds)))

    def resume(self, seconds: float) -> None:
        """Let paused turns go on. Raises Hung if a worker takes longer than `seconds`."""
        self._of_players("resume", seconds)

    def _of_players(self, method: str, seconds: float) -> list[Any]:
        players = enumerate(self.conversations)
        calls = {f"conversation-{number}: {method}": getattr(player, method).remote() for number, player in players}
        return self.answers(calls, seconds)

    def answers(self, calls: Mapping[str, Any], seconds: float) -> list[Any]:
        """Results of calls, given by description. Raises Hung if one takes longer than `seconds`."""
        _, late_calls = self.ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds)
        if late_calls:
            names = [name for name, reference in calls.items() if reference in late_calls]
            raise Hung(f"rank 0 has waited {seconds:g} s (half of launch.timeout) for {'; '.join(names)}")
        return [self.ray.get(reference) for reference in calls.values()]

    def available_results(self, calls: Sequence[Any], seconds: float) -> list[Any]:
        """Results of calls that are available within `seconds`; failed or late calls are skipped."""
        ready = self.ray.wait(list(calls), num_returns=len(calls), timeout=seconds)[0] if calls else []
        results = []
        for reference in ready:
            with suppress(RayError):
                results.append(self.ray.get(reference))
        return results

    def busy_since(self, begin: float, seconds: float) -> list[Spans] | None:
        """See ConversationWorker.busy_since, of all of them; None if one does not answer within `seconds`."""
        calls = [player.busy_since.remote(begin) for player in self.conversations]
        answers = self.available_results(calls, seconds)
        return [spans for answer in answers for spans in answer] if len(answers) == len(self.conversations) else None

    def stop(self) -> None:
        """Kill the workers, and with them their calls to users and judges."""
        for worker in (*self.conversations, *self.rewards):
            ray.kill(worker)


def start_workers(
    play: PlaySpec,
    client: ClientSpec,
    servers: list[tuple[str, str]],
    served: Mapping[str, ServedModel],
    kind: type[ConversationWorker] = ConversationWorker,
) -> Workers:
    """Start the run's workers, spread over the nodes, and its limiter, without waiting for them.

    `play`: how groups are played; `client`: how turns are requested from `servers`, address and key of each SGLang
    server of the policy; `served`: the other models that the run serves, by name; `kind`: of those that play.
    """
    from megatron_collab.llm import limiter

    limiter_actor = limiter.start_limiter(play.llm, play.run_dir / "spend.json")
    names = [f"reward-{i}" for i in range(play.reward.workers)]
    rewards = [
        start_actor(RewardWorker, play.reward, play.llm, play.run_dir, name, served, name=name) for name in names
    ]
    players = [
        start_actor(kind, play, client, servers, names, f"conversation-{i}", served)
        for i in range(play.rollout.workers)
    ]
    return Workers(players, rewards, limiter_actor, list(range(len(servers))))
