"""Fixtures and hooks of the whole session, such as SGLang servers, which take 15 seconds each to start."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from megatron_collab.config import Config
from megatron_collab.inference import ROW_BY_ROW
from megatron_collab.inference.server import SGLangServer
from megatron_collab.runtime import console, files, gpu_environment, process
from tests import gpus, processes
from tests.fork_server import end_fork_servers
from tests.helpers import free_port, make_model, policy_servers
from tests.patched import PatchOnImport
from tests.program import Supervised, train_supervised
from tests.ranks import init_parallel
from tools.bench.simulated.clock import VirtualLoop

# Ray reads the token once per process, and tests that set the environment remove variables that are new to it.
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault(*ROW_BY_ROW)  # as servers on a CPU have it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
gpu_environment.enter()
console.begin()
sys.meta_path.insert(0, PatchOnImport("transformers", "megatron", "litellm"))
settings.register_profile("busy", deadline=None)  # no time limit per example: the machine may be busy
settings.load_profile("busy")


# Test files with such a path or text share what takes many seconds: servers, a fork server, an import, a run.
SHARING = {
    "servers": r"servers: dict\[str, Served\]",
    "engine": r"run_ranks\(.*engine=True",
    "user_logs": r"megatron_collab\.user_logs",
    "supervised": r"supervised: Supervised|\Atests/talk/",
}

DATASETS = Path(__file__).resolve().parents[2] / "shared" / "data"  # absent beside a clone


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", type=Path, help="where to write results, seconds and figures of the tests")
    parser.addoption("--part", default="1/1", help="K/N: every N-th of the selected tests or files, from the K-th on")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--gpu-report"):
        config.pluginmanager.register(gpus.Report(path))


class BySharing(LoadFileScheduling):
    """Schedules tests by files; files that share something run on one worker, which starts it once."""

    def _split_scope(self, nodeid: str) -> str:
        return sharing(super()._split_scope(nodeid))


@cache
def sharing(file: str) -> str:
    """What the tests of the file share with other files, or the file."""
    text = f"{file}\n{(Path(__file__).parent.parent / file).read_text()}"
    return next((name for name, shared in SHARING.items() if re.search(shared, text)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    return BySharing(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Test files import slow libraries; afterwards the garbage collector ignores the imported objects."""
    process.imports_begin()
    try:
        return (yield)
    finally:
        process.imports_done()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` if this machine lacks what it needs."""
    libraries = {name: item.get_closest_marker(name) is not None for name in ("engine", "server")}
    for mark in item.iter_markers("gpu"):
        if lacking := gpus.lacking(*mark.args, **mark.kwargs, **libraries):
            pytest.skip(lacking)


@pytest.fixture(scope="session", autouse=True)
def no_process_survives() -> Iterator[None]:
    """Fails the last test of the session if a process that any test started is still alive; names both."""
    processes.mark()
    yield
    end_fork_servers()
    if accuracy := sys.modules.get("megatron_collab.reward.metrics.accuracy"):
        accuracy._CHECKER.close()
    alive = processes.alive(processes.END_SECONDS).items()
    assert not alive, "\n".join(f"{test} left {process.pid}: {process.cmdline()}" for process, test in alive)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """End the processes of a failed test; fixtures end their own."""
    report = yield
    if report.failed and call.when == "call":
        processes.end(f"{item.nodeid} (call)")
    return report


def pytest_sessionfinish() -> None:
    """Remove the files of processes that tests have killed."""
    files.remove_abandoned()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Long files run first if there are workers, so that none starts the longest one last; one --part of all runs.

    Tests of a file that share its fixtures are in the same part: a fixture of a module may start servers for them all.
    """
    for item in items:
        if "dataset" in getattr(item, "fixturenames", ()):
            item.add_marker("dataset")
    yield
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: {"e2e", "tools", "test_signals.py"}.isdisjoint(item.path.parts))
    number, parts = map(int, config.getoption("--part").split("/"))
    chosen = part(items, number, parts)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def part(items: list[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """Every `parts`-th test from number `number` on, counted from 1; tests that share fixtures count as one."""
    units = [item.path if shares_fixtures(item) else item for item in items]
    chosen = set(list(dict.fromkeys(units))[number - 1 :: parts])
    return [item for item, unit in zip(items, units, strict=True) if unit in chosen]


def shares_fixtures(item: pytest.Item) -> bool:
    """Whether the test takes a fixture that its file makes once for all its tests."""
    fixtures = [definition for definitions in item._fixtureinfo.name2fixturedefs.values() for definition in definitions]
    return any(entry.scope == "module" and entry.func.__module__ == item.module.__name__ for entry in fixtures)


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio.run has a clock that jumps over pauses, so that no deadline depends on how busy the machine is."""
    monkeypatch.setattr("asyncio.events.new_event_loop", VirtualLoop)


@pytest.fixture(scope="session")
def dataset() -> Callable[[str], Path]:
    """Find a published data set (file or folder) by its name beside the checkout; skip the test if it is missing."""
    return find_dataset


def find_dataset(name: str) -> Path:
    path = DATASETS / name
    if not path.exists():
        pytest.skip(f"{path}: not on this machine")
    return path


@dataclass(frozen=True)
class Served:
    """A server and the folder it was started from; tests that publish change its weights."""

    server: SGLangServer
    folder: Path


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device_type(request: pytest.FixtureRequest) -> str:
    """Run a test and its fixtures on a CPU and on a GPU."""
    return str(request.param)


def serving_config(folder: Path, device_type: str = "cpu") -> Config:
    config = Config()
    config.launch.device, config.model.path, config.model.dtype = device_type, str(folder), "float32"
    config.rollout.server.max_total_tokens = 32768
    config.rollout.server.start_timeout = 400.0
    return config


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """Servers of two random Qwen3 models, untied and tied, that start at the same time."""
    folder = tmp_path_factory.mktemp("served")
    with ExitStack() as stack:
        running: dict[str, Served] = {}
        for name, tied in (("untied", False), ("tied", True)):
            config = serving_config(make_model(folder / name, tied=tied))
            server = stack.enter_context(SGLangServer(policy_servers(config), folder / f"{name}.log"))
            running[name] = Served(server, folder / name)
        for served in running.values():
            served.server.wait_healthy(400.0)
        yield running


@pytest.fixture(scope="session")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Supervised:
    """A supervised run of the booking world of 60 steps; its model ends its turns."""
    return train_supervised(tmp_path_factory.mktemp("booking"))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Config]:
    """The configuration of a single fp32 rank on CPU, inside its process group."""
    yield from _single_rank("cpu")


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[Config]:
    """Like `one_rank`, but on a GPU; for tests marked `gpu`."""
    yield from _single_rank("cuda")


def _single_rank(device: str) -> Iterator[Config]:

    config = Config()
    config.launch.device = device
    config.model.dtype = "float32"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        with init_parallel(config):
            yield config
