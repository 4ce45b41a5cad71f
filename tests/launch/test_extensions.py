"""Code that settings name is tried in a child process before the start, with limits on time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_collab.config import Config
from megatron_collab.launch import extensions
from megatron_collab.launch.extensions import check_extensions
from megatron_collab.settings import ConfigError

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

CODE = """
import asyncio, os, time
from dataclasses import dataclass
from megatron_collab.algo.advantages import Grpo
from megatron_collab.algo.policy_loss import PolicyLoss
from megatron_collab.algo.turn_credit import Equal
from megatron_collab.settings import ConfigError
from megatron_collab.data.examples import TaskReader
from megatron_collab.environments import World
from megatron_collab.reward.metrics import Metric
from megatron_collab.rollout.player import Player
from megatron_collab.rollout.users import User
from megatron_collab.rollout.tools import Tool

class Place(World):
    def __init__(self, options):
        {world}

class Reader(TaskReader):
    def __init__(self, options):
        {reader}

class Group(Player):
    @dataclass(frozen=True)
    class Options:
        size: int = 1
        def __post_init__(self):
            {player}
    def play(self, task, stream):
        pass

class Mine(Metric):
    def __init__(self, options, judge):
        super().__init__(options, judge)
        {metric}
    @classmethod
    def judged(cls, options):
        {judged}
        return False
    @classmethod
    def unavailable(cls, options):
        {unavailable}
    @classmethod
    def reads_tokens(cls, options):
        {tokens}
        return False
    @classmethod
    def scores_turns(cls, options):
        {turns}
        return False

class Person(User):
    @classmethod
    def unavailable(cls, argument, settings):
        {user}

class Other(User):
    @classmethod
    def unavailable(cls, argument, settings):
        {other}

class Helper(Tool):
    SCHEMA = {{"name": "helper", "parameters": {{"type": "object"}}}}
    def __init__(self, options):
        super().__init__(options)
        {tool}
    def check_copies(self):
        {copies}
    @property
    def schemas(self):
        {schemas}
        return [self.SCHEMA]

class Estimator(Grpo):
    def __init__(self, *args):
        {advantage}

class Credit(Equal):
    def __init__(self, *args):
        {credit}

class Loss(PolicyLoss):
    def __init__(self, options):
        {loss}
    def __call__(self, *args):
        return None

