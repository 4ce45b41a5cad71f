"""The order of calls to servers, weight sync and workers, with servers on the trainer's devices and on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_collab.config import Config
from megatron_collab.inference.pool import ServerPool
from megatron_collab.inference.served import ModelServers
from megatron_collab.inference.server import ServerError
from megatron_collab.inference.spec import Placement, ServerSpec, Serves
from megatron_collab.launch import server_specs
from megatron_collab.launch.play_specs import play_spec
from megatron_collab.launch.trainer_specs import sync_spec
from megatron_collab.rollout.servers import Servers
from megatron_collab.runtime import screen
from megatron_collab.runtime.process import RunStopped
from megatron_collab.weight_sync.sync import PublishError, WeightSync
from tests.ranks import run_ranks
from tests.rollout.recorder import Recorded

RELEASE = [
    "/pause_generation abort",
    "/flush_cache",
    "/release_memory_occupation kv_cache",
    "/release_memory_occupation weights",
]


class Recording(WeightSync):
    """Publishes versions to the servers that are present; `failures` has the servers that fail, by attempt."""

    def __init__(self, config: Config, spec: ServerSpec, pool: ServerPool, events: list[str]) -> None:
        config.publish.transport = "disk"  # which needs no weights before the first publish
        super().__init__(sync_spec(config), spec, [], None, pool)  # type: ignore[arg-type]
        self.pool, self.events = pool, events
        self.failures: list[set[int]] = []

    def publish(self, version: int) -> None:
        present = self.pool.present()
        failing = self.failures.pop(0) if self.failures else set()
        self.events.append(f"publish {version} to {[server.index for server in present]}")
        for server in present:
            if server.index in failing:
                self.pool.lost(server, "the bucket did not arrive")
            else:
                server.resume("kv_cache")
                server.paused = False
        if failing.issuperset(server.index for server in present):
            raise PublishError("no server has the weights")
        self.version = version


class Stage:
    """Recording servers of rank 0 and a recording weight sync; `events` has their calls in order."""

    def __init__(self, folder: Path, replicas: int, colocated: bool, staleness: int) -> None:
        self.events: list[str] = []
        config = Config()
        config.launch.device = "cpu"
        config.rollout.server.colocated, config.rollout.max_staleness = colocated, staleness
        config.rollout.server.start_timeout = 20.0
        serving = server_specs.training(config)
        self.servers = [Recorded(serving.policy, folder, index, self.events) for index in range(replicas)]
        self.model_servers: list[Recorded] = []  # of models beside the policy
        self.of_run = Servers(play_spec(config), serving)
        self.pool = self.of_run.pool = ServerPool(self.servers, serving.policy, self.tell)
        self.weights = Recording(config, serving.policy, self.pool, self.events)

    def tell(self, servers: Sequence[int]) -> None:
        self.events.append(f"workers: ask {list(servers)}")

    def begin(self) -> None:
        self.pool.begin()
        self.events.clear()

    def phase(self, version: int, play: Callable[[], None] = lambda: None) -> list[str]:
        """Run one sampling phase; return its events."""
        self.events.clear()
        with self.of_run.awake():
            self.weights.sync(version)
            self.events.append("sampling")
            play()
        return self.of_phase()

    def of_phase(self) -> list[str]:
        return [event.removeprefix("server 0: ") if len(self.servers) == 1 else event for event in self.events]


@pytest.fixture
def stage(tmp_path: Path, alone: None) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(replicas: int = 1, colocated: bool = True, staleness: int = 0) -> Stage:
        stages.append(Stage(tmp_path, replicas, colocated, staleness))
        return stages[-1]

    yield make
    for run in stages:
        for server in [*run.servers, *run.model_servers]:
            server.stop()


def beside(run: Stage, tmp_path: Path, colocated: bool) -> Recorded:
    """Add the only server of a model named judge to `run`; it records."""
    policy = run.of_run.serving.policy
    placement = Placement(shared=1) if colocated else Placement(first=1)
    model = ModelServers(replace(policy, name="judge", serves=Serves.TEXT, placement=placement))
    server = Recorded(model.spec, tmp_path / "judge", 7, run.events)
    model.servers.append(server)
    run.model_servers.append(server)
    run.of_run.served = [model]
    model.pool.begin()
    run.events.clear()
    return server


def test_servers_that_start_are_counted(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen, "LOG_EVERY", 0.0)
    stage(replicas=2).begin()
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "starting SGLang: 1/2 servers (50 %)",
        "starting SGLang: 2/2 servers (100 %)",
    ]


def test_a_lost_model_server_is_noticed_in_a_phase_and_awaited(stage: Callable[..., Stage], tmp_path: Path) -> None:
    run = stage()
    run.begin()
    judge = beside(run, tmp_path, colocated=False)
    assert not run.of_run.lost_all()
    judge.die()
    assert run.of_run.lost_all() and not run.pool.lost_all()
    run.of_run.serve_loaded(3)
    assert not run.of_run.lost_all(), "also if nothing is trained"
    assert run.of_run.take_counters() == {
        "servers/lost": 0.0,
        "servers/back": 0.0,
        "servers/judge_lost": 1.0,
        "servers/judge_back": 1.0,
    }
    judge.starts = False
    judge.die()
    with pytest.raises(ServerError, match="SGLang server 7 of judge still fails after 3 restarts"):
        run.phase(0)


def test_a_colocated_model_server_has_its_memory_only_in_a_phase(stage: Callable[..., Stage], tmp_path: Path) -> None:
    """It resumes with its own weights, and no publish reaches it."""
    run = stage()
    run.begin()
    judge = beside(run, tmp_path, colocated=True)
    assert judge.released == {"kv_cache", "weights"}
    resumed = ["/resume_memory_occupation weights", "/resume_memory_occupation kv_cache", "/continue_generation"]
    for version in (0, 1):
        events = run.phase(version, lambda: run.events.append("played"))
        of_judge = [event.removeprefix("server 7: ") for event in events if "server 7" in event or event == "played"]
        assert of_judge == [*resumed, "played", *RELEASE]
        assert f"publish {version} to [0]" in events

    def stop() -> None:
        raise RunStopped("the budget is used up")

    with pytest.raises(RunStopped, match="budget"):
        run.phase(2, stop)
    assert judge.alive() and judge.released == {"kv_cache", "weights"}


def test_colocated_servers_have_their_memory_only_while_they_sample(stage: Callable[..., Stage]) -> None:
    run = stage()
    run.pool.begin()
    assert run.of_phase() == ["start 0", *RELEASE], "the trainer is built next"
    for version in (0, 1):
        assert run.phase(version) == [
            "/resume_memory_occupation weights",
            f"publish {version} to [0]",
            "/resume_memory_occupation kv_cache",
            "workers: ask [0]",
            "sampling",
            *RELEASE,
        ]
    assert run.servers[0].alive() and run.servers[0].generation == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_on_their_own_devices_keep_their_memory(stage: Callable[..., Stage], staleness: int) -> None:
    run = stage(colocated=False, staleness=staleness)
    run.begin()
    assert run.phase(3) == ["publish 3 to [0]", "workers: ask [0]", "sampling"]


def test_all_servers_have_their_memory_before_a_publish(stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2)
    run.begin()
    events = run.phase(0)
    at = events.index("publish 0 to [0, 1]")
    assert sorted(events[:at]) == [f"server {index}: /resume_memory_occupation weights" for index in (0, 1)]
    assert events[at + 1 : at + 3] == [f"server {index}: /resume_memory_occupation kv_cache" for index in (0, 1)]
    assert events[at + 3 :][:2] == ["workers: ask [0, 1]", "sampling"]


@pytest.mark.parametrize("stuck", [False, True])
def test_a_run_that_stops_gives_the_trainer_its_memory_to_save(stage: Callable[..., Stage], stuck: bool) -> None:
    run = stage()
    run.begin()

    def play() -> None:
        run.servers[0].busy = stuck
        raise RunStopped("the budget is used up")

    with pytest.raises(RunStopped, match="budget"):
        run.phase(0, play)
    events = run.of_phase()
    assert events[events.index("sampling") + 1 :] == (RELEASE[:2] if stuck else RELEASE)
    assert run.servers[0].alive() is not stuck, "started again, it would take the memory"


def test_servers_that_pause_abort_their_requests_before_they_release_their_memory(stage: Callable[..., Stage]) -> None:
    """One that has died is left out."""
    run = stage(replicas=2, staleness=1)
    run.begin()

    def play() -> None:
        run.servers[1].die()
        run.pool.pause()

    events = run.phase(0, play)
    assert "server 0: /pause_generation abort" in events[events.index("sampling") :]
    assert events.count("server 1: start 1") == 1


def test_a_run_that_stops_ends_servers_that_are_being_started(stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2)
    run.begin()

    def play() -> None:
        run.servers[1].die()
        assert not run.pool.lost_all()
        raise RunStopped("the budget is used up")

    with pytest.raises(RunStopped, match="budget"):
        run.phase(0, play)
    assert [server.alive() for server in run.servers] == [True, False]
    assert run.servers[0].released == {"kv_cache", "weights"}


def test_a_publish_that_fails_gives_the_trainer_its_memory_to_save(stage: Callable[..., Stage]) -> None:
    run = stage()
    run.begin()
    run.weights.failures = [{0}] * 9
    with pytest.raises(PublishError):
        run.phase(0)
    assert not run.servers[0].alive(), "it was lost, and is being started again"


def test_a_server_that_does_not_become_idle_is_not_released_but_started_again(stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2)
    run.begin()

    def play() -> None:
        run.servers[1].busy = True

    run.phase(0, play)
    events = [event for event in run.events if event.startswith(("server 1", "workers"))]
    restart = events.index("server 1: start 1")
    assert events[restart - 3 : restart] == [
        "server 1: /pause_generation abort",
        "server 1: /flush_cache",
        "workers: ask [0]",
    ]


def test_a_lost_server_is_left_out_at_once_and_taken_back_by_the_next_publish(stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2, colocated=False)
    run.begin()
    assert run.of_run.take_counters() == {"servers/lost": 0.0, "servers/back": 0.0}

    def play() -> None:
        run.servers[1].die()
        assert not run.pool.lost_all(), "the other one lives, nobody waits"

    assert run.phase(0, play) == [
        "publish 0 to [0, 1]",
        "workers: ask [0, 1]",
        "sampling",
        "workers: ask [0]",  # before the new process can answer, since it has other weights
        "server 1: start 1",
    ]
    assert run.phase(1) == ["publish 1 to [0, 1]", "workers: ask [0, 1]", "sampling"]
    assert run.of_run.take_counters() == {"servers/lost": 1.0, "servers/back": 1.0}
    assert run.servers[1].generation == 1


def test_a_colocated_server_that_comes_back_is_awaited_and_gives_its_memory_back(stage: Callable[..., Stage]) -> None:
    run = stage()
    run.begin()

    def play() -> None:
        run.servers[0].die()
        assert run.pool.lost_all()

    events = run.phase(0, play)
    assert events[events.index("sampling") + 1 :] == ["workers: ask []", "start 1", *RELEASE]
    assert run.phase(1)[:4] == [
        "/resume_memory_occupation weights",
        "publish 1 to [0]",
        "/resume_memory_occupation kv_cache",
        "workers: ask [0]",
    ]


@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_that_were_all_lost_get_the_present_version(stage: Callable[..., Stage], staleness: int) -> None:
    run = stage(replicas=2, colocated=False, staleness=staleness)
    run.begin()

    def play() -> None:
        for server in run.servers:
            server.die()
        assert run.pool.lost_all()
        run.weights.sync(5)
        run.pool.recover()
        assert not run.pool.lost_all()

    events = run.phase(5, play)
    assert events[events.index("sampling") + 1 :] == [
        "workers: ask [1]",
        "server 0: start 1",
        "workers: ask []",
        "server 1: start 1",
        "publish 5 to [0, 1]",
        "workers: ask [0, 1]",
    ]


def test_an_outage_during_training_is_still_reported_after_a_publish(
    stage: Callable[..., Stage],
) -> None:
    run = stage(colocated=False, staleness=1)
    run.begin()
    run.phase(0)
    run.servers[0].die()  # while the trainer trains, and conversations go on
    run.phase(1)
    assert run.events == ["workers: ask []", "server 0: start 1", "publish 1 to [0]", "workers: ask [0]", "sampling"]
    assert run.pool.lost_all()


def test_a_server_lost_in_a_publish_is_left_out_and_the_others_sample(stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2, colocated=False)
    run.begin()
    run.weights.failures = [{0}]
    assert run.phase(0) == [
        "publish 0 to [0, 1]",
        "workers: ask [1]",
        "server 0: start 1",
        "workers: ask [1]",
        "sampling",
    ]


def test_a_restarted_server_gets_no_requests_before_it_has_the_weights(stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2, colocated=False, staleness=1)
    run.begin()

    def play() -> None:
        run.servers[1].die()
        assert not run.pool.lost_all()

    run.phase(0, play)
    run.weights.failures = [{0, 1}]
    assert run.phase(1) == [
        "publish 1 to [0, 1]",
        "workers: ask []",  # and not [1], which is running again
        "server 0: start 1",
        "server 1: start 2",
        "publish 1 to [0, 1]",
        "workers: ask [0, 1]",
        "sampling",
    ]


def test_a_version_that_reaches_no_server_ends_the_run(stage: Callable[..., Stage]) -> None:
    run = stage(colocated=False)
    run.begin()
    run.weights.failures = [{0}] * 9
    with pytest.raises(PublishError):
        run.phase(0)
    assert [event for event in run.events if event.startswith("publish")] == ["publish 0 to [0]"] * 3


def test_a_server_that_cannot_be_restarted_ends_the_run(
    stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    run = stage(replicas=2, colocated=False)
    run.begin()
    assert capsys.readouterr().out == "engine: SGLang servers have a KV cache of at least 4096 tokens each\n"
    run.phase(0)
    run.servers[0].die()
    run.servers[0].starts = False
    for _ in range(9):
        assert not run.pool.lost_all(), "the other one lives"
    with pytest.raises(
        RunStopped, match=r"server 0 still fails after 3 restarts: it ended with code 1; (.|\n)*out of memory"
    ):
        run.phase(1)
    assert run.servers[0].generation == 3
    printed = capsys.readouterr().err.splitlines()
    assert (
        printed[0]
        == "megatron-collab: engine: SGLang server 0 is taken out of use and restarted: it ended with code -9"
    )
    assert len(printed) == 3


def test_only_consecutive_failures_count(stage: Callable[..., Stage]) -> None:
    run = stage(colocated=False)
    run.begin()
    for version in range(6):
        run.phase(version)
        run.servers[0].die()
        assert run.pool.lost_all()
    assert run.servers[0].generation == 6


def test_the_first_start_of_a_server_is_not_retried(stage: Callable[..., Stage]) -> None:
    run = stage()
    run.servers[0].die()
    with pytest.raises(ServerError, match="SGLang server 0: it ended with code -9; the end of"):
        run.pool.begin()


@pytest.mark.processes
def test_all_ranks_stop_if_a_server_cannot_be_kept_alive(tmp_path: Path) -> None:
    """Rank 0 polls the servers and shares the result of each poll with the other rank."""
    raised = run_ranks(lose_a_server_for_good, 2, tmp_path)
    assert all("server 0 still fails after 3 restarts" in reason for reason in raised)


def lose_a_server_for_good(folder: Path) -> str:
    """Run one of two ranks; rank 0's server comes back only once. Returns the reason of the stop."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    leads = dist.get_rank() == 0
    run = Stage(folder / str(dist.get_rank()), replicas=1, colocated=True, staleness=0)
    if leads:
        run.begin()
    else:
        run.of_run.pool = None
        run.weights.publish = lambda version: None  # type: ignore[method-assign]

    def lose() -> None:
        if leads:
            run.servers[0].die()
            assert run.pool.lost_all()

    reason = "nothing was raised"
    try:
        run.phase(0, lose)
        run.servers[0].starts = False
        run.phase(1, lose)
        run.phase(2)
    except RunStopped as error:
        reason = str(error)
    finally:
        run.servers[0].stop()
    dist.destroy_process_group()
    return reason


