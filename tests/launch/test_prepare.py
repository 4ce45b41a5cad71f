"""What is refused before the ranks are started."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_collab.config import ConfigError, compose
from megatron_collab.data.survey import Survey
from megatron_collab.launch import prepare
from tests.hub import serving


def test_several_nodes_need_torchrun_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=train_70b", "train.stage=sft"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"^launch\.nodes=16: .*megatron_collab\.launch\.torchrun --nnodes 16 --nproc-per-node 8 .* on each node",
    ):
        prepare.prepare(config)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(ConfigError, match=r"model\.path"):  # the next thing that is not there
        prepare.prepare(config)


def test_sampling_on_several_nodes_needs_a_ray_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"^launch\.nodes=\d+: RAY_ADDRESS is not set, .* or set launch\.nodes=1$"):
        prepare.prepare(compose(["experiment=train_70b"]))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"model\.path"):  # the next thing that is not there
        prepare.prepare(compose(["experiment=train_70b"]))


def test_a_finished_run_is_done_until_more_steps_are_asked_for(tmp_path: Path) -> None:
    config = compose(["experiment=booking", f"run.dir={tmp_path}", "train.steps=5"])
    assert prepare.finished(config) == 0
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    assert prepare.finished(config) == 0, "begun"
    (tmp_path / "result.json").write_text("{}")
    assert prepare.finished(config) == 5
    config.train.steps = 3
    assert prepare.finished(config) == 5
    config.train.steps = 6
    assert prepare.finished(config) == 0


def test_a_run_goes_on_with_more_servers_but_not_with_other_numbers(tmp_path: Path) -> None:
    config = compose(["experiment=booking", f"run.dir={tmp_path}"])
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    config.rollout.max_staleness, config.rollout.server.replicas = 2, 8
    prepare.check_same_run(config)
    config.optim.weight_decay = 0.5
    with pytest.raises(ConfigError, match=r"holds a run with optim\.weight_decay=0\.0, not 0\.5; choose another run"):
        prepare.check_same_run(config)


def test_a_name_that_only_other_programs_know_asks_for_no_user_of_that_name() -> None:
    found = [(Survey(users={"collabllm?": "7", "calm": "8"}), "data.train")]

    def users(**named: dict) -> dict[str, str]:
        config = compose(["experiment=booking"])
        config.users = named
        return prepare.users_of_tasks(config, [(config, option, survey) for survey, option in found])

    assert users() == {"": "data.train, task 7", "calm": "data.train, task 8"}
    assert set(users(collabllm={"weight": 0})) == {"collabllm", "calm"}


REWARD_MODELS = """
import sys
from megatron_collab.config import ConfigError, compose
from megatron_collab.launch import prepare
for model in sys.argv[2:]:
    settings = ["experiment=booking", f"run.dir={sys.argv[1]}", "reward.weights.kind=1"]
    config = compose([*settings, f"reward.metrics.kind={{metric: reward_model, model: {model}}}"])
    try:
        prepare.pin_reward_models(config)
        print(config.reward.metrics["kind"]["model"])
    except ConfigError as error:
        print(error)
"""


@pytest.mark.processes
def test_reward_models_are_pinned_and_must_give_one_score(tmp_path: Path) -> None:
    shapes = {"some/judge": "Qwen3ForSequenceClassification", "some/chat": "Qwen3ForCausalLM"}
    with serving() as hub:
        commits = {}
        for name, kind in shapes.items():
            folder = tmp_path / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"architectures": [kind], "id2label": {"0": "score"}}))
            commits[name] = hub.add("model", name, folder)

        def pinned(*models: str) -> list[str]:
            command = [sys.executable, "-c", REWARD_MODELS, str(tmp_path / "run"), *models]
            environment = hub.environment(tmp_path / "home")
            done = subprocess.run(
                command, cwd=tmp_path / "home", env=environment, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout.splitlines()

        (tmp_path / "home").mkdir()
        judge, chat, none = pinned("some/judge", "some/chat", "some/none")
        assert judge == f"some/judge@{commits['some/judge']}"
        assert chat.startswith("reward.weights.kind: some/chat@") and "Qwen3ForCausalLM gives no score" in chat
        assert none.startswith("reward.metrics.kind.model=some/none: no such file or folder, and the Hub has no model")
        (tmp_path / "some/judge/config.json").write_text("{}")
        hub.add("model", "some/judge", tmp_path / "some/judge")
        hub.requests.clear()
        assert pinned("some/judge") == [judge] and not hub.requests  # as the run began
