"""Built conversations can be read as tasks, as the best conversations and as pairs."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_collab.config import BuildDatasetConfig
from megatron_collab.data.assistants import CandidateAssistant
from megatron_collab.data.examples import load_conversations, load_pairs, load_tasks
from megatron_collab.data.preparation import Preparation
from megatron_collab.data.sources import Source
from megatron_collab.launch.spec import building_spec
from megatron_collab.synthesis.built import rows_of, write
from megatron_collab.types import (
    Conversation,
    Ending,
    Finish,
    Future,
    Group,
    Message,
    Missing,
    Reward,
    Rollout,
    Task,
    Turn,
)

BY = [CandidateAssistant("a", True), CandidateAssistant("b", False)]
TASK = Task("t7", (Message("user", "hi"),), "a table", "done : 2", "llm", {"level": 3})


def rollout(task: Task, text: str, reward: float | Missing) -> Rollout:
    start = Conversation(task.messages, ()).add_turn(Turn((), (), (), (), Finish.STOP, text))
    ended = start.add_messages([Message("user", f"to {text}")], ()).end(Ending.USER_DONE)
    scores = {"right": 1.0, "judged": Missing("down")}
    return Rollout(start, (Future(ended, scores), Future(start.end(Ending.TURN_LIMIT), scores)), Reward(reward))


def built() -> list[Group]:
    first = Group(TASK, (rollout(TASK, "how many ?", 0.9), rollout(TASK, "done : 3", 0.2)))
    later = TASK.play_on(Message("assistant", "how many ?"), Message("user", "to how many ?"))
    return [first, Group(later, (rollout(later, "done : 2", 1.0), rollout(later, "what ?", Missing("down"))))]


def test_rows_have_the_published_columns() -> None:
    rows = [*rows_of(built(), BY)]
    assert [(row["turn_id"], row["completion"], row["score"]) for row in rows] == [
        (0, "how many ?", 0.9),
        (0, "done : 3", 0.2),
        (1, "done : 2", 1.0),
    ]
    assert {(row["conv_id"], row["single_turn_prompt"], row["single_turn_completion"]) for row in rows} == {
        ("t7", "a table", "done : 2")
    }
    assert [message["content"] for message in rows[2]["prompt"]] == ["hi", "how many ?", "to how many ?"]
    assert rows[0]["sessions"] == [[{"role": "user", "content": "to how many ?"}], []]
    assert json.loads(rows[0]["rewards"]) == {"judged": [None, None], "right": [1.0, 1.0]}


def test_built_data_is_read_in_every_stage(tmp_path: Path) -> None:
    config = BuildDatasetConfig()
    config.rollout.max_messages = 14
    config.model.path, config.reward.weights, config.build.candidates = "models/small", {"right": 1.0}, 2
    config.reward.metrics = {"right": {"metric": "accuracy"}}
    play = building_spec(config).play
    assert play
    write(tmp_path, "train", [built()], play, config)
    source = Source(source=str(tmp_path))
    tasks = load_tasks(source)
    assert tasks.format == "collabllm" and tasks[0].goal == "a table" and tasks[0].metadata == {"level": 3}
    assert tasks[0].user == "llm", "who played the user"
    assert [len(task.messages) for task in tasks] == [1, 1, 3]
    assert [message.content for message in load_conversations(source)[2]][-1] == "done : 2"
    assert load_pairs(source, "SOURCE").format == "collabllm"
    (pair,) = [prepared.row for prepared in Preparation(source, "dpo", gap=0.1)]
    assert pair["chosen"][-1]["content"] == "how many ?" and pair["rejected"][-1]["content"] == "done : 3"
    card = (tmp_path / "README.md").read_text()
    assert "1 conversations, 2 turns, 3 candidates" in card
    assert "| reward of the candidates, of those that went on | 0.700, 0.950 |" in card
