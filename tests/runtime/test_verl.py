"""What verl lacks is found, and calls have the arguments that a signature takes."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megatron_collab.runtime import verl
from megatron_collab.runtime.side_loop import SideLoop
from megatron_collab.settings import ConfigError


@pytest.fixture
def no_modules() -> Iterator[None]:
    """Within it, nothing of verl is imported yet."""
    modules = {name: sys.modules.pop(name) for name in _imported()}
    yield
    for name in _imported():
        del sys.modules[name]
    sys.modules.update(modules)


def _imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "verl"]


@pytest.mark.usefixtures("no_modules")
def test_a_verl_that_is_installed_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of verl lack the interactions, and have the tools."""
    (tmp_path / "verl/tools").mkdir(parents=True)
    for name, source in {
        "__init__": "VERSION = 9",
        "tools/__init__": "",
        "tools/base_tool": "class BaseTool: mark = 1",
    }.items():
        (tmp_path / f"verl/{name}.py").write_text(source)
    (tmp_path / "mine_of_verl.py").write_text(
        "import verl\nfrom verl.interactions.base import BaseInteraction\nfrom verl.tools.base_tool import BaseTool\n"
        "def both(): return verl.VERSION, BaseInteraction, BaseTool.mark\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    version, base, mark = verl.load("mine_of_verl.both", "setting")()
    assert (version, base.__module__, mark) == (9, "megatron_collab.runtime.verl.base", 1)


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda instance_id, messages, **kwargs: (instance_id, messages, kwargs), ("id", "m", {"a": 1, "b": 2})),
        (lambda request, dialogue, a=0: (request, dialogue, a), ("id", "m", 1)),
        (lambda messages: messages, "m"),
        (lambda a, messages: (a, messages), (1, "m")),
        (lambda b: b, 2),
        (lambda: "none", "none"),
        (lambda *args, b: (args, b), (("id", "m"), 2)),
    ],
)
def test_a_call_has_what_the_signature_takes(function: Any, result: Any) -> None:
    loop = SideLoop.acquire()
    assert asyncio.run(verl.call(loop, function, "id", "m", a=1, b=2)) == result
    loop.release()


def test_an_error_of_foreign_code_is_reported_with_its_type() -> None:
    def connect() -> None:
        raise TimeoutError("no route")

    with pytest.raises(ConfigError, match=r"^x \(TimeoutError: no route\)$"):
        verl.attempt("x", connect)


def test_a_constructor_that_hangs_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "SECONDS", 0.0)
    ends = Event()
    with pytest.raises(ConfigError, match=r"^tool x \(does not end within 0 s\)$"):
        verl.attempt("tool x", ends.wait)
    ends.set()


def test_answers_to_gsm8k_are_read_strictly_or_flexibly() -> None:
    from megatron_collab.runtime.verl.gsm8k import compute_score

    assert compute_score("#### 3 then #### 1,234", "1234") == 1.0
    assert compute_score("it is 1234", "1234", format_score=0.1) == 0.0  # no answer at all
    assert compute_score("#### 7", "1234", format_score=0.1) == 0.1
    assert compute_score("5, no: it costs $1,234.", "1234", method="flexible") == 1.0
    assert compute_score("-7.5 it is", "-7.5", method="flexible", score=2.0) == 2.0
