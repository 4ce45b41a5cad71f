"""Messages of rows: calls of tools as the stream of a rollout, weights, thoughts, what is not read, JSON in cells."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from megatron_collab.config import Config
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.datasets import (
    TrainingData,
    conversation_row,
    load_conversations,
    load_tasks,
    render_sample,
    write_jsonl,
)
from megatron_collab.data.examples import load_any
from megatron_collab.data.messages import ToolConversation, Unfit, unread_parts
from megatron_collab.data.readers import completion_conversation, messages_conversation
from megatron_collab.data.sources import Source
from megatron_collab.data.survey import survey
from megatron_collab.launch.data_specs import data_spec
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
    conversation = messages_conversation(row(calling("6*7", content="see:"), calling("1", "2"), tools=[SCHEMA]))
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
    assert messages_conversation({**more, "tools": json.dumps([other])}).tools == (other,)


@pytest.mark.parametrize(
    ("ids", "contents"),
    [
        (["1", "2"], "ab"),
        (["2", "1"], "ba"),  # as answers of calls at the same time arrive
        (["2"], "a"),
        ([None, None], "ab"),
        (["", "1"], "ab"),
        (["1", "1"], "ab"),
    ],
)
def test_answers_of_tools_are_in_the_order_of_their_calls(ids: list[str | None], contents: str) -> None:
    answers = [{"role": "tool", "content": text, "tool_call_id": id} for text, id in zip("ab", ids, strict=False)]
    messages = [user("6*7?"), calling("1", "2"), *answers, assistant("42"), user("thanks"), assistant("bye")]
    read = messages_conversation({"messages": messages})
    assert "".join(message.content for message in read if message.role == "tool") == contents
    answers[0]["tool_call_id"] = "3"
    if all(ids):
        with pytest.raises(ValueError, match=r"^messages has an answer to the call '3', which the message before it"):
            messages_conversation({"messages": messages})


def test_schemas_have_the_names_of_two_formats() -> None:
    schema = {"type": "function", "function": SCHEMA}
    for columns in ({"tools": [SCHEMA]}, {"tool_defs": [SCHEMA]}, {"tools": None, "tool_defs": json.dumps([SCHEMA])}):
        assert messages_conversation(row(calling("1"), **columns)).tools == (schema,)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m.pop(3), "a message of assistant after tool_calls; user and assistant take turns, tool"),
        (lambda m: m.insert(2, m[3]), "a message of tool after a message of user; user and assistant take turns"),
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
        messages_conversation(broken)


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
        TrainingData(data_spec(config))
    if template == LLAMA:
        sample = render_sample(ChatRenderer(str(tmp_path)), messages_conversation(row(calling("1"), tools=[SCHEMA])))
        assert sample.loss_mask.sum() > 0


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


@pytest.mark.parametrize(
    ("weights", "trained"),
    [
        ((0, 1), ["GOOD"]),
        ((1, 0), ["BAD"]),
        ((None, 0), ["BAD"]),
        ((1, None), ["BAD", "GOOD"]),
        ((0.0, 1.0), ["GOOD"]),
        ((1, 1), ["BAD", "GOOD"]),
    ],
)
def test_a_message_of_weight_0_is_shown_and_not_trained(
    tmp_path: Path, weights: tuple[float | None, ...], trained: list[str]
) -> None:
    """Also after the rows were prepared."""
    chat = renderer(tmp_path, QWEN)
    replies = [assistant(text, weight=weight) for text, weight in zip(("BAD", "GOOD"), weights, strict=True)]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": [user("hi"), replies[0], user("no"), replies[1]]}])
    (messages,) = load_conversations(tmp_path / "rows.jsonl")
    for conversation in (messages, messages_conversation(conversation_row(messages))):
        sample = render_sample(chat, conversation)
        assert "BAD" in chat.tokenizer.decode(sample.token_ids)
        text = chat.tokenizer.decode(sample.token_ids[sample.loss_mask == 1])
        assert text == "".join(f"{reply}<|im_end|>" for reply in trained)


# As OpenAI, verl, slime, ms-swift, tinker-cookbook and Axolotl publish them.
MASKS = ["weight", "loss_mask", "step_loss_mask", "loss", "loss_scale", "trainable", "train", "training"]


@pytest.mark.parametrize("key", MASKS)
def test_a_message_that_its_row_excludes_is_not_trained(key: str) -> None:
    """Whatever the key of its format; beside others, one that excludes it is enough. A user's is trained by no key."""
    request = user("hi") | {key: 0}
    for value, unread in ((0, []), (1, [f"key {key}"])):
        assert [*unread_parts({"messages": [user("hi") | {key: value}]}, ["messages"])] == unread
    unset = 1 if key == "step_loss_mask" else None
    for yes, no in ((1, 0), (True, False), (1.0, 0.0), (unset, 0)):
        rows = [request, assistant("BAD", **{key: no}), user("no"), assistant("GOOD", **{key: yes})]
        assert [message.trained for message in messages_conversation({"messages": rows})[1::2]] == [False, True]
        rows[1] |= dict.fromkeys(MASKS, 1) | {key: no}
        assert not messages_conversation({"messages": rows})[1].trained


