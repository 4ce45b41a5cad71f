"""The booking world in two runs: supervised training on mixed behavior, then GRPO with multiturn-aware reward.

Each run is one `megatron-collab train`; interrupted at any point, the same command resumes. --compare also runs the
second stage with the reward of the trained turn alone. The last line printed is result.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_collab.commands import ArgumentParser
from megatron_collab.settings import WRITTEN_FOLDER, check_path


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser("quickstart", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs [0]")
    parser.add_argument("--root", type=Path, default=Path("runs/quickstart"), help="folder of the runs [%(default)s]")
    parser.add_argument("--compare", action="store_true", help="also train on the reward of the trained turn alone")
    parser.add_argument("overrides", nargs="*", metavar="option=value", help="settings of every run")
    options = parser.parse_args(arguments)
    check_path("--root", options.root, WRITTEN_FOLDER)
    root = options.root / f"seed{options.seed}"
    common = [f"run.seed={options.seed}", f"data.dir={root}/world", *options.overrides]
    second_stage = ["experiment=booking", f"model.path={root}/sft/hf", *common]

    print(f"1. Supervised training on mixed behavior -> {root}/sft", flush=True)
    train("experiment=booking_sft", f"run.dir={root}/sft", *common)
    print(f"2. GRPO with multiturn-aware reward -> {root}/rl", flush=True)
    train(*second_stage, f"run.dir={root}/rl")
    result = read(root / "rl")
    result["train_minutes"] = round(read(root / "sft")["train_minutes"] + result["train_minutes"], 2)
    if options.compare:
        print(f"3. GRPO with the reward of the trained turn alone -> {root}/single_turn", flush=True)
        train(*second_stage, f"run.dir={root}/single_turn", "reward.mode=single_turn")
        result["single_turn_ask_after"] = read(root / "single_turn")["ask_when_missing_after"]
    (root / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"\nReport: {root}/rl/report.html\n"
        f"Learned: asks when something is missing {result['ask_when_missing_before']:.3f} -> "
        f"{result['ask_when_missing_after']:.3f}, asks when nothing is {result['needless_before']:.3f} -> "
        f"{result['needless_after']:.3f}, right when something was missing {result['accuracy_before']:.3f} -> "
        f"{result['accuracy_after']:.3f}, in {result['train_minutes']} minutes."
    )
    print(json.dumps(result))
    return 0


def train(*overrides: str) -> None:
    """One training run; if it fails, this process ends with its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "megatron_collab.train", *overrides])
    code = None
    while code is None:
        with suppress(KeyboardInterrupt):  # sent by the terminal to the trainer too, which ends after its step
            code = process.wait()
    if code != 0:
        sys.exit(code)


def read(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())
