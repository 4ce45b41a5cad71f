"""Writers of metrics: by name or class path, in threads that neither end nor delay a run; test_run.py has W&B."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megatron_collab.config import Config, run_record
from megatron_collab.observability import writers
from megatron_collab.observability.writers import Writers, writer_kinds
from megatron_collab.settings import ConfigError, resolve

MINE = """
from dataclasses import dataclass
from threading import Event

from megatron_collab.settings import option
from megatron_collab.observability.writers import Writer

LOG, GO = [], Event()


class Mine(Writer):
    @dataclass(frozen=True)
    class Options:
        fails: str = option("", "method that fails or hangs")
        hangs: str = option("", "method that hangs")

    def __init__(self, options, run, settings, start):
        super().__init__(options, run, settings, start)
        self.do("open", start)

    def scalars(self, step, metrics):
        self.do("scalars", step, metrics)

    def conversations(self, step, name, rows):
        self.do("conversations", step, name, len(rows))

    def close(self, failed):
        self.do("close", failed)

    def do(self, what, *values):
        if what == self.options.fails:
            raise SystemExit("no server")
        if what == self.options.hangs:
            GO.wait()
        LOG.append((what, *values))


def function():
    pass
"""
ROW = {
    "task": "t-1",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "```\n<b>which day?"}],
    "scores": {"right": 0.5, "asks": {"missing": "x"}},
    "ending": "user_done",
    "reward": 0.5,
}
METRICS = {"reward": 0.5, "eval/a b/right": 1.0, "score/p@k": 2.0, "score/p^k": 3.0}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return path


def config(folder: Path, *names: str, **options: Any) -> Config:
    settings = Config()
    folder.mkdir(exist_ok=True)
    settings.run.dir, settings.run.writers = str(folder), list(names)
    settings.run.writer_options = {names[0]: options} if options else {}
    return settings


def write(settings: Config, *starts: int) -> None:
    """A run whose starts before the last one fail."""
    for start in starts:
        run = Writers(run_record(settings), start)
        run.scalars(start, METRICS)
        run.conversations(start, "eval/math", [ROW])
        run.close(failed=start != starts[-1])


def log(file: Path) -> tuple[list[Any], Event]:
    module = sys.modules[resolve(f"{file}:Mine", "run.writers", writers.Writer).__module__]
    vars(module)["LOG"].clear()
    return vars(module)["LOG"], vars(module)["GO"]


def test_a_class_by_its_path_is_called_in_order(file: Path, tmp_path: Path) -> None:
    calls, _ = log(file)
    write(config(tmp_path, f"{file}:Mine"), 3)
    assert calls == [("open", 3), ("scalars", 3, METRICS), ("conversations", 3, "eval/math", 1), ("close", False)]


@pytest.mark.parametrize("method", ["open", "scalars"])
def test_a_writer_that_fails_costs_a_line_and_nothing_else(
    file: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, _ = log(file)
    write(config(tmp_path, f"{file}:Mine", "tensorboard", fails=method), 0, 1)
    assert len(calls) == (0 if method == "open" else 6)
    assert capsys.readouterr().err.count("mine.py:Mine: SystemExit: no server") == 2  # in each start once
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 2


def test_a_writer_that_hangs_delays_neither_the_start_nor_the_run_nor_its_end(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, go = log(file)
    for name, value in {"_OPEN_SECONDS": 0.1, "_CLOSE_SECONDS": 0.1, "_WAITING": 2}.items():
        monkeypatch.setattr(writers, name, value)
    write(config(tmp_path, f"{file}:Mine", hangs="open"), 0)
    err = capsys.readouterr().err
    for reason in ("is not open yet; the run", "2 calls wait for it; it lacks", "has not written everything; the rest"):
        assert err.count(f"mine.py:Mine: {reason}") == 1
    assert not calls
    go.set()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"writers": ["mlfow"]}, "run.writers=mlfow: no such name; known are mlflow, swanlab, tensorboard, trackio"),
        (
            {"writers": ["FILE:function"]},
            "run.writers=FILE:function: must be a subclass of megatron_collab.observability",
        ),
        ({"writers": ["swanlab"]}, "run.writers=swanlab: needs the package swanlab; pip install swanlab, or remove it"),
        ({"writers": ["mlflow"]}, "run.writers=mlflow: needs the package mlflow; pip install mlflow-skinny, or"),
        ({"writer_options": {"trackio": {}}}, "run.writer_options.trackio: not in run.writers"),
        (
            {"writers": ["FILE:Mine"], "writer_options": {"FILE:Mine": {"fals": "x"}}},
            "run.writer_options.FILE:Mine.fals: no such setting; the nearest is fails",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(writers, "find_spec", lambda name: None)
    config = Config()
    for name, value in settings.items():
        here: Any = [str(name).replace("FILE", str(file)) for name in value] if isinstance(value, list) else value
        if isinstance(value, dict):
            here = {key.replace("FILE", str(file)): options for key, options in value.items()}
        setattr(config.run, name, here)
    with pytest.raises(ConfigError) as refused:
        writer_kinds(config.run)
    message = str(refused.value)
    assert message.startswith(why.replace("FILE", str(file))) and "\n" not in message


def test_weights_and_biases_is_written_with_its_key_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert [*writer_kinds(Config().run)] == ["tensorboard"]


# The packages themselves, offline


@pytest.mark.processes
def test_mlflow_has_one_run_over_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    write(config(tmp_path / "run", "mlflow", uri=str(tmp_path / "store"), experiment="e"), 0, 1)
    client = mlflow.MlflowClient(str(tmp_path / "store"))
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FINISHED" and run.data.metrics["score/p_at_k"] == 2.0
    assert run.data.metrics["score/p_hat_k"] == 3.0
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "reward")] == [0, 1]
    assert run.data.params["train.steps"] and run.info.run_name == "run"
    (text,) = (tmp_path / "store").rglob("conversations_1.txt")
    assert "assistant: ```\n<b>which day?" in text.read_text() and "right 0.5 (user_done)" in text.read_text()


@pytest.mark.processes
def test_swanlab_has_one_run_over_all_starts(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    write(config(tmp_path, "swanlab", mode="offline"), 0, 1)
    files = [*(tmp_path / "swanlab").rglob("*.swanlab")]
    assert len(files) == 2 and len({file.name for file in files}) == 1
    assert all(b"eval/a b/right" in file.read_bytes() for file in files)
    assert any("<b>which day?" in text.read_text() for text in (tmp_path / "swanlab").rglob("media/text/*"))


@pytest.mark.processes
def test_trackio_has_one_run_over_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    write(config(tmp_path / "run", "trackio", project="p"), 0, 1)
    (database,) = (tmp_path / "trackio").glob("p.db")
    rows = sqlite3.connect(database).execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert len({name for name, *_ in rows}) == 1 and {step for _, step, _ in rows} == {0, 1}
    assert any("eval/a b/right" in str(metrics) for *_, metrics in rows)