@pytest.mark.parametrize("key", MASKS)
@pytest.mark.parametrize("weight", [0.5, 2, -1, "1", [], float("nan")])
def test_any_other_weight_is_refused(key: str, weight: object) -> None:
    with pytest.raises(ValueError, match=rf"messages has a message of {key} .*; give 0 or 1"):
        messages_conversation({"messages": [user("hi"), assistant("ho", **{key: weight})]})


def test_a_mask_of_slime_that_is_null_is_refused() -> None:
    """slime does not train such a message; the other formats say with null that a key is missing."""
    with pytest.raises(ValueError, match="messages has a message of step_loss_mask None; give 0 or 1"):
        messages_conversation({"messages": [user("hi"), assistant("ho", step_loss_mask=None)]})


def test_a_message_of_which_parts_are_trained_is_refused() -> None:
    parts = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    with pytest.raises(ValueError, match="has a message with train_detail, and a message is trained as a whole or not"):
        messages_conversation({"messages": [user("hi"), assistant("ho", train_detail=parts)]})
    assert messages_conversation({"messages": [user("hi"), assistant("ho", train_detail=[])]})[1].trained


def test_a_conversation_without_a_trained_message_is_left_out() -> None:
    with pytest.raises(Unfit, match="in which no message is trained"):
        messages_conversation({"messages": [user("hi"), assistant("ho", weight=0)]})


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (assistant("4", reasoning_content="two and two"), "<think>\ntwo and two\n</think>\n\n4"),
        (assistant("4", reasoning="two and two\n"), "<think>\ntwo and two\n</think>\n\n4"),
        (assistant("4", thinking="two and two"), "<think>\ntwo and two\n</think>\n\n4"),
        (assistant("4", reasoning_content=None, thinking=""), "4"),
        (assistant("<think>\nhm\n</think>\n\n4", reasoning_content="hm"), "<think>\nhm\n</think>\n\n4"),
        ({"from": "gpt", "value": "4", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\n4"),
    ],
)
def test_thoughts_are_kept(message: dict[str, Any], content: str) -> None:
    assert messages_conversation({"messages": [user("2+2?"), message]})[-1].content == content


@pytest.mark.parametrize("nothing", [None, "null", "[]", [], "", " "])
def test_no_tools_may_be_written_in_any_way(nothing: object) -> None:
    messages = [user("hi"), assistant("ho", tool_calls=nothing)]
    read = messages_conversation({"messages": messages, "tools": nothing})
    assert read == (Message("user", "hi"), Message("assistant", "ho")) and not isinstance(read, ToolConversation)


@pytest.mark.parametrize("tools", ["5", "{}", {"type": "function"}, [5], "function"])
def test_other_tools_are_refused(tools: object) -> None:
    with pytest.raises(ValueError, match=r"^tools is not (a list of schemas; give those of OpenAI's interface|JSON)"):
        messages_conversation({"messages": [user("hi"), assistant("ho")], "tools": tools})


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ({"name": "Ann"}, {"key name"}),
        ({"audio": {"id": "x"}, "refusal": None}, {"key audio"}),
        ({"masks": 0}, {"key masks"}),
        ({"function_call": {"name": "f"}, "annotations": []}, {"key function_call"}),
        ({"thinking": True}, {"key thinking"}),
        ({"weight": 1, "tool_calls": [], "reasoning_content": "hm", "refusal": ""}, set()),
        ({"content": [{"type": "text", "text": "ho", "weight": 0, "citations": []}]}, {"key content.weight"}),
        ({"content": [{"type": "text", "text": "ho", "cache_control": {"type": "x"}}]}, {"key content.cache_control"}),
    ],
)
def test_keys_that_are_not_read_are_named(tmp_path: Path, message: dict[str, Any], parts: set[str]) -> None:
    row = {"messages": [user("hi"), assistant("ho", **message)]}
    assert set(unread_parts(row, ["messages"])) == parts
    write_jsonl(tmp_path / "rows.jsonl", [row, row])
    examples = load_conversations(tmp_path / "rows.jsonl")
    report = survey(examples, 0, lambda example: 0, lambda example: 0)
    note = "".join(f"not read: {part} (2)" for part in parts)
    assert report.unread == note


