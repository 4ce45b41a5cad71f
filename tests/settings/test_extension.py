"""What settings may name from outside of the package; the package that is named is tests/outside."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_collab import environments
from megatron_collab.algo.advantages import make_advantage, with_advantages
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.algo.turn_credit import Episode, Share, make_turn_credit
from megatron_collab.config import Config
from megatron_collab.data.examples import RowFormat, load_tasks
from megatron_collab.launch.validate import check_settings
from megatron_collab.reward import metrics
from megatron_collab.reward.metrics import Metric
from megatron_collab.reward.multiturn import RewardFunction, reward_function
from megatron_collab.runtime.process import RunStopped
from megatron_collab.settings import (
    AlgoConfig,
    ConfigError,
    RolloutConfig,
    TrainingRewardConfig,
    make_absolute,
    resolve,
)
from megatron_collab.settings.extension import load_module, modules, named_files
from megatron_collab.trainer.losses import policy_loss
from megatron_collab.types import Conversation, Credit, Future, Message, Missing, Sample, ScoredBatch, Task
from tests.reward.fakes import about, play, score
from tests.rollout.fakes import FakePolicy, toolbox_of
from tests.rollout.users.helpers import check_user, dialogue, make_users, task

OUTSIDE = Path(__file__).resolve().parents[1] / "outside"


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package can be imported."""
    monkeypatch.syspath_prepend(OUTSIDE)


def refused(spec: str, base: type = Metric) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(spec, "reward.metrics.mine.metric", base)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"reward.metrics.mine.metric={spec}: ")


def test_what_cannot_be_resolved_is_refused_in_one_line(tmp_path: Path) -> None:
    assert refused("no_such_package.metrics:Polite") == (
        "no module no_such_package; install its package, or give ./FILE.py:NAME"
    )
    assert refused("collab_extras.metric:Polite").startswith("no module collab_extras.metric; ")
    assert refused("collab_extras:Polit") == "collab_extras has no Polit; the nearest is Polite"
    assert refused("collab_extras:Dice") == "must be a subclass of megatron_collab.reward.metrics.Metric"
    assert refused("collab_extras:reward_of_one") == "must be a subclass of megatron_collab.reward.metrics.Metric"
    assert refused("collab_extras:Polite", RewardFunction) == (
        "must be a subclass of megatron_collab.reward.multiturn.RewardFunction or a function"
    )
    assert refused("./nowhere.py:Polite") == "no such file"
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_library\n")
    assert refused(f"{broken}:Polite") == (
        f"importing {broken} failed: ModuleNotFoundError: No module named 'no_such_library'"
    )
    broken.write_text("class Polite(\n")
    assert "failed: SyntaxError" in refused(f"{broken}:Polite")


def test_a_library_that_a_module_lacks_is_not_taken_for_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        refused("lacking:Polite") == "importing lacking failed: ModuleNotFoundError: No module named 'no_such_library'"
    )


def test_a_metric() -> None:
    conversation = play(about("5"), "when, please?", "at 5", "thanks, please")
    assert score("collab_extras:Polite", about("5"), conversation) == 2.0
    assert score("mine", about("5"), conversation, metric="collab_extras:Polite", word="thanks") == 1.0
    for options, reason in [
        ({"wort": "x"}, "reward.metrics.mine.wort: no such setting; the nearest is word; there are word, most"),
        ({"most": "many"}, "reward.metrics.mine.most=many: Value 'many' of type 'str' could not be converted"),
        ({"most": 0}, "reward.metrics.mine.most=0: must be at least 1"),
    ]:
        with pytest.raises(ConfigError) as error:
            metrics.ScoredMetric("mine", {"metric": "collab_extras:Polite", **options})
        assert str(error.value).startswith(reason)


def test_a_user() -> None:
    spec = "collab_extras:TerseUser"
    assert check_user(spec, Config()) is None
    for options, name, words in [({}, spec, "no"), ({"word": "yes"}, f"{spec}/!", "yes!")]:
        user = make_users(options=options).make(task(name), "s")
        reply = asyncio.run(user.reply(dialogue("hi", "hello")))
        assert (reply.message, reply.reward) == (Message("user", words), 0.25)
    config = Config()
    config.user.options = {"word": "maybe"}
    assert check_user(spec, config) == "user.options.word=maybe: choose one of no, yes"
    assert check_user("llm/openai/x", config) is None, "options are for users that have some"
    assert str(check_user("collab_extras:Terse", Config())).startswith("user=collab_extras:Terse: collab_extras has no")


