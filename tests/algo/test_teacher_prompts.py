"""What a teacher reads: the same trained tokens behind prompts that begin with what only the teacher is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_collab.algo.credit import CreditSpec, samples_of
from megatron_collab.algo.teacher_prompts import TeacherPrompts, lacks
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.environments import tiny_model
from megatron_collab.reward.multiturn import reward_function
from megatron_collab.settings import AlgoConfig, TrainingRewardConfig, TrainingRolloutConfig
from megatron_collab.settings.schema import TeacherConfig
from megatron_collab.types import Conversation, Finish, Future, Group, Message, Reward, Rollout, Task, Turn

WORDS = ["hi", "which", "day", "friday", "monday", "booked", "table", "note", "thanks", "for", "a"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = tmp_path_factory.mktemp("words")
    tiny_model.word_tokenizer(WORDS).save_pretrained(folder)
    return ChatRenderer(str(folder))


@pytest.fixture
def note(tmp_path: Path) -> str:
    (tmp_path / "note.j2").write_text("note {{ goal }}{{ answer }}{{ next_message }}\n")
    return str(tmp_path / "note.j2")


TASK = Task("t", (Message("system", "for a table"), Message("user", "hi")), "friday", "monday", "scripted/x")


def play(renderer: ChatRenderer, replies: Sequence[str], messages: Sequence[str], task: Task = TASK) -> Conversation:
    """A conversation in which the policy gives `replies`, and the user says `messages` between them."""
    result = Conversation(task.messages, renderer.first(task.messages))
    for number, reply in enumerate(replies):
        ids = renderer.reply(reply)
        turn = Turn(result.token_ids, ids, (-1.0,) * len(ids), (0,) * len(ids), Finish.STOP, reply)
        result = result.add_turn(turn)
        if number < len(messages):
            message = [Message("user", messages[number])]
            result = result.add_messages(message, renderer.next(message, ids))
    return result


def group_of(renderer: ChatRenderer) -> Group:
    """Two rollouts of a trained turn: to the first users answer once and twice, to the second nobody does."""
    start = play(renderer, ["which day"], [])
    futures = [
        play(renderer, ["which day", "booked monday"], ["monday"]),
        play(renderer, ["which day", "booked friday", "thanks"], ["friday", "thanks"]),
    ]
    over = play(renderer, ["booked monday"], []).end("user_done")
    return Group(
        TASK,
        (
            Rollout(start, tuple(Future(future, {"right": 1.0}) for future in futures), Reward(1.0)),
            Rollout(over, (Future(over, {"right": 0.0}),), Reward(0.0)),
        ),
    )


def read(
    renderer: ChatRenderer, group: Group, context: str, note: str, longest: int = 1000, **rollout: object
) -> tuple[list[list[str]], TeacherPrompts]:
    """Per sample of the group, the texts of the sequences that the teacher reads, trained tokens in brackets."""
    spec = CreditSpec(AlgoConfig(), TrainingRewardConfig(), TrainingRolloutConfig(**rollout))
    formula = reward_function("mr", {}, {"right": 1.0}, {})
    prompts = TeacherPrompts(TeacherConfig(1.0, context=context, prompt=note), renderer, None, longest)
    texts = []
    for sample in samples_of(group, spec, 0, formula):
        view = prompts.with_view(sample, group).teacher_view
        assert view is not None
        trained = sample.token_ids[sample.loss_mask > 0]
        np.testing.assert_array_equal(view.token_ids[view.loss_mask > 0], trained)
        rows = zip(*(np.split(values, view.cuts) for values in (view.token_ids, view.loss_mask)), strict=True)
        decode = renderer.tokenizer.convert_ids_to_tokens
        texts.append([" ".join(f"[{t}]" if m else t for t, m in zip(decode(i), k, strict=True)) for i, k in rows])
    return texts, prompts


BEGIN = "<|system|> for a table {}<|end|> <|user|> hi <|end|> <|assistant|>"


def test_the_goal_is_told_in_the_system_message(renderer: ChatRenderer, note: str) -> None:
    texts, prompts = read(renderer, group_of(renderer), "goal", note)
    begin = BEGIN.format("note friday ")
    assert texts == [[f"{begin} [which] [day] [<|end|>]"], [f"{begin} [booked] [monday] [<|end|>]"]]
    assert prompts.take_metrics() == {"teacher/informed": 1.0} and prompts.take_metrics() == {}


def test_the_next_message_is_that_of_the_longest_future(renderer: ChatRenderer, note: str) -> None:
    """If nothing follows, the teacher reads what the policy did."""
    texts, prompts = read(renderer, group_of(renderer), "next_message", note)
    informed, plain = BEGIN.format("note friday "), BEGIN.format("")
    assert texts == [[f"{informed} [which] [day] [<|end|>]"], [f"{plain} [booked] [monday] [<|end|>]"]]
    assert prompts.take_metrics() == {"teacher/informed": 0.5}


def test_later_turns_are_told_too(renderer: ChatRenderer, note: str) -> None:
    """A turn that continues the one before shares its sequence, unless it is told something else."""
    question, between = "which day <|end|>", "<|user|> friday <|end|> <|assistant|>"
    texts, _ = read(renderer, group_of(renderer), "answer", note, train_turns="all", futures=2)
    booked = "[booked] [friday] [<|end|>] <|user|> thanks <|end|> <|assistant|> [thanks] [<|end|>]"
    assert texts[-1] == [f"{BEGIN.format('note monday ')} {question} {between} {booked}"]
    texts, prompts = read(renderer, group_of(renderer), "next_message", note, train_turns="all", futures=2)
    last = "booked friday <|end|> <|user|> thanks <|end|> <|assistant|> [thanks] [<|end|>]"
    assert texts[-1] == [
        f"{BEGIN.format('note thanks ')} {question} {between} [booked] [friday] [<|end|>]",
        f"{BEGIN.format('')} {question} {between} {last}",
    ]
    assert prompts.take_metrics() == {"teacher/informed": pytest.approx(2 / 5)}


def test_whole_conversations_have_a_sequence_for_each_message(renderer: ChatRenderer, note: str) -> None:
    both = [play(renderer, ["which day", "booked"], ["friday", "thanks"]), play(renderer, ["which", "day"], ["monday"])]
    rollouts = [Rollout(talk.end("turn_limit"), (Future(talk, {"right": 1.0}),), Reward(1.0)) for talk in both]
    texts, _ = read(renderer, Group(TASK, tuple(rollouts)), "next_message", note, futures=0)
    assert [len(sequences) for sequences in texts] == [2, 2]
    assert texts[0][1].startswith(BEGIN.format("note thanks ")) and "note" not in texts[1][1]


def test_what_is_too_long_is_not_told(renderer: ChatRenderer, note: str) -> None:
    texts, prompts = read(renderer, group_of(renderer), "goal", note, longest=12)
    assert texts[0] == [f"{BEGIN.format('')} [which] [day] [<|end|>]"]
    assert prompts.take_metrics() == {"teacher/informed": 0.0}


def test_what_tasks_lack() -> None:
    bare = Task("t", (Message("user", "hi"),), "", "", "x")
    assert [lacks(context, bare) for context in ("goal", "answer", "next_message")] == ["a goal", "an answer", None]
    assert lacks("goal", TASK) is None


def test_the_built_in_prompt_tells_one_thing(renderer: ChatRenderer) -> None:
    prompt = TeacherPrompts(TeacherConfig(1.0, context="goal"), renderer, None, 1000)._prompt
    for name, begin in {"goal": "The user will", "answer": "The right result", "next_message": "After your"}.items():
        text = prompt.render(**{"goal": "", "answer": "", "next_message": ""} | {name: "SECRET"}).strip()
        assert text.startswith(begin) and "\n\nSECRET\n\n" in text
