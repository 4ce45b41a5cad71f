"""A teacher that cannot teach is refused in one line before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_collab.config import Config, compose
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.launch import tasks, teacher, validate
from megatron_collab.launch.spec import run_spec
from megatron_collab.planning import memory
from megatron_collab.settings import ConfigError
from tests.helpers import byte_level_tokenizer, make_model, refused

GOAL = ["algo=distill", "algo.teacher.context=goal"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algo.teacher.context=goal"], "algo.teacher.context=goal: without effect, since there is no teacher; set"),
        (["algo=distill"], "algo.teacher.model=reference: such a teacher equals the policy; set algo.teacher.context"),
        (["algo=distill", "algo.teacher.model=policy"], "algo.teacher.model=policy: such a teacher equals the policy"),
        ([*GOAL, "algo.objective=dpo"], "algo.teacher.weight=0.5: a teacher is part of the policy loss, which"),
        (
            [*GOAL, "train.stage=sft"],
            "algo.teacher.weight=0.5: a teacher is part of the policy loss, which train.stage",
        ),
        (
            [*GOAL, "algo.teacher.server=http://h:1", "algo.teacher.model=policy"],
            "algo.teacher.server=http://h:1: algo.teacher.model=policy names another teacher; remove one",
        ),
        (
            ["algo=distill", "algo.teacher.server=http://h:1", "rollout.turn.temperature=0.7"],
            "algo.teacher.server=http://h:1: its log-probs are those at temperature 1; set rollout.turn.temperature=1",
        ),
        (["algo=distill", "algo.teacher.server=h:1"], "algo.teacher.server=h:1: must begin with http"),
        (["algo=distill", "algo.teacher.model=no/such/model"], "algo.teacher.model="),
        (
            ["algo=distill", "algo.teacher.context=secret"],
            "algo.teacher.context=secret: choose one of goal, answer, next_message",
        ),
        (
            ["algo=distill", "algo.teacher.server=http://h:1", "algo.teacher.prompt=collaborator.j2"],
            "without effect, as the teacher's prompt is the policy's; set algo.teacher.context",
        ),
        ([*GOAL, "algo.teacher.prompt=user.j2"], "algo.teacher.prompt="),
        (
            [*GOAL, "rollout.strip_thoughts=true"],
            "algo.teacher.context=goal: needs conversations of one token sequence",
        ),
        (
            ["algo=distill", "algo.teacher.context=next_message", "reward.mode=single_turn"],
            "algo.teacher.context=next_message: with reward.mode=single_turn no user answers; choose goal or answer",
        ),
        (
            ["algo=distill", "algo.teacher.context=next_message", "rollout.max_assistant_turns=1", "rollout.futures=0"],
            "algo.teacher.context=next_message: with rollout.max_assistant_turns=1 no user answers; choose goal or",
        ),
        (
            [*GOAL, "algo.dynamic_sampling=3"],
            "algo.dynamic_sampling=3: drops groups of equal rewards, from which the teacher of algo.teacher.weight=0.5",
        ),
    ],
)
def test_settings_that_cannot_work(overrides: Sequence[str], message: str) -> None:
    assert message in refused(*overrides)


def test_pure_distillation_needs_one_rollout_of_a_task() -> None:
    alone = ["experiment=gsm8k", *GOAL, "train.rollouts_per_prompt=1"]
    assert "set train.rollouts_per_prompt to 2 or more" in refused(*alone[1:])
    validate.check_settings(compose([*alone, "algo.teacher.weight=1", "run.dir=r"]))


def test_the_sequences_of_a_teacher_are_cut_elsewhere() -> None:
    config = compose(["experiment=train_8b", *GOAL])
    config.parallel.cp = 2
    with pytest.raises(
        ConfigError, match=r"algo.teacher.context=goal: parallel.cp=2 cuts .* set algo.teacher.kl=sampl"
    ):
        teacher.check_settings(config)
    config.algo.teacher.kl = "sampled"
    teacher.check_settings(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `policy` and `teacher`, of another family with the same tokenizer, and `another` with another one."""
    folder = tmp_path_factory.mktemp("teachers")
    make_model(folder / "policy")
    make_model(folder / "teacher", family="llama")
    make_model(folder / "another")
    byte_level_tokenizer(330).save_pretrained(folder / "another")
    return folder


