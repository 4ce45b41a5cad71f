from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_collab.config import Config
from megatron_collab.data import chat_template
from megatron_collab.data.chat_template import ChatRenderer, _bounded_template, render_once
from megatron_collab.data.datasets import SupervisedData, conversation_row, write_jsonl
from megatron_collab.environments import booking, tiny_model
from megatron_collab.launch.data_specs import data_spec, prompt_spec
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import ConfigError, RolloutConfig, SamplingConfig, bounded_jinja
from megatron_collab.settings.bounded_jinja import TemplateLimit
from megatron_collab.types import Finish, Message, Turn
from tests.helpers import byte_level_tokenizer

QWEN = (
    "{%- if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {
    "qwen": (QWEN, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "ours": (tiny_model.CHAT_TEMPLATE, tiny_model.END),
}
MESSAGES = [
    Message("user", "please book a table for 2 people ."),
    Message("assistant", "which day and what time ?"),
    Message("user", "on monday at 7pm ."),
    Message("assistant", "done : for 2 people on monday at 7pm"),
    Message("user", "thanks ."),
]


def renderer(folder: Path, template: str, *more: Any) -> ChatRenderer:
    tokenizer = tiny_model.byte_tokenizer(["which day and what time"], 300)
    marks = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "bos_token": "<|begin|>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ChatRenderer(str(folder), *more)


@pytest.fixture(params=list(TEMPLATES))
def chat(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ChatRenderer, str]:
    template, end = TEMPLATES[request.param]
    return renderer(tmp_path, template), end


def sampled(chat: ChatRenderer, prompt: tuple[int, ...], text: str, ended: bool = True) -> Turn:
    tokens = chat.reply(text) if ended else chat.reply(text)[:-1]
    return Turn(
        prompt, tokens, (-1.0,) * len(tokens), (0,) * len(tokens), Finish.STOP if ended else Finish.LENGTH, text
    )


def stream(chat: ChatRenderer, messages: list[Message], ended: bool = True) -> tuple[int, ...]:
    """The tokens of a conversation, piece by piece as a rollout appends them."""
    tokens = chat.first(messages[:1])
    for reply, message in zip(messages[1::2], messages[2::2], strict=True):
        turn = sampled(chat, tokens, reply.content, ended)
        tokens = tokens + turn.token_ids + chat.next([message], turn.token_ids)
    return tokens


def test_appended_tokens_are_those_of_rendering_everything_at_once(chat: tuple[ChatRenderer, str]) -> None:
    assert stream(chat[0], MESSAGES) == chat[0].first(MESSAGES)


def test_a_turn_that_was_cut_off_is_closed_once(chat: tuple[ChatRenderer, str]) -> None:
    assert stream(chat[0], MESSAGES, ended=False) == chat[0].first(MESSAGES)


def test_the_end_of_a_turn_is_the_templates_own(chat: tuple[ChatRenderer, str]) -> None:
    assert chat[0].tokenizer.convert_ids_to_tokens(chat[0].end_id) == chat[1]
    assert chat[0].reply("hi")[-1] == chat[0].end_id


def test_sampled_tokens_are_kept_although_the_tokenizer_would_have_cut_the_text_otherwise(
    chat: tuple[ChatRenderer, str],
) -> None:
    """A model may sample the same text as other tokens: nothing that follows depends on them."""
    renderer, _ = chat
    letters = tuple(token for letter in "which day" for token in renderer.reply(letter)[:-1])
    assert letters != renderer.reply("which day")[:-1]
    prompt = renderer.first(MESSAGES[:1])
    turn = Turn(
        prompt,
        (*letters, renderer.end_id),
        (-1.0,) * (len(letters) + 1),
        (0,) * (len(letters) + 1),
        Finish.STOP,
        "which day",
    )
    assert renderer.next([MESSAGES[2]], turn.token_ids) == renderer.next(
        [MESSAGES[2]], sampled(renderer, prompt, "which day").token_ids
    )


def test_the_booking_world_as_words(tmp_path: Path) -> None:
    tiny_model.word_tokenizer(booking.words()).save_pretrained(tmp_path)
    chat = ChatRenderer(str(tmp_path))
    assert stream(chat, MESSAGES) == chat.first(MESSAGES)
    assert chat.tokenizer.unk_token_id not in chat.first(MESSAGES)
    assert chat.tokenizer.decode(chat.reply(MESSAGES[3].content), skip_special_tokens=True) == MESSAGES[3].content


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}", "drops or changes"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "does not end an assistant message"),
        (
            "{% for m in messages if m.role == 'assistant' %}{{ raise_exception('no replies') }}{% endfor %}",
            r"fails \(no replies\)",
        ),
    ],
)
def test_a_template_that_cannot_append_is_refused(tmp_path: Path, template: str, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"model.path={tmp_path}: .*{fault}"):
        renderer(tmp_path, template)


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        renderer(tmp_path, "")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model.path={tmp_path}: no tokenizer.json there; save the tokenizer again"):
        ChatRenderer(str(tmp_path))


TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SCHEMA = {"type": "function", "function": {"name": "calculator", "description": "computes", "parameters": {}}}


def test_the_prompt_tells_of_tools_and_their_answers_are_appended(tmp_path: Path) -> None:
    chat = ChatRenderer(str(renderer(tmp_path, TOOLS).model_path), [SCHEMA])
    prompt = chat.first([Message("user", "x")])
    assert "calculator" in chat.tokenizer.decode(prompt)
    appended = chat.next([Message("tool", "42"), Message("tool", "43")], sampled(chat, prompt, "call").token_ids)
    shown = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>tool\n43<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert chat.tokenizer.decode(appended) == shown


def test_a_template_that_knows_no_tools_is_refused(tmp_path: Path) -> None:
    folder = str(renderer(tmp_path, QWEN).model_path)
    with pytest.raises(ValueError, match=r"does not show rollout\.tools to the policy"):
        ChatRenderer(folder, [SCHEMA])


def test_a_template_that_shows_no_answers_of_tools_is_refused(tmp_path: Path) -> None:
    folder = str(
        renderer(tmp_path, TOOLS.replace("in messages %}", "in messages if message.role != 'tool' %}")).model_path
    )
    with pytest.raises(ValueError, match="drops a tool message"):
        ChatRenderer(folder, [SCHEMA])


def test_a_template_that_drops_a_later_reply_is_refused_with_it(tmp_path: Path) -> None:
    chat = renderer(tmp_path, QWEN.replace("in messages %}", "in messages[:3] %}"))
    turns = [sampled(chat, chat.first(MESSAGES[:1]), MESSAGES[at].content) for at in (1, 3)]
    chat.prompt_without_thoughts(MESSAGES[:3], turns[:1])
    with pytest.raises(ValueError, match="drops or changes assistant messages; give one that appends turns"):
        chat.prompt_without_thoughts(MESSAGES, turns)


def test_a_long_reason_for_a_tokenizer_that_cannot_be_read_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError("y" * 1000)

    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(chat_template, "_tokenizer", fails)
    with pytest.raises(ValueError, match=rf"its tokenizer cannot be read \(OSError: {'y' * 291}\); save the tokenizer"):
        ChatRenderer(str(tmp_path))


def test_a_template_may_open_the_thought(tmp_path: Path) -> None:
    for name, template, opens in (("a", TOOLS, True), ("b", QWEN, False)):
        chat = renderer(tmp_path / name, template)
        assert chat.opens_thought(chat.first([Message("user", "x <think>")])) == opens


