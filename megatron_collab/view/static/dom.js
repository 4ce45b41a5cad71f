// Builds elements. Text is only ever set as text nodes, so nothing that a model writes can become markup.

import { escaped } from "./text.js";

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
