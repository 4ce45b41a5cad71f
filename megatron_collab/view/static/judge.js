// The judge check: how far the judge of a metric agrees with people, and about which conversations it does not.

import * as api from "./api.js";
import { go, hashOf } from "./address.js";
import { Chart } from "./chart.js";
import { element, offer, showFault, table } from "./dom.js";
import { decimal, interval, number, plural } from "./format.js";
import { nameOf, titleOf } from "./pairs.js";
import { shortName } from "./text.js";

const SOURCES = { ratings: "blind test", labels: "file of labels" };
const NOUNS = { ratings: "rating", labels: "label" };

/** By source and figure, what it is. */
const MEANINGS = {
  ratings: {
    agreement: "share of verdicts that are the judge's too; it calls equal scores a tie",
    "agreement without ties": "the same, of pairs that neither calls a tie",
    kappa: "agreement beyond chance (Cohen), with ties; 1: always, 0: as by chance",
    "bias by length": "how much more often than the raters the judge prefers the longer conversation; a tie counts half",
    "raters' choice of the left": "0.5 without a bias by position; the judge sees single conversations and no positions",
  },
  labels: {
    "area under the ROC curve": "chance that a yes has a higher score than a no; 0.5: as by chance",
    agreement: "share of labels that are the judge's too; scores from 0.5 on are a yes",
    kappa: "agreement beyond chance (Cohen); 1: always, 0: as by chance",
    "Spearman's correlation": "of ranks: whether both put conversations in the same order",
    "Pearson's correlation": "of values: whether one is a linear function of the other",
    "judge less people": "mean score less mean label",
    "bias by length": "Spearman's correlation of score and length, less that of label and length; 0: no bias",
  },
};

export class Judge {
  constructor(container, runs) {
    this.runs = runs;
    this.chart = new Chart({ onCursor: (x) => this.chart.showAt(x), onOpen: () => {} });
    this.build(container);
  }

  build(container) {
    this.fields = Object.fromEntries(["run", "source", "metric"].map((name) => [name, this.select(name)]));
    const options = this.runs.map(({ run, name }) => element("option", { value: run }, shortName(name)));
    this.fields.run.append(...options);
    const labels = { run: "Run", source: "Labels of people", metric: "Metric" };
    const lines = Object.entries(labels).map(([name, label]) => {
      const isHidden = name === "run" && this.runs.length < 2;
      return element("label", { for: `judge-${name}`, hidden: isHidden }, label, this.fields[name]);
    });
    this.fault = element("div", {});
    this.notes = element("div", { class: "notes", role: "status" });
    this.results = element("div", { class: "results" });
    this.curve = element("div", { class: "charts wide" }, this.chart.element);
    container.append(
      element(
        "div",
        { class: "judge" },
        element("h2", {}, "How far does the judge agree with people?"),
        element("form", { "aria-label": "Judge check", submit: (event) => event.preventDefault() }, lines),
        this.fault,
        this.notes,
        this.results,
      ),
    );
  }

  select(name) {
    const field = element("select", { id: `judge-${name}`, name });
    const cleared = { run: { source: "", metric: "" }, source: { metric: "" } }[name]; // others have other ones
    field.addEventListener("input", () =>
      go("judge", { ...this.choices, ...cleared, [name]: field.value }, { replace: true }),
    );
    return field;
  }

  async show(choices) {
    this.choices = choices;
    this.request?.abort();
    const request = (this.request = new AbortController());
    const { run = String(this.runs[0].run), source = "", metric = "" } = choices;
    this.fields.run.value = run;
    for (const part of [this.fault, this.notes, this.results]) part.replaceChildren(); // they are of other choices
    try {
      const answer = await api.judge(run, source, metric, request.signal);
      if (request === this.request) this.draw(answer);
    } catch (error) {
      if (error.name === "AbortError") return;
      showFault(this.fault, error.message);
    }
  }

  draw(answer) {
    const { sources, source, metrics, metric } = answer;
    const sourceOptions = Object.entries(SOURCES).map(([name, label]) => [name, `${label} (${sources[name]})`]);
    const metricOptions = metrics.map(({ name, judged }) => [name, judged ? name : `${name} (no judge)`]);
    offer(this.fields.source, [["", sourceOptions]], source);
    offer(this.fields.metric, [["", metricOptions]], metric);
    if (!sources[source]) {
      this.results.replaceChildren(noLabelsView());
      return;
    }
    this.notes.replaceChildren(...notesOf(answer).map((text) => element("p", {}, text)));
    const { bins } = answer.calibration;
    this.results.replaceChildren(
      figuresView(answer),
      ...(bins.length ? [this.curve] : []),
      ...(answer.disagreements.length ? [this.disagreementsView(answer)] : []),
    );
    if (bins.length) this.drawCurve(answer);
  }

