"""Studies as they are shipped, and the programs that they are."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_collab.launch.data_specs import evaluation_data
from megatron_collab.reproduce.__main__ import main
from megatron_collab.reproduce.plan import BUILD, EVALUATE, PREPARE, TRAIN, Stage, StudyOptions, chains, stages
from megatron_collab.reproduce.study import Arm, Column, Study, known, read, select
from megatron_collab.settings import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def options(study: Study, **more: object) -> StudyOptions:
    return replace(StudyOptions(Path("out"), list(study.tasks), list(study.arms), study.model), **more)


def one_training() -> Study:
    """The study of the booking world with a single training, whose folder has no seed."""
    return replace(read("booking"), train_seeds=1)


def by_name(planned: list[Stage]) -> dict[str, Stage]:
    return {stage.title: stage for stage in planned}


# Each with many stages to compose; other tests compose parts of collabllm and desk.
LONG = ("collabllm", "credit_desk", "desk")


@pytest.mark.seconds
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in known()])
def test_a_study_can_be_composed_and_its_arms_have_numbers_for_every_column(name: str) -> None:
    study = read(name)
    for stage in stages(study, options(study)):
        assert stage.prepares or stage.config.run.dir == str(stage.folder)
    for arm in study.arms.values():
        for task, printed in arm.published.items():
            assert len(printed) == len(study.tasks[task].columns)


@pytest.mark.seconds
def test_the_studies_that_are_shipped() -> None:
    assert known() == ["booking", "collabllm", "credit_booking", "credit_desk", "desk", "desk_costs", "distill"]


def test_the_published_table_has_the_improvements_that_its_paper_states() -> None:
    """Online DPO over the proactive base, last row of table 1; for ITR of mathematics the paper divides by the base."""
    arms = read("collabllm").arms
    online, proactive, base = (arms[name].published for name in ("online_dpo", "proactive", "base"))
    improved = {
        task: [round(100 * abs(new / old - 1), 1) for new, old in zip(online[task], proactive[task], strict=True)]
        for task in ("medium", "code", "math")
    }
    assert improved["medium"] == [5.1, 8.3, 48.4] and improved["code"] == [18.2, 13.2, 54.3]
    assert improved["math"][:2] == [32.0, 18.3] and round(100 * (online["math"][2] / base["math"][2] - 1), 1) == 36.4


@pytest.mark.seconds
def test_the_paper_is_trained_and_evaluated_as_its_tables_say() -> None:
    study = read("collabllm")
    planned = by_name(stages(study, options(study, tasks=["code"])))
    trained = {
        name: (c.optim.lr, c.train.prompts_per_step, c.train.stage, c.objective)
        for name in ("sft", "ppo", "offline_dpo", "online_dpo")
        if (c := planned[f"code/{name}"].config)
    }
    assert trained == {  # table 6
        "sft": (1e-5, 64, "sft", "sft"),
        "ppo": (2e-6, 64, "rl", "policy"),
        "offline_dpo": (5e-6, 64, "dpo", "dpo"),
        "online_dpo": (5e-6, 32, "rl", "dpo"),
    }
    config = planned["code/ppo"].config
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.dropout) == (32, 16, 0.1)
    assert (config.rollout.futures, config.rollout.max_user_turns, config.reward.mode) == (3, 2, "paper")
    assert config.reward.weights["pass_rate"] == 1 and config.reward.weights["token_amount"] == -5e-4
    assert planned["code/ppo"].config.model.path == "out/code/sft/hf"  # section 4
    assert planned["code/online_dpo"].config.model.path == "out/code/offline_dpo/hf"
    evaluated = planned["code/base_eval"].config
    sets = evaluation_data(evaluated).eval_sets
    assert [(eval_set.name, eval_set.tasks, eval_set.max_messages, eval_set.max_user_turns) for eval_set in sets] == [
        (f"seed{seed}", 600, 14, 7) for seed in range(3)
    ]
    assert evaluated.rollout.system_prompt is None and evaluated.model.path == study.model
    assert planned["code/proactive_eval"].config.rollout.system_prompt == "collaborator.j2"
    prompted = options(study, tasks=["code"], settings=("rollout.system_prompt=mine.j2",))
    changed = by_name(stages(study, prompted))
    assert changed["code/base_eval"].config.rollout.system_prompt is None, "which makes it the base"
    assert changed["code/proactive_eval"].config.rollout.system_prompt == "mine.j2"
    assert evaluated.reward.metrics["pass_rate"] == {"extract": "judge"}, "as published"
    medium = by_name(stages(study, options(study, tasks=["medium"])))["medium/ppo"].config
    assert medium.reward.weights["token_amount"] == -1e-4 and "accuracy" not in medium.reward.weights


@pytest.mark.seconds
def test_an_arm_waits_for_its_teacher() -> None:
    """In each chain of three seeds; without the arms that neither begin nor teach it."""
    study = read("distill")
    planned = stages(study, options(study, arms=["distill_mr"], train_seeds=study.train_seeds))
    assert len({stage.chain for stage in planned}) == 3
    for chain in {stage.chain for stage in planned}:
        names = [stage.name for stage in planned if stage.chain == chain]
        assert [name for name in names if name != "pilot"] == ["sft", "grpo", "distill_mr", "distill_mr_eval"]
    taught = by_name(planned)["booking/seed1/distill_mr"]
    teacher = taught.config.algo.teacher
    assert {"grpo", "sft"} <= set(taught.reads) and teacher.model == "out/booking/seed1/grpo/hf"
    assert taught.config.model.path == "out/booking/seed1/sft/hf" and teacher.weight == 0.5 and teacher.full


@pytest.mark.seconds
def test_an_arm_brings_what_it_begins_with_and_data_come_first() -> None:
    study = read("collabllm")
    planned = stages(study, options(study, tasks=["math"], arms=["online_dpo"]))
    names = [stage.name for stage in planned]
    assert names == [
        *("rows_opened", "rows_sft", "rows_dpo", "rows_rl", "pilot"),
        *("sft", "offline_dpo", "online_dpo", "online_dpo_eval"),
    ]
    assert [stage.module for stage in planned] == [PREPARE] * 4 + [EVALUATE] + [TRAIN] * 3 + [EVALUATE]
    both = stages(study, options(study, tasks=["math", "code"], arms=["sft"]))
    assert [stage.chain.task for stage in both] == ["math"] * 3 + ["code"] * 3 + ["math"] * 2 + ["code"] * 2
    built = by_name(stages(study, options(study, tasks=["math"], arms=["sft"], build=True, pilot=0)))
    assert [*built] == [f"math/{name}" for name in ("rows_opened", "build", "rows_sft", "sft", "sft_eval")]
    build = built["math/build"]
    assert build.module == BUILD and build.config.assistant.model == "openai/gpt-4o" and not build.first
    assert built["math/rows_sft"].arguments[1] == "out/math/build/built"


def test_settings_that_a_build_would_refuse_are_refused_before_anything_starts() -> None:
    """In time, and not after the hours of what it reads."""
    study = read("desk")
    chosen = options(study, tasks=["cost_0.10"], arms=["offline_dpo"], pilot=0)
    assert by_name(stages(study, chosen))["cost_0.10/seed1/build"].config.rollout.max_messages == 10
    with pytest.raises(ConfigError, match=r"^rollout.max_messages: not set; give the longest conversation, e.g. 14$"):
        stages(study, replace(chosen, settings=["rollout.max_messages=null"]))


@pytest.mark.parametrize("arms", [["sft", "ppo"], *([arm] for arm in read("booking").arms)], ids=",".join)
def test_any_arms_alone_have_all_that_they_read(arms: list[str]) -> None:
    """What a program reads in the folder of its task is of a program before it; the first one makes the world."""
    study = one_training()
    folders = {"world"}
    planned = stages(study, options(study, arms=arms))
    assert planned[0].title == "booking/base"
    for stage in planned:
        names = re.findall("out/booking/(\\w+)", " ".join(stage.arguments))
        assert set(names) - {stage.folder.name} <= folders, stage.title
        folders.add(stage.folder.name)
    assert [stage.title for stage in planned if "_eval" in stage.title and not stage.prepares] == [
        f"booking/{arm}_eval" for arm in arms
    ]


@pytest.mark.seconds
def test_steps_are_those_of_the_epochs(tmp_path: Path) -> None:
    study = read("collabllm")
    of_sft = by_name(stages(study, options(study, out=tmp_path, tasks=["math"])))["math/sft"]
    assert of_sft.rows == tmp_path / "math" / "rows_sft" / "summary.json" and of_sft.steps(640) == 30
    of_sft.rows.parent.mkdir(parents=True)
    of_sft.rows.write_text(json.dumps({"kept": {"train": 65}}))
    assert of_sft.steps() == 4 and "train.epochs=3" in of_sft.command()  # 195 rows in batches of 64
    limited = options(study, out=tmp_path, tasks=["math"], settings=("train.steps=2",))
    assert "train.epochs=3" not in by_name(stages(study, limited))["math/sft"].command()


@pytest.mark.seconds
def test_each_training_seed_has_its_folder() -> None:
    """Also a single one of a study of several, so that others can be added; not if the study has a single one."""
    study = read("booking")
    planned = stages(study, options(study, arms=["sft"], train_seeds=2))
    assert {stage.chain.title for stage in planned} == {"booking/seed0", "booking/seed1"}
    assert [stage.title for stage in planned if stage.name == "pilot"] == ["booking/seed0/pilot"], "one for the task"
    for stage in planned:
        seed = stage.chain.seed
        assert str(stage.folder) == f"out/booking/seed{seed}/{stage.name}"
        assert stage.prepares or stage.config.run.seed == seed
        assert stage.prepares or stage.config.data.dir == f"out/booking/seed{seed}/world"
    single = stages(one_training(), options(study, arms=["sft"]))
    assert single[0].title == "booking/base" and not any("run.seed" in " ".join(stage.arguments) for stage in single)
    assert stages(study, options(study, arms=["sft"]))[0].title == "booking/seed0/base"
    later = stages(replace(study, first_seed=4), options(study, arms=["sft"], train_seeds=2))
    assert {stage.chain.title for stage in later} == {"booking/seed4", "booking/seed5"}
    (first,) = chains(replace(one_training(), first_seed=0), options(study), "booking")
    assert first == ("booking", "booking/seed0", 0), "also if the first seed is set to 0"
    with pytest.raises(ConfigError, match=r"run\.seed=7: the training seeds set it; leave it out"):
        stages(study, options(study, settings=("run.seed=7",)))


@pytest.mark.seconds
def test_a_task_may_have_several_evaluated_sets_that_begin_with_their_messages() -> None:
    study = one_training()
    sets = {"near": "$FOLDER/world/eval.jsonl", "far": "$FOLDER/world/far.jsonl"}
    task = replace(study.tasks["booking"], eval_source=None, eval_sets=sets, eval_tasks=5, opened=False)
    study = replace(study, tasks={"booking": task})
    planned = by_name(stages(study, options(study, arms=["sft"], seeds=2)))
    assert not [title for title in planned if "opened" in title or "rows_eval" in title]
    evaluated = evaluation_data(planned["booking/sft_eval"].config).eval_sets
    assert [(eval_set.source, eval_set.name, eval_set.tasks) for eval_set in evaluated] == [
        (f"out/booking/world/{file}.jsonl", f"{name}_seed{seed}", 5)
        for name, file in (("near", "eval"), ("far", "far"))
        for seed in range(2)
    ]
    opened = replace(study, tasks={"booking": replace(task, opened=True)})
    planned = by_name(stages(opened, options(opened, arms=["sft"], seeds=1)))
    assert planned["booking/rows_eval_far"].arguments[1] == "out/booking/world/far.jsonl"
    assert "rows_eval_far/train.jsonl" in " ".join(planned["booking/sft_eval"].arguments)


def test_an_arm_may_name_its_data_and_start_from_another() -> None:
    study = one_training()
    arms = {**study.arms, "mine": Arm("Mine", start="sft", train=["algo=grpo", "data.train=$FOLDER/world/train.jsonl"])}
    study = replace(study, arms=arms)
    planned = stages(study, options(study, arms=["mine"]))
    config = by_name(planned)["booking/mine"].config
    assert config.model.path == "out/booking/sft/hf" and config.data.train == "out/booking/world/train.jsonl"
    assert [stage.name for stage in planned][-3:] == ["sft", "mine", "mine_eval"]


@pytest.mark.seconds
def test_calls_are_recorded_and_replayed_by_program() -> None:
    study = read("collabllm")
    recorded = by_name(stages(study, options(study, tasks=["math"], record=Path("calls"))))
    assert "llm.record=calls/math/pilot" in recorded["math/pilot"].arguments
    assert recorded["math/ppo"].calls == Path("calls/math/ppo")
    assert recorded["math/sft"].calls is None, "it asks no model"
    replayed = by_name(stages(study, options(study, tasks=["math"], arms=["base"], replay=Path("calls"))))
    assert "llm.replay=calls/math/base_eval" in replayed["math/base_eval"].arguments
    booking = read("booking")
    assert not any(stage.calls for stage in stages(booking, options(booking)) if not stage.prepares)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("title: x", "is not a study: 'tasks'"),
        ("tasks: {a: {title: A, source: s, columns: [{metric: m}]}}\narms: {}", "is not a study: Column"),
        ("tasks: [", "is not a study: while parsing"),
        ("[" * 3000, "is not a study: "),
        ("title: x\nmodel: m\nsettings: 3\ntasks: {}\narms: {}", "is not a study: settings=3 has another type"),
        ("title: x\nmodel: m\nbuild: [3]\ntasks: {}\narms: {}", r"is not a study: build=\[3\] has another type"),
        ("title: x\nmodel: m\nbuild: abc\ntasks: {}\narms: {}", "is not a study: build='abc' has another type"),
        ("title: x\nmodel: m\ntasks: {}\narms: {}", "has no tasks or no arms; give it some"),
        (
            "title: x\nmodel: m\ntasks: {t: {title: T, source: s, opened: false, columns: []}}\narms: {b: {title: B}}",
            "tasks.t.opened=false: there is no set to evaluate; give eval_source or eval_sets",
        ),
        (
            "title: x\nmodel: m\narms: {b: {title: B}}\ntasks: {t: {title: T, source: s, eval_sets: {users: u}, "
            "columns: [{metric: m, name: M, set: user}]}}",
            "tasks.t.columns: set=user: not in eval_sets; the nearest is users",
        ),
        (
            "title: x\nmodel: m\ntasks: {}\narms: {b: {title: B, rows: sfd}}",
            "arms.b.rows=sfd: choose one of sft, dpo, rl",
        ),
        ("title: x\nmodel: m\ntasks: {}\narms: {b: {title: B, epochs: 0}}", "arms.b.epochs=0: must be more than 0"),
        (
            "title: x\nmodel: m\narms: {b: {title: B}}\ntasks: {t: {title: T, source: s, eval_tasks: 0, columns: []}}",
            "tasks.t.eval_tasks=0: must be 1 or more",
        ),
        (
            "title: x\nmodel: m\narms: {b: {title: B}}\ntasks: {t: {title: T, source: s, eval_share: 1, columns: []}}",
            "tasks.t.eval_share=1: must be between 0 and 1",
        ),
        (
            "title: x\nmodel: m\ntasks: {}\narms: {b: {title: B, teacher: c}, c: {title: C}}",
            "arms.b.teacher=c: no arm above it has that name",
        ),
        (
            "title: x\nmodel: m\ntasks: {}\narms: {b: {title: B, from: c}, c: {title: C}}",
            "arms.b.from=c: no arm above it has that name",
        ),
    ],
)
def test_a_file_that_is_no_study_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(str(tmp_path / "mine.yaml"))


def test_settings_that_a_later_program_would_refuse_are_refused_before_the_first() -> None:
    study = read("booking")
    task = study.tasks["booking"]
    columns = [*task.columns, Column("booking_rigth", "right")]
    misspelt = replace(study, tasks={"booking": replace(task, columns=columns)})
    with pytest.raises(
        ConfigError, match="metric=booking_rigth: is not measured; the nearest is booking_right; give it"
    ):
        stages(misspelt, options(misspelt, arms=["base"]))
    unknown = replace(study, evaluate={"turns": 3})
    with pytest.raises(ConfigError, match=r"data\.eval.*turns"):
        stages(unknown, options(unknown, arms=["base"]))


@pytest.mark.seconds
def test_the_commands_of_the_page_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "howto" / "reproduce.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^    megatron-collab reproduce (.*)$", text, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        arguments = shlex.split(command.replace("--replay calls", ""))  # where there are none
        assert main([*arguments, "--commands"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("python -m megatron_collab.evaluate")


def test_names_that_a_study_lacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="STUDY=collab: no such study; choose one of booking, collabllm"):
        read("collab")
    arms = read("collabllm").arms
    assert select("grpo, base", arms, "--arms") == ["base", "grpo"] and select(None, arms, "--arms") == list(arms)
    with pytest.raises(ConfigError, match=r"--arms=grop: the study has base, .*; the nearest is grpo"):
        select("grop", arms, "--arms")
