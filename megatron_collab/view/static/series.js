// From the rows of runs to the series of charts. Pure: nothing here touches the page.

import { number } from "./format.js";

/** Sections of the overview in their order. A metric belongs to the first section whose pattern matches its name. */
const SECTIONS = [
  { title: "Reward", pattern: /^(reward|spread|reliability|equal_rewards)$/ },
  { title: "Scores", pattern: /^score\//, strip: true },
  { title: "Time", pattern: /^seconds\/|idle/, fromZero: true },
  { title: "Cost", pattern: /^(llm\/|sampled_tokens$)/, fromZero: true },
  { title: "Endings", pattern: /^ending\//, strip: true, fromZero: true },
  { title: "Staleness", pattern: /^(staleness|dynamic)\//, fromZero: true },
  { title: "Health", pattern: /^(missing$|count\/|mismatch\/|servers\/)/, fromZero: true },
  { title: "Sentinels", pattern: /^sentinel\//, strip: true },
  { title: "Update and other metrics", pattern: /(?:)/ },
];
const BANDS = { reward: "reward_se" }; // by metric: its standard error, which has no chart of its own
const STACKED = /^seconds\/(?!.*idle)/; // stages follow each other, so their sum is the time of a step

/** All names of metrics in rows, in order of appearance. */
export function names(runs) {
  const seen = new Set();
  for (const run of runs) for (const row of run.rows) for (const name of Object.keys(row)) seen.add(name);
  return [...seen];
}

/**
 * What to draw: [{title, charts: [{key, title, kind, fromZero, series}]}], without empty sections; a series is
 * {label, color, points: [{x, y, low, high}]}. `runs`: {run, name, color, rows, evaluations} of those that are shown.
 */
export function sections(runs) {
  const bands = new Set(Object.values(BANDS));
  const metrics = names(runs).filter((name) => name !== "step" && !bands.has(name));
  const drawn = [{ title: "Evaluations", charts: evaluationCharts(runs) }];
  for (const section of SECTIONS) {
    const own = metrics.filter((name) => section === SECTIONS.find(({ pattern }) => pattern.test(name)));
    const stacked = own.filter((name) => STACKED.test(name));
    const charts = stacked.length ? runs.map((run) => stackedChart(run, stacked, runs.length)).filter(Boolean) : [];
    for (const name of own.filter((metric) => !stacked.includes(metric))) charts.push(lineChart(runs, name, section));
    drawn.push({ title: section.title, charts });
  }
  return drawn.filter(({ charts }) => charts.length);
}

function lineChart(runs, name, { strip, fromZero }) {
  const title = strip ? name.slice(name.indexOf("/") + 1) : name;
  const series = runs.map(({ name: label, color, rows }) => ({
    label,
    color,
    points: pointsOf(rows, name, BANDS[name]),
  }));
  return { key: name, title, kind: "line", fromZero, series };
}

function stackedChart(run, stages, runCount) {
  const series = stages.map((stage, i) => ({
    label: stage.slice("seconds/".length),
    color: `color-${i % 8}`,
    points: pointsOf(run.rows, stage),
  }));
  const title = runCount > 1 ? `seconds of a step, ${run.name}` : "seconds of a step";
  return run.rows.length ? { key: `seconds ${run.run}`, title, kind: "stack", fromZero: true, series } : null;
}

function evaluationCharts(runs) {
  const titles = new Set();
  for (const run of runs) {
    for (const record of run.evaluations)
      for (const name of Object.keys(record.estimates)) titles.add(evaluationTitle(record, name));
  }
  return [...titles].map((title) => ({
    key: `evaluation ${title}`,
    title,
    kind: "points",
    series: runs.map(({ name, color, evaluations }) => ({
      label: name,
      color,
      points: evaluationPoints(evaluations, title),
    })),
  }));
}

function evaluationTitle({ set }, name) {
  const metric = name.replace(/^score\//, "");
  return set ? `${set}: ${metric}` : metric;
}

function evaluationPoints(evaluations, title) {
  const points = [];
  for (const record of evaluations) {
    for (const [name, { value, low, high }] of Object.entries(record.estimates)) {
      if (evaluationTitle(record, name) !== title) continue;
      const missing = record.missing?.[name.replace(/^score\//, "")];
      points.push({ x: record.step, y: value, low, high, missing });
    }
  }
  return points.sort((a, b) => a.x - b.x);
}

function pointsOf(rows, name, error = undefined) {
  return rows.map((row) => {
    const y = isNumber(row[name]) ? row[name] : null; // a name may be that of an object's method
    const width = row[error];
    return y === null || !isNumber(width) ? { x: row.step, y } : { x: row.step, y, low: y - width, high: y + width };
  });
}

/** One metric against another: a point per step of each run that has both. */
export function against(runs, x, y) {
  const series = runs.map(({ name, color, rows }) => ({
    label: name,
    color,
    points: rows.filter((row) => isNumber(row[x]) && isNumber(row[y])).map((row) => ({ x: row[x], y: row[y] })),
  }));
  return { key: "against", title: `${y} against ${x}`, kind: "scatter", x: "x", series };
}

const isNumber = (value) => typeof value === "number";

/**
 * Exponentially weighted average of the points up to each one; `weight` (0 to 1) is that of the past. Divided by the
 * sum of its weights, so that the first points do not count more than later ones.
 */
export function smoothed(points, weight) {
  let sum = 0;
  let weights = 0;
  return points.map(({ x, y }) => {
    if (y === null) return { x, y };
    sum = weight * sum + (1 - weight) * y;
    weights = weight * weights + (1 - weight);
    return { x, y: sum / weights };
  });
}

/** A value with its interval or error, as text. */
export function valueText({ y, low = null, high = null, missing }, kind) {
  const count = missing ? ` (${missing} missing)` : "";
  if (low === null || high === null) return number(y) + count;
  if (kind === "points") return `${number(y)} [${number(low)}, ${number(high)}]${count}`;
  return `${number(y)} \u00b1 ${number(high - y, 2)}`;
}