def test_a_script_of_a_user(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def reply(goal, messages):\n    return f'{goal} {len(messages)}'\n")
    user = make_users().make(task(f"scripted/{script}:reply"), "s")
    assert asyncio.run(user.reply(dialogue("hi", "hello"))).message.content == "the goal 2"


def test_a_tool() -> None:
    async def throw(**options: object) -> tuple[Sequence[Message], float]:
        config = RolloutConfig(tools=["collab_extras:Dice", "calculator"], tool_options=options)
        box = toolbox_of(config, FakePolicy(lambda prompt, seed: ""))
        async with box.open(Task("t", (), "g", "", "")) as session:
            return await session.answer("call dice {}")

    assert asyncio.run(throw()) == ([Message("tool", "6 of 6")], 0.5)
    assert asyncio.run(throw(dice={"sides": 20})) == ([Message("tool", "20 of 20")], 0.5)
    with pytest.raises(ConfigError, match=r"^rollout.tool_options.dice.sides=1: must be at least 2"):
        asyncio.run(throw(dice={"sides": 1}))
    with pytest.raises(ConfigError, match=r"^rollout.tool_options.dise: not in rollout.tools; the nearest is dice"):
        asyncio.run(throw(dise={"sides": 6}))
    with pytest.raises(ConfigError, match="two tools have the same name"):
        toolbox_of(RolloutConfig(tools=["collab_extras:Dice"] * 2), FakePolicy(lambda prompt, seed: ""))


def test_a_world(tmp_path: Path) -> None:
    config = Config()
    config.data.world, config.data.dir = "collab_extras:Greetings", str(tmp_path / "world")
    config.data.world_options = {"tasks": 2}
    environments.prepare(config.data, config.run.seed)
    assert (tmp_path / "world" / "greetings.txt").read_text() == "hello 0\nhello 1\n"
    assert environments.result_names(config.data) == {"politeness": "polite"}
    config.data.world_options = {"tasks": 3}
    with pytest.raises(ValueError, match=r"choose another data\.dir"):
        environments.prepare(config.data, config.run.seed)
    config.data.world = "boking"
    with pytest.raises(ConfigError, match=r"data.world=boking: no such name; known are .*; the nearest is booking"):
        environments.prepare(config.data, config.run.seed)


def test_a_reader_of_tasks(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("hello\nhi\n")
    reader = RowFormat("collab_extras:Lines", {"user": "replay"})
    tasks = load_tasks(file, "data.eval", reader)
    assert [(loaded.messages[0].content, loaded.user) for loaded in tasks] == [("hello", "replay"), ("hi", "replay")]
    with pytest.raises(ValueError, match=r"data.eval=.* task 1: the prompt ends with a message of the assistant"):
        list(load_tasks(file, "data.eval", RowFormat("collab_extras:replies_only")))
    with pytest.raises(ConfigError, match=r"data.format_options: .* is a function, which takes no options"):
        load_tasks(file, "data.eval", RowFormat("collab_extras:replies_only", {"x": 1}))


def test_a_reward_function() -> None:
    futures = [
        Future(Conversation((Message("user", "hi"),) * length, ()), {"polite": value})
        for length, value in [(2, 1.0), (4, 3.0), (3, Missing("no score"))]
    ]
    weights = {"polite": 1.0}
    assert reward_function("collab_extras:Best", {}, weights, {})(futures).value == 3.0
    options = {"bonus": 0.5}
    assert reward_function("collab_extras:Best", options, weights, {})(futures).value == 5.0
    assert reward_function("collab_extras:reward_of_one", {}, {}, {})(futures).value == 1.0
    assert reward_function("mr", {}, weights, {})(futures).value == 2.0
    with pytest.raises(ConfigError, match=r"reward.mode_options.bonus=-1.0: must be at least 0"):
        reward_function("collab_extras:Best", {"bonus": -1}, {}, {})


def test_a_loss() -> None:
    numbers = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    algo = AlgoConfig(loss="collab_extras:Reinforce", loss_options={"scale": 0.5})
    terms = policy_loss(algo)(numbers, numbers, numbers, torch.zeros(2, dtype=torch.int64), 1)
    assert terms.loss.tolist() == [-0.5, -2.0] and terms.clipped.tolist() == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"^algo.loss_options.scale=0.0: must be above 0"):
        policy_loss(AlgoConfig(loss="collab_extras:Reinforce", loss_options={"scale": 0}))
    assert resolve("collab_extras:WholeSequences", "algo.loss", PolicyLoss).whole_sequences


def test_an_advantage_and_a_turn_credit() -> None:
    mask = np.array([0, 1, 1], np.float32)
    credits = [Credit(((1, 3),), value, "g", "g") for value in (1.0, 3.0)]
    samples = tuple(Sample(np.arange(3), mask, mask, (credit,)) for credit in credits)
    algo = AlgoConfig(advantage="collab_extras:Halved", advantage_options={"share": 0.25})
    advantages = with_advantages(ScoredBatch(samples), algo).advantages
    assert advantages is not None and [row.tolist() for row in advantages] == [[0, -0.25, -0.25], [0, 0.25, 0.25]]
    for options, message in [
        ({"share": 0.0}, "algo.advantage_options.share=0.0: must be above 0 and at most 10000000"),
        ({"shares": 1.0}, "algo.advantage_options.shares: no such setting; the nearest is share; there are share"),
    ]:
        with pytest.raises(ConfigError) as error:
            make_advantage(AlgoConfig(advantage="collab_extras:Halved", advantage_options=options))
        assert str(error.value) == message
    with pytest.raises(RunStopped, match=r"^algo.advantage=collab_extras:Short: must give a number for each trained"):
        with_advantages(ScoredBatch(samples), AlgoConfig(advantage="collab_extras:Short"))
    rule = make_turn_credit(TrainingRewardConfig(turn_credit="collab_extras:First"))
    assert rule.shares([Episode(task("testing"), Conversation((), ()), (1.0, 2.0))]) == [[Share(3.0, {0: 1.0})]]


def configured(**settings: object) -> Config:
    config = Config()
    config.data.train, config.reward.weights = "t.jsonl", {"collab_extras:Polite": 1.0}
    for name, value in settings.items():
        group, _, option = name.partition("__")
        setattr(getattr(config, group), option, value)
    return config


def test_settings_from_outside_are_checked_before_a_run() -> None:
    everything = configured(
        reward__mode="collab_extras:Best",
        algo__loss="collab_extras:Reinforce",
        algo__loss_options={"scale": 2.0},
        algo__advantage="collab_extras:Halved",
        reward__turn_credit="collab_extras:First",
        rollout__tools=["collab_extras:Dice"],
        data__format="collab_extras:Lines",
        data__world="collab_extras:Greetings",
    )
    check_settings(everything)
    for config, reason in [
        (configured(reward__mode="collab_extras:Bets"), "reward.mode=collab_extras:Bets: collab_extras has no Bets"),
        (configured(reward__mode_options={"x": 1}), "reward.mode_options: reward.mode=mr has no options; remove them"),
        (
            configured(algo__advantage="collab_extras:Best"),
            "algo.advantage=collab_extras:Best: must be a subclass of megatron_collab.algo.advantages.Advantage",
        ),
        (
            configured(reward__turn_credit="collab_extras:Firs"),
            "reward.turn_credit=collab_extras:Firs: collab_extras has no Firs; the nearest is First",
        ),
        (
            configured(reward__turn_credit="collab_extras:Unruly"),
            "reward.turn_credit=collab_extras:Unruly: the class has no shares; define what is missing",
        ),
        (configured(algo__loss="ppo2"), "algo.loss=ppo2: choose one of ppo, gspo, cispo, package.module:Class"),
        (configured(rollout__tools=["dise"]), "rollout.tools=dise: no such name; known are calculator, or package"),
        (configured(data__format="csv"), "data.format=csv: choose one of auto, task, preference, messages"),
        (
            configured(data__format="collab_extras:Lines", train__stage="sft"),
            "data.format=collab_extras:Lines: custom readers give tasks, and train.stage=sft reads conversations",
        ),
        (
            configured(algo__loss="collab_extras:WholeSequences", launch__nproc_per_node=2, parallel__cp=2),
            "algo.loss=collab_extras:WholeSequences: needs whole sequences on a rank, and parallel.cp=2 cuts them",
        ),
    ]:
        with pytest.raises(ConfigError) as error:
            check_settings(config)
        assert str(error.value).startswith(reason)


def test_files_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configured(
        reward__metrics={"mine": {"metric": "./my.py:Length", "prompt": "see my.py: it is long"}},
        rollout__tools=["tools/my.py:Dice", "calculator", "collab_extras:Dice"],
        user__name="scripted/my.py:reply",
        algo__loss="../my.py:Loss/x",
    )
    config.reward.weights = {"./my.py:Length": 1.0}
    absolute = make_absolute(config)
    assert absolute.reward.metrics["mine"] == {"metric": f"{tmp_path}/my.py:Length", "prompt": "see my.py: it is long"}
    assert absolute.reward.weights == {f"{tmp_path}/my.py:Length": 1.0}
    assert absolute.rollout.tools == [f"{tmp_path}/tools/my.py:Dice", "calculator", "collab_extras:Dice"]
    assert absolute.user.name == f"scripted/{tmp_path}/my.py:reply"
    assert absolute.algo.loss == f"{tmp_path.parent}/my.py:Loss/x"


def test_a_file_is_loaded_once(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text("from megatron_collab.reward.metrics import Metric\nclass Length(Metric):\n    pass\n")
    assert resolve(f"{file}:Length", "x", Metric) is resolve(f"{file}:Length", "x", Metric)


def test_a_file_that_was_changed_within_a_second_is_read_anew(tmp_path: Path) -> None:
    """Python stores bytecode by the second and the length of the source."""
    path = tmp_path / "value.py"
    for value in "12":
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (1e9, 1e9))
        module = load_module(str(path), "here")
        assert str(module.VALUE) == value
        del sys.modules[module.__name__]


def test_class_paths_are_found_at_any_depth_of_the_settings(tmp_path: Path) -> None:
    (file := tmp_path / "h.py").write_text("")
    settings = {"data": {"eval": [{"source": "goals.jsonl", "user": f"{file}:U"}, {"more": [{"user": "my.users:V"}]}]}}
    assert list(modules(settings)) == [
        (f"data.eval.user={file}:U", str(file)),
        ("data.eval.more.user=my.users:V", "my.users"),
    ]
    assert list(named_files(settings)) == [(f"data.eval.user={file}:U", file)]
