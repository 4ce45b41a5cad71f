"""HTTP calls of rank 0 to SGLang's servers in a weight sync."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch

from megatron_collab.inference.server import WEIGHT_LOADER, ServerError, SGLangServer
from megatron_collab.runtime.process import beat


class ServerCall:
    """One weight sync of one server: `pause` and `begin`, the transfer, `end` and `resume`; or `read_folder`.

    The transfer must end within `timeout` seconds of the call to `pause`. The short calls get a quarter of that, so
    that a hung server is detected before its peers time out. Raises ServerError if a call fails; the server then
    stays paused and does not sample.
    """

    def __init__(self, server: SGLangServer, timeout: float) -> None:
        self.server = server
        self._timeout, self._short = timeout, timeout / 4
        self._began = self._deadline = 0.0

    def pause(self, mode: str) -> None:
        """Stop sampling; `mode`: "abort" or "retract" running requests. Later requests wait."""
        self._began = time.monotonic()
        self._deadline = self._began + self._short
        self._post("/pause_generation", mode=mode)

    def begin(self) -> None:
        """Open an update; first close an earlier one whose sender died."""
        try:
            self._post("/begin_weight_update")
        except ServerError:
            self._post("/end_weight_update")
            self._post("/begin_weight_update")

    def receive(self, orders: Sequence[str], version: int) -> None:
        """Send the server's ranks their orders (see receiver.py); the server flushes its KV cache of older weights."""
        # SGLang's ranks unpickle named tensors; only the name carries data.
        payloads = [base64.b64encode(pickle.dumps([(order, torch.empty(0))])).decode() for order in orders]
        tensors = {"serialized_named_tensors": payloads, "load_format": WEIGHT_LOADER}
        self._update("/update_weights_from_tensor", version, **tensors)

    def end(self) -> None:
        """Close the update."""
        self._deadline = time.monotonic() + self._short
        self._post("/end_weight_update")

    def read_folder(self, folder: Path, version: int, mode: str) -> None:
        """Make the server load a Hugging Face folder."""
        self.pause(mode)
        self._update("/update_weights_from_disk", version, model_path=str(folder.resolve()))
        self.resume()

    def resume(self) -> None:
        """Continue sampling; first restore the KV cache's memory, which waiting requests need at once."""
        self.server.resume("kv_cache")
        self._deadline = time.monotonic() + self._short
        self._post("/continue_generation")

    def _update(self, path: str, version: int, **body: Any) -> None:
        self._deadline = self._began + self._timeout
        self._post(path, flush_cache=True, weight_version=str(version), **body)

    def _post(self, path: str, **body: Any) -> None:
        self.server.ask(path, body, max(0.1, self._deadline - time.monotonic()))


class ServerCalls:
    """Parallel calls to all servers of one weight sync; a server is skipped once a call to it has failed."""

    def __init__(self, calls: Sequence[ServerCall], callers: Executor) -> None:
        self.failures: dict[ServerCall, str] = {}
        self._calls, self._callers = calls, callers
        self._started: dict[ServerCall, Future[None]] = {}

    def without_failure(self) -> list[ServerCall]:
        """The servers for which no call failed."""
        return [call for call in self._calls if call not in self.failures]

    def start(self, action: Callable[[ServerCall], None]) -> None:
        """Start a call to every server in the background."""
        self._started = {call: self._callers.submit(action, call) for call in self.without_failure()}

    def settle(self) -> None:
        """Wait for the started calls; record failures."""
        for call, started in self._started.items():
            beat()
            try:
                started.result()
            except ServerError as error:
                self.failures[call] = str(error)

    def run(self, action: Callable[[ServerCall], None]) -> None:
        self.start(action)
        self.settle()
