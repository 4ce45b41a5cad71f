"""The base classes of verl's interactions and tools, as its documentation describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4


class BaseInteraction:
    """A user of verl: what it says to the policy, and the score of each turn."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; returns its id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Whether the conversation ends, the user's message, the score of the policy's turn, further data."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End a conversation."""


class BaseTool:
    """A tool of verl; `tool_schema`: the function in OpenAI's format, of the class OpenAIFunctionToolSchema."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError("the tool has no tool_schema")
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin to serve a conversation; returns its id."""
        return instance_id or str(uuid4())

    async def execute(self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any) -> Any:
        """The response, the reward of the call, further data."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End serving a conversation."""


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """verl's decorator that traces calls; traces nothing."""
    return function