def config_of(folder: Path, model: str) -> Config:
    config = Config()
    config.model.path, config.model.dtype = str(folder / "policy"), "float32"
    config.algo.teacher = replace(config.algo.teacher, weight=0.5, model=str(folder / model))
    return config


def test_a_teacher_with_another_vocabulary_is_refused(folder: Path) -> None:
    teacher.check_files(config_of(folder, "teacher"))
    with pytest.raises(
        ConfigError, match=r"algo.teacher.model=.*another: its tokenizer .* give a teacher with the pol"
    ):
        teacher.check_files(config_of(folder, "another"))


def test_a_teacher_that_does_not_fit_the_layout_is_refused(folder: Path) -> None:
    config = config_of(folder, "teacher")
    config.parallel.tp = 3
    with pytest.raises(ConfigError, match=r"^algo.teacher.model=.*teacher: parallel.tp=3: does not divide"):
        validate.check_teacher(config)


def test_tasks_without_what_the_teacher_is_told_are_refused(folder: Path, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": "replay", "metadata": {"replay": ["so"]}}
    write_jsonl(tmp_path / "bare.jsonl", [row, row])
    config = config_of(folder, "teacher")
    config.run.dir, config.train.stage, config.data.train = f"{tmp_path}/run", "rl", f"{tmp_path}/bare.jsonl"
    config.reward.weights, config.algo.teacher.context = {"asks": 1.0}, "goal"
    tasks.read_data(config, run_spec(config), ())
    config.algo.teacher.context = "answer"
    with pytest.raises(ConfigError, match=r"none of its tasks has an answer, which the teacher is to be told; give"):
        tasks.read_data(config, run_spec(config), ())


def test_the_plan_counts_the_teacher(folder: Path) -> None:
    """Frozen weights on every stage; the states of an optimizer step's tokens, and more in the head, on the last."""
    shape = validate.check_teacher(config_of(folder, "policy"))
    assert shape is not None

    def parts(config: Config) -> list[dict[str, float]]:
        config.parallel.pp = config.launch.nproc_per_node = 2
        return [{part.name: part.training for part in stage} for stage in memory.plan_memory(config, shape)]

    config = config_of(folder, "policy")
    first, last = parts(config)
    assert first["teacher"] == first["parameters"] and last["teacher"] == last["parameters"]
    states = 4 * shape.hidden * config.rollout.turn.longest * config.train.prompts_per_step * 8
    assert "teacher states" not in first and last["teacher states"] == states
    assert "teacher head" not in last
    described = json.loads((folder / "policy" / "config.json").read_text())
    (folder / "wider").mkdir()
    (folder / "wider" / "config.json").write_text(json.dumps(described | {"vocab_size": shape.vocab + 64}))
    first_of_wider, last_of_wider = parts(config_of(folder, "wider"))
    assert "teacher head" not in first_of_wider and last_of_wider["teacher head"] == 4 * shape.vocab * shape.hidden
    config.algo.teacher.kl = "sampled"
    assert "teacher states" not in parts(config)[1] and parts(config)[1]["head"] < last["head"]
    config.algo.teacher.model, config.algo.kl_coef = "reference", 0.0
    assert parts(config)[0]["reference"] == first["teacher"] and "teacher" not in parts(config)[0]
    config.algo.teacher.model = "policy"
    assert not {"reference", "teacher"} & parts(config)[0].keys()
    assert json.loads((folder / "policy" / "config.json").read_text())["hidden_size"] == shape.hidden
