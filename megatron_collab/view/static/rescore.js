// The panel that moves weights, clamps and the mode of the reward, and shows what becomes of a group's rewards.

import { element, table } from "./dom.js";
import { decimal, number, signed } from "./format.js";
import { rolloutsOf } from "./group.js";
import { areRecorded, compared, differences, fileOf, FORMULAS, groupRewards, isOfReward, settingsOf } from "./reward.js";
import { beginning, escaped, marked, shortName } from "./text.js";

const HALF = 100; // steps of a weight's slider on either side of 0, and of a clamp's slider
const NONE = HALF + 1; // position of a clamp's slider for no clamp

export class RewardPanel {
  /** `onChange(choices)` is called with the choices of the address that change, empty if they are the run's again. */
  constructor(onChange) {
    this.onChange = onChange;
    this.reward = null;
    this.fields = new Map(); // by the choice of the address
    this.state = element("span", { class: "beginning" });
    this.controls = element("div", { class: "controls" });
    this.results = element("div", { class: "results" });
    this.element = element(
      "details",
      { class: "rescore", id: "reward", hidden: true },
      element("summary", { id: "reward-summary" }, element("b", {}, "Reward"), this.state),
      element("div", { class: "rescore-body" }, this.controls, this.results),
    );
  }

  /** The panel of a run with the settings `reward`; instead of them, a line that says why there are none. */
  setRun(reward, fault) {
    this.reward = null;
    this.isNew = true; // it opens by itself only if the address that was opened changes a setting
    this.fields.clear();
    this.element.hidden = false;
    this.results.replaceChildren();
    if (!fault && !Object.hasOwn(FORMULAS, reward.mode))
      fault = `reward.mode=${beginning(reward.mode, 200)} is a function of the run's own, which the page cannot recompute.`;
    if (fault) {
      this.state.textContent = "cannot be recomputed";
      this.controls.replaceChildren(element("p", { class: "empty" }, fault));
      return;
    }
    this.reward = reward;
    this.own = settingsOf(reward, {});
    this.faults = element("p", { class: "error-text", role: "alert" });
    this.help = element("small", { id: "reward-help" });
    this.file = element("textarea", { id: "reward-file", readonly: true, spellcheck: "false", wrap: "off" });
    this.download = element("a", { download: "rescored.yaml" }, "Download rescored.yaml");
    this.controls.replaceChildren(this.modeView(), this.sliders(), this.faults, this.saving());
  }

  modeView() {
    const options = Object.keys(FORMULAS).map((name) => element("option", { value: name }, name));
    const field = element("select", { id: "reward-mode", "aria-describedby": "reward-help" }, options);
    field.addEventListener("input", () => this.change("mode", field.value, this.own.mode));
    this.fields.set("mode", { field });
    return element("p", { class: "mode" }, element("label", { for: field.id }, "Mode"), field, this.help);
  }

  sliders() {
    const heads = ["metric", "weight", "", "clamp", ""];
    const rows = [...this.own.weights.keys()].map((name) => [
      element("th", { scope: "row", title: escaped(name) }, shortName(name)),
      this.pair("weight", name, this.own.weights.get(name), -HALF, HALF),
      this.pair("clamp", name, this.own.clamp.get(name), 1, NONE),
    ]);
    return table(heads, rows, { "aria-label": "Weights and clamps" });
  }

  /** A slider and a field for the number of a metric; `own` is the run's, undefined for no clamp. */
  pair(kind, name, own, min, max) {
    const largest = roundAbove(2 * Math.abs(own ?? 0)) || 1;
    const label = escaped(`${kind} of ${shortName(name)}`);
    const slider = element("input", { type: "range", min, max, step: 1, "aria-label": `${label}, slider` });
    const field = element("input", { type: "number", step: "any", "aria-label": label });
    if (kind === "clamp") field.placeholder = "none";
    const change = (text) => this.change(`${kind}.${name}`, text, own === undefined ? "none" : String(own));
    slider.addEventListener("input", () => {
      const position = Number(slider.value);
      const value = Number(((position * largest) / HALF).toPrecision(6)); // without the dust of the division
      change(position === NONE ? "none" : String(value));
    });
    field.addEventListener("input", () => {
      if (field.validity.badInput) return; // "-" or "1e", before the digits that follow
      change(field.value || (kind === "clamp" ? "none" : ""));
    });
    field.addEventListener("blur", () => this.fill(this.shown));
    this.fields.set(`${kind}.${name}`, { field, slider, largest });
    return [element("td", {}, slider), element("td", {}, field)];
  }

  saving() {
    const toggle = element("button", {
      type: "button",
      "aria-expanded": "false",
      "aria-controls": "reward-saved",
      click: () => {
        saved.hidden = !saved.hidden;
        toggle.setAttribute("aria-expanded", saved.hidden ? "false" : "true");
      },
    });
    toggle.append("Show as a file");
    const saved = element(
      "div",
      { id: "reward-saved", hidden: true },
      element("label", { for: "reward-file" }, "conf/reward/NAME.yaml, for megatron-collab train reward=NAME"),
      this.file,
      this.download,
    );
    return element(
      "div",
      { class: "saving" },
      element("button", { type: "button", click: () => this.reset() }, "Reset to the run's"),
      toggle,
      saved,
    );
  }

  change(choice, value, own) {
    this.onChange({ [choice]: value === own ? "" : value });
  }

  reset() {
    this.onChange(Object.fromEntries([...this.fields.keys()].map((choice) => [choice, ""])));
  }

