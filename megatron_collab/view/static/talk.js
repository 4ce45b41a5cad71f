// Talk with models: one, or two beside each other, of one run or of two; as the user, or with a simulated user at the
// wheel.

import * as api from "./api.js";
import { go, read } from "./address.js";
import { element, offer, showFault } from "./dom.js";
import { plural } from "./format.js";
import { extrasOf, foldedText, messageView, textOf } from "./message.js";
import { shortName } from "./text.js";
import { endingView, futuresView, partsView, scoresView } from "./tree.js";

const SIDES = { left: "run", right: "beside" }; // choices of models, and of their runs
const BUSY_MS = 200; // between two looks at what the models do
const IDLE_MS = 5_000; // another page of the same command may use them too
const MOST_FUTURES = 8;
const DOING = {
  start: "The models start\u2026",
  say: "The model replies\u2026",
  user: "The simulated user writes, then the model replies\u2026",
  futures: "Futures are being played\u2026",
  begin: "A conversation begins\u2026",
  undo: "The last message is taken back\u2026",
};

export class Talk {
  constructor(container, runs) {
    this.runs = runs;
    this.models = new Map(); // by run: its models
    this.choices = {};
    this.session = null; // as the server has it
    this.version = null; // of the session that is shown
    this.isSent = false; // an action, which the server has not accepted yet
    this.chosen = null; // what Start starts, once the models of the run are known
    this.columns = []; // of `drawn` models
    this.drawn = [];
    this.build(container);
  }

  build(container) {
    const select = (name, changed = {}) => {
      const field = element("select", { id: `talk-${name}`, name });
      field.addEventListener("input", () => this.choose({ ...changed, [name]: field.value }));
      return field;
    };
    const labels = { run: "Run", left: "Model", beside: "Beside it, run", right: "Beside it", task: "Task" };
    const other = { left: "", right: "", beside: "", task: "" }; // of another run other models and tasks
    const changed = { run: other, beside: { right: "" } };
    this.fields = Object.fromEntries(Object.keys(labels).map((name) => [name, select(name, changed[name])]));
    for (const name of Object.values(SIDES))
      this.fields[name].append(...this.runs.map(({ run, name: of }) => element("option", { value: run }, shortName(of))));
    this.startButton = element("button", { type: "submit", disabled: true }, "Start");
    this.stopButton = element("button", { type: "button", click: () => this.act("stop") }, "Stop");
    this.form = element(
      "form",
      { class: "talk-choices", "aria-label": "What to talk with", submit: (event) => this.start(event) },
      Object.entries(labels).map(([name, label]) =>
        element("label", { for: `talk-${name}`, hidden: name in changed && this.runs.length < 2 }, label, this.fields[name]),
      ),
      this.startButton,
      this.stopButton,
    );
    this.status = element("p", { class: "talk-status", role: "status" });
    this.choiceFault = element("div", {});
    this.fault = element("div", {});
    this.goal = element("div", {});
    this.chats = element("div", { class: "talk-chats" });
    container.append(
      element(
        "div",
        { class: "talk" },
        this.form,
        this.choiceFault,
        this.fault,
        this.goal,
        this.chats,
        this.status,
        this.buildComposer(),
      ),
    );
  }

  buildComposer() {
    this.text = element("textarea", { id: "talk-text", rows: "2", placeholder: "Enter sends, Shift+Enter is a new line" });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    this.count = element("input", { id: "talk-count", type: "number", min: "1", max: MOST_FUTURES, value: "3" });
    const button = (label, click) => element("button", { type: "button", click }, label);
    const play = () => this.act("futures", { count: Math.trunc(Number(this.count.value)) });
    this.actions = [
      button("Send", () => this.send()),
      button("Simulated user", () => this.act("user")),
      button("Play futures", play),
      button("Undo", () => this.act("undo")),
    ];
    const [send, user, futures, undo] = this.actions;
    this.composer = element(
      "div",
      { class: "composer", role: "group", "aria-label": "Your turn" },
      element("label", { class: "unseen", for: "talk-text" }, "Message as the user"),
      this.text,
      element(
        "p",
        {},
        [send, user, futures],
        element("label", { class: "unseen", for: "talk-count" }, "Number of futures"),
        this.count,
        undo,
      ),
    );
    return this.composer;
  }

  /** Ask again at the next `show`: a run that goes on may have more checkpoints by then. */
  forget() {
    this.models.clear();
  }

  choose(changed) {
    go("talk", { ...this.choices, ...changed }, { replace: true });
  }

