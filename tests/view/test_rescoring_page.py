"""Other weights: rewards recomputed in the page, in a real browser, with the real server."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import CONF, compose
from megatron_collab.launch.play_specs import reward_spec
from megatron_collab.launch.validate import check_reward
from megatron_collab.reward.multiturn import FORMULAS
from megatron_collab.settings import RewardConfig
from megatron_collab.types import Group, Missing, Reward, Score
from tests.view import rewarded_runs
from tests.view.browser import Open, assert_accessible, chosen, expect, needs_browser, wait_for_choice

pytestmark = needs_browser


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
    groups = [rewarded_runs.made_groups(reward, count=6, seed=1) for reward in rewards]
    futures = [future for of_reward in groups for group in of_reward for at in group.rollouts for future in at.futures]
    assert any(0 < len(future.scores) < len(rewarded_runs.WEIGHTS) for future in futures), "some do not apply"
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
    if isinstance(outcome.value, Missing):
        assert recomputed["value"] is None and recomputed["why"] == outcome.value.why
        return
    assert recomputed["parts"].keys() == outcome.parts.keys()
    expected = {"": outcome.value, "error": outcome.standard_error, **outcome.parts}
    values = {"": recomputed["value"], "error": recomputed["error"], **recomputed["parts"]}
    for name, value in expected.items():
        assert value == values[name] or math.isclose(value, values[name], rel_tol=0, abs_tol=1e-9), name


def facts(outcome: Reward, reward: RewardConfig) -> set[str]:
    """What a reward shows of the rules: missing or malformed, and the metrics whose clamp binds."""
    if isinstance(outcome.value, Missing):
        return {"missing"}
    bound = {name for name, limit in reward.clamp.items() if abs(outcome.parts.get(name, 0.0)) == limit}
    return {"reward" if outcome.parts else "malformed"} | bound


def test_sliders_change_rewards_ranks_and_the_order_of_the_list(open_page: Open, rewarded_site: str) -> None:
    reward = rewarded_runs.settings()
    groups = rewarded_runs.made_groups(reward, rewarded_runs.GROUPS)
    position = next(at for at, group in enumerate(groups) if is_rich(group))
    page = open_page(rewarded_site, f"#conversations?step=0&position={position}&rollout=0&future=0")
    panel, results = page.locator("#reward"), page.get_by_role("table", name="Rewards of the group").locator("tbody tr")
    expect(panel.locator("summary")).to_contain_text("mr, as in the run")
    wait_for_choice(page, (0, position, 0, 0))
    page.keyboard.press("r")
    expect(page.get_by_label("Mode", exact=True)).to_be_focused()
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
    assert_accessible(page)
    page.reload()
    expect(rows).to_have_text(texts)
    expect(panel).to_have_attribute("open", "")
    expect(field).to_have_value("0.4")
    page.get_by_label("Words").fill("reply")
    expect(page).to_have_url(re.compile(r"words=reply.*clamp\.accuracy=0\.4"))
    page.get_by_label("Mode", exact=True).select_option("paper")
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


def test_what_cannot_be_recomputed_is_noted(open_page: Open, rewarded_site: str, site: str) -> None:
    page = open_page(rewarded_site, "#conversations?run=1")
    page.locator("#reward summary").click()
    message = "reward.mode=my.rewards:Best is a function of the run's own, which the page cannot recompute."
    expect(page.locator("#reward .controls")).to_have_text(message)
    page.locator("#filter-run").select_option("0")
    expect(page.get_by_label("Mode", exact=True)).to_have_value("mr")
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
