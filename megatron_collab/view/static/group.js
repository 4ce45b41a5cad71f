// What the futures of a group have in common, and what differs. Pure: nothing here touches the page.

import { mean } from "./format.js";

/** The rollouts of a group in order: {rollout, rows} with the rows of its futures. */
export function rolloutsOf(rows) {
  const rollouts = new Map();
  for (const row of rows) {
    const rollout = row.rollout ?? 0;
    if (!rollouts.has(rollout)) rollouts.set(rollout, []);
    rollouts.get(rollout).push(row);
  }
  return [...rollouts].map(([rollout, futures]) => ({ rollout, rows: futures }));
}

/**
 * Number of messages before the trained turn. A row with raw replies says it; otherwise the trained turn is the reply
 * with which the rollouts begin to differ, or the last one that they share.
 */
export function promptLength(rows) {
  const raw = rows.find(({ turns }) => turns?.length);
  if (raw) {
    const replies = raw.messages.flatMap(({ role }, at) => (role === "assistant" ? [at] : []));
    const first = replies[replies.length - raw.turns.length];
    if (first !== undefined) return first;
  }
  const shared = sharedLength(rows.map(({ messages }) => messages));
  if (rows.every(({ messages }) => messages[shared]?.role === "assistant")) return shared;
  const last = rows[0].messages.slice(0, shared).findLastIndex(({ role }) => role === "assistant");
  return last < 0 ? shared : last;
}

/** How many messages conversations share from their beginning. */
export function sharedLength(conversations) {
  const [first, ...others] = conversations.map((messages) => messages.map((message) => JSON.stringify(message)));
  let length = 0;
  while (length < first.length && others.every((messages) => messages[length] === first[length])) length += 1;
  return length;
}

/** The reward of a rollout less the mean of the group's rollouts; null if it has none. */
export function advantage(rollout, rollouts) {
  const rewards = rollouts.map(({ rows }) => rows[0].reward);
  const reward = rollout.rows[0].reward;
  return typeof reward === "number" && rewards.length > 1 ? reward - mean(rewards) : null;
}

/** Names of all metrics of the rows, in order of appearance. */
export function metricNames(rows) {
  return [...new Set(rows.flatMap(({ scores, parts }) => [...Object.keys(scores ?? {}), ...Object.keys(parts ?? {})]))];
}

/** By metric: the mean over a rollout's futures of what `read(row)` has, null if none has it. */
export function means(rows, names, read) {
  return new Map(names.map((name) => [name, mean(rows.map((row) => read(row)?.[name]))]));
}
