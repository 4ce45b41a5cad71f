// The blind test: two conversations about a task, their order drawn by lot, without names and scores.

import * as api from "./api.js";
import { hashOf } from "./address.js";
import { element, showFault } from "./dom.js";
import { decimal, interval, number, plural } from "./format.js";
import { foldedText, textOf } from "./message.js";
import { blindPairView } from "./pair.js";
import { defaults, nameOf, splitSide } from "./pairs.js";
import { shortName } from "./text.js";

const KEY = "megatron-collab-rater"; // of the name, which is kept in this browser
const VERDICTS = [
  ["left", "\u2190 Left is better"],
  ["tie", "= Both are equal"],
  ["skip", "s Skip"],
  ["right", "Right is better \u2192"],
];

export class Blind {
  constructor(container, runs) {
    this.runs = runs;
    this.sides = null; // {left, right}
    this.tasks = [];
    this.result = null;
    this.shown = null; // {task, order}: what can be rated now; order: the sides as they are shown
    this.orders = new Map(); // by sides and task, what was drawn: a rating is about what was shown all the time
    this.begun = new Set(); // pairs of sides of which a task was shown
    this.ended = new Set(); // pairs of sides of which the result, or names and scores, were shown: nothing more is rated
    this.generation = 0; // of what is being read: later answers of an earlier one are dropped
    this.build(container);
  }

  build(container) {
    const value = localStorage.getItem(KEY) ?? "";
    this.rater = element("input", { id: "rater", maxlength: "80", autocomplete: "off", value });
    this.rater.addEventListener("change", () => {
      localStorage.setItem(KEY, this.rater.value.trim());
      this.next();
    });
    this.progress = element("p", { role: "status" });
    this.back = element("a", {}, "Compare with names and scores, which ends the test");
    this.buttons = VERDICTS.map(([verdict, label]) =>
      element("button", { type: "button", class: `verdict-${verdict}`, click: () => this.rate(verdict) }, label),
    );
    this.fault = element("div", {});
    this.pair = element("div", { class: "pair", tabindex: "-1" });
    this.outcome = element("div", { class: "outcome" });
    container.append(
      element(
        "div",
        { class: "blind" },
        element("h2", {}, "Which conversation is better?"),
        element(
          "p",
          { class: "rater" },
          element("label", { for: "rater" }, "Your name "),
          this.rater,
          this.progress,
          this.back,
        ),
        element("p", { class: "verdicts" }, this.buttons),
        this.fault,
        this.pair,
        this.outcome,
      ),
    );
  }

  /** Read all again at the next `show`. */
  forget() {
    this.sides = null;
  }

  async show(choices) {
    const generation = (this.generation += 1);
    try {
      const parts = await Promise.all(this.runs.map(({ run }) => api.parts(run)));
      const { left, right } = { ...defaults(parts), ...choices };
      if (generation !== this.generation) return;
      this.setShown(null);
      if (!left) {
        this.pair.replaceChildren(element("p", { class: "empty" }, "No run here has recorded conversations yet."));
        return;
      }
      this.back.href = hashOf("compare", { left, right });
      const [{ tasks }, result] = await Promise.all([api.comparison(left, right), api.ratings(left, right)]);
      if (generation !== this.generation) return;
      Object.assign(this, { sides: { left, right }, tasks: tasks.map(({ task }) => task.toWellFormed()), result });
    } catch (error) {
      showFault(this.fault, error.message);
      return;
    }
    await this.next();
  }

  /** Show the first task that the rater has not rated. */
  async next() {
    if (!this.sides) return;
    const generation = (this.generation += 1);
    const name = this.rater.value.trim();
    const rated = new Set(
      this.result.rated.filter(({ rater }) => rater === name).map(({ task }) => task.toWellFormed()),
    );
    const remaining = this.tasks.filter((task) => !rated.has(task));
    this.progress.textContent = `${rated.size} of ${plural(this.tasks.length, "task")} rated`;
    this.fault.replaceChildren();
    this.setShown(null);
    this.drawOutcome();
    if (!remaining.length || this.hasEnded()) {
      const all = this.tasks.length ? "You have rated every task." : "The conversations of these sides differ in no task that both have.";
      const text = remaining.length ? "You have ended the test of these sides." : all;
      this.pair.replaceChildren(element("p", { class: "empty" }, text));
      return;
    }
    const [task] = remaining;
    const order = this.orderOf(task);
    try {
      const read = (side) => api.conversations(...splitSide(this.sides[side]), task);
      const answers = await Promise.all(order.map(read));
      if (generation !== this.generation) return;
      const messages = answers.map(({ rows }) => rows[0].messages);
      if (JSON.stringify(messages[0]) === JSON.stringify(messages[1])) {
        this.tasks = this.tasks.filter((other) => other !== task); // a rating of equal conversations says nothing
        await this.next();
        return;
      }
      const goal = answers.map(({ rows }) => rows[0].goal).find(Boolean);
      this.pair.replaceChildren(
        ...(goal ? [foldedText("The user's goal", textOf(goal))] : []),
        blindPairView(messages),
      );
      this.setShown({ task, order });
      this.begun.add(this.pairKey());
    } catch (error) {
      if (generation === this.generation) showFault(this.fault, error.message);
    }
  }

