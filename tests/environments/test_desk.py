"""Tasks and conversations of the desk world, and what training must not show."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron_collab import environments
from megatron_collab.config import compose
from megatron_collab.data.chat_template import ChatRenderer
from megatron_collab.data.evaluation import evaluation_sets
from megatron_collab.data.examples import load_conversations, load_tasks
from megatron_collab.environments import desk, desk_language, desk_user
from megatron_collab.environments.desk_language import GRAMMAR, HELD_OUT, KINDS, MODEL, TRAINED
from megatron_collab.environments.desk_optimum import OPTIMAL, DeskPredictions
from megatron_collab.environments.desk_user import DeskGoal
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.settings import ConfigError
from megatron_collab.types import Message, Task

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "desk.md"
COSTS = [0.02, 0.2, 0.4, 0.8]  # of experiment=desk_costs


@cache
def training() -> list[Task]:
    return desk.tasks(0, 1024)


@cache
def evaluated() -> dict[str, list[Task]]:
    return {split: desk.tasks(0, desk.EVALUATED, split) for split in desk.SPLITS}


@cache
def supervised() -> list[tuple[Message, ...]]:
    return desk.conversations(0, 1024)


def goals(tasks: list[Task]) -> list[DeskGoal]:
    return [desk_user.read_goal(task.goal) for task in tasks]


def values_of(goal: DeskGoal) -> tuple:
    return goal.kind, *sorted(goal.values.items())


def test_tasks_come_from_their_seed() -> None:
    assert desk.tasks(1, 50) == desk.tasks(1, 50) != desk.tasks(2, 50)
    assert desk.tasks(1, 50, desk.GOALS) == desk.tasks(1, 80, desk.GOALS)[:50]
    assert desk.conversations(1, 50) == desk.conversations(1, 50) != desk.conversations(2, 50)


def test_each_set_holds_out_one_thing() -> None:
    trained = goals(training())
    kinds, users = {goal.kind for goal in trained}, {goal.user for goal in trained}
    assert len(kinds) == 38 and users == set(MODEL.seen_users) and {goal.phrasing for goal in trained} == {TRAINED}
    known = {values_of(goal) for goal in trained}
    for split, tasks in evaluated().items():
        held_out = goals(tasks)
        assert (
            not kinds & {goal.kind for goal in held_out}
            if split == desk.REQUESTS
            else kinds >= {goal.kind for goal in held_out}
        )
        assert {goal.user for goal in held_out} == set(MODEL.unseen_users if split == desk.PEOPLE else MODEL.seen_users)
        assert {goal.phrasing for goal in held_out} == {HELD_OUT if split == desk.PHRASINGS else TRAINED}
        shared = sum(values_of(goal) in known for goal in held_out) / len(held_out)
        assert shared == 0 if split in (desk.GOALS, desk.REQUESTS) else shared > 0.5, (split, shared)


def test_supervised_conversations_show_no_phrasing_or_kind_of_request_that_is_held_out() -> None:
    kinds = {" ".join(kind) for kind in desk.kinds(held_out=True)}
    texts = [" ".join(message.content for message in messages) for messages in supervised()]
    assert not [text for text in texts for kind in kinds if re.search(f"{kind.replace(' ', ' (my|the|this) ')} ", text)]
    for production in GRAMMAR["statement"][HELD_OUT]:
        pattern = re.compile(r"\b" + production.format(slot="(item|date|plan|region)", value="(lamp|monday|pro|asia)"))
        assert not [text for text in texts if pattern.search(text)]
        assert [task for task in evaluated()[desk.PHRASINGS] if pattern.search(task.messages[0].content)]


def test_users_of_supervised_conversations_state_no_held_out_goal() -> None:
    """Goals are read from conversations whose user has stated everything. Guesses of the rest are random."""
    complete = 0
    for messages in supervised():
        values = desk_language.heard(messages).values
        kind = next(kind for kind in KINDS if set(kind) <= set(messages[0].content.split()))
        if set(values) == set(desk_language.needed(kind)):
            complete += 1
            assert not desk.is_held_out(kind, values)
    assert complete > 100


def test_every_second_evaluated_task_is_complete_with_all_users() -> None:
    for tasks in evaluated().values():
        assert all(len(task.messages) == 1 for task in tasks)
        complete = [not desk_user.unknown(goal, task.messages) for goal, task in zip(goals(tasks), tasks, strict=True)]
        assert complete == [True, False] * 512
        assert len(set(Counter(goal.user for goal in goals(tasks)).values())) == 1


def test_each_action_topic_and_value_occurs_in_training() -> None:
    text = " ".join(message.content for task in training() for message in task.messages)
    words = {
        *desk_language.ACTIONS,
        *desk_language.TOPICS,
        *(v for slot in MODEL.slots for v in desk_language.VALUES[slot]),
    }
    assert words <= set(text.split())


def test_guessable_slots_keep_their_chances_in_training() -> None:
    values = [goal.values for goal in goals(training())]
    likeliest = [
        goal[slot] == desk_language.VALUES[slot][0] for goal in values for slot in MODEL.guessable if slot in goal
    ]
    assert 0.93 < sum(likeliest) / len(likeliest) < 0.97


def test_a_fifth_of_the_training_tasks_begins_later_and_none_ends() -> None:
    later = [task for task in training() if len(task.messages) == 3]
    assert 0.15 < len(later) / len(training()) < 0.27
    assert all(task.messages[-1].role == "user" for task in training())
    assert not any(desk_language.STOP in task.messages[-1].content for task in training())


def test_the_supervised_conversations_guess_more_often_than_they_ask() -> None:
    asks = sum(len(messages) > 2 for messages in supervised()) / len(supervised())
    assert 0.15 < asks < 0.35
    ends = [messages[-1].content for messages in supervised()]
    assert sum(map(desk_language.is_final, ends)) / len(ends) > 0.95
    assert all(desk_language.guess(text) or desk_language.slots_asked(text) for text in ends)


def test_every_word_is_in_the_vocabulary() -> None:
    words = set(desk_language.words())
    assert len(words) < 100
    texts = [message.content for messages in supervised() for message in messages]
    texts += [
        message.content for tasks in (training(), *evaluated().values()) for task in tasks for message in task.messages
    ]
    assert words.issuperset(" ".join(texts).split())


@pytest.mark.processes
def test_the_world_is_a_model_data_and_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for size in ("TASKS", "CONVERSATIONS"):
        monkeypatch.setattr(desk, size, 40)
    with caplog.at_level("INFO"):
        desk.Desk(desk.DeskOptions(evaluated=40)).make(tmp_path, 3, None)
    assert desk.predictions(3, number=40) == (tmp_path / "predictions.md").read_text() and "| optimal |" in caplog.text
    rows = json.loads((tmp_path / "predictions_0.20.json").read_text())
    assert rows["answers now"]["goals/desk_questions"] == 0
    for values in rows.values():
        cost = 0.2 * values["users/desk_questions"]
        assert values["users/desk_utility"] == pytest.approx(values["users/desk_right"] - cost)
        assert values["users/desk_utility"] == pytest.approx((1 + values["users/desk_utility_incomplete"]) / 2)
    assert list(load_tasks(tmp_path / "train.jsonl")) == desk.tasks(3, 40)
    for split in desk.SPLITS:
        assert list(load_tasks(tmp_path / f"{split}.jsonl")) == desk.tasks(3, 40, split)
    chat = ChatRenderer(str(tmp_path / "model"))
    conversations = load_conversations(tmp_path / "sft.jsonl")
    assert len(conversations) == 40
    ids = [token for messages in supervised() for token in chat.first(messages)]
    assert max(len(chat.first(messages)) for messages in supervised()) < desk.CONTEXT * 0.7
    assert chat.tokenizer.unk_token_id not in ids


def test_the_experiment_plays_and_scores_what_is_predicted() -> None:
    config = compose(["experiment=desk", "reward.metrics.desk_utility.cost=0.2"])
    assert (config.rollout.max_user_turns, config.rollout.max_assistant_turns) == (MODEL.turns, MODEL.turns + 1)
    metrics = reward_spec(config.reward).metrics
    assert metrics["desk_utility"].options.cost == metrics["desk_utility_incomplete"].options.cost == 0.2
    assert [source["source"].rpartition("/")[2] for source in config.data.eval] == [f"{s}.jsonl" for s in desk.SPLITS]
    names = {name.partition("/") for name in desk.Desk.result_names.values()}
    assert {name[0] for name in names} == {desk.GOALS} and {name[2] for name in names} <= metrics.keys()


def test_tasks_state_the_cost_of_a_question() -> None:
    priced, free = desk.with_costs(training(), COSTS), [desk_language.cost(cost) for cost in COSTS]
    pairs = list(zip(training(), priced, goals(priced), strict=True))
    for task, stated, goal in pairs:
        assert stated.messages[0].content == f"{task.messages[0].content} {desk_language.cost(goal.cost)}"
        assert (stated.id, stated.messages[1:], stated.answer) == (task.id, task.messages[1:], task.answer)
        assert desk_language.heard(stated.messages) == desk_language.heard(task.messages)
        assert goal == replace(desk_user.read_goal(task.goal), cost=goal.cost)
    for complete in (True, False):  # the cost is drawn apart from all else
        counts = Counter(
            goal.cost for task, _, goal in pairs if complete == (not desk_user.unknown(goal, task.messages))
        )
        assert counts.keys() == set(COSTS) and min(counts.values()) > 0.7 * max(counts.values())
    assert desk.with_costs(training(), ()) == training()
    examples = desk.conversations(0, 400, COSTS)
    assert {messages[0].content.rpartition(desk_language.COST)[2] for messages in examples} == {
        sentence.removeprefix(desk_language.COST) for sentence in free
    }
    assert [messages[1:] for messages in examples] == [messages[1:] for messages in desk.conversations(0, 400)]


@pytest.mark.seconds
def test_a_world_with_costs_has_an_evaluation_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("TASKS", "CONVERSATIONS"):
        monkeypatch.setattr(desk, size, 12)
    desk.Desk(desk.DeskOptions([0.5, 0.8], evaluated=12)).make(tmp_path, 0, None)
    assert "| cost | utility of the optimal policy |" in (tmp_path / "predictions.md").read_text()
    chat = ChatRenderer(str(tmp_path / "model"))
    for name, cost in (("goals_0.5", 0.5), ("goals_0.8", 0.8)):
        stated = list(load_tasks(tmp_path / f"{name}.jsonl"))
        assert stated == desk.with_costs(desk.tasks(0, 12, desk.GOALS), [cost])
        assert {goal.cost for goal in goals(stated)} == {cost}
        assert all(chat.tokenizer.unk_token_id not in chat.first(task.messages) for task in stated)
    assert {goal.cost for goal in goals(list(load_tasks(tmp_path / "train.jsonl")))} == {0.5, 0.8}
    assert all(desk_language.COST in messages[0].content for messages in load_conversations(tmp_path / "sft.jsonl"))


@pytest.mark.parametrize(
    "options", [{"costs": [0.1, 0.1000001]}, {"costs": [-0.1]}, {"costs": [math.nan]}, {"cost": [0.1]}, {"costs": 0.1}]
)
def test_costs_that_cannot_be_stated_are_refused(options: dict, tmp_path: Path) -> None:
    config = compose(["experiment=desk", f"data.dir={tmp_path}/world"])
    config.data.world_options = options
    with pytest.raises(ConfigError, match=r"^data\.world_options\.cost"):
        environments.prepare(config.data, config.run.seed)
    assert not (tmp_path / "world").exists()


@pytest.mark.seconds
def test_the_experiment_with_costs_evaluates_at_each() -> None:
    config, sft = (compose([f"experiment=desk_costs{stage}"]) for stage in ("", "_sft"))
    assert config.data.world_options == sft.data.world_options == {"costs": COSTS}
    assert config.data.dir == sft.data.dir != compose(["experiment=desk"]).data.dir
    names = ["goals", *(f"goals_{cost:g}" for cost in COSTS)]
    assert [eval_set.name for eval_set in evaluation_sets(config.data.eval, 1)] == names
    assert [source["source"].rpartition("/")[2] for source in config.data.eval] == [f"{name}.jsonl" for name in names]
    assert config.model.path == f"{sft.run.dir}/hf"


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_shows_what_reading_the_cost_gains() -> None:
    starts = desk.starts_of(evaluated()[desk.GOALS])
    table = desk.predictions(0, COSTS).strip().split("\n\n")[-1]
    assert table in PAGE.read_text()
    cells = [[float(cell) for cell in row.split("|")[2:6]] for row in table.splitlines()[2:]]
    assert sorted((row[1] for row in cells[:4]), reverse=True) == [row[1] for row in cells[:4]]
    assert all(row[0] >= row[3] for row in cells)
    mean = sum(COSTS) / 4
    prediction = DeskPredictions(MODEL, mean, starts, MODEL.seen_users)
    assert cells[4][3] == pytest.approx(prediction.utility(OPTIMAL, MODEL.seen_users, starts), abs=1e-3)


@pytest.mark.slow
@pytest.mark.processes
def test_the_page_shows_the_predictions_that_are_computed() -> None:
    text = PAGE.read_text()
    by_set, by_user = desk.predictions(0).strip().split("\n\n")
    assert by_set in text and "| policy | cost | all |" in by_user
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert len(re.findall(r"\w\S*", prose)) <= 800