def test_a_prompt_without_thoughts_has_the_answers_own_tokens(tmp_path: Path) -> None:
    """Unless the tokens after the thought begin inside of the answer's text; control tokens of new messages count."""
    chat = renderer(tmp_path, QWEN)
    chat.tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    chat.thought_end = chat.tokenizer.convert_tokens_to_ids("</think>")
    question, more = Message("user", "SAMPLED7REPLY <|im_end|> ?"), Message("user", "<|im_end|> thanks .")
    messages = [question, Message("assistant", "which day"), more]
    prompt = chat.first([question])
    split = (*chat.tokens("w"), *chat.tokens("hich day"))  # as no text is tokenized
    for answer, kept in (((*chat.tokens("\n\n"), *split), split), ((*chat.tokens("\n\n which day"),), None)):
        chat.counters.clear()
        tokens = (*chat.tokens("hm"), chat.thought_end, *answer, chat.end_id)
        text = "hm</think>" + chat.tokenizer.decode(answer)
        turn = Turn(prompt, tokens, (-1.0,) * len(tokens), (0,) * len(tokens), Finish.STOP, text)
        rerendered = chat.prompt_without_thoughts(messages, [turn])
        shown = chat.tokens("which day") if kept is None else kept
        assert rerendered == prompt + shown + chat.next([more], shown)
        assert chat.counters["control_tokens_as_text"] == 2, "once in each rendering of the message"


def test_a_prompt_of_a_few_tokens_may_open_the_thought(tmp_path: Path) -> None:
    chat = renderer(tmp_path, QWEN)
    assert chat.opens_thought(chat.tokens("<think>\n")) and not chat.opens_thought(chat.tokens("think\n"))


def thinker(folder: Path, template: str, *special: str) -> ChatRenderer:
    """A renderer of one token per word, `special` included; every other word is the unknown token."""
    tokenizer = tiny_model.word_tokenizer(["x"])
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ChatRenderer(str(folder))


def test_the_end_of_a_thought_is_known_only_as_a_token_of_its_own(tmp_path: Path) -> None:
    single = thinker(tmp_path / "single", tiny_model.CHAT_TEMPLATE, "</think>")
    assert single.thought_end == single.tokenizer.convert_tokens_to_ids("</think>")
    assert thinker(tmp_path / "unknown", tiny_model.CHAT_TEMPLATE).thought_end is None
    assert renderer(tmp_path / "bytes", QWEN).thought_end is None, "several tokens"


def test_a_thinking_budget_needs_a_token_that_ends_thoughts(tmp_path: Path) -> None:
    budget = RolloutConfig(future=SamplingConfig(thinking_budget=8))
    thinker(tmp_path / "single", tiny_model.CHAT_TEMPLATE, "</think>").check_thinking(
        budget.turn, budget.future, budget.strip_thoughts
    )
    without_token = thinker(tmp_path / "unknown", tiny_model.CHAT_TEMPLATE)
    without_token.check_thinking(SamplingConfig(), SamplingConfig(), strip_thoughts=False)
    with pytest.raises(
        ConfigError, match=r"rollout\.future\.thinking_budget=8: the tokenizer of .* has no token </think>"
    ):
        without_token.check_thinking(budget.turn, budget.future, budget.strip_thoughts)


def test_enable_thinking_is_refused_for_a_template_without_it(tmp_path: Path) -> None:
    silent = RolloutConfig(turn=SamplingConfig(enable_thinking=False))
    renderer(tmp_path / "thinking", THINKING).check_thinking(silent.turn, silent.future, silent.strip_thoughts)
    with pytest.raises(ConfigError, match=r"rollout\.turn\.enable_thinking: the chat template of .* does not use it"):
        renderer(tmp_path / "plain", QWEN).check_thinking(silent.turn, silent.future, silent.strip_thoughts)


STRICT = (
    "{% for m in messages %}"
    "{% if m.role != ('assistant' if loop.index0 % 2 else 'user') %}{{ raise_exception('roles alternate') }}{% endif %}"
    "{% if m.content is not string %}{{ raise_exception('no content') }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)


def test_a_template_that_demands_alternating_roles_and_contents_renders(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(300)
    tokenizer.chat_template = STRICT
    tokenizer.save_pretrained(tmp_path)
    render_once(str(tmp_path), "user.model")
    tokenizer.chat_template = "{{ raise_exception('too old') }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"user.model={tmp_path}: its chat template fails \(too old\); fix it"):
        render_once(str(tmp_path), "user.model")


# The form of Qwen3's: earlier turns lose their thoughts, and an empty one may open the next.
THINKING = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif -%}"
    "{% endif %}"
)