  /** The sides as they are shown, drawn once for a task. */
  orderOf(task) {
    const key = JSON.stringify([this.sides.left, this.sides.right, task]);
    if (!this.orders.has(key)) {
      const isOdd = crypto.getRandomValues(new Uint8Array(1))[0] % 2;
      this.orders.set(key, isOdd ? ["left", "right"] : ["right", "left"]);
    }
    return this.orders.get(key);
  }

  /** The two sides, whichever of them is at the left in the comparison. */
  pairKey({ left, right } = this.sides) {
    return JSON.stringify([left, right].sort());
  }

  /** Names and scores of sides were shown: if their test has begun, it ends. */
  sawNames(sides) {
    const key = this.pairKey(sides);
    if (this.begun.has(key)) this.ended.add(key);
  }

  hasEnded() {
    return this.ended.has(this.pairKey());
  }

  async end() {
    if (!this.sides) return;
    this.ended.add(this.pairKey());
    await this.next();
  }

  setShown(shown) {
    this.shown = shown;
    for (const button of this.buttons) button.disabled = !shown;
  }

  /** `verdict`: the better conversation as shown (left, right), tie or skip. */
  async rate(verdict) {
    if (!this.shown) return;
    const rater = this.rater.value.trim();
    if (!rater) {
      this.rater.focus();
      showFault(this.fault, "Type your name first: each rating has one.");
      return;
    }
    const { task, order } = this.shown;
    const side = { left: order[0], right: order[1] }[verdict] ?? verdict;
    const generation = this.generation;
    this.setShown(null); // a second key rates nothing
    try {
      await api.rate({ ...this.sides, task, rater, shown_left: order[0], verdict: side });
      this.result = await api.ratings(this.sides.left, this.sides.right);
    } catch (error) {
      showFault(this.fault, error.message);
      if (generation === this.generation) this.setShown({ task, order });
      return;
    }
    await this.next();
    scrollTo(0, 0);
  }

  /** Until the test has ended only a button: a result that changes with a rating tells which side was preferred. */
  drawOutcome() {
    if (!this.hasEnded()) {
      const text =
        " The result tells which side was which, so it ends the test: you can rate nothing afterwards. " +
        "If another rater wants to begin here, reload the page.";
      const button = element("button", { type: "button", click: () => this.end() }, "Show the result and end");
      this.outcome.replaceChildren(element("p", {}, button, text));
      return;
    }
    const { wins, ties, losses, skipped, outdated, share, evidence, decided, agreement } = this.result;
    const [left, right] = ["left", "right"].map((side) => shortName(nameOf(this.sides[side], this.runs)));
    const lines = [
      `${right} is better in ${wins}, equal in ${ties}, worse in ${losses} of ${plural(wins + ties + losses, "task")}` +
        ` than ${left}; ${skipped} skipped.` +
        (outdated ? ` Left out: ${plural(outdated, "rating")} of conversations that have been replaced.` : ""),
      `Share of ${right} without ties: ${interval(share)}, an interval that holds whenever raters stop.`,
      `Evidence against equal sides: ${number(evidence, 3)}. ` +
        (decided ? "One side is better." : "From 20 on, one side is better: wrongly in at most 5 % of tests."),
      ...agreement.map(
        ({ name, kappa, tasks: count }) =>
          `Agreement of ${shortName(name)}, kappa: ${decimal(kappa)} (${plural(count, "task")})`,
      ),
    ];
    this.outcome.replaceChildren(
      element("h2", {}, "Result"),
      element(
        "ul",
        {},
        lines.map((line) => element("li", {}, line)),
      ),
    );
  }
}
