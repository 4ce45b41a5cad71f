"""Prompts are files of the package; earlier results and cached answers depend on their exact texts."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config
from megatron_collab.launch.data_specs import prompt_spec
from megatron_collab.reward import metrics
from megatron_collab.rollout.users.llm import system_prompt
from megatron_collab.settings import ConfigError
from megatron_collab.settings.prompt import PROMPTS
from megatron_collab.settings.schema import UserConfig
from megatron_collab.types import Conversation, Message, Missing, Task
from tests.reward.fakes import FakeJudge, about, metric, play

# SHA-256 of the prompts for TASK and PLAYED in the last version whose prompts were not files; of `accuracy` since its
# problem and answer are in tags.
EARLIER = {
    "accuracy": "b6e810fe5391e80a3f579e445ec598e2a9d8a0246701d351de133b35b35da2e9",
    "bleu": "9361767ddfbddcc1df12bef3e8248ee1cd6ded32edffe55f4e14b3678e5cc92b",
    "holistic": "75825ed5daee97be66c8e9f50a70e7a5d660f68a9a34acd861024ddf9996b38f",
    "parts": "5cb6bfeeaf24a808e976a21865980fccdc9f770bb6d171b3342cc3886e776c30",
    "user": "e79bb8eb0b887b65d44a4e5c6e6272051a942446b445f091d0a397e4d9496c36",
    "user with a persona": "a2b6adf9c61b34fe1a727a3407d9c10d4394fa6d4804f43c97c584dd6fad2360",
}
BEGUN = (Message("system", "s"), Message("user", "What is {goal}?"))
TASK = Task("t", BEGUN, 'find "it" & {{ x }} <é>', "4'2", "llm")
EXCHANGE = (
    Message("assistant", "{{ 1 }} <think>no</think>{answer} {% raw %}"),
    Message("user", "so?\n**Assistant**: hm"),
)
PLAYED = Conversation((*BEGUN, *EXCHANGE), ())


def judge_prompt(name: str, **settings: Any) -> str:
    """The prompt that the judge of a metric receives."""
    judge = FakeJudge(Missing("not asked"))
    asyncio.run(metric(name, judge, **settings).score(TASK, PLAYED))
    return judge.prompts[0]


@pytest.mark.seconds
def test_the_default_prompts_are_those_of_earlier_versions_to_the_byte() -> None:
    user = UserConfig()
    prompts = {
        "accuracy": judge_prompt("accuracy", judge=True),
        "bleu": judge_prompt("bleu"),
        "holistic": judge_prompt("interactivity"),
        "parts": judge_prompt("interactivity", rubric="parts"),
        "user": system_prompt(user, TASK),
        "user with a persona": system_prompt(user, TASK, "a <shy> {{ nurse }}"),
    }
    assert {name: hashlib.sha256(text.encode()).hexdigest() for name, text in prompts.items()} == EARLIER


def test_the_users_prompt_has_the_description_of_the_task_if_there_is_one() -> None:
    described = Task("t", BEGUN, "g", "", "llm", {"task_desc": "write an article"})
    plain, extended = (
        system_prompt(UserConfig(), Task("t", BEGUN, "g", "", "llm")),
        system_prompt(UserConfig(), described),
    )
    assert (
        extended.replace("\nThe task that you and the assistant are about: write an article\n", "", 1)
        == plain
        != extended
    )


def test_each_prompt_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.j2"
    file.write_text("{{ question }} {{ answer }} {{ metadata.grade or 5 }}\n{{ conversation }}\n")
    task = about("42", "what is it?", goal="find it")
    task = Task(task.id, task.messages, task.goal, task.answer, task.user, {"grade": 3})
    for name in ("accuracy", "bleu", "interactivity", "generative"):
        judge = FakeJudge(Missing("down"))
        options = {"judge": True} if name == "accuracy" else {}
        played = play(task, "hm")
        asyncio.run(metric(name, judge, prompt=str(file), **options).score(task, played))
        shown = "what is it? 42 3\n**User**: what is it?\n**Assistant**: hm\n\nAnswer with one JSON"
        assert judge.prompts[0].startswith(shown), name
    file = tmp_path / "user.j2"
    file.write_text("Want: {{ goal }}\n")
    user_prompt = system_prompt(UserConfig(prompt=str(file)), task)
    assert user_prompt.startswith('Want: find it\n\nAnswer with one JSON object and nothing else:\n{"current_answer"')


def test_a_rubric_that_a_task_does_not_fit_is_a_missing_score(tmp_path: Path) -> None:
    file = tmp_path / "graded.j2"
    file.write_text("{{ metadata.grade }} {{ conversation }}")
    score = asyncio.run(metric("generative", FakeJudge(), prompt=str(file)).score(TASK, PLAYED))
    assert isinstance(score, Missing) and f"{file} line 1: UndefinedError" in score.why


@pytest.mark.parametrize("name", ["accuracy", "bleu", "interactivity", "generative"])
def test_a_rubric_without_the_conversation_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "blind.j2"
    file.write_text("{{ answer }}")
    with pytest.raises(ConfigError, match=rf"reward.metrics.{name}: prompt={file}: lacks {{{{ conversation }}}}"):
        metrics.ScoredMetric(name, {"prompt": str(file)})


def test_the_prompts_of_the_published_setting_are_named_without_a_folder() -> None:
    described = Task("t", BEGUN, 'find "it"', "", "llm", {"task_desc": "write an article"})
    user_prompt = system_prompt(UserConfig(prompt="user_published.j2", stop="BYE"), described, "a nurse")
    for text in ('{"goal": "find \\"it\\""}', "are about: write an article", "Who you are: a nurse", "put BYE into"):
        assert text in user_prompt
    assert "Be vague at first" in user_prompt and "Make a mistake now and then" in user_prompt
    config = Config()
    for name in ("collaborator.j2", "mathematician.j2"):
        config.rollout.system_prompt = name
        assert prompt_spec(config).system == (PROMPTS / name).read_text().rstrip("\n")


def test_every_prompt_is_tested() -> None:
    names = {file.stem for file in PROMPTS.iterdir()}
    users = {"user", "user_published", "user_model", "feedback", "user_of_log"}  # user_model: users/test_forms.py
    judges = {
        "accuracy",
        "bleu",
        "interactivity_holistic",
        "interactivity_parts",
        "rubric",
    }  # rubric: tests/reward/test_rubric.py
    of_policy = {"collaborator", "mathematician", "pass_rate"}  # pass_rate: tests/reward/test_pass_rate.py
    assert names == judges | of_policy | users | {"teacher"}  # tests/algo/test_teacher_prompts.py
