"""The stream of a conversation against the vendors' chat templates: equal token by token, or with a named difference.

Six turns of the policy with a system prompt, two calls of a tool and thoughts. docs/explanation/conversations.md has
this table in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab.algo.credit import sample
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.environments import tiny_model
from megatron_collab.settings import ConfigError, SamplingConfig
from megatron_collab.types import Conversation, Finish, Message, ToolCall, Turn

MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>"]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "compute",
        "description": "computes",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
    },
}
CALL = {"type": "function", "function": {"name": "compute", "arguments": {"e": "6*7"}}}
# What the policy thinks and says in each turn; None is a call. After a call comes the tool, after a reply the user.
TURNS = [
    ("six times seven", None),
    ("it is known now", "That is 42.\n\nShall I go on?"),
    ("they want more", "Then 43."),
    ("again", None),
    ("the same", "Still 42."),
    ("a farewell", "Bye."),
]
QUESTIONS = ["What is 6*7?", "Yes, go on.", "Check it again!", "Thanks.", "And?", "So?", "Well."]
# In the form of DeepSeek-R1's, which is not among the files: no earlier thought is ever shown.
DEEPSEEK = (
    "{{ bos_token }}{{ tools | tojson if tools }}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<|User|>' + m.content }}{% elif m.role == 'tool' %}{{ '<|Tool|>' + m.content }}{% else %}"
    "{{ '<|Assistant|>' + m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
JSON_CALL = '<tool_call>\n{"name": "compute", "arguments": {"e": "6*7"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=compute>\n<parameter=e>\n6*7\n</parameter>\n</function>\n</tool_call>"
PLAIN_CALL = '{"name": "compute", "arguments": {"e": "6*7"}}'
LLAMA_CALL = '{"name": "compute", "parameters": {"e": "6*7"}}'


# Name of a template, or "deepseek" for DEEPSEEK; form of a call (None: no tools); whether the policy thinks; key of
# ARGUMENTS; how the stream differs from the template with thoughts kept, and with thoughts stripped:
#   ""       not at all
#   earlier  it keeps the thoughts of earlier turns, also empty ones, which the template drops
#   all      the template also drops thoughts before a call in the same turn; the stream keeps those
ARGUMENTS = {"thinking": {"enable_thinking": True}, "silent": {"enable_thinking": False}, "": {}}
CASES = [
    ("llama3", None, False, "", "", ""),
    ("llama3_1", LLAMA_CALL, False, "", "", ""),
    ("llama3_2", LLAMA_CALL, False, "", "", ""),
    ("qwen2_5", JSON_CALL, False, "", "", ""),
    ("qwen3_instruct_2507", JSON_CALL, False, "", "", ""),
    ("qwen3", JSON_CALL, True, "", "earlier", ""),
    ("qwen3", JSON_CALL, False, "silent", "all", "all"),
    ("qwen3_5_think", XML_CALL, True, "", "earlier", ""),
    ("qwen3_5_think", XML_CALL, False, "silent", "earlier", ""),
    ("qwen3_5_nothink", XML_CALL, True, "thinking", "earlier", ""),
    ("qwen3_5_nothink", XML_CALL, False, "", "earlier", ""),
    ("qwen3_6", XML_CALL, True, "", "earlier", ""),
    ("qwen3_6", XML_CALL, False, "silent", "earlier", ""),
    ("qwen3_8", XML_CALL, True, "", "", ""),
    ("qwen3_8", XML_CALL, False, "silent", "", ""),
    ("deepseek", PLAIN_CALL, True, "", "all", "all"),
]


Renderer = Callable[..., ChatRenderer]


@pytest.fixture
def renderer(dataset: Callable[[str], Path], tmp_path: Path) -> Renderer:
    """Makes the renderer of a template: renderer(NAME, ARGUMENTS, tools=True)."""

    def make(name: str, arguments: Mapping[str, Any], tools: bool = True) -> ChatRenderer:
        template = DEEPSEEK if name == "deepseek" else dataset(f"chat_templates/{name}.jinja").read_text()
        tokenizer = tiny_model.byte_tokenizer([text for _, text in TURNS if text] * 4, 300)
        tokenizer.add_special_tokens({"additional_special_tokens": MARKS, "bos_token": "<|begin|>"})
        tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])  # as in Qwen3's, no special ones
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return ChatRenderer(str(tmp_path), [SCHEMA] if tools else [], arguments)

    return make


def encoded(chat: ChatRenderer, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def play(
    chat: ChatRenderer, call: str | None, thinks: bool, strip: bool
) -> tuple[Conversation, list[tuple[tuple[int, ...], tuple[int, ...], str]]]:
    """The conversation and, before each turn, the stream, the template's rendering and the last question."""
    begun, questions = [Message("system", "Be brief."), Message("user", QUESTIONS[0])], [*QUESTIONS]
    rows: list[dict[str, Any]] = [message.as_dict() for message in begun]
    conversation, seen = Conversation(tuple(begun), chat.first(begun)), []
    options = {"tools": chat.tools or None, "add_generation_prompt": True, **chat.arguments}
    for thought, text in TURNS:
        whole = encoded(chat, chat.tokenizer.apply_chat_template(rows, tokenize=False, **options))
        seen.append((conversation.token_ids, whole, questions[0]))
        calls = text is None and call is not None
        reply = text or call or "One moment."
        thoughts = f"<think>\n{thought}\n</think>\n\n" if thinks else ""
        tokens = chat.reply(thoughts.removeprefix("<think>\n" * chat.opens_thought(conversation.token_ids)) + reply)
        n = len(tokens)
        turn = Turn(conversation.token_ids, tokens, (-1.0,) * n, (0,) * n, Finish.STOP, thoughts + reply)
        conversation = conversation.add_turn(turn)
        questions = questions if calls else questions[1:]
        heard = Message("tool", "42") if calls else Message("user", questions[0])
        if strip and not calls:
            prompt = chat.prompt_without_thoughts([*conversation.messages, heard], conversation.turns)
        else:
            prompt = conversation.token_ids + chat.next([heard], tokens)
        conversation = conversation.begin_anew([heard], prompt)
        row = {"role": "assistant", "content": "" if calls else reply, "reasoning_content": thought if thinks else None}
        rows += [{**row, "tool_calls": [CALL]} if calls else row, heard.as_dict()]
    return conversation, seen


