"""A study is run in order, goes on where it was, stops at its budget, and its page says what was measured."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.data.datasets import write_jsonl
from megatron_collab.reproduce import plan, run
from megatron_collab.reproduce.page import page
from megatron_collab.reproduce.plan import Stage, StudyOptions
from megatron_collab.reproduce.results import ArmResult, Effort, results_of
from megatron_collab.reproduce.study import Arm, Column, Study, StudyTask, read
from megatron_collab.runtime import signals
from megatron_collab.settings import ConfigError
from megatron_collab.statistics import Estimate, mean


def small() -> Study:
    columns = (Column("booking_right", "ACC", 100), Column("ask_when_missing", "ITR", 400, -300))
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

    async def run(self, arguments: Sequence[str], log: Path | None = None) -> int:
        self.ran.append(list(arguments))
        options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        if "--out" in arguments:
            folder = Path(arguments[arguments.index("--out") + 1])
            folder.mkdir(parents=True)
            (folder / "summary.json").write_text(json.dumps({"kept": {"train": 64}}))
            return 0
        folder = Path(options["run.dir"])
        await asyncio.sleep(0)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spend.json").write_text(json.dumps({"usd": self.usd}))
        if folder.name == self.failing:
            return 7
        for seed in range(2):
            rows = [future(f"t{n}", booking_right=(n + seed) % 2, ask_when_missing=0.9) for n in range(4)]
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
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    programs: Programs,
    budget: float | None = None,
    study: Study | None = None,
    **more: object,
) -> tuple[int, list[Stage]]:
    monkeypatch.setattr(run.Programs, "run", lambda _, *arguments: programs.run(*arguments))
    study = study or small()
    options = replace(StudyOptions(out, ["sums"], ["base", "sft"], study.model, seeds=2, pilot=0), **more)
    stages = plan.stages(study, options)
    return run.run(study, options, stages, budget), stages


@pytest.mark.seconds
def test_a_study_goes_on_where_a_program_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert start(monkeypatch, out, Programs(failing="sft"))[0] == 7
    assert "4/5 sums/sft: ended with exit code 7" in capsys.readouterr().err
    assert "| SFT | - | 13.5 | - | 58 |  |  |" in (out / "page.md").read_text()
    resumed = Programs()
    assert start(monkeypatch, out, resumed)[0] == 0
    assert len(resumed.ran) == 2 and "train.epochs=1" in resumed.ran[0]
    assert "3/5 sums/base_eval: done" in capsys.readouterr().out
    table = (out / "page.md").read_text()
    # Problem n is right in one of the two seeds: each has a mean of 0.5, of at most 8 independent conversations. All
    # conversations have the same ITR, which says nothing about its spread.
    assert "| SFT | 50.0 [21.5, 78.5] | 13.5 | 60.0 | 58 |  |  |" in table
    (heads,) = (line for line in table.splitlines() if "pass^2" in line and line.startswith("| |"))
    assert heads == "| | ACC pass@2 | ACC pass^2 |" and "| SFT | 1.00 [0.51, 1.00] | 0.00 [0.00, 0.49] |" in table
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
    arms = small().arms
    longer = replace(small(), arms={**arms, "sft": replace(arms["sft"], epochs=2)})
    with pytest.raises(ConfigError, match="sums/sft was run with other settings"):
        start(monkeypatch, out, Programs(), study=longer)


@pytest.mark.seconds
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


def test_after_a_signal_nothing_starts_even_if_the_program_ends_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = Programs()
    study = small()
    options = StudyOptions(tmp_path, ["sums"], ["base", "sft"], study.model, seeds=2, pilot=0)

    async def received(running: run.Programs, arguments: Sequence[str], log: Path | None = None) -> int:
        running.received = signal.SIGTERM
        return await programs.run(arguments)

    monkeypatch.setattr(run.Programs, "run", received)
    assert run.run(study, options, plan.stages(study, options), None) == 143 and len(programs.ran) == 1


def test_a_program_that_a_signal_ends_as_it_starts_ends_the_study_with_the_code_of_the_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def killed(running: run.Programs, arguments: Sequence[str], log: Path | None = None) -> int:
        running.received = signal.SIGUSR1
        return -signal.SIGUSR1

    monkeypatch.setattr(run.Programs, "run", killed)
    study = small()
    options = StudyOptions(tmp_path, ["sums"], ["base"], study.model, seeds=2, pilot=0)
    assert run.run(study, options, plan.stages(study, options), None) == signals.EXIT_PREEMPTED


def test_trainings_run_side_by_side_and_the_page_has_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = Programs()
    monkeypatch.setattr(run.Programs, "run", lambda _, *arguments: programs.run(*arguments))
    study = small()
    options = StudyOptions(tmp_path, ["sums"], ["base", "sft"], study.model, seeds=2, train_seeds=3, pilot=0)
    stages = plan.stages(study, options)
    assert run.run(study, options, stages, None, jobs=2) == 0
    assert len(programs.ran) == len(stages) == 15 and not [stage for stage in stages if not stage.done]
    assert set(json.loads((tmp_path / "stages.json").read_text())) == {stage.title for stage in stages}
    markdown = (tmp_path / "page.md").read_text()
    assert "Each arm is trained 3 times." in markdown and "| SFT | 50.0 | 13.5 | " in markdown
    row = json.loads((tmp_path / "results.json").read_text())[0]
    assert row["problems"] == 4 and row["seeds"] == [50.0, 50.0] and row["pass@2"]["low"] is None


def test_programs_that_lie_in_no_folder_of_a_seed_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = replace(small(), train_seeds=2)
    (tmp_path / "sums" / "sft").mkdir(parents=True)
    hint = f"{tmp_path}/sums: sft: in no folder of a training seed; move them into {tmp_path}/sums/seed0 by hand if"
    for number in (1, 0):
        assert start(monkeypatch, tmp_path, Programs(), study=study)[0] == 0
        assert capsys.readouterr().err.count(hint) == number


def write_training(folder: Path, tokens: float | None) -> None:
    """A finished training of two steps."""
    folder.mkdir(parents=True)
    sampled = {} if tokens is None else {"sampled_tokens": tokens / 2}
    write_jsonl(folder / "metrics.jsonl", [{"step": step, "optimizer_steps": 4, **sampled} for step in range(2)])
    (folder / "result.json").write_text("{}")


def online_study(out: Path) -> tuple[Study, StudyOptions]:
    """Two online arms, trained three times: b solves 4 problems more each time, and mostly more reward in `hard`."""
    columns = (Column("booking_right", "ACC", 100), Column("reward", "reward", set="hard"))
    task = StudyTask("Sums", "p.jsonl", columns, eval_sets={"easy": "e", "hard": "h"}, reference="world/known.json")
    arms = {"base": Arm("Base"), **{name: Arm(f"Arm {name}", "base", "rl", train=["algo=grpo"]) for name in "ab"}}
    study = Study("online", "Online arms", "m", {"sums": task}, arms)
    for seed in range(3):
        folder = out / "sums" / f"seed{seed}"
        (folder / "world").mkdir(parents=True)
        (folder / "world" / "known.json").write_text(
            json.dumps({"Best": {"booking_right": 0.25 * seed, "hard/reward": 1.5}})
        )
        for arm, solved in {"base": 0, "a": 5 + seed, "b": 9 + seed}.items():
            if arm != "base":
                write_training(folder / arm, {"a": 1000.0, "b": 1050.0 + 50 * seed}[arm])
            evaluated = folder / f"{arm}_eval"
            evaluated.mkdir()
            (evaluated / "result.json").write_text("{}")
            names = ["easy_seed0", "hard_seed0"]
            records = {f"{name}/model": {"step": 0, "set": name} for name in names}
            (evaluated / "evaluations.json").write_text(json.dumps(records))
            rows = [future(f"t{n}", booking_right=float(n < solved)) for n in range(20)]
            write_jsonl(evaluated / "eval_easy_seed0_model.jsonl", rows)
            shift = (seed - 0.4) * 0.05 if arm == "b" else 0.0
            hard = [{**row, "reward": n % 3 * 0.1 + shift} for n, row in enumerate(rows)]
            write_jsonl(evaluated / "eval_hard_seed0_model.jsonl", hard)
    return study, StudyOptions(out, ["sums"], [*arms], "m", seeds=1, train_seeds=3)


def written(study: Study, options: StudyOptions) -> tuple[str, list[dict[str, Any]]]:
    run._write(study, options, [])
    return (options.out / "page.md").read_text(), json.loads((options.out / "results.json").read_text())


def test_online_arms_are_compared_pair_by_pair(tmp_path: Path) -> None:
    markdown, rows = written(*online_study(tmp_path))
    assert "| Best, predicted | 25.0 | 1.50 |  |  |" in markdown, "the mean over the trainings' worlds"
    assert re.search(r"^\| Arm b \| 50.0 \[.*\] \| 0.1[23] \[.*\] \| 8 \| 1,100 \|$", markdown, re.MULTILINE)
    assert "The online arms (Arm a, Arm b) are equal within 10 % in optimizer steps and sampled tokens." in markdown
    assert re.search(r"^\| Arm b \| Arm a \| \+20.00 \[\+\d\S*, \+\S+\] \| \+0.03 \[-.*\] \|$", markdown, re.MULTILINE)
    assert "\n- ACC: Arm b above Arm a\n- reward: no pair is told apart\n" in markdown
    better = next(row for row in rows if row["arm"] == "b" and row["column"] == "ACC")
    assert (better["optimizer_steps"], better["sampled_tokens"]) == (8, 1100)
    assert better["differences"][0]["over"] == "a" and better["differences"][0]["value"] == pytest.approx(20)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[", "Expecting value"),
        ("[1]", "no attribute 'items'"),
        ('{"Best": 3}', "no attribute 'items'"),
        ('{"Best": {"booking_right": "high"}}', "could not convert string to float"),
        (None, "No such file"),
    ],
)
def test_predictions_that_cannot_be_read_are_named_and_the_study_goes_on(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    study, options = online_study(tmp_path)
    file = tmp_path / "sums" / "seed1" / "world" / "known.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    markdown, _ = written(study, options)
    assert re.search(rf"^- Sums: {file} has no predictions: .*{reason}.*\.$", markdown, re.MULTILINE)
    assert "| Best, predicted | 25.0 | 1.50 |  |  |" in markdown, "of the two other trainings"


def test_policies_and_columns_without_a_prediction_are_left_empty(tmp_path: Path) -> None:
    study, options = online_study(tmp_path)
    for seed, row in enumerate(({}, {"Best": {"booking_right": 0.5}}, {"Worst": {"hard/reward": 0.5}})):
        (tmp_path / "sums" / f"seed{seed}" / "world" / "known.json").write_text(json.dumps(row))
    markdown, _ = written(study, options)
    assert "| Best, predicted | 50.0 |  |  |  |\n| Worst, predicted |  | 0.50 |  |  |" in markdown


def test_arms_that_were_trained_with_more_are_named(tmp_path: Path) -> None:
    study, options = online_study(tmp_path)
    for seed in range(3):
        file = tmp_path / "sums" / f"seed{seed}" / "b" / "metrics.jsonl"
        file.write_text(file.read_text().replace('"optimizer_steps": 4', '"optimizer_steps": 5'))
    (tmp_path / "sums" / "seed2" / "a_eval" / "result.json").unlink()
    markdown, _ = written(study, options)
    assert "- Sums: 2 of 3 trainings of Arm a are evaluated." in markdown
    assert "not equal: they differ by more than 10 % in optimizer steps (Arm a 8, Arm b 10)." in markdown


def test_two_of_a_kind_do_not_run_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Inside(Programs):
        async def run(self, arguments: Sequence[str], log: Path | None = None) -> int:
            with pytest.raises(ConfigError, match="this study is running"):
                start(monkeypatch, tmp_path, Programs())
            return 5

    assert start(monkeypatch, tmp_path, Inside())[0] == 5


def test_means_are_over_problems_and_seeds(tmp_path: Path) -> None:
    folder = tmp_path / "sums" / "base_eval"
    folder.mkdir(parents=True)
    record_evaluations(folder)
    scores = [[1, 0, 1, None], [1, 0, 0, 1]]
    for seed, row in enumerate(scores):
        rows = [future(f"t{n}", booking_right=score, ask_when_missing=0.8) for n, score in enumerate(row)]
        write_jsonl(folder / f"eval_seed{seed}_model.jsonl", [*rows, future("other")])
    study, options = small(), StudyOptions(tmp_path, ["sums"], ["base"], "models/m", seeds=2)
    right, itr = results_of(study, options, "sums", "base") or ()
    assert right and right.missing == 1 and right.seeds == (pytest.approx(66.667, rel=1e-4), 50.0)
    assert right.scores == {"sums": {"t0": [1, 1], "t1": [0, 0], "t2": [1, 0], "t3": [1]}}
    assert right.estimate == mean(right.scores["sums"].values()).scaled(100) and right.estimate.value == 62.5
    assert itr and itr.estimate.value == pytest.approx(2 * 100 * ((1 + 2 * 0.8) - 2.5)), "2 (S - 2.5), in percent"
    assert results_of(study, options, "sums", "sft") is None


def test_the_page_says_what_this_command_made_different() -> None:
    study = read("collabllm")
    options = StudyOptions(Path("o"), ["math"], ["base", "grpo"], "Qwen/Qwen3-8B", settings=("train.steps=3",))
    columns = study.tasks["math"].columns
    scores = {"math": {f"t{number}": [0.0] for number in range(150)}}
    few = ArmResult(columns[0], Estimate(12.34, 9.34, 15.34), (12.0,), scores, 0)
    tokens = ArmResult(columns[1], Estimate(2.5), (2.5,), {"math": {"t0": [2.5]}}, 0, ("rollout.system_prompt",))
    interactivity = ArmResult(
        columns[2], Estimate(0.75, 0.5, 0.8), (0.75,), scores, 7, ("reward.metrics.interactivity.prompt",)
    )
    results = {("math", "base"): [few, tokens, interactivity], ("math", "grpo"): None}
    efforts = {("math", "base"): Effort(), ("math", "grpo"): Effort(3, 12345.0)}
    markdown = page(study, options, results, efforts, [("math/base_eval", 12.0, 1.25), ("math/rows_sft", 0.5, None)])
    own_scale = [f"{name}, own scale | published, other scale" for name in ("Tokens (k)", "ITR")]
    assert f"| | ACC | published | {' | '.join(own_scale)} | optimizer steps | sampled tokens |" in markdown
    assert "| Base | 12.3 [9.34, 15.3] | 11 | 2.50 | 3.4 | 0.75 [0.50, 0.80] | 44 |  |  |" in markdown
    assert "| GRPO-MR | - |  | - |  | - |  | 3 | 12,345 |" in markdown
    for line in (
        "- The model is `Qwen/Qwen3-8B`; the study's is `meta-llama/Llama-3.1-8B-Instruct`.",
        "- Settings of the command line: `train.steps=3`.",
        "- Not evaluated: Proactive Base, SFT, PPO, Offline DPO, Online DPO.",
        "- MATH-Chat: only 150 of 200 problems were evaluated.",
        "- MATH-Chat: ITR is on our own scale; the published one needs `reward.metrics.",
        "- MATH-Chat: 7 conversations have no ITR and are left out.",
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
            rows = [future(f"t{n}", booking_right=score, ask_when_missing=0.8) for n, score in enumerate(scores)]
            write_jsonl(folder / f"eval_seed{seed}_model.jsonl", rows)
    options = StudyOptions(tmp_path, ["sums"], ["base", "sft"], study.model, seeds=2)
    results = {("sums", arm): results_of(study, options, "sums", arm) for arm in arms}
    base, sft = (columns[0] for columns in results.values() if columns)
    assert base and sft
    gain = sft.gain(base)
    assert gain.value == pytest.approx(5.0) and -10 < gain.low < 5 < gain.high < 20
    assert gain.high - gain.low < 0.7 * (sft.estimate.high - base.estimate.low - gain.value), "narrower than unpaired"
    assert f"| SFT | Base | {gain.text('{:+.2f}'.format)} | +0.00 |" in page(
        study, options, results, dict.fromkeys(results, Effort()), []
    )
