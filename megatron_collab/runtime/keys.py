"""Keys of services: which variables of the environment hold them, and which of a run's processes have them.

What a run starts inherits none. `put_away` moves them out of the environment into a file in memory, which those
processes open that need them; docs/security.md says which do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

FILE = "MEGATRON_COLLAB_KEYS"  # holds the path of the file in memory
SHORTEST = 8  # characters; shorter values occur in ordinary text
_NAME = re.compile(  # NCCL_IB_PKEY is none
    r"((?<!P)KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|CONNECTION_STRING|(^|_)(PASS|PAT|JWT|COOKIE))"
    r"(_[A-Z0-9]+)*$",
    re.IGNORECASE,
)
_NO_KEY = re.compile(r"_(CACHE|DIR|ENDPOINT|FILE|FOLDER|HOST|ID|LENGTH|LIMIT|NAME|PATH|PORT|SIZE|TYPE|URI|URL)$", re.I)
_OF_EVERYBODY = "RAY_AUTH_TOKEN"  # Ray reads it in each of its processes


def is_key(name: str, value: str) -> bool:
    """Whether the variable of this name holds a key, as OPENAI_API_KEY, GATEWAY_KEY_2 and VERTEXAI_CREDENTIALS do."""
    return len(value) >= SHORTEST and _named(name)


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a process that needs no key, nor is to find them."""
    return {name: value for name, value in environment.items() if name != FILE and not is_key(name, value)}


def put_away() -> None:
    """Move the keys out of this process's environment; it has to live as long as others need them.

    The file outlives an exec, which removes them from /proc/PID/environ too.
    """
    found = {name: value for name, value in os.environ.items() if name != _OF_EVERYBODY and is_key(name, value)}
    if not found:
        return
    file = os.memfd_create("keys", 0)
    os.fchmod(file, 0o400)
    os.write(file, json.dumps({**_away(), **found}).encode())
    os.environ[FILE] = f"/proc/{os.getpid()}/fd/{file}"
    for name in found:
        del os.environ[name]


@contextmanager
def lent(*names: str) -> Iterator[None]:
    """Within it the environment has the keys that were put away, or those of `names`; none else are changed."""
    added = {name: key for name, key in _away().items() if name in (names or (name,)) and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def take() -> None:
    """Have the keys that were put away in this process's environment from now on."""
    os.environ.update(_away())


def known() -> frozenset[str]:
    """The keys themselves: in this environment, or put away."""
    found = {value for name, value in os.environ.items() if is_key(name, value)}
    with suppress(OSError):  # its process has ended, and this one is about to
        found.update(_away().values())
    return frozenset(found)


def _away() -> Mapping[str, str]:
    return _read(os.environ[FILE]) if FILE in os.environ else {}


@cache
def _read(path: str) -> Mapping[str, str]:
    return json.loads(Path(path).read_bytes())


@cache
def _named(name: str) -> bool:
    return bool(_NAME.search(name)) and not _NO_KEY.search(name)
