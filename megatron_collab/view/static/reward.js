// The reward of a turn from the scores of its futures, as reward/multiturn.py computes it. Pure: nothing here touches
// the page.

import { mean } from "./format.js";

const TOKENS = "token_amount"; // metric with a special term in the paper's formula
const MALFORMED = "malformed"; // ending of a conversation whose reward is reward.malformed
const MOST = 10_000_000; // largest weight and clamp that the settings take

/**
 * The built-in modes of the reward. `complete`: the mean is over the futures that have every score; `clip`: bound of
 * each metric's mean; `tokenCost`: largest cost of token_amount in a future; `clamps`: reward.clamp has an effect.
 */
export const FORMULAS = {
  mr: { clamps: true, help: "each metric's mean over the futures that have its score, weighted and clamped" },
  single_turn: { clamps: true, help: "as mr; runs with this mode score the trained turn alone" },
  paper: { complete: true, tokenCost: 1, help: "over futures with all scores; tokens cost at most 1 in a future" },
  collabllm: { complete: true, help: "over futures with all scores, without a clamp" },
  verl: { clip: 1, help: "each metric's weighted mean, clamped to [\u22121, 1]" },
};

/**
 * The settings of a reward: the run's own `reward`, as the server has it, with those that the address changes
 * (mode=, weight.NAME=, clamp.NAME=, of which "none" removes the clamp). `faults`: a line for each that is refused.
 */
export function settingsOf(reward, choices) {
  const weights = new Map(Object.entries(reward.weights));
  const clamp = new Map(Object.entries(reward.clamp));
  const faults = [];
  let { mode } = reward;
  for (const [key, text] of Object.entries(choices).filter(([key, value]) => isOfReward(key) && value !== "")) {
    const [kind, name] = key.split(/\.(.*)/s);
    const fault = (reason) => faults.push(`${key}=${text}: ${reason}`);
    const value = text.trim() === "" ? NaN : Number(text);
    if (kind === "mode") {
      if (Object.hasOwn(FORMULAS, text)) mode = text;
      else fault(`no such mode; choose one of ${Object.keys(FORMULAS).join(", ")}`);
    } else if (!Object.hasOwn(reward.weights, name)) fault("the run has no such metric");
    else if (kind === "clamp" && text === "none") clamp.delete(name);
    else if (!(Math.abs(value) <= MOST)) fault("give a number of at most ten million");
    else if (kind === "weight") weights.set(name, value);
    else if (value > 0) clamp.set(name, value);
    else fault("give a number above 0, or none");
  }
  if (!FORMULAS[mode]?.clamps) clamp.clear();
  const { malformed, malformed_worst: malformedWorst } = reward;
  return { mode, weights, clamp, malformed, malformedWorst, faults };
}

/** Whether a choice of the address is a setting of the reward. */
export function isOfReward(key) {
  return key === "mode" || key.startsWith("weight.") || key.startsWith("clamp.");
}

/** The names of the settings in which two rewards differ. */
export function differences(one, other) {
  const names = one.mode === other.mode ? [] : ["mode"];
  for (const name of one.weights.keys()) {
    if (one.weights.get(name) !== other.weights.get(name)) names.push(`weight of ${name}`);
    if (one.clamp.get(name) !== other.clamp.get(name)) names.push(`clamp of ${name}`);
  }
  return names;
}

/** The reward of a turn: {value, error, parts}; `value` is null if it has none, and `why` says the reason. */
export function turnReward(futures, { mode, weights, clamp }) {
  const { complete = false, clip, tokenCost = Infinity } = FORMULAS[mode];
  const applicable = Object.keys(futures[0]).filter((name) => futures.every((scores) => Object.hasOwn(scores, name)));
  const weighted = applicable.filter((name) => weights.get(name));
  if (!weighted.length) return missing("no metric with a weight in reward.weights applies to this task");
  const partsOfFutures = futures.map((scores) => partsOf(scores, weighted, weights, tokenCost));
  const completeOnes = partsOfFutures.filter((parts) => parts.size === weighted.length);
  const parts = new Map();
  for (const name of weighted) {
    const counted = (complete ? completeOnes : partsOfFutures).filter((of) => of.has(name));
    if (!counted.length) return missing(reasonOf(futures, [name, ...weighted]));
    const limit = clip ?? clamp.get(name) ?? Infinity;
    parts.set(name, Math.min(Math.max(mean(counted.map((of) => of.get(name))), -limit), limit));
  }
  return { value: sum(parts.values()), error: standardError(completeOnes.map((of) => sum(of.values()))), parts };
}

/**
 * The rewards of a group's rollouts, each with its advantage and rank: [{rollout, value, error, parts, advantage,
 * rank}]. A rollout with a malformed turn has the reward of the settings for it.
 */
export function groupRewards(rollouts, settings) {
  const rewards = rollouts.map(({ rows }) => rolloutReward(rows, settings));
  const wellFormed = rewards.filter(({ isMalformed, value }) => !isMalformed && value !== null);
  if (settings.malformedWorst) {
    const worst = Math.min(...wellFormed.map(({ value }) => value)); // Infinity if there is none
    for (const reward of rewards)
      if (reward.isMalformed && reward.value !== null) reward.value = Math.min(reward.value, worst);
  }
  const standings = compared(rewards.map(({ value }) => value));
  return rewards.map((reward, at) => ({ rollout: rollouts[at].rollout, ...reward, ...standings[at] }));
}

