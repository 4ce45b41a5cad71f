// Builds elements. Text is only ever set as text nodes, so nothing that a model writes can become markup.

import { escaped, shortName } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. Attributes that are null, undefined or false are left out; functions become event listeners. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A folded part of the page. `children` is called at the first opening: most of them are never opened. */
export function folded(summary, children, attributes = {}) {
  const details = element("details", attributes, element("summary", {}, summary));
  details.addEventListener("toggle", () => details.append(...[children()].flat()), { once: true });
  return details;
}

/** A table. `heads`: labels of its columns, or elements; `rows`: lists of cells, or elements. */
export function table(heads, rows, attributes = {}, caption = null) {
  const head = (label) => (label instanceof Node ? label : element(label ? "th" : "td", label ? { scope: "col" } : {}, label));
  const row = (cells) => (cells instanceof Node ? cells : element("tr", {}, cells));
  const parts = [element("thead", {}, row(heads.filter((label) => label !== null).map(head)))];
  return element("table", attributes, caption, parts, element("tbody", {}, rows.map(row)));
}

/** Offer groups [label, [[value, label], …]] in a field, those without a label as they are, and select a value. */
export function offer(field, groups, value = field.value, label = value) {
  const key = JSON.stringify([groups, value]);
  if (field.offered !== key) {
    field.offered = key;
    const views = ([title, options]) => {
      const list = options.map(([name, shown]) => element("option", { value: name }, shortName(shown)));
      return title ? [element("optgroup", { label: shortName(title) }, list)] : list;
    };
    field.replaceChildren(...groups.flatMap(views));
  }
  select(field, value, label);
}

/** Select a value also if it is not offered: an address may name what is not there. */
export function select(field, value, label = value) {
  if (value && ![...field.options].some((option) => option.value === value))
    field.append(element("option", { value }, shortName(label)));
  field.value = value;
  if (field.selectedIndex < 0) field.selectedIndex = 0;
}

/** Show what is wrong, or with an empty message nothing. */
export function showFault(place, message) {
  if (place.textContent === message) return;
  place.replaceChildren(...(message ? [element("p", { class: "error", role: "alert" }, message)] : []));
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : escaped(String(child)));
  }
  return node;
}
