"""Keys are in the environment and in nothing that is written: texts, settings, the folder of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_collab.config import Config, ConfigError
from megatron_collab.llm.answer import Field, LlmError
from megatron_collab.llm.client import LlmClient
from megatron_collab.observability.run import Run
from megatron_collab.runtime.redact import redact, refuse_keys
from megatron_collab.types import Conversation, Ending, Future, Group, Message, Missing, Reward, Rollout, Task
from tests.helpers import refused
from tests.llm.endpoint import Endpoint, fails

KEY, SECRET = "sesame.open|(please)", 'quoted "and\\slashed'  # what a pattern and JSON would write otherwise


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OPENAI_API_KEY": KEY,
        "MY_SECRET": SECRET,
        "PIN_TOKEN": "1234567",
        "KEYBOARD": "querty-us",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Incorrect API key provided: {KEY}.", "Incorrect API key provided: ***."),
        (f"{SECRET}{KEY}", "******"),
        ("no key sk-proj-abcdefgh12345678 there", "no key *** there"),
        ("Authorization: Bearer abc123.def-456=", "Authorization: Bearer ***"),
        ("http://me:open@host/v1?a=1&api_key=xyz&b=2", "http://***@host/v1?a=1&***&b=2"),
        ("1234567 on a querty-us: too short, no name of a key", "1234567 on a querty-us: too short, no name of a key"),
        ("the bearer certificates of task-sk-learn", "the bearer certificates of task-sk-learn"),
    ],
)
def test_a_text_without_its_keys(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_a_key_that_begins_like_another_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "abcdefgh")
    monkeypatch.setenv("B_KEY", "abcdefghijkl")
    assert redact("abcdefghijkl abcdefgh") == "*** ***"


@pytest.mark.parametrize(
    ("override", "name", "key"),
    [
        ('user.api_base="http://me:letmein@host/v1"', "user.api_base", "letmein"),
        ('reward.judge.api_base="http://host/v1?api_key=xyz"', "reward.judge.api_base", "xyz"),
        (f'user.model="openai/{KEY}"', "user.model", KEY),
    ],
)
def test_a_setting_that_holds_a_key_is_refused_and_not_shown(override: str, name: str, key: str) -> None:
    line = refused(override)
    assert line.startswith(f"{name}: contains a key or a password; remove it and set it in the environment")
    assert key not in line


def test_settings_in_lists_and_free_groups_are_looked_at() -> None:
    refuse_keys({"rollout": {"tools": ["calculator"]}, "launch": {"timeout": 1.0, "interface": None}})
    for settings in ({"rollout": {"tools": ["a", KEY]}}, {"reward": {"metrics": {"accuracy": {"note": KEY}}}}):
        with pytest.raises(ConfigError, match=r"^(rollout\.tools|reward\.metrics\.accuracy\.note): contains a key"):
            refuse_keys(settings)


def test_no_file_of_a_run_holds_a_key(tmp_path: Path) -> None:
    """The real writers, and errors as an endpoint that quotes the key makes them."""

    async def ask() -> str:
        long = "x" * 285  # the reason is cut where the key stands
        async with Endpoint(fails(401, f"{long} not {KEY}, {SECRET}")) as endpoint:
            with pytest.raises(LlmError) as error:
                await LlmClient().ask(endpoint.config(), [{"role": "user", "content": "?"}], [Field("score", float)])
            return str(error.value)

    why = asyncio.run(ask())
    assert "not ***" in why
    assert KEY[:4] not in why
    task = Task("t", (Message("user", "a table ."),), "goal", "answer", "llm")
    start = Conversation(task.messages, (1,)).add_messages([Message("assistant", f"say {KEY}")], ())
    futures = [
        Future(start.end(Ending.ERROR, f"user: {KEY} {SECRET}"), {"accuracy": Missing(why)}),
        Future(start.end(Ending.USER_DONE), {"accuracy": Missing(f"refused: Bearer {SECRET}")}),
    ]
    group = Group(task, (Rollout(start, tuple(futures), Reward(Missing(KEY))),))
    config = Config()
    config.run.dir, config.train.steps, config.user.api_base = str(tmp_path), 1, f"http://me:{KEY}@host"
    with Run(config, 0, {}, {}) as run:
        for when in ("before", "after"):
            run.evaluation(when, "", 0, {"reward": 1.0}, [group])
        run.transcripts(0, [group])
        run.record(0, {"reward": 1.0, "reward_se": 0.0})
        run.finish()
    written = {file.name: file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()}
    assert {"config.json", "transcripts.jsonl", "eval_before.jsonl", "report.html", "result.json"} <= written.keys()
    assert "say ***" in written["transcripts.jsonl"] and "say ***" in written["report.html"]
    for name, text in written.items():
        for part in ("sesame.open", "slashed"):
            assert part not in text, name
