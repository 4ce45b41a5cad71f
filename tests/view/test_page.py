"""The page in a real browser, with the real server: what a reader does, by mouse and by keyboard alone."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from megatron_collab.config import CONF, RewardConfig, compose
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.launch.validate import check_reward
from megatron_collab.observability import evaluations, transcripts
from megatron_collab.reward.multiturn import FORMULAS
from megatron_collab.types import Group, Missing, Reward, Score
from megatron_collab.view.command import address, listening
from megatron_collab.view.runs import RunView
from megatron_collab.view.server import application
from tests.view import recorded_runs, rewarded_runs

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make setup installs it")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: make setup installs it")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: tools/setup_browser.sh installs it"),
]

expect = playwright.expect
TOKEN = "a-token-for-tests"
SECONDS = 30  # for anything that the page does: the machine may be busy
POLL_MS = 2000  # of overview.js
GROUPS = 20  # of rewarded_site
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
Open = Callable[..., Any]


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[str]:
    """The address of a server for runs."""
    config = uvicorn.Config(application([*map(RunView, folders)], TOKEN), log_level="error", access_log=False)
    server = uvicorn.Server(config)
    with listening(0) as server_socket:
        thread = threading.Thread(target=server.run, args=([server_socket],))
        thread.start()
        try:
            yield address(server_socket)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    expect.set_options(timeout=1000 * SECONDS)
    with playwright.sync_playwright() as library:
        chromium = library.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two runs: the first has finished, the second goes on."""
    folder = tmp_path_factory.mktemp("runs")
    for name, steps, seed in (("first", 12, 0), ("second", 3, 1)):
        recorded_runs.write_run(folder / name, steps, seed)
    recorded_runs.finish(folder / "first")
    with served([folder / "first", folder / "second"]) as url:
        yield url


@pytest.fixture(scope="module")
def rewarded_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run whose rewards follow from its settings, and one with a reward function of its own."""
    folder, reward = tmp_path_factory.mktemp("rewarded"), rewarded_runs.settings()
    groups = rewarded_runs.made_groups(reward, GROUPS)
    rewarded_runs.write_run(folder / "built_in", reward, groups)
    rewarded_runs.write_run(folder / "function", replace(reward, mode="my.rewards:Best"), groups)
    with served([folder / "built_in", folder / "function"]) as url:
        yield url


@pytest.fixture(scope="module")
def hostile_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    recorded_runs.write_hostile_run(folder / "hostile")
    with served([folder / "hostile"]) as url:
        yield url


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a page; in the end none has logged an error or opened a dialog."""
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
        context.close()
    assert not faults


def is_fault(message: Any) -> bool:
    """Whether a line of the browser's console is bad. That the server refused a choice is on the page too."""
    return message.type in ("error", "warning") and not re.search("status of 40[04]", message.text)


def chart(page: Any, title: str) -> Any:
    heading = page.get_by_role("heading", name=title, exact=True, level=3)
    return page.locator("#overview .sections figure").filter(has=heading).first


def chosen(page: Any) -> tuple[int, ...]:
    """Step, position, rollout and future that the address names."""
    values = dict(re.findall(r"(\w+)=(\w+)", page.url.partition("#")[2]))
    return tuple(int(values[name]) for name in ("step", "position", "rollout", "future"))


def wait_for_choice(page: Any, choice: tuple[int, ...]) -> None:
    """Wait until the page shows a future and the address names it."""
    step, position, rollout, future = choice
    expect(page.locator(".facts")).to_contain_text(f"step {step} \u00b7 group {position} ")
    expect(page.locator(".turn.chosen a")).to_have_text(f"Rollout {rollout}")
    expect(page.get_by_role("tab", selected=True)).to_contain_text(f"Future {future}")
    assert chosen(page) == choice


