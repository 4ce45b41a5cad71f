"""Models beside the policy: every server of a reward model gives the score of transformers, also after a restart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_collab.config import EvaluateConfig
from megatron_collab.inference import served
from megatron_collab.inference.served import ModelServers, score_fault
from megatron_collab.inference.server import ServerError
from megatron_collab.inference.spec import Placement, ServerSpec, Serves, ServingSpec
from megatron_collab.launch import server_specs
from megatron_collab.runtime.process import wait_for
from megatron_collab.settings import LoraConfig
from megatron_collab.types import Conversation, Message
from tests.conftest import serving_config
from tests.helpers import make_reward_model, policy_servers
from tests.hub import serving
from tests.reward.fakes import about, metric, play

TASK = about("5", "a table for four people")
PLAYED = play(TASK, "which day?", "friday ½ evening", "what time?")
POSITIONS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random reward model of the Qwen3 family, whose heads get a bias in SGLang, for 256 tokens."""
    return make_reward_model(tmp_path_factory.mktemp("scoring"), positions=POSITIONS)


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[ModelServers]:
    config = serving_config(Path("/the/policy"))
    config.servers = {"reward_model": {"model": str(folder), "replicas": 2}}
    with ModelServers(server_specs.served_alone(config, "reward_model", folder / "run")) as servers:
        servers.pool.begin()
        yield servers


def expected(folder: Path, *conversations: list[Message]) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for messages in conversations:
        text = tokenizer.apply_chat_template([message.as_dict() for message in messages], tokenize=False)
        with torch.no_grad():
            scores.append(
                model(tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]).logits.item()
            )
    return scores


def long_one(system: bool) -> Conversation:
    """Turns of about 60 tokens; about four fit the model."""
    words = "the quick brown fox jumps over the lazy dog " * 2
    messages = [Message("system", "be brief")] if system else []
    for number in range(6):
        messages += [Message("user", f"{number} {words}"), Message("assistant", f"{words} {number}")]
    return Conversation(tuple(messages), (1,))


@pytest.mark.processes
@pytest.mark.slow
def test_every_server_scores_as_transformers_does(servers: ModelServers, folder: Path) -> None:
    """Overlong conversations lose their first turns but keep a system message."""
    conversations = [PLAYED, PLAYED.add_messages([Message("user", "thanks")], ()), long_one(False), long_one(True)]
    cut = [[*long_one(True).messages[:1], *long_one(True).messages[begin:]] for begin in range(3, 13, 2)]
    reference = expected(folder, *(list(c.messages) for c in conversations[:2]))
    assert abs(reference[0] - reference[1]) > 0.01
    for address in servers.model.addresses:
        scorer = metric("reward_model", model=str(folder), replicas=2)
        scorer.servers = [address]
        scores = [asyncio.run(scorer.score(TASK, conversation)) for conversation in conversations]
        assert scores[:2] == pytest.approx(reference, abs=1e-4)
        assert scores[3] in [pytest.approx(score, abs=1e-4) for score in expected(folder, *cut)]
        assert scores[2] in [pytest.approx(score, abs=1e-4) for score in expected(folder, *(c[1:] for c in cut))]
        assert scorer.counters == {"cut": 2}


@pytest.mark.processes
@pytest.mark.slow
def test_a_server_that_ends_is_started_again_and_the_other_scores_meanwhile(
    servers: ModelServers, folder: Path
) -> None:
    scorer = metric("reward_model", model=str(folder), replicas=2)
    scorer.servers = servers.model.addresses
    (reference,) = expected(folder, list(PLAYED.messages))
    first = servers.servers[0]
    os.killpg(first.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    assert wait_for(lambda: first.process.ended() is not None, 30)

    async def several() -> list[Any]:
        return await asyncio.gather(*(scorer.score(TASK, PLAYED) for _ in range(4)))

    assert asyncio.run(several()) == pytest.approx([reference] * 4, abs=1e-4)
    assert servers.ready(60.0), "the other one answers"
    assert wait_for(lambda: len(servers.pool.present()) == 2, 400)
    assert servers.pool.take_counters() == {"servers/reward_model_lost": 1.0, "servers/reward_model_back": 1.0}
    scorer.servers = servers.model.addresses[:1]
    assert asyncio.run(scorer.score(TASK, PLAYED)) == pytest.approx(reference, abs=1e-4), "no bias of its own"


def test_started_servers_end_if_another_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[Any] = []

    class Busy:
        def __init__(self, spec: ServerSpec, log: Path, index: int) -> None:
            if index == 2:
                raise ServerError("port 30002 is in use")
            self.over = False
            begun.append(self)

        def __enter__(self) -> Busy:
            return self

        def __exit__(self, *_: object) -> None:
            self.over = True

    monkeypatch.setattr(served, "SGLangServer", Busy)
    spec = policy_servers(serving_config(tmp_path))
    model_servers = ModelServers(replace(spec, name="good", serves=Serves.SCORES, placement=Placement(replicas=3)))
    assert begun == [], "they are started once it is entered"
    with pytest.raises(ServerError, match="30002"), model_servers:
        raise AssertionError("entered")
    assert [server.over for server in begun] == [True, True]


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (None, "no config.json there; give the folder of a Hugging Face model"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture Qwen3ForCausalLM has no score; give a"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "the model has 2 outputs; a reward model has one"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
            "3 outputs",
        ),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, None),
        ({"architectures": ["Qwen2ForRewardModel"]}, None),
    ],
)
def test_a_model_without_one_output_is_refused(tmp_path: Path, described: dict | None, why: str | None) -> None:
    if described is not None:
        (tmp_path / "config.json").write_text(json.dumps(described))
    fault = score_fault(str(tmp_path))
    assert fault == why if why is None else why in str(fault)


