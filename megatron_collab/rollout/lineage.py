"""Which weights a version number stands for: a run that goes back to an older checkpoint gives numbers again.

Each version has a digest: that of the one before it and of what its update measured. Weights that come out the same
have the same; where a device adds up in another order, the loss or the norm of the gradient says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

START = "0" * 64  # of the weights that the run began with


class Lineage:
    """The digests of the newest `keep` versions."""

    def __init__(self, keep: int, known: Iterable[Sequence[int | str]] = ()) -> None:
        """`known`: what `state` gave an earlier start of the run."""
        self._keep = keep
        self._digests: dict[int, str] = {int(version): str(digest) for version, digest in known}

    def begin(self, version: int) -> None:
        """The weights that are there now are `version`; where nothing is known yet, the run began with them."""
        if not self._digests:
            self._digests[version] = START

    def learned(self, stats: Mapping[str, float]) -> None:
        """The next version came of an update that measured `stats`, which are the same on all ranks."""
        version = max(self._digests)
        content = f"{self._digests[version]} {sorted(stats.items())}"  # floats to the last bit
        self._digests[version + 1] = hashlib.sha256(content.encode()).hexdigest()
        self._digests = {v: digest for v, digest in self._digests.items() if v > version + 1 - self._keep}

    def digest(self, version: int) -> str | None:
        """That of `version`; None where it is not known, or too old."""
        return self._digests.get(version)

    def state(self) -> list[tuple[int, str]]:
        """For a checkpoint."""
        return list(self._digests.items())