{imported}
"""
HANGS = "while True: pass"
PARTS = (
    "world",
    "reader",
    "player",
    "metric",
    "tokens",
    "turns",
    "judged",
    "unavailable",
    "user",
    "other",
    "tool",
    "copies",
    "schemas",
    "advantage",
    "credit",
    "loss",
    "imported",
)


def check(
    folder: Path, *, constructs: bool = True, stage: str = "rl", world_folder: str = "world", **parts: str
) -> str:
    """The reason why the code is refused; empty if it is not. `world_folder`: that of data.world."""
    file = folder / "my.py"
    file.write_text(CODE.format(**dict.fromkeys(PARTS, "pass") | parts))
    config = Config()
    config.train.stage, config.data.dir = stage, str(folder / world_folder)
    config.reward.weights = {f"{file}:Mine": 1.0}
    config.data.world, config.data.format = f"{file}:Place", f"{file}:Reader"
    config.rollout.player, config.rollout.player_options = f"{file}:Group", {"size": 2}
    config.user.name, config.rollout.tools = f"{file}:Person", [f"{file}:Helper"]
    config.data.eval = [{"source": "goals.jsonl", "user": f"{file}:Other"}]
    config.algo.advantage, config.algo.loss = f"{file}:Estimator", f"{file}:Loss"
    config.reward.turn_credit = f"{file}:Credit"
    try:
        check_extensions(config, constructs=constructs)
    except ConfigError as error:
        return str(error).replace(str(file), "my.py")
    return ""


def slow(*case: str) -> ParameterSet:
    """A case that waits for its limit: one of them is in `make test`, of the other parts those that end at once."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "code", "reason"),
    [
        ("imported", HANGS, "rollout.player=my.py:Group: importing my.py does not finish within 3 s"),
        slow("world", HANGS, "data.world=my.py:Place: making it does not finish within 3 s"),
        slow("player", "time.sleep(9999)", "rollout.player_options: reading them does not finish within 3 s"),
        slow("tokens", HANGS, "reward.weights.my.py:Mine: reads_tokens() of Mine does not finish within 3 s"),
        slow("judged", HANGS, "reward.weights.my.py:Mine: judged() of Mine does not finish within 3 s"),
        slow("unavailable", "time.sleep(9999)", "reward.weights.my.py:Mine: unavailable() of Mine does not finish"),
        slow("user", HANGS, "user my.py:Person: unavailable() of Person does not finish within 3 s"),
        slow("tool", HANGS, "rollout.tools: making them does not finish within 3 s"),
        slow("loss", HANGS, "algo.loss=my.py:Loss: making it does not finish within 3 s"),
        ("imported", "bytes(1 << 35)", "rollout.player=my.py:Group: importing my.py takes more than 4 GiB of memory"),
        ("imported", "os._exit(0)", "rollout.player=my.py:Group: importing my.py ends the process with code 0"),
        ("world", "bytes(1 << 35)", "data.world=my.py:Place: making it takes more than 4 GiB of memory"),
        ("reader", "os._exit(3)", "data.format=my.py:Reader: making it ends the process with code 3"),
        ("player", "{}['x']", "rollout.player_options: reading them fails (KeyError: 'x')"),
        ("metric", "os.abort()", "reward.weights.my.py:Mine: making Mine ends the process with code -6"),
        ("metric", "judge.x", "reward.weights.my.py:Mine: making Mine fails (AttributeError: 'NoneType' object has"),
        ("metric", "raise ConfigError('no')", "reward.weights.my.py:Mine: making Mine fails (ValueError: no)"),
        ("tokens", "os._exit(3)", "reward.weights.my.py:Mine: reads_tokens() of Mine ends the process with code 3"),
        ("turns", "1 / 0", "reward.weights.my.py:Mine: scores_turns() of Mine fails (ZeroDivisionError"),
        ("judged", "os.abort()", "reward.weights.my.py:Mine: judged() of Mine ends the process with code -6"),
        ("unavailable", "{}[1]", "reward.weights.my.py:Mine: unavailable() of Mine fails (KeyError: 1)"),
        ("user", "os._exit(4)", "user my.py:Person: unavailable() of Person ends the process with code 4"),
        ("other", "os._exit(2)", "user my.py:Other: unavailable() of Other ends the process with code 2"),
        ("tool", "os._exit(6)", "rollout.tools: making them ends the process with code 6"),
        ("copies", "os._exit(5)", "rollout.tools: check_copies() of Helper ends the process with code 5"),
        ("schemas", "return [{}]", "rollout.tools: schemas of Helper fails (KeyError: 'parameters')"),
        ("advantage", "os._exit(7)", "algo.advantage=my.py:Estimator: making it ends the process with code 7"),
        ("credit", "{}['x']", "reward.turn_credit=my.py:Credit: making it fails (KeyError: 'x')"),
        ("loss", "os._exit(8)", "algo.loss=my.py:Loss: making it ends the process with code 8"),
        ("player", "raise ConfigError('left to its caller')", ""),
        ("judged", "raise ConfigError('left to its caller')", ""),
        ("imported", "raise ValueError('left to its caller')", ""),
        ("imported", "pass", ""),
    ],
)
def test_code_that_never_ends_or_crashes_is_refused_by_its_setting(
    part: str, code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "SECONDS", 3.0 if code in (HANGS, "time.sleep(9999)") else 120.0)
    refused = check(tmp_path, **{part: code})
    assert refused.startswith(reason) and bool(refused) == bool(reason)


def test_settings_that_name_no_code_need_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "run_trial", lambda *_, **__: pytest.fail("forked for nothing"))
    config = Config()
    check_extensions(config, constructs=True)
    config.rollout.tools = ["tools.yaml"]
    with pytest.raises(pytest.fail.Exception):
        check_extensions(config, constructs=True)


@pytest.mark.processes
def test_only_what_the_program_makes_is_made(tmp_path: Path) -> None:
    for part in ("world", "reader", "metric"):
        assert "making" in check(tmp_path, **{part: "1 / 0"})
    fails = dict.fromkeys(("world", "reader", "metric"), "1 / 0")
    assert check(tmp_path, constructs=False, **fails) == ""
    assert check(tmp_path, metric="1 / 0", stage="sft") == ""
    (tmp_path / "made").mkdir()
    assert check(tmp_path, world="1 / 0") != "" == check(tmp_path, world="1 / 0", world_folder="made")


@pytest.mark.processes
def test_a_metric_is_made_as_in_a_worker(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In an event loop, with a judge if any metric is judged; stdout, which a script may read, gets nothing."""
    waits = "self.session = asyncio.get_running_loop().create_future()"
    prints = "print('loudly'); os.write(1, b'natively')"
    assert check(tmp_path, metric=f"{waits}; {prints}; assert judge is None") == ""
    assert check(tmp_path, metric="judge.client.answer, judge.endpoint.model", judged="return True") == ""
    printed, error = capfd.readouterr()
    assert printed == "" and "loudly" in error and "natively" in error


@pytest.mark.slow
@pytest.mark.processes
def test_a_file_of_tools_that_grows_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpolations double 40 times; what takes less is bounded in tests/settings/test_documents.py."""
    monkeypatch.setattr(extensions, "SECONDS", 3.0)
    doubled = "".join(f"a{n}: ['${{a{n - 1}}}', '${{a{n - 1}}}']\n" for n in range(1, 40))
    (tmp_path / "tools.yaml").write_text(f"a0: [x]\n{doubled}tools: ${{a39}}\n")
    config = Config()
    config.rollout.tools = [str(tmp_path / "tools.yaml")]
    with pytest.raises(ConfigError, match=r"^rollout.tools: making them (does not finish within 3 s|takes more)"):
        check_extensions(config, constructs=False)
