"""The SGLang servers of a run: those that are present, and those that are being started again.

A server that fails is left out and started again at the same address while the others go on. It holds the weights of
model.path, so it gets no requests until the next weight sync has taken it back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, methodcaller

from megatron_collab.config import ServerConfig
from megatron_collab.inference.server import MEMORY, ServerError, SGLangServer
from megatron_collab.runtime.process import wait_for

STARTS = 3  # in a row that may fail before the run ends


class ServerPool:
    """On rank 0. Servers are started and ended on one thread only: a server ends with the thread that started it."""

    def __init__(
        self,
        servers: Sequence[SGLangServer],
        options: ServerConfig,
        tell: Callable[[Sequence[int]], None],
        model: str = "",
    ) -> None:
        """`servers` are starting. `tell` is called with the numbers of those that get requests from now on.

        `model`: the name of theirs, where it is not the policy.
        """
        self.servers, self.options, self._tell = servers, options, tell
        self._of, self._prefix = (f" of {model}", f"{model}_") if model else ("", "")
        self._setting = f"servers.{model}.max_total_tokens" if model else "rollout.server.max_total_tokens"
        self._announced: list[int] = []
        self._lacked = False
        self._hopeless = ""  # why a server cannot be kept alive; raised where all ranks wait, in `ready`
        self._present: list[SGLangServer] = []
        self._deadlines: dict[int, float] = {}  # by number, of servers that are being started again (monotonic)
        self._failures: Counter[int] = Counter()  # by number, since the server last saw a phase to its end
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """Wait for all servers; ServerError if one cannot be had, since a first start that fails is no accident."""
        found, wanted = [], self.options.max_total_tokens or 0
        for server in self.servers:
            server.wait_healthy(self.options.start_timeout)
            found.append(server.cache_tokens())
            if found[-1] < 0.99 * wanted:  # it is rounded to pages
                short = f"has a KV cache of {found[-1]} tokens, not of {self._setting}={wanted}"
                print(f"engine: {self._name(server)} {short}: its GPU has no more memory", flush=True)
        if found:
            print(f"engine: SGLang servers{self._of} have a KV cache of at least {min(found)} tokens each", flush=True)
        self._present = list(self.servers)
        self._announced = [server.index for server in self.servers]
        self._release()

    def present(self) -> list[SGLangServer]:
        """The servers that are healthy now, with any weights, those that came back since the last call among them."""
        self.watch()
        for server in list(self._present):
            if not server.healthy():
                self.lost(server, "it does not answer")
        for server in self.servers:
            if server.index not in self._deadlines:
                continue
            if server.healthy():
                del self._deadlines[server.index]
                self._present.append(server)
                self._counts["back"] += 1
                print(f"engine: {self._name(server)} is back (start {server.generation + 1})", flush=True)
            elif time.monotonic() > self._deadlines[server.index]:
                timeout = self.options.start_timeout
                self._start_again(server, f"it was not healthy after rollout.server.start_timeout={timeout:g} s")
        return sorted(self._present, key=attrgetter("index"))

    def lost(self, server: SGLangServer, reason: str) -> None:
        """Leave the server out and start it again, unless that is under way; `present` takes it back."""
        if server not in self._present:
            return
        self._present.remove(server)
        self._lacked |= not self._present
        self._counts["lost"] += 1
        if server.index in self._announced:  # before it is up again, with other weights
            self._announce([index for index in self._announced if index != server.index])
        self._start_again(server, reason)

    def watch(self) -> None:
        """Find servers that have ended, and start them again. Cheap."""
        for server in self.servers:
            if reason := server.process.ended():
                if server in self._present:
                    self.lost(server, reason)
                elif server.index in self._deadlines:
                    self._start_again(server, reason)

    def lost_all(self) -> bool:
        """Whether there was a time, since the last `recover`, when no server was left that could sample."""
        self.watch()
        return self._lacked

    def recover(self) -> None:
        """What was lost until now is made good: `lost_all` counts anew."""
        self._lacked = bool(self.servers) and not self._present

    def ready(self, seconds: float) -> bool:
        """Before a weight sync: whether a server is up that has memory for weights; looks for about `seconds`.

        ServerError where one failed after STARTS new starts in a row too.
        """

        def up() -> bool:
            self.present()
            self._each(methodcaller("resume", "weights"), self.lost)
            if self._hopeless:
                raise ServerError(self._hopeless)
            return bool(self._present)

        return wait_for(up, seconds)

    def serve(self) -> None:
        """After a weight sync: have the workers use the servers, those that a worker found unreachable among them."""
        self._announce(sorted(server.index for server in self._present))

    def serve_loaded(self, version: int) -> None:
        """Have the workers use the servers with the weights that they loaded, called `version`; nothing is trained."""
        order = {"new_version": str(version), "abort_all_requests": False}
        self._each(lambda server: server.ask("/update_weight_version", order), self.lost)
        self.serve()
        self.recover()

    def wake(self) -> None:
        """Have servers that are `ready`, and keep weights of their own, take all their memory and generate again."""

        def go_on(server: SGLangServer) -> None:
            if server.released:
                server.resume("kv_cache")
                server.ask("/continue_generation", {})

        self._each(go_on, self.lost)

    def rest(self) -> None:
        """After a phase: have colocated servers that are present give their memory back."""
        for server in self._present:
            self._failures.pop(server.index, None)
        self._release()

    def rested(self, seconds: float) -> bool:
        """After `rest`, in about `seconds`: whether no colocated server is starting, to take memory once ready."""

        def none_starts() -> bool:
            if self._deadlines:
                self.present()
                self._release()
            return not self._deadlines

        return not self.options.colocated or wait_for(none_starts, seconds)

    def give_up(self) -> None:
        """The run ends: colocated servers give their memory back, so that the trainer can save; else they are ended."""
        if not self.options.colocated:
            return
        self._each(methodcaller("release"), lambda server, why: None)
        for server in self.servers:
            if server.released != set(MEMORY):
                server.stop()

    def take_counters(self) -> dict[str, float]:
        """How many servers were lost and came back since the last call, as metrics of a step."""
        return {f"servers/{self._prefix}{name}": float(self._counts.pop(name, 0)) for name in ("lost", "back")}

    def _release(self) -> None:
        if self.options.colocated:
            self._each(methodcaller("release"), self.lost)

    def _each(self, call: Callable[[SGLangServer], object], failed: Callable[[SGLangServer, str], None]) -> None:
        """Call all that are present at once, and `failed` for each that raises ServerError."""
        with ThreadPoolExecutor(len(self.servers)) as callers:
            calls = {server: callers.submit(call, server) for server in sorted(self._present, key=attrgetter("index"))}
        for server, done in calls.items():
            try:
                done.result()
            except ServerError as error:
                failed(server, str(error))

    def _start_again(self, server: SGLangServer, reason: str) -> None:
        self._failures[server.index] += 1
        self._deadlines.pop(server.index, None)
        name = self._name(server)
        if self._failures[server.index] > STARTS:
            self._hopeless = f"{name} failed after {STARTS} new starts too: {reason}; {server.log_end()}"
            server.stop()
            return
        print(f"engine: {name} is left out and started again: {reason}", flush=True)
        server.restart()
        self._deadlines[server.index] = time.monotonic() + self.options.start_timeout

    def _name(self, server: SGLangServer) -> str:
        return f"SGLang server {server.index}{self._of}"

    def _announce(self, servers: list[int]) -> None:
        self._announced = servers
        self._tell(servers)
