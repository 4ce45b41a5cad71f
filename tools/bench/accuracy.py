"""Does the metric `accuracy` give the verdict of a careful reader?

`python tools/bench/accuracy.py` scores, without a judge:

- cases: the conversations of tests/reward/accuracy_cases.jsonl, each with the verdict of a careful reader; wrong: how
  many scores differ, which must be none. to_judge: how many of them are left to a judge if there is one. unread: how
  many state their answer in a way that no rule reads (in words, by a yes to the user's number); they are in no other
  count, and a judge decides them.
- gsm8k: the problems of GSM8K's test set; their worked solutions, followed by the answer stated in five ways.
  gold_wrong: how many right answers did not score 1; perturbed_accepted: how many with another number, stated in the
  same ways, did not score 0. Both must be none. GSM8K is read from ../shared/data or --gsm8k.

--smoke: every fortieth problem of GSM8K.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_collab.reward.metrics.accuracy import Verdict, compare

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
CASES = ROOT / "tests" / "reward" / "accuracy_cases.jsonl"
WAYS = (  # to state a number behind a worked solution, as the policy's replies
    ("{solution}\nThe answer is {number}.",),
    ("{solution}\n\n$$\\boxed{{{number}}}$$\n\nLet me know if you have 2 more minutes for part 2!",),
    ("{solution}\n#### {number}",),
    ("{solution}\n\nSo the result is **{number:,}**. Shall I go through the 3 steps again?",),
    ("{solution}\n\nThat makes ${number:,}.", "You're welcome! Is there anything else?"),
)


def perturbed(number: int, draw: random.Random) -> int:
    """A wrong number that a solver might arrive at."""
    return draw.choice([n for n in (number + 1, number - 1, 10 * number, 2 * number, -number) if n != number])


async def scored(answer: str, replies: Sequence[str]) -> tuple[float, bool]:
    """The score without a judge, and whether it is sure: a judge would not be asked."""
    verdict, sure = await compare(answer, replies)
    return float(verdict is Verdict.EQUAL), sure


def count_cases(counts: Counter[str]) -> None:
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        score, sure = asyncio.run(scored(case["answer"], case["said"][::2]))
        counts["unread" if case.get("judge") else "cases"] += 1
        counts["to_judge"] += not sure
        if score != case["verdict"] and (sure or not case.get("judge")):
            counts["wrong"] += 1
            print(f"wrong: {score} for {case}")


def count_gsm8k(file: Path, every: int, counts: Counter[str]) -> None:
    draw = random.Random(0)
    for line in file.read_text().splitlines()[::every]:
        solution, _, gold = json.loads(line)["answer"].partition("\n#### ")
        solution, number = re.sub(r"<<.*?>>", "", solution), int(gold.replace(",", ""))
        counts["gsm8k"] += 1
        for way in WAYS:
            for stated, name, expected in (
                (number, "gold_wrong", 1),
                (perturbed(number, draw), "perturbed_accepted", 0),
            ):
                replies = [reply.format(solution=solution, number=stated) for reply in way]
                if asyncio.run(scored(gold, replies))[0] != expected:
                    counts[name] += 1
                    print(f"{name}: {gold}: {replies}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="some of GSM8K's problems: shows that it runs")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="test.jsonl")
    arguments = parser.parse_args()
    if not arguments.gsm8k.is_file():
        sys.exit(f"--gsm8k={arguments.gsm8k}: no such file; give GSM8K's test.jsonl")
    counts: Counter[str] = Counter()
    count_cases(counts)
    count_gsm8k(arguments.gsm8k, 40 if arguments.smoke else 1, counts)
    names = ("cases", "wrong", "gold_wrong", "perturbed_accepted", "to_judge", "unread", "gsm8k")
    print(json.dumps({"name": "accuracy", "values": {name: counts[name] for name in names}}))


if __name__ == "__main__":
    main()
