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
from megatron_collab.reproduce.results import ArmResult, results_of
from megatron_collab.reproduce.study import Arm, Column, Study, StudyTask, read
from megatron_collab.statistics import Estimate, mean


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
    # Problem n is right in one of the two seeds: each has a mean of 0.5, of at most 8 independent conversations. All
    # conversations have the same ITR, which says nothing about its spread.
    assert "| SFT | 50.0 [21.5, 78.5] | 13.5 | 60.0 | 58 |" in table
    row = json.loads((out / "results.json").read_text())[0]
    assert row["seeds"] == [50.0, 50.0] and row["scale"] == "published" and row["low"] == pytest.approx(21.5, abs=0.1)
    assert row["pass@2"]["value"] == 1 and row["pass^2"] == {
        "value": 0.0,
        "low": 0.0,
        "high": pytest.approx(0.49, abs=0.01),
    }
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
    study, options = small(), StudyOptions(tmp_path, ["sums"], ["base"], "models/m", seeds=2)
    right, itr = results_of(study, options, "sums", "base") or ()
    assert right and right.missing == 1 and right.seeds == (pytest.approx(66.667, rel=1e-4), 50.0)
    assert right.scores == {"t0": [1, 1], "t1": [0, 0], "t2": [1, 0], "t3": [1]}
    assert right.estimate == mean(right.scores.values()).scaled(100) and right.estimate.value == 62.5
    assert itr and itr.estimate.value == pytest.approx(2 * 100 * ((1 + 2 * 0.8) - 2.5)), "2 (S - 2.5), in percent"
    assert results_of(study, options, "sums", "sft") is None


def test_the_page_says_what_this_command_made_different() -> None:
    study = read("collabllm")
    options = StudyOptions(Path("o"), ["math"], ["base", "grpo"], "Qwen/Qwen3-8B", settings=("train.steps=3",))
    columns = study.tasks["math"].columns
    scores = {f"t{number}": [0.0] for number in range(150)}
    few = ArmResult(columns[0], Estimate(12.34, 9.34, 15.34), (12.0,), scores, 0)
    tokens = ArmResult(columns[1], Estimate(2.5), (2.5,), {"t0": [2.5]}, 0, ("rollout.system_prompt",))
    own = ArmResult(columns[2], Estimate(0.75, 0.5, 0.8), (0.75,), scores, 7, ("reward.metrics.interactivity.prompt",))
    results = {("math", "base"): [few, tokens, own], ("math", "grpo"): None}
    markdown = page(study, options, results, [("math/base_eval", 12.0, 1.25), ("math/rows_sft", 0.5, None)])
    own_scale = [f"{name}, own scale | published, other scale" for name in ("Tokens (k)", "ITR")]
    assert f"| | ACC | published | {' | '.join(own_scale)} |" in markdown
    assert "| Base | 12.3 [9.34, 15.3] | 11 | 2.50 | 3.4 | 0.75 [0.50, 0.80] | 44 |" in markdown
    assert "| GRPO-MR | - |  | - |  | - |  |" in markdown
    for line in (
        "- The model is `Qwen/Qwen3-8B`; the study's is `meta-llama/Llama-3.1-8B-Instruct`.",
        "- Settings of the command line: `train.steps=3`.",
        "- Not evaluated: Proactive Base, SFT, PPO, Offline DPO, Online DPO.",
        "- MATH-Chat: 150 problems were evaluated, and 200 were to be.",
        "- MATH-Chat: ITR is on our own scale; the published one needs `reward.metrics.",
        "- MATH-Chat: 7 conversations have no ITR; they are left out.",
        "| all | 12.5 | 1.25 |",
    ):
        assert line in markdown


def test_a_column_is_on_the_published_scale_only_under_the_authors_prompts(tmp_path: Path) -> None:
    """As a file of the user's; one of ours by its name is none."""
    column = Column("interactivity", "ITR", 400, -300, ["reward.metrics.interactivity.prompt"])
    (tmp_path / "authors.j2").write_text("{{ conversation }}")
    setting = f"{column.prompts[0]}={tmp_path / 'authors.j2'}"
    assert column.lacks([setting]) == [] and column.lacks([setting, f"{column.prompts[0]}=null"]) == [*column.prompts]
    assert column.lacks([]) == column.lacks([f"{column.prompts[0]}=interactivity_holistic.j2"]) == [*column.prompts]
    assert column.scaled(Estimate(0.75, 0.5, 1.0), False) == Estimate(0.75, 0.5, 1.0)
    assert column.scaled(Estimate(0.75, 0.5, 1.0), True) == Estimate(0.0, -100.0, 100.0)


def test_gains_are_paired_by_problem(tmp_path: Path) -> None:
    """Two of 40 problems more are solved, in both seeds."""
    arms = {"base": [0] * 20 + [1] * 20, "sft": [0] * 18 + [1] * 22}
    study = small()
    for arm, scores in arms.items():
        folder = tmp_path / "sums" / f"{arm}_eval"
        folder.mkdir(parents=True)
        record_evaluations(folder)
        for seed in range(2):
            rows = [future(f"t{n}", right=score, interactivity=0.8) for n, score in enumerate(scores)]
            write_jsonl(folder / f"eval_seed{seed}_model.jsonl", rows)
    options = StudyOptions(tmp_path, ["sums"], ["base", "sft"], study.model, seeds=2)
    results = {("sums", arm): results_of(study, options, "sums", arm) for arm in arms}
    base, sft = (columns[0] for columns in results.values() if columns)
    assert base and sft
    gain = sft.gain(base)
    assert gain.value == pytest.approx(5.0) and -10 < gain.low < 5 < gain.high < 20
    assert gain.high - gain.low < 0.7 * (sft.estimate.high - base.estimate.low - gain.value), "narrower than unpaired"
    assert f"| SFT | Base | {gain.text('{:+.2f}'.format)} | +0.00 |" in page(study, options, results, [])
