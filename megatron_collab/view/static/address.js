// The address's hash holds everything that is chosen, #VIEW?NAME=VALUE&…, so that an address is a permalink.

export const VIEWS = ["overview", "conversations", "compare", "blind", "judge", "talk"];

/** The view and the choices of the address; an unknown view is the first one. */
export function read(hash = location.hash) {
  const [view, query = ""] = hash.slice(1).split(/\?(.*)/s);
  return { view: VIEWS.includes(view) ? view : VIEWS[0], choices: Object.fromEntries(new URLSearchParams(query)) };
}

/** The hash of a view with choices; those that are empty are left out. */
export function hashOf(view, choices) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(choices)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return `#${view}${query.size ? "?" : ""}${query}`;
}

/** Go to a view. `replace`: without an entry in the browser's history, as for every key while a filter is typed. */
export function go(view, choices, { replace = false } = {}) {
  const hash = hashOf(view, choices);
  if (hash === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
  dispatchEvent(new HashChangeEvent("hashchange")); // the browser sends none for these two
}
