// The form that filters and sorts the list of conversations.

import { element, offer, select } from "./dom.js";

const DELAY_MS = 250; // after the last key, so that not every letter asks the server
export const PLACES = ["step", "task", "ending", "advantage"]; // what a list can be sorted by beside numbers of a row
const ORDERS = {
  standard_error: "standard error (futures disagree)",
  surprise: "surprise (\u2212log p per token)",
};
const TEXTS = [
  ["words", "Words", "text", "all of them occur in the group"],
  ["task", "Task", "text", ""],
  ["first_step", "From step", "number", ""],
  ["last_step", "To step", "number", ""],
];

export class Filters {
  /** `onChange(choices)` is called with all choices of the form, the empty ones too. */
  constructor(runs, onChange) {
    this.fields = {};
    this.onChange = onChange;
    this.timer = 0;
    const send = (event) => {
      event.preventDefault();
      this.send();
    };
    this.element = element("form", {
      class: "filters",
      role: "search",
      "aria-label": "Filter conversations",
      submit: send,
    });
    this.runs = runs.filter(hasConversations);
    const options = this.runs.map((run) => element("option", { value: run.run }, run.name));
    this.add("run", "Run", element("select", {}, options)).hidden = options.length < 2;
    this.add("evaluation", "Conversations of", element("select"));
    for (const [name, label, type, help] of TEXTS)
      this.add(name, label, element("input", { type, min: type === "number" && "0", title: help, placeholder: help }));
    this.add("ending", "Ending", element("select"));
    this.add("metric", "Metric", element("select"));
    this.add("low", "At least", element("input", { type: "number", step: "any" }));
    this.add("high", "At most", element("input", { type: "number", step: "any" }));
    this.add("sort", "Sort by", element("select"));
    this.add("descending", "Descending", element("input", { type: "checkbox", value: "1" }));
    this.element.append(element("button", { type: "button", class: "reset", click: () => this.reset() }, "Reset"));
    this.setOptions([], [], []);
  }

  add(name, label, field) {
    field.id = `filter-${name}`;
    field.name = name;
    field.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.send(), field.matches("[type=text], [type=number]") ? DELAY_MS : 0);
    });
    this.fields[name] = field;
    const line = element("label", { class: `filter-${name}`, for: field.id }, element("span", {}, label), field);
    this.element.append(line);
    return line;
  }

  /** What the run offers: endings and evaluations to choose, and columns for the range and the order. */
  setOptions(endings, columns, evaluations) {
    const { evaluation, run } = this.fields;
    const isTrained = this.runs.some(({ run: of, has_transcripts: has }) => String(of) === run.value && has);
    const same = (names) => names.map((name) => [name, name]);
    offer(evaluation, [["", [...(isTrained ? [["", "training"]] : []), ...same(evaluations)]]]);
    evaluation.closest("label").hidden = evaluation.options.length < 2;
    offer(this.fields.ending, [["", [["", "any"], ...same(endings)]]]);
    offer(this.fields.metric, [["", same(columns)]]);
    offer(this.fields.sort, [["", [...PLACES, ...columns].map((name) => [name, ORDERS[name] ?? name])]]);
  }

  /** Show choices of the address. A field that is being edited is left alone. */
  show(choices) {
    const range = rangeOf(choices);
    const values = { metric: this.fields.metric.value, sort: PLACES[0], ...choices, ...range };
    for (const [name, field] of Object.entries(this.fields)) {
      if (field === document.activeElement && field.matches("[type=text], [type=number]")) continue;
      const value = values[name] ?? "";
      if (name === "descending") field.checked = value === "1";
      else if (field.tagName === "SELECT") select(field, value);
      else field.value = value;
    }
  }

  send() {
    clearTimeout(this.timer);
    const value = (name) => this.fields[name].value.trim();
    const choices = {};
    for (const name of ["run", "evaluation", "words", "task", "first_step", "last_step", "ending", "sort"])
      choices[name] = value(name);
    choices.descending = this.fields.descending.checked ? "1" : "";
    if (choices.sort === PLACES[0] && !choices.descending) choices.sort = ""; // the order that it has anyway
    for (const bound of ["low", "high"]) if (value(bound)) choices[`${bound}.${value("metric")}`] = value(bound);
    this.onChange(choices);
  }

  reset() {
    this.onChange({ run: this.fields.run.value, evaluation: this.fields.evaluation.value });
    this.fields.words.focus();
  }
}

/** Whether the view has conversations of a run to show. */
export function hasConversations({ has_transcripts: has, evaluations }) {
  return has || evaluations.length > 0;
}

/** The metric of a range in the address, low.NAME=… and high.NAME=…, with its bounds. */
function rangeOf(choices) {
  const range = {};
  for (const [key, value] of Object.entries(choices)) {
    const [, bound, metric] = key.match(/^(low|high)\.(.+)$/s) ?? [];
    if (bound) Object.assign(range, { metric, [bound]: value });
  }
  return range;
}
