"""The published settings in conf/reward: the same twelve conversations are played and scored under each."""

from __future__ import annotations

import pytest

from megatron_collab.config import compose
from megatron_collab.launch import validate
from megatron_collab.rollout.users.llm import system_prompt
from megatron_collab.settings import ConfigError
from tests.rollout.published import BEFORE, FUTURES, GOLDEN, JUDGED, NAMES, play, preset, task_of


@pytest.mark.seconds
@pytest.mark.parametrize("name", NAMES)
def test_a_published_setting(name: str) -> None:
    groups, prompts = play(name)
    rollouts = {group.task.id: group.rollouts[0] for group in groups}
    assert prompts and all(prompt.startswith("<system>You help a user over several turns.") for prompt in prompts)
    for task, (tokens, value) in GOLDEN[name].items():
        scores = [future.scores for future in rollouts[task].futures if future.scores]
        assert [score["accuracy"] for score in scores] == [judged[0] for judged in JUDGED[task]][: len(tokens)], (
            "the judge's"
        )
        assert [score["token_amount"] for score in scores] == pytest.approx(tokens), task
        assert rollouts[task].reward.value == pytest.approx(value), task
        assert len(rollouts[task].futures) == (len(tokens) or 1), task


def test_the_twelve_conversations() -> None:
    """Four trained turns have three futures each, and no message decides the score of two of them."""
    assert [len(futures) for futures in FUTURES.values()] == [3] * 4
    user_texts = [text for futures in FUTURES.values() for future in futures for text in future[::2]]
    assert len({*user_texts, *(texts[-1] for texts in BEFORE.values())}) == len(user_texts) + len(BEFORE)


SETTINGS = {  # of the recipe, of the authors' code (a future has four new messages) and of the paper (w is 2)
    "verl": {"malformed": -1.0, "rubric": "parts", "count": "words", "max_tokens": 512, "attempts": 3},
    "collabllm": {"malformed": None, "rubric": "holistic", "count": "cl100k", "max_tokens": 1024, "attempts": 10},
    "paper": {"malformed": None, "rubric": "holistic", "count": "seen", "max_tokens": 1024, "attempts": 10},
}


@pytest.mark.seconds
@pytest.mark.parametrize("experiment", ["gsm8k", "collabllm_math", "train_8b"])
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_every_published_option_in_every_experiment(name: str, experiment: str) -> None:
    config = compose([f"experiment={experiment}", f"reward={name}", "model.path=m", "run.dir=r", "data.train=t"])
    reward, rollout, user = config.reward, config.rollout, config.user
    assert reward.mode == name and reward.metrics["accuracy"] == {"judge": True, "verify": False}
    settings = {"malformed": reward.malformed, "rubric": reward.metrics["interactivity"]["rubric"]}
    settings |= {
        "count": reward.metrics["token_amount"]["count"],
        "max_tokens": user.max_tokens,
        "attempts": user.attempts,
    }
    assert settings == SETTINGS[name]
    assert (rollout.futures, rollout.max_user_turns, rollout.max_assistant_turns) == (3, 2, 3)
    assert (rollout.train_turns, rollout.system_prompt, config.data.prefixes) == ("first", "collaborator.j2", True)
    assert (user.temperature, reward.judge.temperature, reward.judge.max_tokens, reward.judge.attempts) == (
        1,
        0,
        2048,
        6,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_user_has_the_published_rules(name: str) -> None:
    config = preset(name)
    prompt = system_prompt(config.user, task_of("asked", config))
    for rule in ("little trouble", "Be vague at first", "Make a mistake now and then", "knowledge and preferences"):
        assert rule in prompt
    assert (
        "answer what the assistant asks" not in prompt and "How many asked?" in prompt and '"current_answer"' in prompt
    )


@pytest.mark.parametrize("name", NAMES)
def test_without_a_judge_the_error_names_the_setting(name: str) -> None:
    config = preset(name)
    config.reward.judge.model = None
    with pytest.raises(ConfigError, match=r"^reward\.weights\.accuracy: needs a judge; set reward\.judge\.model to a "):
        validate.check_settings(config)