def test_arguments_of_the_template_change_the_prompt_and_turns_are_still_appended(tmp_path: Path) -> None:
    plain, silent = renderer(tmp_path, THINKING), renderer(tmp_path, THINKING, (), {"enable_thinking": False})
    opened, prompt = plain.first(MESSAGES[:1]), silent.first(MESSAGES[:1])
    empty = plain.tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
    assert prompt == (*opened, *empty) and not silent.opens_thought(prompt)
    whole = stream(silent, MESSAGES)
    assert whole[: len(prompt)] == prompt and whole[-len(empty) :] == tuple(empty)
    # What was sampled is never rendered again: the empty thoughts of earlier turns stay, which the template would drop.
    shown = silent.tokenizer.decode(whole)
    assert shown.count("<think>\n\n</think>\n\n") == 3
    assert shown.replace("<think>\n\n</think>\n\n", "") == plain.tokenizer.decode(plain.first(MESSAGES))
    turn = sampled(silent, prompt, "which day and what time ?")
    assert (*prompt, *turn.token_ids, *silent.next(MESSAGES[2:3], turn.token_ids)) == stream(silent, MESSAGES[:3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"enable_thinkin": False},
            "model.chat_template_args.enable_thinkin: the chat template of .* does not use it; the nearest is "
            "enable_thinking; remove it",
        ),
        ({"messages": []}, "model.chat_template_args.messages: is set by the run itself; remove it"),
        ({"tools": []}, "model.chat_template_args.tools: is set by the run itself; remove it"),
    ],
)
def test_arguments_that_change_nothing_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        renderer(tmp_path, THINKING, (), arguments)


def test_a_system_prompt_stands_in_front_once_and_never_twice(tmp_path: Path) -> None:
    plain, prompted = renderer(tmp_path, QWEN), renderer(tmp_path, QWEN, (), {}, "Be brief.")
    system = Message("system", "Be brief.")
    assert prompted.first(MESSAGES[:1]) == plain.first([system, *MESSAGES[:1]]) != plain.first(MESSAGES[:1])
    with_system = [Message("system", "Be long."), *MESSAGES[:1]]
    assert prompted.first(with_system) == plain.first(with_system)
    assert prompted.first([system, *MESSAGES[:1]]) == prompted.first(MESSAGES[:1])
    assert stream(prompted, MESSAGES) == plain.first([system, *MESSAGES]), "later turns have none"


