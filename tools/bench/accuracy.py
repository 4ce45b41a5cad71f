"""Does the metric `accuracy` give the verdict of a careful reader, wherever it decides without a judge?

`python tools/bench/accuracy.py` compares answers as the metric does and asks no judge:

- cases: the conversations of tests/reward/accuracy_cases.jsonl, each with the verdict of a careful reader; wrong: how
  many are surely decided otherwise, which must be none. to_judge: share that is left to a judge.
- gsm8k: the problems of GSM8K's test set; their worked solutions, followed by the answer stated in five ways.
  gold_wrong: how many right answers are surely refused; perturbed_accepted: how many other numbers, stated in the same
  ways, are surely accepted. Both must be none. gsm8k_to_judge: share left to a judge.
- perturbed: replies made from GSM8K's numbers and from answers of a grammar by changes with a known effect
  (accuracy_cases/). sure_and_wrong: how many wrong replies are surely accepted, or decided though they state nothing;
  it must be 0. right_refused: share of the right replies that surely count as wrong, at most 0.02. right_to_judge and
  wrong_to_judge: shares of the right and wrong replies that are left to a judge; without one they are unclear.

- third: accuracy_cases/third.jsonl, written by a reader who had read neither the rules nor the changes above, from how
  models end their replies. third_sure_and_wrong: how many replies that do not state the answer are surely accepted.
  third_right_refused: share of the right replies that surely count as wrong. third_right_unclear: share of the plainly
  right ones that are left to a judge.

A list of the kinds of changes with most faults and undecided right replies comes first. GSM8K is read from
../shared/data or --gsm8k. --smoke: every fortieth problem of GSM8K and a tenth of the perturbed and third replies.
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

from accuracy_cases import Case, formulas, numbers

from megatron_collab.reward.metrics.accuracy import compare
from megatron_collab.reward.metrics.equality import Verdict

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
CASES = ROOT / "tests" / "reward" / "accuracy_cases.jsonl"
THIRD = Path(__file__).parent / "accuracy_cases" / "third.jsonl"
PERTURBED = 2000
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


def decided(answer: str, replies: Sequence[str]) -> bool | None:
    """Whether the replies surely state the answer or surely another one; None: a judge would be asked."""
    verdict = asyncio.run(compare(answer, replies))
    return verdict is Verdict.EQUAL if verdict in (Verdict.EQUAL, Verdict.DIFFERENT) else None


def count_cases(counts: Counter[str]) -> None:
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        right = decided(case["answer"], case["said"][::2])
        counts["cases"] += 1
        counts["to_judge"] += right is None
        if right is not None and right != bool(case["verdict"]):
            counts["cases_wrong"] += 1
            print(f"wrong: {right} for {case}")


def solutions(file: Path) -> list[tuple[str, int]]:
    """Worked solutions of GSM8K without its calculator marks, and their numbers."""
    pairs = []
    for line in file.read_text().splitlines():
        solution, _, gold = json.loads(line)["answer"].partition("\n#### ")
        pairs.append((re.sub(r"<<.*?>>", "", solution), int(gold.replace(",", ""))))
    return pairs


def count_gsm8k(pairs: Sequence[tuple[str, int]], counts: Counter[str]) -> None:
    draw = random.Random(0)
    for solution, number in pairs:
        counts["gsm8k"] += 1
        for way in WAYS:
            for stated, name, fault in (
                (number, "gold_wrong", False),
                (perturbed(number, draw), "perturbed_accepted", True),
            ):
                replies = [reply.format(solution=solution, number=stated) for reply in way]
                right = decided(str(number), replies)
                counts["gsm8k_to_judge"] += right is None
                if right is fault:
                    counts[name] += 1
                    print(f"{name}: {number}: {replies}")


def count_perturbed(cases: Sequence[Case], counts: Counter[str], examples: int) -> None:
    """Count the faults, print up to `examples` of each kind of change, and then the kinds with most of them."""
    kinds: dict[str, Counter[str]] = {}
    for case in cases:
        right = decided(case.answer, case.replies)
        kind = kinds.setdefault(case.kind, Counter())
        outcomes = [case.truth]
        if right is None:
            outcomes.append(f"{case.truth}_to_judge")
        elif case.truth == "open" or (case.truth == "wrong" and right):
            outcomes.append("sure_and_wrong")
        elif case.truth == "right" and not right:
            outcomes.append("right_refused")
        counts.update(outcomes)
        kind.update(outcomes)
        for fault in {"sure_and_wrong", "right_refused"}.intersection(outcomes):
            if kind[fault] <= examples:
                print(f"{fault}: {case.kind}: {right} for {case.answer!r}: {[reply[-120:] for reply in case.replies]}")
    names = ("sure_and_wrong", "right_refused", "right_to_judge")
    for name, kind in sorted(kinds.items(), key=lambda item: [-item[1][fault] for fault in names]):
        if any(kind[fault] for fault in names):
            faults = ", ".join(f"{fault} {kind[fault]}" for fault in names if kind[fault])
            print(f"{name}: {kind['right']} right, {kind['wrong']} wrong, {kind['open']} open: {faults}")


def third_values(every: int, examples: int) -> dict[str, float]:
    plain: Counter[str] = Counter()
    tricky: Counter[str] = Counter()
    cases = [json.loads(line) for line in THIRD.read_text().splitlines()[::every]]
    for counts, is_plain in ((plain, True), (tricky, False)):
        chosen = [case for case in cases if case["plain"] is is_plain]
        stated = [Case(c["kind"], c["answer"], (c["reply"],), "right" if c["right"] else "wrong") for c in chosen]
        count_perturbed(stated, counts, examples)
    both = plain + tricky
    return {
        "third": len(cases),
        "third_sure_and_wrong": both["sure_and_wrong"],
        "third_right_refused": round(both["right_refused"] / both["right"], 4),
        "third_right_unclear": round(plain["right_to_judge"] / plain["right"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small part of the cases: shows that it runs")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="test.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="of the perturbed replies")
    parser.add_argument("--examples", type=int, default=3, help="of each kind of change that are printed")
    arguments = parser.parse_args()
    if not arguments.gsm8k.is_file():
        sys.exit(f"--gsm8k={arguments.gsm8k}: no such file; give GSM8K's test.jsonl")
    counts: Counter[str] = Counter()
    pairs, draw = solutions(arguments.gsm8k), random.Random(arguments.seed)
    half = PERTURBED // (20 if arguments.smoke else 2)
    count_cases(counts)
    count_gsm8k(pairs[:: 40 if arguments.smoke else 1], counts)
    count_perturbed([*numbers.cases(pairs, half, draw), *formulas.cases(half, draw)], counts, arguments.examples)
    third = third_values(10 if arguments.smoke else 1, arguments.examples)
    shares = {
        "to_judge": counts["to_judge"] / counts["cases"],
        "gsm8k_to_judge": counts["gsm8k_to_judge"] / (counts["gsm8k"] * len(WAYS) * 2),
        "right_refused": counts["right_refused"] / counts["right"],
        "right_to_judge": counts["right_to_judge"] / counts["right"],
        "wrong_to_judge": counts["wrong_to_judge"] / counts["wrong"],
    }
    names = ("cases", "gsm8k", "gold_wrong", "perturbed_accepted", "sure_and_wrong")
    values = {name: counts[name] for name in names} | {"wrong": counts["cases_wrong"], "perturbed": 2 * half}
    rounded = {name: round(x, 4) for name, x in shares.items()}
    print(json.dumps({"name": "accuracy", "values": values | rounded | third}))


if __name__ == "__main__":
    main()
