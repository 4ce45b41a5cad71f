"""Suggests known names that are close to an unknown one in spelling or in words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_MISSPELLED = 0.75  # difflib's ratio for four letters with two of them swapped
_A_PART_LEFT_OUT = 0.9
_ANOTHER_WORD, _BEGINNING = 0.7, 0.6  # similarity of a name with one word more or less, and of a truncated one
_SHARED = 0.55  # smallest share of all letters that is in common words
_SHORTEST_BEGINNING = 4  # letters
_AS_NEAR, _MOST_NAMES = 0.2, 3


def nearest(value: str, names: Iterable[str], group: str = "") -> str:
    """ "; the nearest is NAME" for names of `group` that `value` misspells, truncates, or has with a word more or less.

    Empty if there is none, or if `value` is one of `names`. Names have parts separated by dots or slashes. `value` may
    consist of a name's last parts only, or omit a part between the first and the last. The last part of `value` is
    compared by itself only if it has several words, since a single word can mean something else in another group.
    """
    distinct = dict.fromkeys(names)
    if value in distinct:  # messages are written before it is known whether they are needed
        return ""
    ranked = sorted((-near, place, name) for place, name in enumerate(distinct) if (near := _nearness(value, name)))
    shown = [group + name for near, _, name in ranked if near < ranked[0][0] + _AS_NEAR][:_MOST_NAMES]
    return f"; the nearest {'is' if len(shown) == 1 else 'are'} {', '.join(shown)}" if shown else ""


def _nearness(value: str, name: str) -> float:
    """Similarity: 1 for the same, 0 if neither letters nor words match."""
    value_parts, name_parts = _parts(value), _parts(name)
    forms = [_flatten(value_parts), *([value_parts[-1]] if len(value_parts[-1]) > 1 else [])]
    endings = [_flatten(name_parts[start:]) for start in range(len(name_parts))]
    if spelling := max(_spelling(form, ending) for form in forms for ending in endings):
        return spelling
    if len(name_parts) > len(value_parts) > 1 and [name_parts[0], name_parts[-1]] == [value_parts[0], value_parts[-1]]:
        return _A_PART_LEFT_OUT
    value_words, name_words = {*forms[-1]}, {*name_parts[-1]}
    shared, letters = value_words & name_words, len("".join(value_words | name_words))
    one_apart = len(value_words ^ name_words) == 1
    if one_apart and len(shared) > 1 and len("".join(shared)) >= _SHARED * letters:
        return _ANOTHER_WORD
    beginning, last_part = ("".join(words) for words in (value_parts[-1], name_parts[-1]))
    begins = len(value_parts) == 1 and len(beginning) >= _SHORTEST_BEGINNING and last_part.startswith(beginning)
    return _BEGINNING if begins else 0.0


def _parts(name: str) -> list[list[str]]:
    """The words of each part: [[rollout], [max, messages]]."""
    return [re.split(r"[-_ ]", part) for part in re.split(r"[./]", name.lower())]


def _flatten(parts: list[list[str]]) -> list[str]:
    return [word for part in parts for word in part]


def _spelling(a: list[str], b: list[str]) -> float:
    """Similarity of the two words that differ most; 0 if one is no misspelling of the other."""
    if len(a) != len(b):
        return float("".join(a) == "".join(b))
    return min(map(_likeness, a, b))


def _likeness(a: str, b: str) -> float:
    """Similarity of two words; 0 if not a misspelling, as with two-letter words or different first letters."""
    ratio = difflib.SequenceMatcher(None, a, b).ratio()
    slip = ratio >= _MISSPELLED and a[:1] == b[:1] and max(len(a), len(b)) > 2
    return ratio if a == b or slip else 0.0
