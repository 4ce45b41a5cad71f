"""No silent hang: a thread on every rank knows whether anything moves, and ends the run where nothing does.

The ranks count their moves (heartbeat.py) together, in the run's store: one that waits for a slow one has time.
Where none has moved for launch.timeout seconds all of them write their stacks, one says who waits where for whom, and
every process ends with EXIT_HUNG. A process whose threads cannot run, since one never gives up the interpreter, is
ended by faulthandler.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from megatron_collab.config import Config
from megatron_collab.runtime import heartbeat, stacks
from megatron_collab.runtime.process import EXIT_HUNG, global_rank

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # that ranks may take to say where they are, once there is alarm
GRACE_SECONDS = 30.0  # after which faulthandler ends a process whose watch has not
_COLLECTIVES = 10  # times launch.timeout: a collective may wait for a rank that is slow and moves


def collective_timeout(timeout: float) -> timedelta:
    """A group's own, where launch.timeout is `timeout`: the alarm comes first, and knows who is slow and moves."""
    return timedelta(seconds=_COLLECTIVES * timeout)


@contextmanager
def armed(config: Config) -> Iterator[None]:
    """Watch this rank within it, together with the others; needs the store of torchrun's environment."""
    folder = Path(config.run.dir) / stacks.FOLDER
    watchman = _Watchman(global_rank(), int(os.environ["WORLD_SIZE"]), config.launch.timeout, folder)
    watchman.start()
    try:
        yield
    finally:
        watchman.stop()


@dataclass(frozen=True)
class Account:
    """What a rank says of itself: where it is, its innermost frame, the collective that it waits in or "", and the
    seconds since it moved."""

    place: str
    frame: str
    call: str
    seconds: float


class _Watchman(threading.Thread):
    def __init__(self, rank: int, ranks: int, timeout: float, folder: Path) -> None:
        super().__init__(name="alarm", daemon=True)
        self.rank, self.ranks, self.timeout, self.folder = rank, ranks, timeout, folder
        self._leads = os.environ["LOCAL_RANK"] == "0"  # and asks the node's other processes
        if self._leads:
            stacks.clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank-{rank}.txt").open("a")
        self._over = threading.Event()
        # A line of its own, since one that waits holds up who shares it; restarts by torchrun share a store.
        address, attempt = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        limit = timedelta(seconds=max(timeout, ANSWER_SECONDS))
        store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
        self._store = dist.PrefixStore(f"alarm/{attempt}", store)
        self._moved = time.monotonic()

    def stop(self) -> None:
        self._over.set()
        self.join(ANSWER_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):  # the folder may be gone, or its file system, and the run has ended well
            self._file.close()
            if os.path.getsize(self._file.name) == 0:
                os.unlink(self._file.name)
        if self._leads:
            stacks.clear(self.folder)

    def run(self) -> None:
        moves = counted = -1
        anywhere = time.monotonic()
        while not self._over.wait(LOOK_SECONDS):
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, file=self._file, exit=True)
            now, before, counted_before = time.monotonic(), moves, counted
            moves = heartbeat.here.moves
            if moves != before:
                self._moved = now
            try:
                counted = self._store.add("moves", int(moves != before))
                if counted != counted_before:
                    anywhere = now
                if now - anywhere > self.timeout or self._store.check(["alarm"]):
                    self._end(self._alarm)
            except dist.DistError as error:
                if self._over.is_set():
                    return
                lost = f"rank {self.rank} has lost the run's store, and with it the run: {error}"
                # Who held it has ended, for a reason that it knows.
                self._end(lambda account: _say(lost), code=1)  # noqa: B023 (it does not return)

    def _end(self, tell: Callable[[Account], None], code: int = EXIT_HUNG) -> None:
        """Write the stacks, tell why, end the process, whatever of that hangs."""
        faulthandler.dump_traceback_later(GRACE_SECONDS, file=self._file, exit=True)
        account = Account(heartbeat.here.place, *stacks.innermost(), time.monotonic() - self._moved)
        _within(2.0, lambda: self._dump(account))  # where the file system is frozen, this is
        _within(2 * ANSWER_SECONDS, lambda: tell(account))
        os._exit(code)

    def _dump(self, account: Account) -> None:
        print(f"{account.place}, {account.seconds:.0f} s without a move", file=self._file, flush=True)
        faulthandler.dump_traceback(self._file)

    def _alarm(self, account: Account) -> None:
        """Say where this rank is; the one that was first to raise the alarm says it of all, and the others wait."""
        first = self._store.compare_set("alarm", "", str(self.rank)) == str(self.rank).encode()
        self._store.set(_key(self.rank), json.dumps(astuple(account)))
        if self._leads:
            _within(ANSWER_SECONDS / 2, lambda: stacks.ask(self.folder))
        if not first:
            with suppress(dist.DistError):  # it may hang itself
                self._store.wait(["told"], timedelta(seconds=2 * ANSWER_SECONDS))
            return
        keys = {rank: _key(rank) for rank in range(self.ranks)}
        with suppress(dist.DistStoreError):
            self._store.wait(list(keys.values()), timedelta(seconds=ANSWER_SECONDS))
        answers = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        accounts = {rank: Account(*json.loads(answer)) for rank, answer in answers.items()}
        _say(describe(accounts, self.ranks, self.timeout, self.folder))
        self._store.set("told", "")


def _key(rank: int) -> str:
    return f"account/{rank}"


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Wait for a call so long, and no longer."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _say(message: str) -> None:
    print(f"megatron-collab: {message}", file=sys.stderr, flush=True)


def describe(accounts: Mapping[int, Account], ranks: int, timeout: float, folder: Path) -> str:
    """Who waits where, for whom, since when; `accounts` are of the ranks, of all `ranks`, that gave one."""
    lines = [f"nothing has moved for launch.timeout={timeout:g} s, so the run ends; stacks are in {folder}"]
    standing: dict[tuple[str, str, str], list[int]] = {}
    for rank, account in sorted(accounts.items()):
        standing.setdefault((account.place, account.frame, account.call), []).append(rank)
    for (place, frame, call), some in standing.items():
        seconds = min(accounts[rank].seconds for rank in some)
        lines.append(f"{_named(some)}: {place}, {frame}, {f'in {call}, ' if call else ''}for {seconds:.0f} s")
    if silent := [rank for rank in range(ranks) if rank not in accounts]:
        lines.append(f"{_named(silent)}: no answer; the process is stopped or has ended, or its machine is gone")
    waiting = max((some for (_, _, call), some in standing.items() if call), key=len, default=[])
    awaited = [rank for rank in range(ranks) if rank not in waiting]
    if waiting and awaited:
        lines.append(f"{_named(waiting)} wait{'s' if len(waiting) == 1 else ''} for {_named(awaited)}")
    return "\n  ".join(lines)


def _named(ranks: Sequence[int]) -> str:
    """Ranks in order, as "ranks 0-3, 7"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