/** By reward of a group: {advantage, rank}, the advantage against the group's mean; equal rewards share a rank. */
export function compared(values) {
  const numbers = values.filter(isNumber);
  const average = mean(numbers);
  return values.map((value) => ({
    advantage: isNumber(value) && values.length > 1 ? value - average : null,
    rank: isNumber(value) ? 1 + numbers.filter((other) => other > value).length : null,
  }));
}

/** Whether rewards are those that were recorded, up to rounding. */
export function areRecorded(rewards, recorded) {
  return rewards.every(({ value }, at) => {
    const before = isNumber(recorded[at]) ? recorded[at] : null;
    if (value === null || before === null) return value === before;
    return Math.abs(value - before) <= 1e-6 * Math.max(1, Math.abs(before));
  });
}

/** A file of conf/reward with the settings, which also has the `metrics` as the run scored them. */
export function fileOf(settings, { clamp: before, metrics }) {
  const { mode, weights, clamp, malformed, malformedWorst } = settings;
  const lines = [
    "# @package _global_",
    "# From megatron-collab view: moved by hand, on recorded scores.",
    "reward:",
    `  mode: ${mode}`,
    `  malformed: ${malformed === null ? "null" : float(malformed)}`,
    `  malformed_worst: ${malformedWorst}`,
    "  weights:",
    ...[...weights].map(([name, weight]) => `    ${key(name)}: ${float(weight)}`),
  ];
  const clamped = [...weights.keys()].filter((name) => clamp.has(name) || Object.hasOwn(before, name));
  if (FORMULAS[mode].clamps && clamped.length) {
    lines.push("  clamp:");
    for (const name of clamped) {
      const isRemoved = !clamp.has(name); // files are merged, so that one cannot remove what an experiment sets
      lines.push(`    ${key(name)}: ${float(clamp.get(name) ?? MOST)}${isRemoved ? "  # no clamp" : ""}`);
    }
  } else if (Object.keys(before).length)
    lines.push(`  # ${mode} takes no clamp: remove reward.clamp from the experiment.`);
  const set = Object.entries(metrics).filter(([, options]) => Object.keys(options ?? {}).length);
  if (set.length) lines.push("  metrics:", ...set.map(([name, options]) => `    ${key(name)}: ${flow(options)}`));
  return `${lines.join("\n")}\n`;
}

function rolloutReward(rows, settings) {
  const isMalformed = rows.some(({ ending }) => ending === MALFORMED);
  if (!isMalformed) return { isMalformed, ...turnReward(rows.map(({ scores }) => scores ?? {}), settings) };
  if (settings.malformed !== null) return { isMalformed, value: settings.malformed, error: 0, parts: new Map() };
  return { isMalformed, ...missing("its conversation ended at the malformed turn in this run") };
}

/** By metric with a score in a future: its weighted part. */
function partsOf(scores, names, weights, tokenCost) {
  const parts = new Map();
  for (const name of names.filter((candidate) => isNumber(scores[candidate]))) {
    const part = weights.get(name) * scores[name];
    parts.set(name, name === TOKENS ? Math.max(part, -tokenCost) : part);
  }
  return parts;
}

/** Why no future counts: the first missing score, starting with the first of `names`. */
function reasonOf(futures, names) {
  const [name, score] = names
    .flatMap((candidate) => futures.map((scores) => [candidate, scores[candidate]]))
    .find(([, candidate]) => !isNumber(candidate));
  return `${name}: ${score?.missing ?? "no number"}`;
}

function standardError(sums) {
  if (sums.length < 2) return 0;
  const average = mean(sums);
  return Math.sqrt(sum(sums.map((value) => (value - average) ** 2)) / (sums.length - 1) / sums.length);
}

function missing(why) {
  return { value: null, why, error: 0, parts: new Map() };
}

function sum(values) {
  let total = 0;
  for (const value of values) total += value;
  return total;
}

function isNumber(value) {
  return typeof value === "number";
}

/** A number as YAML's readers take for one: with a point. The exponent has its sign already. */
function float(value) {
  const [digits, exponent] = String(value).split("e");
  const mantissa = digits.includes(".") ? digits : `${digits}.0`;
  return exponent === undefined ? mantissa : `${mantissa}e${exponent}`;
}

/** A name as a key; quoted unless nothing else can be read in it, such as a number or a truth value. */
function key(name) {
  const isPlain = /^[a-z]\w*$/i.test(name) && !/^(y|n|yes|no|on|off|true|false|null)$/i.test(name);
  return isPlain ? name : quoted(name);
}

/** Settings as YAML in one line. */
function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value && typeof value === "object")
    return `{${Object.entries(value)
      .map(([name, part]) => `${quoted(name)}: ${flow(part)}`)
      .join(", ")}}`;
  // What would refer to another option must stay text.
  if (typeof value === "string") return quoted(value.replace(/(\\*)\$\{/g, (_, slashes) => `${slashes}${slashes}\\\${`));
  return isNumber(value) && !Number.isInteger(value) ? float(value) : JSON.stringify(value);
}

/** In double quotes; whatever is not plain ASCII by its code point, since YAML refuses some characters. */
function quoted(text) {
  return JSON.stringify(text).replace(/[^ -~]/gu, (character) => {
    const code = character.codePointAt(0).toString(16);
    return code.length > 4 ? `\\U${code.padStart(8, "0")}` : `\\u${code.padStart(4, "0")}`;
  });
}
