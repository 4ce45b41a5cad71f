"""Plays the desk world in text by a policy of its recursion, and states the rules of its users a second time."""

from __future__ import annotations

import random

from megatron_collab.environments import desk, desk_language, desk_user
from megatron_collab.environments.desk_language import MODEL, VALUES
from megatron_collab.environments.desk_model import DeskModel, DeskReply, after
from megatron_collab.environments.desk_optimum import DeskGame, DeskPolicy
from megatron_collab.types import Conversation, Message, Task
from tests.reward.fakes import play


def play_out(game: DeskGame, policy: DeskPolicy, task: Task, seed: str) -> Conversation:
    """The conversation about `task`; the policy's belief follows from what the user's texts show."""
    rng = random.Random(seed)
    goal = desk_user.read_goal(task.goal)
    messages, texts = list(task.messages), list[str]()
    state, belief = desk.state_of(goal, messages), game.prior
    while True:
        actions = policy(state, belief)
        action = rng.choices(list(actions), list(actions.values()))[0]
        unknown = desk_user.unknown(goal, messages)
        if action is None:
            known = desk_language.heard(messages).values
            guess = {slot: known.get(slot, VALUES[slot][0]) for slot in goal.values}
            return play(task, *texts, desk_language.final(guess))
        slots = rng.sample([slot for slot in unknown if slot in MODEL.open], action.open)
        slots += rng.sample([slot for slot in unknown if slot in MODEL.guessable], action.guessable)
        question = Message("assistant", desk_language.ask(slots))
        answer = Message("user", desk_user.reply(goal, [*messages, question], seed))
        texts += [question.content, answer.content]
        if desk_language.STOP in answer.content:
            return play(task, *texts)
        before = desk_language.heard(messages).values
        messages += [question, answer]
        now = desk_language.heard(messages).values
        stated, back = [slot for slot in slots if slot in now], [slot for slot in before if slot not in now]
        open_, back_open = (sum(slot in MODEL.open for slot in part) for part in (stated, back))
        first_only = stated == slots[:1]
        reply = DeskReply(len(stated) - open_, open_, first_only, len(back) - back_open, back_open)
        belief = game.update(belief, game.likelihoods(state, action)[reply])[1]
        state = after(state, reply)
        assert state[:2] == desk.state_of(goal, messages)[:2]


def answers(
    model: DeskModel, user: str, slots: tuple[str, ...], answered: frozenset[str], turn: int
) -> dict[tuple[frozenset[str], str], float]:
    """Chances of what is stated and the slot that is taken back; a user who left is not among them."""
    every = frozenset(slots)
    if user == "first":
        return {(frozenset(slots[:1]), ""): 1.0}
    if user == "vague":
        subsets = [frozenset(slot for i, slot in enumerate(slots) if bits >> i & 1) for bits in range(2 ** len(slots))]
        return {(part, ""): model.answers ** len(part) * (1 - model.answers) ** len(every - part) for part in subsets}
    if user == "changes" and answered:
        share = model.changes / len(answered)
        return {(every, ""): 1 - model.changes, **{(every, slot): share for slot in answered}}
    if user == "leaves":
        return {(every, ""): 1 - min(0.9, model.leaves_by_question * len(slots) + model.leaves_by_turn * turn)}
    return {(every, ""): 1.0}
