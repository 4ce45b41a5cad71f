"""Compare and the blind test, in a real browser, with the real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megatron_collab.observability import evaluations, transcripts
from tests.view import recorded_runs
from tests.view.browser import Open, Serve, assert_accessible, expect, needs_browser, press_sequence

pytestmark = needs_browser


def test_two_evaluations_are_compared(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations")
    expect(page.locator(".turn.chosen")).to_be_visible()
    press_sequence(page, "g", "v")
    heads = page.locator(".differences thead th")
    expect(heads).to_have_text(["metric", "first \u00b7 after", "second \u00b7 after", "right less left"])
    page.get_by_label("Left").select_option("0:before")
    page.get_by_label("Right").select_option(label="first \u00b7 after")
    expect(page.locator(".common")).to_have_text("6 common tasks of 6 and 6")
    accuracy = page.locator(".differences tr", has=page.get_by_role("rowheader", name="accuracy", exact=True))
    expect(accuracy.locator("td").last).to_have_text(re.compile(r"\+0\.333 \[\u22120\.\d+, \+0\.\d+\]"))
    tasks = page.locator(".tasks tbody tr")
    page.get_by_label("Order").select_option("gain")
    expect(tasks.locator("td:last-child")).to_have_text(["+1.000", "+1.000", "+0.000", "+0.000", "+0.000", "+0.000"])
    page.locator("#compare-metric").select_option("token_amount")
    expect(tasks.first).to_have_text("booking-5300350+50.000")
    page.get_by_label("Order").select_option("loss")
    expect(tasks.locator("td:first-child")).to_have_text([f"booking-{number}" for number in range(6)])
    for key, task in (("j", 1), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        expect(page.locator(".pair h2")).to_have_text(f"booking-{task}")
    columns = page.locator(".pair .column")
    expect(columns.first).to_contain_text("For how many people?")
    expect(columns.last).to_contain_text("Which day suits you?")
    columns.last.get_by_label("Conversation").select_option("1")
    expect(columns.last).to_contain_text("Is 19:00 fine?")
    expect(columns.last.locator(".scores tbody tr").first).to_have_text(re.compile("accuracy0.000"))
    reason = columns.last.locator("details", has=page.locator("summary b").get_by_text("Reason", exact=True))
    reason.locator("summary").click()
    expect(reason).to_contain_text("The booking is right.")
    page.reload()
    expect(columns.last).to_contain_text("Is 19:00 fine?")
    expect(page.locator(".tasks .chosen")).to_contain_text("booking-1")
    page.get_by_role("button", name="Swap sides").click()
    expect(accuracy.locator("td").last).to_contain_text("\u22120.333")
    assert_accessible(page)
    page.goto(f"{site}#compare?left=0:before&right=0:training/3")
    expect(page.locator(".differences")).to_have_text("These sides have no scored task in common. Choose others.")
    page.goto(f"{site}#compare?left=0:before&right=0:nowhere")
    expect(page.get_by_role("alert")).to_have_text("first has no conversations of nowhere")
    page.get_by_label("Right").select_option("0:after")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".pair h2")).to_have_text("booking-0")


def test_a_blind_test_by_keyboard(open_page: Open, serve: Serve, tmp_path: Path) -> None:
    """Each reply says its side, so that the rater can always prefer the one of the evaluation after.

    The task whose conversations are equal is left out.
    """
    run = tmp_path / "run"
    recorded_runs.write_run(run, 1)
    sides = {"before": "a poor reply", "after": "a good reply"}
    for name, text in sides.items():
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
        rows = [[{"task": f"t{at}", "messages": messages, "scores": {"judge": 0.125}}] for at in range(12)]
        rows.insert(0, [{"task": "equal", "messages": messages[:1], "scores": {"judge": 0.125}}])
        transcripts.write(evaluations.file_of(run, name), rows)
    url = serve([run])
    page = open_page(url, "#compare?left=0:before&right=0:after", color_scheme="dark")
    page.get_by_role("link", name="Blind test of these sides").click()
    columns = page.locator("#blind .column")
    expect(columns).to_have_count(2)
    assert not re.search("before|after|judge|0.125", page.locator("#blind .pair").inner_text())
    page.evaluate("() => { let draws = 0; crypto.getRandomValues = (bytes) => bytes.fill(draws++); }")
    replies = columns.all_inner_texts()
    for name in ("A", "Ad", ""):  # draws nothing again
        page.get_by_label("Your name").fill(name)
        page.keyboard.press("Enter")
        expect(page.locator(".verdict-skip")).to_be_enabled()
        assert columns.all_inner_texts() == replies
    page.get_by_role("heading", name="Which conversation is better?").click()  # out of the field
    page.keyboard.press("s")
    expect(page.get_by_role("alert")).to_have_text("Type your name first: each rating has one.")
    expect(page.get_by_label("Your name")).to_be_focused()
    page.keyboard.type("Ada")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Which conversation is better?").click()  # out of the field
    assert_accessible(page)
    progress = page.locator("#blind [role=status]")
    for at, key in enumerate(["s", "=", *[None] * 10]):
        expect(progress).to_have_text(f"{at} of 12 tasks rated")
        expect(page.locator(".verdict-skip")).to_be_enabled()
        good = columns.first.get_by_text("a good reply")
        page.keyboard.press(key or ("ArrowLeft" if good.count() else "ArrowRight"))
    expect(page.locator("#blind .empty")).to_have_text("You have rated every task.")
    results = page.locator("#blind .outcome li")
    expect(results).to_have_count(0)
    page.get_by_role("button", name="Show the result and end").click()
    expect(results.nth(0)).to_have_text(
        "after is better in 10, equal in 1, worse in 0 of 11 tasks than before; 1 skipped."
    )
    expect(results.nth(2)).to_have_text("Evidence against equal sides: 180. One side is better.")
    page.reload()
    expect(progress).to_have_text("12 of 12 tasks rated")
    rows = [json.loads(line) for line in (run / "ratings.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["skip", "tie", *["right"] * 10]
    assert {row["shown_left"] for row in rows} <= {"left", "right"}


def test_who_has_seen_the_result_or_the_names_rates_nothing_more(open_page: Open, serve: Serve, tmp_path: Path) -> None:
    """Names are which side was which, as the comparison shows."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        recorded_runs.write_run(folder, 1)
    url = serve(folders)
    page = open_page(url)
    progress, results = page.locator("#blind [role=status]"), page.locator("#blind .outcome li")
    for run, seen in enumerate(("result", "names")):
        page.goto(f"{url}#blind?left={run}:before&right={run}:after")
        page.get_by_label("Your name").fill("Ada")
        page.get_by_role("heading", name="Which conversation is better?").click()
        for number in range(2):
            expect(progress).to_have_text(f"{number} of 6 tasks rated")
            expect(page.locator(".verdict-skip")).to_be_enabled()
            expect(results).to_have_count(0)  # while rating goes on
            page.keyboard.press("ArrowLeft")
        expect(progress).to_have_text("2 of 6 tasks rated")
        expect(page.locator("#blind .outcome")).to_contain_text("it ends the test")
        if seen == "result":
            page.get_by_role("button", name="Show the result and end").click()
            expect(results.first).to_contain_text("of 2 tasks")
        else:
            page.get_by_role("link", name="Compare with names and scores").click()
            expect(page.locator(".pair h2")).to_have_text("booking-0")
        for sides in (("before", "after"), ("after", "before")):
            page.goto(f"{url}#blind?left={run}:{sides[0]}&right={run}:{sides[1]}")
            expect(page.locator("#blind .empty")).to_have_text("You have ended the test of these sides.")
            page.keyboard.press("ArrowLeft")
            expect(page.locator(".verdict-skip")).to_be_disabled()
            expect(results.first).to_contain_text("of 2 tasks")
    page.goto(f"{url}#blind?left=0:before&right=0:step_6")  # has no conversations
    expect(page.locator("#blind").get_by_role("alert")).to_be_visible()
    for folder in folders:
        assert len((folder / "ratings.jsonl").read_text().splitlines()) == 2