  async show(choices) {
    if (!this.runs.length) return;
    this.choices = choices;
    const run = choices.run ?? String(this.runs[0].run);
    const beside = choices.beside ?? run;
    let fault = "";
    for (const number of new Set([run, beside])) {
      if (this.models.has(number)) continue;
      this.chosen = null; // of another run
      this.startButton.disabled = true;
      try {
        this.models.set(number, await api.models(number));
      } catch (error) {
        fault = error.message;
      }
    }
    if (choices !== this.choices) return; // others have been chosen meanwhile
    showFault(this.choiceFault, fault);
    const [left] = this.names(run);
    const first = { left: left ?? "", right: this.names(beside).findLast((name) => beside !== run || name !== left) ?? "" };
    this.chosen = { run, beside, right: "", task: "", ...(choices.left ? {} : first), ...choices };
    await this.look();
  }

  /** Of the models of a run. */
  names(run) {
    return (this.models.get(run) ?? []).map(({ name }) => name);
  }

  /** The models that are chosen, as the server names them. */
  get sides() {
    const { chosen } = this;
    return Object.entries(SIDES)
      .filter(([side]) => chosen[side])
      .map(([side, run]) => [Number(chosen[run]), chosen[side]]);
  }

  /** Look at what the models do, again and again while this view is shown. */
  async look() {
    try {
      this.draw(await api.talk());
    } catch (error) {
      showFault(this.fault, error.message);
    }
    this.lookLater();
  }

  lookLater() {
    clearTimeout(this.timer);
    const look = () => read().view === "talk" && this.look();
    this.timer = setTimeout(look, this.session?.doing ? BUSY_MS : IDLE_MS);
  }

  /** True if the server has accepted the action. While another one runs, a button does nothing. */
  async act(action, values = {}) {
    if (action !== "stop" && (this.isSent || (action !== "start" && this.isBusy()))) return false;
    this.isSent = true;
    if (action === "start") this.status.textContent = DOING.start; // before that, other models may have to end
    this.drawButtons();
    try {
      this.draw(await api.actInTalk(action, values));
      return true;
    } catch (error) {
      showFault(this.fault, error.message);
      return false;
    } finally {
      this.isSent = false;
      this.drawButtons();
      this.lookLater();
    }
  }

  isBusy() {
    return this.isSent || Boolean(this.session?.doing);
  }

  drawButtons() {
    for (const button of this.actions) button.setAttribute("aria-disabled", String(this.isBusy()));
  }

  start(event) {
    event.preventDefault();
    return this.act("start", { models: this.sides, task: this.chosen.task });
  }

  async send() {
    const text = this.text.value;
    if (!text.trim()) return;
    this.text.value = ""; // at once: the next message may be typed before the answer
    if (!(await this.act("say", { text })) && !this.text.value) this.text.value = text;
  }

  focusText() {
    this.text.focus();
  }

  draw(session) {
    if (session?.version < this.version) return; // an answer that was overtaken by a later one
    this.session = session;
    this.drawChoices();
    if (session?.version === this.version) return;
    this.version = session?.version;
    const { chats = [], ended = true, fault = "" } = session ?? {};
    showFault(this.fault, fault);
    this.status.textContent = statusOf(session);
    this.stopButton.hidden = ended;
    this.composer.hidden = ended || !chats.length;
    this.drawButtons();
    this.drawChats(session?.models ?? [], chats);
  }

  drawChoices() {
    if (!this.chosen) return;
    const { run, left, beside, right, task } = this.chosen;
    const models = (number) => this.names(number).map((name) => [name, titleOf(name)]);
    const session = String(this.session?.models[0][0]) === run ? this.session : null;
    const sets = (session?.sets ?? []).map(({ name, tasks, total }) => [
      `${name}, ${tasks.length} of ${plural(total, "task")}`,
      tasks.map(({ id, text }) => [id, `${id}: ${text}`]),
    ]);
    this.fields.run.value = run;
    this.fields.beside.value = beside;
    offer(this.fields.left, [["", models(run)]], left);
    offer(this.fields.right, [["", [["", "no second model"], ...models(beside)]]], right);
    offer(this.fields.task, [["", [["", "none: an empty conversation"]]], ...sets], task);
    const isServed = session && !session.ended && isSame(session.models, this.sides);
    this.startButton.disabled = !this.sides.every(([number]) => this.models.has(String(number))) || !left;
    this.startButton.textContent = isServed ? "New conversation" : "Start";
  }

  drawChats(models, chats) {
    const sides = chats.length ? models : [];
    if (!isSame(sides, this.drawn)) {
      this.drawn = sides;
      const ofRuns = new Set(sides.map(([run]) => run)).size > 1;
      const runOf = (number) => this.runs.find(({ run }) => run === number)?.name;
      this.columns = sides.map(([run, name], at) => new Column(ofRuns ? `${runOf(run)}: ${name}` : name, `talk-${at}-`));
      this.chats.replaceChildren(...this.columns.map(({ root }) => root));
      this.chats.classList.toggle("beside", sides.length > 1);
    }
    this.columns.forEach((column, at) => column.draw(chats[at]));
    const goal = chats.find(({ row }) => row?.goal)?.row.goal ?? "";
    if (goal === this.shownGoal) return;
    this.shownGoal = goal;
    this.goal.replaceChildren(...(goal ? [foldedText("Hidden goal", textOf(goal))] : []));
  }
}

