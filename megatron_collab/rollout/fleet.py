"""The SGLang servers of a run: who is present, who is being started again, what a sampling phase does with them.

A server that fails is left out and started again at the same address while the others go on. The next publish takes it
back; until then nobody asks it, since it holds the weights of model.path.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_collab.config import ServerConfig
from megatron_collab.rollout.sglang import ServerError, SGLangServer

STARTS = 3  # in a row that may fail before the run ends


class Fleet:
    """On rank 0. One thread only: a server ends with the thread that started it.

    `lacked`: whether there was a time, since the last `recover`, when no server was left.
    """

    def __init__(
        self, servers: Sequence[SGLangServer], options: ServerConfig, tell: Callable[[Sequence[int]], None]
    ) -> None:
        """`servers` are starting. `tell` is called with the numbers of those that may be asked, when they change."""
        self.servers = servers
        self.options = options
        self._tell = tell
        self._told = [server.index for server in servers]
        self.lacked = False
        self._present: list[SGLangServer] = []
        self._deadlines: dict[int, float] = {}  # by number, of servers that are being started again (monotonic)
        self._failures: Counter[int] = Counter()  # by number, since the server last saw a phase to its end
        self._counts = Counter({"lost": 0, "back": 0})

    def begin(self) -> None:
        """Wait for all servers; ServerError if one cannot be had, since a first start that fails is no accident."""
        for server in self.servers:
            server.wait_healthy(self.options.start_timeout)
        self._present = list(self.servers)
        self.rest()

    def present(self) -> list[SGLangServer]:
        """Who is healthy now, servers that came back since the last call among them.

        They may hold any weights: a publish asks once, at its beginning, and gives its weights to all of them. As in
        `lost`, ServerError where a server cannot be kept alive.
        """
        self.watch()
        for server in list(self._present):
            if not server.healthy():
                self.lost(server, "it does not answer")
        for server in [server for server in self.servers if server.index in self._deadlines]:
            if server.healthy():
                del self._deadlines[server.index]
                self._present.append(server)
                self._counts["back"] += 1
                print(f"engine: SGLang server {server.index} is back (start {server.generation + 1})", flush=True)
            elif time.monotonic() > self._deadlines[server.index]:
                timeout = self.options.start_timeout
                self._start_again(server, f"it was not healthy after rollout.server.start_timeout={timeout:g} s")
        return sorted(self._present, key=lambda server: server.index)

    def lost(self, server: SGLangServer, reason: str) -> None:
        """Leave the server out from now on and start it again; it does not come back before a call of `present`.

        Raises ServerError with its last words when this has failed STARTS times in a row.
        """
        if server not in self._present:  # known already
            return
        self._present.remove(server)
        self.lacked |= not self._present
        self._counts["lost"] += 1
        # Before it is there again, with other weights.
        self._say([index for index in self._told if index != server.index])
        self._start_again(server, reason)

    def watch(self) -> None:
        """Find servers that have ended, and start them again. Cheap."""
        for server in self.servers:
            if not server.alive():
                reason = f"it ended with code {server.process.returncode}"
                if server in self._present:
                    self.lost(server, reason)
                else:
                    self._start_again(server, reason)

    def recover(self) -> None:
        """What was lost until now is made good: `lacked` counts anew."""
        self.lacked = not self._present

    def wake(self) -> None:
        """Before a publish: wait for a server, and have all that are present take memory for weights again."""
        while not self.present():
            time.sleep(0.1)
        self._each(lambda server: server.resume("weights"))

    def serve(self) -> None:
        """After a publish: have the servers take memory for the KV cache again, and the workers ask them."""
        self._each(lambda server: server.resume("kv_cache"))
        self._say(sorted(server.index for server in self._present))

    def rest(self) -> None:
        """After a phase: `release`, for which servers that are being started again are awaited."""
        for server in self._present:
            self._failures.pop(server.index, None)
        self.release()
        while self.options.colocated and self._deadlines:  # one that is ready later would take the trainer's memory
            time.sleep(0.1)
            self.present()
            self.release()

    def release(self) -> None:
        """Have colocated servers that are present give their memory back."""
        if self.options.colocated:
            self._each(lambda server: None if server.released else server.release())

    def take_counters(self) -> dict[str, float]:
        """How many servers were lost and came back since the last call, as metrics of a step."""
        taken = {f"servers/{name}": float(count) for name, count in self._counts.items()}
        self._counts = Counter({"lost": 0, "back": 0})
        return taken

    def _each(self, call: Callable[[SGLangServer], None]) -> None:
        for server in list(self._present):
            try:
                call(server)
            except ServerError as error:
                self.lost(server, str(error))

    def _start_again(self, server: SGLangServer, reason: str) -> None:
        self._failures[server.index] += 1
        if self._failures[server.index] > STARTS:
            raise ServerError(
                f"SGLang server {server.index} failed after {STARTS} new starts too: {reason}; {server.last_words()}"
            )
        print(f"engine: SGLang server {server.index} is left out and started again: {reason}", flush=True)
        server.restart()
        self._deadlines[server.index] = time.monotonic() + self.options.start_timeout

    def _say(self, servers: list[int]) -> None:
        if servers != self._told:
            self._told = servers
            self._tell(servers)
