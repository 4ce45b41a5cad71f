"""Cost of reading rows as tasks, beside the bare iteration of the same rows by `datasets`.

`python tools/bench/data.py [--rounds 3]`: a million generated rows with the columns of our own format (one message or
three, a goal, an answer) as JSONL. The file is opened and checked once, which leaves its rows as Arrow on disk; then
two ways take turns, each in a fresh process of one thread:

- plain: `for row in table` of the library's Dataset, then 20,000 rows `table[i]` in an order drawn from a seed;
- ours: `for task in load_tasks(file)`, then 20,000 tasks in the order of a run (`Mixture`), which is drawn from a seed.

    rows_per_second_over_datasets = rows a second, ours / plain, of the whole pass (bound: at least 0.5);
    random_over_datasets = the same of the rows in another order than the file's;
    memory_mb_per_million_rows = growth of the anonymous memory of our process from before the file is opened to the
        end, in MB for a million rows. Pages of the mapped file do not count: the kernel can drop them when needed;
    parsed_mb_per_second = the file (file_mb), parsed and written by the first process of a run;
    checked_rows_per_second = rows that are read and checked before a run, without counting tokens.

Medians over the rounds. --smoke: one round of 20,000 rows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROWS, SMOKE_ROWS, RANDOM_ROWS = 1_000_000, 20_000, 20_000
WORDS = ("a", "table", "for", "two", "people", "on", "friday", "evening", "near", "the", "window", "please")


def made_row(number: int) -> dict[str, Any]:
    draw = random.Random(number)

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    prompt = [{"role": "user", "content": text(30)}]
    for _ in range(draw.randrange(2)):
        prompt += [{"role": "assistant", "content": text(20)}, {"role": "user", "content": text(10)}]
    return {"id": str(number), "prompt": prompt, "goal": text(40), "answer": text(2), "user": "llm"}


def anonymous_memory() -> int:
    """Bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def library_rows(file: Path) -> Any:
    """The rows as `datasets` itself reads them, from its Arrow files beside `file`."""
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_json(str(file), cache_dir=str(file.parent / "library"))


def check_rates(file: Path) -> dict[str, float]:
    """MB of the file parsed a second by the first process of a run, and rows read and checked a second."""
    from megatron_collab.config import Config
    from megatron_collab.data.examples import load_tasks
    from megatron_collab.data.sources import Source
    from megatron_collab.data.survey import survey
    from megatron_collab.launch.play_specs import play_spec
    from megatron_collab.rollout.task_requirements import task_requirements

    config = Config()
    config.reward.weights = {"accuracy": 1.0, "token_amount": -0.1}
    began = time.perf_counter()
    tasks = load_tasks(file, "bench", cache=file.parent / "cache")
    parsed = time.perf_counter()
    survey(tasks, 8192, lambda messages: 0, lambda task: 0, task_requirements(play_spec(config), Source()))
    seconds = time.perf_counter() - parsed
    return {"parsed": file.stat().st_size / 1e6 / (parsed - began), "checked": len(tasks) / seconds}


def one_pass(way: str, file: Path) -> dict[str, float]:
    import datasets.packaged_modules.json.json  # noqa: F401  # the library's own memory does not count

    from megatron_collab.data.examples import load_tasks
    from megatron_collab.data.mixture import Mixture
    from megatron_collab.data.sources import TrainingSource

    cache, before = file.parent / "cache", anonymous_memory()
    if way == "plain":
        rows: Any = library_rows(file)
        order = random.Random(0).sample(range(len(rows)), min(RANDOM_ROWS, len(rows)))
    else:
        rows = load_tasks(file, "bench", cache=cache)
        mixture = Mixture([TrainingSource(source=str(file))], [len(rows)], per_step=16)
        order = [mixture.place(position, seed=0).row for position in range(min(RANDOM_ROWS, len(rows)))]
    began = time.perf_counter()
    count = sum(1 for _ in rows)
    streamed = time.perf_counter()
    for row in order:
        rows[row]
    ended = time.perf_counter()
    memory = anonymous_memory() - before
    rates = {"rows": count, "streamed": count / (streamed - began), "random": len(order) / (ended - streamed)}
    return rates | {"mb": memory / 1e6 / count * 1e6}


def measure(way: str, file: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--way", way, "--file", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{way}: {rates['streamed']:,.0f} rows/s, in random order {rates['random']:,.0f} rows/s, "
        f"{rates['mb']:.0f} MB for a million rows",
        flush=True,
    )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=("plain", "ours"), help="measure one way once, in this process")
    parser.add_argument("--file", type=Path, help="the rows, with --way")
    parser.add_argument("--smoke", action="store_true", help="one small round: shows that it runs, no figures")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(one_pass(arguments.way, arguments.file)))
        return
    results: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        with file.open("w") as out:
            for number in range(SMOKE_ROWS if arguments.smoke else ROWS):
                out.write(json.dumps(made_row(number)) + "\n")
        start, _ = check_rates(file), library_rows(file)
        for _ in range(1 if arguments.smoke else arguments.rounds):
            for way, passes in results.items():
                passes.append(measure(way, file))
        size = file.stat().st_size / 1e6
    plain, ours = ({name: median(rates[name] for rates in results[way]) for name in results[way][0]} for way in results)
    assert plain["rows"] == ours["rows"]
    values = {
        "rows_per_second_over_datasets": ours["streamed"] / plain["streamed"],
        "memory_mb_per_million_rows": ours["mb"],
        "random_over_datasets": ours["random"] / plain["random"],
        "rows_per_second": ours["streamed"],
        "datasets_rows_per_second": plain["streamed"],
        "file_mb": size,
        "parsed_mb_per_second": start["parsed"],
        "checked_rows_per_second": start["checked"],
    }
    print(json.dumps({"name": "data", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
