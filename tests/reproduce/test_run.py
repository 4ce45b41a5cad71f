"""A study is run in order, goes on where it was, stops at its budget, and its page says what was found."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import ConfigError
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.reproduce import plan, run
from megatron_collab.reproduce.page import page
from megatron_collab.reproduce.plan import Stage, StudyOptions
from megatron_collab.reproduce.results import Estimate, estimates
from megatron_collab.reproduce.study import Arm, Column, Study, StudyTask, read


def small() -> Study:
    columns = (Column("right", "ACC", 100), Column("interactivity", "ITR", 400, -300))
    task = StudyTask("Sums", "problems.jsonl", columns, ["experiment=booking"], eval_tasks=4)
    published = {"sums": [11.0, 44.0]}
    arms = {
        "base": Arm("Base", published=published),
        "sft": Arm("SFT", rows="sft", train=["train.stage=sft"], published={"sums": [13.5, 58.0]}),
    }
    return Study(
        "small", "A small study", "models/m", {"sums": task}, arms, equal=["The formula."], different=["More."]
    )


class Programs:
    """In place of programs: what each would write. `failing`: one of them ends with exit code 7."""

    def __init__(self, usd: float = 0.0, failing: str = "") -> None:
        self.usd, self.failing, self.ran = usd, failing, list[list[str]]()

    def __call__(self, arguments: Sequence[str]) -> int:
        self.ran.append(list(arguments))
        options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        if "--out" in arguments:
            folder = Path(arguments[arguments.index("--out") + 1])
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps({"kept": {"train": 64}}))
            return 0
        folder = Path(options["run.dir"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spend.json").write_text(json.dumps({"usd": self.usd}))
        if folder.name == self.failing:
            return 7
        for seed in range(2):
            rows = [future(f"t{n}", right=(n + seed) % 2, interactivity=0.9) for n in range(4)]
            write_jsonl(folder / f"eval_seed{seed}_model.jsonl", rows)
        record_evaluations(folder)
        return 0


def future(task: str, **scores: float | None) -> dict[str, Any]:
    """A row of a transcript; a score of None is missing."""
    recorded = {name: {"missing": "failed"} if score is None else score for name, score in scores.items()}
    ended = {"reward": None, "ending": "user_done", "error": "", "messages": []}
    return {"task": task, "rollout": 0, "future": 0, "scores": recorded, **ended}


def record_evaluations(folder: Path) -> None:
    """That both seeds are evaluated, and the program has ended."""
    evaluations = {f"seed{seed}/model": {"step": 0, "set": f"seed{seed}"} for seed in range(2)}
    (folder / "evaluations.json").write_text(json.dumps(evaluations))
    (folder / "result.json").write_text("{}")


def start(
    monkeypatch: pytest.MonkeyPatch, out: Path, programs: Programs, budget: float | None = None, **more: object
) -> tuple[int, list[Stage]]:
    monkeypatch.setattr(run, "_program", programs)
    study = small()
    options = replace(StudyOptions(out, ["sums"], ["base", "sft"], study.model, seeds=2, pilot=0), **more)
    stages = plan.stages(study, options)
    return run.run(study, options, stages, budget), stages


def test_a_study_goes_on_where_a_program_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert start(monkeypatch, out, Programs(failing="sft"))[0] == 7
    assert "4/5 sums/sft: ended with exit code 7" in capsys.readouterr().err
    assert "| SFT | - | 13.5 | - | 58 |" in (out / "page.md").read_text()
    resumed = Programs()
    assert start(monkeypatch, out, resumed)[0] == 0
    assert len(resumed.ran) == 2 and "train.steps=4" in resumed.ran[0], "64 rows, 16 a step"
    assert "3/5 sums/base_eval: done" in capsys.readouterr().out
    table = (out / "page.md").read_text()
    # Problem n is right in one of the two seeds: each has a mean of 0.5.
    assert "| SFT | 50.0 ± 0.00 | 13.5 | 60.0 ± 0.00 | 58 |" in table
    assert json.loads((out / "results.json").read_text())[0]["seeds"] == [50.0, 50.0]
    with pytest.raises(ConfigError, match="sums/base_eval was run with other settings; choose another folder"):
        start(monkeypatch, out, Programs(), settings=("run.seed=1",))
    assert start(monkeypatch, out, resumed, settings=("llm.max_concurrent=3",))[0] == 0 and len(resumed.ran) == 2


def test_programs_get_what_is_left_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    first = Programs(usd=2.0)
    assert start(monkeypatch, out, first, budget=4.0)[0] == 3
    limits = [next((a for a in ran if a.startswith("llm.budget_usd=")), None) for ran in first.ran]
    assert limits == [None, None, "llm.budget_usd=4.0", "llm.budget_usd=2.0"]
    assert "5/5 sums/sft_eval: --budget=4 is used up: 4 USD" in capsys.readouterr().err
    second = Programs(usd=2.0)
    assert start(monkeypatch, out, second, budget=7.0)[0] == 0
    assert [ran[-1] for ran in second.ran] == ["llm.budget_usd=3.0"]
    # A program that its budget has ended fails, and what it has spent so far counts for its next start.
    failed = Programs(usd=3.0, failing="base_eval")
    assert start(monkeypatch, tmp_path / "more", failed, budget=3.0)[0] == 3
    assert start(monkeypatch, tmp_path / "more", Programs(), budget=9.0)[0] == 0


def test_two_of_a_kind_do_not_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def inside(_: Sequence[str]) -> int:
        with pytest.raises(ConfigError, match="this study is running"):
            start(monkeypatch, tmp_path, Programs())
        return 5

    assert start(monkeypatch, tmp_path, inside)[0] == 5  # type: ignore[arg-type]


@pytest.mark.processes
def test_signals_reach_the_program_and_its_exit_code_is_the_studys(tmp_path: Path) -> None:
    program = "import signal, sys, time, pathlib\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    program += f"pathlib.Path({str(tmp_path / 'there')!r}).touch()\ntime.sleep(60)\n"
    code = f"import sys; from megatron_collab.reproduce import run; sys.exit(run._program(['-c', {program!r}]))"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not (tmp_path / "there").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    finally:
        process.kill()


def test_means_are_over_problems_and_seeds(tmp_path: Path) -> None:
    folder = tmp_path / "sums" / "base_eval"
    folder.mkdir(parents=True)
    record_evaluations(folder)
    scores = [[1, 0, 1, None], [1, 0, 0, 1]]
    for seed, row in enumerate(scores):
        rows = [future(f"t{n}", right=score, interactivity=0.8) for n, score in enumerate(row)]
        write_jsonl(folder / f"eval_seed{seed}_model.jsonl", [*rows, future("other")])
    right, itr = estimates(tmp_path, small(), "sums", "base", 2) or ()
    # Means of the problems 1, 0, 0.5, 1: 0.625, with a standard error of sqrt(0.2292 / 4).
    assert right == Estimate(
        62.5, pytest.approx(100 * 1.959964 * 0.239357, rel=1e-5), (pytest.approx(66.667, rel=1e-4), 50.0), 4, 1
    )
    assert itr and itr.value == pytest.approx(2 * 100 * ((1 + 2 * 0.8) - 2.5)), "2 (S - 2.5), in percent"
    assert estimates(tmp_path, small(), "sums", "sft", 2) is None


def test_the_page_says_what_this_command_made_different() -> None:
    study = read("collabllm")
    options = StudyOptions(Path("o"), ["math"], ["base", "grpo"], "Qwen/Qwen3-8B", settings=("train.steps=3",))
    few = Estimate(12.34, 3.0, (12.0,), 150, 0)
    results = {
        ("math", "base"): [few, Estimate(2.5, float("nan"), (2.5,), 1, 0), replace(few, missing=7)],
        ("math", "grpo"): None,
    }
    markdown = page(study, options, results, [("math/base_eval", 12.0, 1.25), ("math/rows_sft", 0.5, None)])
    assert "| | ACC | published | Tokens (k) | published | ITR | published |" in markdown
    assert "| Base | 12.3 ± 3.00 | 11 | 2.50 | 3.4 | 12.3 ± 3.00 | 44 |" in markdown
    assert "| GRPO-MR | - |  | - |  | - |  |" in markdown
    for line in (
        "- The model is `Qwen/Qwen3-8B`; the study's is `meta-llama/Llama-3.1-8B-Instruct`.",
        "- Settings of the command line: `train.steps=3`.",
        "- Not evaluated: Proactive Base, SFT, PPO, Offline DPO, Online DPO.",
        "- MATH-Chat: 150 problems were evaluated, and 200 were to be.",
        "- MATH-Chat: 7 conversations have no ITR; they are left out.",
        "| all | 12.5 | 1.25 |",
    ):
        assert line in markdown
