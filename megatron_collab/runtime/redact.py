"""Redacts API keys from all output, printed or written.

A key is the value of an environment variable whose name is a key's (keys.py), also if escaped as in Python, JSON or a
URL, or a text that looks like a key: in the format of a common service, or after a name such as api_key.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import cache, partial
from typing import Any
from urllib.parse import quote

from megatron_collab.runtime import keys

HIDDEN = "***"
LONGEST_EXCERPT, _CUT = 20_000, "… [cut]"  # characters of a text from a model that transcripts keep; mark of a cut

_KEY_CHARACTERS = "".join(map(chr, range(33, 127)))  # of keys in the formats below

_DIGIT = r"(?=[\w-]{0,64}\d)"
_IS = r"[\"']?\s*[:=]\s*b?[\"']?"  # between name and value, in headers, settings, JSON and Python
_VALUE = r"(?=[^\s\"',;]{0,200}\d)[^\s\"',;]{8,}"  # ordinary text has such names too, mostly followed by words
# Trigger words (lower case) and pattern. A pattern is tried only if the text has one of its words: most texts have few.
# If a pattern has a group, only the text after the group is hidden. Time is linear in the length of the text.
_FORMS = (
    (("sk-", "rk-", "xai-"), rf"\b(?:c?sk|rk|xai)-{_DIGIT}[\w-]{{16,}}"),
    (("pplx-", "tvly-", "glpat-", "nvapi-"), rf"\b(?:pplx|tvly|glpat|nvapi)-{_DIGIT}[\w-]{{16,}}"),
    (("pypi-", "gocspx-", "pa-"), rf"\b(?:pypi|GOCSPX)-{_DIGIT}[\w-]{{16,}}|\bpa-{_DIGIT}\w{{40,}}"),
    (("aiza", "aq.", "ya29."), r"\bAIza[\w-]{30,}|\bAQ\.[\w-]{30,}|\bya29\.[\w.-]{20,}"),
    (("hf_", "gsk_", "fw_", "r8_", "npm_"), r"\b(?:hf|gsk|fw|r8|npm)_(?=[A-Za-z]{0,64}\d)[A-Za-z0-9]{20,}"),
    (("gho_", "ghp_", "ghr_", "ghs_", "ghu_"), r"\bgh[oprsu]_[A-Za-z0-9]{20,}"),
    (("github_pat_",), r"\bgithub_pat_\w{20,}"),
    (("tgp_v1_", "wandb_v1_", "lsv2_"), rf"\b(?:tgp_v1|wandb_v1|lsv2_[ps][tk])_{_DIGIT}[\w-]{{16,}}"),
    (("k_live_", "k_test_", "_v1_"), rf"\b(?:[prs]k_(?:live|test)|do[opr]_v1)_{_DIGIT}[\w-]{{16,}}"),
    (("akia", "asia", "absk"), r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bABSK[\w+/=]{30,}"),
    (("bedrock-api-key-", "dapi"), r"\bbedrock-api-key-[\w+/=-]{20,}|\bdapi[0-9a-f]{32}"),
    (("xox", "sg."), rf"\bxox[abeoprs]-{_DIGIT}[\w-]{{10,}}|\bSG\.[\w-]{{16,64}}\.[\w-]{{16,}}"),
    (("eyj",), r"\beyJ[\w-]{10,300}\.eyJ[\w-]{10,}\.[\w-]{5,}"),  # JSON web tokens
    (
        ("private key",),
        r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[\w+/=\s\\]*+(?:-----END [A-Z ]{0,20}PRIVATE KEY-----)?",
    ),
    (("://",), r"(?<=://)[^\s/@:]++:[^\s/@]++(?=@)"),
    (
        ("?", "&"),
        r"(?i:(?<=[?&])(?:api[_-]?key|key|(?:access[_-]?)?token|(?:client[_-]?)?secret|password|sig|signature"
        r"|subscription-key|x-amz-(?:credential|signature|security-token))=[^\s&#\"']+)",
    ),
    (("bearer ",), r"((?i:\bbearer ))(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{8,}"),
    (
        ("basic ",),
        r"((?i:\bbasic ))(?=\S{0,64}[A-Z])(?=\S{0,200}[\d=])(?:[A-Za-z0-9+/]{4}){2,}+[A-Za-z0-9+/]{0,3}={0,2}",
    ),
    (("authorization",), rf"((?i:authorization{_IS}(?:basic|bearer|token|digest|negotiate|apikey)\s+))[^\s\"',]{{6,}}"),
    (("cookie",), rf"((?i:cookie{_IS}))[\w.-]++=[^\s\"';]++(?:;\s*+[\w.-]++=[^\s\"';]++)*+"),
    (("-key", "-token"), rf"((?i:(?:api-key|auth-token|security-token|subscription-key){_IS})){_VALUE}"),
    (
        ("_key", "_token", "_secret", "_passw"),
        rf"(_(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)(?:_\d+)?{_IS}|(?i:session_token|client_secret){_IS}){_VALUE}",
    ),
    (("key",), rf"((?i:(?:api|access|account|secret)_?key{_IS})){_VALUE}"),
    (("passw",), rf"((?i:passw(?:or)?d{_IS})){_VALUE}"),
)


def redact(text: str) -> str:
    """`text` with every key replaced by ***."""
    return _redacted(text, _written_forms(keys.known()))


def excerpt(text: str) -> str:
    """A model's `text` as transcripts keep it: at most LONGEST_EXCERPT characters, of which the last mark a cut.

    Keys are replaced by *** before it is cut, which could halve one. Halves of surrogate pairs, which no file can
    hold, become ?.
    """
    text = redact(text.encode(errors="replace").decode())
    return text if len(text) <= LONGEST_EXCERPT else text[: LONGEST_EXCERPT - len(_CUT)] + _CUT


def key_spans(text: str) -> list[tuple[int, int]]:
    """Begin and end of every key in `text`."""
    pattern = _pattern(text, _written_forms(keys.known()))
    matches = re.finditer(pattern, text) if pattern else ()
    return [(match.end(match.lastindex) if match.lastindex else match.start(), match.end()) for match in matches]


def without_begun_key(text: str) -> str:
    """The beginning of a `text` that still grows, up to where a key may begin that is not whole yet.

    That is the last word, as a key of a common service has no spaces, or more if it ends like a known key begins. No
    key is halved: one that would be is left out, too.
    """
    known = _written_forms(keys.known())
    end = min([len(text.rstrip(_KEY_CHARACTERS)), *(_begun(form, text) for form in known)])
    return text[: next((first for first, last in key_spans(text) if first < end < last), end)]


def redacted(tree: Any) -> Any:
    """`tree` of mappings and lists (tuples become lists), with every key in its strings replaced by ***."""
    known = _written_forms(keys.known())
    redact_once = cache(lambda text: _redacted(text, known))  # futures share names and first messages

    def walk(part: Any) -> Any:
        if isinstance(part, str):
            return redact_once(part)
        if isinstance(part, Mapping):
            return {walk(name): walk(value) for name, value in part.items()}
        return [walk(value) for value in part] if isinstance(part, list | tuple) else part

    return walk(tree)


def redact_output() -> None:
    """From now on, redact what Python prints in this process: lines, logs, tracebacks of uncaught exceptions.

    All of it passes `write` of sys.stdout and sys.stderr, each message and each source line in one call.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and "write" not in vars(stream):
            vars(stream)["write"] = partial(_write, stream.write)


