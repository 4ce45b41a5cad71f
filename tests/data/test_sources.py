"""Every kind of source and format gives the same rows; what cannot be opened is refused in one line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from megatron_collab.data.evaluation import EvaluationSet
from megatron_collab.data.examples import load_tasks
from megatron_collab.data.rows import open_rows
from megatron_collab.data.sources import (
    Source,
    TrainingSource,
    check_exists,
    pin_sources,
    sources,
)
from megatron_collab.settings import ConfigError
from tests.hub import serving

ROWS = [{"question": f"{i} + {i}?", "answer": f"It is\n#### {2 * i}", "level": i % 3} for i in range(12)]


@pytest.fixture
def table() -> datasets.Dataset:
    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(ROWS)


def opened(source: str, **settings: str | None) -> list[dict]:
    return list(open_rows(TrainingSource(source=source, **settings), "data.train"))


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_format_of_a_file_gives_the_same_rows(tmp_path: Path, table: datasets.Dataset) -> None:
    text = jsonl(ROWS)
    for name in ("rows.jsonl", "rows.json", "rows", "rows.txt"):
        (tmp_path / name).write_text(text)
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        (tmp_path / f"rows.jsonl{suffix}").write_bytes(pack(text.encode()))
    (tmp_path / "array.json").write_text(json.dumps(ROWS))
    table.to_csv(tmp_path / "rows.csv")
    table.to_csv(tmp_path / "rows.tsv", sep="\t")
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 12
    texts = [{**row, "level": str(row["level"])} for row in ROWS]
    for file in files:
        assert opened(str(file)) == (texts if file.suffix in (".csv", ".tsv") else ROWS), file.name
    assert opened(str(next((tmp_path / "saved").glob("*.arrow")))) == ROWS
    (tmp_path / "lines.txt").write_text("Plan a trip.\nWrite a toast.\n")
    tasks = load_tasks(tmp_path / "lines.txt")
    assert [task.goal for task in tasks] == ["Plan a trip.", "Write a toast."]


def test_folders_and_globs(tmp_path: Path, table: datasets.Dataset) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for part in range(3):
        (data / f"train-0000{part}-of-00003.jsonl").write_text(jsonl(ROWS[part * 4 : part * 4 + 4]))
    (data / "test-00000-of-00001.jsonl").write_text(jsonl(ROWS[:2]))
    assert opened(str(tmp_path)) == ROWS
    assert list(open_rows(EvaluationSet(source=str(tmp_path)), "data.eval")) == ROWS[:2]
    assert opened(str(tmp_path / "data" / "train-*.jsonl")) == ROWS
    assert opened(str(tmp_path), split="train[:25%]") == ROWS[:3] and opened(str(tmp_path), split="test") == ROWS[:2]
    for split in ("train+test", "all"):
        assert opened(str(tmp_path), split=split) == ROWS + ROWS[:2]
    assert opened(str(tmp_path), split="test[1:]+train[:25%]") == ROWS[1:2] + ROWS[:3]
    assert opened(str(data / "train-00000-of-00003.jsonl"), split="all") == ROWS[:4]
    card = {"config_name": "easy", "data_files": [{"split": "train", "path": "data/test*"}]}, {"config_name": "all"}
    (tmp_path / "README.md").write_text(
        f"---\nconfigs: {json.dumps([card[0], {**card[1], 'data_files': 'data/train*'}])}\n---\n"
    )
    assert opened(str(tmp_path), subset="easy") == ROWS[:2] and opened(str(tmp_path), subset="all") == ROWS
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "saved")
    assert opened(str(tmp_path / "saved")) == ROWS
    assert opened(str(tmp_path / "saved"), split="train[-25%:]") == ROWS[-3:]
    assert opened(str(tmp_path / "saved"), split="all") == [*ROWS, ROWS[1]]
    library = datasets.load_from_disk(str(tmp_path / "saved"))
    library = datasets.concatenate_datasets([library["test"], library["train"].select(range(6))])
    assert opened(str(tmp_path / "saved"), split="test+train[:50%]") == library.to_list()
    for settings, message in (
        ({}, f"has the subsets easy, all; choose one, e.g. '{{source: {tmp_path}, subset: easy}}'"),
        ({"subset": "esay"}, "no subset esay; the nearest is easy; there are easy, all"),
        ({"subset": "all", "split": "tset"}, "no split tset; there are train, and all"),
        ({"subset": "all", "split": "train+tset"}, "no split tset; there are train, and all"),
    ):
        with pytest.raises(ConfigError) as refusal:
            opened(str(tmp_path), **settings)
        assert message in str(refusal.value)


def test_large_rows_stay_on_disk(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    cache = tmp_path / "cache"
    first = open_rows(Source(source=str(tmp_path / "rows.jsonl")), "data.train", cache)
    written = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    assert len(written) == 1 and list(first) == ROWS
    reopened = open_rows(Source(source=str(tmp_path / "rows.jsonl")), "data.train", cache)
    assert list(reopened) == ROWS and reopened.fingerprint == first.fingerprint
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")} == written
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS[:5]))
    assert len(open_rows(Source(source=str(tmp_path / "rows.jsonl")), "data.train", cache)) == 5


def test_a_bad_row_of_several_files_is_named(tmp_path: Path) -> None:
    for name, rows in (("a", ROWS), ("b", [*ROWS[:3], {**ROWS[3], "question": " "}])):
        (tmp_path / f"{name}.jsonl").write_text(jsonl(rows))
    fault = "row 4: question is not a string"
    with pytest.raises(ValueError, match=f"^data.train={tmp_path}/b.jsonl {fault}"):
        list(load_tasks(str(tmp_path / "*.jsonl")))
    for name, split in (("a", "train"), ("b", "test")):
        (tmp_path / f"{name}.jsonl").rename(tmp_path / f"{split}.jsonl")
    with pytest.raises(ValueError, match=f"^data.train={tmp_path}/test.jsonl {fault}"):
        list(load_tasks(Source(source=str(tmp_path), split="train+test")))


def test_a_list_of_sources(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    file = str(tmp_path / "rows.jsonl")
    first, second = sources([file, {"source": file, "weight": 2, "name": "math"}], "data.train", TrainingSource)
    assert (first.weight, first.title, second.weight, second.title) == (1, "rows", 2, "math")
    names = {"/data/me@host/rows.jsonl": "rows", "rows@2.jsonl": "rows", "me/maths@refs/pr/1": "maths"}
    assert {name: TrainingSource(name).title for name in names} == names
    for value, message in (
        ([{"source": file, "wieght": 2}], r"data.train\[0\].wieght: no such setting; the nearest is weight"),
        ([{"source": file, "weight": 0}], r"data.train\[0\].weight=0.0: must be above 0"),
        ([{"weight": 1}], r"data.train\[0\].source: not set"),
        ([{"source": file, "from_step": 5, "until_step": 5}], "no step is between from_step=5 and until_step=5"),
        ([], r"data.train=\[\]: names no source"),
        ([file, "none.jsonl"], "data.train=none.jsonl: no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_exists(sources(value, "data.train", TrainingSource), "data.train")
    places = [file, "owner/name@v1", str(tmp_path / "*.jsonl"), str(tmp_path)]
    check_exists(sources(places, "data.train", TrainingSource), "data.train")
    with pytest.raises(ConfigError, match=r"data.eval\[0\].weight: no such setting"):
        sources([{"source": file, "weight": 2}], "data.eval", Source)
    assert pin_sources([file, {"source": file}], "data.train", tmp_path) == [file, {"source": file}]


@pytest.mark.processes
def test_a_data_set_of_the_hub(tmp_path: Path) -> None:
    """Pinned, then read offline; `datasets` itself reads the same from the stand-in."""
    repo = tmp_path / "repo"
    (repo / "data").mkdir(parents=True)
    (repo / "data" / "train-00000-of-00001.jsonl").write_text(jsonl(ROWS))
    (repo / "data" / "test-00000-of-00001.jsonl").write_text(jsonl(ROWS[:2]))
    (repo / "big.jsonl").write_text(jsonl(ROWS * 10))
    files = [{"split": split, "path": f"data/{split}-*"} for split in ("train", "test")]
    (repo / "README.md").write_text(
        f"---\nconfigs: {json.dumps([{'config_name': 'default', 'data_files': files}])}\n---\n"
    )
    code = """
