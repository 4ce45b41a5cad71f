// Asks the server. An error's message is the server's own line, or says that it did not answer.

function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams(parameters).toString();
  return answerTo(`${path}${query && "?"}${query}`, { signal });
}

function post(path, content) {
  const headers = { "Content-Type": "application/json" };
  return answerTo(path, { method: "POST", headers, body: JSON.stringify(content) });
}

let waiting = 0; // requests without an answer

/** Raises Error with one line. */
async function answerTo(path, request) {
  let response;
  waiting += 1;
  document.documentElement.classList.add("loading");
  try {
    response = await fetch(`/api/${path}`, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Start megatron-collab view again and open the address it prints.");
  } finally {
    waiting -= 1;
    document.documentElement.classList.toggle("loading", waiting > 0);
  }
  if (response.ok) return response.json();
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error ?? `The server answered ${response.status} to ${path}.`);
}

export const runs = () => get("runs");
export const metrics = (run, after, start) => get(`runs/${run}/metrics`, { after, start });
export const evaluations = (run) => get(`runs/${run}/evaluations`);
export const events = (run) => get(`runs/${run}/events`);
export const futures = (run, filters, signal) => get(`runs/${run}/futures`, filters, signal);
export const parts = (run) => get(`runs/${run}/parts`);
export const comparison = (left, right, signal) => get("comparison", { left, right }, signal);
export const conversations = (run, part, task, signal) => get(`runs/${run}/conversations`, { part, task }, signal);
export const ratings = (left, right) => get("ratings", { left, right });
export const rate = (rating) => post("ratings", rating);
export const judge = (run, source, metric, signal) => get(`runs/${run}/judge`, { source, metric }, signal);
/** `evaluation`: of whose conversations; empty for those of training. */
export const group = (run, step, position, evaluation) =>
  get(`runs/${run}/groups/${step}/${position}`, evaluation ? { evaluation } : {});
export const tokens = (run, step, position, rollout) => get(`runs/${run}/tokens/${step}/${position}/${rollout}`);
export const reward = (run) => get(`runs/${run}/reward`);
/** What the rewards of groups [{step, position}] are computed from. */
export const scores = (run, groups, evaluation) => {
  const places = groups.map(({ step, position }) => `${step}.${position}`).join(",");
  return get(`runs/${run}/scores`, { groups: places, ...(evaluation ? { evaluation } : {}) });
};
export const models = (run) => get(`runs/${run}/models`);
/** The models that are served and their conversations; null before the first ones. */
export const talk = () => get("talk");
/** Let them do something; the answer is as that of `talk`. */
export const actInTalk = (action, values = {}) => post("talk", { action, ...values });
