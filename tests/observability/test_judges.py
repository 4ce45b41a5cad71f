"""The version of a judge's model: where it comes from, and what happens when it changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config, run_record
from megatron_collab.llm.answer import Field
from megatron_collab.llm.cache import Cache
from megatron_collab.llm.client import LlmClient
from megatron_collab.observability import report
from megatron_collab.observability.judges import JudgeVersions
from megatron_collab.observability.run import Run
from megatron_collab.reward.explanations import explained
from megatron_collab.reward.metrics import THOUGHT, Judge
from megatron_collab.types import Group, Judgment
from megatron_collab.view.runs import RunView
from tests.llm.endpoint import Endpoint, Reply, says
from tests.observability.test_run import group

FIELDS = [THOUGHT, Field("score", float, 0.0, 1.0)]
ANSWER = {"thought": "as it is", "score": 1}
OLD, NEW = "judge-2026-01-01 fp_1", "judge-2026-09-09 fp_2"


def answers(version: str) -> Reply:
    model, fingerprint = version.split()
    return says(ANSWER, model=model, system_fingerprint=fingerprint)


def judged(folder: Path, replies: Sequence[Reply], questions: Sequence[str]) -> list[Judgment]:
    """What explains a score, by question, of a judge behind LiteLLM that gives these replies; answers are cached."""

    async def ask() -> list[Judgment]:
        judgments = []
        async with Endpoint(*replies) as endpoint:
            judge = Judge(LlmClient(cache=Cache(folder)), endpoint.config(model="openai/judge"))
            for question in questions:
                with explained() as explanation:
                    await judge.ask(question, FIELDS)
                judgment = explanation()
                assert judgment is not None
                judgments.append(judgment)
        return judgments

    return asyncio.run(ask())


def judged_by(judgment: Judgment, task: str = "t-1") -> Group:
    played = group()
    (rollout,) = played.rollouts
    futures = tuple(replace(future, judgments={"polite": judgment}) for future in rollout.futures)
    return replace(played, task=replace(played.task, id=task), rollouts=(replace(rollout, futures=futures),))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_version_that_changes_during_a_run_raises_one_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also between a run and its resume, and not by answers of the earlier version from the cache."""
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    replies = [*[answers(OLD)] * 2, *[answers(NEW)] * 2]
    judgments = judged(tmp_path / "cache", replies, ["a", "b", "c", "a", "d"])
    assert [judgment.versions for judgment in judgments] == [(OLD,), (OLD,), (NEW,), (OLD,), (NEW,)]
    config = Config()
    config.run.dir, config.train.steps = str(tmp_path / "run"), 9
    run_folder, alarms = tmp_path / "run", tmp_path / "run" / "alarms.jsonl"
    groups = [judged_by(judgment, f"t-{at}") for at, judgment in enumerate(judgments)]
    with Run(run_record(config), config.train, 0, {}, {}) as run:
        run.evaluation("unjudged", "", 0, {}, [group()])
        assert not (run_folder / "judges.jsonl").exists()
        run.evaluation("before", "", 0, {}, groups[:1])
        for step in range(4):
            run.transcripts(step, [groups[step + 1]])
    text = f"judge/polite answers as {NEW}, before as {OLD}: scores before and after may not be comparable"
    printed = capsys.readouterr().err
    assert printed.count("judge/polite") == 1 and f"step 2: {text}; conversations t-2/0/0\n" in printed
    alarm = {"step": 1, "sentinel": "judge/polite", "value": NEW, "baseline": OLD, "conversations": ["t-2/0/0"]}
    assert lines(alarms) == [alarm]
    assert lines(run_folder / "judges.jsonl") == [
        {"step": 0, "evaluation": "before", "metric": "polite", "version": OLD},
        {"step": 1, "metric": "polite", "version": NEW},
    ]
    (event,) = RunView(run_folder).events()
    assert event == {"step": 1, "kind": "alarm", "text": f"{text}; conversations t-2/0/0"}
    page = report.write(run_folder).read_text()
    assert "judge/polite" in page and NEW in page and OLD in page
    with Run(run_record(config), config.train, 0, {}, {}) as run:  # no checkpoint: it repeats the steps only
        assert not lines(alarms)
        run.transcripts(0, [groups[2]])
    assert [row["step"] for row in lines(alarms)] == [0]
    with Run(run_record(config), config.train, 1, {}, {}) as run:
        run.transcripts(1, [groups[2]])
    assert [row["step"] for row in lines(alarms)] == [0]


def test_a_provider_that_names_no_version_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM then has the model of the request."""
    monkeypatch.setenv("OPENAI_API_KEY", "dummy")
    judgments = judged(tmp_path, [says(ANSWER, model=None)] * 2, ["a", "b"])
    versions = JudgeVersions(tmp_path)
    for judgment in [*judgments, Judgment("no version")]:
        assert judgment.versions in ((), ("judge",))
        assert versions.watch([judged_by(judgment)])[1] == []


def test_a_judge_with_another_version_for_every_answer_is_not_watched_for_ever(tmp_path: Path) -> None:
    versions = JudgeVersions(tmp_path)
    watched = [versions.watch([judged_by(Judgment("r", "a", (f"v{at}",)))]) for at in range(100)]
    assert sum(len(rows) for rows, _ in watched) == 20
    alarms = [alarm for _, alarms in watched for alarm in alarms]
    assert [alarm.value for alarm in alarms] == [f"v{at}" for at in range(1, 20)]
    assert alarms[-1].baseline == "v16, v17, v18"
