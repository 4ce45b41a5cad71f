// Numbers as text. A minus is U+2212, which is as wide as a plus.

const MINUS = "\u2212";

/** Three to four significant digits; an en dash if there is no number. */
export function number(value, digits = 4) {
  if (typeof value !== "number") return "\u2013";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e6) text = size.toLocaleString("en");
  else if (size >= 1e6 || size < 1e-3)
    text = size
      .toExponential(2)
      .replace(/\.?0*e\+?/, "e")
      .replace("-", MINUS);
  else text = size.toLocaleString("en", { maximumSignificantDigits: digits });
  return value < 0 ? MINUS + text : text;
}

/** A score or reward: three decimals, so that columns align; fewer if it is large, as counts are. */
export function decimal(value) {
  if (typeof value !== "number") return "\u2013";
  if (Math.abs(value) >= 100) return number(value);
  return (value < 0 ? MINUS : "") + Math.abs(value).toFixed(3);
}

/** With its sign also if it is positive. */
export function signed(value) {
  return typeof value === "number" && value >= 0 ? `+${decimal(value)}` : decimal(value);
}

/** An estimate with its interval, if it has one. */
export function interval(estimate, format = decimal) {
  if (!estimate || estimate.value === null) return "\u2013";
  const { value, low, high } = estimate;
  return low === null || high === null ? format(value) : `${format(value)} [${format(low)}, ${format(high)}]`;
}

export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

export function mean(values) {
  const numbers = values.filter((value) => typeof value === "number");
  return numbers.length ? numbers.reduce((sum, value) => sum + value, 0) / numbers.length : null;
}