  /** The settings that the address chooses, in all fields; null if the rewards of this run cannot be recomputed. */
  show(choices) {
    if (!this.reward) return null;
    const settings = settingsOf(this.reward, choices);
    const changed = differences(this.own, settings);
    settings.isChanged = changed.length > 0;
    if (this.isNew && Object.entries(choices).some(([choice, value]) => value && isOfReward(choice)))
      this.element.open = true;
    this.isNew = false;
    const what = settings.isChanged ? `changed: ${changed.map(shortName).join(", ")}` : "as in the run";
    this.state.textContent = escaped(`${settings.mode}, ${what}`);
    this.help.textContent = FORMULAS[settings.mode].help;
    this.faults.replaceChildren(...settings.faults.flatMap((fault) => marked(`${beginning(fault, 300)}\n`)));
    this.fill(settings);
    this.offer(fileOf(settings, this.reward));
    return settings;
  }

  /** Set the fields. A number that is being edited is left alone until it is left. */
  fill(settings) {
    this.shown = settings;
    const { clamps } = FORMULAS[settings.mode];
    for (const [choice, { field, slider, largest }] of this.fields) {
      const [kind, name] = choice.split(/\.(.*)/s);
      if (kind === "mode") {
        field.value = settings.mode;
        continue;
      }
      const isClamp = kind === "clamp";
      const value = (isClamp ? settings.clamp : settings.weights).get(name);
      if (field !== document.activeElement) field.value = value ?? "";
      slider.value = value === undefined ? NONE : Math.round((value / largest) * HALF);
      slider.setAttribute("aria-valuetext", value === undefined ? "none" : number(value));
      field.disabled = slider.disabled = isClamp && !clamps;
    }
  }

  /** Open the panel, at its first setting. */
  focus() {
    this.element.open = true;
    (this.controls.querySelector("select") ?? this.element.firstElementChild).focus();
  }

  offer(text) {
    if (this.file.value === text) return;
    this.file.value = text;
    this.file.rows = Math.min(text.split("\n").length, 24);
    if (this.address) URL.revokeObjectURL(this.address);
    this.address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
    this.download.href = this.address;
  }

  /** The rewards of a group, recorded and recomputed. `link(choice)` is the address of another rollout. */
  draw(rows, settings, link) {
    const rollouts = rolloutsOf(rows);
    const recorded = recordedRewards(rollouts);
    const rewards = groupRewards(rollouts, settings);
    const isReproduced = areRecorded(groupRewards(rollouts, this.own), recorded.map(({ value }) => value));
    const note =
      "The recorded rewards do not follow from the run's last settings: another version of the settings, or a " +
      "player with rewards of its own, computed them.";
    const focused = this.results.contains(document.activeElement) ? document.activeElement.id : "";
    this.results.replaceChildren(
      resultsView(rewards, recorded, link),
      isReproduced ? "" : element("p", { class: "note" }, note),
    );
    document.getElementById(focused)?.focus();
    return rewards.map((reward, at) => ({ ...reward, recorded: recorded[at] }));
  }
}

/** By rollout: {value, advantage, rank} as recorded. */
function recordedRewards(rollouts) {
  const values = rollouts.map(({ rows }) => rows[0].reward ?? null);
  const standings = compared(values);
  return values.map((value, at) => ({ value, ...standings[at] }));
}

function resultsView(rewards, recorded, link) {
  const groups = ["reward", "advantage", "rank"];
  return element(
    "table",
    { "aria-label": "Rewards of the group" },
    element(
      "thead",
      {},
      element(
        "tr",
        {},
        element("th", { scope: "col", rowspan: 2 }, "rollout"),
        groups.map((label) => element("th", { scope: "colgroup", colspan: 2 }, label)),
      ),
      element(
        "tr",
        {},
        groups.flatMap(() => ["recorded", "new"].map((label) => element("th", { scope: "col" }, label))),
      ),
    ),
    element(
      "tbody",
      {},
      rewards.map((reward, at) => resultView(reward, recorded[at], link({ rollout: reward.rollout, future: 0 }))),
    ),
  );
}

function resultView({ rollout, value, why, error, advantage, rank }, before, address) {
  const isMoved = rank !== before.rank;
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, element("a", { href: address, id: `result-${rollout}` }, rollout)),
    element("td", {}, decimal(before.value)),
    element(
      "td",
      { title: why ? escaped(beginning(why, 400)) : null },
      value === null ? "missing" : withError(value, error),
    ),
    element("td", {}, signed(before.advantage)),
    element("td", {}, signed(advantage)),
    element("td", {}, rankOf(before.rank)),
    element("td", { class: isMoved ? "moved" : null }, rankOf(rank)),
  );
}

function rankOf(rank) {
  return rank ?? "\u2013";
}

function withError(value, error) {
  return error ? `${decimal(value)} \u00b1 ${decimal(error)}` : decimal(value);
}

/** A line about the recomputed reward of a turn, in a group of `count` rollouts. */
export function rescoredView({ value, why, advantage, rank, recorded }, count) {
  if (value === null) return element("span", {}, `New reward missing: ${beginning(why, 200)}`);
  const from = recorded.rank === null || recorded.rank === rank ? "" : `, recorded ${recorded.rank}`;
  const standing = advantage === null ? "" : ` (${signed(advantage)}), rank ${rank} of ${count}${from}`;
  return element("span", {}, element("b", {}, `New reward ${decimal(value)}`), standing);
}

/** The smallest of 1, 2, 5, 10, … times a power of ten that is not below a positive number; 0 for 0. */
function roundAbove(value) {
  if (!value) return 0;
  const unit = 10 ** Math.floor(Math.log10(value));
  return Number(([1, 2, 5, 10].find((digit) => digit * unit >= value * (1 - 1e-9)) * unit).toPrecision(1));
}
