"""How quickly a page opens and filters the transcripts of a long run, and how large they are.

`python tools/bench/view.py [--run DIR]`: a run of 652 steps of 64 groups, of 8 rollouts with 3 futures: a million
futures. A conversation has 5 messages: its group shares the first, a rollout's futures the second. Words are drawn from
a made vocabulary so that zstd packs the text of single conversations about as well as English (`text_over_zstd`); a
group has a topic, a fifth of its words. A future has four metrics, of which one applies to some tasks and one is
missing at times; one is compared with another, as a judge with a ground truth. Steps are written as a run writes them.
Then, in a fresh process:

    open_seconds = until the index of the run is open, imports included (bound: 2);
    filter_ms = until the first 50 futures of a filter are read: the slowest of the filters that are printed, each the
        median of 5 (bound: 300);
    …_cpu_… = the same in CPU time of all threads, above which a machine that does nothing else does not get;
    server_mb = the most memory that the process had (bound: 500);
    bytes_over_jsonl = bytes of the run's transcripts / bytes of the same as lines of JSON (bound: 0.2).

--run: make the run in this folder and keep it; if it exists, use it. --smoke: a run of 4 steps. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megatron_collab.observability import transcripts

STEPS, DRAWN, SMOKE_STEPS, GROUPS, ROLLOUTS, FUTURES = 652, 32, 2, 64, 8, 3
VOCABULARY, TOPIC, TOPICS, FOLLOWERS = 12_000, 150, 500, 16
LENGTHS = (40, 70, 20, 70, 12)  # words of a message, on average
REPEATS, SHOWN = 5, 50
SIZES = "sizes.json"


class Writer:
    """Draws conversations: each word follows the last one, is one of the topic, or any, frequent ones more often."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "in")]
        drawn = np.random.default_rng(0)
        count = np.minimum(1 + drawn.poisson(1.2, VOCABULARY), 5)
        self.words = np.array(["".join(drawn.choice(syllables, size)) for size in count])
        weights = np.arange(3, VOCABULARY + 3) ** -1.1
        self.cumulative = np.cumsum(weights / weights.sum())
        self.followers: Any = np.searchsorted(self.cumulative, drawn.random((VOCABULARY, FOLLOWERS)))
        self.topics = drawn.integers(200, VOCABULARY, (TOPICS, TOPIC))

    def texts(self, topics: np.ndarray, words: int) -> list[str]:
        """A text for each topic, of about so many words."""
        lengths = np.maximum(self.random.poisson(words, len(topics)), 1)
        columns: list[Any] = [np.searchsorted(self.cumulative, self.random.random(len(topics)))]
        while len(columns) < lengths.max():
            kind = self.random.random(len(topics))
            follower = self.followers[columns[-1], (self.random.random(len(topics)) ** 2 * FOLLOWERS).astype(int)]
            of_topic = self.topics[topics, (self.random.random(len(topics)) ** 2 * TOPIC).astype(int)]
            anything = np.searchsorted(self.cumulative, self.random.random(len(topics)))
            columns.append(np.where(kind < 0.65, follower, np.where(kind < 0.9, of_topic, anything)))
        table = self.words[np.stack(columns, 1)]
        return [" ".join(row[:length]) + "." for row, length in zip(table, lengths, strict=True)]

    def step(self, step: int) -> list[list[dict[str, Any]]]:
        """The groups of a step."""
        topics = self.random.integers(0, TOPICS, GROUPS)
        per_rollout: np.ndarray = np.repeat(topics, ROLLOUTS)
        per_future: np.ndarray = np.repeat(topics, ROLLOUTS * FUTURES)
        opening, reply = self.texts(topics, LENGTHS[0]), self.texts(per_rollout, LENGTHS[1])
        later = [self.texts(per_future, words) for words in LENGTHS[2:]]
        values = self.random.random((len(per_future), 4))
        groups = []
        for group, topic in enumerate(topics):
            rows = []
            for rollout in range(group * ROLLOUTS, (group + 1) * ROLLOUTS):
                for future in range(rollout * FUTURES, (rollout + 1) * FUTURES):
                    texts = [opening[group], reply[rollout], *(texts[future] for texts in later)]
                    rows.append(
                        _row(f"{topic}-{step % 40}", rollout % ROLLOUTS, future % FUTURES, texts, values[future])
                    )
            groups.append(rows)
        return groups


