"""Conversations: filters, permalinks, the keyboard, reasons, where futures part, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_collab.observability import evaluations, transcripts
from tests.view import recorded_runs
from tests.view.browser import (
    Open,
    Serve,
    assert_accessible,
    chart,
    chosen,
    expect,
    needs_browser,
    press_sequence,
    wait_for_choice,
)

pytestmark = needs_browser


def test_a_permalink_restores_filters_sort_and_choice(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations")
    field = page.locator(".filters").get_by_label
    count = page.locator(".count")
    expect(count).to_have_text("1\u201350 of 288 futures")
    page.get_by_role("combobox", name="Ending").select_option("turn_limit")
    expect(count).to_have_text("1\u201350 of 96 futures")
    field("From step").fill("6")
    field("Words").fill("lyon birthday")
    page.keyboard.press("Enter")  # without the wait for further letters; below too
    expect(count).to_have_text("1\u201348 of 48 futures")
    field("Metric").select_option("token_amount")
    field("At least").fill("340")
    page.keyboard.press("Enter")
    expect(count).to_have_text("1\u201312 of 12 futures")
    field("Sort by").select_option("reward")
    field("Descending").check()
    rows = page.locator(".rows tbody tr")
    rewards = rows.locator("td:nth-child(5)")
    expect(page).to_have_url(re.compile("descending=1"))
    expect(rewards).to_have_text(sorted(rewards.all_inner_texts(), reverse=True))
    rows.nth(3).locator("a").click()
    expect(rows.nth(3)).to_have_class("chosen")
    before = chosen(page)
    texts = rows.all_inner_texts()
    page.reload()
    expect(count).to_have_text("1\u201312 of 12 futures")
    wait_for_choice(page, before)
    expect(rows).to_have_text(texts, use_inner_text=True)
    values = [field(label).input_value() for label in ("Words", "From step", "Metric", "At least", "Sort by")]
    assert values == ["lyon birthday", "6", "token_amount", "340", "reward"]
    page.get_by_role("button", name="Reset").click()
    expect(count).to_have_text("1\u201350 of 288 futures")
    field("Words").fill("nowhere")
    page.keyboard.press("Enter")
    expect(page.locator(".rows")).to_have_text("No conversation matches the filter.")
    field("Words").fill("!!")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("words=!!: contains no word; give letters or digits")
    field("Words").fill("")
    expect(page.locator(".rows tbody tr")).to_have_count(50)


def test_the_keyboard_alone_suffices(open_page: Open, site: str) -> None:
    page = open_page(site)
    press = page.keyboard.press
    expect(chart(page, "reward")).to_be_visible()
    press_sequence(page, "g", "c")
    wait_for_choice(page, (0, 0, 0, 0))
    for key, choice in [
        *(("j", (0, 0, 0, 1)), ("j", (0, 0, 0, 2)), ("j", (0, 0, 1, 0)), ("k", (0, 0, 0, 2))),
        *(("ArrowRight", (0, 0, 1, 0)), ("ArrowRight", (0, 0, 2, 0)), ("ArrowLeft", (0, 0, 1, 0))),
        *(("Shift+ArrowRight", (0, 0, 1, 1)), ("Shift+ArrowLeft", (0, 0, 1, 0)), ("Shift+ArrowLeft", (0, 0, 1, 0))),
    ]:
        press(key)
        wait_for_choice(page, choice)
    press("/")
    expect(page.get_by_label("Words")).to_be_focused()
    page.keyboard.type("jk?")  # letters, not keys
    expect(page.locator(".rows")).to_have_text("No conversation matches the filter.")
    expect(page.get_by_label("Words")).to_have_value("jk?")
    page.keyboard.press("Control+a")
    press("Delete")
    wait_for_choice(page, (0, 0, 0, 0))
    page.locator(".rows").focus()
    press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next rollout of the group")
    press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.goto(f"{site}#conversations?step=2&position=0&rollout=0&future=1")  # the 50th row
    wait_for_choice(page, (2, 0, 0, 1))
    page.keyboard.press("j")
    wait_for_choice(page, (2, 0, 0, 2))
    expect(page.locator(".count")).to_have_text("51\u2013100 of 288 futures")
    page.keyboard.press("k")
    wait_for_choice(page, (2, 0, 0, 1))
    expect(page.locator(".count")).to_have_text("1\u201350 of 288 futures")
    press_sequence(page, "g", "o")
    expect(chart(page, "reward")).to_be_visible()


def test_reasons_thoughts_and_goals_can_be_opened_and_futures_part(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations?step=3&position=1&rollout=2&future=1", color_scheme="dark")
    wait_for_choice(page, (3, 1, 2, 1))
    expect(page.locator(".scores tbody tr").first).to_contain_text("missing: judge.model: no answer within 30 s")
    expect(page.locator(".turn.chosen .parts")).to_contain_text(re.compile(r"reward\s*0\.\d+ \u00b1 0\.050"))
    heads = page.locator(".turn-head span").all_inner_texts()
    advantages = [float(text.removeprefix("advantage ").replace("\u2212", "-")) for text in heads]
    assert all(text.startswith("advantage ") for text in heads)
    assert len(advantages) == 4 and abs(sum(advantages)) < 0.003
    for place, label, text in (
        ("#future", "Reason", "The assistant asked 2 questions"),
        ("#future", "Raw answer", '"score": 0.6'),
        ("#future", "User's persona", "A sister in a hurry"),
        ("#future", "User's thought", "They seem to know what to ask."),
        ("#future", "User's current answer", "Lyon, Friday"),
        ("#future", "Call", '"arguments": {"city": "Lyon"}'),
        ("#future", "Result, 51 characters", "Chez Paul"),
        (".turn.chosen", "Thought", "The request does not say: Which day suits you?"),
        (".group-head", "Hidden goal", "step-free access"),
    ):
        details = page.locator(place).locator("details", has=page.locator("summary b").get_by_text(label, exact=True))
        summary, content = details.locator("summary"), details.locator(".text")
        expect(content).to_be_hidden()
        summary.focus()
        summary.press("Enter")
        expect(content).to_contain_text(text)
        expect(content).to_be_visible()
    assert_accessible(page)
    parting = page.locator(".parting")
    expect(parting).to_have_text("Here the 3 futures of this turn part: message 4 differs.")
    page.get_by_label("Compare with").select_option("2")
    expect(parting).to_have_text("Here the futures 1 and 2 part: message 4 differs.")
    columns = page.locator(".beside .column")
    expect(columns).to_have_count(2)
    expect(columns.first).to_contain_text("Half past, please.")
    expect(columns.last).to_contain_text("In Lyon, near the station.")
    expect(page).to_have_url(re.compile("other=2"))
    page.get_by_role("tab", name="Future 2").click()
    expect(columns).to_have_count(0)


@pytest.mark.slow
def test_a_long_run_is_filtered_and_read(open_page: Open, serve: Serve, tmp_path: Path) -> None:
    """tools/bench/view.py measures a million futures; here a person goes through some ten thousand."""
    recorded_runs.write_run(tmp_path / "long", 120, groups=8)
    page = open_page(serve([tmp_path / "long"]), "#conversations?sort=advantage&descending=1")
    expect(page.locator(".count")).to_have_text("1\u201350 of 11,520 futures")
    page.get_by_role("spinbutton", name="From step").fill("100")
    expect(page.locator(".count")).to_have_text("1\u201350 of 1,920 futures")
    page.get_by_role("textbox", name="Words").fill("wheelchair")
    page.locator("#filter-ending").select_option("turn_limit")
    expect(page.locator(".count")).to_have_text(re.compile(r"1\u201350 of \d+ futures"))
    expect(page.locator(".turn.chosen")).to_be_visible()
    page.goto(page.url.partition("#")[0] + "#overview")
    expect(chart(page, "reward")).to_be_visible()


def test_of_a_torn_run_the_rest_is_shown_also_if_an_earlier_version_began_it(
    open_page: Open, serve: Serve, tmp_path: Path
) -> None:
    """It was killed while it wrote: half a line of metrics, half a file of transcripts."""
    run = tmp_path / "torn"
    recorded_runs.write_run(run, 3)
    torn = transcripts.step_file(run, 2)
    torn.write_bytes(torn.read_bytes()[:200])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    url = serve([run])
    page = open_page(url)
    expect(page.locator(".legend small")).to_have_text("train \u00b7 3 steps \u00b7 running")
    page.get_by_role("link", name="Conversations").click()
    expect(page.get_by_role("alert")).to_contain_text("step_000002.parquet: cannot be read")
    torn.unlink()
    in_lines(transcripts.step_file(run, 0), run / transcripts.OLD_FILE)
    in_lines(*evaluations.files_of(run, "before"))
    page.reload()
    expect(page.locator(".count")).to_have_text("1\u201348 of 48 futures")
    page.goto(f"{url}#conversations?step=0&position=1&rollout=2&future=1")
    wait_for_choice(page, (0, 1, 2, 1))
    expect(page.locator("#future")).to_contain_text("Half past, please.")
    page.get_by_label("Conversations of").select_option("before")
    expect(page.locator(".count")).to_have_text("1\u201312 of 12 futures")


def in_lines(file: Path, old_file: Path) -> None:
    """Write the conversations of a file as an earlier version did."""
    old_file.write_text("".join(json.dumps(row) + "\n" for row in transcripts.rows_of_file(file)))
    file.unlink()
