"""The model's chat template as token ids. Sampled tokens are never rendered again, and text makes no control tokens."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import dropwhile, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_collab import patches
from megatron_collab.data.control_tokens import any_of, count, cut, split
from megatron_collab.runtime import hub
from megatron_collab.settings import SamplingConfig, nearest, read_prompt, require
from megatron_collab.settings.bounded_jinja import BoundedTemplate, TemplateLimit, bounded
from megatron_collab.types import THOUGHT_BEGIN, THOUGHT_END, Message, Turn, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # set by every call
# Stands in for a sampled reply when the template is asked what follows it.
_MARKER = "SAMPLED7REPLY"
CONTROL_TOKENS = "control_tokens_as_text"  # counter
_CONTROL_FORM = re.compile(r"[<\[][|\uff5c].*[|\uff5c][>\]]")  # as <|fim_prefix|>, which Qwen's do not flag as special
# Marks of thoughts and calls, of any vendor. Some templates write those of calls only for some tools, or never.
_REPLY_MARK = re.compile("think|python_tag|tool_?call", re.IGNORECASE)
_DECODED_TOGETHER = 5  # tokens of a prompt that SGLang decodes with a reply, whose first space some decoders drop
_SHOWN = "move their text into messages of the user, or give a model whose template shows them"
_FIXED = "fix it, or give another model"


class ChatRenderer:
    """Renders prompts, and the tokens between the turns of a conversation, with the chat template of `model_path`.

    `end_id`: the template's end-of-turn token, which follows the assistant's content, apart from spaces. `tools`:
    schemas shown in the prompt. `arguments`: template arguments. `system`: put in front of conversations without a
    system message. `thinking` of a method: the template's enable_thinking; None: as in `arguments`. `thought_end`: the
    token `</think>`, None if that is not a single token. `plain_mark`: a mark of a turn that is no control token, so
    that any text can imitate it, as `[INST]`; None if there is none. `counters`: control tokens in texts of prompts,
    which are rendered as text.

    Raises ValueError, naming `setting`, if there is no tokenizer.json, or if the template changes or drops assistant
    messages or ends them with anything but one special token, the same for all, because nothing can be appended to
    these.
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
        self.counters = Counter[str]()
        self.arguments = dict(arguments)
        self.system = system
        # Bytes of the template around messages of these roles, or why it cannot show them.
        self._frames: dict[tuple[bool, tuple[str, ...]], int | ValueError] = {}  # bool: if tools are shown
        self.tokenizer = load_tokenizer(model_path, setting)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{setting}={model_path}: its tokenizer has no chat template; give a chat model")
        self._check_arguments()
        # All control tokens; those that are cut in replies, which may think and call tools; and in what JSON holds,
        # where a template may complete one.
        self._control_tokens = self._cut_in_replies = self._cut_in_json = re.compile(r"(?!)")
        self._header = self._lead = self._trail = ""
        self.plain_mark: str | None = None
        self._read_frame()
        end = self._tail([Message("user", "x")])[:1]
        self._check_tools_shown()
        if not end or end[0] not in self.tokenizer.added_tokens_decoder:
            raise self._unfit_error("does not end an assistant message with a special token")
        self.end_id: int = end[0]
        self._check_last_reply()
        marks = self._tokens(THOUGHT_END)
        single = len(marks) == 1 and marks[0] != self.tokenizer.unk_token_id
        self.thought_end: int | None = marks[0] if single else None
        if system:
            try:
                self._frame_bytes([Message("system", "x"), Message("user", "x")])
            except ValueError as error:
                raise ValueError(f"rollout.system_prompt: {error}") from error

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatRenderer:
        """A copy that shows these tools to the policy."""
        renderer = copy.copy(self)
        renderer.tools = list(tools)
        renderer._check_tools_shown()
        return renderer

    def first(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        """The prompt: all messages, after `system` unless they have their own, and the opening of the next turn.

        Raises ValueError if the template refuses or drops one of them.
        """
        self.counters[CONTROL_TOKENS] += self.control_tokens(messages)
        messages = self._with_system(messages)
        self._frame_bytes(messages)
        return self._beginning(self._render(messages, thinking))

    def control_tokens(self, messages: Sequence[Message]) -> int:
        """Number of control tokens in the texts and calls of these messages, all of which are rendered as text."""
        parts = (part for message in messages for part in self._parts(message).values())
        return sum(count(value, pattern) for value, pattern in parts)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with the `<think>` of the next turn."""
        return self.tokenizer.decode(prompt[-16:]).rstrip().endswith(THOUGHT_BEGIN)

    def at_most(self, messages: Sequence[Message]) -> int:
        """Upper bound on the tokens of `messages`, without tokenizing: their bytes, those of the template included.

        Raises ValueError as `check_shown` does.
        """
        messages = self._with_system(messages)
        return self._frame_bytes(messages) + sum(len(message.content.encode()) for message in messages)

    def check_shown(self, messages: Sequence[Message]) -> None:
        """Raises ValueError if the template refuses, drops or does not end for messages of these roles."""
        self._frame_bytes(self._with_system(messages))

    def reply(self, text: str) -> tuple[int, ...]:
        """A written assistant message with its end-of-turn token, as in the template, for supervised training."""
        return self._reply(cut(text, self._cut_in_replies))

    def tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of `text` within a reply: without the space that tokenizers put in front of a text.

        Of control tokens it has those of thoughts and tool calls; others are text.
        """
        return self._tokens(cut(text, self._cut_in_replies))

    def text(self, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
        """The text of `token_ids` after `prompt`, as the engine decodes it; if there are tools, with special tokens."""
        before = prompt[-_DECODED_TOGETHER:]
        decode = partial(self.tokenizer.decode, skip_special_tokens=not self.tools)
        return decode([*before, *token_ids])[len(decode(before)) :]

    def call(self, message: Message) -> tuple[int, ...]:
        """A written assistant message with tool calls, as `reply`; the template writes the calls.

        Raises ValueError if it cannot.
        """
        question, tool_result = Message("user", "x"), Message("tool", "x")
        end = self.tokenizer.decode([self.end_id])
        header = self._render([question, Message("assistant", _MARKER), tool_result]).partition(_MARKER)[0]
        content = _MARKER if message.content else ""
        text = cut(message.content, self._cut_in_replies)
        written = self._render([question, replace(message, content=content), tool_result], fault="refuses tool_calls")
        calls, ended, _ = written.removeprefix(header).partition(end)
        if not all(call.name in calls for call in message.tool_calls):
            raise self._unfit_error("drops tool_calls")
        if not (written.startswith(header) and ended and calls.startswith(content)):
            raise self._unfit_error("drops the content of a message with tool_calls, or changes how it begins")
        return self._reply(text + calls.removeprefix(content).removesuffix(self._trail))

    def next(self, messages: Sequence[Message], turn: Sequence[int], thinking: bool | None = None) -> tuple[int, ...]:
        """The tokens after `turn`: its end-of-turn token if it lacks one, `messages`, the opening of the next turn."""
        self.counters[CONTROL_TOKENS] += self.control_tokens(messages)
        between = self._tail(messages, thinking)[1:]
        return between if tuple(turn[-1:]) == (self.end_id,) else (self.end_id, *between)

    def prompt_without_thoughts(
        self, messages: Sequence[Message], turns: Sequence[Turn], thinking: bool | None = None
    ) -> tuple[int, ...]:
        """The prompt after `messages`, as `first`, with `turns` without thoughts as the last assistant messages.

        The template writes everything but the content of these turns, whose own tokens are inserted.
        """
        marker = _MARKER
        while any(marker in message.content for message in messages):
            marker += "7"
        replies = [at for at, message in enumerate(messages) if message.role == "assistant"][-len(turns) :]
        self.counters[CONTROL_TOKENS] += self.control_tokens(messages[replies[-1] + 1 :])
        marked = [Message("assistant", marker) if at in replies else message for at, message in enumerate(messages)]
        before, *pieces = self._render(self._with_system(marked), thinking).split(marker)
        if len(pieces) != len(turns):
            raise self._unfit_error("drops or changes assistant messages")
        tokens = [*self._beginning(before.removesuffix(self._lead))]
        for turn, piece in zip(turns, pieces, strict=True):
            following = piece.removeprefix(self._trail)
            tokens += self._visible_tokens(turn)
            tokens += self._tokens(following if turn is turns[-1] else following.removesuffix(self._lead))
        return tuple(tokens)

    def check_thinking(self, turn: SamplingConfig, future: SamplingConfig, strip_thoughts: bool) -> None:
        """Raises ConfigError if the template or the tokenizer does not support what rollout sets about thoughts."""
        for name, sampling in (("turn", turn), ("future", future)):
            if sampling.enable_thinking is not None:
                self._check_used("enable_thinking", f"rollout.{name}.enable_thinking")
            message = f"the tokenizer of {self.model_path} has no token {THOUGHT_END}, which marks the end of a thought"
            budget = sampling.thinking_budget
            refusal = f"rollout.{name}.thinking_budget={budget}: {message}; remove it"
            require(budget is None or self.thought_end is not None, refusal)
        if strip_thoughts:
            question = [Message("user", "x")]
            without_reply = self._render(question, add_generation_prompt=False).count(THOUGHT_BEGIN)
            before = self._render([*question, Message("assistant", _MARKER), *question]).partition(_MARKER)[0]
            remedy = "set it to false"
            if "preserve_thinking" in str(self.tokenizer.chat_template):
                remedy += ", or model.chat_template_args.preserve_thinking=false"
            message = f"the chat template of {self.model_path} keeps the thoughts of earlier turns"
            require(before.count(THOUGHT_BEGIN) == without_reply, f"rollout.strip_thoughts=true: {message}; {remedy}")

    def _visible_tokens(self, turn: Turn) -> tuple[int, ...]:
        """The tokens of a turn without its thought and its end-of-turn token.

        Sampled tokens if the thought ends between two of them; otherwise tokens of the text, which are not trained on.
        """
        tokens = turn.token_ids[:-1] if turn.token_ids[-1:] == (self.end_id,) else turn.token_ids
        text = visible(turn.text)
        if text == turn.text:
            return tokens
        if self.thought_end not in tokens:
            return self.tokens(text)
        start = len(tokens) - tokens[::-1].index(self.thought_end)
        answer = list(dropwhile(lambda token: self.tokenizer.decode(token).isspace(), tokens[start:]))
        return tuple(answer) if not self.tokenizer.decode(answer[:1])[:1].isspace() else self.tokens(text)

    def _tail(self, messages: Sequence[Message], thinking: bool | None = None) -> tuple[int, ...]:
        """All tokens after the content of an assistant message that is followed by `messages`."""
        conversation = [Message("user", "x"), Message("assistant", _MARKER), *messages]
        _, marker, tail = self._render(conversation, thinking).partition(_MARKER)
        if not marker:
            raise self._unfit_error("drops or changes assistant messages")
        self._frame_bytes(conversation)
        return self._tokens(tail.removeprefix(self._trail))

    def _read_frame(self) -> None:
        """Read the template's control tokens, and what it writes around an assistant message."""
        used = f"{self.tokenizer.chat_template} {THOUGHT_BEGIN} {THOUGHT_END}"
        added = self.tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        plain = {token.content for token in added} - special
        written = {text for text in plain if text in used and "<" in text}
        marks = special | written | set(filter(_CONTROL_FORM.fullmatch, plain))
        question = [Message("user", "x")]
        prompt = self._render(question, tools=None)
        turns = self._render([*question, Message("assistant", _MARKER), *question], tools=None)
        before, _, after = turns.partition(_MARKER)
        self._control_tokens, self._cut_in_json = any_of(marks), any_of(marks, completed=True)
        kept = self._call_marks() - set(self._control_tokens.findall(turns)) | set(filter(_REPLY_MARK.search, marks))
        self._cut_in_replies = any_of(marks - kept)
        last = max((match.start() for match in self._control_tokens.finditer(prompt)), default=0)
        self._header = prompt[last:]
        lead, trail = before.removeprefix(prompt), after[: len(after) - len(after.lstrip())]
        self._lead = lead if lead.isspace() and before.startswith(prompt) else ""
        self._trail = trail if self._control_tokens.match(after, len(trail)) else ""
        beside = self._control_tokens.sub(" ", after).replace(THOUGHT_BEGIN, "").replace(THOUGHT_END, "")
        self.plain_mark = mark[0] if (mark := re.search(r"\S*[^\w\s]\S*", beside)) else None

    def _call_marks(self) -> set[str]:
        """Control tokens that a call adds to a reply: with text and values, or as OpenAI's, as JSON without text."""
        marks, question = set[str](), {"role": "user", "content": "x"}
        tool = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {}}}

        def written(reply: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> Counter[str]:
            text = _apply_template(self.tokenizer, [question, reply], tools, **self.arguments)
            return Counter(self._control_tokens.findall(text))

        for tools, (content, arguments) in product((None, [tool]), (("", {"x": "x"}), (None, '{"x": "x"}'))):
            call = {"id": "123456789", "type": "function", "function": {"name": "x", "arguments": arguments}}
            reply = {"role": "assistant", "content": content}
            with suppress(TemplateError):  # the template takes another form
                called = written({**reply, "tool_calls": [call]}, tools)
                marks.update(called - written({**reply, "content": "x"}, tools))
        return marks

    def _check_last_reply(self) -> None:
        """Raises ValueError if `end_id` does not end the last reply of a conversation too, and so marks a next message.

        Some templates write the token there only if they then open a reply; others show no such conversation.
        """
        question, reply = Message("user", "x"), Message("assistant", _MARKER)
        opening = self._render([question]).removeprefix(self._render([question], add_generation_prompt=False))
        ends = []
        for opens in (False, True):
            with suppress(ValueError):  # the template refuses it
                text = self._render([question, reply], add_generation_prompt=opens)
                text = text.removesuffix(opening if opens else "").partition(_MARKER)[2].removeprefix(self._trail)
                ends.append(self._tokens(text)[:1])
        if ends and (self.end_id,) not in ends:
            mark = self.tokenizer.decode([self.end_id])
            fault = f"ends a reply with {mark!r} only if a message follows"
            raise self._unfit_error(fault, "give one that ends every reply with the same token")

    def _reply(self, text: str) -> tuple[int, ...]:
        return (*self._tokens(self._lead + text + self._trail), self.end_id)

    def _tokens(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendered text within a conversation."""
        return tuple(token for piece in split(text) for token in self._continue(piece))

    def _beginning(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendered text with which a conversation begins."""
        first, *pieces = split(text)
        return (*self._encode(first), *(token for piece in pieces for token in self._continue(piece)))

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _continue(self, text: str) -> list[int]:
        """The tokens of `text` behind the header of a turn, or behind a letter if its beginning merges with that."""
        for header in (self._header, f"{self._header}x"):
            before, whole = self._encode(header), self._encode(header + text)
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._encode(text)

    def _frame_bytes(self, messages: Sequence[Message]) -> int:
        """Bytes of the template around messages of these roles. Raises ValueError if it refuses or drops one."""
        roles = tuple(message.role for message in messages)
        key = bool(self.tools), roles
        if key not in self._frames:
            try:
                self._frames[key] = self._measured(roles)
            except ValueError as error:
                self._frames[key] = error
        measured = self._frames[key]
        if isinstance(measured, ValueError):
            raise measured
        return measured

    def _measured(self, roles: tuple[str, ...]) -> int:
        texts = [f"{_MARKER}{number}x" for number in range(len(roles))]
        messages = [Message(role, text) for role, text in zip(roles, texts, strict=True)]
        rendered = self._render(messages, fault=f"refuses messages of the roles {', '.join(roles)}", way_out=_SHOWN)
        if dropped := next((role for role, text in zip(roles, texts, strict=True) if text not in rendered), None):
            raise self._unfit_error(f"drops a {dropped} message from {', '.join(roles)}", _SHOWN)
        return len(rendered.encode()) - sum(map(len, texts))

    def _render(
        self,
        messages: Sequence[Message],
        thinking: bool | None = None,
        fault: str = "fails",
        way_out: str = _FIXED,
        **other: Any,
    ) -> str:
        """The rendered text. Raises ValueError with `fault` and `way_out` if the template fails."""
        parts = [self._parts(message).items() for message in messages]
        rows = [{name: cut(value, pattern) for name, (value, pattern) in items} for items in parts]
        tools = cut(self.tools, self._cut_in_json) or None
        template_arguments = {**self.arguments, **({} if thinking is None else {"enable_thinking": thinking})}
        options = {**template_arguments, "tools": tools, "add_generation_prompt": True, **other}
        try:
            return _apply_template(self.tokenizer, rows, **options)
        except TemplateError as error:
            raise self._unfit_error(f"{fault} ({error})", way_out) from error

    def _parts(self, message: Message) -> dict[str, tuple[Any, re.Pattern[str]]]:
        """The entries of a message as the template takes it, each with the control tokens that are cut in it."""
        content = self._cut_in_replies if message.role == "assistant" else self._control_tokens
        entries = message.as_dict().items()
        return {name: (value, content if name == "content" else self._cut_in_json) for name, value in entries}

    def _with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        has_system = any(message.role == "system" for message in messages)
        return messages if has_system or not self.system else [Message("system", self.system), *messages]

    def _check_arguments(self) -> None:
        for name in self.arguments:
            setting = f"model.chat_template_args.{name}"
            require(name not in _RESERVED, f"{setting}: is set by the run itself; remove it")
            self._check_used(name, setting)

    def _check_used(self, name: str, setting: str) -> None:
        """Raises ConfigError for an argument that the template ignores."""
        used = sorted(set(re.findall(r"\b[a-z]\w+", str(self.tokenizer.chat_template))))
        message = f"{setting}: the chat template of {self.model_path} does not use it{nearest(name, used)}"
        require(name in used, f"{message}; remove it")

    def _check_tools_shown(self) -> None:
        question = [Message("user", "x")]
        if self.tools and self._render(question) == self._render(question, tools=None):
            raise self._unfit_error("does not show rollout.tools to the policy")
        if self.tools:
            self._frame_bytes([*question, Message("assistant", "x"), Message("tool", "x")])

    def _unfit_error(self, fault: str, way_out: str = "give one that appends turns") -> ValueError:
        return ValueError(f"{self._setting}={self.model_path}: its chat template {fault}; {way_out}")


def tokenizer_files(folder: Path) -> tuple[tuple[str, int], ...]:
    """The tokenizer and chat template files of a model's folder, with their modification times (ns)."""
    parts = sorted({*folder.glob("*token*"), *folder.glob("chat_template*")})
    return tuple((str(part), part.stat().st_mtime_ns) for part in parts)


def load_tokenizer(model_path: str, setting: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model. Raises ValueError naming `setting` if it is missing or damaged."""
    folder = hub.folder(model_path)
    way_out = "save the tokenizer again with transformers, AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{setting}={model_path}: no tokenizer.json there; {way_out}")
    try:
        return _tokenizer(folder, tokenizer_files(folder))
    except Exception as error:  # of any type: three libraries parse the files unchecked
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"{setting}={model_path}: its tokenizer cannot be read ({why}); {way_out}") from error


@lru_cache(maxsize=1)  # a large one takes a second, and every reader of the data has a renderer
def _tokenizer(folder: Path, files: tuple[tuple[str, int], ...]) -> PreTrainedTokenizerFast:
    # The import takes seconds, and more with AutoTokenizer; ranks that render nothing do not wait for it.
    patches.apply()
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def render_once(model_path: str, setting: str) -> None:
    """Raises ValueError naming `setting` if a model's tokenizer cannot be read or its template fails."""
    tokenizer = load_tokenizer(model_path, setting)
    if tokenizer.chat_template:
        try:
            _apply_template(tokenizer, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
        except TemplateError as error:
            raise ValueError(f"{setting}={model_path}: its chat template fails ({error}); fix it") from error


def _apply_template(
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **options: Any,
) -> str:
    """The text as of apply_chat_template of `tokenizer`, within the bounds of any template.

    Raises TemplateError for every failure of the template.
    """
    values = {"messages": rows, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        template = _bounded_template(tokenizer.get_chat_template(tools=tools))
        return template.render({**values, **tokenizer.special_tokens_map, **options})
    except TemplateError:
        raise
    except TemplateLimit as error:
        raise TemplateError(str(error)) from error
    except Exception as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error


@lru_cache
def _bounded_template(source: str) -> BoundedTemplate:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # Of any template: compiling this one there would compute its constant expressions, without a bound.
    return BoundedTemplate(bounded(_compile_jinja_template("").environment), source)


@dataclass(frozen=True)
class PromptSpec:
    """How prompts of the policy are rendered: by the chat template of `model` with its `arguments`.

    `system_file`: as rollout.system_prompt.
    """

    model: str
    arguments: Mapping[str, Any]
    system_file: str | None

    @property
    def system(self) -> str:
        """The text of rollout.system_prompt, empty if it is not set. Raises ConfigError or PromptError."""
        file = self.system_file
        return read_prompt("rollout.system_prompt", file, "", ()).render().strip() if file else ""

    def renderer(self, tools: Sequence[Mapping[str, Any]] = ()) -> ChatRenderer:
        """The renderer of the policy, the same in rollouts and in supervised training. Raises ConfigError."""
        return ChatRenderer(self.model, tools, self.arguments, self.system)

    def pieces(self) -> Callable[[int], str]:
        """A function that gives the text of a token within a text: U+FFFD for a part of a character."""
        decode = partial(load_tokenizer(self.model, "model.path").decode, clean_up_tokenization_spaces=False)
        first = decode([0])  # decoders drop the space in front of the first token

        @cache
        def piece(token: int) -> str:
            return decode([0, token]).removeprefix(first)

        return piece
