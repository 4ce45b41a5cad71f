// Keys of the page. A key does nothing while a field is edited, or together with Ctrl, Alt or Meta.

import { element } from "./dom.js";

const SEQUENCE_MS = 1_000; // within this time `g` and `o` are a sequence

/** The keys as events name them, and how the help names them. */
const LABELS = {
  ArrowLeft: "\u2190",
  ArrowRight: "\u2192",
  "Shift+ArrowLeft": "Shift \u2190",
  "Shift+ArrowRight": "Shift \u2192",
};

/** `bindings`: [keys, help, action]; keys are separated by a space if they are pressed one after the other. */
export function setUpKeyboard(bindings, helpList) {
  for (const [keys, help] of bindings) {
    const marks = keys.split(" ").map((key) => element("kbd", {}, LABELS[key] ?? key));
    helpList.append(element("div", {}, element("dt", {}, marks), element("dd", {}, help)));
  }
  const actions = new Map(bindings.map(([keys, , action]) => [keys, action]));
  let before = { key: "", time: 0 };
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey || isEdited(event.target)) return;
    const key = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
    const isSequence = event.timeStamp - before.time < SEQUENCE_MS;
    const action = (isSequence && actions.get(`${before.key} ${key}`)) || actions.get(key);
    before = { key, time: event.timeStamp };
    if (action && action() !== false) event.preventDefault();
  });
}

/** Whether keys belong to the element: it is a field, or something in a dialog. */
function isEdited(target) {
  return target.closest?.("input, select, textarea, dialog") !== null;
}
