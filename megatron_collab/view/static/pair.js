// Two conversations about a task beside each other: once what they share, then a column for each.

import { element } from "./dom.js";
import { decimal, plural } from "./format.js";
import { promptLength, sharedLength } from "./group.js";
import { shortName } from "./text.js";
import { endingView, messagesView, scoresView } from "./tree.js";

/** `sides`: of each {title, rows, number, name, choose}: conversations, which is shown, and how another is chosen. */
export function pairView(sides) {
  const rows = sides.map((side) => side.rows[side.number]);
  const shared = sharedLength(rows.map(({ messages }) => messages));
  return element(
    "div",
    { class: "messages" },
    part(rows[0], 0, shared),
    shared ? partingView(rows, shared) : null,
    element(
      "div",
      { class: "beside" },
      sides.map((side, at) => columnView(side, rows[at], shared)),
    ),
  );
}

/** The messages alone of two conversations, as a blind test shows them. */
export function blindPairView(conversations) {
  const rows = conversations.map((messages) => ({ messages }));
  const shared = sharedLength(conversations);
  const columns = rows.map((row, at) =>
    element(
      "section",
      { class: "column", "aria-label": ["Left", "Right"][at] },
      element("h3", {}, ["Left", "Right"][at]),
      part(row, shared, row.messages.length),
    ),
  );
  return element(
    "div",
    { class: "messages" },
    part(rows[0], 0, shared),
    shared ? partingView(rows, shared) : null,
    element("div", { class: "beside" }, columns),
  );
}

function columnView(side, row, shared) {
  return element(
    "section",
    { class: "column", "aria-label": side.title },
    element("h3", {}, side.title),
    side.rows.length > 1 ? selectView(side) : null,
    part(row, shared, row.messages.length),
    endingView(row),
    scoresView(row),
  );
}

function selectView({ rows, number, name, choose }) {
  const id = `conversation-${name}`;
  const label = (row, at) => `${at + 1} of ${rows.length}, ${shortName(row.ending ?? "")} ${decimal(row.reward)}`;
  const select = element(
    "select",
    { id, change: () => choose(select.value === "0" ? "" : select.value) },
    rows.map((row, at) => element("option", { value: at }, label(row, at))),
  );
  select.value = String(number);
  return element("p", { class: "compare" }, element("label", { for: id }, "Conversation "), select);
}

function partingView(rows, shared) {
  const isSame = rows.every(({ messages }) => messages.length === shared);
  const text = isSame ? "The two have all messages in common." : `Above: ${plural(shared, "message")} that both have.`;
  return element("p", { class: "parting" }, text);
}

function part(row, from, to) {
  return messagesView(row, from, to, promptLength([row]));
}