def as_template(text: str, difference: str, last: str) -> str:
    """The stream without the thoughts that the template drops; `last`: the user's last question."""
    if not difference:
        return text
    ends = text.rindex(last) if difference == "earlier" else text.lower().rindex("assistant")
    return re.sub(r"<think>\n.*?</think>\n\n", "", text[:ends], flags=re.DOTALL) + text[ends:]


@pytest.mark.parametrize("strip", [False, True], ids=["kept", "stripped"])
@pytest.mark.parametrize(("name", "call", "thinks", "mode", "kept", "stripped"), CASES)
def test_the_stream_is_what_the_template_renders(
    renderer: Renderer, name: str, call: str | None, thinks: bool, mode: str, kept: str, stripped: str, strip: bool
) -> None:
    arguments = dict(ARGUMENTS[mode])
    if name == "qwen3_8":
        arguments["preserve_thinking"] = not strip
    if name == "llama3_2":
        arguments["date_string"] = "26 Jul 2024"  # the default is the date of the day
    chat = renderer(name, arguments, tools=call is not None)
    chat.check_thinking(SamplingConfig(), SamplingConfig(), strip)
    conversation, seen = play(chat, call, thinks, strip)
    difference = stripped if strip else kept
    for stream, whole, last in seen:
        if difference:
            expected = as_template(chat.tokenizer.decode(stream), difference, last)
            assert expected == chat.tokenizer.decode(whole)
        else:
            assert stream == whole
    assert any(stream != whole for stream, whole, _ in seen) == bool(difference), (
        "the table names no more than there is"
    )
    # What was sampled is trained, each turn after what it saw.
    learned = sample(conversation.turns, [])
    sequences = np.split(learned.token_ids, learned.cuts)
    begun = chat.tokenizer.decode(conversation.turns[0].prompt_ids + conversation.turns[0].token_ids)
    dropped = strip and "</think>" in begun
    assert len(sequences) == (4 if dropped else 1), "a call and the reply after it share a sequence"
    trained = learned.token_ids[learned.loss_mask == 1]
    assert trained.tolist() == [token for turn in conversation.turns for token in turn.token_ids]
    for turn in conversation.turns:
        whole = turn.prompt_ids + turn.token_ids
        assert any(sequence[: len(whole)].tolist() == list(whole) for sequence in sequences)


