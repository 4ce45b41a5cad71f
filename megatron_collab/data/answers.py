"""The answer that a text marks: one extractor for worked solutions in the data and for replies of the policy."""

from __future__ import annotations

import re

LONGEST = 500  # characters of a box; the limit keeps the time linear in the length of the text
MARK = r"\\(?:boxed|fbox)(?![a-zA-Z])|####"  # of an answer, anywhere in a text

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_TOKEN = re.compile(r"\\.|[{}\s$]", re.DOTALL)  # of LaTeX; braces behind a backslash group nothing
_LINE_MARK = re.compile(r"####|\banswer is:", re.IGNORECASE)
_THOUSANDS = re.compile(r"-?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def boxed(text: str) -> str | None:
    """Content of the last box that has some. A box without braces, as in `\\boxed 7`, ends at a blank or a dollar."""
    contents = (_argument(text[box.end() : box.end() + LONGEST]) for box in reversed([*_BOX.finditer(text)]))
    return next((content for content in contents if content), None)


def _argument(text: str) -> str:
    """The argument of a LaTeX command at the beginning of `text`, empty if its brace is not closed."""
    braced, depth = text.startswith("{"), 0
    for token in _TOKEN.finditer(text):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if braced and not depth:
            return text[1 : token.start()].strip()
        if depth < 0 or (not depth and (token[0].isspace() or token[0] == "$")):
            return text[: token.start()].rstrip(".,;:")
    return "" if braced else text.rstrip(".,;:")


def marked_line(text: str) -> str | None:
    """The single line after the last `####` (GSM8K) or "answer is:" (MetaMath); None if more follows, as a heading."""
    *_, mark = [None, *_LINE_MARK.finditer(text)]
    line = text[mark.end() :].strip() if mark else ""
    return line if line and "\n" not in line else None


def final_answer(text: str) -> str:
    """The answer of a worked solution: in its marked line, else in its last box, else all of it."""
    line = marked_line(text)
    if line is None:
        return boxed(text) or text.strip()
    answer = boxed(line) or line.rstrip(". ")
    return answer.replace(",", "") if _THOUSANDS.fullmatch(answer) else answer
