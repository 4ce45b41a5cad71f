// A chart: curves with bands, points with intervals, a stack, or one metric against another, drawn as SVG.

import { element, svg, table } from "./dom.js";
import { number } from "./format.js";
import { smoothed, valueText } from "./series.js";
import { escaped, shortName } from "./text.js";

const HEIGHT = 132;
const MARGIN = { left: 44, right: 8, top: 8, bottom: 18 };
const TICKS = 4; // at most about so many on an axis

/**
 * `element` is the chart with its title, values and table. `onCursor(x)` is called when the reader points at a step,
 * null when they leave; `onOpen(x)` when they click or press Enter.
 */
export class Chart {
  constructor({ onCursor, onOpen }) {
    this.title = element("h3");
    this.readout = element("p", { class: "readout" });
    this.svg = svg("svg", { "aria-hidden": "true", height: HEIGHT });
    this.cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.plot = element(
      "div",
      {
        class: "plot",
        role: "slider",
        tabindex: "0",
        pointermove: (event) => onCursor(this.nearest(event.offsetX)),
        pointerleave: () => onCursor(null),
        click: (event) => onOpen(this.nearest(event.offsetX)),
        focus: () => onCursor(this.at ?? this.xs.at(-1)),
        blur: () => onCursor(null),
        keydown: (event) => this.onKey(event, onCursor, onOpen),
      },
      this.svg,
    );
    this.table = element(
      "details",
      { toggle: () => this.table.open && this.fillTable() },
      element("summary", {}, "Table"),
    );
    this.element = element("figure", { class: "chart" }, this.title, this.readout, this.plot, this.table);
    this.at = null;
  }

  /**
   * Draw `chart`, which is as sections() of series.js describes it, `width` pixels wide. `events`: [{step, kind}];
   * `smoothing`: 0 to 1. `chart.x` names what is on the axis if it is not steps; if `chart.isSquare`, both
   * axes are from 0 to 1, and a diagonal shows equal values.
   */
  update(chart, events, smoothing, width) {
    this.chart = chart;
    this.events = events;
    this.smoothing = smoothing;
    const { kind, series, hasTrend } = chart;
    this.trends = kind === "line" ? series.map(({ points }) => smoothed(points, smoothing, hasTrend)) : [];
    this.shownTrends = hasTrend ? this.trends.map(byX) : [];
    this.totals = new Map(); // of a stack, by step
    for (const { x, y } of kind === "stack" ? series.flatMap(({ points }) => points) : [])
      this.totals.set(x, (this.totals.get(x) ?? 0) + (y ?? 0));
    this.xs = [...new Set(series.flatMap(({ points }) => points.map(({ x }) => x)))].sort((a, b) => a - b);
    this.title.textContent = escaped(shortName(chart.title));
    this.draw(Math.max(width, 200));
    if (this.table.open) this.fillTable();
  }

  draw(width) {
    const shown = this.chart.kind === "stack" ? stacked(this.chart.series) : this.chart.series;
    this.scaleX = scale(this.chart.isSquare ? [0, 1] : range(this.xs), MARGIN.left, width - MARGIN.right);
    this.scaleY = scale(this.rangeY(shown), HEIGHT - MARGIN.bottom, MARGIN.top);
    this.svg.setAttribute("width", width);
    const draw = { line: this.curves, points: this.intervals, stack: this.areas, scatter: this.dots }[this.chart.kind];
    const marks = [...this.eventMarks(), ...this.diagonal()];
    this.svg.replaceChildren(...this.axes(width), ...marks, ...draw.call(this, shown), this.cursor);
    this.showAt(this.at);
  }

  get xName() {
    return this.chart.x ?? "step";
  }

  get isOfSteps() {
    return this.chart.x === undefined;
  }

  rangeY(series) {
    if (this.chart.isSquare) return [0, 1];
    const drawn = this.chart.hasTrend ? [...series, ...this.trends.map((points) => ({ points }))] : series;
    const values = drawn.flatMap(({ points }) => points.flatMap(({ y, low, high }) => [y, low, high]));
    const numbers = values.filter((value) => typeof value === "number");
    const [low, high] = range(numbers);
    const margin = (high - low) * 0.06;
    return [this.chart.fromZero && numbers.every((value) => value >= 0) ? 0 : low - margin, high + margin];
  }

