"""The model's chat template as token ids, such that sampled tokens are never rendered again."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_collab.config import Config, nearest, read_prompt, require
from megatron_collab.runtime import hub
from megatron_collab.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OURS = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # what templates get from us
# Stands in for a sampled reply when the template is asked what follows it.
_MARKER = "SAMPLED7REPLY"


class ChatRenderer:
    """Prompts, and what joins the turns of a conversation, from the chat template of `model_path`.

    `end_id` is the template's end-of-turn token, the one that follows the assistant's content. `opens_thought`:
    the template opens the policy's turn with `<think>`. `tools` are schemas that the prompt tells the policy of,
    `arguments` are the template's own, and `system` stands in front of conversations without a system message.

    Raises ValueError, naming `setting`, where there is no tokenizer.json, and for a template that changes or drops
    assistant messages, or ends them with something else than one special token: nothing can be appended to these.
    """

    def __init__(
        self,
        model_path: str,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = {},
        system: str = "",
        setting: str = "model.path",
    ) -> None:
        self.model_path, self._setting = model_path, setting
        self.tools = list(tools)
        self.arguments = dict(arguments)
        self.system = system
        self._frames: dict[tuple[str, ...], int] = {}  # bytes of the template around messages of these roles
        self.tokenizer = load_tokenizer(model_path, setting)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{setting}={model_path}: its tokenizer has no chat template; give a chat model")
        self._check_arguments(str(self.tokenizer.chat_template))
        try:
            end = self._tail([Message("user", "x")])[:1]
            opening = self._render([Message("user", "x")])
            self._refuse_silence()
        except TemplateError as error:
            raise self._unfit(f"fails ({error})") from error
        if not end or end[0] not in self.tokenizer.added_tokens_decoder:
            raise self._unfit("does not end an assistant message with a special token")
        self.end_id: int = end[0]
        self.opens_thought = opening.rstrip().endswith("<think>")
        if system:
            self._check_system()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """One that tells the policy of these tools."""
        made = copy.copy(self)
        made.tools = list(tools)
        made._refuse_silence()
        return made

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt: all messages, `system` before them unless they have their own, and what opens the next turn."""
        return self._tokenize(self._render(self._with_system(messages)))

    def at_most(self, messages: Sequence[Message]) -> int:
        """A bound on the tokens of `messages`, without making them: bytes, the template's included."""
        messages = self._with_system(messages)
        roles = tuple(message.role for message in messages)
        if roles not in self._frames:
            self._frames[roles] = len(self._render([Message(role, "x") for role in roles]).encode())
        return self._frames[roles] + sum(len(message.content.encode()) for message in messages)

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
        options = {**self.arguments, "tools": self.tools or None, "add_generation_prompt": True, **other}
        return _applied(self.tokenizer, rows, **options)

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        own = any(message.role == "system" for message in messages)
        return messages if own or not self.system else [Message("system", self.system), *messages]

    def _check_system(self) -> None:
        try:
            shown = self.system.strip() in self._render(self._with_system([Message("user", "x")]))
        except TemplateError as error:
            raise self._unfit(f"takes no system message ({error}), and rollout.system_prompt is one") from error
        if not shown:
            raise self._unfit("does not show the policy rollout.system_prompt")

    def _check_arguments(self, template: str) -> None:
        """An argument that the template does not use would change nothing."""
        used = sorted(set(re.findall(r"\b[a-z]\w+", template)))
        for name in self.arguments:
            said = f"model.chat_template_args.{name}"
            require(name not in _OURS, f"{said}: is set by each run itself; remove it")
            message = f"{said}: the chat template of {self.model_path} does not use it{nearest(name, used)}"
            require(name in used, f"{message}; remove it")

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refuse_silence(self) -> None:
        asked = [Message("user", "x")]
        if self.tools and self._render(asked) == self._render(asked, tools=None):
            raise self._unfit("does not tell the policy of rollout.tools")

    def _unfit(self, fault: str) -> ValueError:
        return ValueError(f"{self._setting}={self.model_path}: its chat template {fault}; give one that appends turns")


def tokenizer_files(folder: Path) -> tuple[tuple[str, int], ...]:
    """The files of the tokenizer and its template in a model's folder, and when each was last changed (ns)."""
    parts = sorted({*folder.glob("*token*"), *folder.glob("chat_template*")})
    return tuple((str(part), part.stat().st_mtime_ns) for part in parts)


def load_tokenizer(model_path: str, setting: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model; ValueError naming `setting` where it has none, or one that is not whole."""
    folder = hub.folder(model_path)
    way_out = "save the tokenizer again with transformers, AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{setting}={model_path}: no tokenizer.json there; {way_out}")
    try:
        return _tokenizer(folder, tokenizer_files(folder))
    except Exception as error:  # of whatever type: what is in the files goes through three libraries unchecked
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{setting}={model_path}: its tokenizer cannot be read ({why}); {way_out}") from error


@lru_cache(maxsize=1)  # a large one takes a second, and every reader of the data has a renderer
def _tokenizer(folder: Path, files: tuple[tuple[str, int], ...]) -> PreTrainedTokenizerFast:
    # It takes seconds to import, which ranks that render nothing need not wait for; with AutoTokenizer even more.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def render_once(model_path: str, setting: str) -> None:
    """ValueError naming `setting` where a model's tokenizer cannot be read, or its template renders nothing."""
    tokenizer = load_tokenizer(model_path, setting)
    if tokenizer.chat_template:
        try:
            _applied(tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
        except TemplateError as error:
            raise ValueError(f"{setting}={model_path}: its chat template fails ({error}); mend it") from error


def _applied(tokenizer: PreTrainedTokenizerFast, rows: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """TemplateError, whatever the template has done."""
    try:
        return tokenizer.apply_chat_template(rows, tokenize=False, **options)
    except TemplateError:
        raise
    except Exception as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


def policys(config: Config, tools: Sequence[Mapping[str, Any]] = ()) -> ChatRenderer:
    """The renderer of the run's policy, the same in rollouts and in supervised training."""
    return ChatRenderer(config.model.path, tools, config.model.chat_template_args, system_prompt(config))


def system_prompt(config: Config) -> str:
    """The text of rollout.system_prompt, empty where there is none. Raises ConfigError or PromptError."""
    file = config.rollout.system_prompt
    return read_prompt("rollout.system_prompt", file, "", ()).render().strip() if file else ""
