"""Realism of simulated users: how well a classifier separates their messages from a log's, and by which features.

The classifier is a logistic regression on surface features of a message. It is evaluated on held-out conversations
(cross-validation by groups: a person of the log, a task of the run). Its accuracy is the balanced accuracy, the mean of
the shares of correctly classified real and simulated messages: 0.5 if they cannot be separated, regardless of their
numbers. The interval is from a bootstrap over the same groups, without refitting the classifier.

Personal data is replaced on both sides, and a placeholder counts as a word without letters and digits; otherwise it
would reveal the texts of the log, or of tasks made from a log.
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

from megatron_collab.observability.records import finite
from megatron_collab.statistics import bootstrap, wilson
from megatron_collab.types import Group
from megatron_collab.user_logs.logs import LoggedConversation
from megatron_collab.user_logs.personal import PersonalData, Placeholders

FOLDS = 5
_SHOWN = 10  # features in the report
_COMMON = 50  # most common words, each a feature
_COVERED_WORDS = ("please", "thank", "thanks")  # words that other features cover
_PLACEHOLDER = re.compile(r"<[A-Z]+_\d+>")
_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?")
_GIVES_UP = re.compile(
    r"\b(?:never ?mind|forget it|forget about it|give up|giving up|gave up|no use|useless|not helping|waste of time"
    r"|(?:do|try) it myself|(?:someone|somewhere) else)\b",
    re.IGNORECASE,
)
_SAYS = {  # binary features
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
class UserMessages:
    """A user's messages in a conversation of `group`: the opening messages, if the user wrote them, and the later ones.

    `turns`: number of the user's messages in the whole conversation.
    """

    group: str
    opening: tuple[str, ...]
    following: tuple[str, ...]
    turns: int

    @property
    def gave_up(self) -> bool:
        """Whether the user's last message says that they give up."""
        last = (*self.opening, *self.following)[-1:]
        return any(_GIVES_UP.search(text) for text in last)


def log_messages(logged: Iterable[LoggedConversation]) -> list[UserMessages]:
    """The user messages of the log; a group is a person."""
    conversations = []
    for conversation in logged:
        opening = tuple(conversation.opening)
        later = tuple(conversation.user_texts[len(opening) :])
        conversations.append(UserMessages(conversation.person, opening, later, len(conversation.user_texts)))
    return conversations


def run_messages(groups: Iterable[Group], stop: str, data: PersonalData) -> list[UserMessages]:
    """The messages that simulated users wrote in every future, without the stop text and with personal data replaced.

    If the user opened the conversations about a task, the shared opening is counted in the first one.
    """
    conversations = list[UserMessages]()
    for group in groups:
        task = group.task
        task_turns = sum(message.role == "user" for message in task.messages)
        with_opening = task.played and task.original.unopened
        for conversation in (future.conversation for rollout in group.rollouts for future in rollout.futures):
            placeholders = Placeholders(data)
            for message in conversation.messages:
                placeholders.read(message.content)
            texts = [message.content for message in conversation.messages if message.role == "user"]
            clean = [placeholders.replaced(text.replace(stop, "").strip()) for text in texts]
            following = tuple(filter(None, clean[task_turns:]))
            opening = tuple(clean[:task_turns]) if with_opening else ()
            conversations.append(UserMessages(task.id, opening, following, task_turns + len(following)))
            with_opening = False
    return conversations


def compare(real: Sequence[UserMessages], simulated: Sequence[UserMessages], seed: int) -> dict[str, Any]:
    """Accuracy and interval of the classifier, features and rates, as JSON.

    If the simulated users open no conversation, the log's opening messages are not compared either. Raises ValueError
    if there are too few groups.
    """
    opened = any(conversation.opening for conversation in simulated)
    texts, labels, groups = list[str](), list[int](), list[str]()
    for label, side in enumerate((real, simulated)):
        for conversation in side:
            messages = (*conversation.opening, *conversation.following) if opened else conversation.following
            texts += messages
            labels += [label] * len(messages)
            groups += [f"{label}/{conversation.group}"] * len(messages)
    for label, source in enumerate(("the log", "the run")):
        count = len({group for group, group_label in zip(groups, labels, strict=True) if group_label == label})
        if count < FOLDS:
            unit = "people" if label == 0 else "tasks"
            raise ValueError(f"{source} has messages of only {count} {unit} to compare; at least {FOLDS} are needed")
    names, values = _table([_PLACEHOLDER.sub("_", text) for text in texts])
    label_array, group_numbers = np.array(labels), np.unique(groups, return_inverse=True)[1]
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    correct = cross_val_predict(_classifier(), values, label_array, groups=group_numbers, cv=folds) == label_array
    weights = _classifier().fit(values, label_array)[-1].coef_[0]
    order = np.argsort(-np.abs(weights), kind="stable")[:_SHOWN]
    return {
        "accuracy": _accuracy(correct, label_array),
        "interval": _interval(correct, label_array, group_numbers),
        "messages": [int((label_array == label).sum()) for label in (0, 1)],
        "features": [
            {
                "feature": names[at],
                "weight": float(weights[at]),
                "real": float(values[label_array == 0, at].mean()),
                "simulated": float(values[label_array == 1, at].mean()),
            }
            for at in order
        ],
        "rates": {name: finite([rate(side) for side in (real, simulated)]) for name, rate in RATES.items()},
    }


