"""Servers on other nodes of a run, or on several: a Ray actor on each node starts, watches and ends a process."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_collab.inference import MEETING
from megatron_collab.inference.server import Part, ServerError, ServerProcess
from megatron_collab.inference.spec import ServerSpec
from megatron_collab.runtime import device, network
from megatron_collab.runtime.process import POLL_SECONDS, wait_for

ASK_SECONDS = 60  # timeout for a Ray node to start a process and return its address
STOP_SECONDS = 10  # timeout for an actor to end its server, which also ends with the actor


class Machines:
    """The addresses of the cluster's Ray nodes on a network interface, looked up once per node.

    Several Ray nodes may be on one machine and share its servers.
    """

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._addresses: dict[str, str] = {}  # by Ray node
        self._uses = Counter([ray.get_runtime_context().get_node_id()])  # this node runs rank 0's servers

    def node(self, address: str) -> str | None:
        """The id of the least used Ray node on the machine with this address; None if there is none."""
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        find = ray.remote(network.address)
        unknown = {node: _on(node) for node in alive if node not in self._addresses}
        pending = {
            node: find.options(num_cpus=0, max_retries=0, **on).remote(self._interface) for node, on in unknown.items()
        }
        answers = list(pending.values())
        wait_for(lambda: not answers or not ray.wait(answers, num_returns=len(answers), timeout=0)[1], ASK_SECONDS)
        for node, answer in pending.items():
            with suppress(RayError):  # the node has just ended
                self._addresses[node] = ray.get(answer, timeout=0)
        local = [node for node in alive if self._addresses.get(node) == address]
        chosen = min(local, key=lambda node: self._uses[node], default=None)
        self._uses.update([chosen] if chosen else [])
        return chosen


class _Kept(NamedTuple):
    """A server on another machine: the actor that owns it, and the references of its URL and of how it ended."""

    keeper: Any
    started: Any
    ended: Any


class RemoteProcess:
    """A ServerProcess on the machine with `address`, which must see the run's folders under the same names.

    It ends with its actor, which ends with this process. If that machine has no Ray node, it counts as ended at once.
    """

    def __init__(
        self,
        machines: Machines,
        address: str,
        spec: ServerSpec,
        log: Path,
        index: int,
        api_key: str,
        *,
        part: Part | None = None,
    ) -> None:
        self._machines, self._address, self._timeout = machines, address, spec.host.start_timeout
        # Otherwise a machine without a driver would use its CPU while the others use GPUs.
        host = replace(spec.host, device=device.select(spec.host.device).type)
        self._arguments = replace(spec, host=host), log.resolve(), index, api_key
        self._no_node = f"no node of the Ray cluster has the server's address {address}"
        self._url = ""
        self._kept = self._keep(part)

    @property
    def url(self) -> str:
        """The first access waits for the start. Raises ServerError if it fails, and Preempted."""
        if not self._url:
            if self._kept is None:
                raise ServerError(self._no_node)
            started = self._kept.started
            name = f"the SGLang server on {self._address}"
            if not wait_for(lambda: bool(ray.wait([started], timeout=0)[0]), self._timeout):
                setting = f"rollout.server.start_timeout={self._timeout:g} s"
                raise ServerError(f"{name}: Ray did not start it within {setting}")
            try:
                self._url = ray.get(started)
            except RayError as error:
                raise ServerError(f"{name}: {_reason(error)}") from error
        return self._url

    def start(self, part: Part | None = None) -> None:
        self._kept = self._keep(part)

    def _keep(self, part: Part | None) -> _Kept | None:
        node = self._machines.node(self._address)
        if node is None:
            return None
        keeper: Any = ray.remote(Keeper).options(num_cpus=0, max_restarts=0, **_on(node)).remote()
        port = urlsplit(self._url).port or 0
        started = keeper.start.remote(*self._arguments, port, part)
        return _Kept(keeper, started, keeper.ended.remote(started))

    def ended(self) -> str | None:
        if self._kept is None:
            return self._no_node
        if not ray.wait([self._kept.ended], timeout=0)[0]:
            return None
        try:
            return ray.get(self._kept.ended)
        except RayError as error:
            return _reason(error)

    def stop(self) -> None:
        if self._kept is not None:
            with suppress(RayError):
                ray.get(self._kept.keeper.stop.remote(), timeout=STOP_SECONDS)
            ray.kill(self._kept.keeper)  # ends the server too


class SpreadProcess:
    """A server over several nodes: its part on each of them. If one part ends, all are restarted together."""

    def __init__(
        self,
        places: Sequence[Callable[..., ServerProcess | RemoteProcess]],
        address: str,
        spec: ServerSpec,
        log: Path,
        index: int,
        api_key: str,
    ) -> None:
        """`places` start the process of each node; the first answers requests. `address`: HOST:PORT of a store."""
        self._meetings = f"{MEETING}://{address}/server-{index}"
        self._logs = [log, *(log.with_stem(f"{log.stem}-node{node}") for node in range(1, len(places)))]
        self._parts = [
            place(spec, log, index, api_key, part=part)
            for place, log, part in zip(places, self._logs, self._next(len(places)), strict=True)
        ]

    @property
    def url(self) -> str:
        return self._parts[0].url

    def start(self) -> None:
        for process, part in zip(self._parts, self._next(len(self._parts)), strict=True):
            process.start(part)

    def ended(self) -> str | None:
        for node, (process, log) in enumerate(zip(self._parts, self._logs, strict=True)):
            if ending := process.ended():
                return f"node {node} of its {len(self._parts)} (log: {log}): {ending}"
        return None

    def stop(self) -> None:
        for process in self._parts:
            process.stop()

    def _next(self, count: int) -> list[Part]:
        """The parts of the next start. They use a new prefix of the store, apart from earlier starts."""
        meeting = f"{self._meetings}/{secrets.token_hex(8)}"
        return [Part(node, meeting) for node in range(count)]


class Keeper:
    """Ray actor that owns a server process; the server ends with the actor's only thread."""

    def __init__(self) -> None:
        self._process: ServerProcess | None = None

    async def start(self, spec: ServerSpec, log: Path, index: int, api_key: str, port: int, part: Part | None) -> str:
        self._process = ServerProcess(spec, log, index, api_key, port, part=part)
        return self._process.url

    async def ended(self, started: str) -> str:
        """Waits for the server to end; returns how. Ray runs it after `start`, whose result is its argument."""
        assert self._process is not None
        while not (ending := self._process.ended()):
            await asyncio.sleep(POLL_SECONDS)
        return ending

    async def stop(self) -> None:
        assert self._process is not None
        self._process.stop()


def _on(node: str) -> dict[str, Any]:
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _reason(error: RayError) -> str:
    """The error that an actor raised, or why it died."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return " ".join(str(cause).split())
