"""Tokens of a trained turn, the order by surprise and disagreement, and evaluations, in a real browser."""

from __future__ import annotations

import re

from tests.view import recorded_runs
from tests.view.browser import Open, assert_accessible, chosen, expect, needs_browser, wait_for_choice

pytestmark = needs_browser
PLACE = "#conversations?step=3&position=1&rollout=2&future=0"


def test_tokens_are_shown_by_key_shaded_and_read_by_keyboard(open_page: Open, site: str) -> None:
    page = open_page(site, PLACE)
    wait_for_choice(page, (3, 1, 2, 0))
    tokens, value = page.locator(".token"), page.locator(".token-value")
    expect(tokens).to_have_count(0)
    page.keyboard.press("t")
    pieces = recorded_runs.tokens_of(1, 2)["pieces"]
    expect(tokens).to_have_count(len(pieces))
    shown = "".join(tokens.all_text_contents()).replace("\u21b5", "")
    assert shown == "".join(pieces)
    expect(page).to_have_url(re.compile("tokens=probability"))
    expect(page.get_by_role("button", name="Tokens of rollout 2")).to_have_attribute("aria-expanded", "true")
    tokens.nth(1).hover()
    expect(value).to_have_text(re.compile(r"The · token 2 · probability 0.25 · ratio 1.07\d\d · advantage \+0.500"))
    tokens.first.focus()
    for key in ("ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(tokens.nth(2)).to_be_focused()
    expect(value).to_contain_text("token 3 · probability 0.125")
    assert chosen(page) == (3, 1, 2, 0), "the arrows are those of the tokens"
    forced = pieces.index("\n</think>")
    tokens.nth(forced).hover()
    expect(value).to_contain_text("not sampled · weights of step 7 · not trained")
    strengths = [
        float(token.evaluate("token => parseFloat(token.style.getPropertyValue('--strength'))"))
        for token in (tokens.nth(0), tokens.nth(3), tokens.nth(forced))
    ]
    assert strengths[2] == 0 < strengths[0] < strengths[1]
    assert_accessible(page)
    page.get_by_label("Shade by").select_option("advantage")
    expect(tokens.first).to_have_class("token gain")
    expect(page).to_have_url(re.compile("tokens=advantage"))
    page.get_by_role("button", name="Tokens of rollout 0").click()
    wait_for_choice(page, (3, 1, 0, 0))
    expect(tokens.first).to_have_class("token loss")
    page.reload()
    expect(tokens.first).to_have_class("token loss")
    page.get_by_role("button", name="Tokens of rollout 0").click()
    expect(tokens).to_have_count(0)
    page.goto(f"{site}#conversations?step=3&position=1&rollout=1&future=0&tokens=ratio")
    wait_for_choice(page, (3, 1, 1, 0))
    expect(page.locator(".token-turn h4")).to_have_text(["Tokens of turn 1"])
    for _ in range(2):
        page.keyboard.press("Shift+ArrowRight")
    expect(page.locator(".token-turn h4")).to_have_text(["Tokens of turn 1", "Tokens of turn 2, in future 2"])
    page.goto(f"{site}#conversations?step=4&position=0&rollout=0&future=0&tokens=ratio")
    wait_for_choice(page, (4, 0, 0, 0))
    expect(page.get_by_role("button", name=re.compile("^Tokens"))).to_have_count(0)


def test_the_list_is_sorted_by_surprise_or_disagreement_and_has_evaluations_too(open_page: Open, site: str) -> None:
    page = open_page(site, "#conversations?sort=surprise&descending=1")
    values = page.locator(".rows tbody td:nth-child(6)")
    expect(values.first).to_have_text("1.200")
    expect(page.get_by_label("Sort by").locator("option:checked")).to_have_text(re.compile("^surprise"))
    page.get_by_label("Sort by").select_option("interactivity above accuracy")
    expect(page.locator(".scores tbody tr").first).to_contain_text(re.compile(r"accuracy\s*0\.000"))
    shown = [float(text.replace("\u2212", "-")) for text in values.all_inner_texts()]
    assert shown == sorted(shown, reverse=True) and shown[0] > 1
    page.goto(f"{site}#conversations?words=lyon&ending=user_done")
    evaluation = page.get_by_label("Conversations of")
    expect(evaluation.locator("option")).to_have_text(["training", "before", "after"])
    evaluation.select_option("after")
    expect(page.locator(".count")).to_have_text("1\u201312 of 12 futures")
    expect(page.locator(".facts")).to_contain_text("evaluation after \u00b7 step 12 \u00b7 group 0")
    expect(page.get_by_role("heading", name="First replies")).to_be_visible()
    expect(page.locator(".rescore table").first).to_be_attached()
    page.keyboard.press("j")
    wait_for_choice(page, (12, 0, 1, 0))
    page.get_by_role("textbox", name="Task").fill("booking-3")
    expect(page.locator(".count")).to_have_text("1\u20132 of 2 futures")
    page.reload()
    expect(page.locator(".group-head h2")).to_have_text("booking-3")
    page.keyboard.press("r")
    page.get_by_role("slider", name="weight of accuracy, slider").press("Home")
    expect(page.locator("#order")).to_be_visible()
    page.get_by_role("button", name="Reset", exact=True).click()
    expect(page.locator(".count")).to_have_text("1\u201312 of 12 futures")
    evaluation.select_option("training")
    expect(page.locator(".count")).to_have_text("1\u201350 of 288 futures")
