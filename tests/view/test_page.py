"""The page as a whole: hostile texts and its pure modules, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.view import recorded_runs
from tests.view.browser import Open, assert_harmless, expect, needs_browser, unfold

pytestmark = needs_browser


def test_a_hostile_run_executes_nothing_and_breaks_no_layout(open_page: Open, hostile_site: str) -> None:
    page = open_page(hostile_site)
    expect(page.get_by_role("region", name="Events").locator("tbody tr")).to_have_count(1)
    unfold(page, "#overview")
    assert_harmless(page)
    for rollout in range(7):
        page.goto(f"{hostile_site}#conversations?step=0&position=0&rollout={rollout}&future=0&tokens=ratio")
        expect(page.locator(".turn.chosen a")).to_have_text(f"Rollout {rollout}")
        expect(page.locator(".tokens .token").first).to_be_attached()
        unfold(page, "#conversations")
        expect(page.locator("#reward .controls tbody th").first).to_have_text(recorded_runs.MARKUP[:100] + "\u2026")
        assert_harmless(page)
    page.set_viewport_size({"width": 400, "height": 900})
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


TRENDS = """async (text) => {
  const { smoothed } = await import("/static/series.js");
  const trend = (ys) => smoothed(ys.map((y, x) => ({ x, y })), 0.6, true).map(({ y, low, high }) => [y, low, high]);
  return JSON.stringify(JSON.parse(text).map(trend));
}"""
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
    smooth = [{"x": 0, "y": 2.0}, {"x": 1, "y": None}, {"x": 2, "y": 3.0}]  # (1 + 0.5 * 4) / 1.5, (0.5 * 1 + 4) / 1.5
    assert called("series", "smoothed", points, 0.5, True) == smooth
    curves = np.random.default_rng(0).normal(np.linspace(0, 5, 40), 0.3, (200, 40))
    weights = 0.6 ** abs(np.subtract.outer(np.arange(40), np.arange(40)))
    weights /= weights.sum(1, keepdims=True)
    noise = np.sqrt((np.diff(curves) ** 2).mean(1) / 2)
    half = 1.96 * np.outer(noise, np.sqrt((weights**2).sum(1)))
    trends = np.array(json.loads(page.evaluate(TRENDS, json.dumps(curves.tolist()))))
    middles = curves @ weights.T
    np.testing.assert_allclose(trends, np.stack([middles, middles - half, middles + half], 2), rtol=0, atol=1e-12)
    covered = abs(trends[:, 10:30, 0] - np.linspace(0, 5, 40)[10:30]) < half[:, 10:30]
    assert 0.93 < covered.mean() < 0.97, "of the true line, in the middle of the curves"
    assert "high" not in called("series", "smoothed", [{"x": x, "y": x} for x in range(10)], 0.5, False)[0]
    assert called("series", "valueText", {"y": 2}, {"total": 8}) == "2 (25 %)"
    rows = [
        {"step": 3, "servers/lost": 2, "servers/back": 1},
        {"step": 4, "servers/lost": "2", "servers/judge_lost": 1},
    ]
    lost = [(event["step"], event["text"]) for event in called("series", "lostServers", rows)]
    assert lost == [(3, "servers/lost: 2"), (4, "servers/judge_lost: 1")]
    user, reply, other = ({"role": role, "content": "text"} for role in ("user", "assistant", "assistant"))
    other["content"] = "another text"
    same = {"role": "user", "content": "another text"}
    assert called("group", "promptLength", [{"messages": [user, reply]}, {"messages": [user, other]}]) == 1
    assert called("group", "promptLength", [{"messages": [user, reply, same]}, {"messages": [user, reply, user]}]) == 1
    turns = {"messages": [user, reply, user, reply], "turns": ["r", "r"]}
    assert called("group", "promptLength", [turns]) == 1
    assert called("group", "promptLength", [turns | {"turns": ["r"]}]) == 3
