// The overview: curves of the runs, overlaid by color, which grow while the runs do.

import * as api from "./api.js";
import { go } from "./address.js";
import { Chart } from "./chart.js";
import { element, offer, table } from "./dom.js";
import { number, plural } from "./format.js";
import { against, lostServers, names, sections } from "./series.js";
import { beginning, escaped, shortName } from "./text.js";

const POLL_MS = 2_000;
const POLL_FINISHED_MS = 30_000; // a finished run goes on if its steps are raised
const COLORS = 8;
const DEFAULTS = { smooth: "0.6", x: "kl", y: "reward" };
const LISTED_EVENTS = 200; // the last ones: a long run may have thousands
const CHART_PX = 280; // width that a chart has at least

export class Overview {
  /** `onConnection(message)`: called with what is wrong with the connection, empty if nothing is. */
  constructor(container, runs, onConnection) {
    this.runs = runs.map((run, i) => ({ ...run, color: `color-${i % COLORS}`, rows: [], evaluations: [], events: [] }));
    this.onConnection = onConnection;
    this.charts = new Map(); // by the key of what they show
    this.layout = ""; // titles and keys of the sections that are on the page
    this.choices = {};
    this.cursor = null;
    this.events = []; // of the runs that are shown, by step
    this.against = new Chart({ onCursor: (x) => this.against.showAt(x), onOpen: () => {} });
    this.build(container);
    let width = 0;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width !== width) this.redraw();
      width = contentRect.width;
    }).observe(this.sections);
    this.poll();
  }

  build(container) {
    this.legend = element("fieldset", { class: "legend" }, element("legend", { class: "unseen" }, "Runs"));
    this.boxes = this.runs.map((run) => {
      const box = element("input", { type: "checkbox", change: () => this.chooseRuns() });
      const state = element("small");
      this.legend.append(
        element("label", { class: run.color, title: run.folder }, box, element("span", {}, shortName(run.name)), state),
      );
      return { box, state };
    });
    this.smoothing = element("input", { type: "range", min: "0", max: "0.98", step: "0.02", id: "smoothing" });
    this.smoothing.addEventListener("input", () => this.choose({ smooth: this.smoothing.value }));
    this.smoothingValue = element("output", { for: "smoothing" });
    this.status = element("p", { class: "cursor-text", id: "cursor-text" });
    const smoothing = element("label", { for: "smoothing" }, "Smoothing ", this.smoothing, this.smoothingValue);
    this.sections = element("div", { class: "sections" });
    this.selects = ["x", "y"].map((axis) =>
      element("select", { id: `axis-${axis}`, change: (event) => this.choose({ [axis]: event.target.value }) }),
    );
    const axes = ["x", "y"].map((axis, i) => element("label", { for: `axis-${axis}` }, `${axis} `, this.selects[i]));
    this.againstSection = element(
      "section",
      { "aria-labelledby": "against-title" },
      element("h2", { id: "against-title" }, "Any metric against any"),
      element("p", { class: "axes" }, axes),
      element("div", { class: "charts wide" }, this.against.element),
    );
    this.eventsSection = element(
      "section",
      { "aria-labelledby": "events-title" },
      element("h2", { id: "events-title" }, "Events"),
    );
    this.empty = element(
      "p",
      { class: "empty" },
      "No step is recorded yet. This page shows the first one as soon as it is.",
    );
    container.append(
      element("div", { class: "toolbar" }, this.legend, smoothing, this.status),
      this.empty,
      this.sections,
      this.againstSection,
      this.eventsSection,
    );
  }

  show(choices) {
    this.choices = choices;
    const shown = choices.runs === undefined ? null : choices.runs.split(",");
    this.boxes.forEach(({ box }, i) => (box.checked = shown === null || shown.includes(String(i))));
    this.smoothing.value = choices.smooth ?? DEFAULTS.smooth;
    this.smoothingValue.textContent = Number(this.smoothing.value).toFixed(2);
    this.redraw();
  }

  choose(changed) {
    go("overview", { ...this.choices, ...changed }, { replace: true });
  }

  chooseRuns() {
    const shown = this.boxes.flatMap(({ box }, i) => (box.checked ? [i] : []));
    this.choose({ runs: shown.length === this.runs.length ? "" : shown.join(",") || "none" });
  }

  /** Read new steps of all runs, again and again; of those that are finished more rarely. */
  async poll() {
    const now = Date.now();
    const due = this.runs.filter((run) => !run.isComplete || now - run.readAt >= POLL_FINISHED_MS);
    for (const run of due) run.readAt = now;
    const answers = await Promise.allSettled(due.map((run) => this.read(run)));
    this.onConnection(answers.find(({ reason }) => reason)?.reason.message ?? "");
    if (answers.some(({ value }) => value)) this.redraw();
    setTimeout(() => this.poll(), POLL_MS);
  }

  /** Whether anything about the run is new. */
  async read(run) {
    const state = () => JSON.stringify([run.isComplete, run.start, run.rows.length, run.records]);
    const before = state();
    let answer;
    do {
      answer = await api.metrics(run.run, run.rows.at(-1)?.step ?? -1, run.start ?? "");
      if (answer.start !== run.start) run.rows = []; // a resume repeats steps; the answer begins with the first
      run.start = answer.start;
      run.rows.push(...answer.rows);
    } while (answer.rows.length && !answer.finished); // an answer has a bound
    if (answer.records !== run.records) {
      [run.evaluations, run.events] = await Promise.all([api.evaluations(run.run), api.events(run.run)]);
      run.records = answer.records;
    }
    run.isComplete = answer.finished;
    return before !== state();
  }

  redraw() {
    this.runs.forEach((run, i) => (this.boxes[i].state.textContent = stateOf(run)));
    if (this.sections.parentElement.hidden) return; // no width to draw at; show() draws
    const runs = this.runs.filter((_, i) => this.boxes[i].box.checked);
    const events = runs.flatMap((run) =>
      [...run.events, ...lostServers(run.rows)].map((event) => ({ ...event, run: run.name, color: run.color })),
    );
    const drawn = sections(runs);
    const layout = JSON.stringify(drawn.map(({ title, charts }) => [title, charts.map(({ key }) => key)]));
    const focused = document.activeElement; // charts that move lose the focus
    if (layout !== this.layout) this.arrange(drawn);
    this.layout = layout;
    this.setColumns(drawn);
    const width = this.charts.values().next().value?.plot.clientWidth; // of all: measuring each one would be slow
    for (const chart of drawn.flatMap(({ charts }) => charts)) {
      this.charts.get(chart.key).update(chart, events, Number(this.smoothing.value), width);
    }
    this.empty.hidden = this.runs.some(({ rows, evaluations }) => rows.length || evaluations.length);
    this.drawAgainst(runs);
    if (this.sections.contains(focused)) focused.focus();
    this.events = events.sort((a, b) => a.step - b.step);
    this.listEvents();
    this.showCursor(this.cursor);
  }

  /** Put the charts on the page; those that were on it stay the same elements, with their focus. */
  arrange(drawn) {
    const charts = new Map();
    const parts = drawn.map(({ title, charts: own }, i) => {
      for (const { key } of own)
        charts.set(key, this.charts.get(key) ?? new Chart(this.actions((x) => this.showCursor(x))));
      const heading = element("h2", { id: `section-${i}` }, title);
      const figures = own.map(({ key }) => charts.get(key).element);
      return element(
        "section",
        { "aria-labelledby": `section-${i}` },
        heading,
        element("div", { class: "charts" }, figures),
      );
    });
    this.charts = charts;
    this.sections.replaceChildren(...parts);
  }

  /** All charts are equally wide. A section is as wide as its charts, so that short ones share a row. */
  setColumns(drawn) {
    const columns = Math.max(Math.floor(this.sections.clientWidth / CHART_PX), 1);
    this.sections.style.setProperty("--columns", columns);
    drawn.forEach(({ charts }, i) =>
      this.sections.children[i].style.setProperty("--span", Math.min(charts.length, columns)),
    );
  }

  actions(onCursor) {
    return { onCursor, onOpen: (step) => this.openStep(step) };
  }

  /** The conversations of a step, of the first run that is shown and has them. */
  openStep(step) {
    const run = this.runs.find((candidate, i) => this.boxes[i].box.checked && candidate.has_transcripts);
    if (run && step !== null) go("conversations", { run: run.run, first_step: step, last_step: step });
  }

  /** Show the values of all charts at a step; null: the last ones. */
  showCursor(step) {
    this.cursor = step;
    for (const chart of this.charts.values()) chart.showAt(step);
    const texts = this.events
      .filter((event) => event.step === step)
      .map((event) => ` \u00b7 ${beginning(escaped(event.text), 200)}`);
    this.status.textContent = step === null ? "" : `step ${number(step)}${texts.join("")}`;
  }

  drawAgainst(runs) {
    const metrics = names(runs);
    this.againstSection.hidden = metrics.length < 2;
    const chosen = ["x", "y"].map(
      (axis) => this.choices[axis] ?? (metrics.includes(DEFAULTS[axis]) ? DEFAULTS[axis] : metrics[0]),
    );
    this.selects.forEach((select, i) => {
      offer(select, [["", metrics.map((name) => [name, name])]], chosen[i] ?? "");
    });
    this.against.update(against(runs, ...chosen), [], 0, this.against.plot.clientWidth);
  }

  listEvents() {
    this.eventsSection.hidden = !this.events.length;
    const rows = this.events.slice(-LISTED_EVENTS).map(({ step, kind, run, color, text }) =>
      element(
        "tr",
        { class: kind === "alarm" ? "alarm" : "" },
        element("td", { class: "number" }, number(step)),
        element("td", {}, kind),
        element("td", { class: `value ${color}` }, run),
        element("td", {}, beginning(text, 400)),
      ),
    );
    const count = this.events.length;
    const text = `The last ${LISTED_EVENTS} of ${plural(count, "event")}`;
    const caption = count > LISTED_EVENTS && element("caption", {}, text);
    const view = table(["step", "kind", "run", "what happened"], rows, { class: "events" }, caption);
    this.eventsSection.replaceChildren(
      this.eventsSection.firstElementChild,
      element("div", { class: "table", tabindex: "0", role: "region", "aria-labelledby": "events-title" }, view),
    );
  }
}

function stateOf(run) {
  const steps = run.rows.length || run.steps;
  return `${run.program} \u00b7 ${plural(steps, "step")} \u00b7 ${run.isComplete ? "finished" : "running"}`;
}
