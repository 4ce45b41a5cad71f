"""Every bench with --smoke runs to its end and gives its values; the figures themselves need the whole bench.

The runs are exhaustive, and a landing starts a fifth of them. Each landing checks that the benches compile and that the
modules of this repository have the names that the benches import.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from symtable import symtable

import pytest

from megatron_collab.runtime.process import EXIT_BAD_INPUT

ROOT = Path(__file__).resolve().parents[2]
BENCHES = sorted(file.stem for file in (ROOT / "tools" / "bench").glob("*.py"))
REPOSITORY = ("megatron_collab", "tests", "tools")
# No order beats the bounds that the benches divide by, and nothing may be lost, read wrongly or played again.
HOLDS: dict[str, Callable[[dict[str, float]], bool]] = {
    "accuracy": lambda values: (
        sum(values[fault] for fault in ("wrong", "gold_wrong", "perturbed_accepted", "sure_and_wrong")) == 0
        and values["right_refused"] <= 0.02
    ),
    "bad_input": lambda values: (
        sum(values[bad] for bad in ("traceback", "accepted_nonsense", "over_two_lines", "crash")) == 0
    ),
    "build": lambda values: values["makespan_over_bound"] >= 1 and values["turns_over_bound"] >= 1,
    "credit": lambda values: all(values[f"{name}/mr_3/first"] > 0.4 for name in ("supervised", "asking")),
    "dpo": lambda values: abs(values["loss_1"] - math.log(2)) <= 1e-5 and values["loss_2"] < values["loss_1"],
    "estimator": lambda values: (
        values["lost_w3"] == 0 < values["lost_w1"]
        and values["value_w1_often"] < values["value_w1"] < values["value_often"]
    ),
    "futures": lambda values: values["makespan_over_bound"] >= 1 and values["serial_over_ours"] >= 1,
    "in_flight": lambda values: values["lost"] == 0 and values["conversations"] >= 100,
    "intervals": lambda values: values["percentile_2"] < 0.7 < values["mean_2"] and values["seeds_3_lowest"] > 0.8,
    "judge_outage": lambda values: values["wrong_scores"] == values["zero_by_failure"] == values["away_wrong"] == 0,
    "judge_parse": lambda values: values["crashes"] == values["wrong_type"] == values["wrong_value"] == 0,
    "lora": lambda values: (
        values["peft_step_diff"] <= 1e-5
        and max(values["logprob_diff"], values["logprob_diff_adapters"]) <= 1e-4
        and values["sync_bytes_adapters"] < values["sync_bytes"]
    ),
    "mutants": lambda values: values["mutants"] == 10 and 0.5 < values["killed"] <= 1,
    "personal": lambda values: values["left"] == 0 and values["over_scrubbed"] <= 0.02,
    "preemption": lambda values: (values["saved"], values["equal"], values["played_again"]) == (values["of"], 1, 0),
    "rehearse": lambda values: values["failed"] == 0 and values["rank_classes"] > 0,
    "sandbox": lambda values: values["earned"] == values["missing_by_choice"] == values["honest_failed"] == 0,
    "sentinels": lambda values: (
        14 <= values["planted_hacks_caught"] < values["planted_hacks"]
        and values["false_alarms_per_100_steps"] <= 0.5
        and values["overfit_caught"] == values["runs"]
        and all(0 <= values[f"overfit_mild/{tasks}"] <= 1 for tasks in (64, 128, 256))
        and 0.05 < values["excused_steps"] < 0.3
    ),
    "step": lambda values: values["loss_diff"] <= 1e-6 and values["norm_diff"] <= 1e-4,
    "replay": lambda values: (values["live_calls"], values["equal"]) == (0, 1) and values["calls_per_second"] > 0,
    "timeline": lambda values: values["8/step_over_bound"] >= 1 and 0 < values["8_cut/idle"] < values["8/idle"] < 1,
    "timeline_check": lambda values: (
        0.9 <= values["quickstart/prefill_over_measured"] <= 1.1 and 0 < values["quickstart/server_busy"] <= 1
    ),
    "view": lambda values: values["bytes_over_jsonl"] <= 0.2 and values["futures"] == 2 * 64 * 8 * 3,
    "reward_loop": lambda values: values["time_over_ideal"] >= 1,
}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "tools" / "bench").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_bench_compiles_and_what_it_imports_from_here_exists(file: Path) -> None:
    assert list(missing_imports(file.read_text(), file.name)) == []


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_adds_the_repository_to_its_path_before_it_imports_from_there(name: str) -> None:
    """`python tools/bench/NAME.py` finds what lies beside the file, and what is installed."""
    source = (ROOT / "tools" / "bench" / f"{name}.py").read_text()
    added = source.find("sys.path.insert(0, str(")
    imports = [line.start() for line in re.finditer(r"^ *(?:from|import) (?:tests|tools)\b", source, re.MULTILINE)]
    assert not imports or 0 <= added < min(imports)


def test_a_name_or_module_that_is_gone_is_missing() -> None:
    lines = "from tools.bench.simulated.clock import VirtualLoop, Gone\nfrom tools.bench import lora, gone\n"
    source = f"{lines}def late():\n    import tools.gone, json\n    from tests.gone import name"
    missing = ["tools.bench.simulated.clock.Gone", "tools.bench.gone", "tools.gone", "tests.gone.name"]
    assert sorted(missing_imports(source, "bench.py")) == sorted(missing)
    with pytest.raises(SyntaxError):
        list(missing_imports("def late(:", "bench.py"))


def missing_imports(source: str, filename: str) -> Iterator[str]:
    """What the source imports, anywhere in it, from packages of this repository that do not have it.

    Raises SyntaxError if the source does not compile.
    """
    compile(source, filename, "exec")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in REPOSITORY:
            names = names_of(str(node.module))
            for alias in node.names:
                if alias.name not in names and module_file(f"{node.module}.{alias.name}") is None:
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in REPOSITORY and module_file(alias.name) is None:
                    yield alias.name


@cache
def names_of(module: str) -> frozenset[str]:
    """The names that the module binds at its top level; none if it does not exist."""
    if (file := module_file(module)) is None or file.is_dir():
        return frozenset()
    symbols = symtable(file.read_text(), str(file), "exec").get_symbols()
    return frozenset(symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported())


def module_file(module: str) -> Path | None:
    """The file of a module of this repository; the folder of a package that has no file."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"), path)
    return next((candidate for candidate in candidates if candidate.exists()), None)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_runs(name: str, dataset: Callable[[str], Path]) -> None:
    if name == "accuracy":
        dataset("gsm8k")
    command = [sys.executable, f"tools/bench/{name}.py", "--smoke"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-3000:]
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["name"] == name
    assert result["values"] and all(math.isfinite(value) for value in result["values"].values())
    assert HOLDS.get(name, lambda values: True)(result["values"]), result["values"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_bench_of_a_gpu_is_refused_without_one() -> None:
    """But for --smoke, which runs it on the CPU with TransformerEngine over reference kernels."""
    command, hidden = [sys.executable, "tools/bench/gpu.py"], os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=100)
    assert run.returncode == EXIT_BAD_INPUT and not run.stdout
    assert run.stderr.count("\n") == 1 and "needs a GPU" in run.stderr and "--smoke" in run.stderr


def test_every_value_that_is_looked_at_is_of_a_bench() -> None:
    assert set(BENCHES) >= HOLDS.keys()
