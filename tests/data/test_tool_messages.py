"""Supervised training on tool calls: rows in the form of OpenAI's interface, rendered as the stream of a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.datasets import TrainingData, load_conversations, render_sample, write_jsonl
from megatron_collab.data.spec import data_spec
from megatron_collab.data.tool_messages import ToolConversation, tool_conversation
from megatron_collab.types import Conversation, Finish, Message, ToolCall, Turn
from tests.data.test_chat_template import renderer

# The calls as two families write them; the second has no room for a text beside its one call.
QWEN = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}"
    "{%- if message.content %}{{ '\n' + message.content }}{% endif -%}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}"
    "{% if message.tool_calls %}"
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{{ message.tool_calls[0].function | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
SCHEMA = {
    "name": "compute",
    "description": "computes",
    "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
}


def calling(*expressions: str, content: str | None = None, as_text: bool = True) -> dict[str, Any]:
    calls = [
        {
            "id": e,
            "type": "function",
            "function": {"name": "compute", "arguments": json.dumps({"e": e}) if as_text else {"e": e}},
        }
        for e in expressions
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def row(*assistant: dict[str, Any], **columns: Any) -> dict[str, Any]:
    """The assistant's messages, each with answers to its calls, between a question and a reply with a follow-up."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "6*7?"}]
    for message in assistant:
        results = [{"role": "tool", "content": "42", "tool_call_id": call["id"]} for call in message["tool_calls"]]
        messages += [message, *results]
    closing = [("assistant", "it is 42"), ("user", "thanks"), ("assistant", "bye")]
    return {"messages": messages + [{"role": role, "content": text} for role, text in closing], **columns}


def test_calls_are_trained_and_answers_are_not_in_the_stream_of_a_rollout(tmp_path: Path) -> None:
    """Equals the stream of a rollout that sampled these calls, and the rendering of the whole template."""
    plain = renderer(tmp_path, QWEN)
    conversation = tool_conversation(row(calling("6*7", content="see:"), calling("1", "2"), tools=[SCHEMA]))
    sample = render_sample(plain, conversation)
    chat = plain.with_tools([{"type": "function", "function": SCHEMA}])
    replies = [
        'see:\n<tool_call>\n{"name": "compute", "arguments": {"e": "6*7"}}\n</tool_call>',
        "\n".join(f'<tool_call>\n{{"name": "compute", "arguments": {{"e": "{e}"}}}}\n</tool_call>' for e in "12"),
        "it is 42",
        "bye",
    ]
    heard = [[Message("tool", "42")], [Message("tool", "42")] * 2, [Message("user", "thanks")]]
    played = Conversation(conversation[:2], chat.first(conversation[:2]))
    for text, messages in zip(replies, [*heard, None], strict=True):
        tokens = chat.reply(text)
        played = played.add_turn(
            Turn(played.token_ids, tokens, (0.0,) * len(tokens), (0,) * len(tokens), Finish.STOP, text)
        )
        if messages:
            played = played.add_messages(messages, chat.next(messages, tokens))
    assert tuple(sample.token_ids) == played.token_ids
    assert chat.tokenizer.decode(sample.token_ids[sample.loss_mask == 1]) == "".join(
        f"{text}<|im_end|>" for text in replies
    )
    rows = [message.as_dict() for message in conversation]
    whole = chat.tokenizer.apply_chat_template(rows, tools=chat.tools, tokenize=False)
    assert chat.tokenizer.decode(sample.token_ids) == whole.removesuffix("\n")
    assert '"name": "compute", "description"' in whole


def test_rows_of_a_file_with_other_arguments_and_tools_in_each(tmp_path: Path) -> None:
    """Arrow gives every row the names of all rows; a row without calls is read as before."""
    other = {"type": "function", "function": {**SCHEMA, "name": "other", "parameters": {"type": "object"}}}
    objects = row(calling("1", as_text=False), tools=[SCHEMA])
    more = row(calling("2", as_text=False), tools=[other])
    more["messages"][2]["tool_calls"][0]["function"]["arguments"] = {"x": [1]}
    plain = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    write_jsonl(tmp_path / "rows.jsonl", [objects, more, plain])
    first, second, third = load_conversations(tmp_path / "rows.jsonl")
    assert first[2].tool_calls == (ToolCall("compute", {"e": "1"}),)
    assert second[2].tool_calls == (ToolCall("compute", {"x": [1]}),)
    assert isinstance(first, ToolConversation) and isinstance(second, ToolConversation)
    assert first.tools == ({"type": "function", "function": SCHEMA},) and second.tools == (other,)
    assert third == (Message("user", "hi"), Message("assistant", "hello")) and not isinstance(third, ToolConversation)
    assert tool_conversation({**more, "tools": json.dumps([other])}).tools == (other,)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m.pop(3), "a message of assistant after tool_calls; tool messages answer tool_calls"),
        (lambda m: m.insert(2, m[3]), "a message of tool after a message of user; tool messages answer tool_calls"),
        (lambda m: m.__delitem__(slice(4, None)), "must end with a reply of the assistant"),
        (lambda m: m[2].update(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "arguments is not JSON"),
        (lambda m: m[2].update(tool_calls=[{"function": {"arguments": {}}}]), "a call without a name"),
        (lambda m: m[1].update(tool_calls=m[2]["tool_calls"]), "of role 'user' with tool_calls"),
        (lambda m: m[4].update(content=" "), "a message without content"),
    ],
)
def test_bad_conversations_with_tools_are_refused(change: Any, fault: str) -> None:
    broken = row(calling("1"))
    change(broken["messages"])
    with pytest.raises(ValueError, match=fault):
        tool_conversation(broken)


@pytest.mark.parametrize(
    ("template", "message", "fault"),
    [
        (LLAMA, calling("1", content="see:"), "drops the content of a message with tool_calls"),
        (LLAMA, calling("1", "2"), r"refuses tool_calls \(one call only\)"),
        (QWEN.replace("message.tool_calls or []", "[]"), calling("1"), "drops tool_calls"),
    ],
)
def test_messages_that_the_template_cannot_render_are_refused(
    tmp_path: Path, template: str, message: dict[str, Any], fault: str
) -> None:
    renderer(tmp_path, template)
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": plain}, row(message)])
    config = Config()
    config.run.dir, config.model.path = str(tmp_path / "run"), str(tmp_path)
    config.train.stage, config.data.train = "sft", str(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=f"^data.train=.*rows.jsonl row 2: model.path=.*{fault}"):
        TrainingData(config, data_spec(config).train)
    if template == LLAMA:
        sample = render_sample(ChatRenderer(str(tmp_path)), tool_conversation(row(calling("1"), tools=[SCHEMA])))
        assert sample.loss_mask.sum() > 0
