"""The evidence for multiturn-aware reward, from the results in docs/evidence/: `python tools/bench/evidence.py`.

With `--runs runs/desk`, the folder of `megatron-collab reproduce desk`, every training in a TASK/seedK there is first
written to docs/evidence/TASK/seedK.json: what was predicted, the mean scores of its arms, the utility of every problem,
what the training took, date, versions and the commit. Arms may be added later, even one by one: those that a file has
stay in it, and are refused only if the arm that they start from now has other results, or the world other predictions.
From all files in docs/evidence, those of earlier runs too, the tables in docs/evidence.md and README.md and
docs/figures/evidence.svg are made anew. --smoke changes nothing.

Values, at the cost that is worst for us: `mr_minus_best_single_turn`, the primary difference, which is the utility of
GRPO-MR with window 3 less that of the best arm that is rewarded for the turn alone and is not told which slots are
open; `interval_low`, the lower end of its interval; `regret_over_myopic`, the ratio of their regrets, all over the
trainings that have both arms and SFT. The page has them beside what was aimed at. From
the last lines of other benches, in docs/evidence/: `futures_saved`, `planted_hacks_caught`, `overfit_caught`. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from megatron_collab.reproduce import study as studies
from megatron_collab.reproduce.plan import Chain, StudyOptions, chains
from megatron_collab.reproduce.results import ArmResult, results_of, training_effort
from megatron_collab.runtime import files
from megatron_collab.statistics import Estimate, Tasks, difference_of_seeds, mean, mean_of_seeds

ROOT = Path(__file__).resolve().parents[2]
FOLDER, PAGE, PICTURE = (ROOT / "docs" / name for name in ("evidence", "evidence.md", "figures/evidence.svg"))
README = ROOT / "README.md"
STUDY = studies.read("desk")
BEGIN, END = "<!-- tables: tools/bench/evidence.py -->", "<!-- end of the tables -->"
MEASURE = "goals/desk_utility"  # the primary one
MYOPIC, MULTITURN = "bonus", "window_3"  # the arms of the primary comparison
TURN_ALONE = ("single_turn", MYOPIC, "priced_bonus")  # arms that are rewarded for it
KEPT = {"estimator": ("futures_saved",), "sentinels": ("planted_hacks_caught", "overfit_caught")}  # by bench
OPTIMAL, BEST_BONUS, AT_ONCE = "optimal", "single turn, best bonus", "answers now"  # predictions
PROMISED = {OPTIMAL: OPTIMAL, AT_ONCE: "answers at once"}
SUMMARY = {
    "sft": "SFT",
    "single_turn": "utility of the turn",
    MYOPIC: "bonus for asking",
    MULTITURN: "MR, 3 futures",
    "conversations": "whole conversations",
}
PREDICTED = ("desk_utility_incomplete", "desk_right", "desk_questions", "desk_needless")
MEASURED = ("desk_asks_open", "desk_asks_guessable", "token_amount")
HEADS = (
    "utility", "regret", "over the best bonus", "utility if incomplete", "right", "questions", "needless", "asks open",
    "asks guessable", "tokens", "optimizer steps", "sampled tokens",
)  # fmt: skip
AIMS = {
    "mr_minus_best_single_turn": ("GRPO-MR, window 3, less the best arm that is rewarded for the turn alone", ""),
    "interval_low": ("lower end of its interval", "> 0"),
    "regret_over_myopic": ("regret of window 3 as a share of that arm's", "≤ 0.5"),
    "futures_saved": ("share of futures saved at equal variance, nothing at equal tokens", "≥ 0.5"),
    "planted_hacks_caught": ("planted reward hacks that the sentinels catch, of 21, on average", "≥ 5"),
    "overfit_caught": (
        "of 200 runs of one planted overfit to the users of training, those in which it is caught",
        "≥ 1",
    ),
}
PACKAGES = ("torch", "sglang", "megatron-core", "numpy")


@dataclass(frozen=True)
class Trainings:
    """The results of a task: by training seed the content of its file."""

    seeds: Mapping[str, dict[str, Any]]

    @property
    def arms(self) -> list[str]:
        """The arms that a training has results of, in the order of the study."""
        return [arm for arm in STUDY.arms if any(arm in seed["arms"] for seed in self.seeds.values())]

    def utilities(self, *arms: str) -> list[list[Tasks]]:
        """For each of `arms`, the utility of each problem, by the trainings that have all of them."""
        shared = [seed["arms"] for seed in self.with_arms(*arms).seeds.values()]
        return [[{task: [score] for task, score in seed[arm]["utility"].items()} for seed in shared] for arm in arms]

    def utility(self, arm: str) -> Estimate:
        return mean_of_seeds(*self.utilities(arm))

    def with_arms(self, *arms: str) -> Trainings:
        """The trainings that have all of `arms`."""
        return Trainings({name: seed for name, seed in self.seeds.items() if all(arm in seed["arms"] for arm in arms)})

    def compared(self) -> tuple[str, Trainings] | None:
        """The arm rewarded for the turn alone over which window 3 gains least, and the trainings of both and of SFT.

        None if there are no such trainings.
        """
        rivals = {arm: self.with_arms("sft", arm, MULTITURN) for arm in TURN_ALONE}
        trained = {arm: shared for arm, shared in rivals.items() if shared.seeds}
        return min(trained.items(), key=lambda rival: rival[1].gain(MULTITURN, rival[0]).value, default=None)

    def gain(self, arm: str, over: str) -> Estimate:
        """The difference in utility, paired by training and problem."""
        return difference_of_seeds(*self.utilities(over, arm))

    def number(self, arm: str) -> int:
        """How many trainings have the arm."""
        return sum(arm in seed["arms"] for seed in self.seeds.values())

    def mean(self, arm: str, key: str) -> float:
        """The mean score of a column, over the trainings."""
        return fmean(seed["arms"][arm]["means"][key] for seed in self.seeds.values() if arm in seed["arms"])

    def effort(self, arm: str, key: str) -> float:
        """Optimizer steps or sampled tokens of a training, on average; nan if it has none."""
        values = [seed["arms"][arm][key] for seed in self.seeds.values() if arm in seed["arms"]]
        return fmean(values) if all(values) else nan

    def equality(self) -> str:
        """Which arm that samples its conversations sampled the fewest tokens, and which the most; "" if none does."""
        tokens = {arm: self.effort(arm, "sampled_tokens") for arm in self.arms}
        online = sorted((arm for arm in tokens if not isnan(tokens[arm])), key=tokens.__getitem__)
        if not online:
            return ""
        fewest, most = (f"{tokens[arm]:,.0f} ({STUDY.arms[arm].title})" for arm in (online[0], online[-1]))
        return f"Sampled tokens of the online arms: from {fewest} to {most}."

    def predicted(self, policy: str, key: str) -> float:
        return fmean(seed["predicted"][policy][key] for seed in self.seeds.values())


def read() -> dict[str, Trainings]:
    """What docs/evidence has, by task of the study."""
    kept = {task: sorted((FOLDER / task).glob("seed*.json")) for task in STUDY.tasks}
    return {task: Trainings({file.stem: json.loads(file.read_text()) for file in kept[task]}) for task in kept}


def results(runs: Path, study: studies.Study = STUDY) -> Iterator[tuple[Chain, dict[str, Any]]]:
    """Predictions and arms of each training in `runs`, the folder of `study`, whatever its seed."""
    options = StudyOptions(runs, [*study.tasks], [*study.arms], study.model, seeds=1, train_seeds=1)
    for name, task in study.tasks.items():
        seeds = (folder.name.removeprefix("seed") for folder in (runs / name).glob("seed*"))
        for seed in sorted(int(seed) for seed in seeds if seed.isdecimal()):
            seeded = replace(study, first_seed=seed)
            [trained] = chains(seeded, options, name)
            arms = {
                arm: _arm(columns, trained.title) | asdict(training_effort(runs / trained.title / arm))
                for arm in study.arms
                if any(columns := results_of(seeded, options, name, arm) or ())
            }
            if arms:
                predicted = json.loads((runs / trained.title / str(task.reference)).read_text())
                yield trained, {"predicted": predicted, "arms": arms}


def _arm(columns: Sequence[ArmResult | None], training: str) -> dict[str, Any]:
    """The mean score of each column in a training, and the utility of each problem."""
    scores = {result.column.key: result.scores[training] for result in columns if result}
    means = {key: round(mean(tasks.values()).value, 5) for key, tasks in scores.items()}
    utility = {task: round(fmean(values), 5) for task, values in scores[MEASURE].items()}
    return {"means": means, "utility": utility}


def update(file: Path, content: dict[str, Any], commit: str) -> None:
    """Write predictions and arms; arms that `file` has besides stay, and those with equal results keep their commit.

    Exits if one that would stay started from an arm whose results are others now, or was trained in a world with other
    predictions: they would not be comparable.
    """
    before = json.loads(file.read_text()) if file.is_file() else {"arms": {}}
    for arm in content["arms"]:
        if (start := STUDY.arms[arm].start) and start not in content["arms"]:
            sys.exit(f"{file}: {arm} starts from {start}, which is not evaluated; give --arms {start},{arm}")
    origin = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "versions": {package: version(package) for package in PACKAGES},
    }
    new = {arm: result | origin for arm, result in content["arms"].items() if _changed(before["arms"].get(arm), result)}
    staying = before["arms"].keys() - content["arms"].keys()
    if staying and before["predicted"] != content["predicted"]:
        names = ",".join(sorted(staying))
        sys.exit(f"{file}: {names}: trained in a world with other predictions; train them too, or remove the file")
    for arm in staying:
        start = STUDY.arms[arm].start
        if start in before["arms"] and start in new:
            sys.exit(f"{file}: {arm} started from another {start} than the new arms; train {arm} too, or remove it")
    file.parent.mkdir(parents=True, exist_ok=True)
    files.replace(file, json.dumps(content | {"arms": before["arms"] | new}, indent=0) + "\n")


def _changed(before: Mapping[str, Any] | None, result: Mapping[str, Any]) -> bool:
    return before is None or any(before[key] != value for key, value in result.items())


def tables(tasks: Mapping[str, Trainings]) -> Iterator[str]:
    """The tables of docs/evidence.md, one for each cost."""
    for name, trainings in tasks.items():
        if not trainings.arms:
            continue
        yield from ("", f"### {STUDY.tasks[name].title}", "")
        number, problems = len(trainings.seeds), max(map(len, trainings.utilities(trainings.arms[0])[0]))
        yield f"{number} training{'s' * (number > 1)}; of {problems} problems of each, half are incomplete."
        yield from ("", f"| | {' | '.join(HEADS)} |", "|---" * (len(HEADS) + 1) + "|")
        for policy in next(iter(trainings.seeds.values()))["predicted"]:
            reached = trainings.predicted(policy, MEASURE)
            shown = [f"{trainings.predicted(policy, f'goals/{key}'):.3f}" for key in PREDICTED]
            regret = trainings.predicted(OPTIMAL, MEASURE) - reached
            cells = [f"{reached:.3f}", f"{regret:.3f}", "", *shown, *[""] * (len(MEASURED) + 2)]
            yield f"| {policy}, predicted | {' | '.join(cells)} |"
        for arm in trainings.arms:
            utility = trainings.utility(arm)
            regret = trainings.with_arms(arm).predicted(OPTIMAL, MEASURE) - utility.value
            compared = arm != MYOPIC and trainings.with_arms(arm, MYOPIC).seeds
            gain = trainings.gain(arm, MYOPIC).text("{:+.3f}".format) if compared else ""
            shown = [f"{trainings.mean(arm, f'goals/{key}'):.3f}" for key in (*PREDICTED, *MEASURED)]
            effort = [_whole(trainings.effort(arm, key)) for key in ("optimizer_steps", "sampled_tokens")]
            cells = [utility.text(), f"{regret:.3f}", gain, *shown, *effort]
            yield f"| {STUDY.arms[arm].title} ({trainings.number(arm)}) | {' | '.join(cells)} |"
        yield from ("", trainings.equality())


def _whole(value: float) -> str:
    return "" if isnan(value) else f"{value:,.0f}"


def held_out(tasks: Mapping[str, Trainings]) -> Iterator[str]:
    """The tables of docs/evidence.md that have the utility on each held-out set, one for each cost."""
    for name, trainings in tasks.items():
        if not trainings.arms:
            continue
        sets = [*STUDY.tasks[name].eval_sets]
        yield from ("", f"### What is held out: {STUDY.tasks[name].title.lower()}", "")
        yield from (f"| utility | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|")
        for policy in (OPTIMAL, AT_ONCE):
            reached = [f"{trainings.predicted(policy, f'{split}/desk_utility'):.3f}" for split in sets]
            yield f"| {policy}, predicted | {' | '.join(reached)} |"
        for arm in trainings.arms:
            reached = [f"{trainings.mean(arm, f'{split}/desk_utility'):.3f}" for split in sets]
            yield f"| {STUDY.arms[arm].title} ({trainings.number(arm)}) | {' | '.join(reached)} |"


def page_lines(tasks: Mapping[str, Trainings]) -> Iterator[str]:
    """All that is made anew in docs/evidence.md."""
    return chain(tables(tasks), held_out(tasks), aims(values(tasks)))


def aims(measured: Mapping[str, float]) -> Iterator[str]:
    """The table of docs/evidence.md that has the values of the bench beside what was aimed at."""
    yield from (
        "",
        "### What was aimed at",
        "",
        "| the first three: at the worst cost of each | aim | measured |",
        "|---|---|---|",
    )
    for name, (title, aim) in AIMS.items():
        yield f"| {title} | {aim} | {f'{measured[name]:.3g}' if name in measured else ''} |"


def summary(tasks: Mapping[str, Trainings]) -> Iterator[str]:
    """The table of README.md, a column for each cost; an arm's mean is over its trainings, their number behind it."""
    shown = {name.replace("_", " "): trainings for name, trainings in tasks.items() if trainings.arms}
    if not shown:
        return
    columns = shown.values()
    yield from ("", f"| | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|")
    for policy, title in PROMISED.items():
        yield f"| {title}, predicted | {' | '.join(f'{t.predicted(policy, MEASURE):.3f}' for t in columns)} |"
    for arm, title in SUMMARY.items():
        cells = [f"{t.utility(arm).value:.3f} ({t.number(arm)})" if t.number(arm) else "" for t in columns]
        yield f"| {title} | {' | '.join(cells)} |"
    for title, pairs in {
        "MR over the best turn-alone reward": [(MULTITURN, (t.compared() or (MYOPIC,))[0]) for t in columns],
        "whole conversations over MR": [("conversations", MULTITURN)] * len(columns),
    }.items():
        gains = [t.gain(*pair).text("{:+.3f}".format) for t, pair in zip(columns, pairs, strict=True)]
        yield f"| {title} [95%] | {' | '.join(gains)} |"


