"""A full disk."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from megatron_collab.config import Config
from megatron_collab.runtime import rank0
from megatron_collab.runtime.process import RunStopped
from megatron_collab.trainer.megatron import parallel

FULL = OSError(errno.ENOSPC, "No space left on device", "/run/file")


def test_a_full_disk_on_rank_0_stops_all_ranks(one_rank: Config) -> None:
    def write() -> None:
        raise FULL

    with pytest.raises(RunStopped, match=r"^/run/file: cannot be written: No space left on device; free "):
        rank0.shared(write)


@pytest.mark.parametrize(
    ("rank", "leader_ended", "error", "raised", "explained"),
    [
        (0, False, FULL, RunStopped, 1),
        (1, False, FULL, RunStopped, 1),
        (1, True, RuntimeError("Connection closed by peer"), RunStopped, 0),
        (1, False, RuntimeError("Connection closed by peer"), RuntimeError, 0),
        (0, False, FileNotFoundError(errno.ENOENT, "No such file"), FileNotFoundError, 0),
    ],
)
def test_a_rank_explains_a_full_disk_and_not_what_rank_0_has_explained(
    rank: int,
    leader_ended: bool,
    error: Exception,
    raised: type[Exception],
    explained: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SimpleNamespace(set=lambda *_: None, check=lambda keys: leader_ended)
    monkeypatch.setattr(parallel, "run_store", lambda: (store, rank, 2))
    lines: list[RunStopped] = []
    with pytest.raises(raised) as end, parallel.leader_ends_first(1.0, lines.append):
        raise error
    assert end.type is raised and len(lines) == explained
