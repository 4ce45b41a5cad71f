"""Client of an SGLang server that holds a teacher: the log-probs that it gives to tokens of the policy."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from megatron_collab.inference.client import EngineError, post, read_log_probs, scoring_request
from megatron_collab.runtime import keys
from megatron_collab.runtime.process import POLL_SECONDS, RunStopped, beat, raise_if_preempted
from megatron_collab.types import Sample

SETTING = "algo.teacher.server"
KEY = "TEACHER_API_KEY"  # environment variable
_CONNECTIONS = 64
_BYTES = 1 << 28  # of an answer
_COMPARED = 2000  # tokens of the vocabularies, apart from the added ones


class ServedTeacher:
    """A client of the server at `url`. `timeout`: seconds for one answer. Its key, if any, is the variable KEY."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url.rstrip("/"), timeout

    def with_log_probs(self, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """The samples with `teacher_log_probs`. Raises RunStopped if the server fails, and Preempted.

        SGLang's log-probs of given tokens are those at temperature 1.
        """
        try:
            rows = asyncio.run(self._answers([self._body(sample) for sample in map(_read, samples)]))
            values = [_placed(sample, answers) for sample, answers in zip(samples, rows, strict=True)]
        except EngineError as error:
            message = f"{SETTING}={self._url}: {error}; start an SGLang server there, and resume the run"
            raise RunStopped(message) from error
        if not all(np.isfinite(row).all() for row in values):
            message = "returned a log-prob that is not finite; look at the teacher's weights"
            raise RunStopped(f"{SETTING}={self._url}: {message}")
        return tuple(replace(sample, teacher_log_probs=row) for sample, row in zip(samples, values, strict=True))

    def fault(self, vocabulary: Mapping[str, int], added: Sequence[int], decode: Any) -> str | None:
        """Why the server cannot teach a policy with this vocabulary; None if no difference was seen.

        Compares the texts of all `added` ids and of some of the others. `decode`: the text of ids. Raises EngineError
        if the server gives no texts.
        """
        known = sorted(vocabulary.values())
        ids = sorted({*known[:: max(1, len(known) // _COMPARED)], *added})
        body = {"tokens": [[number] for number in ids], "skip_special_tokens": False}
        ((answer,),) = asyncio.run(self._answers([[("/detokenize", body)]]))
        texts = answer.get("text")
        if not isinstance(texts, list) or len(texts) != len(ids):
            raise EngineError(f"/detokenize returned no list of {len(ids)} texts")
        for number, text in zip(ids, texts, strict=True):
            if text != decode([number]):
                return f"its tokenizer gives id {number} the text {text!r}, and the policy's {decode([number])!r}"
        return None

    @staticmethod
    def _body(sample: Sample) -> list[tuple[str, dict[str, Any]]]:
        """A request for each token sequence."""
        return [("/generate", scoring_request(ids.tolist(), _first(mask))) for ids, mask in _sequences(sample)]

    async def _answers(self, requests: Sequence[Sequence[tuple[str, dict[str, Any]]]]) -> list[list[dict[str, Any]]]:
        with keys.in_environment(KEY):
            key = os.environ.get(KEY)
        late = f"no answer within rollout.turn_timeout={self._timeout:g} s"
        connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        waiting = asyncio.Semaphore(_CONNECTIONS)  # the time of an answer begins when the request is sent

        async def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with waiting:
                return await post(session, self._url + path, body, _read_bounded, late)

        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
            rows = [[asyncio.create_task(answer(*request)) for request in row] for row in requests]
            pending = tasks = {task for row in rows for task in row}
            try:
                while pending:
                    beat()
                    raise_if_preempted()
                    done, pending = await asyncio.wait(pending, timeout=POLL_SECONDS, return_when="FIRST_EXCEPTION")
                    for task in done:
                        task.result()  # raises its error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return [[task.result() for task in row] for row in rows]


def _read(sample: Sample) -> Sample:
    """The sample as the teacher reads it."""
    return sample.teacher_view or sample


def _sequences(sample: Sample) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids and loss mask of each token sequence with trained tokens."""
    pairs = zip(np.split(sample.token_ids, sample.cuts), np.split(sample.loss_mask, sample.cuts), strict=True)
    return [(ids, mask) for ids, mask in pairs if mask.any()]


def _first(mask: np.ndarray) -> int:
    """The index of the first trained token."""
    return int(np.flatnonzero(mask)[0])


def _placed(sample: Sample, answers: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The log-probs in the answers, float32 [S], at the trained tokens of the sample. Raises EngineError."""
    values = list[float]()
    for (ids, mask), answer in zip(_sequences(_read(sample)), answers, strict=True):
        first = _first(mask)
        log_probs = read_log_probs(answer, ids[first:].tolist())
        if log_probs is None:
            raise EngineError("/generate returned no log-probs of the tokens")
        values += [log_probs[place - first] for place in np.flatnonzero(mask).tolist()]
    row = np.zeros_like(sample.loss_mask)
    row[sample.loss_mask > 0] = values
    return row


async def _read_bounded(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON object of an answer. Raises EngineError if it is none, or too long."""
    content = bytearray()
    async for piece in response.content.iter_any():
        content += piece
        if len(content) > _BYTES:
            raise EngineError(f"{response.url}: an answer of more than {_BYTES} bytes")
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{response.url}: an answer that is no JSON") from error
    if not isinstance(answer, dict):
        raise EngineError(f"{response.url}: an answer that is no JSON object")
    return answer
