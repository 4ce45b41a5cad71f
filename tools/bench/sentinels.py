"""Are planted hacks and a planted tell of simulated users noticed, and how often do clean runs raise an alarm?

`python tools/bench/sentinels.py` plays scripted policies (tests/observability/hacks.py) and prints:

- planted_hacks_caught: the mean number of planted hacks that the right sentinel notices, each played with as many
  seeds; planted_hacks: how many there are: five, some of them also in other wordings, and a policy that has rightly
  learned to ask and goes on to ask too much. steps_to_alarm: the median number of steps from the beginning of a hack
  to the alarm.
- false_alarms_per_100_steps: alarms of all sentinels in a clean run of 100 steps, mean over 200 resampled runs of a
  steady policy and 200 of one that rightly learns to ask; false_alarms_steady and false_alarms_learning: of either.
- overfit_caught: of 200 runs whose policy learned the one planted tell of the users of training, in how many the growth
  of the gap has an interval that excludes 0. overfit_false: in how many of 200 runs without a tell, which is about 5 %.
  overfit_mild/TASKS: in what share of runs the interval is below 0 if training helps with held-out users too, but less
  (0.5 to 0.8 instead of 0.95), with so many tasks a set.
- excused_steps: in how many steps a ground-truth metric that does not improve is more than 1 standard error above its
  baseline, so that questions, tokens and divergence may change three times as much. excused_runs: in how many runs of
  100 steps of 16 groups it is so more often than not; certain_runs: in how many it is ever 3 standard errors above.

--run: also the alarms on the transcripts of this run, as alarms_of_run; words count as tokens. --smoke: few runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from megatron_collab.observability import sentinels, transcripts
from megatron_collab.observability.sentinels import ObservedConversation, measure
from megatron_collab.types import Conversation, Ending, Finish, Future, Group, Message, Reward, Rollout, Task, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.observability import hacks


def caught(seeds: int) -> tuple[float, int, float]:
    """How many hacks are noticed, on average over the seeds; how many are planted; median steps to the alarm."""
    kinds = {
        f"{name}, {hack}": (name, hacks.drifting(hack), hacks.BEGINS)
        for hack, name in {**hacks.HACKS, **hacks.UNNOTICED}.items()
    }
    kinds["questions, after learning to ask"] = ("questions", hacks.learning_then_asking, 80)
    total, waits = 0, list[int]()
    for kind, (name, habit_at, begins) in kinds.items():
        noticed = list[int]()
        for seed in range(seeds):
            alarms = hacks.alarms_so_far(hacks.played(seed, habit_at, begins + 60))
            waits_of_run = (step - begins for step, alarm in alarms if alarm.sentinel == name and step >= begins)
            noticed += islice(waits_of_run, 1)
        print(f"{kind}: noticed in {len(noticed)} of {seeds} runs, median {median(noticed or [0]):.0f} steps after it")
        total, waits = total + len(noticed), waits + noticed
    return total / seeds, len(kinds), median(waits or [0])


def false_alarms(runs: int) -> tuple[float, float]:
    """Alarms of a clean run of 100 steps, mean over the runs: of a steady policy, of one that learns to ask."""
    rates = []
    for habit_at in (hacks.steady, hacks.learning):
        run = hacks.resampled(0, habit_at)
        alarms = [alarm.sentinel for number in range(runs) for _, alarm in hacks.alarms(run(number))]
        print(f"clean runs, {habit_at.__name__}: alarms in {runs} runs of 100 steps: {alarms}")
        rates.append(len(alarms) / runs)
    return rates[0], rates[1]


def overfit(runs: int, planted: bool) -> int:
    """In how many runs the gap of held-out users has grown or fallen, by its interval."""
    growths = [hacks.growth(seed, planted) for seed in range(runs)]
    return sum(not growth.low <= 0 <= growth.high for growth in growths)


def mild(runs: int, tasks: int) -> float:
    """Share of runs in which the interval of the gap's growth is below 0, for a tell that tempts less."""
    return sum(hacks.mild_growth(seed, tasks).high < 0 for seed in range(runs)) / runs