def _write(write: Any, text: str) -> int:
    write(redact(text))
    return len(text)


@cache
def _written_forms(known: frozenset[str]) -> tuple[str, ...]:
    """The keys in every escaped form, longest first, since one may be a prefix of another."""
    forms = {form for key in known for form in (key, repr(key)[1:-1], json.dumps(key)[1:-1], quote(key, safe=""))}
    return tuple(sorted(forms, key=len, reverse=True))


def _begun(form: str, text: str) -> int:
    """The length of `text` without the longest end with which `form` begins."""
    ends = range(max(0, len(text) - len(form)), len(text))
    return next((at for at in ends if form.startswith(text[at:])), len(text))


def _redacted(text: str, known: tuple[str, ...]) -> str:
    pattern = _pattern(text, known)
    return re.sub(pattern, _hidden, text) if pattern else text  # re caches compiled patterns


def _pattern(text: str, known: tuple[str, ...]) -> str:
    """The pattern of the keys that `text` may have; empty if it can have none."""
    low = text.lower()
    parts = [re.escape(key) for key in known if key in text]
    parts += [form for words, form in _FORMS if any(word in low for word in words)]
    return "|".join(parts)


def _hidden(match: re.Match[str]) -> str:
    return (match[match.lastindex] if match.lastindex else "") + HIDDEN
