"""The page with which `make demo` ends: `python -m tools.demo_page runs/demo`.

FOLDER/study is the folder of `megatron-collab reproduce desk`, FOLDER/estimator.json has the last line of
tools/bench/estimator.py. FOLDER/page.md and its picture, tokens.svg, are written anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from megatron_collab.runtime import files
from tools.bench import evidence
from tools.bench.evidence import BEST_BONUS, MEASURE, OPTIMAL, STUDY, Trainings

WINDOWS, FUTURES = (0, 1, 2, 3), (1, 2, 3, 6, 12)
POLICIES = {"SFT": "", "asks often": "_often"}  # endings of the estimator's values
INTRODUCTION = """
Rows "predicted" are computed by a recursion, without training. *Regret* is the distance to the optimal policy. *Asks
open* and *asks guessable* are the shares of the slots of each type that the policy asks for; the optimal one asks for
open slots. Each arm is trained once: intervals are over problems, and say nothing about another training.
`study/page.md` has gains, differences and the sets with unseen users, phrasings and requests; docs/evidence.md has
several seeds.
"""
OF_ESTIMATOR = """
How good an estimate of a reply's value the multiturn-aware reward (MR) is, without training: of the policy of the
supervised data, and of one that asks often. *Rank* is the correlation of MR (3 futures) with the value;
docs/explanation/mr.md explains all.
"""


def lines(tasks: Mapping[str, Trainings], estimator: Mapping[str, float]) -> Iterator[str]:
    """The page as Markdown."""
    yield from ("# When is multiturn-aware reward worth its cost? One seed", INTRODUCTION.rstrip())
    yield from evidence.tables(tasks)
    yield from ("", "![Utility against the tokens of a conversation](tokens.svg)", "", "## The reward as an estimate")
    yield OF_ESTIMATOR.rstrip()
    figures = {"bias": "bias_w{}{}", "rank": "rank_w{}_f3{}", "mean MR": "value_w{}{}"}
    heads = [f"{figure} ({policy})" for policy in POLICIES for figure in figures]
    yield from ("", f"| user turns of a future | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for window in WINDOWS:
        values = [estimator[name.format(window, end)] for end in POLICIES.values() for name in figures.values()]
        yield f"| {window} | {' | '.join(f'{value:.3f}' for value in values)} |"
    yield from ("", "Variance of the gradient at equal tokens, relative to one future:", "")
    yield from (f"| futures | {' | '.join(POLICIES)} |", "|---" * (len(POLICIES) + 1) + "|")
    for count in FUTURES:
        values = [estimator[f"grpo_ratio_f{count}{end}"] for end in POLICIES.values()]
        yield f"| {count} | {' | '.join(f'{value:.2f}' for value in values)} |"


def draw_tokens(tasks: Mapping[str, Trainings], picture: Path) -> None:
    """Utility of the arms against the tokens that the policy writes in a conversation; a panel for each cost."""
    figure = Figure(figsize=(5.4 * len(tasks), 3.6))
    for number, (name, trainings) in enumerate(tasks.items(), 1):
        axes = figure.add_subplot(1, len(tasks), number)
        for arm in trainings.arms:
            place = trainings.mean(arm, "goals/token_amount"), trainings.utility(arm).value
            axes.plot(*place, "o", label=STUDY.arms[arm].title)
        for color, policy in (("black", OPTIMAL), ("gray", BEST_BONUS)):
            label = f"{policy}, predicted"
            axes.axhline(trainings.predicted(policy, MEASURE), color=color, linewidth=1, linestyle="--", label=label)
        axes.set(title=STUDY.tasks[name].title, xlabel="tokens of the policy in a conversation", ylabel="utility")
        axes.legend(frameon=False, fontsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the demo")
    folder = parser.parse_args().folder
    estimator = json.loads((folder / "estimator.json").read_text())["values"]
    tasks = {chain.task: Trainings({chain.title: content}) for chain, content in evidence.results(folder / "study")}
    draw_tokens(tasks, folder / "tokens.svg")
    files.replace(folder / "page.md", "\n".join(lines(tasks, estimator)) + "\n")
    print(f"{folder / 'page.md'}: predicted beside measured, regret, questions by slot type, tokens, the estimator")


if __name__ == "__main__":
    main()
