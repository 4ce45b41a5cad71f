// A group as a tree: the prompt, the trained turns beside each other, the futures of the chosen turn.

import { element, table } from "./dom.js";
import { decimal, mean, plural, signed } from "./format.js";
import { advantage, means, metricNames, promptLength, rolloutsOf, sharedLength } from "./group.js";
import { extrasOf, foldedText, messageView, textOf } from "./message.js";
import { beginning, escaped, marked, shortName } from "./text.js";

/**
 * The view of a group. `chosen`: {rollout, future, other}, the last one the future to compare with, or null;
 * `link(choice)` is the address of another choice, `choose(choice)` goes to it; `talk`: the address of a talk about the
 * task; `toggleTokens(rollout)` shows the tokens of a rollout, which are not part of the tree.
 */
export function treeView(group, chosen, link, choose, talk, toggleTokens) {
  if (!group.rows.length) return element("p", { class: "empty" }, "This group has no futures.");
  const rollouts = rolloutsOf(group.rows);
  const rollout = rollouts.find((candidate) => candidate.rollout === chosen.rollout) ?? rollouts[0];
  const row = rollout.rows.find(({ future }) => future === chosen.future) ?? rollout.rows[0];
  const other = rollout.rows.find(({ future }) => future === chosen.other && future !== row.future) ?? null;
  const start = promptLength(group.rows);
  return element(
    "div",
    { class: "tree" },
    headView(group, rollouts, talk),
    promptView(group.rows[0], start),
    element("h3", { id: "turns-title" }, turnsTitle(group, rollouts)),
    element(
      "ol",
      { class: "turns", "aria-labelledby": "turns-title" },
      rollouts.map((candidate) =>
        turnView(candidate, rollouts, start, candidate === rollout, link, group.has_tokens && toggleTokens),
      ),
    ),
    group.has_tokens ? element("div", { class: "tokens" }) : null,
    futuresView(
      { rows: rollout.rows, title: `Futures of rollout ${rollout.rollout}`, from: start + 1, turn: start },
      { row, other },
      choose,
    ),
  );
}

/** Of an evaluation no turn is trained. */
function turnsTitle({ evaluation }, rollouts) {
  const [single, several] = evaluation ? ["First reply", "First replies"] : ["Trained turn", "Trained turns"];
  return rollouts.length > 1 ? several : single;
}

function headView(group, rollouts, talk) {
  const [first] = group.rows;
  const rewards = rollouts.map(({ rows }) => rows[0].reward);
  const goal = group.goal ?? first.goal;
  const user = group.user ?? first.user;
  const facts = [
    ...(group.evaluation ? [`evaluation ${shortName(group.evaluation)}`] : []),
    `step ${group.step}`,
    `group ${group.position}`,
    plural(rollouts.length, "rollout"),
    plural(group.rows.length, "future"),
    `mean reward ${decimal(mean(rewards))}`,
    ...(user ? [`user ${shortName(textOf(user))}`] : []),
  ];
  return element(
    "header",
    { class: "group-head" },
    element("h2", {}, shortName(group.task)),
    element("p", { class: "facts" }, facts.join(" \u00b7 "), " \u00b7 ", element("a", { href: talk }, "talk about it")),
    goal ? foldedText("Hidden goal", textOf(goal)) : null,
  );
}

function promptView(row, start) {
  const messages = row.messages.slice(0, start);
  const extras = extrasOf(row, start);
  const views = messages.map((message, at) => messageView(message, messages[at + 1], extras.get(at)));
  return element(
    "section",
    { class: "prompt", "aria-labelledby": "prompt-title" },
    element("h3", { id: "prompt-title" }, "Prompt"),
    views,
  );
}