/** The conversation with a model. While it grows, it stays as a reader has unfolded and scrolled it. */
class Column {
  constructor(name, prefix) {
    this.name = name;
    this.prefix = prefix; // of ids
    this.shown = []; // of each message that is shown, what it was made of
    this.endKey = ""; // what is shown below them was made of
    this.chosen = { future: 0, other: null }; // of the futures
    this.messages = element("div", { class: "messages", role: "log", "aria-label": `Conversation with ${name}` });
    this.end = element("div", { class: "talk-end" });
    this.futures = element("div", {});
    this.root = element(
      "section",
      { class: "column", "aria-label": name },
      element("h3", {}, shortName(titleOf(name))),
      this.messages,
      this.end,
      this.futures,
    );
  }

  /** While a model is busy, the last message of its row may grow. */
  draw({ prompt, row, futures, fault, busy }) {
    this.messages.setAttribute("aria-busy", String(busy)); // else each piece of it is read out
    this.drawMessages(row, prompt);
    const key = JSON.stringify([row?.ending, row?.error, row?.scores, fault, futures]);
    if (key === this.endKey) return;
    this.endKey = key;
    const hasScores = Object.keys(row?.scores ?? {}).length > 0;
    this.end.replaceChildren(
      ...(row?.ending ? [endingView(row)] : []),
      ...(hasScores ? [scoresView(row)] : []),
      ...(fault ? [element("p", { class: "error-text" }, fault)] : []),
    );
    this.chosen = { future: 0, other: null };
    this.drawFutures(row, prompt, futures);
  }

  drawMessages(row, prompt) {
    const messages = row?.messages ?? [];
    const extras = row ? extrasOf(row, prompt) : new Map();
    const made = messages.map((message, at) => JSON.stringify([message, messages[at + 1]?.role, extras.get(at)]));
    let same = 0;
    while (same < made.length && made[same] === this.shown[same]) same += 1;
    if (same === made.length && same === this.shown.length) return;
    const follows = made.length > this.shown.length || isInView(this.messages.lastChild);
    const partsOf = () => [...(this.messages.children[same]?.querySelectorAll("details") ?? [])];
    const open = partsOf().map((part) => part.open);
    const focused = partsOf().findIndex((part) => part.firstChild === document.activeElement);
    while (this.messages.children.length > same) this.messages.lastChild.remove();
    for (let at = same; at < messages.length; at += 1)
      this.messages.append(messageView(messages[at], messages[at + 1], extras.get(at)));
    partsOf().forEach((part, at) => (part.open = open[at] ?? false));
    partsOf()[focused]?.firstChild.focus({ preventScroll: true });
    this.shown = made;
    if (follows) this.messages.lastChild?.scrollIntoView({ block: "nearest" });
  }

  drawFutures(row, prompt, futures) {
    if (!futures.length) {
      this.futures.replaceChildren();
      return;
    }
    const shown = futures.find(({ future }) => future === this.chosen.future) ?? futures[0];
    const other = futures.find(({ future }) => future === this.chosen.other && future !== shown.future) ?? null;
    const choose = ({ future = shown.future, other: compared = "" }) => {
      this.chosen = { future, other: compared === "" ? null : Number(compared) };
      const { id } = document.activeElement;
      this.drawFutures(row, prompt, futures);
      const focused = id.includes("tab-") ? `${this.prefix}tab-${future}` : id;
      document.getElementById(focused)?.focus();
    };
    const title = `${plural(futures.length, "future")} of this conversation`;
    const places = { prefix: this.prefix, from: row.messages.length, turn: prompt };
    const view = { rows: futures, title, head: partsView(futures), ...places };
    this.futures.replaceChildren(futuresView(view, { row: shown, other }, choose));
  }
}

function statusOf(session) {
  if (!session) return "Start serves the models on this machine, which may take minutes.";
  if (session.ended) return "The models are no longer served.";
  if (session.doing && !session.chats.length) return session.progress || DOING.start;
  return DOING[session.doing] ?? "";
}

/** Whether the end of a message is in the window, within rounding. */
function isInView(message) {
  const end = message?.getBoundingClientRect().bottom ?? 0;
  return end > 0 && end < innerHeight + 1;
}

function titleOf(model) {
  return model.replaceAll("_", " ");
}

function isSame(names, others) {
  return JSON.stringify(names) === JSON.stringify(others);
}
