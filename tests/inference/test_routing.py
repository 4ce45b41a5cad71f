"""The experts that a real server reports: once for every token, and with them the trainer agrees with the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_collab.algo.credit import sample
from megatron_collab.config import Config
from megatron_collab.inference.client import SGLangClient
from megatron_collab.inference.server import SGLangServer
from megatron_collab.inference.spec import ClientSpec
from megatron_collab.launch.trainer_specs import trainer_spec
from megatron_collab.settings import SamplingConfig
from megatron_collab.types import Batch, Turn
from tests.conftest import serving_config
from tests.helpers import make_model, policy_servers
from tests.inference.test_server import flush

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.server]

LAYERS, EXPERTS, WIDTH = 4, 16, 4
# As wide as the experts of a token together; on CPU SGLang pads each to a multiple of 32.
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        "family": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": WIDTH,
        "moe_intermediate_size": 32,
    },
    "dense": {"family": "qwen3", "ffn": WIDTH * 32},
}
TURNS, PROMPT, REPLY = 24, 16, 64
START = {"cpu": 400.0, "cuda": 1800.0}  # on a GPU the first start compiles kernels


def config_of(folder: Path, name: str, device_type: str = "cpu") -> Config:
    """In bfloat16, where scores of two experts are often nearly equal."""
    config = serving_config(folder / name, device_type)
    config.model.dtype, config.rollout.routing_replay, config.algo.kl_coef = "bfloat16", name == "experts", 0.0
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    for name, settings in MODELS.items():
        make_model(folder / name, layers=LAYERS, **settings)
    return folder


@pytest.fixture(scope="module")
def running(folder: Path, device_type: str) -> Iterator[dict[str, SGLangServer]]:
    with ExitStack() as stack:
        started = {}
        for name in MODELS:
            config, log = config_of(folder, name, device_type), folder / f"{name}-{device_type}.log"
            started[name] = stack.enter_context(SGLangServer(policy_servers(config), log))
        for server in started.values():
            server.wait_healthy(START[device_type])
        yield started


def sampled(
    server: SGLangServer, prompts: list[tuple[int, ...]], routing_from: Callable[[int], int] | None, tokens: int = REPLY
) -> list[Turn]:
    """A turn after each prompt, with its experts from the position `routing_from(number of the prompt)`."""

    async def use() -> list[Turn]:
        client = SGLangClient(server.url, server.api_key, ClientSpec(300.0, "qwen25"))
        sampling = {"max_new_tokens": tokens, "sampling": SamplingConfig()}
        try:
            requests = (
                client.generate(prompt, seed=at, routing_from=routing_from(at) if routing_from else None, **sampling)
                for at, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*requests)
        finally:
            await client.close()

    return asyncio.run(use())


PROMPTS = [tuple(row) for row in np.random.default_rng(0).integers(3, 500, (TURNS, PROMPT)).tolist()]


def test_every_position_is_routed_once(running: dict[str, SGLangServer], device_type: str) -> None:
    """A later turn has the experts of new tokens only; on a CPU, cached and uncached experts are equal."""
    server = running["experts"]
    first = sampled(server, PROMPTS[:4], lambda _: 0, tokens=12)
    longer = [(*turn.stream, 9, 9) for turn in first]
    later = sampled(server, longer, lambda at: len(first[at].stream) - 1, tokens=12)
    cached = sampled(server, longer, lambda _: 0, tokens=12)
    flush(server)
    fresh = sampled(server, longer, lambda _: 0, tokens=12)
    exact = device_type == "cpu"
    assert not exact or fresh == cached == later
    for opening, continued, whole, uncached in zip(first, later, cached, fresh, strict=True):
        assert opening.routing is not None and continued.routing is not None and whole.routing is not None
        assert opening.routing.dtype == np.uint8 and opening.routing.shape == (len(opening.stream) - 1, LAYERS * WIDTH)
        assert len(opening.routing) + len(continued.routing) == len(continued.stream) - 1
        assert not exact or np.array_equal(np.concatenate([opening.routing, continued.routing]), whole.routing)
        assert not exact or np.array_equal(whole.routing, uncached.routing)
        chosen = np.sort(whole.routing.reshape(-1, LAYERS, WIDTH), axis=-1)
        assert chosen.max() < EXPERTS and (np.diff(chosen, axis=-1) > 0).all()
        assert len(np.unique(chosen)) == EXPERTS
    (plain,) = sampled(server, PROMPTS[:1], None, tokens=12)
    assert plain.routing is None and (not exact or plain == first[0])


def test_with_replay_the_trainer_agrees_with_the_server_as_of_a_dense_model(
    running: dict[str, SGLangServer],
    folder: Path,
    device_type: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    """Server and trainer, both in bfloat16: without replay some tokens go to other experts."""
    request.getfixturevalue({"cpu": "one_rank", "cuda": "one_gpu"}[device_type])
    from megatron_collab.trainer.trainer import PolicyTrainer

    apart = {}
    for name, server in running.items():
        turns = sampled(server, PROMPTS, (lambda _: 0) if name == "experts" else None)
        trainer = PolicyTrainer(trainer_spec(config_of(folder, name, device_type)))
        batch = Batch(tuple(sample([turn], []) for turn in turns))
        for replay in (True, False) if name == "experts" else (True,):
            rows = trainer.log_probs(trainer.chunks, batch, replay=replay)
            pairs = zip(rows, batch.samples, strict=True)
            differences = np.concatenate([(row - item.log_probs)[item.loss_mask > 0] for row, item in pairs])
            apart[name, replay] = {
                "mean": np.abs(differences).mean(),
                "k3": (np.exp(differences) - 1 - differences).mean(),
                "max": np.abs(differences).max(),
            }
            measured = ", ".join(f"{measure} {value:.5f}" for measure, value in apart[name, replay].items())
            record_property(f"{name}{', replayed' * (replay and name == 'experts')}", measured)
    dense, replayed, chosen = apart["dense", True], apart["experts", True], apart["experts", False]
    assert all(replayed[measure] <= dense[measure] for measure in ("mean", "k3")), apart
    assert chosen["mean"] > 1.5 * dense["mean"] and chosen["k3"] > 5 * dense["k3"], apart
    assert chosen["max"] > 5 * replayed["max"], apart