def _row(task: str, rollout: int, future: int, texts: list[str], values: np.ndarray) -> dict[str, Any]:
    roles = ("user", "assistant")
    accuracy, judged, length, applies = map(float, values)
    return {
        **{"task": task, "rollout": rollout, "future": future, "reward": round(accuracy - 0.3 * length, 4)},
        **({"surprise": round(2 * applies, 6)} if future == 0 else {}),
        **{"ending": "user_done" if judged < 0.8 else "turn_limit", "error": ""},
        "messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)],
        "scores": {
            "accuracy": float(accuracy > 0.5),
            "interactivity": {"missing": "the judge gave no answer"} if judged > 0.99 else round(judged, 2),
            "token_amount": float(int(1000 * length)),
            **({"asked": float(applies > 0.5)} if task.startswith("1") else {}),
        },
    }


def make(run: Path, steps: int) -> None:
    """Write the run, and the sizes of its first steps as lines of JSON."""
    run.mkdir(parents=True, exist_ok=True)
    writer, json_bytes, text, packed = Writer(1), 0, 0, 0
    for step in range(min(steps, DRAWN)):
        groups = writer.step(step)
        transcripts.write_step(run, step, groups)
        json_bytes += sum(len(json.dumps({"step": step, **row})) + 1 for rows in groups for row in rows)
        sample = " ".join(message["content"] for rows in groups for message in rows[0]["messages"]).encode()
        text, packed = text + len(sample), packed + len(zstandard.compress(sample, 9))
    drawn_bytes = sum(file.stat().st_size for file in transcripts.step_files(run).values())
    for step in range(DRAWN, steps):
        table = pq.read_table(transcripts.step_file(run, step % DRAWN))
        number = pa.array([step] * len(table), table.schema.field("step").type)
        table = table.set_column(table.schema.get_field_index("step"), table.schema.field("step"), number)
        transcripts.write_tables(transcripts.step_file(run, step), [table])
    sizes = {"bytes_over_jsonl": drawn_bytes / json_bytes, "text_over_zstd": packed / text}
    (run / SIZES).write_text(json.dumps(sizes))


def serve(run: Path) -> None:
    """Open and filter the run; prints the values of this process."""
    began, cpu = time.perf_counter(), time.process_time()
    from megatron_collab.observability.transcript_index import Index, Query

    index = Index(run, pairs=[("interactivity", "accuracy")])
    values = {"open_seconds": time.perf_counter() - began, "open_cpu_seconds": time.process_time() - cpu}
    values["futures"] = len(index)
    last = int(index.step[-1])
    rare = index.group_rows(last // 2, 0)[0]["messages"][0]["content"].split()
    filters = {
        "a step": (Query(steps=(last // 2, last // 2)), None),
        "steps": (Query(steps=(last // 4, last // 2)), None),
        "task": (Query(task="77"), None),
        "ending": (Query(ending="turn_limit"), None),
        "metrics": (Query(scores={"accuracy": (1, 1), "interactivity": (0.2, 0.3), "asked": (1, 1)}), None),
        "reward": (Query(reward=(0.65, 0.7)), None),
        "a word": (Query(words=max(rare, key=len)), None),
        "words": (Query(words=" ".join(rare[:4])), None),
        "letters": (Query(words="a"), None),
        "sorted by reward": (Query(), "reward"),
        "sorted by surprise": (Query(), "surprise"),
        "judge above truth": (Query(), "score/interactivity above accuracy"),
        "all": (Query((0, last), "7", "user_done", (0, 1), {"accuracy": (1, 1)}, rare[0]), "score/token_amount"),
    }
    times, cpu_times = {}, {}
    for name, (query, column) in filters.items():
        laps, cpu_laps = [], []
        for _ in range(REPEATS):
            began, cpu = time.perf_counter(), time.process_time()
            futures = index.select(query)
            futures = index.sort(futures, column, True, SHOWN) if column else futures
            rows = index.rows(futures[:SHOWN])
            laps.append(1e3 * (time.perf_counter() - began))
            cpu_laps.append(1e3 * (time.process_time() - cpu))
        assert 0 < len(rows) <= SHOWN, name
        times[name], cpu_times[name] = median(laps), median(cpu_laps)
        print(f"{name:18} {len(futures):8} {times[name]:7.1f} ms, {cpu_times[name]:7.1f} of CPU", file=sys.stderr)
    values |= {"filter_ms": max(times.values()), "filter_cpu_ms": max(cpu_times.values())}
    values |= {"server_mb": _most_memory()}
    print(json.dumps(values))


def _most_memory() -> float:
    """The most MB that this process had at a time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a run of 4 steps: shows that it works, no figures")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.run)
    with tempfile.TemporaryDirectory() as scratch:
        run = arguments.run or Path(scratch)
        if not (run / SIZES).exists():
            make(run, SMOKE_STEPS if arguments.smoke else STEPS)
        command = [sys.executable, __file__, "--serve", "--run", str(run)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        values = json.loads(output) | json.loads((run / SIZES).read_text())
    print(json.dumps({"name": "view", "values": {name: round(value, 4) for name, value in values.items()}}))


if __name__ == "__main__":
    main()
