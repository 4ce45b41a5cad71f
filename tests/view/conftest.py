"""A browser and made runs for the tests of the page. Fixtures import `browser`, which skips without Playwright.

What each test saw last is a picture in build/screenshots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.view import recorded_runs, rewarded_runs, scripted_speaker

_opened = ExitStack()  # closes the browser
_browsers: list[Any] = []  # at most one


@pytest.fixture(scope="session")
def closed_at_the_end() -> Iterator[None]:
    with _opened:
        yield


@pytest.fixture
def browser(closed_at_the_end: None) -> Any:
    """One for all tests of this folder that follow each other."""
    from tests.view.browser import CHROMIUM, FLAGS, SECONDS, expect, playwright

    if not _browsers:
        expect.set_options(timeout=1000 * SECONDS)
        library = _opened.enter_context(playwright.sync_playwright())
        _opened.callback(_browsers.clear)
        _browsers.append(library.chromium.launch(executable_path=CHROMIUM, args=FLAGS))
        _opened.callback(_browsers[0].close)
    return _browsers[0]


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Close the browser before other tests: an open one has a running event loop, and asyncio.run refuses."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _opened.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two runs: the first has finished, the second goes on."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps, seed in (("first", 12, 0), ("second", 3, 1)):
        recorded_runs.write_run(folder / name, steps, seed)
    recorded_runs.finish(folder / "first")
    scripted_speaker.write_models(folder / "first", 6, 12)
    from tests.view.browser import served

    with served([folder / "first", folder / "second"]) as url:
        yield url


@pytest.fixture(scope="session")
def rewarded_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run whose rewards follow from its settings, and one with a reward function of its own."""
    folder, reward = tmp_path_factory.mktemp("rewarded"), rewarded_runs.settings()
    groups = rewarded_runs.made_groups(reward, rewarded_runs.GROUPS)
    rewarded_runs.write_run(folder / "built_in", reward, groups)
    rewarded_runs.write_run(folder / "function", replace(reward, mode="my.rewards:Best"), groups)
    from tests.view.browser import served

    with served([folder / "built_in", folder / "function"]) as url:
        yield url


@pytest.fixture(scope="session")
def hostile_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    recorded_runs.write_hostile_run(folder / "hostile")
    from tests.view.browser import served

    with served([folder / "hostile"]) as url:
        yield url


@pytest.fixture
def serve() -> Iterator[Callable[[Sequence[Path]], str]]:
    """Serves runs until the pages are closed: one that looks for new steps meets an error without its server."""
    from tests.view.browser import served

    with ExitStack() as servers:
        yield lambda folders: servers.enter_context(served(folders))


PICTURES = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture
def open_page(browser: Any, serve: object, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Opens a page; in the end none has logged an error or opened a dialog."""
    from tests.view.browser import SECONDS, TOKEN, is_fault

    faults, contexts = list[str](), []

    def opened(url: str, hash_: str = "", **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": 1400, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * SECONDS)
        page.on("console", lambda message: faults.append(message.text) if is_fault(message) else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: (faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto(f"{url}?token={TOKEN}{hash_}")
        return page

    yield opened
    for context in contexts:
        context.pages[0].screenshot(path=PICTURES / f"{request.node.name}.png", animations="disabled")
        context.close()
    assert not faults
