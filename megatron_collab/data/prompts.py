"""The model's chat template as token ids, such that sampled tokens are never rendered again."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoTokenizer

from megatron_collab.types import Message, Turn

# Stands in for a sampled reply when the template is asked what follows it.
_MARKER = "SAMPLED7REPLY"


class ChatRenderer:
    """Prompts, and what joins the turns of a conversation, from the chat template in `model_path`.

    `end_id` is the template's end-of-turn token, the one that follows the assistant's content.

    Raises ValueError, naming model.path, for a template after whose assistant messages nothing can be appended:
    one that changes or drops them, or ends them with something else than one special token.
    """

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self.tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if not self.tokenizer.chat_template:
            raise ValueError(f"model.path={model_path}: its tokenizer has no chat template; give a chat model")
        end = self._tail(Message("user", "x"))[:1]
        if not end or end[0] not in self.tokenizer.added_tokens_decoder:
            raise self._unfit("does not end an assistant message with a special token")
        self.end_id: int = end[0]

    def first(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt: all messages, and what opens the assistant's turn."""
        return self._tokenize(self._render(messages))

    def reply(self, text: str) -> tuple[int, ...]:
        """A written assistant message with its end-of-turn token, for supervised training."""
        return (*self._tokenize(text), self.end_id)

    def next(self, message: Message, turn: Turn) -> tuple[int, ...]:
        """What follows the sampled `turn`: its end-of-turn token where it lacks one, `message`, the next opening."""
        ended = turn.token_ids[-1:] == (self.end_id,)
        between = self.after_reply(message)
        return between if ended else (self.end_id, *between)

    def after_reply(self, message: Message) -> tuple[int, ...]:
        """What follows an assistant message that has ended: `message`, and what opens the next turn."""
        return self._tail(message)[1:]

    def _tail(self, message: Message) -> tuple[int, ...]:
        """All tokens after the content of an assistant message that `message` follows."""
        rendered = self._render([Message("user", "x"), Message("assistant", _MARKER), message])
        _, marker, tail = rendered.partition(_MARKER)
        if not marker:
            raise self._unfit("drops or changes assistant messages")
        return self._tokenize(tail)

    def _render(self, messages: Sequence[Message]) -> str:
        rows = [message.as_dict() for message in messages]
        return self.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _unfit(self, fault: str) -> ValueError:
        return ValueError(f"model.path={self.model_path}: its chat template {fault}; give one that appends turns")
