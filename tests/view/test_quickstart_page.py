"""The quickstart's own run in a browser, while it trains and when it has ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_collab.runtime.process import wait_for
from tests.view.browser import Open, Serve, assert_accessible, assert_harmless, chart, expect, needs_browser

SECONDS = 1800  # until the quickstart has come further
pytestmark = [*needs_browser, pytest.mark.slow, pytest.mark.timeout(3 * SECONDS)]  # it waits three times
COMMAND = "import sys; from megatron_collab.commands.__main__ import main; sys.exit(main())"
STEPS = 12  # of each of its two runs; the first begins with steps of warm-up
SHORTER = [f"train.steps={STEPS}", "optim.warmup_steps=2"]


def test_a_person_reads_the_quickstart(open_page: Open, serve: Serve, tmp_path: Path) -> None:
    run = tmp_path / "seed0" / "rl"
    words = [sys.executable, "-c", COMMAND, "quickstart", "--root", str(tmp_path), *SHORTER]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as quickstart:
        try:
            begun = wait_for(lambda: (run / "metrics.jsonl").is_file() or quickstart.poll() is not None, SECONDS)
            assert begun and quickstart.poll() is None, (tmp_path / "log").read_text()[-2000:]
            page = open_page(serve([run]))
            state = page.locator(".legend small")
            expect(state).to_have_text(re.compile(r"train \u00b7 \d+ steps? \u00b7 running"))
            conversations = page.get_by_role("link", name="Conversations")
            conversations.click()
            expect(page.locator(".turn.chosen .parts")).to_contain_text("reward")
            page.get_by_role("link", name="Overview").click()
            ended = f"train \u00b7 {STEPS} steps \u00b7 finished"
            expect(state).to_have_text(ended, timeout=1000 * SECONDS)  # without a reload
            assert quickstart.wait(SECONDS) == 0, (tmp_path / "log").read_text()[-2000:]
        finally:
            quickstart.terminate()
    expect(chart(page, "booking_right").locator("circle")).to_have_count(2)  # evaluations before and after
    trend = page.get_by_role("region", name="Reward", exact=True).locator(".band")
    expect(trend).to_have_attribute("d", re.compile("Z$"))
    expect(chart(page, "seconds of a step").locator(".readout")).to_contain_text(
        re.compile(r"rollout [\d.]+ \(\d+ %\)")
    )
    for name in ("idle/servers", "idle/trainer"):
        expect(chart(page, name).locator(".readout")).to_have_text(re.compile(r"\b[01](\.\d+)?$"))
    assert_accessible(page)
    conversations.click()
    expect(page.locator(".count")).to_have_text(re.compile(r"1\u201350 of [\d,]+ futures"))
    page.locator("#filter-metric").select_option("booking_right")
    page.locator("#filter-low").fill("0")  # a model of so few steps writes malformed turns too, which have no scores
    page.keyboard.press("Enter")
    page.locator("#filter-sort").select_option("standard_error")
    page.locator("#filter-descending").check()
    page.locator(".rows tbody a").first.click()
    expect(page.locator(".turn.chosen .parts")).to_contain_text("booking_right")
    page.keyboard.press("r")
    page.get_by_role("slider", name="weight of token_amount, slider").press("End")
    expect(page.locator("#order")).to_be_visible()
    expect(page.get_by_label("Conversations of").locator("option")).to_have_text(["training", "before", "after"])
    page.get_by_role("link", name="Compare").click()
    expect(page.locator(".differences tbody")).to_contain_text("booking_right")
    expect(page.locator(".common")).to_have_text("640 common tasks of 640 and 640")
    page.get_by_role("link", name="Blind test of these sides").click()
    expect(page.locator("#blind .column")).to_have_count(2)
    page.get_by_role("link", name="Judge check").click()
    expect(page.locator("#judge .empty")).to_contain_text("There are no labels by people yet")
    page.get_by_role("link", name="Talk").click()
    expect(page.locator("#talk-right")).to_have_value(f"step_{STEPS}")
    page.set_viewport_size({"width": 400, "height": 800})
    assert_harmless(page)  # and no wider than the window