def test_a_template_that_keeps_thoughts_is_refused_if_they_are_stripped(renderer: Renderer) -> None:
    chat = renderer("qwen3_8", {})
    why = "rollout.strip_thoughts=true: the chat template of .* keeps the thoughts of earlier turns; set it to false, "
    with pytest.raises(ConfigError, match=f"{why}or model.chat_template_args.preserve_thinking=false"):
        chat.check_thinking(SamplingConfig(), SamplingConfig(), strip_thoughts=True)


@pytest.mark.parametrize("name", sorted({name for name, call, *_ in CASES if call and name != "deepseek"}))
def test_a_large_number_is_an_argument_of_a_call(renderer: Renderer, name: str) -> None:
    chat = renderer(name, {})
    call = ToolCall("compute", {"e": 10**9})
    assert "1000000000" in chat.tokenizer.decode(chat.call(Message("assistant", "", tool_calls=(call,))))


def test_the_first_of_llama_3_knows_no_tools(renderer: Renderer) -> None:
    with pytest.raises(ValueError, match=r"does not show rollout\.tools to the policy"):
        renderer("llama3", {})


def test_turns_that_think_and_turns_that_do_not(renderer: Renderer) -> None:
    """rollout.future.enable_thinking=false after a trained turn that thinks."""
    chat = renderer("qwen3_5_think", {}, tools=False)
    question = [Message("user", QUESTIONS[0])]
    prompt = chat.first(question, True)
    assert chat.opens_thought(prompt) and not chat.opens_thought(chat.first(question, False))
    tokens = chat.reply("hm\n</think>\n\n42")
    n = len(tokens)
    turn = Turn(prompt, tokens, (-1.0,) * n, (0,) * n, Finish.STOP, "<think>hm\n</think>\n\n42")
    more = [Message("user", QUESTIONS[1])]
    silent = chat.next(more, tokens, False)
    assert chat.tokenizer.decode(silent).endswith("<think>\n\n</think>\n\n")
    rerendered = chat.prompt_without_thoughts([*question, Message("assistant", "42"), *more], [turn], False)
    rows = [*(m.as_dict() for m in question), {"role": "assistant", "content": "42"}, more[0].as_dict()]
    whole = chat.tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert rerendered == encoded(chat, whole)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (("<think>", "hm", "</think>", "\n\nwhich", " day"), "which day"),  # the thought ends within a token
        (("<think>", "hm"), ""),
        (("which", " day", "<think>", "hm"), "which day"),
    ],
)
def test_a_reply_is_rendered_again_if_its_thought_ends_within_a_token(
    renderer: Renderer, tokens: tuple[str, ...], text: str
) -> None:
    chat = renderer("qwen3", {}, tools=False)
    ids = tuple(token for piece in tokens for token in chat.tokens(piece))
    sampled = "".join(tokens)
    turn = Turn((1,), ids, (-1.0,) * len(ids), (0,) * len(ids), Finish.LENGTH, sampled)
    messages = [Message("user", "x"), Message("assistant", text), Message("user", "y")]
    assert chat.prompt_without_thoughts(messages, [turn]) == chat.first(messages)


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_private_notes_of_users_are_not_rendered(renderer: Renderer, name: str) -> None:
    chat = renderer(name, {"date_string": "26 Jul 2024"} if name == "llama3_2" else {}, tools=False)
    plain = [
        Message("system", "Be brief."),
        Message("user", "hi"),
        Message("assistant", "yes?"),
        Message("user", "bye"),
    ]
    noted = [replace(message, private={"thought": "a secret"}) for message in plain]
    assert chat.first(noted) == chat.first(plain)
    assert chat.next(noted[-1:], chat.reply("yes?")) == chat.next(plain[-1:], chat.reply("yes?"))
