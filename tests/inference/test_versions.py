"""A real server whose weights change in the middle of requests: each token comes from the version it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from megatron_collab.inference.client import SGLangClient
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Turn
from tests.conftest import Served
from tests.helpers import make_model

pytestmark = pytest.mark.processes

TOLERANCE = 1e-4
NEW = 4711
PROMPTS = [tuple(row) for row in np.random.default_rng(5).integers(3, 500, (16, 24)).tolist()]
SHORT, LONG = 24, 160  # tokens; when a short turn has ended, those begun with it are in their middle


async def call(served: Served, path: str, **body: Any) -> None:
    headers = {"Authorization": f"Bearer {served.server.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(served.server.url + path, json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def load(served: Served, folder: Path, version: int) -> None:
    await call(served, "/update_weights_from_disk", model_path=str(folder), weight_version=str(version))


async def interrupted(served: Served, other: Path) -> tuple[list[Turn], Turn, Turn]:
    """Turns interrupted by the weights of `other`, a turn from before, and one requested during the update."""
    client = SGLangClient(served.server.url, served.server.api_key, ClientSpec(120.0, "qwen25"))

    def ask(seed: int, tokens: int) -> asyncio.Task[Turn]:
        turn = client.generate(PROMPTS[seed], max_new_tokens=tokens, sampling=SamplingConfig(), seed=seed)
        return asyncio.create_task(turn)

    try:
        long = [ask(seed, LONG) for seed in range(1, len(PROMPTS))]
        before = await ask(0, SHORT)
        await call(served, "/pause_generation", mode="retract")
        meanwhile = ask(0, SHORT)
        await load(served, other, NEW)
        assert not meanwhile.done()
        await call(served, "/continue_generation")
        return await asyncio.gather(*long), before, await meanwhile
    finally:
        await client.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("other") / "model", seed=5)


@pytest.fixture(scope="module")
def sampled(servers: dict[str, Served], other: Path) -> Iterator[tuple[list[Turn], Turn, Turn]]:
    served = servers["untied"]
    asyncio.run(load(served, served.folder, 0))
    yield asyncio.run(interrupted(served, other))
    asyncio.run(load(served, served.folder, 0))


def log_probs(folder: Path, turn: Turn) -> np.ndarray:
    """Log-probs of a turn's tokens, by transformers; float32 [tokens]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(turn.prompt_ids + turn.token_ids)
    with torch.no_grad():
        values = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return values[len(turn.prompt_ids) - 1 :].numpy()


def test_versions_change_once_in_the_middle_of_a_request(sampled: tuple[list[Turn], Turn, Turn]) -> None:
    turns, before, meanwhile = sampled
    assert set(before.versions) == {0} and set(meanwhile.versions) == {NEW}
    assert meanwhile.prompt_ids == before.prompt_ids
    crossing = [turn for turn in turns if len(set(turn.versions)) == 2]
    assert len(crossing) > len(turns) // 2
    for turn in crossing:
        assert list(turn.versions) == sorted(turn.versions) and set(turn.versions) == {0, NEW}
        assert turn.versions.count(0) >= SHORT // 2


def test_every_token_is_of_the_weights_that_it_says(
    sampled: tuple[list[Turn], Turn, Turn], servers: dict[str, Served], other: Path
) -> None:
    folders = {0: servers["untied"].folder, NEW: other}
    crossing = [turn for turn in sampled[0] if len(set(turn.versions)) == 2]
    for turn in crossing[:4]:
        versions = np.array(turn.versions)
        for version, folder in folders.items():
            difference = np.abs(log_probs(folder, turn) - turn.log_probs)
            assert difference[versions == version].max() < TOLERANCE
            assert difference[versions != version].max() > 100 * TOLERANCE
