"""What the tests of the page share: a browser, a server for made runs, and places of the page."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from megatron_collab.view.command import address, listening
from megatron_collab.view.runs import RunView
from megatron_collab.view.server import application
from tests.view.scripted_speaker import ScriptedSpeaker

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make setup installs it")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: make setup installs it")
needs_browser = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tools/setup_browser.sh installs it"),
]

expect = playwright.expect
TOKEN = "a-token-for-tests"
SECONDS = 120  # for anything that the page does: the machine may be busy
POLL_MS, POLL_FINISHED_MS = 2000, 30_000  # of overview.js
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
Open = Callable[..., Any]
Serve = Callable[[Sequence[Path | RunView]], str]


@contextmanager
def served(runs: Sequence[Path | RunView]) -> Iterator[str]:
    """The address of a server for runs, or for those in folders; their models are scripted."""
    views = [run if isinstance(run, RunView) else RunView(run) for run in runs]
    page = application(views, TOKEN, ScriptedSpeaker)
    config = uvicorn.Config(page, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    with listening(0) as server_socket:
        thread = threading.Thread(target=server.run, args=([server_socket],))
        thread.start()
        try:
            yield address(server_socket)
        finally:
            server.should_exit = True
            thread.join()


def is_fault(message: Any) -> bool:
    """Whether a line of the browser's console is bad. That the server refused a choice is on the page too."""
    return message.type in ("error", "warning") and not re.search("status of 40[04]", message.text)


def chart(page: Any, title: str) -> Any:
    heading = page.get_by_role("heading", name=title, exact=True, level=3)
    return page.locator("#overview .sections figure").filter(has=heading).first


def chosen(page: Any) -> tuple[int, ...]:
    """Step, position, rollout and future that the address names. `page.url` may be older than what the page shows."""
    values = dict(re.findall(r"(\w+)=(\w+)", page.evaluate("location.hash")))
    return tuple(int(values[name]) for name in ("step", "position", "rollout", "future"))


def wait_for_choice(page: Any, choice: tuple[int, ...]) -> None:
    """Wait until the page shows a future and the address names it."""
    step, position, rollout, future = choice
    expect(page.locator(".facts")).to_contain_text(f"step {step} \u00b7 group {position} ")
    expect(page.locator(".turn.chosen a")).to_have_text(f"Rollout {rollout}")
    expect(page.get_by_role("tab", selected=True)).to_contain_text(f"Future {future}")
    assert chosen(page) == choice


def press_sequence(page: Any, *keys: str) -> None:
    """Press keys that count together only if they follow each other within a second, which a busy machine may miss."""
    press = "key => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }))"
    page.evaluate(f"keys => keys.forEach({press})", [*keys])


def unfold(page: Any, place: str, most: int = 1000) -> None:
    """Open what is folded at a place, which adds it to the page."""
    page.locator(f"{place} summary").evaluate_all(f"all => all.slice(0, {most}).forEach(summary => summary.click())")


def assert_accessible(page: Any) -> None:
    """Axe finds nothing serious in what the page shows, on a light and on a dark page."""
    for theme, options in (("dark", {"runOnly": ["color-contrast"]}), ("light", None)):
        page.emulate_media(color_scheme=theme)
        violations = axe.Axe().run(page, options=options).response["violations"]
        serious = [rule for rule in violations if rule["impact"] in ("serious", "critical")]
        assert not [(theme, rule["id"], [node["html"] for node in rule["nodes"]]) for rule in serious]


def assert_harmless(page: Any) -> None:
    """Nothing that the run contains has been executed, and the page is not wider than the window."""
    assert page.evaluate("window.attacked") is None
    assert page.locator("main :is(img, script, iframe, object, embed, link, style, [onload], [onerror])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth === innerWidth")
