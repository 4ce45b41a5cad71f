"""The SGLang servers of a run: the healthy ones, and those that are being restarted.

If a server fails, it is left out and restarted at the same address while the others continue. It then has the weights
of model.path, so it gets no requests until the next weight sync includes it again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, methodcaller

from megatron_collab.inference.server import MEMORY, ServerError, SGLangServer
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.runtime.process import wait_for
from megatron_collab.runtime.screen import counted

logger = logging.getLogger(__name__)

STARTS = 3  # consecutive failed starts before the run ends


class ServerPool:
    """Lives on rank 0. Use a single thread to start and stop servers: a server ends with the thread that started it."""

    def __init__(
        self, servers: Sequence[SGLangServer], spec: ServerSpec, tell: Callable[[Sequence[int]], None]
    ) -> None:
        """`servers` are starting. `tell` is called with the numbers of the servers that get requests from now on."""
        self.servers, self.spec, self._tell = servers, spec, tell
        self._suffix, self._prefix = (f" of {spec.name}", f"{spec.name}_") if spec.name else ("", "")
        self._announced: list[int] = []
        self._had_none = False  # no server was present at some time since `recover`
        self._fatal = ""  # why a server cannot be kept alive; raised in `ready`, where all ranks wait
        self._present: list[SGLangServer] = []
        self._deadlines: dict[int, float] = {}  # by number, of servers that are being restarted (monotonic)
        self._failures: Counter[int] = Counter()  # by number, since the server last completed a phase
        self._counts: Counter[str] = Counter()

    def begin(self) -> None:
        """Wait for all servers. Raises ServerError if one fails: a failing first start has a lasting cause."""
        sizes, expected = [], self.spec.max_total_tokens or 0
        for server in counted(self.servers, f"starting SGLang{self._suffix}", "server"):
            server.wait_healthy(self.spec.host.start_timeout)
            sizes.append(server.cache_tokens())
            if sizes[-1] < 0.99 * expected:  # sizes are rounded to pages
                setting = f"{self.spec.setting}.max_total_tokens={expected}"
                shortfall = f"has a KV cache of {sizes[-1]} tokens instead of {setting}"
                logger.warning(f"engine: {self._name(server)} {shortfall}: its GPU is out of memory")
        if sizes:
            size = f"have a KV cache of at least {min(sizes)} tokens each"
            logger.info(f"engine: SGLang servers{self._suffix} {size}")
        self._present = list(self.servers)
        self._announced = [server.index for server in self.servers]
        self._release()

    def present(self) -> list[SGLangServer]:
        """The servers that are healthy now, whatever their weights; includes servers that have come back."""
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
                logger.info(f"engine: {self._name(server)} is back (start {server.generation + 1})")
            elif time.monotonic() > self._deadlines[server.index]:
                timeout = self.spec.host.start_timeout
                self._start_again(server, f"it was not healthy after rollout.server.start_timeout={timeout:g} s")
        return sorted(self._present, key=attrgetter("index"))

    def lost(self, server: SGLangServer, reason: str) -> None:
        """Leave the server out and restart it, unless that has happened; `present` includes it again."""
        if server not in self._present:
            return
        self._present.remove(server)
        self._had_none |= not self._present
        self._counts["lost"] += 1
        if server.index in self._announced:  # before it is up again with old weights
            self._announce([index for index in self._announced if index != server.index])
        self._start_again(server, reason)

    def watch(self) -> None:
        """Detect servers that have ended, and restart them. Cheap."""
        for server in self.servers:
            if reason := server.process.ended():
                if server in self._present:
                    self.lost(server, reason)
                elif server.index in self._deadlines:
                    self._start_again(server, reason)

    def lost_all(self) -> bool:
        """Whether, at some time since the last `recover`, no server could sample."""
        self.watch()
        return self._had_none

    def recover(self) -> None:
        """Reset `lost_all`: work lost so far has been made up for."""
        self._had_none = bool(self.servers) and not self._present

    def ready(self, seconds: float) -> bool:
        """Before a weight sync: whether a server is up and has memory for weights; waits for about `seconds`.

        Raises ServerError if a server has also failed after STARTS restarts in a row.
        """

        def has_server() -> bool:
            self.present()
            self._call_all(methodcaller("resume", "weights"), self.lost)
            if self._fatal:
                raise ServerError(self._fatal)
            return bool(self._present)

        return wait_for(has_server, seconds)

    def serve(self) -> None:
        """After a weight sync: let the workers use all present servers, even those that a worker could not reach."""
        self._announce(sorted(server.index for server in self._present))

    def serve_loaded(self, version: int) -> None:
        """Let the workers use the servers with the weights they loaded, as `version`; for runs without training."""
        body = {"new_version": str(version), "abort_all_requests": False}
        self._call_all(lambda server: server.ask("/update_weight_version", body), self.lost)
        self.serve()
        self.recover()

    def wake(self) -> None:
        """Let present servers that keep their own weights allocate all their memory and generate again."""

        def resume_sampling(server: SGLangServer) -> None:
            if server.released:
                server.resume("kv_cache")
                server.ask("/continue_generation", {})

        self._call_all(resume_sampling, self.lost)

    def pause(self) -> None:
        """Let present servers abort their requests, and hold later ones until they have their next weights."""
        self._call_all(lambda server: server.ask("/pause_generation", {"mode": "abort"}), self.lost)

    def sleep(self) -> None:
        """After a phase: let present colocated servers release their memory."""
        for server in self._present:
            self._failures.pop(server.index, None)
        self._release()

    def asleep(self, seconds: float) -> bool:
        """After `sleep`: whether, within about `seconds`, no colocated server is starting, which would take memory."""

        def none_restarting() -> bool:
            if self._deadlines:
                self.present()
                self._release()
            return not self._deadlines

        return not self.spec.placement.colocated or wait_for(none_restarting, seconds)

    def give_up(self) -> None:
        """The run ends: colocated servers release their memory so that the trainer can save, or else are stopped."""
        if not self.spec.placement.colocated:
            return
        self._call_all(methodcaller("release"), lambda server, reason: None)
        for server in self.servers:
            if server.released != set(MEMORY):
                server.stop()

    def take_counters(self) -> dict[str, float]:
        """Numbers of servers that were lost and that came back since the last call, as metrics of a step."""
        return {f"servers/{self._prefix}{name}": float(self._counts.pop(name, 0)) for name in ("lost", "back")}

    def _release(self) -> None:
        if self.spec.placement.colocated:
            self._call_all(methodcaller("release"), self.lost)

    def _call_all(self, call: Callable[[SGLangServer], object], failed: Callable[[SGLangServer, str], None]) -> None:
        """Call all present servers concurrently; call `failed` for each that raises ServerError."""
        with ThreadPoolExecutor(len(self.servers)) as callers:
            calls = {server: callers.submit(call, server) for server in sorted(self._present, key=attrgetter("index"))}
        for server, future in calls.items():
            try:
                future.result()
            except ServerError as error:
                failed(server, str(error))

    def _start_again(self, server: SGLangServer, reason: str) -> None:
        self._failures[server.index] += 1
        self._deadlines.pop(server.index, None)
        name = self._name(server)
        if self._failures[server.index] > STARTS:
            self._fatal = f"{name} still fails after {STARTS} restarts: {reason}; {server.log_end()}"
            server.stop()
            return
        logger.warning(f"engine: {name} is taken out of use and restarted: {reason}")
        server.restart()
        self._deadlines[server.index] = time.monotonic() + self.spec.host.start_timeout

    def _name(self, server: SGLangServer) -> str:
        return f"SGLang server {server.index}{self._suffix}"

    def _announce(self, servers: list[int]) -> None:
        self._announced = servers
        self._tell(servers)
