"""How real simulated users are: whether a classifier can tell their messages from those of a log, and by what.

The classifier is a logistic regression on what can be read in a message. It judges messages of conversations that it
has not seen (cross-validation by groups: a person of the log, a task of the run), and its accuracy is the
mean of the shares of the real and of the simulated messages that it gets right: 0.5 where it cannot tell them apart,
however many there are of each. The interval is that of a bootstrap over the same groups, with the classifier as it is.

Personal data is replaced on both sides, and a placeholder counts as a word without letters and digits: the log's texts
would be told by it, or those of tasks that are made of a log.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from megatron_collab.data.logs import Logged
from megatron_collab.data.personal import PersonalData, Placeholders
from megatron_collab.types import Group

FOLDS = 5
_DRAWS = 1000  # of the bootstrap
_SHOWN = 10  # features
_COMMON = 50  # words that are features of their own
_TOLD = ("please", "thank", "thanks")  # words that are features already
_PLACEHOLDER = re.compile(r"<[A-Z]+_\d+>")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_GIVES_UP = re.compile(
    r"\b(?:never ?mind|forget it|forget about it|give up|giving up|gave up|no use|useless|not helping|waste of time"
    r"|(?:do|try) it myself|(?:someone|somewhere) else)\b",
    re.IGNORECASE,
)
_SAYS = {  # features that are there or not
    "has a question mark": re.compile(r"\?"),
    "has an exclamation mark": re.compile(r"!"),
    "begins with a small letter": re.compile(r"\A\W*[a-z]"),
    "ends without a full stop": re.compile(r"[^.!?…\s]\s*\Z"),
    "has a list or markdown": re.compile(r"^\s*(?:[-*•#]|\d+[.)])\s|\*\*|```", re.MULTILINE),
    "has a contraction": re.compile(r"\w['\u2019](?:s|t|m|re|ll|ve|d)\b", re.IGNORECASE),
    "greets": re.compile(r"\A\W*(?:hi|hello|hey|dear|good (?:morning|day|evening))\b", re.IGNORECASE),
    "thanks": re.compile(r"\b(?:thanks?|thx|thank you|cheers)\b", re.IGNORECASE),
    "says please": re.compile(r"\b(?:please|pls)\b", re.IGNORECASE),
    "has a number": re.compile(r"\d"),
    "has other letters than ASCII": re.compile(r"[^\x00-\x7f]"),
    "gives up": _GIVES_UP,
}


@dataclass(frozen=True)
class Spoken:
    """What a user said in a conversation of `group`: the messages that opened it, if theirs, and those that followed.

    `turns`: messages of the user in the whole conversation.
    """

    group: str
    opening: tuple[str, ...]
    following: tuple[str, ...]
    turns: int

    @property
    def gave_up(self) -> bool:
        """Whether the last message says so."""
        last = (*self.opening, *self.following)[-1:]
        return any(_GIVES_UP.search(text) for text in last)


def real(logged: Iterable[Logged]) -> list[Spoken]:
    """A group is a person."""
    found = []
    for one in logged:
        opened = len(one.opening)
        found.append(Spoken(one.person, tuple(one.opening), tuple(one.said[opened:]), len(one.said)))
    return found


def simulated(groups: Iterable[Group], stop: str, data: PersonalData) -> list[Spoken]:
    """Of every future what its user has said that the task did not give, without the text that ends a conversation, and
    without what is personal.

    The message that opened all conversations about a task is that of the first.
    """
    found = list[Spoken]()
    for group in groups:
        task = group.task
        begins = sum(message.role == "user" for message in task.messages)
        opens = task.played and task.given.unopened
        for conversation in (future.conversation for rollout in group.rollouts for future in rollout.futures):
            places = Placeholders(data)
            for message in conversation.messages:
                places.read(message.content)
            said = [message.content for message in conversation.messages if message.role == "user"]
            clean = [places.replaced(text.replace(stop, "").strip()) for text in said]
            following = tuple(filter(None, clean[begins:]))
            found.append(Spoken(task.id, tuple(clean[:begins]) if opens else (), following, begins + len(following)))
            opens = False
    return found


def compare(real: Sequence[Spoken], simulated: Sequence[Spoken], seed: int) -> dict[str, Any]:
    """Accuracy and interval of the classifier, features and rates, as JSON.

    Where the simulated users open no conversation, the messages that open those of the log are not compared either.
    ValueError where there is too little to compare.
    """
    opened = any(one.opening for one in simulated)
    texts, labels, groups = list[str](), list[int](), list[str]()
    for label, side in enumerate((real, simulated)):
        for one in side:
            said = (*one.opening, *one.following) if opened else one.following
            texts += said
            labels += [label] * len(said)
            groups += [f"{label}/{one.group}"] * len(said)
    for label, what in enumerate(("the log", "the run")):
        there = len({group for group, of in zip(groups, labels, strict=True) if of == label})
        if there < FOLDS:
            of = "people" if label == 0 else "tasks"
            raise ValueError(f"{what} has messages of {there} {of} to compare; there must be at least {FOLDS}")
    names, values = _table([_PLACEHOLDER.sub("_", text) for text in texts])
    told, which = np.array(labels), np.unique(groups, return_inverse=True)[1]
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    right = cross_val_predict(_classifier(), values, told, groups=which, cv=folds) == told
    weights = _classifier().fit(values, told)[-1].coef_[0]
    order = np.argsort(-np.abs(weights), kind="stable")[:_SHOWN]
    return {
        "accuracy": _accuracy(right, told),
        "interval": _interval(right, told, which, seed),
        "messages": [int((told == label).sum()) for label in (0, 1)],
        "features": [
            {
                "feature": names[at],
                "weight": float(weights[at]),
                "real": float(values[told == 0, at].mean()),
                "simulated": float(values[told == 1, at].mean()),
            }
            for at in order
        ],
        "rates": {name: [_number(of(side)) for side in (real, simulated)] for name, of in RATES.items()},
    }


def shown(found: Mapping[str, Any]) -> str:
    """What `compare` gives, to be read."""
    (low, high), accuracy = found["interval"], found["accuracy"]
    compared = "{} messages of the log, {} of the run".format(*found["messages"])
    lines = [f"told apart with accuracy {accuracy:.3f} (95 % {low:.3f} to {high:.3f}; by chance 0.5), {compared}", ""]
    width = max(map(len, (*found["rates"], *(each["feature"] for each in found["features"]))))
    lines += [f"{'':{width}} {'log':>10} {'run':>10}"]
    lines += [f"{name:{width}} {_cell(a)} {_cell(b)}" for name, (a, b) in found["rates"].items()]
    lines += ["", f"{'what tells them apart (mean)':{width}} {'log':>10} {'run':>10} {'weight':>10}"]
    for each in found["features"]:
        lines.append(
            f"{each['feature']:{width}} {_cell(each['real'])} {_cell(each['simulated'])} {each['weight']:>+10.2f}"
        )
    return "\n".join([*lines, "", "A weight above 0 speaks for the run, below 0 for the log."])


def _openings(side: Sequence[Spoken]) -> list[str]:
    return ["\n".join(one.opening) for one in side if one.opening]


def _said(side: Sequence[Spoken]) -> list[str]:
    return [text for one in side for text in one.following]


def _share(texts: Sequence[str], feature: str) -> float:
    return _mean([bool(_SAYS[feature].search(text)) for text in texts])


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _words(text: str) -> int:
    return len(text.split())


RATES: dict[str, Callable[[Sequence[Spoken]], float]] = {
    "conversations": len,
    "messages of the user": lambda side: _mean([one.turns for one in side]),
    "openings: words": lambda side: _mean([_words(text) for text in _openings(side)]),
    "openings: with a question": lambda side: _share(_openings(side), "has a question mark"),
    "openings: with a greeting": lambda side: _share(_openings(side), "greets"),
    "later messages: words": lambda side: _mean([_words(text) for text in _said(side)]),
    "later messages: words, median": lambda side: median(map(_words, texts)) if (texts := _said(side)) else math.nan,
    "later messages: with a question": lambda side: _share(_said(side), "has a question mark"),
    "conversations given up": lambda side: _mean([one.gave_up for one in side]),
}


def _table(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The names of the features, and their values, a row for each text."""
    often = Counter(word for text in texts for word in set(_spoken(text)) if word not in _TOLD)
    common = [word for word, _ in sorted(often.items(), key=lambda each: (-each[1], each[0]))[:_COMMON]]
    names = ["words (logarithm)", "lines (logarithm)", "letters of a word", "share of capitals", "commas a word"]
    names += [*_SAYS, *(f"word: {word}" for word in common)]
    values = np.empty((len(texts), len(names)))  # a row at a time: a log has a million messages
    for row, text in zip(values, texts, strict=True):
        spoken, words = _spoken(text), _words(text)
        there = set(spoken)
        row[:5] = (
            math.log1p(words),
            math.log1p(text.count("\n")),
            _mean([len(word) for word in spoken] or [0]),
            _mean([letter.isupper() for letter in text if letter.isalpha()] or [0]),
            text.count(",") / max(words, 1),
        )
        row[5:] = [
            *(bool(rule.search(text)) for rule in _SAYS.values()),
            *(word in there for word in common),
        ]
    return names, values


def _spoken(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _classifier() -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000))


def _accuracy(right: np.ndarray, told: np.ndarray) -> float:
    return float(np.mean([right[told == label].mean() for label in (0, 1)]))


def _interval(right: np.ndarray, told: np.ndarray, group: np.ndarray, seed: int) -> list[float]:
    """The 2.5 and 97.5 percentiles of the accuracy over samples of as many groups of each side, with replacement."""
    draws = np.random.default_rng(seed)
    shares = []
    for label in (0, 1):
        of = np.unique(group[told == label], return_inverse=True)[1]
        hits, messages = (np.bincount(of, weights) for weights in (right[told == label], None))
        drawn = (draws.integers(len(messages), size=len(messages)) for _ in range(_DRAWS))
        shares.append([hits[each].sum() / messages[each].sum() for each in drawn])
    return [float(np.quantile(np.mean(shares, axis=0), share)) for share in (0.025, 0.975)]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>10}"
