from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_collab.runtime.text import one_line, printable

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1\n    f()\n    ^^^\n'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("good\rbad", r"good\rbad"),
        ("a\x08b\x7f\x00", r"a\x08b\x7f\x00"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("half \ud83d", r"half \ud83d"),
        ("tab\tline\n", "tab\tline\n"),
        ("äöü 因为 😀 “q” …", "äöü 因为 😀 “q” …"),
    ],
)
def test_nothing_that_a_terminal_obeys_is_printed(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_any_text_can_be_printed(text: str) -> None:
    shown = printable(text)
    assert shown.encode() and not set(shown) & {"\x1b", "\r", "\x9b"} if shown else text == ""
    assert "\n" not in one_line(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n b\t c ", "a b c"),
        (f"bad {TRACE}KeyError: 1", "bad: KeyError: 1"),
        (f"{TRACE}KeyError: 1\n\nDuring handling of it:\n\n{TRACE}ValueError: 2", "KeyError: 1 During handling of it:"),
        ("x" * 9 + "end", "…xend"),
        ("1234", "1234"),
    ],
)
def test_a_reason_is_the_end_of_a_text_on_one_line(text: str, line: str) -> None:
    assert one_line(text, 4 if "end" in text or len(text) == 4 else 400).startswith(line)
