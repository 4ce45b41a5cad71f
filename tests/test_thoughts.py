from __future__ import annotations

import pytest

from megatron_collab.thoughts import fault, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("<think>secret</think>\n\nsaid", "said"),
        ("a <think>x</think>b <think>y</think>c", "a b c"),
        ("opened in the prompt</think>\nsaid", "said"),
        ("said <think>cut by the bud", "said "),
        ("<think>only", ""),
        ("<think>a<think>b</think>c</think>said", "said"),
        ("1 < 2 and <b>", "1 < 2 and <b>"),
    ],
)
def test_thoughts_are_hidden(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("text", "opened", "why"),
    [
        ("said", False, None),
        ("<think>x</think>said", False, None),
        ("x</think>said", True, None),
        ("", False, "an empty reply"),
        (" \n", False, "an empty reply"),
        ("<think>x</think> ", False, "an empty reply"),
        ("<think>x", False, "<think> without </think>"),
        ("said", True, "<think> without </think>"),
        ("x</think>said", False, "</think> without <think>"),
        ("<think>a</think></think>b", False, "</think> without <think>"),
        ("<think>a<think>b</think></think>c", False, "nested <think>"),
        ("<think>a</think>b", True, "nested <think>"),
    ],
)
def test_what_no_user_should_see_is_named(text: str, opened: bool, why: str | None) -> None:
    assert fault(text, opened=opened) == why
