"""The measured result: the quickstart with comparison for several seeds, its table and its picture.

`python tools/bench/booking.py [--seeds 0 1 2] [--root runs/quickstart] [--smoke]` runs the seeds that have not finished
yet, writes docs/figures/booking.svg, prints a Markdown table of the shares, each with its 95 % interval (Wilson's, over
the tasks it counts; of all seeds together, over seeds and tasks), and, last, one JSON object with the worst value over
the seeds.
--smoke: one seed of a few steps on one rank in a temporary folder; the picture goes there too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib

from megatron_collab.observability import evaluations, transcripts
from megatron_collab.observability.records import number
from megatron_collab.statistics import Estimate, Tasks, mean, mean_of_seeds

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "booking.svg"
# A model that has hardly learned never ends its turns, which scores nothing.
SMOKE: tuple[str, ...] = (
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.rollouts_per_prompt=2",
    "train.eval_tasks=4",
)
SMOKE += ("rollout.futures=2", "optim.warmup_steps=1", "reward.malformed=null")
SMOKE += ("launch.nproc_per_node=1", "parallel.tp=1")
# key of result.json: (the bound, whether larger is better, what it is, RUN/EVALUATION/METRIC it is of)
BOUNDS = {
    "ask_when_missing_before": (0.45, False, "asks when something is missing, after SFT", "rl/before/ask_when_missing"),
    "ask_when_missing_after": (0.90, True, "… after GRPO with MR", "rl/after/ask_when_missing"),
    "single_turn_ask_after": (
        None,
        False,
        "… after GRPO with the reward of the turn alone",
        "single_turn/after/ask_when_missing",
    ),
    "needless_before": (None, False, "asks when nothing is missing, after SFT", "rl/before/ask_when_complete"),
    "needless_after": (0.05, False, "… after GRPO with MR", "rl/after/ask_when_complete"),
    "accuracy_before": (0.45, False, "right when something was missing, after SFT", "rl/before/right_when_missing"),
    "accuracy_after": (0.80, True, "… after GRPO with MR", "rl/after/right_when_missing"),
    "train_minutes": (12.0, False, "minutes of training on this machine", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--smoke", action="store_true", help="one seed of two steps: shows that it runs, no figures")
    arguments = parser.parse_args()
    if arguments.smoke:
        with TemporaryDirectory() as folder:
            measure(arguments.seeds[:1], Path(folder), Path(folder) / PICTURE.name, SMOKE)
    else:
        measure(arguments.seeds, arguments.root, PICTURE)


def measure(seeds: list[int], root: Path, picture: Path, overrides: tuple[str, ...] = ()) -> None:
    for seed in seeds:
        command = [sys.executable, "-m", "megatron_collab.commands", "quickstart"]
        command += [f"--seed={seed}", f"--root={root}", "--compare", *overrides]
        subprocess.run(command, check=True)
    folders = [root / f"seed{seed}" for seed in seeds]
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    draw(folders, picture)

    print("\n| | bound | " + " | ".join(f"seed {seed}" for seed in seeds) + " | all |")
    print("|---" * (len(results) + 3) + "|")
    worst = {}
    for key, (bound, larger, meaning, source) in BOUNDS.items():
        values = [result[key] for result in results]
        worst[key] = min(values) if larger else max(values)
        limit = "" if bound is None else f"{'≥' if larger else '≤'} {bound}"
        if source:
            tasks = [scores(folder, *source.split("/")) for folder in folders]
            shown = [*(mean(seed.values()) for seed in tasks), mean_of_seeds(tasks)]
        else:
            shown = [Estimate(value) for value in values]
        print(f"| {meaning} | {limit} | " + " | ".join(estimate.text() for estimate in shown) + " |")
    print(json.dumps({"name": "booking", "values": worst}))


def scores(folder: Path, run: str, moment: str, metric: str) -> Tasks:
    """The scores of an evaluation's conversations, by task."""
    file = evaluations.file_of(folder / run, moment)
    tasks: dict[str, list[float]] = {}
    for row in filter(None, transcripts.rows_of_file(file)):
        if (score := number(row["scores"].get(metric))) is not None:
            tasks.setdefault(f"{folder.name}/{row['task']}", []).append(score)
    return tasks


def draw(folders: list[Path], picture: Path) -> None:
    """Draw how often the policy asks when something is missing, by step: one thin line per seed and reward."""
    figure, axes = plt.subplots(figsize=(7, 3.2))
    runs = (("rl", "C0", "multiturn-aware reward"), ("single_turn", "C3", "reward of the turn alone"))
    for run, shade, label in runs:
        for i, folder in enumerate(folders):
            rows = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
            ask_rates = [row.get("score/ask_when_missing", nan) for row in rows]  # of few prompts, all may be complete
            axes.plot(
                range(len(ask_rates)), ask_rates, color=shade, alpha=0.7, linewidth=1, label=label if i == 0 else None
            )
    axes.set(xlabel="step", ylabel="asks when something is missing", ylim=(0, 1))
    axes.legend(frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