def test_idle_shares_of_a_step(monkeypatch: pytest.MonkeyPatch, stage: Callable[..., Stage]) -> None:
    run = stage(replicas=2)
    seconds = {"seconds/evaluation": 2.0, "seconds/rollout": 4.0, "seconds/update": 4.0}
    urls = [server.url for server in run.servers]
    answers: list[list[dict[str, list[tuple[float, float]]]] | None] = [
        [{urls[0]: [(80.0, 95.0)]}, {urls[0]: [(94.0, 97.0)]}, {"http://of.another.model": [(90.0, 100.0)]}],
        None,
    ]
    monkeypatch.setattr("megatron_collab.rollout.servers.time.time", lambda: 100.0)
    assert run.of_run.idle_shares(seconds) == {"idle/trainer": 0.6}, "on another rank than 0"
    run.of_run.workers = SimpleNamespace(busy_since=lambda begin, seconds: begin == 90.0 and answers.pop(0))  # type: ignore[assignment]
    expected = {"idle/trainer": 0.6, "idle/servers": 1 - 7 / 20}  # from 90 to 97 of the 10 s until 100, of one of two
    assert run.of_run.idle_shares(seconds) == pytest.approx(expected)
    assert run.of_run.idle_shares(seconds) == {"idle/trainer": 0.6}, "a worker did not answer"
    assert run.of_run.idle_shares({}) == {}