def test_supervised_training_sees_the_prompt_of_rollouts(tmp_path: Path) -> None:
    (tmp_path / "system.j2").write_text("Be brief.\n")
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": [message.as_dict() for message in MESSAGES[:2]]}])
    config = Config()
    config.model.path, config.data.train = str(tmp_path), str(tmp_path / "rows.jsonl")
    config.model.chat_template_args = {"enable_thinking": False}
    config.rollout.system_prompt, config.train.prompts_per_step = str(tmp_path / "system.j2"), 1
    config.run.dir, config.train.stage = str(tmp_path / "run"), "sft"
    plain = renderer(tmp_path, THINKING)
    (sample,) = SupervisedData(data_spec(config)).batch(0).samples
    prompt = prompt_spec(config).renderer().first(MESSAGES[:1])
    assert (*prompt, *plain.reply(MESSAGES[1].content)) == tuple(sample.token_ids)
    shown = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nplease book"
    assert plain.tokenizer.decode(prompt).startswith(shown)
    assert sample.loss_mask.sum() == len(plain.reply(MESSAGES[1].content))


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (
            QWEN.replace("message in messages", "message in messages if message.role != 'system'"),
            "drops a system message from system, user",
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + LLAMA,
            r"refuses messages of the roles system, user \(no system role\)",
        ),
    ],
)
def test_a_template_that_shows_no_system_prompt_is_refused(tmp_path: Path, template: str, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^rollout.system_prompt: model.path=.*: its chat template {fault}"):
        renderer(tmp_path, template, (), {}, "Be brief.")


def test_a_tokenizer_is_loaded_once_a_process_unless_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data and rollouts each have a renderer."""
    tokenizer = byte_level_tokenizer(300)
    tokenizer.save_pretrained(tmp_path)
    load, loaded = PreTrainedTokenizerFast.from_pretrained, []

    def counted(folder: Path, **options: Any) -> Any:
        loaded.append(folder)
        return load(folder, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", counted)
    first, second = (ChatRenderer(str(tmp_path), system=system).first(MESSAGES[:1]) for system in ("", "be brief"))
    assert loaded == [tmp_path] and len(second) > len(first)
    tokenizer.chat_template = f"{tokenizer.chat_template}{{# another #}}"
    tokenizer.save_pretrained(tmp_path)
    ChatRenderer(str(tmp_path))
    assert loaded == [tmp_path] * 2


ODD = {
    "loops": ("{% for a in range(99999) %}{% for b in range(999) %}{% endfor %}{% endfor %}", "takes more than 0.2 s"),
    "repeats": ("{{ 'x' * 10**9 }}", "computes a value of more than 16777216 characters"),
    "grows": ("{{ message.content.replace('d', message.content * 9999) }}", "computes a value of more than"),
    "writes": ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "gives too many characters"),
    "recurs": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion depth exceeded"),
}


@pytest.mark.parametrize(("part", "reason"), ODD.values(), ids=ODD.keys())
def test_a_rendering_is_bounded(tmp_path: Path, part: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template is good for every message but one."""
    monkeypatch.setattr(bounded_jinja, "SECONDS", 0.2)
    odd = f"{{% if message.content == 'odd' * 999 %}}{part}{{% endif %}}"
    chat = renderer(tmp_path, QWEN.replace("{{ message.content }}", odd + "{{ message.content }}"))
    assert odd in str(chat.tokenizer.chat_template)
    messages, message = MESSAGES[:1], Message("user", "odd" * 999)
    turn, plain = sampled(chat, chat.first(messages), "ok"), chat.first(messages)
    for render in (
        lambda: chat.first([message]),
        lambda: chat.next([message], turn.token_ids),
        lambda: chat.prompt_without_thoughts([*messages, Message("assistant", "ok"), message], [turn]),
    ):
        with pytest.raises(ValueError) as refused:
            render()
        line = str(refused.value)
        assert f"model.path={tmp_path}: its chat template fails ({reason}" in line and "\n" not in line
        assert line.endswith("; fix it, or give another model")
    assert chat.first(messages) == plain, "the process lives"


def test_a_constant_of_a_template_is_bounded_as_well() -> None:
    """Jinja computes constant expressions when it compiles a template, unless its environment bounds them."""
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimit, match="computes a value of more than"):
            _bounded_template("{{ 'x' * 10**8 }}").render({})
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_a_row_that_the_template_cannot_render_stops_supervised_training(tmp_path: Path) -> None:
    template = QWEN.replace("{{ message.content }}", "{{ message.content * (1 + 9**9 * (message.content == 'odd')) }}")
    config = Config()
    config.model.path = renderer(tmp_path / "model", template).model_path
    config.train.stage, config.train.prompts_per_step, config.run.dir = "sft", 1, str(tmp_path / "run")
    rows = [[Message("user", text), Message("assistant", "ok")] for text in ("hi", "odd")]
    write_jsonl(tmp_path / "d.jsonl", [conversation_row(messages) for messages in rows])
    config.data.train = str(tmp_path / "d.jsonl")
    data = SupervisedData(data_spec(config))
    with pytest.raises(RunStopped, match=r"^model\.path=.*: its chat template fails \(computes a value"):
        for step in range(2):
            data.batch(step)


def test_private_notes_of_users_are_not_rendered(chat: tuple[ChatRenderer, str]) -> None:
    noted = [replace(message, private={"thought": "a secret"}) for message in MESSAGES]
    assert chat[0].first(noted) == chat[0].first(MESSAGES)
    assert stream(chat[0], noted) == stream(chat[0], MESSAGES)