def with_tables(text: str, lines: Iterable[str]) -> str:
    """The page with its tables made anew."""
    before, _, after = text.partition(BEGIN)
    return "\n".join([before + BEGIN, *lines, "", END + after.partition(END)[2]])


def draw(tasks: Mapping[str, Trainings], picture: Path) -> None:
    """Utility of the arms, of every training and their mean, beside what is predicted; a panel for each cost."""
    shown = {name: trainings for name, trainings in tasks.items() if trainings.arms}
    figure = Figure(figsize=(4.6 * len(shown), 3.6))
    panels = [figure.add_subplot(1, len(shown), number) for number in range(1, len(shown) + 1)]
    for axes, (name, trainings) in zip(panels, shown.items(), strict=True):
        for place, arm in enumerate(arms := trainings.arms[::-1]):
            utilities = [fmean(fmean(scores) for scores in tasks.values()) for tasks in trainings.utilities(arm)[0]]
            axes.plot(utilities, [place] * len(utilities), "o", color="C0", markersize=4, alpha=0.5)
            axes.plot(fmean(utilities), place, "|", color="C0", markersize=14)
        for color, policy in (("C2", OPTIMAL), ("C3", BEST_BONUS)):
            label = f"{policy}, predicted"
            axes.axvline(trainings.predicted(policy, MEASURE), color=color, linewidth=1, linestyle="--", label=label)
        axes.set_yticks(range(len(arms)), [STUDY.arms[arm].title for arm in arms], fontsize=8)
        axes.set_ylim(-0.5, len(arms) - 0.5)
        axes.set_title(STUDY.tasks[name].title, fontsize=10)
        axes.set_xlabel("utility")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="upper center", ncols=2)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    picture.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "evidence"}):  # the same results give the same file
        figure.savefig(picture, metadata={"Date": None})