/** The trained turn of a rollout with its reward. */
function turnView(rollout, rollouts, start, isChosen, link, toggleTokens) {
  const [row] = rollout.rows;
  const message = row.messages[start];
  const address = link({ rollout: rollout.rollout, future: 0 });
  return element(
    "li",
    { class: isChosen ? "turn chosen" : "turn", "data-rollout": rollout.rollout },
    element(
      "p",
      { class: "turn-head" },
      element("a", { href: address, "aria-current": isChosen ? "true" : null }, `Rollout ${rollout.rollout}`),
      advantageView(advantage(rollout, rollouts)),
      toggleTokens ? tokensButton(rollout.rollout, toggleTokens) : null,
    ),
    element("p", { class: "rescored" }), // filled while a setting of the reward is changed
    partsView(rollout.rows),
    message
      ? messageView(message, row.messages[start + 1], extrasOf(row, start).get(start))
      : element("p", { class: "empty" }, "No reply."),
  );
}

function tokensButton(rollout, toggleTokens) {
  const attributes = {
    type: "button",
    class: "to-tokens",
    id: `tokens-of-${rollout}`,
    "aria-label": `Tokens of rollout ${rollout}`,
    "aria-expanded": "false",
    click: () => toggleTokens(rollout),
  };
  return element("button", attributes, "Tokens");
}

function advantageView(gain) {
  if (gain === null) return null;
  const sign = Math.sign(Number(gain.toFixed(3))); // of what is shown
  const className = { "-1": "loss", 0: "", 1: "gain" }[sign];
  return element("span", { class: className, title: "the reward less the mean of the group" }, `advantage ${signed(gain)}`);
}

/** The reward with its standard error; by metric the mean score over the futures and its weighted part, if recorded. */
export function partsView(rows) {
  const names = metricNames(rows);
  const scores = means(rows, names, ({ scores: values }) => values);
  const parts = means(rows, names, ({ parts: values }) => values);
  const hasParts = [...parts.values()].some((part) => part !== null);
  const heads = ["", "score", ...(hasParts ? ["weighted"] : [])];
  const [{ reward, standard_error: error }] = rows;
  const rewardText = typeof error === "number" ? `${decimal(reward)} \u00b1 ${decimal(error)}` : decimal(reward);
  const [head, value] = [element("th", { scope: "row" }, "reward"), { colspan: heads.length - 1 }];
  const lines = names.map((name) => [
    element("th", { scope: "row", title: escaped(name) }, shortName(name)),
    element("td", {}, decimal(scores.get(name))),
    hasParts ? element("td", {}, signed(parts.get(name))) : null,
  ]);
  const first = element("tr", { class: "reward" }, head, element("td", value, rewardText));
  return table(heads, [first, ...lines], { class: "parts" });
}

/**
 * Futures in tabs: `row` is shown, `other` is the one to compare it with, or null. `futures`: their rows, their title and
 * what is below it; their messages are shown `from` this one on, the raw replies begin at `turn`; `prefix`: of their ids.
 */
export function futuresView(futures, { row, other }, choose) {
  const { rows, title, head = null, prefix = "" } = futures;
  return element(
    "section",
    { class: "futures", "aria-labelledby": `${prefix}futures-title` },
    element("h3", { id: `${prefix}futures-title` }, title),
    head,
    element(
      "div",
      {
        class: "tabs",
        role: "tablist",
        "aria-label": "Futures",
        keydown: (event) => moveTab(event, rows, row, choose),
      },
      rows.map((candidate) => tabView(candidate, candidate === row, prefix, choose)),
    ),
    element(
      "div",
      {
        id: `${prefix}future`,
        role: "tabpanel",
        "aria-labelledby": `${prefix}tab-${row.future}`,
        tabindex: "0",
      },
      endingView(row),
      scoresView(row),
      rows.length > 1 ? compareView(rows, row, other, prefix, choose) : null,
      other ? besideView(row, other, futures) : alongView(row, futures),
    ),
  );
}

