// One message of a conversation: its text, and folded what users do not see of it.

import { element, folded } from "./dom.js";
import { plural, signed } from "./format.js";
import { beginning, boundary, marked, shortName, thoughtsOf } from "./text.js";

const ROLES = ["system", "user", "assistant", "tool"];
const FOLDED_LENGTH = 4_000; // characters of a text that are shown at first
const MORE_LENGTH = 100_000; // characters that a click adds: a browser lays out millions only slowly

/** What belongs to messages of a row beside their text, by the index of the message: {raw, isCut, reward, secret}. */
export function extrasOf(row, firstTurn) {
  const extras = new Map();
  const replies = row.messages.flatMap(({ role }, at) => (role === "assistant" && at >= firstTurn ? [at] : []));
  replies.forEach((at, turn) => {
    const extra = { raw: row.turns?.[turn], isCut: row.cut?.includes(turn), reward: row.turn_rewards?.[turn] };
    extras.set(at, extra);
  });
  for (const [at, secret] of Object.entries(row.private ?? {}))
    extras.set(Number(at), { ...extras.get(Number(at)), secret });
  return extras;
}

/** `next`: the message after it, which tells a call of a tool from a reply. */
export function messageView(message, next, { raw, isCut, reward, secret } = {}) {
  const isCall = message.role === "assistant" && next?.role === "tool";
  const tags = [
    isCut && element("span", { class: "tag warn" }, "cut at its token budget"),
    reward ? element("span", { class: "tag" }, `turn reward ${signed(reward)}`) : null,
  ];
  return element(
    "article",
    { class: `message ${ROLES.includes(message.role) ? message.role : ""}` },
    element("header", {}, element("h4", {}, isCall ? "assistant calls a tool" : shortName(message.role)), tags),
    thoughtsOf(raw ?? "").map((thought) => foldedText("Thought", thought)),
    secret ? secretView(secret) : null,
    contentOf(message, isCall),
    (message.tool_calls ?? []).map(callView),
  );
}

function contentOf(message, isCall) {
  const content = textOf(message.content);
  if (isCall && content) return foldedText("Call", content);
  if (message.role === "tool") return foldedText(`Result, ${plural(content.length, "character")}`, content);
  if (message.role === "system") return foldedText("System prompt", content);
  return content ? textBlock(content) : null;
}

/** A block of text in the direction of its script; only the beginning of a long one, with a button for more. */
export function textBlock(text, className = "text") {
  const content = element("div", { class: className, dir: "auto" });
  if (text.length <= FOLDED_LENGTH) {
    content.append(...marked(text));
    return content;
  }
  let shown = 0;
  const button = element("button", { type: "button", class: "more", click: () => show(MORE_LENGTH) });
  const show = (length) => {
    const end = boundary(text, shown + length);
    content.append(...marked(text.slice(shown, end)));
    shown = end;
    const remaining = text.length - shown;
    const next = Math.min(remaining, MORE_LENGTH);
    button.textContent = `Show more: ${next.toLocaleString("en")} of ${remaining.toLocaleString("en")} characters`;
    if (!remaining) button.remove();
  };
  show(FOLDED_LENGTH);
  return element("div", {}, content, button);
}

/** A text that is folded, its beginning in the summary. */
export function foldedText(label, text) {
  const summary = [element("b", {}, label), element("span", { class: "beginning" }, beginning(text))];
  return folded(summary, () => textBlock(text, "text aside"), { class: "folded" });
}

function callView(call) {
  const { name, arguments: values } = call.function ?? call;
  return foldedText(`Call of ${shortName(name)}`, textOf(values));
}

/** What only the simulated user knew when it wrote the message, by name: its thought, its current answer. */
function secretView(secret) {
  return Object.entries(secret)
    .filter(([, value]) => value)
    .map(([name, value]) => foldedText(`User's ${shortName(name.replaceAll("_", " "))}`, textOf(value)));
}

/** Contents may also be lists of parts, and arguments objects. */
export function textOf(value) {
  if (typeof value === "string") return value;
  return value === null || value === undefined ? "" : JSON.stringify(value, null, 2);
}
