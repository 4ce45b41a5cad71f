// What two sides of a comparison are, and the order of their tasks. Pure: nothing here touches the page.

const TRAINING = "training/";

/** By choice, how the tasks are sorted: by the difference of the chosen metric, right less left. */
export const ORDERS = { "": "as evaluated", gain: "greatest gain", loss: "greatest loss" };

/** The name of an evaluation or a step for readers. */
export function titleOf(part) {
  return part.startsWith(TRAINING) ? `training, step ${part.slice(TRAINING.length)}` : part.replaceAll("_", " ");
}

/** [run, part] of a side, RUN:PART. */
export function splitSide(side) {
  const at = side.indexOf(":");
  return [side.slice(0, at), side.slice(at + 1)];
}

/** A side for readers, with the run if there are several. */
export function nameOf(side, runs) {
  const [run, part] = splitSide(side);
  return runs.length > 1 ? `${runs[run]?.name ?? run} \u00b7 ${titleOf(part)}` : titleOf(part);
}

/**
 * What is compared at first, as RUN:PART, by what each run has: the last evaluation of the first two runs, or the first
 * and the last one of a single run; steps of training if there is no evaluation. Empty if no run has anything.
 */
export function defaults(partsByRun) {
  const runs = partsByRun
    .map((parts, run) => {
      const evaluations = parts.filter((part) => !part.startsWith(TRAINING));
      return (evaluations.length ? evaluations : parts).map((part) => `${run}:${part}`);
    })
    .filter((sides) => sides.length);
  if (!runs.length) return {};
  const [first, second] = runs;
  return second ? { left: first.at(-1), right: second.at(-1) } : { left: first[0], right: first.at(-1) };
}

/** The tasks by their difference in a metric; those without one last. */
export function inOrder(tasks, metric, order) {
  if (!order) return tasks;
  const sign = order === "gain" ? -1 : 1;
  const keyed = tasks.map((task) => [sign * (task.right[metric] - task.left[metric]), task]);
  const key = ([value]) => (Number.isNaN(value) ? Infinity : value);
  return keyed.sort((a, b) => key(a) - key(b) || 0).map(([, task]) => task);
}
