"""Ends a run that hangs: a thread on every rank watches whether any rank makes progress.

All ranks count their heartbeats (process.beat) in one counter of the run's store, so a rank that waits for a slow one
does not count as hung. If no rank makes progress for launch.timeout seconds, all ranks write their stacks, one reports
which ranks wait for which, and every process ends with EXIT_HUNG. If a thread never releases the interpreter,
faulthandler ends the process. The detector talks to the store once a second, so it also brings rank 0 the signals that
only other ranks received (signals.exchange).
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
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_collab.runtime import process, signals, stacks
from megatron_collab.runtime.process import EXIT_HUNG, first_on_node, global_rank

POLL_SECONDS = 1.0
ANSWER_SECONDS = 10.0  # for ranks to report their stage and frame once a hang is detected
GRACE_SECONDS = 30.0  # after which faulthandler ends a process whose detector did not
_NCCL_TRACE = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # missing in CPU builds
_COLLECTIVES = 10  # times launch.timeout: upper bound of a collective, which may wait for a rank that is merely slow


def collective_timeout(timeout: float) -> timedelta:
    """Timeout of process groups: longer than launch.timeout, since the detector's report says more than a timeout."""
    return timedelta(seconds=_COLLECTIVES * timeout)


@contextmanager
def watch(timeout: float, run_dir: Path) -> Iterator[None]:
    """Run the detector on this rank. Every rank must, and must reach the store that torchrun's environment names."""
    folder = run_dir / stacks.FOLDER
    if first_on_node():
        stacks.clear(folder)
    detector = _Detector(timeout, folder)
    detector.start()
    try:
        yield
    finally:
        detector.stop_event.set()
        detector.join(ANSWER_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError):  # the folder may have been removed, or its file system; the run itself has ended well
            detector.file.close()
            if os.path.getsize(detector.file.name) == 0:
                os.unlink(detector.file.name)
        if first_on_node():
            stacks.clear(folder)


class Account(NamedTuple):
    """The current position of a rank."""

    stage: str
    frame: str  # innermost frame of this package
    call: str  # the collective that it waits in, by its stack or, with NCCL, on its GPU; or ""
    seconds: float  # since its last beat


