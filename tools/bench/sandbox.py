"""Does the sandbox fail every program that does not solve its task and pass every one that does? And how long is a run?

`python tools/bench/sandbox.py` scores, by the metric `pass_rate`:

- attacks: programs that try to pass the tests of a task without solving it, each against tests of six forms
  (tests/sandbox/attacks.txt, attacks.py); earned: how many scored more than 0; missing_by_choice: how many have a
  missing score, which would spare them the 0. Both must be none.
- honest: right programs, those of tests/sandbox/honest.py and the 164 solutions of HumanEval; honest_failed: how many
  did not score 1, which must be none. HumanEval is read from ../shared/data or --human-eval.
- ms: median milliseconds of a whole run of a program of HumanEval, one at a time, after a first run.

--smoke: every fortieth attack, and every twentieth solution of HumanEval.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_collab import sandbox
from megatron_collab.reward.metrics.pass_rate import PassRate
from megatron_collab.types import Conversation, Finish, Message, Missing, Score, Task, Turn

ROOT = Path(__file__).resolve().parents[2]
HUMAN_EVAL = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
TIMED = 20

sys.path.insert(0, str(ROOT))
from tests.sandbox.attacks import ATTACKS, FORMS  # noqa: E402
from tests.sandbox.honest import HONEST  # noqa: E402

Pair = tuple[str, Mapping[str, Any]]  # code, and the metadata of its task


async def scores(pairs: Sequence[Pair], **options: Any) -> list[Score | None]:
    """The scores of the pairs, in their order."""
    metric = PassRate(PassRate.Options(**options), judge=None)  # type: ignore[arg-type]  # it asks no judge
    return await asyncio.gather(*(metric.score(*played(*pair)) for pair in pairs))


def played(code: str, metadata: Mapping[str, Any]) -> tuple[Task, Conversation]:
    task = Task("t", (Message("user", "code please"),), "goal", "", "nobody", metadata)
    turn = Turn((1,), (2,), (-1.0,), (0,), Finish.STOP, f"```python\n{code}```")
    return task, Conversation(task.messages, (1,)).add_turn(turn)


def human_eval(file: Path) -> list[Pair]:
    rows = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()] if file.exists() else []
    return [(row["prompt"] + row["canonical_solution"], row) for row in rows]


def milliseconds(pairs: Sequence[Pair]) -> float:
    durations = []
    for pair in pairs:
        began = time.perf_counter()
        asyncio.run(scores([pair]))
        durations.append(1000 * (time.perf_counter() - began))
    return round(median(durations), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few of each: shows that it runs, no figures")
    parser.add_argument("--human-eval", type=Path, default=HUMAN_EVAL, help="HumanEval.jsonl.gz")
    arguments = parser.parse_args()
    if reason := sandbox.unavailable():
        raise SystemExit(reason)
    every_attack, every_solution = (40, 20) if arguments.smoke else (1, 1)
    tried = [*ATTACKS.items()][::every_attack]
    attacks = [(name, form, (code, FORMS[form])) for name, code in tried for form in FORMS]
    honest: list[tuple[str, Pair]] = list(HONEST.items())
    honest += [(pair[1]["task_id"], pair) for pair in human_eval(arguments.human_eval)[::every_solution]]

    earned = asyncio.run(scores([pair for _, _, pair in attacks], cpu_seconds=1))
    for (name, form, _), score in zip(attacks, earned, strict=True):
        if score != 0.0:
            print(f"scored {score}: {name} against {form}")
    honest_scores = asyncio.run(scores([pair for _, pair in honest]))
    for (name, _), score in zip(honest, honest_scores, strict=True):
        if score != 1.0:
            print(f"failed, {score}: {name}")
    values = {
        "attacks": len(attacks),
        "earned": sum(not isinstance(score, Missing) and score != 0.0 for score in earned),
        "missing_by_choice": sum(isinstance(score, Missing) for score in earned),
        "honest": len(honest),
        "honest_failed": sum(score != 1.0 for score in honest_scores),
        "ms": milliseconds([pair for _, pair in honest][-TIMED:]),
    }
    print(json.dumps({"name": "sandbox", "values": values}))


if __name__ == "__main__":
    main()
