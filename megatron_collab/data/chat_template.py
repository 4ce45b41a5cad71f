"""The model's chat template as token ids, such that sampled tokens are never rendered again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

# AutoTokenizer would import the models too, for several seconds in every process.
from transformers import PreTrainedTokenizerFast

from megatron_collab.types import Message

# Stands in for a sampled reply when the template is asked what follows it.
_MARKER = "SAMPLED7REPLY"


class ChatRenderer:
    """Prompts, and what joins the turns of a conversation, from the chat template in `model_path`.

    `end_id` is the template's end-of-turn token, the one that follows the assistant's content. `opens_thought`:
    the template opens the policy's turn with `<think>`. `tools` are schemas that the prompt tells the policy of.

    Raises ValueError, naming model.path, where there is no tokenizer.json, and for a template that changes or drops
    assistant messages, or ends them with something else than one special token: nothing can be appended to these.
    """

    def __init__(self, model_path: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.model_path = model_path
        self.tools = list(tools)
        if not (Path(model_path) / "tokenizer.json").is_file():
            way_out = "save the tokenizer again with transformers, AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            raise ValueError(f"model.path={model_path}: no tokenizer.json there; {way_out}")
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path, local_files_only=True)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model.path={model_path}: its tokenizer has no chat template; give a chat model")
        end = self._tail([Message("user", "x")])[:1]
        if not end or end[0] not in self.tokenizer.added_tokens_decoder:
            raise self._unfit("does not end an assistant message with a special token")
        self.end_id: int = end[0]
        self.opens_thought = self._render([Message("user", "x")]).rstrip().endswith("<think>")
        self._refuse_silence()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """One that tells the policy of these tools."""
        made = copy.copy(self)
        made.tools = list(tools)
        made._refuse_silence()
        return made

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt: all messages, and what opens the assistant's turn."""
        return self._tokenize(self._render(messages))

    def reply(self, text: str) -> tuple[int, ...]:
        """A written assistant message with its end-of-turn token, for supervised training."""
        return (*self._tokenize(text), self.end_id)

    def call(self, message: Message) -> tuple[int, ...]:
        """A written assistant message with calls of tools, as `reply`; the template writes the calls.

        Raises ValueError where it cannot.
        """
        asked, told = Message("user", "x"), Message("tool", "x")
        end = self.tokenizer.decode([self.end_id])
        header = self._render([asked, Message("assistant", _MARKER), told]).partition(_MARKER)[0]
        content = _MARKER if message.content else ""
        try:
            written = self._render([asked, replace(message, content=content), told])
        except TemplateError as error:
            raise self._unfit(f"refuses tool_calls ({error})") from error
        calls, ended, _ = written.removeprefix(header).partition(end)
        if not all(call.name in calls for call in message.tool_calls):
            raise self._unfit("drops tool_calls")
        if not (written.startswith(header) and ended and calls.startswith(content)):
            raise self._unfit("drops the content of a message with tool_calls, or changes how it begins")
        return self.reply(message.content + calls.removeprefix(content))

    def next(self, messages: Sequence[Message], turn: Sequence[int]) -> tuple[int, ...]:
        """What follows the tokens `turn`: its end-of-turn token where it lacks one, `messages`, the next opening."""
        between = self._tail(messages)[1:]
        return between if tuple(turn[-1:]) == (self.end_id,) else (self.end_id, *between)

    def _tail(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """All tokens after the content of an assistant message that `messages` follow."""
        rendered = self._render([Message("user", "x"), Message("assistant", _MARKER), *messages])
        _, marker, tail = rendered.partition(_MARKER)
        if not marker:
            raise self._unfit("drops or changes assistant messages")
        return self._tokenize(tail)

    def _render(self, messages: Sequence[Message], **other: Any) -> str:
        rows = [message.as_dict() for message in messages]
        options = {"tools": self.tools or None, "add_generation_prompt": True, **other}
        return self.tokenizer.apply_chat_template(rows, tokenize=False, **options)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refuse_silence(self) -> None:
        asked = [Message("user", "x")]
        if self.tools and self._render(asked) == self._render(asked, tools=None):
            raise self._unfit("does not tell the policy of rollout.tools")

    def _unfit(self, fault: str) -> ValueError:
        return ValueError(f"model.path={self.model_path}: its chat template {fault}; give one that appends turns")