class _Detector(threading.Thread):
    def __init__(self, timeout: float, folder: Path) -> None:
        super().__init__(name="hang detector", daemon=True)
        self.rank, self.ranks, self.timeout, self.folder = global_rank(), int(os.environ["WORLD_SIZE"]), timeout, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / f"rank-{self.rank}.txt").open("a")
        self.stop_event = threading.Event()
        # Its own connection: a wait on a shared one blocks its other users. Restarts by torchrun share a store.
        address, attempt = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        limit = timedelta(seconds=max(timeout, ANSWER_SECONDS))
        store = dist.TCPStore(address, int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
        self._store = dist.PrefixStore(f"hang_detector/{attempt}", store)
        self._notices = dist.PrefixStore(f"notices/{attempt}", store)
        self._last_beat = time.monotonic()

    def run(self) -> None:
        beats, total, progress = -1, -1, time.monotonic()  # `beats` of this rank, `total` of all ranks
        while not self.stop_event.wait(POLL_SECONDS):
            faulthandler.dump_traceback_later(self.timeout + GRACE_SECONDS, file=self.file, exit=True)
            now, beats_before, beats = time.monotonic(), beats, process.beats
            if beats != beats_before:
                self._last_beat = now
            try:
                signals.exchange(self._notices, self.rank)
                total_before, total = total, self._store.add("beats", int(beats != beats_before))
                if total != total_before:
                    progress = now
                if now - progress > self.timeout or self._store.check(["hung"]):
                    self._end()
            except dist.DistError as error:  # the process that serves the store has ended; it reports its own reason
                if not self.stop_event.is_set():
                    self._end(f"rank {self.rank} lost the connection to the run's store: {error}")

    def _end(self, store_error: str = "") -> None:
        """Write the stacks, report a hang or a lost store (`store_error`), and end the process even if either hangs."""
        faulthandler.dump_traceback_later(GRACE_SECONDS, file=self.file, exit=True)
        frame, call = stacks.innermost()
        account = Account(process.stage, frame, call, time.monotonic() - self._last_beat)

        def look() -> None:
            nonlocal account
            account = account._replace(call=call or nccl_operation())

        def write() -> None:
            print(f"{account.stage}, no progress for {account.seconds:.0f} s", file=self.file, flush=True)
            faulthandler.dump_traceback(self.file)

        _within(2.0, look)  # NCCL may hold the recorder
        _within(2.0, write)  # the file system may be what hangs
        _within(2 * ANSWER_SECONDS, lambda: _print(store_error) if store_error else self._report(account))
        os._exit(1 if store_error else EXIT_HUNG)

    def _report(self, account: Account) -> None:
        """Store this rank's account. The first rank to detect the hang prints all accounts; the others wait for it."""
        first = self._store.compare_set("hung", "", str(self.rank)) == str(self.rank).encode()
        self._store.set(f"account/{self.rank}", json.dumps(account))
        if first_on_node():
            _within(ANSWER_SECONDS / 2, lambda: stacks.ask(self.folder))
        if not first:
            with suppress(dist.DistError):  # the first may hang too
                self._store.wait(["reported"], timedelta(seconds=2 * ANSWER_SECONDS))
            return
        keys = {rank: f"account/{rank}" for rank in range(self.ranks)}
        with suppress(dist.DistStoreError):
            self._store.wait(list(keys.values()), timedelta(seconds=ANSWER_SECONDS))
        answers = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        accounts = {rank: Account(*json.loads(answer)) for rank, answer in answers.items()}
        _print(describe(accounts, self.ranks, self.timeout, self.folder))
        self._store.set("reported", "")


def nccl_operation(dump: Callable[..., bytes] | None = _NCCL_TRACE) -> str:
    """The oldest unfinished operation on this rank's GPU according to torch's flight recorder; or "".

    With NCCL the host does not block in torch.distributed but at the next value that it reads from the GPU.
    """
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", []) if dump else []
    pending = [entry for entry in entries if entry["state"] != "completed"]
    if not pending:
        return ""
    oldest = min(pending, key=lambda entry: entry["time_created_ns"])
    return f"{oldest['profiling_name']} of {oldest['process_group'][1]}"


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Wait at most `seconds` for a call."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def _print(message: str) -> None:
    print(f"megatron-collab: {message}", file=sys.stderr, flush=True)


def describe(accounts: Mapping[int, Account], ranks: int, timeout: float, folder: Path) -> str:
    """The report: where ranks are, for how long, and which wait for which; `accounts` may lack some of the `ranks`."""
    lines = [f"no rank made progress for launch.timeout={timeout:g} s; aborting; stacks are in {folder}"]
    ranks_at: dict[tuple[str, str, str], list[int]] = {}
    for rank, account in sorted(accounts.items()):
        ranks_at.setdefault(account[:3], []).append(rank)
    for (stage, frame, call), group in ranks_at.items():
        seconds = min(accounts[rank].seconds for rank in group)
        lines.append(f"{_rank_list(group)}: {stage}, {frame}, {f'in {call}, ' if call else ''}for {seconds:.0f} s")
    if silent := [rank for rank in range(ranks) if rank not in accounts]:
        lines.append(f"{_rank_list(silent)}: no answer; the process is stopped or has ended, or its machine is down")
    waiting = max((group for (_, _, call), group in ranks_at.items() if call), key=len, default=[])
    awaited = [rank for rank in range(ranks) if rank not in waiting]
    if waiting and awaited:
        lines.append(f"{_rank_list(waiting)} wait{'s' if len(waiting) == 1 else ''} for {_rank_list(awaited)}")
    return "\n  ".join(lines)


def _rank_list(ranks: Sequence[int]) -> str:
    """Ranks in order, as "ranks 0-3, 7"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
