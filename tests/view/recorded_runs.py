"""Folders of small runs, written by the functions that write those of real ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_collab.observability import evaluations, folder, metric_kinds, tokens, transcripts
from megatron_collab.observability.judges import JudgeChange
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.runtime.process import FINISHED

Row = dict[str, Any]
ROLLOUTS, FUTURES = 4, 3
EVALUATED = 6  # tasks
ENDINGS = ("user_done", "user_done", "turn_limit")
QUESTIONS = ("Which city is the restaurant in?", "For how many people?", "Which day suits you?", "Is 19:00 fine?")
REPLIES = (
    "In Lyon, near the station.",
    "For four, one in a wheelchair.",
    "Friday would be best.",
    "Half past, please.",
)
CALL = '<tool_call>{"name": "search", "arguments": {"city": "Lyon"}}</tool_call>'
GOAL = "A table for four in Lyon on Friday at 19:30; step-free access."
WEIGHTS = {"accuracy": 1.0, "interactivity": 0.2, "token_amount": -1e-4}
PARTS = {"accuracy": 0.5, "interactivity": 0.12, "token_amount": -0.04}


def write_run(run: Path, steps: int, seed: int = 0, groups: int = 2) -> None:
    """A run of `steps` steps that goes on: metrics, transcripts, evaluations, a restart, alarms."""
    run.mkdir(parents=True)
    settings = {"program": "train", "run": {"dir": str(run)}, "train": {"steps": steps}, "reward": {"weights": WEIGHTS}}
    folder.replace(run / SETTINGS, settings)
    values = {"score": 0.4, "score_low": 0.3, "score_high": 0.5}
    records = {}
    for name, step, gain in (("before", 0, 0.0), ("step_6", 6, 0.1), ("after", steps, 0.2)):
        scores = {f"{kind}/accuracy": value + gain + seed / 50 for kind, value in values.items()}
        records[name] = {"step": step, "set": "", "tasks": 50, **scores, "missing/accuracy": 2.0}
    folder.replace(run / evaluations.FILE, records)
    for name, gain in (("before", 0), ("after", 1 + seed)):
        transcripts.write(evaluations.file_of(run, name), evaluated(gain))
    for step in range(steps):
        write_step(run, step, seed, groups)
    folder.replace(run / metric_kinds.FILE, {"opinions": ["interactivity"], "ground_truths": ["accuracy"]})
    change = {"time": "2026-01-01", "step": 5, "setting": "optim.lr", "before": 1e-6, "after": 5e-7}
    folder.append(run / "history.jsonl", [{"time": "2026-01-01", "step": 5}, change])
    alarm = {"step": 9, "sentinel": "flattery", "value": 0.8, "baseline": 0.2, "conversations": ["task-1/0/0"]}
    judge = JudgeChange("judge/interactivity", "judge-2", "judge-1", ["task-2/0/0"])
    folder.append(run / "alarms.jsonl", [alarm, {"step": 10, **asdict(judge)}])


def finish(run: Path) -> None:
    folder.replace(run / FINISHED, {"train_minutes": 1.0})


def write_step(run: Path, step: int, seed: int = 0, groups: int = 2, **more: float) -> None:
    """The metrics, with `more` of them, and the transcripts of a step; if it is an odd one, tokens too."""
    chance = random.Random(f"{seed}/{step}")
    transcripts.write_step(run, step, [[*futures_of(step, position, chance)] for position in range(groups)])
    if step % 2:
        of_rollouts = [tokens_of(at, rollout) for at in range(groups) for rollout in range(ROLLOUTS)]
        later = [tokens_of(at, 1) | {"future": 2, "turn": 1} for at in range(groups)]
        tokens.write(run, step, [*of_rollouts, *later])
    folder.append(run / "metrics.jsonl", [{"step": step, **metrics_of(step, chance), **more}])


def metrics_of(step: int, chance: random.Random) -> Mapping[str, float | None]:
    rise = step / (step + 8)
    return {
        "reward": 0.3 + 0.5 * rise + chance.gauss(0, 0.05),
        "reward_se": 0.04 + chance.random() / 50,
        "spread": 0.2 - 0.1 * rise,
        "score/accuracy": 0.35 + 0.4 * rise + chance.gauss(0, 0.04),
        "score/interactivity": 0.6 + 0.2 * rise + chance.gauss(0, 0.03),
        "score/token_amount": None if step == 4 else 420 - 120 * rise + chance.gauss(0, 20),
        "ending/user_done": 0.5 + 0.4 * rise,
        "ending/turn_limit": 0.5 - 0.4 * rise,
        "seconds/rollout": 31 + chance.gauss(0, 2),
        "seconds/reward": 9 + chance.gauss(0, 1),
        "seconds/update": 14.0,
        "seconds/weight_sync": 1.2,
        "idle/servers": 0.3 + chance.gauss(0, 0.03),
        "idle/trainer": 0.7 - chance.gauss(0, 0.03),
        "llm/usd": 0.03 + chance.random() / 100,
        "llm/calls": 96.0,
        "staleness/mean": 0.5,
        "staleness/max": 1.0,
        "missing": float(step % 5 == 3),
        "count/tool_errors": float(step % 3),
        "mismatch/max_abs": 0.002 + chance.random() / 1000,
        "sentinel/questions": 0.4 + 0.4 * rise,
        "sentinel/flattery": 0.1 + 0.06 * step,
        "sentinel/divergence/interactivity/accuracy": 0.5 - 0.02 * step,
        "loss": -0.01 * rise,
        "kl": 0.001 * step,
        "grad_norm": 1.5 - rise,
        "lr": 1e-6 if step < 5 else 5e-7,
    }


def futures_of(step: int, position: int, chance: random.Random) -> Iterator[Row]:
    """The futures of a group about a booking: the rollouts differ in their first reply, the futures in the user's."""
    for rollout in range(ROLLOUTS):
        reward = 0.2 * rollout + chance.random() / 3
        for future in range(FUTURES):
            yield {
                "task": f"task-{2 * step + position}",
                "rollout": rollout,
                "future": future,
                **({"goal": GOAL, "user": "llm/hurried"} if rollout == future == 0 else {}),
                "reward": reward,
                **({"parts": PARTS, "standard_error": 0.05, "surprise": (step + 1) / 10} if future == 0 else {}),
                **conversation(rollout, future),
                **scores(rollout, future),
            }


