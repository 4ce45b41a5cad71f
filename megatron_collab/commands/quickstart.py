"""The main job in two runs: supervised training on mixed behaviour, then GRPO with multiturn-aware reward.

`python tools/quickstart.py [--seed N] [--compare] [--root DIR] [option=value …]`. Each run is
`python -m megatron_collab.train`; stopped at any point, the same command goes on. `--compare` also runs the
second stage with the reward of the turn alone. Prints result.json last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--compare", action="store_true", help="also train on the reward of the turn alone")
    parser.add_argument("overrides", nargs="*", help="options for every run, such as parallel.tp=1 parallel.pp=2")
    arguments = parser.parse_args()
    root = arguments.root / f"seed{arguments.seed}"
    common = [f"run.seed={arguments.seed}", f"data.dir={root}/world", *arguments.overrides]
    second_stage = ["experiment=booking", f"model.path={root}/sft/hf", *common]

    print(f"1. Supervised training on mixed behaviour -> {root}/sft", flush=True)
    train("experiment=booking_sft", f"run.dir={root}/sft", *common)
    print(f"2. GRPO with multiturn-aware reward -> {root}/rl", flush=True)
    train(*second_stage, f"run.dir={root}/rl")
    alone = None
    if arguments.compare:
        print(f"3. GRPO with the reward of the turn alone -> {root}/single_turn", flush=True)
        train(*second_stage, f"run.dir={root}/single_turn", "reward.mode=single_turn")
        alone = read(root / "single_turn")["ask_when_missing_after"]

    result = read(root / "rl")
    result["train_minutes"] = round(read(root / "sft")["train_minutes"] + result["train_minutes"], 2)
    result["single_turn_ask_after"] = alone
    (root / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    report = root / "rl" / "report.html"
    print(
        f"\nReport: {report}\n"
        f"Learned: asks when something is missing {result['ask_when_missing_before']:.3f} -> "
        f"{result['ask_when_missing_after']:.3f}, asks when nothing is {result['needless_before']:.3f} -> "
        f"{result['needless_after']:.3f}, final answer right {result['accuracy_before']:.3f} -> "
        f"{result['accuracy_after']:.3f}, in {result['train_minutes']} minutes."
    )
    print(json.dumps(result))
    return 0


def train(*overrides: str) -> None:
    """One run of the trainer; its failure is ours, with its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "megatron_collab.train", *overrides])
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal has told the trainer too; it puts its processes away
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = 130
    if code != 0:
        sys.exit(code)


def read(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    sys.exit(main())
