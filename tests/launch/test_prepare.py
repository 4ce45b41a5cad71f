"""What is refused before the ranks are started."""

from __future__ import annotations

import json
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_collab import train
from megatron_collab.config import Config, compose
from megatron_collab.data.datasets import write_jsonl
from megatron_collab.data.survey import Survey
from megatron_collab.launch import prepare, tasks
from megatron_collab.launch.data_specs import data_spec
from megatron_collab.launch.play_specs import user_directory
from megatron_collab.launch.spec import run_spec
from megatron_collab.runtime import process
from megatron_collab.settings import ConfigError, replaced
from tests.helpers import byte_level_tokenizer


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


def test_an_address_of_ray_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["experiment=booking", "run.dir=unused"])
    for address in ("10.0.0.1:6379", "[::1]:6379", "head-0.cluster.local:6379", "ray://head:10001", "auto", "local"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        prepare.check_nodes(config, "m")
    for address in ("", " ", "head", "head:99999", "http://head:8265", "10.0.0.1:6379\n", "head:", ":6379", "::1:6379"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=r"^RAY_ADDRESS=.*\s*: .*, or unset it for a cluster of this run$"):
            prepare.check_nodes(config, "m")
        prepare.check_nodes(config, "m", plays=False)


def test_a_finished_run_is_done_until_more_steps_are_asked_for(tmp_path: Path) -> None:
    config = compose(["experiment=booking", f"run.dir={tmp_path}", "train.steps=5"])
    assert prepare.finished_steps(config) == 0
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    assert prepare.finished_steps(config) == 0, "begun"
    (tmp_path / "result.json").write_text("{}")
    assert prepare.finished_steps(config) == 5
    for length in ("train.steps=5", "train.epochs=0.01"):
        settled = lambda config: (replaced(config, {"train.steps": 5}), None)  # noqa: E731
        with patch.object(prepare, "prepare", settled), ExitStack() as stack:
            done = train.prepared(["experiment=booking", f"run.dir={tmp_path}", length], stack)
            assert f"all 5 steps are done; raise {length.partition('=')[0]} to train on" in str(done)
    config.train.steps = 3
    assert prepare.finished_steps(config) == 5
    config.train.steps = 6
    assert prepare.finished_steps(config) == 0


def test_a_run_goes_on_with_more_servers_but_not_with_other_numbers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    data = f"{tmp_path}/rows.jsonl"
    config = compose(["experiment=booking", f"run.dir={tmp_path}", f"data.train={data}", f"data.eval={data}"])
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    config.rollout.max_staleness, config.rollout.server.replicas = 2, 8
    prepare.check_same_run(config, data_spec(config))
    config.optim.weight_decay = 0.5
    with pytest.raises(ConfigError, match=r"holds a run with optim\.weight_decay=0\.0, not 0\.5; choose another run"):
        prepare.check_same_run(config, data_spec(config))


@pytest.mark.processes
def test_a_rank_does_not_check_again_what_its_launcher_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank would read the data and ask the servers of tools once more; one whose torchrun was started does."""
    world = ["experiment=booking_sft", f"data.dir={tmp_path}/world", f"run.dir={tmp_path}/run"]
    monkeypatch.setenv(process.LAUNCHER, "1")
    prepare.prepare(compose(world))
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()
    monkeypatch.delenv(process.LAUNCHER)
    first = compose([*world, "train.epochs=2"])
    first, _ = prepare.prepare(first)
    assert "rows, read as" in capsys.readouterr().out and (tmp_path / "run" / "data").is_dir()
    for name, value in {**prepare.variables_of_ranks(first), process.LAUNCHER: "1"}.items():
        monkeypatch.setenv(name, value)
    rank = compose([*world, "train.epochs=2"])
    rank, _ = prepare.prepare(rank)
    assert rank == first and rank.train.steps != compose(world).train.steps and rank.train.epochs == 2


def test_a_name_that_only_other_programs_know_asks_for_no_user_of_that_name() -> None:
    surveys = [(Survey(users={"collabllm?": "7", "calm": "8"}), "data.train")]

    def examples(**named: dict) -> dict[str, str]:
        config = compose(["experiment=booking"])
        config.users = named
        users = user_directory(config)
        return tasks.users_of_tasks(users, [(users, option, survey) for survey, option in surveys])

    assert examples() == {"": "data.train, task 7", "calm": "data.train, task 8"}
    assert set(examples(collabllm={"weight": 0})) == {"collabllm", "calm"}


@pytest.mark.processes
def test_each_metric_picks_its_tasks_from_the_sources_and_its_share_is_said(tmp_path: Path) -> None:
    """Weights are shared by all sources; what decides is a part of what a survey is kept under."""
    byte_level_tokenizer(300).save_pretrained(tmp_path / "model")
    row = {"prompt": [{"role": "user", "content": "hi"}], "goal": "g", "user": "replay", "metadata": {"replay": ["so"]}}
    write_jsonl(tmp_path / "some.jsonl", [{**row, "answer": answer} for answer in ("1", "", "2")])
    write_jsonl(tmp_path / "none.jsonl", [row, row])
    config = Config()
    config.run.dir, config.model.path, config.train.stage = f"{tmp_path}/run", f"{tmp_path}/model", "rl"
    config.data.train = [f"{tmp_path}/some.jsonl", f"{tmp_path}/none.jsonl"]
    config.data.eval = f"{tmp_path}/none.jsonl"
    config.reward.weights = {"asks": 1.0}
    _, (train, _) = tasks.read_data(config, run_spec(config), ())
    assert not any("reward.weights" in line for line in train.lines())
    config.reward.weights = {"asks": 1.0, "accuracy": 1.0}
    _, (train, held_out) = tasks.read_data(config, run_spec(config), ())
    mixed, none = train.lines()
    assert mixed.endswith("; reward.weights.accuracy: for 2 of 3 rows (1 lack an answer)")
    assert none.endswith("; reward.weights.accuracy: for 0 of 2 rows (2 lack an answer)")
    assert held_out.lines()[0].endswith("for 0 of 2 rows (2 lack an answer)")
    config.user.name = "feedback"
    with pytest.raises(
        ConfigError, match=r"data\.train=.*none\.jsonl: none of its tasks has an answer, which its user"
    ):
        tasks.read_data(config, run_spec(config), ())


@pytest.mark.processes
@pytest.mark.parametrize("broken", ["Broken", pytest.param("Endless", marks=pytest.mark.slow)])
def test_a_metric_that_can_score_no_task_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A metric of the user's says it in the same way, and so does one that fails or never ends."""
    byte_level_tokenizer(300).save_pretrained(tmp_path / "model")
    row = {"prompt": [{"role": "user", "content": "capital?"}], "goal": "g", "user": "replay"}
    row |= {"metadata": {"replay": ["so"]}}
    rows, metrics = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    metrics.write_text(
        "from megatron_collab.reward.metrics import Metric\n"
        "class Mine(Metric):\n"
        "    @classmethod\n"
        "    def unscorable(cls, options, tasks):\n"
        "        return {n: 'bring a map' for n, task in enumerate(tasks) if task.goal == 'g'}\n"
        "class Broken(Metric):\n"
        "    @classmethod\n"
        "    def unscorable(cls, options, tasks):\n"
        "        raise SystemExit\n"
        "class Endless(Metric):\n"
        "    @classmethod\n"
        "    def unscorable(cls, options, tasks):\n"
        "        while tasks: pass\n"
    )
    config = Config()
    config.run.dir, config.model.path, config.train.stage = f"{tmp_path}/run", f"{tmp_path}/model", "rl"
    config.data.train = str(rows)

    def lines(weights: dict[str, float], *answers: str) -> list[str]:
        write_jsonl(rows, [{**row, "answer": answer} for answer in answers])
        config.reward.weights = weights
        _, (train,) = tasks.read_data(config, run_spec(config), ())
        return train.lines()

    unread = rf"{rows} row 1: math-verify cannot read the answer 'Paris'; set the metric's judge=true"
    with pytest.raises(ConfigError) as refused:
        lines({"accuracy": 1.0}, *["Paris"] * 5)
    message = f"reward.weights.accuracy=1: gives no task of data.train={rows} a score (5 tried)"
    assert str(refused.value) == f"{message}; data.train={unread}, or give other tasks or another metric"
    assert lines({"accuracy": 1.0}, "Paris", "7")[1:] == [
        f"data.train={rows}: reward.weights.accuracy: gives 1 of 2 tasks tried no score; data.train={unread}"
    ]
    assert len(lines({"accuracy": 1.0}, "7", "8")) == 1
    assert len(lines({"accuracy": 0.0, "asks": 1.0}, "Paris", "Paris")) == 2, "shown only"
    config.data.eval, config.data.train = config.data.train, [str(rows)]
    with pytest.raises(ConfigError, match=r"accuracy=0: gives no task of data\.eval="):
        lines({"accuracy": 0.0, "asks": 1.0}, "Paris", "Paris")
    config.data.eval = None
    with pytest.raises(ConfigError, match=r"mine.py:Mine=1: .* row 1: bring a map, or give other tasks"):
        lines({f"{metrics}:Mine": 1.0}, "7", "8")
    monkeypatch.setattr("megatron_collab.data.survey.TRIAL_SECONDS", 60.0 if broken == "Broken" else 5.0)
    fault = r"fails \(SystemExit:\)" if broken == "Broken" else "does not finish within 5 s"
    trial = rf"unscorable\(\) of {broken}, which tries 2 tasks before the start, {fault}; mend it, or leave it out"
    with pytest.raises(ValueError, match=rf"reward\.weights\..*mine\.py:{broken}: {trial}$"):
        lines({f"{metrics}:{broken}": 1.0}, "7", "8")


FAULTS = {  # code, limit in seconds, message
    "Endless": ("while True: pass", 5.0, "does not finish within 5 s"),
    "Large": ("bytes(1 << 35)", 60.0, "takes more than 4 GiB of memory"),
    "Crash": ("os._exit(7)", 60.0, "ends the process with code 7"),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "fault"),
    [("metric", "Large"), ("metric", "Crash"), pytest.param("metric", "Endless", marks=pytest.mark.slow)]
    + [(part, fault) for part in ("selective", "user", "tool") for fault in ("Large", "Crash")],
)
def test_code_of_the_users_own_has_limits_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, fault: str
) -> None:
    """A call that never ends, eats the memory or ends the process is refused with row, setting and class."""
    byte_level_tokenizer(300).save_pretrained(tmp_path / "model")
    row = {"prompt": [{"role": "user", "content": "hi"}], "user": "replay", "metadata": {"replay": ["so"]}}
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "goal": goal} for goal in "aba"])
    code, seconds, reason = FAULTS[fault]
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import os\n"
        "from megatron_collab.reward.metrics import Metric\n"
        "from megatron_collab.rollout.tools import Tool\n"
        "from megatron_collab.rollout.users import User\n"
        "def read(task):\n"
        f"    if task.goal == 'b':\n        {code}\n"
        "class Mine(Metric):\n"
        "    @classmethod\n"
        "    def check_task(cls, options, task): read(task)\n"
        "class Selective(Metric):\n"
        "    @classmethod\n"
        "    def lacks(cls, options, task): return read(task)\n"
        "class Talker(User):\n"
        "    @classmethod\n"
        "    def check_task(cls, task, argument, settings): read(task)\n"
        "class Kit(Tool):\n"
        "    SCHEMA = {'name': 'look', 'parameters': {'type': 'object', 'properties': {}}}\n"
        "    def check_task(self, task): read(task)\n"
    )
    config = Config()
    config.run.dir, config.model.path, config.train.stage = f"{tmp_path}/run", f"{tmp_path}/model", "rl"
    config.data.train, config.reward.weights = str(tmp_path / "rows.jsonl"), {"asks": 1.0}
    call = {
        "metric": f"reward.weights.{mine}:Mine: check_task() of Mine",
        "selective": "reward.weights.short: lacks() of Selective",
        "user": f"user {mine}:Talker: check_task() of Talker",
        "tool": "tool Kit: check_task() of Kit",
    }[part]
    if part == "metric":
        config.reward.weights |= {f"{mine}:Mine": 1.0}
    elif part == "selective":
        config.reward.metrics, config.reward.weights = {"short": {"metric": f"{mine}:Selective"}}, {"short": 1.0}
    elif part == "user":
        config.user.name = f"{mine}:Talker"
    else:
        config.rollout.tools = [f"{mine}:Kit"]
    monkeypatch.setattr("megatron_collab.data.survey.TRIAL_SECONDS", seconds)
    with pytest.raises(ValueError, match=f"^data.train={tmp_path}/rows.jsonl row 2: ") as refused:
        tasks.read_data(config, run_spec(config), ())
    assert str(refused.value).endswith(f" row 2: {call} {reason}; mend it, or leave it out")