def values(tasks: Mapping[str, Trainings]) -> dict[str, float]:
    """The values that the bench prints; those of the comparison if there are results of both sides."""
    gains, regrets = list[Estimate](), list[float]()
    for trainings in tasks.values():
        if compared := trainings.compared():
            rival, shared = compared
            gains.append(shared.gain(MULTITURN, rival))
            optimal = shared.predicted(OPTIMAL, MEASURE)
            regret, of_rival = (optimal - shared.utility(arm).value for arm in (MULTITURN, rival))
            regrets.append(regret / of_rival)
    result = dict[str, float]()
    if gains:
        worst = min(gains, key=lambda gain: gain.low)
        result = {
            "mr_minus_best_single_turn": worst.value,
            "interval_low": worst.low,
            "regret_over_myopic": max(regrets),
        }
    for bench, names in KEPT.items():
        if (file := FOLDER / f"{bench}.json").is_file():
            result |= {name: json.loads(file.read_text())["values"][name] for name in names}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="folder of the study, whose results are kept")
    parser.add_argument("--commit", help="of the checkout that trained them [this one's]")
    parser.add_argument("--smoke", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    if arguments.runs:
        head = ["git", "rev-parse", arguments.commit or "HEAD"]
        commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for trained, content in results(arguments.runs):
            update(FOLDER / f"{trained.title}.json", content, commit)
    tasks = read()
    if not arguments.smoke:
        for file, lines in ((PAGE, page_lines(tasks)), (README, summary(tasks))):
            files.replace(file, with_tables(file.read_text(), lines))
        draw(tasks, PICTURE)
    print(json.dumps({"name": "evidence", "values": values(tasks)}))


if __name__ == "__main__":
    main()