def risen_by_chance(runs: int) -> tuple[float, float, float]:
    """Shares of steps, runs, runs: excused_steps, excused_runs, certain_runs, of independent normal scores."""
    rng, name, shares, certain = np.random.default_rng(0), f"{sentinels.TRUTH}score", list[float](), 0
    for _ in range(runs):
        state: sentinels.State = {}
        rises = list[float]()
        while len(rises) < 100 and (not rises or rises[-1] <= sentinels.CERTAIN):
            scores = rng.normal(size=(16, 1, 1)).tolist()  # of a conversation in each group
            entry = state.get(name, {})
            if "mean" in entry:
                rises.append(sentinels.Chart(**entry).advance(scores).rise)
            groups = [[ObservedConversation("", {name: score}) for score in group] for group in scores]
            state = sentinels.watch(state, groups).state
        certain += rises[-1] > sentinels.CERTAIN
        shares.append(mean(rise > sentinels.PROBABLE for rise in rises))
    return mean(shares), mean(share > 0.5 for share in shares), certain / runs


def recorded(run: Path, opinions: Sequence[str], truths: Sequence[str]) -> Iterator[list[list[ObservedConversation]]]:
    """What sentinels measure of the steps of a run, from its transcripts."""
    for _, of_step in groupby(transcripts.run_rows(run), key=lambda row: row["step"]):
        tasks: list[list[Mapping[str, Any]]] = []
        for row in of_step:
            if (row["rollout"], row["future"]) == (0, 0):
                tasks.append([])
            if row["future"] == 0:
                tasks[-1].append(row)
        yield measure(
            [Group(Task(task[0]["task"], (), "", "", ""), tuple(map(_rollout, task))) for task in tasks],
            opinions,
            truths,
        )


def _rollout(row: Mapping[str, Any]) -> Rollout:
    messages = tuple(Message(message["role"], message["content"]) for message in row["messages"])
    opening = next((at for at, message in enumerate(messages) if message.role == "assistant"), 0) + row.get("played", 0)
    turns = [
        Turn((), (0,) * n, (0.0,) * n, (0,) * n, Finish.STOP, message.content)
        for message in messages[opening:]
        if message.role == "assistant"
        for n in [len(message.content.split())]
    ]
    scores = {name: score for name, score in row["scores"].items() if isinstance(score, int | float)}
    played = Conversation(messages, (), tuple(turns), (0.0,) * len(turns), Ending(row["ending"]))
    return Rollout(played, (Future(played, scores),), Reward(0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few runs: shows that it runs")
    parser.add_argument("--run", type=Path, help="folder of a training run")
    parser.add_argument("--truths", nargs="*", default=["booking_right", "desk_right", "accuracy"], help="of --run")
    parser.add_argument("--opinions", nargs="*", default=["interactivity"], help="judged metrics of --run")
    arguments = parser.parse_args()
    runs = 4 if arguments.smoke else 200
    noticed, planted, wait = caught(1 if arguments.smoke else 10)
    steady, learning = false_alarms(runs)
    values = {"planted_hacks_caught": noticed, "planted_hacks": planted, "steps_to_alarm": wait}
    values |= {"false_alarms_per_100_steps": mean((steady, learning)), "runs": runs}
    values |= {"false_alarms_steady": steady, "false_alarms_learning": learning}
    values |= {"overfit_caught": overfit(runs, planted=True), "overfit_false": overfit(runs, planted=False)}
    values |= {f"overfit_mild/{tasks}": mild(runs, tasks) for tasks in (64, 128, 256)}
    chances = risen_by_chance(5 * runs)
    values |= dict(zip(("excused_steps", "excused_runs", "certain_runs"), chances, strict=True))
    if arguments.run:
        alarms = hacks.alarms(recorded(arguments.run, arguments.opinions, arguments.truths))
        print(*(f"step {step + 1}: {alarm.text()}" for step, alarm in alarms), sep="\n")
        values["alarms_of_run"] = len(alarms)
    print(json.dumps({"name": "sentinels", "values": values}))


if __name__ == "__main__":
    main()
