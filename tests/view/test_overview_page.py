"""The overview: curves, values at a step, growing runs, in a real browser, with the real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_collab.observability import report
from tests.view import recorded_runs
from tests.view.browser import (
    POLL_FINISHED_MS,
    POLL_MS,
    Open,
    Serve,
    assert_accessible,
    chart,
    expect,
    needs_browser,
    wait_for_choice,
)

pytestmark = needs_browser


def test_the_overview_shows_curves_values_and_tables(open_page: Open, site: str) -> None:
    page = open_page(site)
    headings = page.locator("#overview .sections h2")
    sections = ["Evaluations", "Reward", "Scores", "Time", "Cost", "Endings", "Staleness", "Health", "Sentinels"]
    expect(headings).to_have_text([*sections, "Update and other metrics"])
    reward = chart(page, "reward")
    expect(reward.locator(".curve.color-0")).to_have_attribute("d", re.compile("^([^ML]*[ML]){12}[^ML]*$"))
    expect(reward.locator(".band.color-0")).to_have_attribute("d", re.compile("Z$"))
    expect(reward.locator(".readout")).to_have_text(re.compile(r"^first 0\.\d+second 0\.\d+$"))  # of the last steps
    expect(chart(page, "accuracy").locator("circle")).to_have_count(3 * 2)  # evaluations of both runs, with intervals
    expect(chart(page, "accuracy").locator(".readout")).to_contain_text("first 0.6 [0.5, 0.7] (2 missing)")
    reward.get_by_text("Table").click()
    expect(reward.locator("tbody tr")).to_have_count(12)
    expect(reward.locator("tbody td").first).to_have_text(re.compile(r"^0\.\d+, trend 0\.\d+ \u00b1 0\.0\d+$"))
    stages = chart(page, "seconds of a step, first")
    stages.get_by_text("Table").click()
    expect(stages.locator("tbody td").first).to_have_text(re.compile(r"^\d+\.\d+ \(5\d %\)$"))
    time = page.get_by_role("region", name="Time", exact=True)  # beside the stages
    expect(time.get_by_role("heading", level=3)).to_contain_text(["seconds of a step, first", "idle/servers"])
    expect(chart(page, "idle/servers").locator(".readout")).to_have_text(re.compile(r"^first 0\.\d+second 0\.\d+$"))
    page.get_by_label("Smoothing").fill("0")
    expect(reward.locator(".raw")).to_have_count(0)
    expect(page).to_have_url(re.compile("smooth=0"))
    assert_accessible(page)
    events = page.get_by_role("region", name="Events").locator("tbody tr")
    expect(events.locator("td:nth-child(2)")).to_have_text([*["restart", "setting"] * 2, *["alarm"] * 4])
    expect(events.nth(4)).to_contain_text("flattery")
    expect(events.nth(6)).to_contain_text("judge/interactivity answers as judge-2, before as judge-1")


def test_values_at_a_step_by_keyboard_and_then_its_conversations(open_page: Open, site: str) -> None:
    page = open_page(site, "#overview?runs=0")
    plot = page.get_by_role("slider", name="reward", exact=True)
    plot.focus()
    expect(plot).to_have_attribute("aria-valuenow", "11")
    for _ in range(6):
        plot.press("ArrowLeft")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"step 5: first 0\.\d+, trend 0\.\d+ \u00b1"))
    expect(page.locator("#cursor-text")).to_contain_text(
        "step 5 \u00b7 restart at step 5 \u00b7 optim.lr: 1e-06 \u2192 5e-07"
    )
    expect(page.get_by_role("slider", name="kl", exact=True)).to_have_attribute("aria-valuetext", "step 5: first 0.005")
    unanswered: list[Any] = []
    page.route("**/futures?*", lambda route: unanswered.append(route))
    with page.expect_request("**/futures?*"):
        plot.press("Enter")
    sign = page.locator("html.loading")
    expect(sign).to_be_attached()
    assert page.evaluate("getComputedStyle(document.body, '::after').content") == '"Loading\u2026"'
    unanswered[0].continue_()
    expect(sign).not_to_be_attached()
    expect(page.locator(".count")).to_have_text("1\u201324 of 24 futures")
    wait_for_choice(page, (5, 0, 0, 0))


def test_new_steps_appear_while_a_run_grows_whose_report_is_for_all(
    open_page: Open, serve: Serve, tmp_path: Path
) -> None:
    run = tmp_path / "growing"
    recorded_runs.write_run(run, 2)
    starts = "".join(f'{{"step": {step % 2}}}\n' for step in range(300))
    (run / "history.jsonl").write_text(starts)
    url = serve([run])
    page = open_page(url)
    page.goto("about:blank")  # nothing that the first page asks comes later
    page.clock.install()
    paths: list[str] = []
    page.on("request", lambda request: paths.append(request.url.rpartition("/")[2].partition("?")[0]))
    page.goto(url)
    state = page.locator(".legend small")
    expect(state).to_have_text("train \u00b7 2 steps \u00b7 running")
    reward = chart(page, "reward")
    expect(reward.locator(".event")).to_have_count(2)  # all alarms, and all restarts
    expect(page.locator(".events tbody tr")).to_have_count(200)
    expect(page.locator(".events caption")).to_have_text("The last 200 of 302 events")
    reward.locator(".plot").focus()
    recorded_runs.write_step(run, 2, **{"score/brevity": 0.5})  # a further chart, so that all are put anew
    page.clock.fast_forward(POLL_MS)
    expect(state).to_have_text("train \u00b7 3 steps \u00b7 running")
    expect(reward.locator(".curve")).to_have_attribute("d", re.compile("^([^ML]*[ML]){3}[^ML]*$"))
    expect(reward.locator(".plot")).to_be_focused()
    assert paths.count("metrics") >= 2 and paths.count("evaluations") == paths.count("events") == 1, "unless new"
    rows = (run / "metrics.jsonl").read_text().splitlines()
    shorter = run / "shorter.jsonl"
    shorter.write_text(rows[0] + "\n")
    shorter.replace(run / "metrics.jsonl")  # as a resume from an earlier checkpoint does
    page.clock.fast_forward(POLL_MS)
    expect(state).to_have_text("train \u00b7 1 step \u00b7 running")
    recorded_runs.finish(run)
    page.clock.fast_forward(POLL_MS)
    expect(state).to_have_text("train \u00b7 1 step \u00b7 finished")
    (run / "result.json").unlink()  # its steps are raised, and it goes on
    recorded_runs.write_step(run, 1)
    page.clock.fast_forward(POLL_FINISHED_MS)
    expect(state).to_have_text("train \u00b7 2 steps \u00b7 running")
    page.set_viewport_size({"width": 400, "height": 900})
    page.goto(report.write(run).as_uri())
    expect(page.get_by_role("region")).to_have_count(2)  # tables: alarms, evaluation
    assert_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_runs_lie_over_each_other_by_color_and_the_theme_stays(open_page: Open, site: str) -> None:
    page = open_page(site, color_scheme="light")
    curves = chart(page, "reward").locator(".curve")
    expect(curves).to_have_count(2)
    colors = curves.evaluate_all("curves => curves.map(curve => getComputedStyle(curve).stroke)")
    assert len(set(colors)) == 2
    expect(page.get_by_role("heading", name="seconds of a step, second")).to_be_visible()
    page.get_by_role("checkbox", name="second").uncheck()
    expect(curves).to_have_count(1)
    expect(page).to_have_url(re.compile(r"#overview\?runs=0$"))
    page.reload()
    expect(page.get_by_role("checkbox", name="first")).to_be_checked()
    expect(page.get_by_role("checkbox", name="second")).not_to_be_checked()
    expect(curves).to_have_count(1)
    page.locator("#axis-x").select_option("score/accuracy")
    expect(page.get_by_role("heading", name="reward against score/accuracy")).to_be_visible()
    expect(page.locator(".charts.wide circle")).to_have_count(12)
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light, button = page.evaluate(background), page.get_by_role("button", name=re.compile("^Theme"))
    button.click()
    button.click()
    expect(button).to_have_text("Theme: dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate(background) == dark
