"""What a ConversationWorker gives its language models: limits, prices and keys; without Ray."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray

from megatron_collab.config import Config
from megatron_collab.launch import server_specs
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.llm import limiter
from megatron_collab.rollout import workers
from megatron_collab.runtime import keys
from megatron_collab.settings import LlmConfig
from megatron_collab.settings.schema import AssistantConfig


def test_users_have_the_runs_limits_prices_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for of_a_process in ("console", "gc", "gpu_environment", "imports_done"):
        monkeypatch.setattr(workers, of_a_process, Mock())
    monkeypatch.setattr(workers.stacks, "register", Mock())
    actors: list[str] = []
    monkeypatch.setattr(ray, "get_actor", lambda name: actors.append(name) or f"handle of {name}")
    for name, value in {"no_proxy": "", "NO_PROXY": "", "OPENAI_API_KEY": "sk-of-the-user"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(keys.FILE, raising=False)
    keys.put_away()
    assert "OPENAI_API_KEY" not in os.environ
    config = Config()
    play = play_spec(config)
    play = replace(
        play, run_dir=tmp_path, llm=LlmConfig(prices={"openai/user": [1.0, 2.0]}), assistant=AssistantConfig()
    )
    server = ("http://10.1.0.7:20000", "key of the server")
    worker = workers.ConversationWorker(play, server_specs.training(config).client, [server], ["scores"], "name", {})
    assert actors == [limiter.NAME, "scores"] and worker.client._queue._limiter == f"handle of {limiter.NAME}"
    assert worker.client._prices.at_most("openai/user", 1_000_000, 0) == 1.0
    assert os.environ["OPENAI_API_KEY"] == "sk-of-the-user"
    (player,) = worker.players.values()
    assert player.users.client is worker.client
