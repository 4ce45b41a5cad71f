"""The desk study in small, with one training seed at one cost: `python -m tools.demo FOLDER [--smoke]`.

FOLDER/desk.yaml is the study with fewer arms, steps and evaluated sets. FOLDER/study has its programs, and
FOLDER/estimator.json the last line of tools/bench/estimator.py, which runs beside them. At the end, FOLDER/page.md and
its picture, tokens.svg, are written. If it is interrupted, the same command continues it. --smoke: two arms and a few
steps show that it runs, no figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from matplotlib.figure import Figure

from megatron_collab.reproduce.study import STUDIES, read
from megatron_collab.runtime import files
from tools.bench import estimator, evidence
from tools.bench.evidence import BEST_BONUS, MEASURE, OPTIMAL, STUDY, Trainings

TASK, EVALUATED = "cost_0.10", "goals"


class Size(NamedTuple):
    """What is trained and evaluated: the arms, settings of the SFT model and of those that start from it, problems."""

    arms: tuple[str, ...]
    sft_settings: list[str]
    arm_settings: list[str]
    problems: int


WHOLE = Size(
    ("sft", "bonus", "window_1", "window_3", "online_dpo"),
    ["launch.nproc_per_node=2", "train.steps=1200"],  # it is trained alone, so both cores are free
    ["train.steps=25"],
    512,
)
SMOKE = Size(
    ("sft", "window_3"),
    ["train.steps=300"],
    ["train.steps=2", "train.prompts_per_step=4", "optim.warmup_steps=0"],
    32,
)
WINDOWS, FUTURES = (0, 1, 2, 3), (1, 2, 3, 6, 12)
POLICIES = {"SFT": "", "asks often": "_often"}  # endings of the estimator's values
INTRODUCTION = """
Rows "predicted" are computed by a recursion, without training. *Regret* is the distance to the optimal policy. *Asks
open* and *asks guessable* are the shares of the slots of each type that the policy asks for; the optimal one asks for
open slots. Each arm is trained once, with fewer steps than in docs/evidence.md, which has several seeds: intervals are
over problems, and say nothing about another training. `study/page.md` has gains and differences.
"""
OF_ESTIMATOR = """
How good an estimate of a reply's value the multiturn-aware reward (MR) is, without training: of the policy of the
supervised data, and of one that asks often. *Rank* is the correlation of MR (3 futures) with the value;
docs/explanation/mr.md explains all.
"""


def small_study(size: Size) -> dict[str, Any]:
    """The shipped study in that size, as its YAML."""
    content: dict[str, Any] = yaml.safe_load((STUDIES / "desk.yaml").read_text())
    task = content["tasks"][TASK]
    task |= {"eval_tasks": size.problems, "eval_sets": {EVALUATED: task["eval_sets"][EVALUATED]}}
    task["columns"] = [column for column in task["columns"] if column["set"] == EVALUATED]
    arms = {name: content["arms"][name] for name in size.arms}
    for name, arm in arms.items():
        arm["train"] += size.sft_settings if name == "sft" else size.arm_settings
    played = f"data.world_options.evaluated={size.problems}"
    settings = [
        played if setting.startswith("data.world_options.evaluated=") else setting for setting in content["settings"]
    ]
    return content | {"settings": settings, "tasks": {TASK: task}, "arms": arms, "train_seeds": 1}


def run(folder: Path, smoke: bool) -> None:
    """Run the study and the estimator. Raises CalledProcessError if one of them fails."""
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / "desk.yaml", yaml.safe_dump(small_study(SMOKE if smoke else WHOLE), sort_keys=False))
    program = [sys.executable, str(estimator.__file__), *(["--smoke"] if smoke else [])]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as estimating:
        options = ["--out", str(folder / "study"), "--seeds=1", "--pilot=0", "--jobs=2"]
        study = [sys.executable, "-m", "megatron_collab.commands", "reproduce", str(folder / "desk.yaml"), *options]
        subprocess.run(study, check=True)
        printed, _ = estimating.communicate()
    if estimating.returncode:
        raise subprocess.CalledProcessError(estimating.returncode, program)
    files.replace(folder / "estimator.json", printed.splitlines()[-1] + "\n")


def lines(tasks: Mapping[str, Trainings], estimates: Mapping[str, float]) -> Iterator[str]:
    """The page as Markdown."""
    yield from ("# When is multiturn-aware reward worth its cost? One seed", INTRODUCTION.rstrip())
    yield from evidence.tables(tasks)
    yield from ("", "![Utility against the tokens of a conversation](tokens.svg)", "", "## The reward as an estimate")
    yield OF_ESTIMATOR.rstrip()
    figures = {"bias": "bias_w{}{}", "rank": "rank_w{}_f3{}", "mean MR": "value_w{}{}"}
    heads = [f"{figure} ({policy})" for policy in POLICIES for figure in figures]
    yield from ("", f"| user turns of a future | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|")
    for window in WINDOWS:
        values = [estimates[name.format(window, end)] for end in POLICIES.values() for name in figures.values()]
        yield f"| {window} | {' | '.join(f'{value:.3f}' for value in values)} |"
    yield from ("", "Variance of the gradient at equal tokens, relative to one future:", "")
    yield from (f"| futures | {' | '.join(POLICIES)} |", "|---" * (len(POLICIES) + 1) + "|")
    for count in FUTURES:
        values = [estimates[f"grpo_ratio_f{count}{end}"] for end in POLICIES.values()]
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


def write_page(folder: Path) -> None:
    """Write the page and its picture."""
    values = json.loads((folder / "estimator.json").read_text())["values"]
    results = evidence.results(folder / "study", read(str(folder / "desk.yaml")))
    tasks = {chain.task: Trainings({chain.title: content}) for chain, content in results}
    draw_tokens(tasks, folder / "tokens.svg")
    files.replace(folder / "page.md", "\n".join(lines(tasks, values)) + "\n")
    print(f"{folder / 'page.md'}: predicted beside measured, regret, questions by slot type, tokens, the estimator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the demo")
    parser.add_argument("--smoke", action="store_true", help="two arms and a few steps: shows that it runs, no figures")
    options = parser.parse_args()
    try:
        run(options.folder, options.smoke)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))}: ended with exit code {error.returncode}")
    write_page(options.folder)


if __name__ == "__main__":
    main()