import sys
from pathlib import Path
from megatron_collab.data.rows import open_rows
from megatron_collab.data.sources import Source, TrainingSource, pin_sources
for name in sys.argv[2:]:
    path = pin_sources(name, "data.train", Path(sys.argv[1]))
    print(path, len(open_rows(TrainingSource(source=path), "data.train")))
    print(list(open_rows(Source(source=path, split="test[:1]"), "data.eval")))
    if name == path: continue
    import datasets
    print(len(datasets.load_dataset(name)["train"]))
"""
    with serving() as hub:
        commit = hub.add("dataset", "some/data", repo)

        def run(*names: str, **other: str) -> list[str]:
            command = [sys.executable, "-c", code, str(tmp_path / "run"), *names]
            environment = hub.environment(tmp_path / "home", **other)
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout.splitlines()

        first = run("some/data")
        assert first == [f"some/data@{commit} 12", str(ROWS[:1]), "12"]
        assert not [request for request in hub.requests if "big.jsonl" in request]
        hub.requests.clear()
        assert run(f"some/data@{commit}") == first[:2] and hub.requests == []
        command = [sys.executable, "-m", "megatron_collab.commands", "prepare-data", "some/data", "--to", "sft"]
        environment = hub.environment(tmp_path / "home")
        subprocess.run([*command, "--out", str(tmp_path / "out")], env=environment, check=True, timeout=200)
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert (summary["source"], summary["kept"]) == (f"some/data@{commit}", {"train": 13, "eval": 1})


def test_unreadable_sources_are_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "broken.jsonl").write_text('{"question": \n')
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "README.md").write_text("---\nconfigs: [\n---\n")
    for name, data_files in (("nested", "[[rows.jsonl]]"), ("number", "3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\nconfigs:\n- data_files: {data_files}\n---\n")
    (tmp_path / "wide.csv").write_text(",".join(f"c{i}" for i in range(2000)) + "\n1\n")
    for name, settings, message in (
        ("empty.jsonl.gz", {}, "has no rows; give a source with some"),
        ("empty.parquet", {}, "cannot be read as parquet (Parquet file size is 0 bytes); it may be"),
        ("broken.jsonl", {}, "is not JSON (Expecting value at character"),
        ("rows.jsonl", {"split": "test"}, "no split but train; remove the setting, or give a folder"),
        ("rows.jsonl", {"split": "train+test"}, "no split but train"),
        ("rows.jsonl", {"subset": "main"}, "files have no subsets"),
        ("card", {}, "README.md cannot be read ("),
        ("nested", {}, "README.md cannot be read ("),
        ("number", {}, "README.md cannot be read ("),
    ):
        with pytest.raises(ValueError) as refusal:
            opened(str(tmp_path / name), **settings)
        assert str(refusal.value).startswith(f"data.train={tmp_path / name}") and message in str(refusal.value)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=r"wide.csv: the columns c0, .* … match no known format") as refusal:
        load_tasks(tmp_path / "wide.csv")
    assert len(str(refusal.value)) < 2000
    assert not capfd.readouterr().err


def test_a_glob_and_a_card_that_say_little(tmp_path: Path) -> None:
    """Folders that match a glob are skipped, and the only subset of a card needs no name."""
    (tmp_path / "rows.jsonl").write_text(jsonl(ROWS))
    (tmp_path / "older").mkdir()
    assert opened(str(tmp_path / "*")) == ROWS
    (tmp_path / "README.md").write_text("---\nconfigs:\n- data_files: rows.jsonl\n---\n")
    assert opened(str(tmp_path)) == ROWS
