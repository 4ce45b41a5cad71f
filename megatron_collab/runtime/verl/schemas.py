"""verl's models of tools, as its documentation describes them; unlike there, further keys of a JSON schema stay."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    type: str
    description: str | None = None
    enum: list[str] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = []


class OpenAIFunctionSchema(_Schema):
    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The response of a tool to the policy."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
