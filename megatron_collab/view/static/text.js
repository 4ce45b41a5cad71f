// Texts of models, users and tools: what would hide in them or redirect a reader is shown as an escape.

// Control and format characters (ANSI's escape, direction marks, zero-width marks, tags), lone surrogates, separators
// of lines and paragraphs, and Hangul's fillers, which are letters without a shape.
const HIDDEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0]+/gu;

/** The text with visible escapes instead of characters that do not show. */
export function escaped(text) {
  return text.replaceAll("\r\n", "\n").replace(HIDDEN, (run) => Array.from(run, escape).join(""));
}

function escape(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code); // Unicode has pictures of these
  if (code === 0x7f) return "\u2421";
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

/** The text as nodes, with its escapes marked. */
export function marked(text) {
  const nodes = [];
  let end = 0;
  text = text.replaceAll("\r\n", "\n");
  for (const { 0: run, index } of text.matchAll(HIDDEN)) {
    if (index > end) nodes.push(document.createTextNode(text.slice(end, index)));
    const mark = document.createElement("span");
    mark.className = "escape";
    mark.textContent = escaped(run);
    nodes.push(mark);
    end = index + run.length;
  }
  if (end < text.length) nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}

/** `at`, or one less if that would cut a character of two code units. */
export function boundary(text, at) {
  if (at >= text.length) return text.length;
  const unit = text.charCodeAt(at - 1);
  return unit >= 0xd800 && unit < 0xdc00 ? at - 1 : at;
}

/** The first line of a text in at most `length` characters, for a summary. */
export function beginning(text, length = 80) {
  const line = text.trimStart().split("\n", 1)[0];
  return line.length > length ? `${line.slice(0, boundary(line, length))}\u2026` : line;
}

/** The name of a task, metric or ending, which come from data too: at most one line of a readable length. */
export function shortName(name) {
  return beginning(String(name), 100);
}

/**
 * The thoughts in a raw reply. A template may open the thought in the prompt (everything up to an unmatched </think> is
 * thought), and a budget may cut it (everything after an unmatched <think> is).
 */
export function thoughtsOf(raw) {
  const thoughts = [];
  const visible = raw.replace(/<think>([^]*?)(?:<\/think>\s*|$)/g, (_, thought) => {
    thoughts.push(thought);
    return "";
  });
  const end = visible.lastIndexOf("</think>");
  if (end >= 0) thoughts.unshift(visible.slice(0, end));
  return thoughts.map((thought) => thought.trim()).filter(Boolean);
}