  axes(width) {
    const nodes = [];
    for (const value of ticks(this.scaleY.domain)) {
      const y = this.scaleY(value);
      nodes.push(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
      nodes.push(
        svg("text", { class: "tick", x: MARGIN.left - 6, y: y + 3.5, "text-anchor": "end" }, number(value)),
      );
    }
    const isShown = (tick) => !this.isOfSteps || Number.isInteger(tick);
    for (const value of ticks(this.scaleX.domain, width / 80).filter(isShown)) {
      const x = this.scaleX(value);
      const isLast = x > width - MARGIN.right - 12; // its text would not fit around its place
      nodes.push(
        svg(
          "text",
          { class: "tick", x: isLast ? width : x, y: HEIGHT - 4, "text-anchor": isLast ? "end" : "middle" },
          number(value, 3),
        ),
      );
    }
    return nodes;
  }

  /** Alarms, and all other events: a path each, with at most a line per pixel. */
  eventMarks() {
    if (!this.isOfSteps || !this.xs.length) return [];
    const [first, last] = this.scaleX.domain;
    const shown = this.events.filter(({ step }) => step >= first && step <= last);
    return [false, true].map((isAlarm) => {
      const events = shown.filter(({ kind }) => (kind === "alarm") === isAlarm);
      const places = new Set(events.map(({ step }) => Math.round(this.scaleX(step))));
      const lines = [...places].map((x) => `M${x} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}`);
      return svg("path", { class: isAlarm ? "event event-alarm" : "event", d: lines.join("") });
    });
  }

  diagonal() {
    if (!this.chart.isSquare) return [];
    const [x1, x2, y1, y2] = [this.scaleX(0), this.scaleX(1), this.scaleY(0), this.scaleY(1)];
    return [svg("line", { class: "diagonal", x1, x2, y1, y2 })];
  }

  curves(series) {
    const nodes = [];
    series.forEach(({ points, color }, i) => {
      if (this.chart.hasTrend) nodes.push(svg("path", { class: `band ${color}`, d: this.bandPath(this.trends[i]) }));
      if (this.smoothing) nodes.push(svg("path", { class: `raw ${color}`, d: this.path(points) }));
    });
    series.forEach(({ color }, i) => {
      nodes.push(svg("path", { class: `curve ${color}`, d: this.path(this.trends[i]) }));
    });
    return nodes;
  }

  intervals(series) {
    const nodes = [];
    series.forEach(({ points, color }, i) => {
      const shift = this.isOfSteps ? (i - (series.length - 1) / 2) * 4 : 0; // runs are evaluated at the same steps
      const known = points.filter(({ y }) => y !== null);
      nodes.push(svg("path", { class: `raw ${color}`, d: this.path(known, shift) }));
      for (const { x, y, low, high } of known) {
        const at = this.scaleX(x) + shift;
        if (typeof low === "number" && typeof high === "number") {
          nodes.push(
            svg("line", { class: `curve ${color}`, x1: at, x2: at, y1: this.scaleY(low), y2: this.scaleY(high) }),
          );
        }
        nodes.push(svg("circle", { class: `dot ${color}`, cx: at, cy: this.scaleY(y), r: 3 }));
      }
    });
    return nodes;
  }

  areas(series) {
    return series
      .map(({ points, color }) => svg("path", { class: `area ${color}`, d: this.bandPath(points) }))
      .reverse();
  }

  dots(series) {
    const nodes = [];
    for (const { points, color } of series) {
      for (const { x, y } of points)
        nodes.push(svg("circle", { class: `dot ${color}`, cx: this.scaleX(x), cy: this.scaleY(y), r: 2.5 }));
    }
    return nodes;
  }

  /** A line through the points, with a gap at those without a value. A point between gaps becomes a dot. */
  path(points, shift = 0) {
    let pen = "M";
    let path = "";
    for (const { x, y } of points) {
      const place = y === null ? "" : `${(this.scaleX(x) + shift).toFixed(1)} ${this.scaleY(y).toFixed(1)}`;
      path += place && (pen === "M" ? `M${place}h0` : `L${place}`);
      pen = place ? "L" : "M";
    }
    return path;
  }

  bandPath(points) {
    const known = points.filter(({ low, high }) => typeof low === "number" && typeof high === "number");
    if (!known.length) return "";
    const place = (x, y) => `${this.scaleX(x).toFixed(1)} ${this.scaleY(y).toFixed(1)}`;
    const upper = known.map(({ x, high }) => place(x, high));
    const lower = known.map(({ x, low }) => place(x, low)).reverse();
    return `M${[...upper, ...lower].join("L")}Z`;
  }

  /** The x among the points that is nearest to a position in the plot, in pixels. */
  nearest(pixels) {
    const distance = (x) => Math.abs(this.scaleX(x) - pixels);
    return this.xs.reduce((best, x) => (distance(x) < distance(best) ? x : best), this.xs[0] ?? null);
  }

  onKey(event, onCursor, onOpen) {
    const at = this.xs.indexOf(this.at);
    const moves = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      Home: 0,
      End: this.xs.length - 1,
    };
    if (event.key === "Enter") onOpen(this.at);
    else if (event.key in moves) onCursor(this.xs[Math.min(Math.max(moves[event.key], 0), this.xs.length - 1)] ?? null);
    else return;
    event.preventDefault();
  }

