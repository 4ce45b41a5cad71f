"""The judge check in a real browser: by keyboard, and with hostile names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_collab.view.runs import RunView
from tests.view import judged_runs
from tests.view.browser import (
    Open,
    Serve,
    assert_accessible,
    assert_harmless,
    expect,
    needs_browser,
    press_sequence,
    wait_for_choice,
)
from tests.view.judged_runs import Names
from tests.view.recorded_runs import MARKS, MARKUP

pytestmark = needs_browser


def test_a_judge_is_checked_against_ratings_and_labels(open_page: Open, serve: Serve, tmp_path: Path) -> None:
    run = tmp_path / "run"
    judged_runs.write_run(run)
    url = serve([RunView(run, [*judged_runs.labels()])])
    page = open_page(url, color_scheme="dark")
    expect(page.locator("#overview .chart").first).to_be_visible()
    press_sequence(page, "g", "j")
    view = page.locator("#judge")
    expect(view.get_by_label("Labels of people").locator("option")).to_have_text(
        ["blind test (23)", "file of labels (48)"]
    )
    expect(view.get_by_label("Metric").locator("option:checked")).to_have_text("polite")
    figures = view.get_by_role("region", name="Figures").locator("tbody tr")
    expect(figures).to_have_count(5)
    expect(figures.filter(has_text="without ties").locator("td").first).to_have_text(
        re.compile(r"^0\.\d{3} \[0\.\d{3}, 0\.\d{3}\]$")
    )
    expect(view.locator(".notes")).to_contain_text("judge-1 (24), judge-2 (22)")
    expect(view.locator(".notes")).to_contain_text("may not be comparable")
    expect(view.locator(".chart")).to_have_count(0)
    view.locator(".disagreements a").first.click()
    expect(page.locator("#compare .pair .column")).to_have_count(2)
    page.go_back()
    view.get_by_label("Labels of people").select_option("labels")
    expect(figures.locator("th")).to_have_text(
        ["area under the ROC curve", "agreement", "kappa", "judge less people", "bias by length"]
    )
    chart = view.locator(".chart")
    expect(chart.locator("h3")).to_have_text(re.compile(r"^Calibration of polite: expected error 0\.\d{3}$"))
    expect(chart.locator(".diagonal")).to_have_count(1)
    points = chart.locator("circle")
    expect(points).not_to_have_count(0)
    chart.get_by_role("slider").focus()
    for key in ("Home", *["ArrowRight"] * 3):  # a bin of a single task has no interval
        page.keyboard.press(key)
    expect(chart.get_by_role("slider")).to_have_attribute("aria-valuetext", re.compile("^judge's score 0.*\\["))
    chart.locator("summary").click()
    expect(chart.locator("tbody tr")).to_have_count(points.count())
    assert_accessible(page)
    page.reload()
    expect(figures).to_have_count(5)
    view.get_by_label("Metric").select_option("tokens")
    expect(chart).to_have_count(0)
    view.get_by_label("Metric").select_option("polite")
    link = view.locator(".disagreements a").first
    place = re.findall(r"(?:step|position|rollout|future)=(\d+)", link.get_attribute("href"))
    link.click()
    wait_for_choice(page, tuple(map(int, place)))  # type: ignore[arg-type]
    page.goto(f"{url}#judge?source=none")
    expect(view.get_by_role("alert")).to_have_text("source=none: give one of ratings, labels")


@pytest.mark.slow  # test_static.py and the hostile run of test_page.py find the same faults in what all views share
def test_hostile_names_execute_nothing_and_no_labels_say_how_to_get_some(
    open_page: Open, serve: Serve, hostile_site: str, tmp_path: Path
) -> None:
    page = open_page(hostile_site, "#judge")
    expect(page.locator("#judge .empty")).to_have_text(
        "There are no labels by people yet. Rate conversations in the blind test, or start megatron-collab view RUN "
        "--labels FILE."
    )
    names = Names(*[MARKUP + MARKS + "n" * 3000] * 4)
    judged_runs.write_run(tmp_path / "run", names)
    url = serve([RunView(tmp_path / "run", [*judged_runs.labels(names=names)])])
    page = open_page(url, "#judge")
    for source in ("ratings", "labels"):
        page.get_by_label("Labels of people").select_option(source)
        expect(page.locator("#judge .disagreements tbody tr").first).to_contain_text("<img")
        expect(page.locator("#judge tbody th").first).to_have_text(
            "agreement" if source == "ratings" else "area under the ROC curve"
        )
        assert_harmless(page)
        page.set_viewport_size({"width": 400, "height": 900})
        assert_harmless(page)