def tokens_of(position: int, rollout: int) -> Row:
    """A token for each word of the trained turn, with probabilities of 0.5, 0.25, …; the mark </think> is forced."""
    pieces = re.findall(r"\s*\S+", conversation(rollout, 0)["turns"][0])
    sampled = np.array([piece.strip() != "</think>" for piece in pieces])
    log_probs = -np.log(2) * (1 + np.arange(len(pieces)) % 8)
    values = {"log_prob": log_probs, "log_ratio": -log_probs / 20, "advantage": np.full(len(pieces), rollout - 1.5)}
    masked = {name: np.where(sampled, value, np.nan).astype(np.float16) for name, value in values.items()}
    place = {"position": position, "rollout": rollout, "turn": 0}
    return {**place, "pieces": pieces, **masked, "trained": sampled, "version": [7] * len(pieces)}


def evaluated(gain: int) -> Iterator[list[Row]]:
    """The conversations of an evaluation: two about each task, of which more succeed with a higher gain."""
    for task in range(EVALUATED):
        accuracy = float(task % 3 < gain)
        yield [
            {
                "task": f"booking-{task}",
                "rollout": rollout,
                "future": 0,
                **({"goal": GOAL, "user": "llm/hurried"} if rollout == 0 else {}),
                "reward": accuracy,
                **conversation((task + gain + rollout) % ROLLOUTS, 0),
                **scores(task % 2, 0),
                "scores": {"accuracy": accuracy, "interactivity": 0.5, "token_amount": 300.0 + 10 * task * gain},
            }
            for rollout in range(2)
        ]


def conversation(rollout: int, future: int) -> Row:
    first = f"Happy birthday to her! {QUESTIONS[rollout]}"
    last = f"Chez Paul has a table at 19:{30 if future else '00'}. Shall I book it?"
    messages = [
        ("system", "You help people to book a table. Ask when something is missing."),
        ("user", "Hi! I would like to book a table for my sister's birthday. Can you help?"),
        ("assistant", first),
        ("user", REPLIES[(rollout + future) % len(REPLIES)]),
        ("assistant", CALL),
        ("tool", '[{"name": "Chez Paul", "free": ["19:00", "19:30"]}]'),
        ("assistant", last),
        ("user", "Yes, thank you."),
    ]
    thought = f"The request does not say: {QUESTIONS[rollout]}"
    return {
        "turns": [f"<think>\n{thought}\n</think>\n\n{first}", CALL, last],
        "ending": ENDINGS[future],
        "error": "",
        "messages": [{"role": role, "content": content} for role, content in messages],
        "private": {
            "3": {
                "persona": "A sister in a hurry, who answers in a few words.",
                "thought": "They seem to know what to ask.",
                "current_answer": "Lyon, Friday, four people",
            }
        },
    }


