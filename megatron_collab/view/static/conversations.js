// The conversations: a filtered list of futures, and the group of the chosen one as a tree.

import * as api from "./api.js";
import { go, hashOf, read } from "./address.js";
import { element, showFault, table } from "./dom.js";
import { Filters, hasConversations, PLACES } from "./filters.js";
import { decimal, plural } from "./format.js";
import { rolloutsOf } from "./group.js";
import { RewardPanel, rescoredView } from "./rescore.js";
import { groupRewards, isOfReward } from "./reward.js";
import { shortName } from "./text.js";
import { SHADES, tokensView } from "./tokens.js";
import { treeView } from "./tree.js";

const PAGE = 50; // rows of the list at a time
const ADDRESS_MS = 200; // after the last move of a slider, since browsers limit how often the address may change
const ORDER = "order"; // choice: the rows of the list by their recomputed reward, one of ORDERS
const ORDERS = { "": "none", descending: "descending", ascending: "ascending" }; // as aria-sort names them
const TOKENS = "tokens"; // choice: the tokens of the trained turn are shown, shaded by one of SHADES
const OF_FUTURE = ["step", "position", "rollout", "future"]; // choices that name a row of the list

export class Conversations {
  constructor(container, runs) {
    this.runs = runs;
    this.firstRun = runs.find((run) => run.has_transcripts) ?? runs.find(hasConversations);
    this.choices = {};
    this.list = { key: "", rows: [], shown: [], total: 0 }; // `shown`: the rows in the order of the table
    this.group = { key: "", answer: null };
    this.tokens = { key: "", turns: null };
    this.entersAtEnd = false;
    this.settings = null; // of the reward, which the address may change; null: rewards cannot be recomputed
    this.rewardRun = null;
    this.scores = new Map(); // by group of the list: the rows from which its rewards are computed
    this.filters = new Filters(runs, (choices) => this.filter(choices));
    this.panel = new RewardPanel((changed) => this.rescore(changed));
    this.build(container);
  }

  build(container) {
    if (!this.firstRun)
      container.append(element("p", { class: "empty" }, "No run here has recorded conversations yet."));
    this.count = element("p", { class: "count", role: "status" });
    this.previous = element("button", { type: "button", click: () => this.turnPage(-1) }, "\u2039 Previous");
    this.next = element("button", { type: "button", click: () => this.turnPage(1) }, "Next \u203a");
    this.table = element("div", { class: "rows", tabindex: "0", role: "region", "aria-label": "Conversations" });
    this.side = element(
      "aside",
      { class: "side", "aria-label": "List of conversations" },
      this.filters.element,
      element("div", { class: "pager" }, this.count, this.previous, this.next),
      this.table,
    );
    this.reader = element("div");
    const reader = element("section", { class: "reader", "aria-label": "Conversation", tabindex: "-1" });
    reader.append(this.panel.element, this.reader);
    this.selection = element("p", { class: "unseen", role: "status" });
    container.append(
      element("div", { class: "panes", hidden: !this.firstRun }, this.side, reader),
      this.selection,
    );
  }

  /** Read what the address chooses, as far as it is not on the page already. */
  async show(choices) {
    if (!this.firstRun) return;
    clearTimeout(this.timer); // the address has what it would add, or goes back behind it
    this.choices = { run: String(this.firstRun.run), ...choices };
    const run = this.runs.find((candidate) => String(candidate.run) === this.choices.run);
    if (!run?.has_transcripts) this.choices.evaluation ??= run?.evaluations[0];
    this.filters.show(this.choices);
    await this.readReward();
    this.settings = this.panel.show(this.choices);
    await this.showList();
    await this.showGroup();
  }

  /** Read the list again at the next `show`: a run that is not finished may have more by then. */
  forgetList() {
    this.list.key = "";
    this.scores = new Map();
  }

  /** Filters of the choices: all but those that name a future, and those of the reward. */
  filterChoices() {
    const { other, ...filters } = this.choices;
    const isFilter = (name) => ![...OF_FUTURE, ORDER, TOKENS].includes(name) && !isOfReward(name);
    return Object.fromEntries(Object.entries(filters).filter(([name]) => isFilter(name)));
  }

  /** Other filters. The settings of the reward stay, unless it is another run, which has other metrics. */
  filter(choices) {
    const isSameRun = choices.run === this.choices.run;
    const kept = Object.entries(this.choices).filter(([name]) => [ORDER, TOKENS].includes(name) || isOfReward(name));
    if (!isSameRun) delete choices.evaluation;
    this.go({ ...choices, ...(isSameRun ? Object.fromEntries(kept) : {}) }, { replace: true });
  }