def test_the_overview_shows_curves_values_and_tables(open_page: Open, site: str) -> None:
    page = open_page(site)
    headings = page.locator("#overview .sections h2")
    sections = ["Evaluations", "Reward", "Scores", "Time", "Cost", "Endings", "Staleness", "Health", "Sentinels"]
    expect(headings).to_have_text([*sections, "Update and other metrics"])
    reward = chart(page, "reward")
    assert len(re.findall("[ML]", reward.locator(".curve.color-0").get_attribute("d"))) == 12
    assert reward.locator(".band.color-0").get_attribute("d").endswith("Z")
    expect(reward.locator(".readout")).to_contain_text(re.compile(r"first 0\.\d+ \u00b1 0\.0\d+"))
    assert chart(page, "accuracy").locator("circle").count() == 3 * 2  # evaluations of both runs, with intervals
    expect(chart(page, "accuracy").locator(".readout")).to_contain_text("first 0.6 [0.5, 0.7] (2 missing)")
    reward.get_by_text("Table").click()
    expect(reward.locator("tbody tr")).to_have_count(12)
    page.get_by_label("Smoothing").fill("0")
    expect(reward.locator(".raw")).to_have_count(0)
    assert "smooth=0" in page.url
    events = page.get_by_role("region", name="Events").locator("tbody tr")
    expect(events).to_have_count(4)
    expect(events.nth(2)).to_contain_text("flattery")


def test_values_at_a_step_by_keyboard_and_then_its_conversations(open_page: Open, site: str) -> None:
    page = open_page(site, "#overview?runs=0")
    plot = page.get_by_role("slider", name="reward", exact=True)
    plot.focus()
    expect(plot).to_have_attribute("aria-valuenow", "11")
    for _ in range(6):
        plot.press("ArrowLeft")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"step 5: first 0\.\d+ \u00b1"))
    expect(page.locator("#cursor-text")).to_contain_text("step 5 \u00b7 optim.lr: 1e-06 \u2192 5e-07")
    expect(page.get_by_role("slider", name="kl", exact=True)).to_have_attribute("aria-valuetext", "step 5: first 0.005")
    plot.press("Enter")
    expect(page.locator(".count")).to_have_text("1\u201324 of 24 futures")
    wait_for_choice(page, (5, 0, 0, 0))


def test_new_steps_appear_while_a_run_grows(open_page: Open, tmp_path: Path) -> None:
    run = tmp_path / "growing"
    recorded_runs.write_run(run, 2)
    with served([run]) as url:
        page = open_page(url)
        page.clock.install()
        page.reload()
        state = page.locator(".legend small")
        expect(state).to_have_text("train \u00b7 2 steps \u00b7 running")
        reward = chart(page, "reward")
        reward.locator(".plot").focus()
        recorded_runs.write_step(run, 2, **{"score/brevity": 0.5})  # a further chart, so that all are put anew
        page.clock.fast_forward(POLL_MS)
        expect(state).to_have_text("train \u00b7 3 steps \u00b7 running")
        assert len(re.findall("[ML]", reward.locator(".curve").get_attribute("d"))) == 3
        expect(reward.locator(".plot")).to_be_focused()
        rows = (run / "metrics.jsonl").read_text().splitlines()
        shorter = run / "shorter.jsonl"
        shorter.write_text(rows[0] + "\n")
        shorter.replace(run / "metrics.jsonl")  # as a resume from an earlier checkpoint does
        page.clock.fast_forward(POLL_MS)
        expect(state).to_have_text("train \u00b7 1 step \u00b7 running")
        recorded_runs.finish(run)
        page.clock.fast_forward(POLL_MS)
        expect(state).to_have_text("train \u00b7 1 step \u00b7 finished")


def test_runs_lie_over_each_other_by_color(open_page: Open, site: str) -> None:
    page = open_page(site)
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


