"""Settles the settings of a run once, before anything starts, into frozen, checked values for the parts of the run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_collab.config import BuildDatasetConfig, Config, EvaluateConfig
from megatron_collab.data.assistants import assistant_configs
from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.spec import DataSpec
from megatron_collab.inference.spec import ServingSpec
from megatron_collab.launch import server_specs
from megatron_collab.launch.data_specs import data_spec, evaluation_data
from megatron_collab.launch.play_specs import evaluation_play, play_spec
from megatron_collab.launch.prompts import check_prompts
from megatron_collab.rollout import llm_endpoints
from megatron_collab.rollout.llm_endpoints import NamedEndpoint
from megatron_collab.rollout.player import PlaySpec
from megatron_collab.rollout.tools.toolbox import ToolSpec
from megatron_collab.settings import read_prompt, require

# Settings of an evaluated set that a build does not have.
_BUILT_WITH_ROLLOUT = (
    *("samples", "temperature", "user", "max_user_turns", "max_assistant_turns", "max_messages", "max_new_tokens"),
)


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


def run_spec(config: Config) -> RunSpec:
    """The settled settings of a training; again after Hub names are pinned. Raises ConfigError naming the setting that
    is refused."""
    check_prompts(config)
    data = data_spec(config)
    if config.train.stage != "rl":
        return RunSpec(data)
    play = play_spec(config)
    return RunSpec(data, play, server_specs.training(config), llm_endpoints.judge_endpoints(play.reward))


def evaluation_spec(config: EvaluateConfig) -> RunSpec:
    """As `run_spec`, for an evaluation, without a trainer."""
    check_prompts(config)
    data, play, serving = evaluation_data(config), evaluation_play(config), server_specs.evaluation(config)
    assistants = llm_endpoints.assistant_endpoints(config.assistant, data.eval_sets)
    return RunSpec(data, play, serving, llm_endpoints.judge_endpoints(play.reward), assistants)


def building_spec(config: BuildDatasetConfig) -> RunSpec:
    """As `evaluation_spec`, for a build of a data set: the candidates of a turn are the rollouts of a group."""
    spec, building = evaluation_spec(config), config.build
    _check_building(config, spec.data.eval_sets)
    assert spec.play
    prompt = read_prompt("build.prompt", building.prompt, "collaborator", ())
    play = replace(
        spec.play,
        rollouts=building.candidates,
        assistants=assistant_configs(config.build.assistants, config.assistant) or spec.play.assistants,
        proactive_share=building.proactive,
        proactive_prompt=prompt.render().strip() if building.proactive else "",
    )
    return replace(spec, play=play, assistants=building_assistants(config, spec.data.eval_sets))


def _check_building(config: BuildDatasetConfig, eval_sets: Sequence[EvaluationSet]) -> None:
    """Raises ConfigError if conversations cannot be built with these settings."""
    rollout = config.rollout
    require(rollout.max_messages is not None, "rollout.max_messages: not set; give the longest conversation, e.g. 14")
    require(rollout.futures > 0, "rollout.futures=0: the user's next message comes from a future; set 1 or more")
    message = "plays no futures, which supply the user's next message; choose another"
    require(config.reward.mode != "single_turn", f"reward.mode=single_turn: {message}")
    require(bool(config.reward.weights), "reward.weights: not set; give the metrics that rank the candidates")
    for eval_set in eval_sets:
        for name in _BUILT_WITH_ROLLOUT:
            message = "conversations are built with the settings of rollout and user; set those"
            require(getattr(eval_set, name) == getattr(EvaluationSet, name), f"{eval_set.setting}.{name}: {message}")
        require(eval_set.against is None, f"{eval_set.setting}.against: nothing is evaluated; remove it")


def building_assistants(config: BuildDatasetConfig, eval_sets: Sequence[EvaluationSet]) -> list[NamedEndpoint]:
    """The language models that write candidates."""
    by_name = assistant_configs(config.build.assistants, config.assistant)
    if not by_name:
        return llm_endpoints.assistant_endpoints(config.assistant, eval_sets)
    groups = ((f"build.assistants.{name}", endpoint) for name, endpoint in by_name.items() if endpoint)
    return [NamedEndpoint(f"{group}.model", group, endpoint) for group, endpoint in groups]
