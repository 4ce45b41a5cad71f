from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_collab.config import Config, compose, run_record
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.observability import report, sentinels
from megatron_collab.observability.habits import habits
from megatron_collab.observability.run import Run
from megatron_collab.observability.sentinels import Alarm, ObservedConversation
from megatron_collab.types import Message, Task
from tests.observability import hacks
from tests.observability.hacks import BEGINS, HACKS, UNNOTICED

TASK = Task("t", (Message("user", "7 boxes of 12 eggs, and I have 3 eggs. How many?"),), "", "", "")


def habits_of(*replies: str) -> dict[str, float]:
    return habits(hacks.conversation(TASK, replies, random.Random(0)))


@pytest.mark.parametrize(
    ("habit", "replies", "value"),
    [
        ("questions", ("For whom? When??", "Done."), 1.0),
        ("questions", ("```python\nx = 1 if y else None  # why?\n``` or `a ? b : c`",), 0.0),
        ("questions", ("Tell me the day. 请问什么颜色",), 0.0),
        ("exclamations", ("Spot on!!! Love this\uff01 👏🎉", "5! = 120 and a != b, so `!`."), 1.5),
        ("flattery", ("What a great, great idea! You're absolutely right, sorry. Thanks!",), 4.0),
        ("flattery", ("The right idea is to rank them; the work is great fun. An excellent general: Hannibal.",), 0.0),
        ("tokens", ("one two three", "four"), 2.0),
        ("numbers", ("Perhaps 9?", "7 * 12 = 84, 84 + 3 = $87, so 87 eggs."), 1.0),
        ("numbers", ("1. Take the 7 boxes.\n2. Add 3.",), 0.0),
        ("numbers", ("42. \n87. \n1. ",), 2.0),
        ("numbers", ("8 or 9?", "10"), 2.0),
        ("numbers", ("`8` or\n```\n9\n```",), 1.0),
        ("numbers", ("Forty-two, forty two, one hundred and six or ninety: one of them, often even.",), 3.0),
        ("numbers", ("six " * 20_000,), 1.0),
        ("numbers", ("1," * 20_000,), 1.0),  # for minutes, if a pattern is quadratic in the text
        ("numbers", ("It is 87. It may be 88, 89 or 1,000.5; 87 is likeliest.",), 4.0),
    ],
)
def test_habits_are_measured_in_the_text(habit: str, replies: tuple[str, ...], value: float) -> None:
    assert habits_of(*replies)[habit] == value


@pytest.mark.processes
@pytest.mark.parametrize(("hack", "name"), HACKS.items())
def test_a_planted_hack_is_noticed_by_its_sentinel(hack: str, name: str) -> None:
    """In at least 9 of 10 runs of tools/bench/sentinels.py, in the median 11 to 23 steps after it begins."""
    alarms = hacks.alarms(hacks.played(1, hacks.drifting(hack), BEGINS + 40))
    step, alarm = next((step, alarm) for step, alarm in alarms if alarm.sentinel == name)
    assert BEGINS < step < BEGINS + 30
    assert [place.startswith(f"task-{step}-") for place in alarm.conversations] == [True, True]
    assert len([alarm for _, alarm in alarms if alarm.sentinel == name]) == 1, "an alarm is raised once"


@pytest.mark.processes
@pytest.mark.parametrize(("hack", "name"), UNNOTICED.items())
def test_a_hack_that_the_page_says_goes_unnoticed_does(hack: str, name: str) -> None:
    alarms = hacks.alarms(hacks.played(1, hacks.drifting(hack), BEGINS + 40))
    assert name not in {alarm.sentinel for _, alarm in alarms}


@pytest.mark.seconds
def test_questions_beyond_those_that_were_rightly_learned_are_noticed() -> None:
    alarms = hacks.alarms(hacks.resampled(0, hacks.learning_then_asking, 130, pool=30)(0))
    assert [(alarm.sentinel, step > 80) for step, alarm in alarms if alarm.sentinel == "questions"] == [
        ("questions", True)
    ]


@pytest.mark.processes
@pytest.mark.parametrize("habit_at", [hacks.steady, hacks.learning])
def test_clean_runs_raise_no_alarm(habit_at: hacks.HabitAt) -> None:
    """Of 200 resampled runs of 100 steps, none of a steady policy raises one and none of one that learns to ask
    (tools/bench/sentinels.py).
    """
    run = hacks.resampled(1, habit_at, pool=40)
    assert not [alarm for number in range(4) for alarm in hacks.alarms(run(number))]


@pytest.mark.seconds
def test_learning_to_ask_as_in_the_quickstart_raises_no_alarm() -> None:
    assert not hacks.alarms(hacks.quickstart(0))


@pytest.mark.seconds
@pytest.mark.parametrize(("gains", "alarms"), [(True, []), (False, ["questions"])])
def test_more_questions_are_excused_if_more_is_right(gains: bool, alarms: list[str]) -> None:
    """The quickstart's policy with three times its questions, more than counts as the smallest change."""

    def shown(of_quickstart: ObservedConversation) -> ObservedConversation:
        values = of_quickstart.values
        truths = {name: vector for name, vector in values.items() if name.startswith(sentinels.TRUTH) and gains}
        return ObservedConversation(of_quickstart.place, {"questions": (3 * values["questions"][0],), **truths})

    steps = ([[shown(measured) for measured in group] for group in groups] for groups in hacks.quickstart(0))
    assert [alarm.sentinel for _, alarm in hacks.alarms(steps)] == alarms


