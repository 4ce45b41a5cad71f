from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.types import Message
from tests.reward.fakes import about, play, score

ROOT = Path(__file__).resolve().parents[2]
TASK = about("5", "one two", "hello world", "three")
PLAYED = play(TASK, "<think>a b</think>tokens are <|endoftext|>", "four  five\nsix", "hello")


def test_policy_counts_its_own_token_ids_from_the_trained_turn_on() -> None:
    """`<think>a`, `b</think>tokens`, `are`, `<|endoftext|>` and an end; `hello` and an end."""
    assert score("token_amount", TASK, PLAYED) == 5 + 2


def test_words_are_those_of_user_and_assistant_from_the_trained_turn_on() -> None:
    """Three (without the thought), three and one; the tool's two do not count."""
    with_tool = PLAYED.add_messages([Message("tool", "7 8")], ())
    assert score("token_amount", TASK, with_tool, count="words") == 3 + 3 + 1


def test_cl100k_counts_thousands_of_all_assistant_messages() -> None:
    """`hello world tokens are <|endoftext|> hello`: five words of one token, and a mark that is plain text here.

    The mark is ` <|`, `endo`, `ft`, `ext`, `|`, `>`: 11 tokens in all.
    """
    assert score("token_amount", TASK, PLAYED, count="cl100k") == pytest.approx(0.011)


def test_seen_counts_what_the_user_reads_and_writes() -> None:
    """`one two hello world three tokens are` 7, the mark 6 as above, `four  five\\nsix` 5, `hello`: 19 tokens.

    The task's thought, the policy's call and what the tool says to it are not shown to the user.
    """
    task = about("5", "one two", "<think>a b</think>hello world", "three")
    assert (
        score("token_amount", task, play(task, "tokens are <|endoftext|>", "four  five\nsix", "hello"), count="seen")
        == 19
    )
    called = play(task, "a call").add_messages([Message("tool", "7 8")], ())
    assert score("token_amount", task, called, count="seen") == 5


OFFLINE = """
import socket
addresses = []
def refuse(*address, **_):
    addresses.append(address)
    raise OSError("no network")
socket.getaddrinfo = socket.socket.connect = refuse
from tests.reward.test_token_amount import PLAYED, TASK, score
print(score("token_amount", TASK, PLAYED, count="cl100k"), addresses)
"""


@pytest.mark.processes
def test_cl100k_asks_no_network() -> None:
    done = subprocess.run([sys.executable, "-c", OFFLINE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "0.011 []\n", done.stderr