def comparison_text(comparison: Mapping[str, Any]) -> str:
    """The result of `compare` as text."""
    (low, high), accuracy = comparison["interval"], comparison["accuracy"]
    counts = "{} messages of the log, {} of the run".format(*comparison["messages"])
    lines = [f"distinguished with accuracy {accuracy:.3f} (95 % {low:.3f} to {high:.3f}; by chance 0.5), {counts}", ""]
    width = max(map(len, (*comparison["rates"], *(row["feature"] for row in comparison["features"]))))
    lines += [f"{'':{width}} {'log':>10} {'run':>10}"]
    lines += [f"{name:{width}} {_cell(a)} {_cell(b)}" for name, (a, b) in comparison["rates"].items()]
    lines += ["", f"{'feature (mean)':{width}} {'log':>10} {'run':>10} {'weight':>10}"]
    for row in comparison["features"]:
        lines.append(f"{row['feature']:{width}} {_cell(row['real'])} {_cell(row['simulated'])} {row['weight']:>+10.2f}")
    return "\n".join([*lines, "", "A weight above 0 indicates the run, below 0 the log."])


def _openings(side: Sequence[UserMessages]) -> list[str]:
    return ["\n".join(conversation.opening) for conversation in side if conversation.opening]


def _later_messages(side: Sequence[UserMessages]) -> list[str]:
    return [text for conversation in side for text in conversation.following]


def _share(texts: Sequence[str], feature: str) -> float:
    return _mean([bool(_SAYS[feature].search(text)) for text in texts])


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _words(text: str) -> int:
    return len(text.split())


RATES: dict[str, Callable[[Sequence[UserMessages]], float]] = {
    "conversations": len,
    "messages of the user": lambda side: _mean([conversation.turns for conversation in side]),
    "openings: words": lambda side: _mean([_words(text) for text in _openings(side)]),
    "openings: with a question": lambda side: _share(_openings(side), "has a question mark"),
    "openings: with a greeting": lambda side: _share(_openings(side), "greets"),
    "later messages: words": lambda side: _mean([_words(text) for text in _later_messages(side)]),
    "later messages: words, median": lambda side: (
        median(map(_words, texts)) if (texts := _later_messages(side)) else math.nan
    ),
    "later messages: with a question": lambda side: _share(_later_messages(side), "has a question mark"),
    "conversations given up": lambda side: _mean([conversation.gave_up for conversation in side]),
}


def _table(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The names of the features, and their values, one row per text."""
    frequency = Counter(word for text in texts for word in set(_word_list(text)) if word not in _COVERED_WORDS)
    common = [word for word, _ in sorted(frequency.items(), key=lambda item: (-item[1], item[0]))[:_COMMON]]
    names = ["words (logarithm)", "lines (logarithm)", "letters of a word", "share of capitals", "commas a word"]
    names += [*_SAYS, *(f"word: {word}" for word in common)]
    values = np.empty((len(texts), len(names)))  # filled row by row: a log has a million messages
    for row, text in zip(values, texts, strict=True):
        words, word_count = _word_list(text), _words(text)
        word_set = set(words)
        row[:5] = (
            math.log1p(word_count),
            math.log1p(text.count("\n")),
            _mean([len(word) for word in words] or [0]),
            _mean([letter.isupper() for letter in text if letter.isalpha()] or [0]),
            text.count(",") / max(word_count, 1),
        )
        row[5:] = [
            *(bool(rule.search(text)) for rule in _SAYS.values()),
            *(word in word_set for word in common),
        ]
    return names, values


def _word_list(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _classifier() -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, class_weight="balanced", max_iter=1000))


def _accuracy(correct: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean([correct[labels == label].mean() for label in (0, 1)]))


def _interval(correct: np.ndarray, labels: np.ndarray, group: np.ndarray) -> list[float]:
    """The interval of the accuracy over each side's groups.

    If all messages are classified alike, bootstrap samples do not differ. The interval then is that of the mean of two
    independent shares (Zou and Donner 2008), each with Wilson's interval of its number of groups.
    """
    sides = []
    for label in (0, 1):
        group_numbers = np.unique(group[labels == label], return_inverse=True)[1]
        sides.append([np.bincount(group_numbers, weights) for weights in (correct[labels == label], None)])

    if correct.min() == correct.max():
        share = float(correct[0])
        widths = [abs(share - end) for hits, _ in sides for end in wilson(share, len(hits)) if end != share]
        return sorted((share, abs(share - math.hypot(*widths) / 2)))

    def accuracy(*groups: np.ndarray) -> np.ndarray:
        shares = [
            hits[drawn].sum(-1) / sizes[drawn].sum(-1) for (hits, sizes), drawn in zip(sides, groups, strict=True)
        ]
        return np.mean(shares, axis=0)

    return list(bootstrap([len(hits) for hits, _ in sides], accuracy))


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>10}"
