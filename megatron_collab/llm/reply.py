"""Reads a model's reply from an answer of LiteLLM: its text, or why the provider gave none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_collab.llm.endpoint import COMPLETION, token_budget
from megatron_collab.runtime.redact import redact
from megatron_collab.runtime.text import one_line
from megatron_collab.settings import EndpointConfig

_ELSE = "change the prompt, or choose another model"
_LONGEST_VERSION = 200  # characters


class Reply(NamedTuple):
    """A model's reply, its tokens (0: not reported), its finish reason, and why the provider gave not all text.

    `version`: the model that answered, as its provider names it; empty if it does not. `calls`: name and arguments, as
    JSON, of each tool that it calls. `thoughts`: what it thought, if its provider tells that from the text.
    """

    text: str
    tokens: int
    finish: str | None
    shortfall: str = ""
    version: str = ""
    calls: Sequence[tuple[str, str]] = ()
    thoughts: str = ""


def read_reply(endpoint: EndpointConfig, answer: Any) -> Reply:
    """The first choice of LiteLLM's `answer`; a refusal is a text too."""
    tokens = getattr(getattr(answer, "usage", None), "completion_tokens", None) or 0
    version = _version(answer)
    if not answer.choices:
        return Reply("", tokens, None, "the response has no choices", version)
    choice = answer.choices[0]
    text, shortfall = choice.message.content or "", ""
    if refusal := (getattr(choice.message, "provider_specific_fields", None) or {}).get("refusal"):
        text, shortfall = text or str(refusal), f"the model refused ({one_line(redact(str(refusal)))}); {_ELSE}"
    functions = [call.function for call in choice.message.tool_calls or ()]
    calls = [(str(function.name), function.arguments or "{}") for function in functions]
    thoughts = getattr(choice.message, "reasoning_content", None) or ""
    shortfall = shortfall or _shortfall(endpoint, choice)
    return Reply(text, tokens, choice.finish_reason, shortfall, version, calls, thoughts)


def _version(answer: Any) -> str:
    names = (getattr(answer, "model", None), getattr(answer, "system_fingerprint", None))
    return one_line(redact(" ".join(str(name) for name in names if name)), _LONGEST_VERSION)


def _shortfall(endpoint: EndpointConfig, choice: Any) -> str:
    message, finish, group = choice.message, choice.finish_reason, endpoint.group
    thoughts = getattr(message, "reasoning_content", None)
    if finish == "content_filter":
        return f"finish_reason=content_filter: the provider withheld the text; {_ELSE}"
    if finish == "length":
        name = "max_tokens" if endpoint.max_tokens is not None else f"extra.{COMPLETION}"
        spent = "were spent on reasoning" if thoughts and not message.content else "are not enough"
        return f"finish_reason=length: the {token_budget(endpoint)} tokens of {group}.{name} {spent}; raise it"
    if message.content:
        return ""
    if message.tool_calls:
        name = str(message.tool_calls[0].function.name)
        out = "choose another model, or turn off the tool parser of its server"
        return f"finish_reason={finish}: the model called {one_line(redact(name), 60)}; {out}"
    if thoughts:
        out = f"turn reasoning off (e.g. {group}.extra.chat_template_kwargs), or the reasoning parser of its server"
        return f"all text is in reasoning_content; {out}"
    return "" if finish == "stop" else f"the text is empty (finish_reason={finish})"
