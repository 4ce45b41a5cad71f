"""A run that is preempted many times: what is saved, and whether its result equals that of an uninterrupted run.

`python tools/bench/preemption.py [--signals 20] [--root FOLDER]` trains a random model on the booking world for a few
steps, first without a signal, which takes T seconds. Then it sends SIGUSR1 at random times of [0, T], including
start-up, to the process that the user started, and starts it again; when a run is finished, the next one begins. Of N
signals one is in each of N equal parts of [0, T], so that even a few hit the middle of steps. Values:

- saved, of: signals after which the run ended with the exit code for preemption and all finished steps in a checkpoint.
- slowest_s: most seconds from a signal to the end of the process.
- equal: 1 if parameters, transcripts, evaluations and all metrics but counts and seconds equal those of the
  uninterrupted run, bit for bit.
- played_again: groups that were in the journal and were played once more; must be 0.
- in_journal: groups that were in the journal when a run was started again.

--smoke: one signal and two steps.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_collab.observability import transcripts
from megatron_collab.rollout.journal import entries
from megatron_collab.runtime.signals import EXIT_PREEMPTED, PREEMPTION

SEED = 0
DEADLINE = 600.0  # seconds for one start, on a machine however busy
SETTINGS = [
    "experiment=booking",
    "train.steps=4",
    "train.checkpoint_every=3",
    "train.prompts_per_step=4",
    "train.rollouts_per_prompt=4",
    "train.eval_tasks=8",
    "rollout.futures=2",
    "reward.malformed=null",  # the random model never ends a turn by itself
    "reward.weights.token_amount=-0.01",
]
SMOKE = ["train.steps=2", "train.eval_tasks=2"]
DIFFER = (
    "seconds/",
    "idle/",
    "count/",
    "llm/",
    "servers/",
)  # metrics about speed and load, not about what was sampled and learned


class Journal:
    """Streams written to a run's journal, observed while the run goes on, since trained groups leave the journal."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "journal"
        self._sizes: dict[Path, int] = {}
        self._written: dict[Path, Counter[str]] = {}

    def look(self) -> None:
        for file in self._folder.glob("*.groups"):
            with suppress(FileNotFoundError):  # its steps are in a checkpoint
                size = file.stat().st_size
                if size != self._sizes.get(file):
                    streams = Counter(entry.stream for entry in entries(file))
                    self._written[file] = streams | self._written.get(file, Counter())
                    self._sizes[file] = size

    @property
    def played_again(self) -> int:
        """Groups that were written more than once."""
        return sum(count - 1 for streams in self._written.values() for count in streams.values())

    def now(self) -> int:
        """Number of groups in the journal."""
        return sum(1 for file in self._folder.glob("*.groups") for _ in entries(file))


@contextmanager
def start_run(root: Path, name: str, settings: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A start of the run `name`; its processes are killed when the context ends."""
    command = [sys.executable, "-m", "megatron_collab.train", *settings, f"run.dir={root / name}"]
    command += [f"data.dir={root / 'world'}", f"model.path={root / 'world' / 'model'}"]
    with (root / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait(process: subprocess.Popen[bytes], journal: Journal, seconds: float) -> bool:
    """Whether the process ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        journal.look()
        time.sleep(0.02)
    return True


def finished_and_saved_steps(run: Path) -> tuple[int, int]:
    """The number of finished steps, and of those in the newest checkpoint."""
    metrics, latest = run / "metrics.jsonl", run / "checkpoints" / "latest"
    finished = metrics.read_text().count("\n") if metrics.exists() else 0
    return finished, int(latest.read_text().removeprefix("step_")) if latest.exists() else 0


def outcome(run: Path) -> dict[str, object]:
    """Everything of a run's result that must not differ between runs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "parameters": (run / "hf" / "model.safetensors").read_bytes(),
        "metrics": [{k: v for k, v in row.items() if not k.startswith(DIFFER)} for row in rows],
        "transcripts": [*transcripts.run_rows(run)],
        "evaluations": json.loads((run / "evaluations.json").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--smoke", action="store_true", help="one signal, two steps: shows that it runs, no figures")
    arguments = parser.parse_args()
    signals, settings = (1, [*SETTINGS, *SMOKE]) if arguments.smoke else (arguments.signals, SETTINGS)
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {PREEMPTION}
    )  # and so do those whom we start, from their first instruction on
    with tempfile.TemporaryDirectory() as folder:
        values = measure(arguments.root or Path(folder), signals, settings)
    print(json.dumps({"name": "preemption", "values": values}))


def measure(root: Path, signals: int, settings: list[str]) -> dict[str, float]:
    drawn = random.Random(SEED)
    parts = drawn.sample(range(signals), signals)
    began = time.monotonic()
    with start_run(root, "undisturbed", settings) as process:
        assert wait(process, Journal(root / "undisturbed"), DEADLINE) and process.returncode == 0, f"see {root}"
    run_seconds = time.monotonic() - began
    print(f"undisturbed: {run_seconds:.1f} s", flush=True)
    expected = outcome(root / "undisturbed")
    sent = saved = played_again = in_journal = runs = 0
    slowest, equal = 0.0, True
    while sent < signals:
        name, runs, code = f"run{runs}", runs + 1, EXIT_PREEMPTED
        journal = Journal(root / name)
        while code == EXIT_PREEMPTED:
            in_journal += journal.now()
            last = sent == signals
            # If the run ends before the moment, the next start draws another moment of the same part.
            moment = DEADLINE if last else drawn.uniform(parts[sent], parts[sent] + 1) * run_seconds / signals
            with start_run(root, name, settings) as process:
                if not wait(process, journal, moment):
                    assert not last, f"not at its end after {DEADLINE:g} s: see {root / name}.log"
                    process.send_signal(PREEMPTION)
                    sent, signaled = sent + 1, time.monotonic()
                    wait(process, journal, DEADLINE)
                    took = time.monotonic() - signaled
                    steps, kept = finished_and_saved_steps(root / name)
                    slowest = max(slowest, took)
                    # If the signal arrives just before its end, the run ends with 0.
                    saved += process.returncode == 0 or (process.returncode == EXIT_PREEMPTED and kept == steps)
                    print(f"{name}: signal {sent} at {moment:.1f} s, code {process.returncode} {took:.1f} s later, "
                          f"{kept} of {steps} steps and {journal.now()} groups saved", flush=True)  # fmt: skip
                code = process.returncode
                assert code in (0, EXIT_PREEMPTED), f"code {code}: see {root / name}.log"  # nothing to measure
        played_again += journal.played_again
        equal = equal and outcome(root / name) == expected
    return {
        "saved": saved,
        "of": sent,
        "slowest_s": round(slowest, 1),
        "equal": float(equal),
        "played_again": played_again,
        "in_journal": in_journal,
    }


if __name__ == "__main__":
    main()