# What a run and an evaluation do with names before they start; prints the reward model's and its files.
FETCH = """
import sys
from megatron_collab.config import compose
from megatron_collab.settings import ConfigError
from megatron_collab.launch import evaluation, prepare, server_specs
from megatron_collab.runtime import hub
try:
    if sys.argv[1] == "train":
        config = compose(sys.argv[2:])
        config = prepare._pinned(config)
    else:
        config = evaluation.load(sys.argv[2:])
        config, _ = evaluation.pinned(config, "a.module")
    ((_, model),) = server_specs.served_models(config).values()
    print(model.model, *sorted(file.name for file in hub.folder(model.model).iterdir()))
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_reward_model_by_name_is_pinned_and_fetched_before_the_start(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    for name, described in {"scores": config, "chats": {"architectures": ["Qwen2ForCausalLM"]}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(described))
        (tmp_path / name / "model.safetensors").touch()
    (tmp_path / "tasks.jsonl").write_text("{}")
    with serving() as hub:
        commit = hub.add("model", "some/scores", tmp_path / "scores")
        hub.add("model", "some/chats", tmp_path / "chats")

        def start(program: str, model: str) -> str:
            settings = [
                f"run.dir={tmp_path}/{program}",
                f"model.path={tmp_path}/scores",
                f"data.train={tmp_path}/tasks.jsonl",
            ]
            settings += [f"data.eval={tmp_path}/tasks.jsonl", "reward.weights={good: 1}", "user.name=reveal"]
            settings += [f"reward.metrics.good={{metric: reward_model, model: {model}}}"]
            environment = hub.environment(tmp_path / "home")
            command = [sys.executable, "-c", FETCH, program, *settings]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout.strip()

        pinned = f"some/scores@{commit} config.json model.safetensors"
        assert [start(program, "some/scores") for program in ("train", "evaluate")] == [pinned, pinned]
        hub.add("model", "some/scores", tmp_path / "chats")
        assert start("train", "some/scores") == pinned, "the branch has moved, the run has not"
        setting = "reward.metrics.good.model"
        assert start("train", "some/chats").startswith(f"{setting}=some/chats@")
        assert "architecture Qwen2ForCausalLM has no score" in start("evaluate", "some/chats")
        assert f"{setting}=some/none: no such file or folder, and the Hub has no model" in start("train", "some/none")


def test_devices_come_after_those_of_the_policy() -> None:
    config = serving_config(Path("model"))
    config.launch.nproc_per_node, config.rollout.server.replicas, config.rollout.server.tp = 2, 2, 2
    judge = {"model": "judge", "tp": 2}
    config.servers = {"first": judge, "near": judge | {"colocated": True}, "second": judge}

    def devices(serving: ServingSpec) -> list[int]:
        return [spec.placement.first_device(0) for spec in serving.models]

    assert devices(server_specs.training(config)) == [0, 2, 0, 4]
    config.rollout.server.colocated = False
    assert devices(server_specs.training(config)) == [2, 6, 0, 8]
    evaluated = EvaluateConfig(servers=config.servers)
    evaluated.rollout.server.replicas = evaluated.rollout.server.tp = 2
    assert devices(server_specs.evaluation(evaluated)) == [0, 4, 6, 8], "there is no trainer"
    assert not any(spec.placement.colocated for spec in server_specs.evaluation(evaluated).models)
    evaluated.assistant.model = "openai/m"
    assert [spec.placement.first for spec in server_specs.evaluation(evaluated).models] == [0, 0, 2, 4], "nor a policy"


def test_only_the_policy_has_adapters() -> None:
    config = serving_config(Path("model"))
    config.model.lora, config.servers = LoraConfig(rank=8, serve="adapters"), {"judge": {"model": "judge"}}
    serving = server_specs.training(config)
    assert serving.policy.adapters and serving.client.adapter and not serving.by_name["judge"].adapters
