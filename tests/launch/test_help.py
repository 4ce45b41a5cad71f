"""What --help and --cfg print."""

from __future__ import annotations

import pytest

from megatron_collab.config import Config, compose, groups
from megatron_collab.launch.help import composed_settings, help_text
from megatron_collab.reward import metrics
from megatron_collab.rollout import users
from megatron_collab.rollout.tools import toolbox
from megatron_collab.settings import declared
from megatron_collab.train import main


def test_the_help_lists_all_that_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    words = {" ".join(line.split()[:2]) for line in capsys.readouterr().out.splitlines()}
    names = {word for line in words for word in line.split()[:1]}
    assert {name for name, _, _ in declared(Config)} <= names
    assert {f"{group}={name}" for group, choices in groups().items() for name in choices} <= names
    assert {*metrics.METRICS, *users.USERS, *toolbox.TOOLS, ".judge", ".rubric", ".cpu_seconds"} <= names
    assert "train.steps *" in words and "run.seed *" not in words


def test_a_line_of_the_help_says_what_is_allowed_and_the_default() -> None:
    lines = {line.split()[0]: " ".join(line.split()) for line in help_text("", Config).splitlines() if line.strip()}
    assert lines["algo.loss"].endswith("(ppo | gspo | cispo | package.module:Class) [ppo]")
    assert lines["optim.beta1"] == "optim.beta1 AdamW beta1 (at least 0 and below 1) [0.9]"
    assert lines["model.path"].endswith("[required]")
    assert lines["algo=ppo"].startswith("algo=ppo PPO (arXiv 1707.06347): ")


@pytest.mark.seconds
def test_what_cfg_prints_composes_to_the_same_settings(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["experiment=train_8b", "algo=dapo", "reward=verl", "reward.metrics.accuracy.model='a: \"b\" #c'"]
    assert main([*overrides, "--cfg"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert compose([line.rpartition("  # ")[0].rstrip() for line in lines]) == compose(overrides)
    assert any(line.split() == ["algo.clip_high=0.28", "#", "conf/algo/dapo.yaml"] for line in lines)


def test_what_must_be_set_yet_is_named() -> None:
    assert any(
        line.split() == ["model.path=???", "#", "required,", "not", "set"]
        for line in composed_settings([], Config).splitlines()
    )
