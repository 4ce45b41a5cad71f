// Two evaluations or steps of training on the same tasks: differences by metric and by task, conversations beside
// each other.

import * as api from "./api.js";
import { go, hashOf } from "./address.js";
import { element, offer, select, showFault, table } from "./dom.js";
import { decimal, interval, plural, signed } from "./format.js";
import { foldedText, textOf } from "./message.js";
import { defaults, inOrder, nameOf, ORDERS, splitSide } from "./pairs.js";
import { pairView } from "./pair.js";
import { shortName } from "./text.js";

const SIDES = ["left", "right"];
const SHOWN = 200; // tasks in the list; a button adds as many

export class Compare {
  /** `onSides({left, right})`: called before names and scores of these sides are shown. */
  constructor(container, runs, onSides) {
    this.runs = runs;
    this.onSides = onSides;
    this.parts = null; // by run, what can be compared
    this.choices = {};
    this.comparison = { key: "", answer: null };
    this.pair = { key: "", rows: null };
    this.shown = SHOWN;
    this.build(container);
  }

  build(container) {
    this.fields = {
      ...Object.fromEntries(SIDES.map((side) => [side, this.select(side, { [side]: "", task: "" })])),
      metric: this.select("metric", {}),
      order: this.select("order", {}),
    };
    offer(this.fields.order, [["", Object.entries(ORDERS)]]);
    const labels = { left: "Left", right: "Right", metric: "Metric", order: "Order" };
    this.blind = element("a", { class: "to-blind" }, "Blind test of these sides");
    this.form = element(
      "form",
      { class: "sides", "aria-label": "Compare", submit: (event) => event.preventDefault() },
      Object.entries(labels).map(([name, label]) =>
        element(
          "label",
          { class: `compare-${name}`, for: `compare-${name}` },
          element("span", {}, label),
          this.fields[name],
        ),
      ),
      element("button", { type: "button", class: "swap", click: () => this.swap() }, "Swap sides"),
      this.blind,
    );
    this.count = element("p", { class: "common", role: "status" });
    this.list = element("div", { class: "tasks", tabindex: "0", role: "region", "aria-label": "Tasks" });
    this.table = element("div", { class: "differences" });
    this.reader = element("div", { class: "pair" });
    this.fault = element("div", {});
    container.append(
      element(
        "div",
        { class: "panes" },
        element(
          "aside",
          { class: "side", "aria-label": "What is compared" },
          this.form,
          element("div", { class: "pager" }, this.count),
          this.list,
        ),
        element(
          "section",
          { class: "reader", "aria-label": "Comparison", tabindex: "-1" },
          this.fault,
          this.table,
          this.reader,
        ),
      ),
    );
  }

  select(name, cleared) {
    const field = element("select", { id: `compare-${name}`, name });
    field.addEventListener("input", () => this.choose({ ...cleared, [name]: field.value }));
    return field;
  }

  /** Ask again at the next `show`: runs that go on may have more by then. */
  forget() {
    this.parts = null;
    this.comparison.key = "";
  }

  /** Go to other choices. */
  choose(changed, options = { replace: true }) {
    go("compare", { ...this.choices, ...changed }, options);
  }

  swap() {
    const { left, right } = this.choices;
    this.choose({ left: right, right: left, l: this.choices.r, r: this.choices.l });
  }

  async show(choices) {
    this.fault.replaceChildren();
    try {
      await this.showChoices(choices);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.parts = null; // the next choice asks again
      this.comparison.key = "";
      showFault(this.fault, error.message);
    }
  }

  async showChoices(choices) {
    this.choices = choices;
    this.parts ??= Promise.all(this.runs.map(({ run }) => api.parts(run)));
    const parts = await this.parts;
    if (choices !== this.choices) return; // others have been chosen meanwhile
    this.choices = { ...defaults(parts), ...choices };
    this.setSides(parts);
    this.onSides(this.choices);
    this.blind.href = hashOf("blind", { left: this.choices.left, right: this.choices.right });
    if (!this.choices.left) {
      this.table.replaceChildren(element("p", { class: "empty" }, "No run here has recorded conversations yet."));
      return;
    }
    if (!(await this.showComparison())) return;
    await this.showPair();
  }

  setSides(parts) {
    const sides = this.runs.flatMap(({ run }, at) => parts[at].map((part) => `${run}:${part}`));
    const options = sides.map((value) => [value, this.nameOf(value)]);
    for (const side of SIDES) {
      const value = this.choices[side] ?? "";
      offer(this.fields[side], [["", options]], value, this.nameOf(value));
    }
  }

  /** False if another comparison has been chosen meanwhile. */
  async showComparison() {
    const { left, right } = this.choices;
    const key = JSON.stringify([left, right]);
    if (key !== this.comparison.key) {
      this.request?.abort();
      const request = (this.request = new AbortController());
      this.comparison = { key, answer: null };
      this.pair.key = "";
      this.shown = SHOWN;
      const answer = await api.comparison(left, right, request.signal);
      if (key !== this.comparison.key) return false;
      this.comparison.answer = answer;
    }
    if (!this.comparison.answer) return false; // it is on its way, and is drawn then
    this.draw();
    return true;
  }

  /** The tasks of the list in its order. */
  tasks() {
    return inOrder(this.comparison.answer.tasks, this.metric(), this.choices.order ?? "");
  }

  /** The metric of the list: the chosen one, or the first with a difference. */
  metric() {
    const { metrics } = this.comparison.answer;
    return this.choices.metric ?? (metrics.find(({ difference }) => difference) ?? metrics[0])?.name ?? "";
  }