  /** Read the settings of the run's reward, once for a run. */
  async readReward() {
    const { run, evaluation } = this.choices;
    if (evaluation !== this.evaluation) this.scores = new Map();
    this.evaluation = evaluation;
    if (run === this.rewardRun) return;
    this.rewardRun = run;
    this.scores = new Map();
    try {
      const reward = await api.reward(run);
      if (run === this.rewardRun) this.panel.setRun(reward);
    } catch (error) {
      if (run === this.rewardRun) this.panel.setRun(null, error.message);
    }
  }

  /** Recompute the rewards with changed settings at once; the address follows when the slider rests. */
  rescore(changed) {
    Object.assign(this.choices, changed);
    this.settings = this.panel.show(this.choices);
    this.drawRewards();
    this.showRescoredList();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (read().view === "conversations") this.choose({}, { replace: true });
    }, ADDRESS_MS);
  }

  /** Whether the list has a column of recomputed rewards. */
  get isRescored() {
    return this.settings !== null && (this.settings.isChanged || Boolean(this.choices[ORDER]));
  }

  /** The list once the scores of its groups are there. */
  async showRescoredList() {
    try {
      await this.readScores();
    } catch (error) {
      showFault(this.table, error.message);
      return;
    }
    this.drawList();
  }

  /** Read what the rewards of the list's groups are computed from, if the list has a column of them. */
  async readScores() {
    if (!this.isRescored) return;
    const groups = new Map(this.list.rows.map((row) => [groupKey(row), row]));
    const lacking = [...groups].filter(([key]) => !this.scores.has(key)).map(([, row]) => row);
    if (!lacking.length) return;
    const { scores } = this; // of this run and evaluation
    const { run, evaluation } = this.choices;
    for (const group of await api.scores(run, lacking, evaluation)) scores.set(groupKey(group), group.rows);
  }

  /** By group of the list and rollout: the recomputed reward, null if it is missing. */
  rescoredRewards() {
    const rewards = new Map();
    for (const [key, rows] of this.scores)
      for (const { rollout, value } of groupRewards(rolloutsOf(rows), this.settings))
        rewards.set(`${key}.${rollout}`, value);
    return rewards;
  }

  go(choices, options) {
    go("conversations", choices, options);
  }

  /** Go to another row, rollout or future of what is shown. */
  choose(changed, options) {
    this.go({ ...this.choices, ...changed }, options);
  }

  async showList() {
    const { run, ...filters } = this.filterChoices();
    const key = hashOf(run, filters);
    if (key !== this.list.key) {
      this.request?.abort();
      const request = (this.request = new AbortController());
      this.list = { key, rows: [], shown: [], total: 0 };
      try {
        const answer = await api.futures(run, { ...filters, limit: PAGE }, request.signal);
        this.list = { key, ...answer, shown: answer.rows };
        this.filters.setOptions(answer.endings, answer.columns, answer.evaluations);
        this.filters.show(this.choices);
      } catch (error) {
        if (error.name === "AbortError") return;
        this.list.key = ""; // the next choice asks again
        showFault(this.table, error.message);
        return;
      }
    }
    await this.showRescoredList();
    const row = this.list.shown.at(this.entersAtEnd ? -1 : 0);
    if (this.choices.step === undefined && row) this.choose(ofFuture(row), { replace: true });
    this.entersAtEnd = false;
  }

  drawList() {
    const { total } = this.list;
    const rescored = this.isRescored ? this.rescoredRewards() : null;
    const rows = (this.list.shown = this.ordered(rescored));
    const offset = Number(this.choices.offset ?? 0);
    const range = rows.length
      ? `${(offset + 1).toLocaleString("en")}\u2013${(offset + rows.length).toLocaleString("en")} of `
      : "";
    this.count.textContent = `${range}${plural(total, "future")}`;
    this.previous.disabled = offset === 0;
    this.next.disabled = offset + rows.length >= total;
    const { sort } = this.choices;
    const extra = sort && ![...PLACES, "reward"].includes(sort) ? sort : null;
    const place = element("th", { scope: "col", title: "rollout and future" }, "r.f");
    const shown = extra && shortName(extra).replaceAll("_", " "); // so that it can wrap
    const heads = ["step", "task", place, "ending", "reward", shown, rescored ? this.orderView() : null];
    const body = rows.map((row) => this.rowView(row, extra, rescored));
    const keepsFocus = document.activeElement?.id === "order";
    this.table.replaceChildren(
      rows.length
        ? table(heads, body)
        : element("p", { class: "empty" }, "No conversation matches the filter."),
    );
    if (keepsFocus) document.getElementById("order")?.focus();
    this.table.querySelector("[aria-current]")?.closest("tr").scrollIntoView({ block: "nearest" });
  }

  /** The rows of the list, by their recomputed reward if that is chosen; those without one are last. */
  ordered(rescored) {
    const { rows } = this.list;
    const sign = { descending: -1, ascending: 1 }[this.choices[ORDER]];
    if (!rescored || !sign) return rows;
    const value = (row) => rescored.get(`${groupKey(row)}.${row.rollout}`) ?? sign * Infinity;
    return rows.toSorted((one, other) => (value(one) === value(other) ? 0 : sign * (value(one) - value(other))));
  }

  /** The head of the column of recomputed rewards: a click changes the order of the rows. */
  orderView() {
    const names = Object.keys(ORDERS);
    const at = Math.max(names.indexOf(this.choices[ORDER] ?? ""), 0);
    const mark = { descending: " \u25be", ascending: " \u25b4" }[names[at]] ?? "";
    const button = element(
      "button",
      {
        type: "button",
        id: "order",
        title: "the recomputed reward; sorts the rows of this page",
        click: () => this.choose({ [ORDER]: names[(at + 1) % names.length] }, { replace: true }),
      },
      `new${mark}`,
    );
    return element("th", { scope: "col", "aria-sort": ORDERS[names[at]] }, button);
  }

  rowView(row, extra, rescored) {
    const isChosen = OF_FUTURE.every((name) => Number(this.choices[name] ?? 0) === row[name]);
    const link = element(
      "a",
      {
        href: hashOf("conversations", { ...this.choices, ...ofFuture(row) }),
        "aria-current": isChosen ? "true" : null,
      },
      shortName(row.task),
    );
    return element(
      "tr",
      { class: isChosen ? "chosen" : "" },
      element("td", { class: "number" }, row.step),
      element("td", { class: "task" }, link),
      element("td", { class: "number" }, `${row.rollout}.${row.future}`),
      element("td", { class: "name" }, shortName(row.ending ?? "")),
      element("td", { class: "number" }, decimal(row.reward)),
      extra ? element("td", { class: "number" }, decimal(extra in row ? row[extra] : row.scores?.[extra])) : null,
      rescored
        ? element("td", { class: "number" }, decimal(rescored.get(`${groupKey(row)}.${row.rollout}`)))
        : null,
    );
  }

  async showGroup() {
    const { run, evaluation = "", step, position = "0" } = this.choices;
    const key = step === undefined ? "" : [run, evaluation, step, position].join("/");
    if (key !== this.group.key) {
      this.group = { key, answer: null };
      try {
        const answer = key && (await api.group(run, step, position, evaluation));
        if (key !== this.group.key) return; // another one has been chosen meanwhile
        this.group.answer = answer;
      } catch (error) {
        if (key !== this.group.key) return;
        this.group.key = "";
        showFault(this.reader, error.message);
        return;
      }
    }
    this.drawGroup();
  }

  drawGroup() {
    if (!this.group.key) this.reader.replaceChildren();
    if (!this.group.answer) return; // it is on its way, and is drawn then
    this.drawTree();
    this.drawLinks();
    this.drawRewards();
    this.showTokens();
  }

  /** The tree of the group, unless it is there already: what a reader has unfolded stays so. */
  drawTree() {
    const { rollout = "0", future = "0", other } = this.choices;
    const chosen = {
      rollout: Number(rollout),
      future: Number(future),
      other: other === undefined ? null : Number(other),
    };
    const drawn = [this.group.key, rollout, future, other].join("/");
    if (drawn === this.reader.dataset.drawn && this.reader.querySelector(".tree")) return;
    this.reader.dataset.drawn = drawn;
    const link = (choice) => this.linkTo(choice);
    const focused = this.reader.contains(document.activeElement) ? document.activeElement : null;
    const choose = (choice) => this.choose(choice, { replace: true });
    const talk = hashOf("talk", { run: this.choices.run, task: String(this.group.answer.task).toWellFormed() });
    const toggleTokens = (rollout) => this.toggleTokens(rollout);
    this.reader.replaceChildren(treeView(this.group.answer, chosen, link, choose, talk, toggleTokens));
    const turn = this.reader.querySelector(".turn.chosen");
    if (turn) turn.parentElement.scrollLeft = turn.offsetLeft - turn.parentElement.offsetLeft;
    if (focused?.role === "tab") this.reader.querySelector("[role=tab][aria-selected=true]").focus();
    else if (focused?.id) document.getElementById(focused.id)?.focus();
    this.selection.textContent = `Task ${shortName(this.group.answer.task)}, rollout ${rollout}, future ${future}`;
  }

  linkTo(choice) {
    return hashOf("conversations", { ...this.choices, ...choice, other: "" });
  }

  /** The addresses of the trained turns, which hold all other choices. */
  drawLinks() {
    for (const turn of this.reader.querySelectorAll(".turn"))
      turn.querySelector(".turn-head a").href = this.linkTo({ rollout: turn.dataset.rollout, future: 0 });
  }

  /** The rewards of the group in the panel and, if a setting is changed, in the trained turns. */
  drawRewards() {
    const rows = this.group.answer?.rows;
    if (!rows?.length || !this.settings) return;
    const rewards = this.panel.draw(rows, this.settings, (choice) => this.linkTo(choice));
    for (const turn of this.reader.querySelectorAll(".turn")) {
      const reward = rewards.find(({ rollout }) => String(rollout) === turn.dataset.rollout);
      const line = this.settings.isChanged ? rescoredView(reward, rewards.length) : "";
      turn.querySelector(".rescored").replaceChildren(line);
    }
  }

  /** The tokens of the chosen rollout below the trained turns, if that is chosen. */
  async showTokens() {
    const place = this.reader.querySelector(".tokens");
    const { run, step, position = "0", rollout = "0" } = this.choices;
    const shade = Object.hasOwn(SHADES, this.choices[TOKENS] ?? "") ? this.choices[TOKENS] : "";
    for (const button of this.reader.querySelectorAll(".to-tokens"))
      button.setAttribute("aria-expanded", String(shade !== "" && button.id === `tokens-of-${rollout}`));
    if (!place) return;
    const key = shade && [run, step, position, rollout].join("/");
    if (key && key !== this.tokens.key) {
      this.tokens = { key, turns: null };
      try {
        const turns = await api.tokens(run, step, position, rollout);
        if (key === this.tokens.key) this.tokens.turns = turns;
      } catch (error) {
        if (key !== this.tokens.key) return;
        this.tokens.key = "";
        showFault(place, error.message);
      }
      if (key === this.tokens.key) this.showTokens(); // what is chosen may have changed meanwhile
      return;
    }
    const future = Number(this.choices.future ?? 0);
    const drawn = `${key} ${shade} ${future}`;
    if (drawn === place.dataset.drawn || (key && !this.tokens.turns)) return;
    place.dataset.drawn = drawn;
    const keepsFocus = document.activeElement?.id === "tokens-shade";
    const choose = (value) => this.choose({ [TOKENS]: value }, { replace: true });
    place.replaceChildren(key ? tokensView(this.tokens.turns, future, shade, choose) : "");
    if (keepsFocus) document.getElementById("tokens-shade")?.focus();
  }

  /** Show the tokens of a rollout, of the chosen one if none is named, or hide them if they are shown. */
  toggleTokens(rollout = Number(this.choices.rollout ?? 0)) {
    if (!this.group.answer) return;
    if (!this.group.answer.has_tokens) {
      this.selection.textContent = "No tokens of this group are recorded: see train.record_tokens";
      return;
    }
    const isChosen = rollout === Number(this.choices.rollout ?? 0);
    const shade = isChosen && this.choices[TOKENS] ? "" : this.choices[TOKENS] || Object.keys(SHADES)[0];
    this.choose({ ...(isChosen ? {} : { rollout, future: 0, other: "" }), [TOKENS]: shade }, { replace: true });
  }

  /** To the next row of the list or, with -1, the previous one; at an end of the page to the page beside it. */
  move(change) {
    const rows = this.list.shown;
    const at = rows.findIndex((row) => OF_FUTURE.every((name) => Number(this.choices[name] ?? 0) === row[name]));
    const row = rows[at + change];
    if (row) this.choose(ofFuture(row));
    else if (at >= 0) this.turnPage(change, change < 0);
  }

  /** `entersAtEnd`: choose the last row of that page, not the first one. */
  turnPage(change, entersAtEnd = false) {
    const offset = Number(this.choices.offset ?? 0) + change * PAGE;
    if (offset < 0 || offset >= this.list.total) return;
    this.entersAtEnd = entersAtEnd;
    const { step, position, rollout, future, other, ...filters } = this.choices;
    this.go({ ...filters, offset: offset || "" });
  }

  moveRollout(change) {
    this.moveWithin(({ rollouts, at }) => rollouts[at + change]?.rows[0]);
  }

  moveFuture(change) {
    this.moveWithin(({ rollouts, at }) => {
      const { rows } = rollouts[at];
      return rows[rows.findIndex(({ future }) => future === Number(this.choices.future ?? 0)) + change];
    });
  }

  moveWithin(next) {
    if (!this.group.answer) return;
    const rollouts = rolloutsOf(this.group.answer.rows);
    const at = Math.max(
      rollouts.findIndex(({ rollout }) => rollout === Number(this.choices.rollout ?? 0)),
      0,
    );
    const row = next({ rollouts, at });
    if (row) this.choose({ rollout: row.rollout ?? 0, future: row.future ?? 0, other: "" }, { replace: true });
  }

  focusReward() {
    this.panel.focus();
  }

  focusFilter() {
    this.filters.fields.words.focus();
  }
}

function groupKey({ step, position }) {
  return `${step}.${position}`;
}

function ofFuture(row) {
  return { ...Object.fromEntries(OF_FUTURE.map((name) => [name, row[name]])), other: "" };
}
