// The tokens of trained turns: those of a rollout, then of a future's later turns, if they were trained too; shaded by one of their values; the values of the current one are a line.

import { element } from "./dom.js";
import { number, plural, signed } from "./format.js";
import { beginning, marked } from "./text.js";

const SHOWN = 2_000; // tokens of a turn at first; a button adds as many
export const SHADES = { probability: "probability", ratio: "ratio", advantage: "advantage" };
const LEGENDS = {
  probability: "Strong: the server found the token improbable (below 1 %).",
  ratio: "Probability after the update over the sampled one. Strong: 20 % away from 1; green above, red below.",
  advantage: "Strong: 2 and more; green above 0, red below.",
};
const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };

/**
 * `turns`: of one rollout, as the server answers, of which those of the shown `future` are shown; `shade`: a key of
 * SHADES; `choose(shade)` changes it.
 */
export function tokensView(turns, future, shade, choose) {
  const select = element(
    "select",
    { id: "tokens-shade", change: () => choose(select.value) },
    Object.entries(SHADES).map(([value, label]) => element("option", { value }, label)),
  );
  select.value = shade;
  return element(
    "div",
    { class: "token-turns" },
    element(
      "p",
      { class: "token-legend" },
      element("label", { for: "tokens-shade" }, "Shade by "),
      select,
      element("span", {}, LEGENDS[shade]),
    ),
    turns
      .filter((turn) => turn.future === null || turn.future === future)
      .map((turn) => turnView(turn, labelOf(turn, turns), shade)),
    turns.every((turn) => turn.future === null)
      ? element("p", { class: "token-legend" }, "Later turns of futures have tokens here if they were trained.")
      : null,
  );
}

function labelOf({ future, turn }, turns) {
  if (future !== null) return `Tokens of turn ${turn + 1}, in future ${future}`;
  return turns.some((other) => other.turn > 0) ? `Tokens of turn ${turn + 1}` : "Tokens of the turn";
}

function turnView(turn, label, shade) {
  const count = turn.pieces.length;
  const hint = `${plural(count, "token")}; point at one, or use the arrows.`;
  const value = element("p", { class: "token-value", role: "status" }, hint);
  const attributes = { class: "token-list", role: "listbox", "aria-label": label, "aria-orientation": "horizontal" };
  const list = element("div", attributes);
  const more = element("button", { type: "button", class: "more", click: () => show() });
  const describe = ({ target }) => {
    const at = [...list.children].indexOf(target.closest(".token"));
    if (at >= 0) value.replaceChildren(...valuesOf(turn, at));
  };
  const show = () => {
    const start = list.childElementCount;
    const end = Math.min(start + SHOWN, count);
    for (let at = start; at < end; at += 1) list.append(tokenView(turn, at, shade));
    more.textContent = `Show more: ${plural(count - end, "token")}`;
    more.hidden = end === count;
  };
  list.addEventListener("pointerover", describe);
  list.addEventListener("focusin", describe);
  list.addEventListener("keydown", (event) => moveFocus(event, list));
  show();
  return element("div", { class: "token-turn" }, element("h4", {}, label), value, list, more);
}

/** A token: text, never markup. What would not show, a line's end too, has a sign. */
function tokenView(turn, at, shade) {
  const isTrained = Boolean(turn.trained?.[at]);
  const [strength, tone] = shadeOf(turn, at, shade);
  const view = element(
    "span",
    {
      class: ["token", tone, isTrained ? "" : "untrained"].filter(Boolean).join(" "),
      role: "option",
      "aria-selected": "false",
      tabindex: at === 0 ? "0" : "-1",
    },
    marked(turn.pieces[at].replaceAll("\n", "\u21b5\n") || "\u2205"),
  );
  view.style.setProperty("--strength", `${Math.round(100 * Math.min(Math.sqrt(strength), 1))}%`); // small ones show too
  return view;
}

/** How strongly a token is shaded, from 0 to 1, and in which tone. */
function shadeOf(turn, at, shade) {
  const value = valueOf(turn, at, shade);
  if (value === null) return [0, ""];
  if (shade === "probability") return [Math.log(value) / Math.log(0.01), "warn"];
  const size = shade === "ratio" ? Math.log(value) / Math.log(1.2) : value / 2;
  return [Math.abs(size), size < 0 ? "loss" : "gain"];
}

function valueOf(turn, at, shade) {
  const value = turn[{ probability: "log_prob", ratio: "log_ratio", advantage: "advantage" }[shade]]?.[at];
  if (typeof value !== "number") return null;
  return shade === "advantage" ? value : Math.exp(value);
}

function valuesOf(turn, at) {
  const [probability, ratio, advantage] = Object.keys(SHADES).map((shade) => valueOf(turn, at, shade));
  const facts = [
    `token ${(at + 1).toLocaleString("en")}`,
    probability === null ? "not sampled" : `probability ${number(probability, 3)}`,
    ratio === null ? null : `ratio ${ratio.toFixed(4)}`,
    advantage === null ? null : `advantage ${signed(advantage)}`,
    `weights of step ${turn.version[at]}`,
    turn.trained?.[at] ? null : "not trained",
  ];
  const piece = beginning(turn.pieces[at].replaceAll("\n", "\u21b5"));
  return [element("b", { dir: "auto" }, marked(piece)), ` \u00b7 ${facts.filter(Boolean).join(" \u00b7 ")}`];
}

/** The arrows go from token to token; the keys of the page keep their meaning elsewhere. */
function moveFocus(event, list) {
  const step = STEPS[event.key];
  if (step === undefined || event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const tokens = [...list.children];
  const at = tokens.indexOf(document.activeElement);
  const next = tokens[Math.min(Math.max(at + step, 0), tokens.length - 1)];
  for (const token of tokens) token.tabIndex = token === next ? 0 : -1;
  next.focus();
}
