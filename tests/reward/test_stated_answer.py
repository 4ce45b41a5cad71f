"""The rules that find the answer that a conversation surely states, by example and against a careful human reader.

accuracy_cases.jsonl: conversations, each with the question, the task's answer, what policy and user said in turns, and
the verdict of a careful reader: 1 if the last answer that the policy commits to is right.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.reward.metrics.stated_answer import stated_answer
from tests.reward.fakes import FakeJudge, about, play, score

CASES: dict[str, list[dict[str, Any]]] = defaultdict(list)
for line in (Path(__file__).parent / "accuracy_cases.jsonl").read_text().splitlines():
    case = json.loads(line)
    CASES[case["kind"]].append(case)


@pytest.mark.processes
@pytest.mark.parametrize("kind", CASES)
def test_a_careful_reader_agrees(kind: str) -> None:
    """Whatever the rules decide, and the judge the others."""
    for case in CASES[kind]:
        task, reader = about(case["answer"], case["question"]), FakeJudge({"thought": "", "accuracy": case["verdict"]})
        assert score("accuracy", task, play(task, *case["said"]), reader, judge=True) == case["verdict"], case


@pytest.mark.processes
def test_the_rules_decide_many_cases() -> None:
    """Otherwise the judge would decide everything."""
    decided = sum(not unclear(case["answer"], *case["said"]) for kind in CASES.values() for case in kind)
    assert decided > 90


def unclear(answer: str, *messages: str) -> bool:
    task = about(answer)
    return not isinstance(score("accuracy", task, play(task, *messages), unclear="missing"), float)


STATED = [
    (r"3 boxes, so \boxed{2500/2}", "2500/2"),
    ("#### 1,250", "1,250"),
    ("**Answer:**\n\n$$x = 150$$", "$$x = 150$$"),
    ("**Final Answer**\n\n$$5$$", "$$5$$"),
    ("After 3 steps, the final answer is \\(5\\).", r"\(5\)."),
    ("It is a common mistake to say 48. The answer is 42.", "42."),
    (r"\boxed{48} Wait, it is 42.", "42."),
    (r"So $3 + 4 = \boxed{7}$.", "7"),
    (r"So the value of \( x \) is \( \boxed{4} \).", "4"),
    (r"The area is $\boxed{40}$ cm².", r"40 \text{cm²}"),
    (r"\boxed{18} million", r"18 \text{million}"),  # which equals no number
    ("The solution is $x > 5$.", "$x > 5$."),
    ("**Solution:** 2x = 36\n\nTherefore, x = 18.", "x = 18."),
    ("Das Ergebnis ist **18**.", "18."),
    ("**Respuesta:** 18", "18"),
    ("El resultado es 18.", "18."),
    ("Thus, she earns a total of 18 dollars.", "18 dollars."),
    ("Therefore, the number of possible values of x is 5.", "5."),
    ("So it is 42. Shall I go on with number 4?", "42."),
    ("The answer is 42. Next steps: try it with 2.3 instead.", "42."),
    ("The answer is 42. You can verify that 6 * 7 = 42.", "42."),
    ("So 2x - y = 3.", "2x - y = 3."),
    ("Die Antwort ist 7.", "7."),
    ("La réponse est 7.", "7."),
    ("La respuesta es 7.", "7."),
    ("答案是42。", "42。"),
    ("答えは 42 です。", " 42 "),
    ("คำตอบคือ42", "42"),
    ("คำตอบคือ 42 ค่ะ", "42 ค่ะ"),  # compared as a whole
    ("คำตอบสุดท้าย: $\\frac{1}{2}$", r"$\frac{1}{2}$"),
    ("คำตอบที่ถูกต้อง คือ **7**", "7"),
    ("6 คูณ 7\nคำตอบ = 42.", "42."),
    ("The answer is at least 5.", "at least 5."),  # which equals no number
    ("The answer is 5 million.", "5 million."),
    ("The answer is indeed 5.", "5."),
    ("Die Antwort ist also 5.", "5."),
    ("La réponse est donc 5.", "5."),
    ("It is tempting to say 15, but the answer is 12.", "12."),
    ("The answer is 15, but that is before tax.", "15, but that is before tax."),  # which equals no number either
    ("The answer is 2**10.", "2**10."),
    ("ANSWER: 18\n\n(16 - 3 - 4 = 9; 9 * 2 = 18)", "18"),
    ("The answer is **5**. So each of them gets 5 apples. I hope this helps!", "5."),  # a number is repeated
    ("The answer is 5. Double-check: 10 / 2 = 5.", "5."),
    ("The answer is 1,250. So she has $1250 left.", "1,250."),
    ("The answer is B. So the letter of the 3rd option is B.", "B."),
    ("So it is 60.\n\nNote that there are two people, so they pay 120 together.", "120 together."),
    ("So the total is 60.\nNote that it is 2 * 30 = 60.", "60."),
    ("So the number of eggs is 9.\nYou can sell each for $2, so the total is $18.", "$18."),
    ("The answer is 42. If you like, I can also show the other 3 methods.", "42."),
    ("The answer is 42. Happy to explain step 3.", "42."),
    ("~~The answer is 16.~~ The answer is 17.", "17."),
    (r"**Solution:** \boxed{7}", "7"),
    (r"Adding up: \boxed{7}", "7"),
    ("The answer is 8. That's not right, though. So it is 6.", "6."),
    ("The answer is 42. Let me know if you'd like to see why 42 is right.", "42."),
]
ENDINGS = (
    "If you have any other questions, feel free to ask!",
    "Please let me know if you'd like a more detailed explanation.",
    "If you have any further questions, let me know.",
    "If you have further questions, please don't hesitate to ask.",
    "And let me know if you need more help.",
    "If anything is unclear, just let me know.",
    "Just let me know.",
    "Thank you!",
    "If you need more help, let me know!",
    "I'm here to help if you have questions.",
    "Hope this makes sense.",
    "I'm glad I could assist!",
    "I hope this clarifies things. Happy learning!",
    "Feel free to ask about step 3.",
)
LABELS = (
    *("Final", "Total cost", "Area", "Number of apples", "Evaluating", "Dividing both sides by 2"),
    *("**Total cost", "So we add them. Sum"),
)


@pytest.mark.parametrize(("reply", "answer"), STATED)
def test_what_a_reply_states(reply: str, answer: str) -> None:
    stated = stated_answer([reply])
    assert stated is not None and stated.strip() == answer.strip()


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_answer_stays_sure_before_a_polite_ending(ending: str) -> None:
    assert stated_answer([f"The answer is 42. {ending}"]) == "42."
    assert stated_answer(["The answer is 42.", f"You're welcome! {ending}"]) == (None if "3" in ending else "42.")


@pytest.mark.parametrize("label", LABELS)
def test_a_label_leads_to_a_box(label: str) -> None:
    for box in (r": \boxed{42}", r": $\boxed{42}$", ":\n\\boxed{42}"):
        assert stated_answer([label + box]) == "42"


@pytest.mark.parametrize(
    "reply",
    [
        *("", "Are there 18 eggs?", "It might be 18.", "If he eats 3, 18 are left.", r"Is it \boxed{18}?", "So 18."),
        *("Maybe the answer is 18.", "Someone might say that the answer is 18.", "The wrong answer is 18."),
        *("You said 18.", "Step 18 is the last.", "So far we have 18.", "So the first part is 18."),
        *(r"at least \boxed{18}", r"$-\boxed{18}$", r"$\boxed{18}^2$", r"$\boxed{18}!$"),
        *(r"$x^2 + \boxed{18}$", r"$x > \boxed{18}$", r"\boxed{18} or \boxed{20}", r"It is not \boxed{18}."),
        *("The answer is 18. Wait, that is wrong, I have to start again.", r"\boxed{18} No, that is wrong."),
        *("So it is 18. The year was 2018.", "Ist die Antwort 18?"),
        # names and other words that begin as a conclusion does
        *("Sonia has 18.", "Soap costs = 18", "Overalls are 18 dollars.", "Thenardier pays 18.", "So-called x is 18."),
        *("Solution: x = 18.", "Henceforth x is 18.", "Donchester has 18.", "In allocation is 18."),
        *("The answer isn't 18.", "La respuesta estimada 18."),
        # denied, or a bound
        *(r"It cannot be \boxed{18}.", r"None of them equals \boxed{18}.", r"La respuesta no es \boxed{18}."),
        *(r"答案不是 $\boxed{18}$。", r"The wrong answer is \boxed{18}.", r"The upper bound is \boxed{18}."),
        # a check that fails, or doubts
        *("The answer is 18. Check: 18 + 3 = 21, which is not 16.", "The answer is 18. Check: 18 is too large."),
        *("The answer is 18. This contradicts the problem.", "The answer is 18. I'm not sure about it."),
        # a remark in brackets, which is no factor
        *("The answer is 10 (4 + 6).", "So it is 10 (4 + 6)."),
        # a value that is used further, whatever the words: of two values the last one may be meant
        "So the number of eggs left is 9.\nSince we can sell each one for $2, we get 9 * 2 = 18 dollars.",
        *(
            "The answer is 8. But we can only take half, which leaves 4.",
            "So it is 8. You can add one, which makes nine.",
        ),
        "So the total is 60.\n\nNote that 2 people pay 120 together.",
        *(r"\boxed{4}. Check: f(4) = 7, but it should be 9.", "The answer is 5. Double-check: 2 * 5 = 10."),
        *("The answer is 8. I can also count the last one, making it 9.", "The answer is 8. Next step: halve it."),
        *("The answer is 8. I can also show that it is 9.", "So it is 8. If we count Sunday, we get 9."),
        # a number that is repeated on the way to another, or changed
        *("The answer is 8. Adding the 8 from yesterday makes 16.", r"\boxed{8}. Adding 8 more gives 16."),
        *("The answer is 8. We still have to add the other 8.", "The answer is 8. Ann also has 8."),
        *(
            "The answer is 8. That makes 8 dozen.",
            "The answer is 4. So x is -4.",
            "The answer is 8. It is 8 times as much.",
        ),
        "The answer is B. Option B has 5 sides, and C has 6.",
        # struck, or a box behind words that name no answer
        *("~~The answer is 16.~~", "The answer is ~~16~~", "<del>The answer is 16.</del>", r"~~\boxed{16}~~"),
        *(r"about: \boxed{16}", r"I reject: \boxed{16}", r"For example: \boxed{16}"),
        *(
            r"Common mistake: \boxed{16}",
            r"Method 1: \boxed{16}",
            r"Zum Beispiel: \boxed{16}",
            r"Student A: \boxed{16}",
        ),
        # offers and conditions that go on
        *("The answer is 8. I will solve it again: we obtain 9.", "The answer is 8. I would work with 9 instead."),
        *("The answer is 8. Try this: 9.", "The answer is 8. Happy to explain why 9 is also possible."),
        "The answer is 8. I'd be happy to help you subtract the tax, leaving you with 5.",
        *("The answer is 8. Feel free to subtract 3.", "The answer is 8. Feel free to subtract the tax."),
        *("The answer is 8. If you have any other coins, add them.", "The answer is 8. Of course, add the tax."),
        "The answer is 8. If you need the total you must double it",
        # another number or a statement follows
        *(
            "So the number of boys is 5. That leaves eight girls.",
            "So the discriminant is -4. There is no real solution.",
        ),
        *("So the sum is 15.\n\nHowever, we need the average.", "So the total is 15. Now subtract the broken ones."),
        *("The answer is 8. No, it's 6.", "The answer is 8. It should be six.", "The answer is 8.\n\nEDIT: 6."),
        *("The answer is 8. We still need to subtract the 2: 6.", "The answer is 8. Stop, 8 - 2 = 6."),
        *("The answer is 8. Hmm, that doesn't seem right. 8 - 2 = 6.", "答案是8。应该是6。"),
        *("คำตอบไม่ใช่42", "ถ้าเหลือ 42 คำตอบคือ 7", "คำตอบอาจคือ 42", "คำตอบคือ 42 ?", "คำตอบคือ 42\nแต่ยังไม่ลบ 2"),
        "The number of boys is $\\boxed{5}$.\n\nTherefore, the number of girls is 8.",
        # only a step, or somebody else's
        *("The answer is 15, but I didn't subtract 2 yet. That gives 13."),
        *("Your answer is 15, but you forgot to subtract 2.", "So your answer is 15. Subtract the broken ones."),
        *(
            "The answer is 8. It must be 6, not 8.",
            "It's wrong that the answer is 15.",
            "Without tax, the answer is 15.",
            "Before the discount, the answer is 15.",
        ),
    ],
)
def test_what_states_nothing_surely(reply: str) -> None:
    assert stated_answer([reply]) is None


THANKED = ("Of course! Glad I could help.", "Great to hear that! If you run into any other problems, just let me know.")


def test_an_earlier_reply_counts_before_a_closing() -> None:
    closings = ("You're welcome!", "Glad I could help, Anna. Let me know if you have other questions.", "¡De nada!")
    for closing in (*closings, "Good luck with your exam and have a great day!", "Great! Good luck!", *THANKED):
        assert stated_answer(["The answer is 42.", closing]) == "42."
    assert stated_answer(["The answer is 42.", "So it is 48."]) == "48."
    assert stated_answer(["The answer is 42.", "See page 7."]) is None
    assert stated_answer(["The answer is 8.", "Good luck! You see, you need six."]) is None


@pytest.mark.parametrize(
    "reply",
    [
        *("You're right, glad you caught it! The tax should be subtracted.", "Happy to fix it: subtract the tax."),
        *("Good question! You would have to double it, since both of them pay.", "Glad you noticed my error!"),
        *("Thank you!", "Thank you for the correction.", "Of course!", "Great! Subtract it."),
        *(
            "You're welcome! Double it for the way back.",
            "Let me know if it should be doubled.",
            "De nada, pero falta uno.",
        ),
    ],
)
def test_a_reply_that_says_more_than_a_closing_counts(reply: str) -> None:
    assert stated_answer(["The answer is 42.", reply]) is None


def test_a_withdrawal_counts_without_a_new_answer() -> None:
    assert stated_answer(["The answer is 42.", "Sorry, that was wrong. Which box is full?"]) is None
