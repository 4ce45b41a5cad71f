"""Text from outside, such as errors of endpoints and contents of recordings, made fit for a line of output."""

from __future__ import annotations

import re

LONGEST_REASON = 400  # characters
_TRACEBACK = re.compile(r"(?<!\s)\s*Traceback \(most recent call last\):\n(?:[ \t]+[^\n]*\n|\n)*")
# What moves the cursor, colors, reorders or cannot be encoded: control characters but tab and line feed, C1 controls,
# marks of direction, halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with the characters that a terminal would obey written as Python escapes, e.g. \\x1b."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text: str, longest: int = LONGEST_REASON) -> str:
    """`text` as one printable line without tracebacks, of which the error itself stays; cut at the front if too long.

    The end of an error says most: libraries put their names, and those of the errors that they caught, in front.
    """
    line = printable(" ".join(_TRACEBACK.sub(": ", text).split())).removeprefix(": ")
    return line if len(line) <= longest else f"…{line[-longest:]}"
