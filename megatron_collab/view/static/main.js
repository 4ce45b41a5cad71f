// Starts the page: which view is shown, the keys, the theme.

import * as api from "./api.js";
import { go, read, VIEWS } from "./address.js";
import { Blind } from "./blind.js";
import { Compare } from "./compare.js";
import { Conversations } from "./conversations.js";
import { element } from "./dom.js";
import { Judge } from "./judge.js";
import { setUpKeyboard } from "./keyboard.js";
import { Overview } from "./overview.js";
import { Talk } from "./talk.js";
import { setUpTheme } from "./theme.js";

const byId = (id) => document.getElementById(id);

function showConnection(message) {
  byId("connection").textContent = message;
}

async function start() {
  setUpTheme(byId("theme"));
  const help = byId("help");
  byId("help-button").addEventListener("click", () => help.showModal());
  let runs;
  try {
    runs = await api.runs();
  } catch (error) {
    byId("main").append(element("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  const blind = new Blind(byId("blind"), runs);
  const views = {
    overview: new Overview(byId("overview"), runs, showConnection),
    conversations: new Conversations(byId("conversations"), runs),
    compare: new Compare(byId("compare"), runs, (sides) => blind.sawNames(sides)),
    blind,
    judge: new Judge(byId("judge"), runs),
    talk: new Talk(byId("talk"), runs),
  };
  const latest = Object.fromEntries(VIEWS.map((view) => [view, {}])); // choices of a view survive a look at the other
  let shown = "";
  const show = () => {
    const { view, choices } = read();
    if (view !== shown) {
      views.conversations.forgetList();
      views.compare.forget();
      views.blind.forget();
      views.talk.forget();
    }
    shown = view;
    latest[view] = choices;
    for (const name of VIEWS) {
      byId(name).hidden = name !== view;
      const link = byId(`to-${name}`);
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${byId(`to-${view}`).textContent} \u00b7 ${runs.map((run) => run.name).join(", ")}`;
    views[view].show(choices);
  };
  for (const name of VIEWS) {
    byId(`to-${name}`).addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // the browser opens another tab
      event.preventDefault();
      go(name, latest[name]);
    });
  }
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash is the view's
    byId("main").focus();
  });
  setUpKeyboard(keys(views, latest, help), byId("help-keys"));
  addEventListener("hashchange", show);
  show();
}

function keys({ conversations, compare, blind, talk }, latest, help) {
  const reading = (action) => () => (read().view === "conversations" ? action() : false);
  const rating = (verdict) => () => (read().view === "blind" ? blind.rate(verdict) : false);
  const rollout = (change) => reading(() => conversations.moveRollout(change));
  const either = (first, second) => () => first() !== false || second();
  const move = (change) => () => {
    const view = { conversations, compare }[read().view];
    return view ? view.move(change) : false;
  };
  return [
    ["j", "next conversation or task of the list", move(1)],
    ["k", "previous conversation or task", move(-1)],
    ["ArrowRight", "next rollout of the group; right is better", either(rating("right"), rollout(1))],
    ["ArrowLeft", "previous rollout; left is better", either(rating("left"), rollout(-1))],
    ["Shift+ArrowRight", "next future of the rollout", reading(() => conversations.moveFuture(1))],
    ["Shift+ArrowLeft", "previous future", reading(() => conversations.moveFuture(-1))],
    ["t", "the tokens of the trained turn, if they are recorded", reading(() => conversations.toggleTokens())],
    ["r", "to the settings of the reward", reading(() => conversations.focusReward())],
    ["=", "in a blind test: both are equal", rating("tie")],
    ["s", "in a blind test: skip", rating("skip")],
    ["w", "in a talk: to the message", () => (read().view === "talk" ? talk.focusText() : false)],
    ["/", "to the filter", () => toFilter(conversations, latest)],
    ["g o", "to the overview", () => go("overview", latest.overview)],
    ["g c", "to the conversations", () => go("conversations", latest.conversations)],
    ["g v", "to the comparison", () => go("compare", latest.compare)],
    ["g b", "to the blind test", () => go("blind", latest.blind)],
    ["g j", "to the judge check", () => go("judge", latest.judge)],
    ["g t", "to the talk", () => go("talk", latest.talk)],
    ["?", "these keys", () => help.showModal()],
  ];
}

function toFilter(conversations, latest) {
  go("conversations", latest.conversations);
  conversations.focusFilter();
}

start();