def test_a_permalink_restores_filters_sort_and_choice(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations")
    field = page.locator(".filters").get_by_label
    count = page.locator(".count")
    expect(count).to_have_text("1\u201350 of 288 futures")
    page.get_by_role("combobox", name="Ending").select_option("turn_limit")
    expect(count).to_have_text("1\u201350 of 96 futures")
    field("From step").fill("6")
    field("Words").fill("lyon birthday")
    expect(count).to_have_text("1\u201348 of 48 futures")
    field("Metric").select_option("token_amount")
    field("At least").fill("340")
    expect(count).to_have_text("1\u201312 of 12 futures")
    field("Sort by").select_option("reward")
    field("Descending").check()
    rows = page.locator(".rows tbody tr")
    rewards = rows.locator("td:nth-child(5)")
    expect(page).to_have_url(re.compile("descending=1"))
    expect(rewards.first).to_have_text(max(rewards.all_inner_texts()))
    assert rewards.all_inner_texts() == sorted(rewards.all_inner_texts(), reverse=True)
    rows.nth(3).locator("a").click()
    expect(rows.nth(3)).to_have_class("chosen")
    before = chosen(page)
    texts = rows.all_inner_texts()
    page.reload()
    expect(count).to_have_text("1\u201312 of 12 futures")
    wait_for_choice(page, before)
    assert rows.all_inner_texts() == texts
    values = [field(label).input_value() for label in ("Words", "From step", "Metric", "At least", "Sort by")]
    assert values == ["lyon birthday", "6", "token_amount", "340", "reward"]
    page.get_by_role("button", name="Reset").click()
    expect(count).to_have_text("1\u201350 of 288 futures")
    field("Words").fill("nowhere")
    expect(page.locator(".rows")).to_have_text("No conversation matches the filter.")
    field("Words").fill("!!")
    expect(page.get_by_role("alert")).to_have_text("words=!!: contains no word; give letters or digits")
    field("Words").fill("")
    expect(page.locator(".rows tbody tr")).to_have_count(50)


def test_the_keyboard_alone_suffices(open_page: Open, site: str) -> None:
    page = open_page(site)
    press = page.keyboard.press
    expect(chart(page, "reward")).to_be_visible()
    press("g")
    press("c")
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
    press("g")
    press("o")
    expect(chart(page, "reward")).to_be_visible()


def test_j_and_k_cross_the_pages_of_the_list(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations?step=2&position=0&rollout=0&future=1")  # the 50th row
    wait_for_choice(page, (2, 0, 0, 1))
    page.keyboard.press("j")
    wait_for_choice(page, (2, 0, 0, 2))
    expect(page.locator(".count")).to_have_text("51\u2013100 of 288 futures")
    page.keyboard.press("k")
    wait_for_choice(page, (2, 0, 0, 1))
    expect(page.locator(".count")).to_have_text("1\u201350 of 288 futures")


def test_reasons_thoughts_and_goals_can_be_opened(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations?step=3&position=1&rollout=2&future=1")
    wait_for_choice(page, (3, 1, 2, 1))
    expect(page.locator(".scores tbody tr").first).to_contain_text("missing: judge.model: no answer within 30 s")
    expect(page.locator(".turn.chosen .parts")).to_contain_text(re.compile(r"reward\s*0\.\d+ \u00b1 0\.050"))
    advantages = [text.replace("\u2212", "-") for text in page.locator(".turn-head span").all_inner_texts()]
    assert len(advantages) == 4 and abs(sum(map(float, advantages))) < 0.003
    for place, label, text in (
        ("#future", "Reason", "The assistant asked 2 questions"),
        ("#future", "Raw answer", '"score": 0.6'),
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


def test_it_shows_where_futures_part(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations?step=3&position=1&rollout=2&future=1")
    parting = page.locator(".parting")
    expect(parting).to_have_text("Here the 3 futures of this turn part: message 4 differs.")
    page.get_by_label("Compare with").select_option("2")
    expect(parting).to_have_text("Here the futures 1 and 2 part: message 4 differs.")
    columns = page.locator(".beside .column")
    expect(columns).to_have_count(2)
    expect(columns.first).to_contain_text("Half past, please.")
    expect(columns.last).to_contain_text("In Lyon, near the station.")
    assert "other=2" in page.url
    page.get_by_role("tab", name="Future 2").click()
    expect(columns).to_have_count(0)


def test_two_evaluations_are_compared(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations")
    expect(page.locator(".turn.chosen")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("v")
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


def test_sides_without_a_common_task_and_sides_that_are_not_there(open_page: Open, site: str) -> None:
    page = open_page(site, "#compare?left=0:before&right=0:training/3")
    expect(page.locator(".differences")).to_have_text("These sides have no scored task in common. Choose others.")
    page.goto(f"{site}#compare?left=0:before&right=0:nowhere")
    expect(page.get_by_role("alert")).to_have_text("first has no conversations of nowhere")
    page.get_by_label("Right").select_option("0:after")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.locator(".pair h2")).to_have_text("booking-0")


def test_a_blind_test_by_keyboard(open_page: Open, tmp_path: Path) -> None:
    """Each reply says its side, so that the rater can always prefer the one of the evaluation after."""
    run = tmp_path / "run"
    recorded_runs.write_run(run, 1)
    sides = {"before": "a poor reply", "after": "a good reply"}
    for name, text in sides.items():
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}]
        rows = [[{"task": f"t{at}", "messages": messages, "scores": {"judge": 0.125}}] for at in range(12)]
        transcripts.write(evaluations.file_of(run, name), rows)
    with served([run]) as url:
        page = open_page(url, "#compare?left=0:before&right=0:after")
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


def test_who_has_seen_the_result_rates_nothing_more(open_page: Open, tmp_path: Path) -> None:
    run = tmp_path / "run"
    recorded_runs.write_run(run, 1)
    with served([run]) as url:
        page = open_page(url, "#blind?left=0:before&right=0:after")
        page.get_by_label("Your name").fill("Ada")
        page.get_by_role("heading", name="Which conversation is better?").click()
        progress, results = page.locator("#blind [role=status]"), page.locator("#blind .outcome li")
        for number in range(2):
            expect(progress).to_have_text(f"{number} of 6 tasks rated")
            expect(page.locator(".verdict-skip")).to_be_enabled()
            expect(results).to_have_count(0)  # while rating goes on
            page.keyboard.press("ArrowLeft")
        expect(progress).to_have_text("2 of 6 tasks rated")
        expect(page.locator("#blind .outcome")).to_contain_text("it ends the test")
        page.get_by_role("button", name="Show the result and end").click()
        expect(results.first).to_contain_text("of 2 tasks")
        for sides in ("left=0:before&right=0:after", "left=0:after&right=0:before"):
            page.goto(f"{url}#compare?{sides}")
            expect(page.locator(".pair h2")).to_have_text("booking-0")
            page.goto(f"{url}#blind?{sides}")
            expect(page.locator("#blind .empty")).to_have_text("You have ended the test of these sides.")
            page.keyboard.press("ArrowLeft")
            expect(page.locator(".verdict-skip")).to_be_disabled()
        page.goto(f"{url}#blind?left=0:before&right=0:step_6")  # has no conversations
        expect(page.locator("#blind").get_by_role("alert")).to_be_visible()
    assert len((run / "ratings.jsonl").read_text().splitlines()) == 2


def test_a_hostile_run_executes_nothing_and_breaks_no_layout(open_page: Open, hostile_site: str) -> None:
    page = open_page(hostile_site)
    expect(page.get_by_role("region", name="Events").locator("tbody tr")).to_have_count(1)
    unfold(page, "#overview")
    assert_harmless(page)
    for rollout in range(7):
        page.goto(f"{hostile_site}#conversations?step=0&position=0&rollout={rollout}&future=0")
        expect(page.locator(".turn.chosen a")).to_have_text(f"Rollout {rollout}")
        unfold(page, "#conversations")
        expect(page.locator("#reward .controls tbody th").first).to_have_text(recorded_runs.MARKUP[:100] + "\u2026")
        assert_harmless(page)
    page.set_viewport_size({"width": 700, "height": 900})
    assert_harmless(page)
    page.goto(f"{hostile_site}#compare?left=0:before&right=0:training/0&r=1")
    expect(page.locator(".pair .column").last.locator("option:checked")).to_contain_text("2 of 7")
    unfold(page, "#compare")
    assert_harmless(page)


def test_what_would_hide_is_shown_and_a_long_text_is_folded(open_page: Open, hostile_site: str) -> None:
    page = open_page(hostile_site, "#conversations?step=0&position=0&rollout=1&future=0")
    last = page.locator("#future .message").last.locator(".text")
    escapes = ["\u241b", "\u27e8U+202E\u27e9", "\u27e8U+2066\u27e9", "\u27e8U+200B\u27e9", "\u27e8U+00AD\u27e9"]
    expect(last.locator(".escape").first).to_have_text(escapes[0])
    shown = last.inner_text()
    assert all(text in shown for text in [*escapes, "\u2400\u2400\u2407", "\u27e8U+D800\u27e9", "\u27e8U+DFFF\u27e9"])
    assert shown.replace("\n", "").isprintable()
    page.goto(f"{hostile_site}#conversations?step=0&position=0&rollout=3&future=0")
    more = page.locator("#future .message").last.get_by_role("button")
    expect(more).to_have_text("Show more: 100,000 of 996,000 characters")
    more.click()
    expect(more).to_have_text("Show more: 100,000 of 896,000 characters")
    assert_harmless(page)


def unfold(page: Any, place: str, most: int = 1000) -> None:
    """Open what is folded at a place, which adds it to the page."""
    page.locator(f"{place} summary").evaluate_all(f"all => all.slice(0, {most}).forEach(summary => summary.click())")


def assert_harmless(page: Any) -> None:
    """Nothing that the run contains has been executed, and the page is not wider than the window."""
    assert page.evaluate("window.attacked") is None
    assert page.locator("main :is(img, script, iframe, object, embed, link, style, [onload], [onerror])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth === innerWidth")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["overview", "conversations", "compare", "blind"])
def test_axe_reports_nothing_serious(open_page: Open, site: str, view: str, theme: str) -> None:
    page = open_page(site, f"#{view}", color_scheme=theme)
    contents = {"overview": ".chart", "conversations": ".turn.chosen", "compare": ".pair .scores", "blind": ".column"}
    expect(page.locator(f"#{view} {contents[view]}").first).to_be_visible()
    unfold(page, f"#{view}", most=20 if view == "conversations" else 2)
    if view == "conversations":
        page.get_by_role("button", name="Show as a file").click()
        page.get_by_role("slider", name="weight of accuracy, slider").press("Home")
        expect(page.locator("#order")).to_be_visible()
    violations = axe.Axe().run(page).response["violations"]
    serious = [rule for rule in violations if rule["impact"] in ("serious", "critical")]
    assert not [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in serious]


def test_the_theme_can_be_chosen_and_stays(open_page: Open, site: str) -> None:
    page = open_page(site, color_scheme="light")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(background)
    button = page.get_by_role("button", name=re.compile("^Theme"))
    button.click()
    button.click()
    expect(button).to_have_text("Theme: dark")
    dark = page.evaluate(background)
    assert dark != light
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate(background) == dark


THOUGHTS = [
    ("<think>one</think>\n\nreply", ["one"]),
    ("opened in the prompt</think>reply", ["opened in the prompt"]),
    ("reply<think>cut", ["cut"]),
    ("<think>one</think>a<think>two</think>b", ["one", "two"]),
    ("<think>\n</think>reply", []),
    ("reply", []),
]


def test_pure_modules(open_page: Open, site: str) -> None:
    page = open_page(site)

    def called(module: str, function: str, *arguments: Any) -> Any:
        script = "async ([path, name, values]) => (await import(path))[name](...values)"
        return page.evaluate(script, [f"/static/{module}.js", function, [*arguments]])

    for raw, thoughts in THOUGHTS:
        assert called("text", "thoughtsOf", raw) == thoughts
    assert called("text", "beginning", "a\U0001f600b", 2) == "a\u2026"  # a pair of code units is not cut
    assert called("format", "number", -0.00000125) == "\u22121.25e\u22126"
    assert called("format", "decimal", None) == "\u2013"
    assert called("pairs", "titleOf", "test/step_6") == "test/step 6"
    for of_runs, *sides in (
        ([["before", "after", "training/1"]], "0:before", "0:after"),
        ([["training/1", "training/2"]], "0:training/1", "0:training/2"),
        ([[], ["before", "after"], ["model"]], "1:after", "2:model"),
    ):
        assert called("pairs", "defaults", of_runs) == dict(zip(("left", "right"), sides, strict=True))
    assert called("pairs", "defaults", [[], []]) == {}
    tasks = [{"left": {"a": 0}, "right": {}}, *({"left": {"a": 1}, "right": {"a": value}} for value in (2, 0, 3))]
    for order, numbers in (("", [0, 1, 2, 3]), ("gain", [3, 1, 2, 0]), ("loss", [2, 1, 3, 0])):
        assert called("pairs", "inOrder", tasks, "a", order) == [tasks[number] for number in numbers]
    points = [{"x": 0, "y": 1.0}, {"x": 1, "y": None}, {"x": 2, "y": 4.0}]
    smooth = [{"x": 0, "y": 1.0}, {"x": 1, "y": None}, {"x": 2, "y": 3.0}]  # (0.5 * 0.5 * 1 + 0.5 * 4) / 0.75
    assert called("series", "smoothed", points, 0.5) == smooth
    user, reply, other = ({"role": role, "content": "text"} for role in ("user", "assistant", "assistant"))
    other["content"] = "another text"
    same = {"role": "user", "content": "another text"}
    assert called("group", "promptLength", [{"messages": [user, reply]}, {"messages": [user, other]}]) == 1
    assert called("group", "promptLength", [{"messages": [user, reply, same]}, {"messages": [user, reply, user]}]) == 1
    turns = {"messages": [user, reply, user, reply], "turns": ["r", "r"]}
    assert called("group", "promptLength", [turns]) == 1
    assert called("group", "promptLength", [turns | {"turns": ["r"]}]) == 3


# Settings of the reward that the page changes: clamps that bind, metrics without a weight, and with another sign.
CHANGES: list[dict[str, str]] = [
    {},
    {"weight.token_amount": "-0.0011", "weight.bleu": "0.75"},
    {"weight.accuracy": "0", "weight.interactivity": "-2"},
    {"clamp.accuracy": "0.4", "clamp.token_amount": "0.9", "clamp.interactivity": "none"},
    {"weight.accuracy": "0", "weight.interactivity": "0", "weight.token_amount": "0"},
]
RECOMPUTE = """async (text) => {
  const { groupRewards, settingsOf } = await import("/static/reward.js");
  const { rolloutsOf } = await import("/static/group.js");
  const [rewards, groups, changes] = JSON.parse(text);
  const plain = ({ value, why, error, parts }) => ({ value, why, error, parts: Object.fromEntries(parts) });
  const recomputed = (rows, settings) => groupRewards(rolloutsOf(rows), settings).map(plain);
  return JSON.stringify(rewards.map((reward, at) => groups[at].map((rows) =>
    changes.map((choices) => recomputed(rows, settingsOf(reward, choices))))));
}"""
FILE = """async ([reward, choices]) => {
  const { fileOf, settingsOf } = await import("/static/reward.js");
  return fileOf(settingsOf(reward, choices), reward);
}"""


def test_recomputed_rewards_are_those_of_the_trainer(open_page: Open, site: str) -> None:
    """Of groups with missing scores, metrics that do not apply and malformed turns, in every mode; clamps bind."""
    rewards = [
        rewarded_runs.settings(mode, malformed, worst, {"interactivity": 0.2} if clamps(mode) else {})
        for mode in FORMULAS
        for malformed, worst in ((-1.0, False), (0.25, True), (None, False))
    ]
    groups = [rewarded_runs.made_groups(reward) for reward in rewards]
    rows = [[rewarded_runs.rows(group) for group in of_reward] for of_reward in groups]
    page = open_page(site)
    answers = json.loads(page.evaluate(RECOMPUTE, json.dumps([[*map(asdict, rewards)], rows, CHANGES])))
    met: dict[str, set[str]] = {mode: set() for mode in FORMULAS}
    for reward, of_reward, of_answers in zip(rewards, groups, answers, strict=True):
        for group, of_group in zip(of_reward, of_answers, strict=True):
            for choices, recomputed in zip(CHANGES, of_group, strict=True):
                after = changed(reward, choices)
                outcomes = rewarded_runs.rewards_of(group, after)
                assert choices or outcomes == [rollout.reward for rollout in group.rollouts], "as recorded"
                for outcome, by_page in zip(outcomes, recomputed, strict=True):
                    assert_same(by_page, outcome)
                    met[reward.mode] |= facts(outcome, after)
    kinds = {"missing", "malformed", "reward"}
    bound = {"accuracy", "token_amount", "interactivity"}
    assert met == {mode: kinds | bound if clamps(mode) else kinds for mode in FORMULAS}


def clamps(mode: str) -> bool:
    """Whether the settings take reward.clamp with the mode."""
    return mode in ("mr", "single_turn")


def changed(reward: RewardConfig, choices: dict[str, str]) -> RewardConfig:
    """The reward with the choices of an address. Modes that take no clamp get none."""
    values: dict[str, dict[str, Any]] = {"weight": dict(reward.weights), "clamp": dict(reward.clamp)}
    for kind, name, text in ((*key.split("."), text) for key, text in choices.items()):
        values[kind].pop(name, None)
        values[kind] |= {} if text == "none" else {name: float(text)}
    return replace(reward, weights=values["weight"], clamp=values["clamp"] if clamps(reward.mode) else {})


def assert_same(recomputed: dict[str, Any], outcome: Reward) -> None:
    near = pytest.approx
    if isinstance(outcome.value, Missing):
        assert recomputed["value"] is None and recomputed["why"] == outcome.value.why
    else:
        assert recomputed["value"] == near(outcome.value, abs=1e-9)
        assert recomputed["error"] == near(outcome.standard_error, abs=1e-9)
        assert recomputed["parts"] == near(outcome.parts, abs=1e-9)


def facts(outcome: Reward, reward: RewardConfig) -> set[str]:
    """What a reward shows of the rules: missing or malformed, and the metrics whose clamp binds."""
    if isinstance(outcome.value, Missing):
        return {"missing"}
    bound = {name for name, limit in reward.clamp.items() if abs(outcome.parts.get(name, 0.0)) == limit}
    return {"reward" if outcome.parts else "malformed"} | bound


def test_sliders_change_rewards_ranks_and_the_order_of_the_list(open_page: Open, rewarded_site: str) -> None:
    reward = rewarded_runs.settings()
    groups = rewarded_runs.made_groups(reward, GROUPS)
    position = next(at for at, group in enumerate(groups) if is_rich(group))
    page = open_page(rewarded_site, f"#conversations?step=0&position={position}&rollout=0&future=0")
    panel, results = page.locator("#reward"), page.get_by_role("table", name="Rewards of the group").locator("tbody tr")
    expect(panel.locator("summary")).to_contain_text("mr, as in the run")
    wait_for_choice(page, (0, position, 0, 0))
    page.keyboard.press("r")
    expect(page.get_by_label("Mode")).to_be_focused()
    assert [cell(row, 1) for row in results.all()] == [cell(row, 0) for row in results.all()]
    expect(panel.locator(".note")).to_have_count(0)
    slider = page.get_by_role("slider", name="weight of token_amount, slider")
    turn = page.locator(".turn.chosen").element_handle()
    slider.focus()
    slider.press("End")
    expect(slider).to_have_attribute("aria-valuetext", "0.001")
    expect(page).to_have_url(re.compile(r"weight\.token_amount=0\.001(&|$)"))
    expect(slider).to_be_focused()
    link = page.locator(".turn.chosen .turn-head a")
    expect(link).to_have_attribute("href", re.compile(r"weight\.token_amount=0\.001"))
    assert turn.evaluate("turn => turn.isConnected"), "what is unfolded stays so"
    field = page.get_by_label("clamp of accuracy", exact=True)
    field.fill("0.4")
    expect(page).to_have_url(re.compile(r"clamp\.accuracy=0\.4(&|$)"))
    after = changed(reward, {"weight.token_amount": "0.001", "clamp.accuracy": "0.4"})
    values = [as_number(outcome.value) for outcome in rewarded_runs.rewards_of(groups[position], after)]
    assert [cell(row, 1) for row in results.all()] == pytest.approx(values, abs=6e-4)
    ranks = [1 + sum(other > value for other in values) for value in values]
    assert [row.locator("td").last.inner_text() for row in results.all()] == [*map(str, ranks)]
    advantages = [cell(row, 3) for row in results.all()]
    assert advantages == pytest.approx([value - sum(values) / len(values) for value in values], abs=6e-4)
    expect(page.locator(".turn.chosen .rescored")).to_contain_text(f"rank {ranks[0]} of {len(ranks)}")
    page.locator("#order").click()
    expect(page.locator("#order")).to_be_focused()
    column = page.locator(".rows tbody td:last-child")
    expect(page.locator("th[aria-sort=descending]")).to_be_visible()
    numbers = [as_float(text) for text in column.all_inner_texts() if text != "\u2013"]
    assert len(numbers) > 20 and numbers == sorted(numbers, reverse=True)
    expect(column.last).to_have_text("\u2013")
    rows = page.locator(".rows tbody tr")
    at = next(at for at, value in enumerate(numbers) if value != numbers[at + 1])  # the next one is of another group
    rows.nth(at).locator("a").click()
    expect(rows.nth(at)).to_have_class("chosen")
    page.keyboard.press("j")
    expect(rows.nth(at + 1)).to_have_class("chosen")
    texts = rows.all_text_contents()
    page.reload()
    expect(rows).to_have_text(texts)
    expect(panel).to_have_attribute("open", "")
    expect(field).to_have_value("0.4")
    page.get_by_label("Words").fill("reply")
    expect(page).to_have_url(re.compile(r"words=reply.*clamp\.accuracy=0\.4"))
    page.get_by_label("Mode").select_option("paper")
    expect(field).to_be_disabled()
    expect(page).to_have_url(re.compile("position=.*mode=paper|mode=paper.*position="))
    _, position, *_ = chosen(page)
    expect(page.locator(".facts")).to_contain_text(f"group {position} ")
    outcomes = rewarded_runs.rewards_of(groups[position], replace(after, mode="paper", clamp={}))
    values = [as_number(outcome.value) for outcome in outcomes]
    assert [cell(row, 1) for row in results.all()] == pytest.approx(values, abs=6e-4)
    page.get_by_role("button", name="Reset to the run").click()
    expect(panel.locator("summary")).to_contain_text("mr, as in the run")
    expect(field).to_be_enabled()
    expect(field).to_have_value("")
    expect(page.get_by_role("alert")).to_have_text("")
    page.goto(f"{rewarded_site}#conversations?clamp.accuracy=0&weight.x=1&mode=mean")
    for fault in ("clamp.accuracy=0: give a number above 0", "weight.x=1: the run has", "mode=mean: no such mode"):
        expect(page.get_by_role("alert")).to_contain_text(fault)


def test_a_reward_function_of_the_run_is_not_recomputed(open_page: Open, rewarded_site: str) -> None:
    page = open_page(rewarded_site, "#conversations?run=1")
    page.locator("#reward summary").click()
    message = "reward.mode=my.rewards:Best is a function of the run's own, which the page cannot recompute."
    expect(page.locator("#reward .controls")).to_have_text(message)
    page.locator("#filter-run").select_option("0")
    expect(page.get_by_label("Mode")).to_have_value("mr")


def test_rewards_that_do_not_follow_from_the_settings_are_noted(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations")
    page.locator("#reward summary").click()
    expect(page.locator("#reward .note")).to_contain_text("do not follow from the run's last settings")


def test_the_file_of_the_page_sets_its_reward(
    open_page: Open, rewarded_site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(rewarded_site, "#conversations?weight.token_amount=-2e-7&weight.bleu=0.25&clamp.bleu=0.5")
    toggle = page.get_by_role("button", name="Show as a file")
    toggle.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    text = Path(download.value.path()).read_text()
    assert text == page.get_by_label("conf/reward/NAME.yaml").input_value()
    monkeypatch.setattr("megatron_collab.config.load.CONF", shutil.copytree(CONF, tmp_path / "conf"))
    weights = rewarded_runs.WEIGHTS | {"token_amount": -2e-7, "bleu": 0.25}
    assert composed(text, tmp_path) == replace(rewarded_runs.settings(), weights=weights, clamp={"bleu": 0.5})
    training = compose([*BASE, "reward=page", "reward.judge.model=openai/judge"])
    check_reward(training, reward_spec(training.reward))
    assert composed(text, tmp_path, "bleu: 3.0") == composed(text, tmp_path), "it replaces what an experiment sets"
    odd = {
        name: float(at) - 0.5 for at, name in enumerate(["on", "1_0", "a: b", "\u00fc\U0001f600", 'q"\\', "a\u2028b"])
    }
    options = {"metric": "${run.dir}", "texts": ["\\${a}", "#", True, None, 1, 2.5e-9], "of": {"null": "yes"}}
    reward = replace(
        rewarded_runs.settings("verl", None, clamp={"clamp": 0.5}),
        weights={"clamp": 1e-12, **odd},
        metrics={"on": options},
    )
    for mode, clamp in (("mr", {"clamp": 1e7}), ("verl", {})):
        choices = {"mode": mode, "clamp.clamp": "none"}
        written = page.evaluate(FILE, [asdict(reward), choices])
        assert composed(written, tmp_path) == replace(reward, mode=mode, clamp=clamp)


BASE = ("experiment=base", "run.dir=unused", "model.path=unused", "data.train=unused")


def composed(text: str, folder: Path, weights: str = "") -> RewardConfig:
    """The reward of a training with `text` in conf/reward, over an experiment with `weights`."""
    (folder / "conf" / "reward" / "page.yaml").write_text(text)
    experiment = f"# @package _global_\nreward: {{weights: {{{weights}}}}}\n"
    (folder / "conf" / "experiment" / "base.yaml").write_text(experiment)
    reward = compose([*BASE, "reward=page"]).reward
    return RewardConfig(**{name: value for name, value in vars(reward).items() if name in asdict(RewardConfig())})


def is_rich(group: Group) -> bool:
    """Whether all rollouts of the group have a reward, several of them from accuracy and tokens."""
    outcomes = [rollout.reward for rollout in group.rollouts]
    moved = [outcome for outcome in outcomes if outcome.parts.keys() >= {"accuracy", "token_amount"}]
    return len(moved) > 2 and not any(isinstance(outcome.value, Missing) for outcome in outcomes)


def as_number(score: Score) -> float:
    return math.inf if isinstance(score, Missing) else score


def as_float(text: str) -> float:
    return float(text.replace("\u2212", "-").replace(",", ""))


def cell(row: Any, column: int) -> float:
    """The number in a cell of a row, without its standard error; infinity if it is missing."""
    text = row.locator("td").nth(column).inner_text().split(" ")[0]
    return math.inf if text == "missing" else as_float(text)
