"""Gain from training the later turns of futures too (rollout.train_turns=all against first), in the booking world.

`python tools/bench/train_turns.py [--seeds 0 1] [--steps 80] [--root runs/train_turns] [--smoke]` trains from the
supervised model on tasks that all begin with the user's first message, so that second turns occur only in futures.
Both runs sample the same number of conversations under the same budgets. `right_once_told`: of the conversations whose
first reply asks for exactly what is missing, the share that ends with the right booking: how good the turns after the
first are. Prints a table and, last, one JSON object with the means over the seeds.
--smoke: one seed of two steps on one rank in a temporary folder, only with train_turns=all and only `booking_right`,
since no question may be the right one yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

# A model that has hardly learned never ends its turns, which scores nothing.
SMOKE: tuple[str, ...] = (
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.rollouts_per_prompt=2",
    "rollout.futures=2",
)
SMOKE += ("optim.warmup_steps=1", "train.eval_tasks=4", "reward.malformed=null")
SMOKE += ("launch.nproc_per_node=1", "parallel.tp=1")
TURNS = ("first", "all")
METRICS = ("ask_when_missing", "right_once_told", "right_when_missing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--root", type=Path, default=Path("runs/train_turns"))
    parser.add_argument("--smoke", action="store_true", help="one seed of two steps: shows that it runs, no figures")
    arguments = parser.parse_args()
    if arguments.smoke:
        with TemporaryDirectory() as folder:
            measure(arguments.seeds[:1], 2, Path(folder), ["all"], ["booking_right"], SMOKE)
    else:
        measure(arguments.seeds, arguments.steps, arguments.root, TURNS, METRICS)


def measure(
    seeds: Sequence[int],
    steps: int,
    folder: Path,
    trained: Sequence[str],
    metrics: Sequence[str],
    overrides: Sequence[str] = (),
) -> None:
    values: dict[str, list[float]] = {}
    for seed in seeds:
        root = folder / f"seed{seed}"
        common = [f"run.seed={seed}", f"data.dir={root}/world", *overrides]
        train("experiment=booking_sft", f"run.dir={root}/sft", *common)
        first_only(root / "world" / "train.jsonl", root / "first_messages.jsonl")
        for turns in trained:
            train(
                "experiment=booking",
                *common,
                f"run.dir={root}/{turns}",
                f"model.path={root}/sft/hf",
                f"data.train={root}/first_messages.jsonl",
                f"train.steps={steps}",
                f"rollout.train_turns={turns}",
                "reward.weights.right_once_told=0",
                "reward.metrics.right_once_told.metric=megatron_collab.environments.booking_metrics:RightOnceTold",
            )
            evaluations = json.loads((root / turns / "evaluations.json").read_text())
            rows = [json.loads(line) for line in (root / turns / "metrics.jsonl").read_text().splitlines()]
            for metric in metrics:
                values.setdefault(f"before_{metric}", []).append(evaluations["before"][f"score/{metric}"])
                values.setdefault(f"{turns}_{metric}", []).append(evaluations["after"][f"score/{metric}"])
            seconds = sum(row["seconds/rollout"] + row["seconds/update"] for row in rows)
            values.setdefault(f"{turns}_minutes", []).append(seconds / 60)

    print("\n| | " + " | ".join(f"seed {seed}" for seed in seeds) + " |")
    print("|---" * (len(seeds) + 1) + "|")
    for key, shown in values.items():
        print(f"| {key} | " + " | ".join(f"{value:.3f}" for value in shown[:: len(shown) // len(seeds)]) + " |")
    means = {key: round(sum(shown) / len(shown), 4) for key, shown in values.items()}
    print(json.dumps({"name": "train_turns", "values": means}))


def train(*overrides: str) -> None:
    subprocess.run([sys.executable, "-m", "megatron_collab.train", *overrides], check=True)


def first_only(tasks: Path, target: Path) -> None:
    """Write to `target` the tasks whose prompt is only the user's first message."""
    lines = [line for line in tasks.read_text().splitlines() if len(json.loads(line)["prompt"]) == 1]
    target.write_text("".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
