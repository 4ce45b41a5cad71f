"""API keys: which environment variables hold them, and which processes of a run can read them.

Child processes of a run inherit no keys. `put_away` moves them from the environment to a file in memory; the processes
that need keys open it. docs/security.md lists these processes.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock

FILE = "MEGATRON_COLLAB_KEYS"  # path of the file in memory
SHORTEST = 8  # characters; shorter values occur in ordinary text
_NAME = re.compile(  # NCCL_IB_PKEY is not a key
    r"((?<!P)KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|CONNECTION_STRING|(^|_)(PASS|PAT|JWT|COOKIE))"
    r"(_[A-Z0-9]+)*$",
    re.IGNORECASE,
)
_NO_KEY = re.compile(r"_(CACHE|DIR|ENDPOINT|FILE|FOLDER|HOST|ID|LENGTH|LIMIT|NAME|PATH|PORT|SIZE|TYPE|URI|URL)$", re.I)
_RAY_TOKEN = "RAY_AUTH_TOKEN"  # stays: Ray reads it in each of its processes
_blocks = Counter[str]()  # of `in_environment` that are open, by the keys that they need
_lock = Lock()  # of _blocks


def is_key(name: str, value: str) -> bool:
    """Whether this variable holds a key, as OPENAI_API_KEY, GATEWAY_KEY_2 and VERTEXAI_CREDENTIALS do."""
    return len(value) >= SHORTEST and _is_key_name(name)


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without keys, and without the path to the file that holds them."""
    return {name: value for name, value in variables(environment) if name != FILE and not is_key(name, value)}


def variables(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names and values in `environment`, also while another thread adds and removes some."""
    values = ((name, environment.get(name)) for name in list(environment))
    return [(name, value) for name, value in values if value is not None]


def put_away() -> None:
    """Move the keys out of this process's environment; it must live as long as other processes need them.

    The file survives an exec, which also removes the keys from /proc/PID/environ.
    """
    values = {name: value for name, value in variables(os.environ) if name != _RAY_TOKEN and is_key(name, value)}
    if not values:
        return
    file = os.memfd_create("keys", 0)
    os.fchmod(file, 0o400)
    os.write(file, json.dumps({**_stored(), **values}).encode())
    os.environ[FILE] = f"/proc/{os.getpid()}/fd/{file}"
    for name in values:
        del os.environ[name]


@contextmanager
def in_environment(*names: str) -> Iterator[None]:
    """Within the block the environment has the keys that were put away (or only `names`); set variables stay.

    Blocks of several threads may overlap: a key stays until the last of them ends.
    """
    stored = {name: key for name, key in _stored().items() if name in (names or (name,))}
    with _lock:
        added = {name: key for name, key in stored.items() if _blocks[name] or name not in os.environ}
        _blocks.update([*added])
        os.environ.update(added)
    try:
        yield
    finally:
        with _lock:
            _blocks.subtract([*added])
            for name in added:
                if not _blocks[name]:
                    del os.environ[name]


def take() -> None:
    """Put the keys back into this process's environment for good."""
    os.environ.update(_stored())


def known() -> frozenset[str]:
    """The values of all keys: in this environment, or put away."""
    values = {value for name, value in variables(os.environ) if is_key(name, value)}
    with suppress(OSError):  # the process that holds the file has ended, so this one will too
        values.update(_stored().values())
    return frozenset(values)


def _stored() -> Mapping[str, str]:
    return _read(os.environ[FILE]) if FILE in os.environ else {}


@cache
def _read(path: str) -> Mapping[str, str]:
    return json.loads(Path(path).read_bytes())


@cache
def _is_key_name(name: str) -> bool:
    return bool(_NAME.search(name)) and not _NO_KEY.search(name)