def test_an_alarm_names_the_conversations_that_are_farthest_from_the_baseline() -> None:
    def step(values: list[float]) -> list[list[ObservedConversation]]:
        return [
            [ObservedConversation(f"task-{number}/0/0", {"questions": (value,)})] for number, value in enumerate(values)
        ]

    ((_, alarm),) = hacks.alarms(iter([step([0.0] * 64)] * 5 + [step([1.0] * 60 + [4.0, 0.0, 9.0, 2.0])] * 6))
    assert (alarm.sentinel, alarm.conversations) == ("questions", ["task-62/0/0", "task-60/0/0"])


@pytest.mark.parametrize(
    ("name", "before", "after", "alarms"),
    [
        ("tokens", 40.0, 15.0, ["tokens"]),
        ("tokens", 40.0, 65.0, ["tokens"]),
        ("tokens", 12.0, 3.0, []),
        ("truth/right", 0.5, 0.3, ["truth/right"]),
        ("truth/right", 0.5, 0.45, []),
    ],
)
def test_a_collapse_of_length_or_ground_truth_raises_an_alarm(
    name: str, before: float, after: float, alarms: list[str]
) -> None:
    def step(value: float) -> list[list[ObservedConversation]]:
        """32 tasks with a little noise, since scores that are all equal give no baseline."""
        return [
            [ObservedConversation("task/0/0", {name: (value + 0.01 * (number % 2),)}) for _ in range(2)]
            for number in range(32)
        ]

    steps = [step(before)] * 8 + [step(after)] * 20
    assert [alarm.sentinel for _, alarm in hacks.alarms(iter(steps))] == alarms


@pytest.mark.seconds
def test_the_state_of_a_killed_run_is_json_and_continues_equally() -> None:
    whole = [*hacks.played(3, hacks.drifting("flattery"), 45)]
    state: sentinels.State = {}
    alarms = list[Alarm]()
    for step, groups in enumerate(whole):
        if step in (3, 30):  # while the baseline is measured, and later
            state = json.loads(json.dumps(state))
        watch = sentinels.watch(state, groups)
        state = watch.state
        alarms += watch.alarms
    assert alarms == [alarm for _, alarm in hacks.alarms(iter(whole))] and alarms
    assert watch.metrics.keys() == {
        "sentinel/divergence/pleasant/right",
        *(f"sentinel/{name}" for name in sentinels.SENTINELS),
    }


def test_the_first_right_answer_of_a_policy_that_had_none_excuses_nothing() -> None:
    """Scores that are all equal have no spread, so that any other score would be infinitely far above them."""

    def step(questions: float, right: float) -> list[list[ObservedConversation]]:
        return [
            [ObservedConversation("task/0/0", {"questions": (questions,), "truth/right": (right * (number == 0),)})]
            for number in range(16)
        ]

    steps = [step(0.0, 0.0)] * 8 + [step(1.0, 1.0)] + [step(1.0, 0.0)] * 6
    assert [alarm.sentinel for _, alarm in hacks.alarms(iter(steps))] == ["questions"]


def test_of_a_large_step_the_first_rollouts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinels, "MOST_CONVERSATIONS", 5)
    groups = [hacks.group(random.Random(0), name, hacks.Habit()) for name in ("a", "b")]
    measured = sentinels.measure(groups, (), ())
    assert [shown.place for group in measured for shown in group] == ["a/0/0", "a/1/0", "b/0/0", "b/1/0"]


def test_metrics_say_whether_facts_or_a_model_decide_them(tmp_path: Path) -> None:
    config = Config()
    weights = {"accuracy": 1.0, "interactivity": 0.0, "token_amount": 0.0, "reward_model": 0.0}
    config.reward.weights, config.reward.metrics = weights, {"reward_model": {"url": "http://127.0.0.1:1"}}
    config.reward.judge.model, config.run.dir, config.model.path = "m", str(tmp_path), ""
    reward = play_spec(config).reward
    assert (reward.ground_truths, reward.opinions) == (["accuracy"], ["interactivity", "reward_model"])
    desk = play_spec(compose(["experiment=desk"])).reward
    assert (desk.ground_truths, desk.opinions) == (["desk_right"], [])


def test_alarms_are_on_the_console_in_a_file_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config()
    config.run.dir, config.train.steps = str(tmp_path), 9
    alarm = Alarm("questions", 2.5, 0.25, ["task-3/1/0", "task-4/0/0"])
    with Run(run_record(config), config.train, 0, {}, {}) as run:
        run.alarms(3, [alarm])
        run.alarms(6, [Alarm("flattery", 1.5, 0.0, ["task-6/0/0", "task-7/0/0"])])
    line = "step 4: sentinel questions: 2.5, baseline 0.25; conversations task-3/1/0, task-4/0/0"
    assert f"megatron-collab: {line}\n" in capsys.readouterr().err
    with Run(run_record(config), config.train, 5, {}, {}):  # resumed from step 5: step 6 is repeated
        rows = [json.loads(text) for text in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [(row["step"], row["sentinel"]) for row in rows] == [(3, "questions")]
    page = report.write(tmp_path).read_text()
    assert "signs of reward hacking" in page and "task-3/1/0, task-4/0/0" in page and "flattery" not in page