@pytest.mark.parametrize("as_text", [False, True])
def test_keys_of_tool_calls_that_are_not_read_are_named(as_text: bool) -> None:
    calls: list[dict[str, Any]] = [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}", "strict": True}, "index": 0},
        {"name": "f", "arguments": {"strict": True}, "function": None},
    ]
    call = assistant("", tool_calls=json.dumps(calls) if as_text else calls)
    row = {"messages": [user("hi"), call, {"role": "tool", "content": "r"}, assistant("ho")]}
    assert messages_conversation(row)[1].tool_calls
    assert sorted(unread_parts(row, ["messages"])) == ["key tool_calls.function.strict", "key tool_calls.index"]


@pytest.mark.parametrize("content", ["", " ", None, []])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_empty_system_message_is_dropped_and_counted(tmp_path: Path, role: str, content: object) -> None:
    row = {"messages": [{"role": role, "content": content}, user("hi"), assistant("ho")]}
    plain = {"messages": [{"role": role, "content": "be kind"}, *row["messages"][1:]]}
    write_jsonl(tmp_path / "rows.jsonl", [row, plain])
    examples = load_conversations(tmp_path / "rows.jsonl")
    assert [[message.role for message in messages] for messages in examples] == [
        ["user", "assistant"],
        ["system", "user", "assistant"],
    ]
    assert survey(examples, 0, lambda example: 0, lambda example: 0).unread == ("not read: empty system message (1)")


LISTED = [{"role": "system", "content": "be brief"}, user("Hi, help me")]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(LISTED),
        json.dumps(LISTED, indent=1),
        f"\n {json.dumps(LISTED)} ",
        json.dumps([{"from": "system", "value": "be brief"}, {"from": "human", "value": "Hi, help me"}]),
        json.dumps([LISTED[0], {**LISTED[1], "content": [{"type": "text", "text": "Hi, help me"}]}]),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_messages_may_be_json_in_a_cell(tmp_path: Path, text: str, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    table = Dataset.from_list([{"prompt": text, "goal": "a toast"}])
    write = {".csv": table.to_csv, ".tsv": partial(table.to_csv, sep="\t"), ".jsonl": table.to_json}
    write.get(suffix, table.to_parquet)(file)
    (task,) = load_tasks(file)
    assert task.messages == (Message("system", "be brief"), Message("user", "Hi, help me")) and task.goal == "a toast"


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": str(LISTED), "goal": "g"}, "prompt"),
        ({"messages": str([user("hi"), assistant("ho")])}, "messages"),
        ({"conversations": str([{"from": "human", "value": "hi"}])}, "conversations"),
        ({"prompt": "hi", "completion": str([assistant("ho")])}, "completion"),
        ({"prompt": "hi", "chosen": str([assistant("ho")]), "rejected": "no"}, "chosen"),
        ({"prompt": str([user("hi")]), "answer": "4"}, "prompt"),
    ],
)
def test_messages_as_python_prints_them_are_refused(tmp_path: Path, row: dict[str, Any], column: str) -> None:
    Dataset.from_list([row]).to_csv(tmp_path / "rows.csv")
    with pytest.raises(ValueError, match=f"row 2: {column} is not a list of messages, but Python's notation of one"):
        list(load_any(Source(source=str(tmp_path / "rows.csv")), "x"))


@pytest.mark.parametrize("text", [*("[]", "[1, 2]", '[{"a": 1}]', "[x", '[{"role"', "[{'a': 1}]"), '[{"a":' * 3000])
def test_a_reply_that_is_a_list_of_other_things_is_a_text(text: str) -> None:
    row = {"prompt": "a list, please", "completion": text}
    assert completion_conversation(row)[-1] == Message("assistant", text)


def test_calls_are_read_for_supervised_training_only(tmp_path: Path) -> None:
    called = row(calling("6*7"))["messages"]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": called}])
    with pytest.raises(ValueError, match="row 1: the prompt calls tools; such rows are read for supervised training"):
        list(load_tasks(tmp_path / "rows.jsonl"))
