"""Going on with a run: what may change, what may not, and what an earlier version wrote."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_collab.config import Config, changes, compose
from megatron_collab.observability.run_record import SETTINGS, Change
from megatron_collab.settings import ConfigError


def began(folder: Path, *overrides: str) -> dict[str, Any]:
    """Write the settings of a run into `folder`, and give them."""
    folder.mkdir(exist_ok=True)
    settings = asdict(compose(["experiment=gsm8k", f"run.dir={folder}", *overrides]))
    (folder / SETTINGS).write_text(json.dumps(settings))
    return settings


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that tests only read."""
    folder = tmp_path_factory.mktemp("begun")
    began(folder)
    return folder


def goes_on(folder: Path, *overrides: str) -> list[Change]:
    return changes(compose(["experiment=gsm8k", f"run.dir={folder}", *overrides]))


EXTENDS = [
        "train.steps=7", "optim.lr=0.5", "optim.schedule=linear", "optim.warmup_steps=3", "algo.critic_lr=0.5",
        "train.tokens_per_micro_batch=64", "train.eval_tasks=3", "train.checkpoint_every=3", "train.keep_checkpoints=3",
        "launch.timeout=7.0", "launch.nproc_per_node=4", "launch.interface=ib0", "launch.device=cpu",
        "parallel.tp=1", "parallel.pp=2", "parallel.vpp=2", "parallel.sequence_parallel=true",
        "parallel.recompute=full", "parallel.offload=true", "rollout.workers=3", "rollout.deadline=7.0",
        "rollout.turn_timeout=7.0", "rollout.max_staleness=2", "rollout.server.port=7000", "rollout.server.replicas=3",
        "rollout.server.max_total_tokens=7", "rollout.server.max_running_requests=7", "user.api_base=http://a/v1",
        "user.timeout=7.0", "reward.judge.api_base=http://a/v1", "reward.judge.deadline=7.0", "reward.max_missing=0.5",
        "reward.weights.accuracy=0.5", "reward.workers=3", "llm.budget_usd=7.0", "llm.requests_per_minute=7",
        "llm.cache=cache", "publish.transport=disk", "data.eval=eval.jsonl", "run.wandb_project=other",
]  # fmt: skip
MIXES = [
        "run.seed=7", "model.path=other", "model.dtype=bfloat16", "algo.advantage=rloo", "algo.loss=cispo",
        "algo.kl_coef=0.5",
        "algo.clip_high=0.5", "optim.beta2=0.5", "optim.weight_decay=0.5", "train.stage=sft",
        "train.prompts_per_step=7",
        "train.rollouts_per_prompt=7", "rollout.futures=7", "rollout.context_length=70", "rollout.turn.temperature=0.5",
        "rollout.server.fp8=true", "parallel.cp=2", "parallel.ep=2", "reward.mode=single_turn",
        "reward.turn_credit=last",
        "reward.weights.bleu=0.5", "reward.clamp.accuracy=0.5", "reward.metrics.accuracy.judge=true",
        "reward.judge.model=other", "user.model=other", "data.train=other.jsonl",
]  # fmt: skip


def test_what_extends_a_run_or_leaves_its_results_may_change_and_no_more(begun: Path) -> None:
    differences = goes_on(begun, *EXTENDS, *MIXES)
    allowed = {f"{change.setting}={change.after}".lower(): change.allowed for change in differences}
    assert allowed == dict.fromkeys(EXTENDS, True) | dict.fromkeys(MIXES, False)


def test_a_metric_may_not_go_either(tmp_path: Path) -> None:
    began(tmp_path, "reward.weights.bleu=0.5")
    assert goes_on(tmp_path) == [Change("reward.weights.bleu", 0.5, None, False)]


def test_the_same_settings_are_no_change_and_no_run_has_none(tmp_path: Path) -> None:
    assert goes_on(tmp_path) == []
    began(tmp_path)
    assert goes_on(tmp_path) == []


def test_a_folder_that_was_moved_goes_on(tmp_path: Path) -> None:
    began(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    assert goes_on(tmp_path / "after") == [
        Change("run.dir", str(tmp_path / "before"), str(tmp_path / "after"), allowed=True)
    ]


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    settings = began(tmp_path)
    settings["reward"] |= {"turn_credit": "reward_to_go(0.9)"}
    del settings["reward"]["turn_gamma"]
    settings["rollout"]["gone"] = 1
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    assert goes_on(tmp_path, "reward.turn_credit=reward_to_go", "reward.turn_gamma=0.9") == []
    (change,) = goes_on(tmp_path, "reward.turn_credit=reward_to_go", "reward.turn_gamma=0.8")
    assert change == Change("reward.turn_gamma", 0.9, 0.8, allowed=False)
    settings["reward"]["turn_credit"] = "last"
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    assert goes_on(tmp_path, "reward.turn_credit=last") == []


def test_a_run_whose_metrics_had_no_module_yet_goes_on(tmp_path: Path) -> None:
    compose_booking = ["experiment=booking", f"run.dir={tmp_path}"]
    settings = asdict(compose(compose_booking))
    del settings["reward"]["metrics"]
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    assert changes(compose(compose_booking)) == []
    other = changes(compose([*compose_booking, "reward.metrics.token_amount.count=words"]))
    assert [(change.setting, change.allowed) for change in other] == [("reward.metrics.token_amount.count", False)]


def test_futures_that_adapted_do_not_go_on(tmp_path: Path) -> None:
    settings = began(tmp_path)
    settings["rollout"]["futures"] = "adaptive(2,6)"
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    assert goes_on(tmp_path) == [Change("rollout.futures", "adaptive(2,6)", 0, allowed=False)]


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_settings_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SETTINGS).write_text(text)
    config = Config()
    config.run.dir = str(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: contains no run settings; restore it, or choose another"):
        changes(config)


def test_servers_may_change_but_not_what_they_serve(tmp_path: Path) -> None:
    judge = "servers={judge: {model: /models/a, replicas: 1, args: {page-size: 1}}}"
    (tmp_path / SETTINGS).write_text(json.dumps(asdict(compose([f"run.dir={tmp_path}", "experiment=gsm8k", judge]))))

    def goes_on(*overrides: str) -> dict[str, bool]:
        config = compose([f"run.dir={tmp_path}", "experiment=gsm8k", *overrides])
        return {change.setting: change.allowed for change in changes(config)}

    assert goes_on(judge, "rollout.server.args={page-size: 8}") == {"rollout.server.args.page-size": True}
    other = "servers={judge: {model: /models/b, replicas: 2, tp: 2, args: {log-level: info}}}"
    assert goes_on(other) == {
        "servers.judge.args.log-level": True,
        "servers.judge.args.page-size": True,
        "servers.judge.model": False,
        "servers.judge.replicas": True,
        "servers.judge.tp": True,
    }
    assert goes_on()["servers.judge.model"] is False
