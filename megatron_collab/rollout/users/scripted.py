"""The scripted user of a shipped world: `scripted/WORLD` is megatron_collab.environments.WORLD.reply(goal, messages).

It is asked as a language model is, through LiteLLM, and sees no more than one would. It says what its script says:
no gate refuses that.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

from megatron_collab.config import WORLDS, Config, EndpointConfig
from megatron_collab.rollout.users.guardrails import Refusal
from megatron_collab.rollout.users.llm import LlmUser
from megatron_collab.types import Conversation


class ScriptedUser(LlmUser):
    @classmethod
    def unavailable(cls, argument: str, config: Config) -> str | None:
        worlds = {name: importlib.import_module(f"megatron_collab.environments.{name}") for name in WORLDS}
        known = [name for name, world in worlds.items() if hasattr(world, "reply")]
        return None if argument in known else f"no such world; there is scripted/{', scripted/'.join(known)}"

    def _refusal(self, text: str, conversation: Conversation) -> Refusal | None:
        return None

    def _endpoints(self) -> list[EndpointConfig]:
        import megatron_collab.inference.litellm_provider  # noqa: F401  makes the name `scripted/…` known to LiteLLM

        return [replace(self.users.config.user, model=f"scripted/{self.argument}")]