@pytest.mark.parametrize(
    ("prompts", "method", "is_checked"),
    [
        (["hi", "ho"], "", False),
        (["hi", []], "", True),
        (["hi"], "async def start(self, conversation): pass", True),
        (["hi"], "async def finish(self, conversation): return 1.0", True),
    ],
)
def test_users_of_single_turns_are_checked_if_they_open_start_or_finish(
    tmp_path: Path, prompts: list, method: str, is_checked: bool
) -> None:
    byte_level_tokenizer(300).save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "goal": "g", "answer": "1"} for prompt in prompts])
    (tmp_path / "my.py").write_text(
        "from megatron_collab.rollout.users import User\n"
        "class Mine(User):\n"
        "    opens = True\n"
        "    unavailable = classmethod(lambda cls, argument, settings: 'not today')\n"
        "    async def reply(self, conversation): pass\n"
        f"    {method}\n"
    )
    config = Config()
    config.run.dir, config.model.path, config.train.stage = f"{tmp_path}/run", f"{tmp_path}/model", "rl"
    config.data.train, config.reward.weights = f"{tmp_path}/rows.jsonl", {"accuracy": 1.0}
    config.rollout.max_assistant_turns, config.user.name = 1, f"{tmp_path}/my.py:Mine"
    with pytest.raises(ConfigError, match="not today") if is_checked else nullcontext():
        tasks.read_data(config, run_spec(config), ())