  drawCurve({ calibration: { bins, error }, metric }) {
    const points = bins.map(({ score, label }) => ({ x: score, y: label.value, low: label.low, high: label.high }));
    const title = `Calibration of ${shortName(metric)}: expected error ${decimal(error)}`;
    const series = [{ label: "people's mean label", color: "color-0", points }];
    const chart = { key: "calibration", title, kind: "points", x: "judge's score", isSquare: true, series };
    this.chart.update(chart, [], 0, this.chart.plot.clientWidth);
  }

  disagreementsView({ disagreements, source }) {
    const heads = ["task", "conversation", "rater", "people", "judge", "apart"];
    const rows = disagreements.map((of) => [
      element("td", {}, element("a", { href: this.linkTo(of) }, shortName(of.task) || "(no id)")),
      element("td", {}, source === "ratings" ? of.sides.map((side) => this.nameOf(side)).join(", ") : placeOf(of)),
      element("td", {}, shortName(of.rater)),
      element("td", {}, source === "ratings" ? this.verdictText(of) : number(of.people)),
      element("td", {}, of.scores.map(decimal).join(", ")),
      element("td", {}, decimal(of.gap)),
    ]);
    return element(
      "section",
      { "aria-labelledby": "disagreements-title" },
      element("h2", { id: "disagreements-title" }, "Where judge and people disagree most"),
      element(
        "div",
        { class: "table disagreements", tabindex: "0", role: "region", "aria-labelledby": "disagreements-title" },
        table(heads, rows),
      ),
    );
  }

  nameOf(side) {
    return shortName(nameOf(side, this.runs));
  }

  verdictText({ people, sides }) {
    const better = { left: sides[0], right: sides[1] }[people];
    return better === undefined ? "equal" : `${this.nameOf(better)} is better`;
  }

  /** The conversation: of a step of training among the conversations, others in a comparison. */
  linkTo({ task, sides, run, part, step, position, rollout, future, number: place }) {
    const sent = String(task).toWellFormed(); // an address has no halves of surrogate pairs
    if (sides) return hashOf("compare", { left: sides[0], right: sides[1], task: sent });
    if (step !== undefined) return hashOf("conversations", { run, step, position, rollout, future });
    const side = `${run}:${part}`;
    return hashOf("compare", { left: side, right: side, task: sent, l: place || "", r: place || "" });
  }
}

function noLabelsView() {
  return element(
    "p",
    { class: "empty" },
    "There are no labels by people yet. Rate conversations in the ",
    element("a", { href: "#blind" }, "blind test"),
    ", or start megatron-collab view RUN --labels FILE.",
  );
}

/** Which versions of the judge answered, and what is left out. */
function notesOf({ versions, omitted, source }) {
  const notes = [];
  const counted = versions.map(([version, count]) => `${shortName(version)} (${count})`).join(", ");
  if (versions.length) notes.push(`Answers of the judge by version: ${counted}.`);
  if (versions.length > 1) notes.push("Scores of different versions may not be comparable.");
  const reasons = Object.entries(omitted).map(([reason, count]) => `${plural(count, NOUNS[source])} ${reason}`);
  if (reasons.length) notes.push(`Left out: ${reasons.join(", ")}.`);
  return notes;
}

function figuresView({ figures, source }) {
  if (!figures.length)
    return element("p", { class: "empty" }, `None of these ${NOUNS[source]}s can be compared with a score.`);
  const heads = ["figure", "value", `${NOUNS[source]}s`, "tasks", "what it is"];
  const rows = figures.map((figure) => [
    element("th", { scope: "row" }, figure.name),
    element("td", {}, interval(figure)),
    element("td", {}, number(figure.count)),
    element("td", {}, number(figure.tasks)),
    element("td", {}, MEANINGS[source][figure.name]),
  ]);
  const caption = element("caption", {}, "With 95 % intervals over tasks, if the data determine them");
  return element(
    "div",
    { class: "differences", tabindex: "0", role: "region", "aria-label": "Figures" },
    table(heads, rows, {}, caption),
  );
}

function placeOf({ part, rollout, future }) {
  return shortName(`${titleOf(part)}, rollout ${rollout}${future ? `, future ${future}` : ""}`);
}
