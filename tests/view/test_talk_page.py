"""Talk: two models beside each other, a simulated user, futures, in a real browser. Their process is scripted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.view import recorded_runs
from tests.view.browser import (
    Open,
    assert_accessible,
    assert_harmless,
    expect,
    needs_browser,
    press_sequence,
    served,
    unfold,
)
from tests.view.scripted_speaker import BROKEN, FAULT, HOSTILE, WAIT, ScriptedSpeaker, write_models

pytestmark = needs_browser


@pytest.fixture(scope="module")
def talk_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("talks")
    for name in ("run", BROKEN):
        recorded_runs.write_run(folder / name, 1)
        write_models(folder / name, 6, 12)
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "config.json").write_text('{"program": "evaluate", "run": {}}')
    recorded_runs.write_run(folder / "other", 1)
    write_models(folder / "other", 3)
    with served([folder / name for name in ("run", BROKEN, "evaluation", "other")]) as url:
        yield url


def test_before_and_after_by_keyboard(open_page: Open, talk_site: str) -> None:
    page = open_page(talk_site, "#blind")
    press, field = page.keyboard.press, page.get_by_label
    expect(page.get_by_role("heading", name="Which conversation is better?")).to_be_visible()
    press_sequence(page, "g", "t")
    expect(page.locator("#talk-left")).to_have_value("before")
    expect(page.locator("#talk-right")).to_have_value("step_12")
    expect(page.locator(".composer")).to_be_hidden()
    page.get_by_role("button", name="Start").press("Enter")
    columns = page.locator("#talk .column")
    expect(columns.locator("h3")).to_have_text(["before", "step 12"])
    press("w")
    expect(field("Message as the user")).to_be_focused()
    page.keyboard.type("gt?")
    press("Shift+Enter")
    page.keyboard.type("hello")
    wait_until_idle(page)
    press("Enter")
    for name, column in zip(("before", "step_12"), (columns.first, columns.last), strict=True):
        expect(column.locator(".text")).to_have_text(["gt?\nhello", f"{name} heard: gt?\nhello"])
    expect(field("Message as the user")).to_have_value("")
    expect(field("Message as the user")).to_be_focused()
    ScriptedSpeaker.go_on.clear()
    page.keyboard.type(WAIT)
    wait_until_idle(page)
    press("Enter")
    expect(columns.first.locator(".message.user")).to_have_count(2)
    expect(page.locator(".talk-status")).to_have_text("The model replies\u2026")
    expect(columns.last.locator(".text").last).to_have_text("step_12 h")  # half of the reply
    expect(columns.last.get_by_role("log")).to_have_attribute("aria-busy", "true")
    page.keyboard.type("too early")
    press("Enter")
    expect(field("Message as the user")).to_have_value("too early")
    page.reload()
    expect(columns.first.locator(".message.user")).to_have_count(2)
    page.set_viewport_size({"width": 1000, "height": 300})
    thought = columns.last.locator(".message summary").last
    thought.focus()
    page.evaluate("scrollTo(0, 0)")  # to read above while the reply grows
    ScriptedSpeaker.go_on.set()
    expect(columns.last.locator(".text").last).to_have_text(f"step_12 heard: {WAIT}")
    expect(thought).to_be_focused()
    assert page.evaluate("scrollY") == 0
    expect(columns.last.get_by_role("log")).to_have_attribute("aria-busy", "false")
    wait_until_idle(page)
    page.get_by_role("button", name="Undo").press("Enter")
    expect(columns.last.locator(".message.assistant")).to_have_count(1)
    page.get_by_role("button", name="Stop").press("Enter")
    expect(page.locator(".talk-status")).to_have_text("The models are no longer served.")
    expect(columns).to_have_count(2)


def wait_until_idle(page: Any) -> None:
    """Before a key: a click waits by itself until its button does something."""
    expect(page.get_by_role("button", name="Send")).to_have_attribute("aria-disabled", "false")


def test_a_task_with_its_simulated_user_and_futures(open_page: Open, talk_site: str) -> None:
    page = open_page(talk_site, "#talk?left=step_6&right=&task=booking-1")
    status, columns = page.locator(".talk-status"), page.locator("#talk .column")
    page.get_by_role("button", name="Start").click()
    column = columns.first
    expect(column.locator(".message.assistant .text")).to_have_text(["step_6 heard: I would like a table, number 1."])
    expect(columns).to_have_count(1)
    tasks = page.locator("#talk-task")
    expect(tasks.locator("optgroup")).to_have_attribute("label", "test, 3 of 50 tasks")
    unfold(page, "#talk")
    expect(page.locator("#talk")).to_contain_text("step-free access")
    expect(column.locator(".message.assistant")).to_contain_text("step_6 thinks")
    page.get_by_role("button", name="Simulated user").click()
    expect(column.locator(".message.user")).to_have_count(2)
    expect(column.locator(".message.assistant").first.get_by_text("step_6 thinks").last).to_be_visible()  # still open
    page.get_by_label("Number of futures").fill("2")
    page.get_by_role("button", name="Play futures").click()
    tabs = column.get_by_role("tab")
    expect(tabs).to_have_count(2)
    expect(column.locator(".scores")).to_contain_text("interactivity")
    tabs.first.press("ArrowRight")
    expect(tabs.last).to_be_focused()
    future = column.get_by_role("tabpanel")
    expect(future.locator(".message.user")).to_have_text(re.compile("Answer 1"))
    column.get_by_label("Compare with").select_option("0")
    expect(future.locator(".beside")).to_contain_text("Answer 0")
    assert_accessible(page)
    page.get_by_label("Number of futures").fill("9")
    page.get_by_role("button", name="Play futures").click()
    expect(page.get_by_role("alert")).to_have_text("count: give 1 to 8")
    page.get_by_role("button", name="Simulated user").click()
    expect(column.locator(".talk-end")).to_have_text("Ended by user_done")
    expect(tabs).to_have_count(0)
    tasks.select_option("booking-2")
    page.get_by_role("button", name="New conversation").click()
    expect(column.locator(".message.user .text")).to_have_text(["I would like a table, number 2."])
    expect(status).to_have_text("")
    for choice in ("task=booking-2", "left=step_6"):
        expect(page).to_have_url(re.compile(choice))


def test_models_of_two_runs_stand_beside_each_other(open_page: Open, talk_site: str) -> None:
    page = open_page(talk_site, "#talk")
    columns = page.locator("#talk .column")
    expect(page.locator("#talk-left")).to_have_value("before")
    page.get_by_label("Beside it, run").select_option("3")
    expect(page.locator("#talk-right")).to_have_value("step_3")
    page.get_by_role("button", name="Start").click()
    expect(columns.locator("h3")).to_have_text(["run: before", "other: step 3"])
    page.get_by_label("Message as the user").fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(columns.last.locator(".text").last).to_have_text("step_3 heard: hello")
    page.reload()
    expect(columns.last.locator(".text").last).to_have_text("step_3 heard: hello")
    expect(page.get_by_role("button", name="New conversation")).to_be_enabled()


def test_a_hostile_reply_stays_text(open_page: Open, talk_site: str) -> None:
    page = open_page(talk_site, "#talk")
    page.get_by_role("button", name="Start").click()
    text, send = page.get_by_label("Message as the user"), page.get_by_role("button", name="Send")
    text.fill("x" * 20_001)
    send.click()
    expect(page.get_by_role("alert")).to_have_text("text: give 1 to 20000 characters")
    expect(text).to_have_value("x" * 20_001)
    text.fill(HOSTILE)

    def type_before_the_answer(route: Any) -> None:
        if route.request.method == "POST":
            text.fill("the next message")
        route.continue_()

    page.route("**/api/talk", type_before_the_answer)
    send.click()
    expect(page.locator("#talk .message.assistant")).to_have_count(2)
    expect(text).to_have_value("the next message")
    page.unroute("**/api/talk")
    page.get_by_role("button", name="Play futures").click()
    expect(page.locator("#talk [role=tab]")).to_have_count(6)
    unfold(page, "#talk")
    assert_harmless(page)
    page.set_viewport_size({"width": 400, "height": 900})
    assert_harmless(page)


def test_a_failed_start_is_one_line(open_page: Open, talk_site: str) -> None:
    page = open_page(talk_site, "#talk?run=2")
    expect(page.get_by_role("alert")).to_contain_text("trains no model")
    expect(page.get_by_role("button", name="Start")).to_be_disabled()
    page.locator("#talk-run").select_option("1")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("alert")).to_have_text(FAULT)
    expect(page.locator(".talk-status")).to_have_text("The models are no longer served.")
    enabled: list[bool] = []

    def look_before_the_answer(route: Any) -> None:
        enabled.append(page.get_by_role("button", name="Start").is_enabled())
        route.continue_()

    page.route("**/api/runs/0/models", look_before_the_answer)
    page.locator("#talk-run").select_option("0")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#talk .column")).to_have_count(2)
    expect(page.get_by_role("alert")).to_have_count(0)
    assert enabled == [False], "until the models are known, it would start those of the other run"
