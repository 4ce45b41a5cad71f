"""The client of a reward model against an HTTP server that fails as told, and the metric against the real SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from megatron_collab import patches
from megatron_collab.inference import client
from megatron_collab.inference.server import SGLangServer
from megatron_collab.reward.metrics import reward_model
from megatron_collab.reward.metrics.reward_model import KEY_VARIABLE
from megatron_collab.types import Message, Missing, Score
from tests.conftest import serving_config
from tests.helpers import byte_level_tokenizer
from tests.reward.fakes import about, metric, play, score

TASK = about("5", "a table for four people")
PLAYED = play(TASK, "which day?", "friday ½ evening", "what time?")
TOKENS = {"tokens": [1, 2, 3]}


class Server:
    """Answers (status, body) one after the other, the last one for ever; keeps what it was asked."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Any, str | None]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json(), request.headers.get("Authorization")))
        status, body = self.answers[min(len(self.asked), len(self.answers)) - 1]
        return web.json_response(body, status=status)

    def score(self) -> Score | None:
        """The metric's score of PLAYED."""

        async def run() -> Score | None:
            application = web.Application()
            application.router.add_post("/{path:.*}", self.answer)
            runner = web.AppRunner(application, shutdown_timeout=0.01)  # 0 would wait for what hangs
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
                return await metric("reward_model", url=url).score(TASK, PLAYED)
            finally:
                await runner.cleanup()

        return asyncio.run(run())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setenv(KEY_VARIABLE, "a-key-of-the-test")


def test_the_whole_conversation_is_rendered_by_the_server_and_scored() -> None:
    server = Server((200, TOKENS), (200, {"embedding": [-1.5]}))
    assert server.score() == -1.5
    messages = [message.as_dict() for message in PLAYED.messages]
    key = "Bearer a-key-of-the-test"
    assert server.asked == [
        ("/v1/tokenize", {"messages": messages, "add_generation_prompt": False}, key),
        ("/classify", {"input_ids": [1, 2, 3]}, key),
    ]


def test_what_may_pass_is_tried_again() -> None:
    server = Server((503, {}), (200, TOKENS), (429, {}), (500, {}), (200, {"embedding": [0.25]}))
    assert server.score() == 0.25
    assert len(server.asked) == 5


@pytest.mark.parametrize(
    ("answers", "why", "requests"),
    [
        ([(503, "busy")], "status 503", client.ATTEMPTS),
        ([(401, "no key")], "status 401", 1),
        ([(200, TOKENS), (400, "too long")], "/classify: status 400", 2),
        ([(200, TOKENS), (200, {"embedding": [0.1, 0.9]})], "2 outputs; a reward model has one", 2),
        ([(200, TOKENS), (200, {"embedding": [None]})], "output is None", 2),
        ([(200, {"count": 3})], "no list 'tokens' in the answer", 1),
        ([(200, {"tokens": 3})], "no list 'tokens'", 1),
        ([(200, [])], "is it SGLang?", 1),
    ],
)
def test_what_does_not_pass_is_missing_with_the_reason(answers: list[Any], why: str, requests: int) -> None:
    server = Server(*answers)
    found = server.score()
    assert isinstance(found, Missing) and why in found.why
    assert len(server.asked) == requests


def test_a_server_that_is_not_there_is_missing() -> None:
    found = score("reward_model", TASK, PLAYED, url="http://127.0.0.1:9")
    assert isinstance(found, Missing) and "127.0.0.1:9" in found.why


def test_a_server_that_hangs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: Server, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(reward_model, "TIMEOUT", 0.05)
    monkeypatch.setattr(Server, "answer", hang)
    found = Server().score()
    assert isinstance(found, Missing) and "no answer within 0.05 s" in found.why


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random reward model of Llama's family, with tokenizer and chat template."""
    patches.apply("torchvision")
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("reward_model")
    tokenizer = byte_level_tokenizer(512)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        num_labels=1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SGLangServer]:
    with SGLangServer(serving_config(folder), folder / "sglang.log") as server:
        server.wait_healthy(400.0)
        yield server


@pytest.mark.processes
@pytest.mark.slow
def test_sglang_scores_as_transformers_does(
    server: SGLangServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole conversations, short and long, with a system message and tools; all at once and on their own."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    monkeypatch.setenv(KEY_VARIABLE, server.api_key)
    system, tool = Message("system", "be brief"), Message("tool", "7 tables")
    conversations = [
        PLAYED,
        PLAYED.add_messages([Message("user", "thanks")], ()),
        play(about("5", *["the quick brown fox jumps over the lazy dog"] * 41), "hello world"),
        PLAYED.add_messages([tool], ()),
    ]
    conversations.append(type(PLAYED)((system, *PLAYED.messages), (1,)))
    scorer = metric("reward_model", url=server.url)

    async def together() -> list[Score | None]:
        return await asyncio.gather(*(scorer.score(TASK, conversation) for conversation in conversations))

    alone = [asyncio.run(scorer.score(TASK, conversation)) for conversation in conversations]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        expected = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template([m.as_dict() for m in conversation.messages], tokenize=False)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            expected.append(model(ids).logits.item())
    assert max(expected) - min(expected) > 0.1
    assert alone == pytest.approx(expected, abs=1e-4)
    assert asyncio.run(together()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.processes
@pytest.mark.slow
def test_what_sglang_refuses_is_missing(server: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    too_long = play(TASK, "word " * 5000)
    monkeypatch.setenv(KEY_VARIABLE, server.api_key)
    found = score("reward_model", TASK, too_long, url=server.url)
    assert isinstance(found, Missing) and "context length" in found.why
    monkeypatch.setenv(KEY_VARIABLE, "another")
    found = score("reward_model", TASK, PLAYED, url=server.url)
    assert isinstance(found, Missing) and "status 401" in found.why
