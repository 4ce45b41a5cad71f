"""The register of all changes to libraries, and of their private interfaces that the package relies on.

An entry point calls `apply` with the libraries it is about to import; no import changes a library by itself. A change
that needs an object of the library is a function of these modules, called where that object is made; its entry has
neither `sets` nor `apply`. `tools/doctor.py` lists what is in force on a machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

# What `apply` takes: the module that an entry point imports next, and where its entries are.
_ENTRIES = {
    "megatron": ("cpu:PATCHES", "megatron:PATCHES"),
    "sglang": ("sglang:PATCHES",),
    "torchvision": ("sglang:TORCHVISION",),
    "litellm": ("litellm:PATCHES",),
}
VERSIONS = {  # of the distributions, in the lock files
    "torch": ("2.13.0", "2.14.1"),
    "torchvision": ("0.28.0", "0.29.2"),
    "megatron-core": ("0.16.1",),
    "sglang": ("0.5.23",),
    "litellm": ("1.106.2",),
}
_applied: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """One change to the distribution `library`, or one private interface of it that is used.

    `upstream`: an issue, or the source line that the entry is about. `until`: when it can be removed. `test`: the
    test that fails without it. `sets`: what is replaced, by its dotted name, and with what; `apply`: what else is
    done. `uses`: dotted names of what `apply` or code elsewhere replaces or calls. `when`: whether this machine
    needs it.
    """

    library: str
    name: str
    why: str
    upstream: str
    until: str
    test: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    apply: Callable[[], None] | None = None
    when: Callable[[], bool] = lambda: True

    def put_in_force(self) -> None:
        for attribute, value in self.sets.items():
            owner, _, name = attribute.rpartition(".")
            setattr(resolve_name(owner), name, value)
        if self.apply:
            self.apply()


def apply(*libraries: str) -> None:
    """Change `libraries` (megatron, sglang, torchvision, litellm) as this machine needs it, once in a process.

    RuntimeError where one has been imported already: some changes would then come too late, without an error.
    """
    for library in libraries:
        if library in _applied:
            continue
        if library in sys.modules:
            raise RuntimeError(f"patches.apply({library!r}) must be called before the first import of {library}")
        for patch in _entries(_ENTRIES[library]):
            if patch.when():
                patch.put_in_force()
        _applied.add(library)


def register() -> list[Patch]:
    """Every entry, whether this machine needs it or not."""
    return _entries([place for places in (*_ENTRIES.values(), ("private:PATCHES",)) for place in places])


def in_force() -> list[Patch]:
    """The entries that this machine needs, in the order in which they are applied."""
    return [patch for patch in register() if patch.when()]


def table() -> str:
    """What is in force as lines of text: library and version, name, and when it can be removed."""
    rows = [(f"{patch.library} {'/'.join(VERSIONS[patch.library])}", patch.name, patch.until) for patch in in_force()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{library:{widths[0]}}  {name:{widths[1]}}  until {until}" for library, name, until in rows)


def _entries(places: Sequence[str]) -> list[Patch]:
    return [patch for place in places for patch in resolve_name(f"{__name__}.{place}")]
