"""Requests to chat models and to user models, and what they reply with.

A chat model plays the user with the roles exchanged: the user's messages are its own, and the assistant's are those of
its user. A user model, such as UserLM (arXiv 2510.06552), was trained to write the turns of the role user, so that it
gets the conversation as it is, and its chat template opens the user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_collab.data.control_tokens import each_text
from megatron_collab.data.transcript import escaped, visible_messages
from megatron_collab.rollout.tools.of_user import UserCall, noted_calls
from megatron_collab.settings.documents import parse_json
from megatron_collab.settings.schema import CHAT
from megatron_collab.types import Message, visible

GREETING = "Hello! What can I do for you?"  # the assistant's, before the user's first message; many templates need one
NOTHING = "(an empty message)"  # some endpoints refuse messages without text

Request = list[dict[str, Any]]


def chat_request(form: str, system: str, messages: Sequence[Message], calls: Sequence[UserCall] = ()) -> Request:
    """The request for the user's next message, with the user's `calls` since the assistant's last one.

    Messages of one role in a row are joined, since many chat templates want roles to alternate.
    """
    exchanged = {"user": "assistant", "assistant": "user"} if form == CHAT else {}
    request: Request = [{"role": "system", "content": system}]
    shown = visible_messages(messages)
    if exchanged and (not shown or shown[0].role == "user"):
        request.append({"role": "user", "content": GREETING})
    number = 0
    for message in shown:
        for call in noted_calls(message) if exchanged else ():
            request += _call_rows(call, number)
            number += 1
        role, content = exchanged.get(message.role, message.role), escaped(message.content).strip() or NOTHING
        last = request[-1]
        if last["role"] == role and "tool_calls" not in last:
            last["content"] += f"\n\n{content}"
        else:
            request.append({"role": role, "content": content})
    for call in calls:
        request += _call_rows(call, number)
        number += 1
    return request


def split_thought(text: str) -> tuple[str, str]:
    """The message in a model's reply, and the thought before it."""
    message = visible(text)
    return message.strip(), text.removesuffix(message).strip()


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; if they are no JSON object, as the argument `unreadable`, which no function has."""
    try:
        arguments = parse_json(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"unreadable": text}


def _call_rows(call: UserCall, number: int) -> Request:
    """A call and its result, as OpenAI's API has them, escaped as messages are: the policy may have written parts.

    Ids have nine letters and digits, as Mistral's models need.
    """
    name = f"call{number:05d}"
    arguments = json.dumps(each_text(call.arguments, escaped), ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    calling = {"id": name, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [calling]},
        {"role": "tool", "tool_call_id": name, "content": escaped(call.result) or NOTHING},
    ]