  /** Show the values at `x`; null: the last ones. */
  showAt(x) {
    this.at = x;
    const isHere = x !== null && this.xs.includes(x);
    this.cursor.classList.toggle("shown", isHere);
    if (isHere) {
      this.cursor.setAttribute("x1", this.scaleX(x));
      this.cursor.setAttribute("x2", this.scaleX(x));
    }
    const values = this.valuesAt(x);
    const many = this.chart.kind === "stack";
    this.readout.replaceChildren(
      ...values.map(({ label, color, text }) =>
        element(
          "span",
          { class: `value ${color}` },
          element("span", { class: many ? "" : "unseen" }, `${shortName(label)} `),
          text,
        ),
      ),
    );
    this.describe(x ?? this.xs.at(-1), values);
  }

  /**
   * The values at `x`; without it, or if there are none, the last ones, whose trend lags and is not shown. A series
   * that has none there says so.
   */
  valuesAt(x) {
    if (this.chart.kind === "stack") x ??= this.xs.at(-1); // its stages are of one step
    const last = x === null || !this.xs.includes(x);
    return this.chart.series.flatMap(({ label, color, points }, i) => {
      const point = last ? points.findLast(({ y }) => y !== null) : points.find((candidate) => candidate.x === x);
      return points.length ? [{ label, color, text: this.textOf(point, i, !last) }] : [];
    });
  }

  /** The value of a point of the series `i`; with its trend if the chart shows that, or its share of a stack. */
  textOf(point = { y: null }, i, hasTrend = true) {
    return valueText(point, { total: this.totals.get(point.x), trend: hasTrend && this.shownTrends[i]?.get(point.x) });
  }

  /** What a screen reader says of the plot. */
  describe(x, values) {
    const { title } = this.chart;
    const place = `${this.xName} ${number(x ?? null)}`;
    const texts = values.map(({ label, text }) => escaped(`${shortName(label)} ${text}`));
    const attributes = {
      "aria-label": escaped(shortName(title)),
      "aria-valuemin": this.xs[0] ?? 0,
      "aria-valuemax": this.xs.at(-1) ?? 0,
      "aria-valuenow": x ?? 0,
      "aria-valuetext": `${place}: ${texts.join(", ") || "no value"}`,
    };
    for (const [name, value] of Object.entries(attributes)) this.plot.setAttribute(name, value);
  }

  fillTable() {
    const [summary] = this.table.children;
    this.table.replaceChildren(summary, this.tableOf());
  }

  tableOf() {
    const { series, title } = this.chart;
    const columns = series.map(({ points }) => byX(points));
    const rows = this.xs.map((x) => [
      element("th", { scope: "row" }, number(x)),
      columns.map((column, i) => element("td", {}, column.has(x) ? this.textOf(column.get(x), i) : "")),
    ]);
    const heads = [this.xName, ...series.map(({ label }) => label)].map(shortName);
    return element(
      "div",
      { class: "table", tabindex: "0", role: "region", "aria-label": escaped(`Table of ${shortName(title)}`) },
      table(heads, rows, {}, element("caption", { class: "unseen" }, shortName(title))),
    );
  }
}

function byX(points) {
  return new Map(points.map((point) => [point.x, point]));
}

/** Each series on top of those before it, as bands. */
function stacked(series) {
  const sums = new Map();
  return series.map(({ points, ...rest }) => ({
    ...rest,
    points: points.map(({ x, y }) => {
      const low = sums.get(x) ?? 0;
      sums.set(x, low + (y ?? 0));
      return { x, y, low, high: low + (y ?? 0) };
    }),
  }));
}

/** Smallest and largest value; around a single one, an interval of the same order. */
function range(values) {
  if (!values.length) return [0, 1];
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  const half = low === high ? Math.abs(low) / 2 || 0.5 : 0;
  return [low - half, high + half];
}

function scale(domain, start, end) {
  const [low, high] = domain;
  const place = (value) => start + ((value - low) / (high - low)) * (end - start);
  return Object.assign(place, { domain });
}

/** Round values within a range: multiples of 1, 2 or 5 times a power of ten. */
function ticks([low, high], most = TICKS) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough) ?? rough;
  const first = Math.ceil(low / size);
  const count = Math.floor(high / size) - first + 1;
  return Array.from({ length: Math.min(Math.max(count, 0), 20) }, (_, i) =>
    Number(((first + i) * size).toPrecision(12)),
  );
}
