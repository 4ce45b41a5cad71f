"""The register of all changes to libraries, and of their private interfaces that the package relies on.

An entry point calls `apply` with the libraries it is about to import; no import changes a library by itself. A change
that needs an object of the library is a function of these modules, called where that object is made; its entry has no
`apply`. `tools/doctor.py` lists what is in force on a machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

# What `apply` takes: the module that an entry point imports next, and the files here with its entries.
_FILES = {
    "megatron": ("cpu", "megatron"),
    "sglang": ("sglang",),
    "torchvision": ("torchvision",),
    "litellm": ("litellm",),
}
_PRIVATE = "private"
_applied: set[str] = set()


def always() -> bool:
    return True


@dataclass(frozen=True)
class Patch:
    """One change to a library, or one private interface of it that is used.

    `library` and `versions`: the distribution, and its versions in the lock files. `upstream`: an issue, or the
    source line that the entry is about. `until`: when it can be removed. `test`: the test that fails without it.
    `attributes`: dotted names of what is replaced or used. `apply` is None where nothing is replaced, or where a
    function called with an object does it; `when`: whether this machine needs it.
    """

    name: str
    library: str
    versions: tuple[str, ...]
    why: str
    upstream: str
    until: str
    test: str
    attributes: tuple[str, ...] = ()
    apply: Callable[[], None] | None = None
    when: Callable[[], bool] = always


def apply(*libraries: str) -> None:
    """Change `libraries` (megatron, sglang, torchvision, litellm) as this machine needs it, once in a process.

    RuntimeError where one has been imported already: some changes would then come too late, without an error.
    """
    for library in libraries:
        if library in _applied:
            continue
        if library in sys.modules:
            raise RuntimeError(f"patches.apply({library!r}) must be called before the first import of {library}")
        for patch in _entries(_FILES[library]):
            if patch.apply is not None and patch.when():
                patch.apply()
        _applied.add(library)


def register() -> list[Patch]:
    """Every entry, whether this machine needs it or not."""
    return _entries([file for files in (*_FILES.values(), (_PRIVATE,)) for file in files])


def in_force() -> list[Patch]:
    """The entries that this machine needs, in the order in which they are applied."""
    return [patch for patch in register() if patch.when()]


def table() -> str:
    """What is in force as lines of text: library and version, name, and when it can be removed."""
    rows = [(f"{patch.library} {'/'.join(patch.versions)}", patch.name, patch.until) for patch in in_force()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{library:{widths[0]}}  {name:{widths[1]}}  until {until}" for library, name, until in rows)


def _entries(files: Sequence[str]) -> list[Patch]:
    return [patch for file in files for patch in import_module(f"{__name__}.{file}").PATCHES]
