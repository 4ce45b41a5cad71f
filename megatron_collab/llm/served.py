"""Calls to the run's own servers: which server to choose, and with which seed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from megatron_collab.llm.busy import BusySpans
from megatron_collab.llm.endpoint import POLICY, SERVED
from megatron_collab.settings import EndpointConfig

# A server with more than this times the mean of the requests in flight gets no new conversations.
LOAD_FACTOR = 1.25
AWAY_SECONDS = 10.0  # for which a server without connection is skipped if others answer; it is being restarted


@dataclass(frozen=True)
class ServedModel:
    """`path`: a folder or a Hub name; `addresses`: URL and key of each server."""

    path: str
    addresses: tuple[tuple[str, str], ...]


def choose(affinity: str, in_flight: Sequence[int], gone: Collection[int] = ()) -> int:
    """Index of the server, not in `gone`, for new conversations of `affinity`.

    Rendezvous hashing (Thaler and Ravishankar, 1998), so that losing a server moves only its own conversations, with
    bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350).
    """

    def weight(server: int) -> bytes:
        return hashlib.blake2b(f"{server}/{affinity}".encode(), digest_size=8).digest()

    alive = [server for server in range(len(in_flight)) if server not in gone]
    share = (sum(in_flight[server] for server in alive) + 1) / len(alive)
    ranked = sorted(alive, key=weight, reverse=True)
    return next(server for server in ranked if in_flight[server] < math.ceil(LOAD_FACTOR * share))


class Balance:
    """Balances the calls of a process over the servers of `model`; calls with the same beginning share a server."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._in_flight = [0] * len(model.addresses)
        self._away = [0.0] * len(model.addresses)  # until when (monotonic)

    @contextmanager
    def server(self, beginning: str) -> Iterator[tuple[str, str]]:
        """URL and key of the server for a call inside the context; skipped for AWAY_SECONDS if the connection fails."""
        now = time.monotonic()
        gone = {server for server, until in enumerate(self._away) if until > now}
        at = choose(beginning, self._in_flight, gone if len(gone) < len(self._away) else ())
        self._in_flight[at] += 1
        try:
            yield self.model.addresses[at]
        except Exception as error:
            if unconnected(error):
                self._away[at] = time.monotonic() + AWAY_SECONDS
            raise
        finally:
            self._in_flight[at] -= 1


class RunServers:
    """The servers of the policy (policy/SAMPLE) and of the models beside it (served/NAME or served/NAME/SAMPLE).

    SAMPLE distinguishes several answers to the same messages. `busy`: when calls to the policy are in flight.
    """

    def __init__(self, keys: Mapping[str, str], served: Mapping[str, ServedModel]) -> None:
        """`keys`: API keys of the policy's servers by api_base; `served`: models by NAME."""
        self._keys, self.busy = keys, BusySpans()
        self.balances = {name: Balance(model) for name, model in served.items()}

    def model(self, endpoint: EndpointConfig) -> str:
        """A name of the endpoint's model that is valid outside the run: served/NAME becomes served/ and its path."""
        model = str(endpoint.model)
        return SERVED + self._balance(model).model.path if model.startswith(SERVED) else model

    @contextmanager
    def server(self, endpoint: EndpointConfig, messages: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
        """LiteLLM arguments for a call inside the context to one of the run's servers; empty for other models.

        SAMPLE and the messages determine the seed, and on a deterministic server the answer.
        """
        model, api_base = str(endpoint.model), str(endpoint.api_base)
        if model.startswith(f"{POLICY}/"):
            with self.busy.call(api_base.removesuffix("/v1")):
                yield _arguments(api_base, self._keys[api_base], model.removeprefix(f"{POLICY}/"), messages)
        elif model.startswith(SERVED):
            sample = model.removeprefix(SERVED).partition("/")[2]
            with self._balance(model).server(messages[0]["content"]) as (url, key):
                yield _arguments(f"{url}/v1", key, sample, messages)
        else:
            yield {}

    def _balance(self, model: str) -> Balance:
        return self.balances[model.removeprefix(SERVED).partition("/")[0]]


def _arguments(api_base: str, key: str, sample: str, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    drawn = json.dumps([sample, messages]).encode()
    seed = int.from_bytes(hashlib.blake2b(drawn, digest_size=4).digest()) >> 1
    return {"model": "hosted_vllm/default", "api_base": api_base, "api_key": key, "seed": seed}


def unconnected(error: BaseException) -> bool:
    """Whether the connection failed; LiteLLM reports that as a server error."""
    return any(isinstance(cause, httpx.ConnectError) for cause in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the chain of its causes and contexts."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
