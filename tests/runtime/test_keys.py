"""Service keys leave the environment before any process starts; processes that need them open a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_collab.config import Config
from megatron_collab.inference import server
from megatron_collab.runtime import keys
from tests.helpers import policy_servers

KEY, OTHER = "correct-horse-battery", "staple-0123456789"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets test keys and restores all variables afterwards, also after `put_away`."""
    for name in [*os.environ]:
        if name == keys.FILE or keys.is_key(name, os.environ[name]):
            monkeypatch.delenv(name)
    monkeypatch.setenv(keys.FILE, "")  # noted, to be removed afterwards
    monkeypatch.delenv(keys.FILE)
    for name, value in {"OPENAI_API_KEY": KEY, "WANDB_API_KEY": OTHER, "RAY_AUTH_TOKEN": "f" * 64}.items():
        monkeypatch.setenv(name, value)


def in_environment() -> set[str]:
    return {name for name, value in os.environ.items() if keys.is_key(name, value)}


def test_stored_keys_are_available_by_name_and_can_be_restored() -> None:
    keys.put_away()
    assert in_environment() == {"RAY_AUTH_TOKEN"}
    assert os.stat(os.environ[keys.FILE]).st_mode & 0o777 == 0o400
    with keys.in_environment("WANDB_API_KEY"):
        assert in_environment() == {"RAY_AUTH_TOKEN", "WANDB_API_KEY"}
    with pytest.raises(ZeroDivisionError), keys.in_environment():
        assert os.environ["OPENAI_API_KEY"] == KEY
        raise ZeroDivisionError
    assert in_environment() == {"RAY_AUTH_TOKEN"}
    assert keys.known() == {KEY, OTHER, "f" * 64}
    keys.take()
    assert (os.environ["OPENAI_API_KEY"], os.environ["WANDB_API_KEY"]) == (KEY, OTHER)


def test_a_key_stays_until_the_last_block_ends() -> None:
    """Threads have blocks that overlap, e.g. those of writers and of an evaluation."""
    keys.put_away()
    first, second = keys.in_environment("WANDB_API_KEY"), keys.in_environment()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["WANDB_API_KEY"] == OTHER
    second.__exit__(None, None, None)
    assert in_environment() == {"RAY_AUTH_TOKEN"}


class Emptied(UserDict[str, str]):
    """Another thread removes the variables while they are read."""

    def __iter__(self) -> Iterator[str]:
        names = list(self.data)
        self.data.clear()
        return iter(names)


def test_the_environment_may_change_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HOME": "/", "OPENAI_API_KEY": KEY}
    assert keys.without(Emptied(variables)) == {}
    monkeypatch.setattr(os, "environ", Emptied(variables))
    assert keys.known() == frozenset()


def test_a_variable_that_is_set_wins_over_a_stored_key_and_stays() -> None:
    keys.put_away()
    os.environ["OPENAI_API_KEY"] = "another-0123456789"
    with keys.in_environment():
        assert os.environ["OPENAI_API_KEY"] == "another-0123456789"
    assert os.environ["OPENAI_API_KEY"] == "another-0123456789"


def test_later_keys_are_added_to_the_stored_ones() -> None:
    keys.put_away()
    os.environ["GATEWAY_KEY"] = "another-0123456789"
    keys.put_away()
    keys.put_away()
    assert keys.known() == {KEY, OTHER, "another-0123456789", "f" * 64}
    with keys.in_environment():
        assert in_environment() == {"RAY_AUTH_TOKEN", "GATEWAY_KEY", "OPENAI_API_KEY", "WANDB_API_KEY"}


def test_a_server_gets_its_own_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", OTHER)
    monkeypatch.setenv("NCCL_IB_PKEY", "0x7fff7fff")  # what a name that ends like a key's may say
    own_environment = server._environment(policy_servers(Config()), "its own", 0)
    assert own_environment[server.KEY_VARIABLE] == "its own" and own_environment["NCCL_IB_PKEY"] == "0x7fff7fff"
    assert {name for name, value in own_environment.items() if keys.is_key(name, value)} == set()
    keys.put_away()
    assert keys.FILE not in server._environment(policy_servers(Config()), "its own", 0)


RANK = """
import json, os, sys
from pathlib import Path
from megatron_collab.runtime import console, keys

console.begin()
begun, agents = (Path(f"/proc/{pid}/environ").read_text() for pid in ("self", os.getppid()))
with keys.in_environment():
    key = os.environ.get("OPENAI_API_KEY")
seen = {"begun": begun, "agents": agents, "key": key, "after": os.environ.get("OPENAI_API_KEY")}
(Path(sys.argv[1]) / os.environ["RANK"]).write_text(json.dumps(seen))
raise ValueError(key)
"""


@pytest.mark.processes
@pytest.mark.parametrize("by_hand", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_rank_inherits_no_key_can_read_it_and_never_prints_it(tmp_path: Path, by_hand: bool) -> None:
    """Neither does the agent if `train` becomes it; an agent that was started by hand has the key from its shell."""
    (tmp_path / "rank.py").write_text(RANK)
    agent = [sys.executable, "-m", "megatron_collab.launch.torchrun", "--nproc-per-node=2", str(tmp_path / "rank.py")]
    become = (
        "from megatron_collab.runtime import keys; import os, sys; keys.put_away(); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [*agent, str(tmp_path)] if by_hand else [sys.executable, "-c", become, *agent, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: ***" in done.stderr and KEY not in done.stderr
    for rank in range(2):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert KEY not in seen["begun"] and keys.FILE in seen["begun"]
        assert (KEY in seen["agents"]) is by_hand
        assert (seen["key"], seen["after"]) == (KEY, None)


@pytest.mark.slow
@pytest.mark.processes
def test_workers_take_the_keys_and_rays_own_processes_have_none(tmp_path: Path) -> None:
    script = """
        import os
        import sys
        from contextlib import suppress
        from pathlib import Path

        import psutil
        import ray

        from megatron_collab.config import Config
        from megatron_collab.settings import RewardConfig
        from megatron_collab.launch.play_specs import reward_spec
        from megatron_collab.llm import limiter
        from megatron_collab.reward.workers import RewardWorker
        from megatron_collab.runtime import keys, ray_cluster

        class Worker(RewardWorker):
            def has(self):
                return os.environ.get("OPENAI_API_KEY")

        keys.put_away()
        config, folder = Config(reward=RewardConfig(workers=1)), Path(sys.argv[1])
        with ray_cluster.ray_session(2):
            bound = limiter.start_limiter(config.llm, folder / "spend.json")
            worker = ray_cluster.start_actor(Worker, reward_spec(config.reward), config.llm, folder, "reward-0")
            ray.get(bound.spend.remote())
            print(ray.get(worker.has.remote()))
            for process in psutil.Process().children(recursive=True):
                with suppress(OSError, psutil.NoSuchProcess):  # it has just ended
                    environment = Path(f"/proc/{process.pid}/environ").read_text()
                    print(process.name(), "has" if sys.argv[2] in environment else "lacks")
        """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), KEY]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    worker, *processes = done.stdout.splitlines()
    assert worker == KEY
    names = {line.split()[0] for line in processes}
    assert {"gcs_server", "raylet"} <= names and any(name.startswith("ray::") for name in names), names
    assert [line for line in processes if line.endswith("has")] == []
