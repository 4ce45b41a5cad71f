"""Each program has its own options: it takes them out of what all programs compose, and shows no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_collab import evaluate, train
from megatron_collab.config import (
    AllOptions,
    BuildDatasetConfig,
    CallConfig,
    Config,
    EvaluateConfig,
    PlayConfig,
    UsersFromLogsConfig,
    changes,
    compose,
    compose_program,
    recorded,
)
from megatron_collab.observability.run_record import SETTINGS
from megatron_collab.settings import ConfigError, declared
from megatron_collab.synthesis import build_dataset
from megatron_collab.user_logs import command
from tests.helpers import configured

ALL = {name for name, _, _ in declared(AllOptions)}
MAINS: dict[type[CallConfig], Callable[[list[str]], int]] = {
    Config: train.main,
    EvaluateConfig: evaluate.main,
    BuildDatasetConfig: build_dataset.main,
    UsersFromLogsConfig: command.main,
}
TRAINING = (
    "algo=dapo",
    "train.steps=3",
    "optim.lr=0.5",
    "rollout.train_turns=all",
    "model.lora.rank=4",
    "publish.verify=1",
)


def options_of(program: type[CallConfig]) -> set[str]:
    return {name for name, _, _ in declared(program)}


def printed(program: type[CallConfig], capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    try:
        assert MAINS[program]([*arguments]) == 0
    except SystemExit as end:  # of argparse
        assert end.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("program", MAINS)
def test_the_help_lists_exactly_the_options_of_the_program(
    program: type[CallConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.split() for line in printed(program, capsys, "--help") if line.startswith("  ")]
    assert {words[0] for words in lines if words} & ALL == options_of(program) < ALL


@pytest.mark.parametrize("program", [Config, EvaluateConfig, BuildDatasetConfig])
def test_the_composed_settings_are_those_of_the_program(
    program: type[CallConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(program, capsys, "experiment=train_8b", "--cfg")
    names = {line.partition("=")[0] for line in lines}
    options = options_of(program)
    assert {name for name in options if any(f"{line}.".startswith(f"{name}.") for line in names)} == options
    assert all(any(f"{line}.".startswith(f"{name}.") for name in options) for line in names)


def test_what_users_from_logs_reads_is_what_calls_and_serves_a_model() -> None:
    read = options_of(UsersFromLogsConfig)
    assert {"reward.judge.model", "llm.budget_usd", "servers", "launch.device"} < read
    assert not any(name.startswith(("run.dir", "data.", "user", "train.", "reward.weights")) for name in read)


@pytest.mark.seconds
@pytest.mark.parametrize("experiment", ["booking", "gsm8k", "train_8b", "booking_sft"])
def test_the_command_of_a_training_can_be_repeated_as_an_evaluation(experiment: str) -> None:
    """Its settings of conversations apply, those of training are ignored, also a stage of an experiment."""
    command_line = [f"experiment={experiment}", *TRAINING, "run.dir=out"]
    trained = compose(command_line)
    for program in (EvaluateConfig, BuildDatasetConfig, PlayConfig):
        played = compose_program(program, command_line)
        values = {name: value for name, value, _ in declared(trained)}
        shared = {name: value for name, value, _ in declared(played) if name in values}
        assert shared == {name: values[name] for name in shared}
        assert options_of(PlayConfig) == shared.keys()


def refused(program: type[CallConfig], *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose_program(program, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("program", "override", "message"),
    [
        (Config, "assistant.model=openai/m", "assistant.model: is only for `megatron-collab evaluate`; remove it"),
        (Config, "+assistant={extra: {a: 1}}", "assistant: is only for `megatron-collab evaluate`; remove it"),
        (Config, "build.proactive=0.5", "build.proactive: is only for `megatron-collab build-dataset`; remove it"),
        (EvaluateConfig, "build.candidates=3", "build.candidates: is only for `megatron-collab build-dataset`; remove"),
        (EvaluateConfig, "bild.candidates=3", "bild.candidates: no such option; the nearest is build.candidates"),
        (EvaluateConfig, "train.step=3", "train.step: no such option; the nearest is train.steps"),
        (UsersFromLogsConfig, "reward.juge.model=m", "reward.juge.model: no such option; the nearest is reward.judge"),
        (UsersFromLogsConfig, "optim.lr=1", "optim.lr: is only for `megatron-collab train`; remove it"),
        (EvaluateConfig, "train.steps=0.5", "train.steps=0.5: must be a whole number"),
        (UsersFromLogsConfig, "reward.judge.timeout=1e-9", "reward.judge.timeout=1e-09: must be at least 0.1"),
        (UsersFromLogsConfig, "llm.cache=' '", "llm.cache=' ': is blank; give a value"),
        (BuildDatasetConfig, "assistant.api_base=host/v1", "assistant.api_base=host/v1: must begin with http://"),
    ],
)
def test_options_of_another_program_or_of_none_are_refused(
    program: type[CallConfig], override: str, message: str
) -> None:
    assert refused(program, "experiment=booking", override).startswith(message)


def test_only_options_of_the_program_must_be_set() -> None:
    assert refused(Config, "run.dir=out").startswith("data.train: not set; give data.train=VALUE")
    assert compose_program(EvaluateConfig, ["run.dir=out"]).model.path == ""
    assert refused(EvaluateConfig, "data.eval=e").startswith("run.dir: not set")
    compose_program(UsersFromLogsConfig, [])


@pytest.mark.parametrize(
    ("program", "more"),
    [
        (EvaluateConfig, {"assistant.model": "openai/m"}),
        (BuildDatasetConfig, {"assistant.model": "openai/m", "build.candidates": 3}),
        (EvaluateConfig, {"model.path": "policy"}),
    ],
)
def test_a_folder_with_the_options_of_all_programs_is_resumed(
    tmp_path: Path, program: type[PlayConfig], more: dict[str, object]
) -> None:
    """As earlier versions recorded it, with values in place of what an evaluation does not need."""
    settings = {"run.dir": str(tmp_path), "data.eval": "e.jsonl", **more}
    before = configured(AllOptions(), {"data.train": "unused", "model.path": "unused", **settings})
    (tmp_path / SETTINGS).write_text(json.dumps(asdict(before)))
    assert changes(configured(program(), settings)) == []
    (change,) = changes(configured(program(), {**settings, "user.model": "other"}))
    assert (change.setting, change.allowed) == ("user.model", False)


@pytest.mark.parametrize("other", [Config, EvaluateConfig, BuildDatasetConfig])
def test_the_folder_of_another_program_is_refused(tmp_path: Path, other: type[PlayConfig]) -> None:
    command_line = [f"run.dir={tmp_path}", "data.eval=e.jsonl", "data.train=t.jsonl", "model.path=m"]
    (tmp_path / SETTINGS).write_text(json.dumps(recorded(compose_program(other, command_line))))
    for program in (Config, EvaluateConfig, BuildDatasetConfig):
        config = compose_program(program, command_line)
        if program is other:
            assert changes(config) == []
        else:
            with pytest.raises(ConfigError, match=rf"holds a run of `megatron-collab {other.program}`; choose another"):
                changes(config)
