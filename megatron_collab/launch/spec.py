"""Settles the settings of a run once, before anything starts, into frozen, checked values for the parts of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_collab.config import Config
from megatron_collab.data.spec import DataSpec, data_spec
from megatron_collab.inference.spec import ServingSpec
from megatron_collab.launch import server_specs
from megatron_collab.launch.prompts import check_prompts
from megatron_collab.rollout import llm_endpoints
from megatron_collab.rollout.llm_endpoints import NamedEndpoint
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.spec import play_spec
from megatron_collab.rollout.tools.toolbox import ToolSpec


@dataclass(frozen=True)
class RunSpec:
    """The settled settings of a run. `play` and `serving` are None if no conversation is played, in sft and dpo.

    `judges`, `assistants`: the language models that play these roles.
    """

    data: DataSpec
    play: PlaySpec | None = None
    serving: ServingSpec | None = None
    judges: Sequence[NamedEndpoint] = ()
    assistants: Sequence[NamedEndpoint] = ()

    @property
    def tools(self) -> ToolSpec:
        return self.play.tools if self.play else ToolSpec((), {}, {})

    def endpoints_of(self, names: Iterable[str]) -> list[NamedEndpoint]:
        """The language models of the users with these names. Raises ConfigError if there is no such user."""
        return llm_endpoints.user_endpoints(self.play.users, names) if self.play else []


def run_spec(config: Config, evaluates: bool = False) -> RunSpec:
    """The settled settings; again after Hub names are pinned. Raises ConfigError naming the setting that is refused.

    `evaluates`: the run is an evaluation, without a trainer.
    """
    check_prompts(config)
    data = data_spec(config)
    if config.train.stage != "rl":
        return RunSpec(data)
    play = play_spec(config)
    serving = server_specs.evaluation(config) if evaluates else server_specs.training(config)
    judges = llm_endpoints.judge_endpoints(play.reward.metrics, config.reward.judge)
    return RunSpec(data, play, serving, judges, llm_endpoints.assistant_endpoints(config, data.eval_sets))