function tabView(row, isChosen, prefix, choose) {
  const attributes = {
    type: "button",
    role: "tab",
    id: `${prefix}tab-${row.future}`,
    "aria-selected": isChosen ? "true" : "false",
    "aria-controls": `${prefix}future`,
    tabindex: isChosen ? "0" : "-1",
    click: () => choose({ future: row.future }),
  };
  return element("button", attributes, `Future ${row.future}`, element("small", {}, shortName(row.ending ?? "")));
}

/** Arrows within the tabs, as the pattern for tabs has it. */
function moveTab(event, rows, row, choose) {
  const change = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = rows[rows.indexOf(row) + change];
  if (!change || event.shiftKey) return;
  event.preventDefault();
  if (next) choose({ future: next.future });
}

export function endingView(row) {
  return element(
    "p",
    { class: "ending" },
    "Ended by ",
    element("b", {}, shortName(row.ending ?? "nothing")),
    row.error ? [": ", element("span", { class: "error-text" }, marked(beginning(row.error, 400)))] : null,
  );
}

/** Scores of a future, each with the judge's reason and raw answer. */
export function scoresView(row) {
  const names = metricNames([row]);
  if (!names.length) return element("p", { class: "empty" }, "It has no scores.");
  const rows = names.map((name) => [
    element("th", { scope: "row" }, shortName(name)),
    element("td", { class: "number" }, decimal(row.scores?.[name])),
    element("td", {}, whyView(row.scores?.[name], row.judgments?.[name])),
  ]);
  return table(["metric", "score", "why"], rows, { class: "scores" });
}

function whyView(score, judgment) {
  const missing = score?.missing
    ? element("p", { class: "error-text" }, "missing: ", marked(beginning(String(score.missing), 400)))
    : null;
  const texts = [
    ["Reason", judgment?.reason],
    ["Raw answer", judgment?.answer],
  ];
  return [missing, ...texts.filter(([, text]) => text).map(([label, text]) => foldedText(label, textOf(text)))];
}

function compareView(rows, row, other, prefix, choose) {
  const others = rows.filter((candidate) => candidate !== row);
  const id = `${prefix}other-future`;
  const select = element(
    "select",
    { id, change: () => choose({ other: select.value }) },
    element("option", { value: "" }, "no other future"),
    others.map(({ future }) => element("option", { value: future }, `future ${future}`)),
  );
  select.value = other ? String(other.future) : "";
  return element("p", { class: "compare" }, element("label", { for: id }, "Compare with "), select);
}

/** The chosen future, with a mark at its first message that another one does not have. */
function alongView(row, { rows, from, turn }) {
  const shared = sharedLength(rows.map(({ messages }) => messages));
  const views = messagesView(row, from, row.messages.length, turn);
  const at = shared - from;
  if (rows.length > 1 && at >= 0)
    views.splice(at, 0, partingView(`${plural(rows.length, "future")} of this turn`, shared, row));
  return element("div", { class: "messages" }, views);
}

/** Two futures: once what they share, then each in a column. */
function besideView(row, other, { from, turn }) {
  const shared = sharedLength([row.messages, other.messages]);
  const columns = [row, other].map((candidate) =>
    element(
      "section",
      { class: "column", "aria-label": `Future ${candidate.future}` },
      element("h4", {}, `Future ${candidate.future}`),
      messagesView(candidate, shared, candidate.messages.length, turn),
    ),
  );
  return element(
    "div",
    { class: "messages" },
    messagesView(row, from, shared, turn),
    partingView(`futures ${row.future} and ${other.future}`, shared, row),
    element("div", { class: "beside" }, columns),
  );
}

function partingView(name, shared, row) {
  const isSame = shared === row.messages.length;
  const text = isSame
    ? `The ${name} have all of these messages in common.`
    : `Here the ${name} part: message ${shared + 1} differs.`;
  return element("p", { class: "parting" }, text);
}

export function messagesView(row, from, to, start) {
  const extras = extrasOf(row, start);
  const views = [];
  for (let at = from; at < to; at += 1) views.push(messageView(row.messages[at], row.messages[at + 1], extras.get(at)));
  return views;
}
