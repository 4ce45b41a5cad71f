// From the rows of runs to the series of charts. Pure: nothing here touches the page.

import { number } from "./format.js";

/** Sections of the overview in their order. A metric belongs to the first section whose pattern matches its name. */
const SECTIONS = [
  { title: "Reward", pattern: /^(reward|reward_se|spread|reliability|decision_density|equal_rewards)$/ },
  { title: "Scores", pattern: /^score\//, strip: true },
  { title: "Time", pattern: /^(seconds|idle)\//, fromZero: true },
  { title: "Cost", pattern: /^(llm\/|sampled_tokens$)/, fromZero: true },
  { title: "Endings", pattern: /^ending\//, strip: true, fromZero: true },
  { title: "Staleness", pattern: /^(staleness|dynamic)\//, fromZero: true },
  { title: "Health", pattern: /^(missing$|count\/|mismatch\/|servers\/)/, fromZero: true },
  { title: "Sentinels", pattern: /^sentinel\//, strip: true },
  { title: "Update and other metrics", pattern: /(?:)/ },
];
const LEAST = 10; // points from which the noise of a curve is estimated
const STACKED = /^seconds\//; // stages follow each other, so their sum is the time of a step

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
  const metrics = names(runs).filter((name) => name !== "step");
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
  const series = runs.map(({ name: label, color, rows }) => ({ label, color, points: pointsOf(rows, name) }));
  return { key: name, title, kind: "line", fromZero, series: series.filter(hasValue), hasTrend: name === "reward" };
}

function stackedChart(run, stages, runCount) {
  const series = stages.map((stage, i) => ({
    label: stage.slice("seconds/".length),
    color: `color-${i % 8}`,
    points: pointsOf(run.rows, stage),
  }));
  const title = runCount > 1 ? `seconds of a step, ${run.name}` : "seconds of a step";
  return run.rows.length
    ? { key: `seconds ${run.run}`, title, kind: "stack", fromZero: true, series: series.filter(hasValue) }
    : null;
}

/** A run or a stage that has no value would only widen the axis. */
function hasValue({ points }) {
  return points.some(({ y }) => y !== null);
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

function pointsOf(rows, name) {
  return rows.map((row) => ({ x: row.step, y: isNumber(row[name]) ? row[name] : null })); // it may be a method's name
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

/** Events of the steps in which servers were lost. */
export function lostServers(rows) {
  const counters = names([{ rows }]).filter((name) => /^servers\/.*lost$/.test(name));
  return rows.flatMap((row) =>
    counters
      .filter((name) => isNumber(row[name]) && row[name] > 0)
      .map((name) => ({ step: row.step, kind: "servers", text: `${name}: ${number(row[name])}` })),
  );
}

const isNumber = (value) => typeof value === "number";

/**
 * The trend of a curve: at each point the mean of all, which have `weight` ** distance (0 to 1); the distance counts
 * points with values, not steps. With `hasInterval`, `low` and `high` are the 95 % interval of that mean if the points
 * are a slow trend and independent noise of one variance: half the mean square of the differences between neighbors
 * (von Neumann 1941, Annals of Mathematical Statistics 12:367). Fewer than LEAST points have none. The interval does
 * not contain by how much the mean bends the trend: at the ends of a curve it lags, where that turns it is flatter.
 */
export function smoothed(points, weight, hasInterval) {
  const values = points.flatMap(({ y }) => (y === null ? [] : [y]));
  const sums = (numbers, factor) => {
    let sum = 0;
    return numbers.map((value) => (sum = factor * sum + value));
  };
  const [before, after] = [sums(values, weight), sums(values.toReversed(), weight).toReversed()];
  const ones = values.map(() => 1);
  const weights = sums(ones, weight); // of as many points as the index says, and one
  const last = values.length - 1;
  let [squares, factor] = [[], 0];
  if (hasInterval && values.length >= LEAST) {
    const noise = values.slice(1).reduce((sum, y, i) => sum + (y - values[i]) ** 2 / 2, 0) / last;
    [squares, factor] = [sums(ones, weight ** 2), 1.96 * Math.sqrt(noise)];
  }
  let at = -1;
  return points.map(({ x, y }) => {
    if (y === null) return { x, y };
    at += 1;
    const total = weights[at] + weights[last - at] - 1;
    const trend = (before[at] + after[at] - y) / total;
    if (!squares.length) return { x, y: trend };
    const half = (factor * Math.sqrt(squares[at] + squares[last - at] - 1)) / total;
    return { x, y: trend, low: trend - half, high: trend + half };
  });
}

/** A value with its interval, its trend or, of a stage, its share of `total`, as text. */
export function valueText({ y, low = null, high = null, missing }, { trend, total } = {}) {
  const count = missing ? ` (${missing} missing)` : "";
  if (low !== null && high !== null) return `${number(y)} [${number(low)}, ${number(high)}]${count}`;
  if (typeof trend?.high === "number")
    return `${number(y)}, trend ${number(trend.y)} \u00b1 ${number(trend.high - trend.y, 2)}`;
  return number(y) + (total && y !== null ? ` (${Math.round((100 * y) / total)} %)` : count);
}