def scores(rollout: int, future: int) -> Row:
    """Scores, of which a single one is missing, and what the judge wrote."""
    accuracy = {"missing": "judge.model: no answer within 30 s"} if (rollout, future) == (2, 1) else float(future < 2)
    reason = f"The assistant asked {1 + future} questions, of which the first was needed. The booking is right."
    score = 0.5 + future / 10
    return {
        "scores": {"accuracy": accuracy, "interactivity": score, "token_amount": 310.0 + 12 * rollout},
        "judgments": {"interactivity": {"reason": reason, "answer": f'{{"reason": "{reason}", "score": {score}}}'}},
    }


MARKUP = "<img src=x onerror=\"window.attacked='img'\"><script>window.attacked='script'</script><svg onload=alert(1)>"
MARKS = (
    "\x1b[31mred\x1b[0m \u202eevil\u202c \u2066isolated\u2069 zero\u200bwidth soft\u00adhyphen \ufeff "
    "\x00\x00\x07 \ud800 \udfff"
)
COMBINING = "Z" + "\u0301\u0323\u0334" * 300


def write_hostile_run(run: Path) -> None:
    """A run whose models, users, tools and judges write what should harm the page, and lines that are no rows."""
    run.mkdir(parents=True)
    reward = {"weights": {MARKUP: 0.5, "__proto__": 1.0, "constructor": 1.0, "m" * 3000: 1e-6, MARKS: 1.0}}
    folder.replace(run / SETTINGS, {"program": "train", "run": {"dir": str(run)}, "reward": reward})
    texts = [MARKUP, MARKS, COMBINING, "w" * 20_000, "\x00" * 20_000, "javascript:window.attacked='link'", ""]
    rows = [hostile_row(rollout, text) for rollout, text in enumerate(texts)]
    rows[3]["messages"][-1]["content"] = "w" * 1_000_000
    transcripts.write_step(run, 0, [rows])
    of_turn = {name: value if isinstance(value, int) else value[:2] for name, value in tokens_of(0, 0).items()}
    pieces = [[text.encode(errors="replace").decode()] * 2 for text in texts]
    tokens.write(run, 0, [{**of_turn, "rollout": at, "pieces": of_rollout} for at, of_rollout in enumerate(pieces)])
    transcripts.write(evaluations.file_of(run, "before"), [rows])
    names = {f"score/{MARKUP}": 0.5, "score/" + "m" * 300: 0.1, "ending/__proto__": 1.0, "score/constructor": 0.2}
    folder.append(run / "metrics.jsonl", [{"step": step, "reward": 0.1, **names} for step in range(3)])
    change = {"step": 1, "setting": MARKUP, "before": MARKS, "after": "v" * 5000}
    folder.append(run / "history.jsonl", [change])
    estimate = {f"score/{MARKUP}": 0.5, f"score_low/{MARKUP}": 0.4, f"score_high/{MARKUP}": 0.6}
    folder.replace(run / evaluations.FILE, {"before": {"step": 0, "set": MARKUP, "tasks": 1, **estimate}})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 1e400}\n[]\n{"step": 4, "rew')


def hostile_row(rollout: int, text: str) -> Row:
    call = {"type": "function", "function": {"name": text, "arguments": {text: text}}}
    return {
        "task": MARKUP + MARKS + "t" * 2000,
        "rollout": rollout,
        "future": 0,
        "reward": 0.5,
        "standard_error": 0.1,
        "parts": {MARKUP: 0.5, "__proto__": 0.25},
        "turns": [f"<think>{text}</think>{text}", f"{text}<think>{text}"],
        "ending": MARKUP,
        "error": text[:5000],
        "goal": text,
        "user": MARKUP,
        "messages": [
            {"role": "system", "content": text},
            {"role": MARKUP, "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "content": text},
            {"role": "assistant", "content": text},
            {"role": "user", "content": text},
        ],
        "scores": {MARKUP: {"missing": text}, "__proto__": 0.5, "constructor": 1.0, "m" * 3000: 1e308},
        "judgments": {MARKUP: {"reason": text, "answer": text}},
        "private": {"2": {"thought": text, MARKUP: text}},
    }
