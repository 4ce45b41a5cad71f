"""The model's chat template as token ids, such that sampled tokens are never rendered again."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_collab.config import Config, RolloutConfig, nearest, read_prompt, require
from megatron_collab.runtime import hub
from megatron_collab.types import THOUGHT_BEGIN, THOUGHT_END, Message, Turn, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OURS = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # what templates get from us
# Stands in for a sampled reply when the template is asked what follows it.
_MARKER = "SAMPLED7REPLY"


class ChatRenderer:
    """Prompts, and what joins the turns of a conversation, from the chat template of `model_path`.

    `end_id` is the template's end-of-turn token, the one that follows the assistant's content. `tools` are schemas
    that the prompt tells the policy of, `arguments` are the template's own, and `system` stands in front of
    conversations without a system message. `thinking` of a method: the template's enable_thinking, None as in
    `arguments`. `thought_end` is the token `</think>`, None where that is no single token.

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
        self._check_arguments()
        try:
            end = self._tail([Message("user", "x")])[:1]
            self._refuse_silence()
        except TemplateError as error:
            raise self._unfit(f"fails ({error})") from error
        if not end or end[0] not in self.tokenizer.added_tokens_decoder:
            raise self._unfit("does not end an assistant message with a special token")
        self.end_id: int = end[0]
        marks = self.tokens(THOUGHT_END)
        single = len(marks) == 1 and marks[0] != self.tokenizer.unk_token_id
        self.thought_end: int | None = marks[0] if single else None
        if system:
            self._check_system()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """One that tells the policy of these tools."""
        made = copy.copy(self)
        made.tools = list(tools)
        made._refuse_silence()
        return made

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        """The prompt: all messages, `system` before them unless they have their own, and what opens the next turn."""
        return self.tokens(self._render(self._with_system(messages), thinking))

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with the `<think>` of the next turn."""
        return self.tokenizer.decode(prompt[-16:]).rstrip().endswith(THOUGHT_BEGIN)

    def at_most(self, messages: Sequence[Message]) -> int:
        """A bound on the tokens of `messages`, without making them: bytes, the template's included."""
        messages = self._with_system(messages)
        roles = tuple(message.role for message in messages)
        if roles not in self._frames:
            self._frames[roles] = len(self._render([Message(role, "x") for role in roles]).encode())
        return self._frames[roles] + sum(len(message.content.encode()) for message in messages)

    def reply(self, text: str) -> tuple[int, ...]:
        """A written assistant message with its end-of-turn token, for supervised training."""
        return (*self.tokens(text), self.end_id)

    def tokens(self, text: str) -> tuple[int, ...]:
        """`text` as it stands: nothing is put around it."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

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

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        """What follows the tokens `turn`: its end-of-turn token where it lacks one, `messages`, the next opening."""
        between = self._tail(messages, thinking)[1:]
        return between if tuple(turn[-1:]) == (self.end_id,) else (self.end_id, *between)

    def again(
        self, messages: Sequence[Message], turns: Sequence[Turn], thinking: bool | None = None
    ) -> tuple[int, ...]:
        """The prompt after `messages` as `first`, in which the last assistant messages are `turns` without thoughts.

        The template writes all but what these turns say, for which their own tokens are put in.
        """
        marker = _MARKER
        while any(marker in message.content for message in messages):
            marker += "7"
        mine = [at for at, message in enumerate(messages) if message.role == "assistant"][-len(turns) :]
        marked = [Message("assistant", marker) if at in mine else message for at, message in enumerate(messages)]
        pieces = self._render(self._with_system(marked), thinking).split(marker)
        if len(pieces) != len(turns) + 1:
            raise self._unfit("drops or changes assistant messages")
        said = [
            token
            for turn, piece in zip(turns, pieces[1:], strict=True)
            for token in (*self._said(turn), *self.tokens(piece))
        ]
        return (*self.tokens(pieces[0]), *said)

    def check_thinking(self, rollout: RolloutConfig) -> None:
        """ConfigError where the template or the tokenizer cannot do what `rollout` says of thoughts."""
        for name, sampling in (("turn", rollout.turn), ("future", rollout.future)):
            if sampling.enable_thinking is not None:
                self._check_used("enable_thinking", f"rollout.{name}.enable_thinking")
            message = (
                f"the tokenizer of {self.model_path} has no token {THOUGHT_END}, by which a thought is known to end"
            )
            budget = sampling.thinking_budget
            said = f"rollout.{name}.thinking_budget={budget}: {message}; remove it"
            require(budget is None or self.thought_end is not None, said)
        if rollout.strip_thoughts:
            asked = [Message("user", "x")]
            alone = self._render(asked, add_generation_prompt=False).count(THOUGHT_BEGIN)
            before = self._render([*asked, Message("assistant", _MARKER), *asked]).partition(_MARKER)[0]
            out = "set it to false"
            if "preserve_thinking" in str(self.tokenizer.chat_template):
                out += ", or model.chat_template_args.preserve_thinking=false"
            message = f"the chat template of {self.model_path} keeps the thoughts of earlier turns"
            require(before.count(THOUGHT_BEGIN) == alone, f"rollout.strip_thoughts=true: {message}; {out}")

    def _said(self, turn: Turn) -> tuple[int, ...]:
        """The tokens of a turn without its thought and its end.

        Those that were sampled, where the thought ends between two of them; else those of the text, which nothing
        trains here.
        """
        tokens = turn.token_ids[:-1] if turn.token_ids[-1:] == (self.end_id,) else turn.token_ids
        text = visible(turn.text)
        if text == turn.text:
            return tokens
        if self.thought_end not in tokens:
            return self.tokens(text)
        start = len(tokens) - tokens[::-1].index(self.thought_end)
        said = list(dropwhile(lambda token: self.tokenizer.decode(token).isspace(), tokens[start:]))
        return tuple(said) if not self.tokenizer.decode(said[:1])[:1].isspace() else self.tokens(text)

    def _tail(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        """All tokens after the content of an assistant message that `messages` follow."""
        rendered = self._render([Message("user", "x"), Message("assistant", _MARKER), *messages], thinking)
        _, marker, tail = rendered.partition(_MARKER)
        if not marker:
            raise self._unfit("drops or changes assistant messages")
        return self.tokens(tail)

    def _render(self, messages: Sequence[Message], thinking: bool | None = None, **other: Any) -> str:
        rows = [message.as_dict() for message in messages]
        given = {**self.arguments, **({} if thinking is None else {"enable_thinking": thinking})}
        options = {**given, "tools": self.tools or None, "add_generation_prompt": True, **other}
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

    def _check_arguments(self) -> None:
        for name in self.arguments:
            said = f"model.chat_template_args.{name}"
            require(name not in _OURS, f"{said}: is set by each run itself; remove it")
            self._check_used(name, said)

    def _check_used(self, name: str, setting: str) -> None:
        """An argument that the template does not use would change nothing."""
        used = sorted(set(re.findall(r"\b[a-z]\w+", str(self.tokenizer.chat_template))))
        message = f"{setting}: the chat template of {self.model_path} does not use it{nearest(name, used)}"
        require(name in used, f"{message}; remove it")

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
    """The renderer of the run's policy, the same in rollouts and in supervised training. Raises ConfigError."""
    renderer = ChatRenderer(config.model.path, tools, config.model.chat_template_args, system_prompt(config))
    if config.train.stage == "rl":
        renderer.check_thinking(config.rollout)
    return renderer


def system_prompt(config: Config) -> str:
    """The text of rollout.system_prompt, empty where there is none. Raises ConfigError or PromptError."""
    file = config.rollout.system_prompt
    return read_prompt("rollout.system_prompt", file, "", ()).render().strip() if file else ""
