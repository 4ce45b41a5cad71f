"""A teacher on a server: log-probs of the policy's tokens by a real SGLang, and what ends a run in one line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_collab.config import Config
from megatron_collab.environments import tiny_model
from megatron_collab.inference import client
from megatron_collab.inference.teacher import KEY, ServedTeacher
from megatron_collab.launch import teacher
from megatron_collab.runtime import signals
from megatron_collab.runtime.process import Preempted, RunStopped
from megatron_collab.settings import ConfigError
from megatron_collab.types import Sample
from tests.conftest import Served

RNG = np.random.default_rng(0)


def sample_of(prompts: list[int], replies: list[int], view: Sample | None = None) -> Sample:
    """Sequences of a prompt and a trained reply of these lengths."""
    ids, mask, cuts = list[np.ndarray](), list[np.ndarray](), list[int]()
    for prompt, reply in zip(prompts, replies, strict=True):
        ids.append(RNG.integers(3, 290, prompt + reply))
        mask.append((np.arange(prompt + reply) >= prompt).astype(np.float32))
        cuts.append(sum(map(len, ids)))
    tokens = np.concatenate(ids)
    row = np.zeros(len(tokens), np.float32)
    return Sample(tokens, np.concatenate(mask), row, cuts=tuple(cuts[:-1]), teacher_view=view)


VIEW = sample_of([9, 4], [3, 2])
KEY_OF_ENTRIES = "input_token_logprobs"
SAMPLES = [sample_of([1], [6]), sample_of([20], [1]), sample_of([4], [5], VIEW)]


def expected(served: Served, sample: Sample) -> np.ndarray:
    """By transformers, at the trained tokens of what the teacher reads."""
    from transformers import AutoModelForCausalLM

    model, values = AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32), list[np.ndarray]()
    read = sample.teacher_view or sample
    for ids, mask in zip(*(np.split(row, read.cuts) for row in (read.token_ids, read.loss_mask)), strict=True):
        with torch.no_grad():
            scores = model(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
        values.append(scores.gather(-1, torch.from_numpy(ids)[1:, None])[:, 0].numpy()[mask[1:] > 0])
    return np.concatenate(values)


@pytest.mark.processes
def test_a_real_server_gives_the_log_probs_of_its_model(
    servers: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any token, also behind prompts that only the teacher reads; its vocabulary is compared with the policy's."""
    served = servers["tied"]
    monkeypatch.setenv(KEY, served.server.api_key)
    last = json.loads((served.folder / "config.json").read_text())["vocab_size"] - 1
    ends = replace(SAMPLES[0], token_ids=np.array([*SAMPLES[0].token_ids[:-2], last, 5]))
    unscored_samples = [*SAMPLES, ends]
    samples = ServedTeacher(served.server.url, 120.0).with_log_probs(unscored_samples)
    for sample, unscored in zip(samples, unscored_samples, strict=True):
        assert sample.teacher_log_probs is not None and not sample.teacher_log_probs[unscored.loss_mask == 0].any()
        np.testing.assert_allclose(
            sample.teacher_log_probs[unscored.loss_mask > 0], expected(served, unscored), atol=1e-4
        )
    config = Config()
    config.model.path, config.algo.teacher.server = str(served.folder), served.server.url
    teacher.check_server(config)
    tiny_model.word_tokenizer(["yes", "no"]).save_pretrained(served.folder.parent / "another")
    config.model.path = str(served.folder.parent / "another")
    with pytest.raises(ConfigError, match=r"algo.teacher.server=http.*its tokenizer gives id .*give a teacher with"):
        teacher.check_server(config)


@contextmanager
def answering(answer: Callable[[dict[str, Any]], web.Response]) -> Iterator[str]:
    """The address of a server that gives this answer to every body."""
    started, ended, address = threading.Event(), asyncio.Event(), list[str]()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async def handle(request: web.Request) -> web.Response:
            return answer(await request.json())

        application = web.Application()
        application.router.add_post("/{path}", handle)
        async with TestServer(application) as server:
            address.append(str(server.make_url("")))
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    started.wait()
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"meta_info": {}}, "returned no log-probs of the tokens"),
        ({"meta_info": {KEY_OF_ENTRIES: [[None, 1, None]] * 7}}, "returned no log-probs of the tokens"),
        *(({"meta_info": meta}, "returned no log-probs of the tokens") for meta in (None, [], {KEY_OF_ENTRIES: None})),
        ({"meta_info": {KEY_OF_ENTRIES: [1] * 7}}, "returned no log-probs of the tokens"),
        ("texts", "returned no log-probs of the tokens"),
        ([], "an answer that is no JSON object"),
        (None, "status 400: no"),
        ("nan", "a log-prob that is not finite"),
    ],
)
def test_what_a_server_answers_wrongly_stops_the_run(
    answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)

    def answered(body: dict[str, Any]) -> web.Response:
        if answer in ("nan", "texts"):
            value = float("nan") if answer == "nan" else "-1.5"
            entries = [[None if at == 0 else value, token, None] for at, token in enumerate(body["input_ids"])]
            return web.json_response({"meta_info": {KEY_OF_ENTRIES: entries}})
        return web.Response(status=400, text="no") if answer is None else web.json_response(answer)

    with answering(answered) as url, pytest.raises(RunStopped, match=f"algo.teacher.server=http.*: .*{message}"):
        ServedTeacher(url, 60.0).with_log_probs(SAMPLES[:1])


UNREACHABLE = "http://127.0.0.1:9"


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)
    with pytest.raises(RunStopped, match=rf"algo.teacher.server={UNREACHABLE}: .*start an SGLang server.*resume the"):
        ServedTeacher(UNREACHABLE, 60.0).with_log_probs(SAMPLES)


def test_a_start_without_a_server_that_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names the setting, before there is a run that could be resumed."""
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.01)
    tiny_model.word_tokenizer(["yes", "no"]).save_pretrained(tmp_path)
    config, answers = Config(), iter([{}, {"text": None}, {"text": "ab"}, {"text": ["a"]}])
    config.model.path, way_out = str(tmp_path), "start an SGLang server there, or give another address"
    with answering(lambda body: web.json_response(next(answers))) as url:
        for address in [*[url] * 4, UNREACHABLE]:
            config.algo.teacher.server = address
            with pytest.raises(ConfigError, match=rf"^algo.teacher.server={address}: [^\n]*; {way_out}$"):
                teacher.check_server(config)
    assert next(answers, None) is None


def test_a_preemption_notice_is_obeyed_while_the_server_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice comes with the request, and the answer only once the wait for it has ended."""
    given_up = threading.Event()

    def score(body: dict[str, Any]) -> web.Response:
        monkeypatch.setattr(signals, "notice", signals.Notice(signals.PREEMPTION))
        given_up.wait()
        return web.json_response({})

    with answering(score) as url:
        try:
            with pytest.raises(Preempted):
                ServedTeacher(url, 60.0).with_log_probs(SAMPLES)
        finally:
            given_up.set()