  draw() {
    const { answer } = this.comparison;
    const names = answer.metrics.filter(({ difference }) => difference).map(({ name }) => name);
    offer(this.fields.metric, [["", names.map((name) => [name, name])]], this.metric());
    select(this.fields.order, this.choices.order ?? "");
    const { common, left, right } = answer;
    this.count.textContent = `${plural(common, "common task")} of ${left.tasks} and ${right.tasks}`;
    this.table.replaceChildren(this.differencesView(answer.metrics));
    this.drawList();
  }

  differencesView(metrics) {
    if (!metrics.length)
      return element("p", { class: "empty" }, "These sides have no scored task in common. Choose others.");
    const heads = ["metric", ...SIDES.map((side) => this.nameOf(this.choices[side])), "right less left"];
    const rows = metrics.map(({ name, missing, difference, ...values }) => [
      element("th", { scope: "row" }, shortName(name)),
      SIDES.map((side, at) => element("td", {}, interval(values[side]), missingText(missing[at]))),
      element("td", { class: isDecided(difference) ? "decided" : null }, interval(difference, signed)),
    ]);
    const caption = "Means over the common tasks, and the paired difference, with 95 % intervals";
    return table(heads, rows, {}, element("caption", {}, caption));
  }

  nameOf(side) {
    return shortName(nameOf(side, this.runs));
  }

  drawList() {
    const metric = this.metric();
    const tasks = this.tasks();
    const chosen = this.choices.task ?? tasks[0]?.task;
    const heads = ["task", "left", "right", "change"];
    const body = tasks.slice(0, this.shown).map((task) => {
      const isChosen = sent(task.task) === sent(chosen);
      const [left, right] = SIDES.map((side) => task[side][metric]);
      const link = element(
        "a",
        { href: this.linkTo(task), "aria-current": isChosen ? "true" : null },
        shortName(task.task),
      );
      return element(
        "tr",
        { class: isChosen ? "chosen" : "" },
        element("td", { class: "task" }, link),
        [left, right].map((value) => element("td", { class: "number" }, decimal(value))),
        element("td", { class: "number" }, signed(changeOf(left, right))),
      );
    });
    this.list.replaceChildren(
      table(heads, body),
      ...(tasks.length > this.shown ? [this.moreButton(tasks.length)] : []),
    );
    this.list.querySelector("[aria-current]")?.closest("tr").scrollIntoView({ block: "nearest" });
  }

  moreButton(total) {
    const more = () => {
      this.shown += SHOWN;
      this.drawList();
    };
    const next = Math.min(SHOWN, total - this.shown);
    const label = `Show ${next} more of ${plural(total, "task")}`;
    return element("button", { type: "button", class: "more", click: more }, label);
  }

  linkTo(task) {
    return hashOf("compare", { ...this.choices, task: sent(task.task), l: "", r: "" });
  }

  async showPair() {
    const task = this.choices.task ?? this.tasks()[0]?.task;
    const key = JSON.stringify([this.comparison.key, task]);
    if (key !== this.pair.key) {
      this.pair = { key, rows: null };
      if (task === undefined) this.reader.replaceChildren();
      else {
        const read = (side) => api.conversations(...splitSide(this.choices[side]), task, this.request?.signal);
        const answers = await Promise.all(SIDES.map(read)).catch((error) => {
          if (key === this.pair.key) this.pair.key = "";
          throw error;
        });
        if (key !== this.pair.key) return;
        this.pair.rows = answers.map(({ rows }) => rows);
        this.pair.task = answers[0].task;
      }
    }
    if (this.pair.rows) this.drawPair();
  }

  drawPair() {
    const { rows, task } = this.pair;
    const focused = this.reader.contains(document.activeElement) ? document.activeElement.id : "";
    const sides = SIDES.map((side, at) => {
      const name = side[0]; // of the choice of a conversation in the address
      const number = Math.min(Number(this.choices[name] ?? 0), rows[at].length - 1);
      const title = this.nameOf(this.choices[side]);
      return { title, rows: rows[at], number, name, choose: (value) => this.choose({ [name]: value }) };
    });
    const goal = rows.flat().find((row) => row.goal)?.goal;
    this.reader.replaceChildren(
      element("h2", {}, shortName(task)),
      ...(goal ? [foldedText("Hidden goal", textOf(goal))] : []),
      pairView(sides),
    );
    if (focused) document.getElementById(focused)?.focus();
  }

  /** To the next task of the list or, with -1, the previous one. */
  move(change) {
    if (!this.comparison.answer) return;
    const tasks = this.tasks();
    const chosen = sent(this.choices.task ?? tasks[0]?.task ?? "");
    const at = tasks.findIndex(({ task }) => sent(task) === chosen) + change;
    if (!tasks[at]) return;
    if (at >= this.shown) this.shown += SHOWN;
    this.choose({ task: sent(tasks[at].task), l: "", r: "" });
  }
}

/** An id as an address holds it, which has no halves of surrogate pairs. */
function sent(task) {
  return String(task).toWellFormed();
}

function changeOf(left, right) {
  return typeof left === "number" && typeof right === "number" ? right - left : null;
}

function missingText(count) {
  return count ? ` (${count} missing)` : "";
}

/** Whether the interval excludes 0. */
function isDecided(difference) {
  return difference !== null && difference.low !== null && (difference.low > 0 || difference.high < 0);
}
